"""resume holds the optimizer state that it allocates and at most 200 MB more."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import ckpt8

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 3584, 4
BOUND = 200e6

SCRIPT = """
import json, sys, threading
import torch
import ckpt8, ckpt8.optim, ckpt8.resuming.run

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

path, width, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
optimizer = (ckpt8.optim if sys.argv[4] == "packed" else torch.optim).AdamW(model.parameters())
from ckpt8.startup import settle

settle(kernels=True)  # libraries are not what is bounded
before = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
ckpt8.resume(path, model, optimizer)
state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
print(json.dumps({"extra": memory("VmHWM") - before - state, "state": state}))
"""


@pytest.mark.parametrize("into", ["torch", "packed"])
@pytest.mark.parametrize("form", ["raw", "flash"])
def test_memory_is_bounded(tmp_path, form, into):
    """600 MB of weights and state."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    path = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    assert path.stat().st_size > 5e8
    if form == "flash":
        ckpt8.compress(path, stats=False)
        path = path.with_suffix(".ckpt8")
    command = [sys.executable, "-c", SCRIPT, str(path), str(WIDTH), str(LAYERS), into]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found["state"] > (3e8 if into == "torch" else 1e8)
    assert found["extra"] < BOUND
