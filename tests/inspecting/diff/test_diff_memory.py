"""A comparison holds at most 300 MB above what importing takes, whatever the size of the checkpoints."""

from __future__ import annotations

import pytest
import torch
from memory_kit import run_measured

import ckpt8

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 3072, 4
BOUND = 300e6

SETUP = """import ckpt8.inspecting.diff
"""
CODE = """
compared = ckpt8.diff(sys.argv[1], sys.argv[2], threads=2)
found = {"changed": len(compared.changed), "tensors": len(compared.tensors)}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """300 MB of weights and moments each; one weight of the second lies transposed in memory."""
    folder = tmp_path_factory.mktemp("runs")
    found = {}
    for name in ("first", "second"):
        weights = {f"{k}.weight": torch.randn(WIDTH, WIDTH) for k in range(LAYERS)}
        state = {
            k: {"exp_avg": torch.randn(WIDTH, WIDTH), "exp_avg_sq": torch.rand(WIDTH, WIDTH)}
            for k in range(LAYERS // 2)
        }
        if name == "second":
            weights["1.weight"] = weights["1.weight"].t()
        found[name] = folder / f"{name}.pt"
        groups = [{"lr": 1e-3, "params": list(state)}]
        torch.save({"model": weights, "optimizer": {"state": state, "param_groups": groups}}, found[name])
    found["packed"] = folder / "first.ckpt8"
    ckpt8.compress(found["first"], found["packed"], stats=False)
    yield found
    for path in found.values():
        path.unlink()


@pytest.mark.parametrize(
    ("a", "b", "changed"), [("first", "second", 8), ("first", "packed", 8), ("packed", "packed", 0)]
)
def test_memory_is_bounded(runs, a, b, changed):
    found = run_measured(SETUP, CODE, runs[a], runs[b])
    assert (found["changed"], found["tensors"]) == (changed, 8)
    assert found["extra"] < BOUND
