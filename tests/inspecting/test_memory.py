"""How much of a checkpoint a survey, a readiness report and a comparison hold at a time, however large it is."""

from __future__ import annotations

import sys

import pytest
import torch
from memory_kit import run_measured

import ckpt8

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

WIDTH, LAYERS = 3072, 4

INSPECT = """from pathlib import Path
import ckpt8.inspecting.diff
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.readiness import inspect_readiness
torch.zeros(1).half().float().sum()
"""


@pytest.fixture(scope="module")
def runs(scratch):
    """300 MB of weights and moments each; one weight of the second lies transposed in memory."""
    found = {}
    for name in ("first", "second"):
        weights = {f"{k}.weight": torch.randn(WIDTH, WIDTH) for k in range(LAYERS)}
        moments = [(torch.randn(WIDTH, WIDTH), torch.rand(WIDTH, WIDTH)) for _ in range(LAYERS // 2)]
        state = {k: {"exp_avg": m, "exp_avg_sq": v} for k, (m, v) in enumerate(moments)}
        if name == "second":
            weights["1.weight"] = weights["1.weight"].t()
        found[name] = scratch / f"{name}.pt"
        groups = [{"lr": 1e-3, "params": list(state)}]
        torch.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, found[name])
    found["packed"] = scratch / "second.ckpt8"
    ckpt8.compress(found["second"], found["packed"], stats=False)
    return found


COMPARE = """
compared = ckpt8.diff(sys.argv[1], sys.argv[2], threads=2)
found = {"changed": len(compared.changed), "tensors": len(compared.tensors)}
"""
PAIRS = [("first", "second", 8), ("second", "packed", 8), ("packed", "packed", 0)]


@pytest.mark.parametrize(("a", "b", "changed"), PAIRS)
def test_a_comparison(runs, a, b, changed):
    found = run_measured(INSPECT, COMPARE, runs[a], runs[b])
    assert (found["changed"], found["tensors"]) == (changed, 8)
    assert found["extra"] < 300e6


REPORTS = {
    "survey": ("inspect_checkpoint(Path(sys.argv[2]), full=True)['sample']['of']", 100e6),
    "readiness": ("inspect_readiness(Path(sys.argv[1]), full=True, original=Path(sys.argv[2]))['looked_at']", 120e6),
}


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_on_every_element(runs, report):
    """One tensor takes 38 MB."""
    code, bound = REPORTS[report]
    found = run_measured(INSPECT, f"\nfound = {{'elements': {code}}}\n", runs["packed"], runs["second"])
    assert found["elements"] == (LAYERS + 2 * (LAYERS // 2)) * WIDTH**2
    assert found["extra"] < bound
