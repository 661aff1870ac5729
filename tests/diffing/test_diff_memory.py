"""A comparison holds at most 300 MB above what importing takes, whatever the size of the checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import ckpt8

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 3072, 4
BOUND = 300e6

SCRIPT = """
import json, sys
import torch
import ckpt8, ckpt8.diffing.run

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

torch.set_num_threads(1)
from ckpt8.startup import settle

settle(kernels=True)  # libraries are not what is bounded
before = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
found = ckpt8.diff(sys.argv[1], sys.argv[2], threads=2)
print(json.dumps({"extra": memory("VmHWM") - before, "changed": len(found.changed), "tensors": len(found.tensors)}))
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
    command = [sys.executable, "-c", SCRIPT, runs[a], runs[b]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (found["changed"], found["tensors"]) == (changed, 8)
    assert found["extra"] < BOUND
