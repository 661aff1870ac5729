"""How much memory a piece of code takes beyond what its process had before it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import torch

_SCRIPT = """
import json, sys
import torch
import ckpt8
from importlib.util import find_spec
from ckpt8.core.workers import settle

if find_spec("numba") is not None:
    import numba
    from ckpt8.core.numba import start
    numba.njit(lambda: 0)()
    start(writes=True)

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

torch.set_num_threads(1)
{setup}
settle()  # libraries are not what is bounded
before = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
{code}
print(json.dumps({{"extra": memory("VmHWM") - before, **found}}))
"""


def run_measured(setup: str, code: str, *arguments: object) -> dict[str, int]:
    """Run ``code`` after ``setup``; what it puts into the dict ``found``, and ``extra`` bytes at its peak."""
    command = [sys.executable, "-c", _SCRIPT.format(setup=setup, code=code), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def save_trained(path, width: int, layers: int) -> None:
    """Write a checkpoint of square layers and AdamW after a step: 12 bytes for each parameter."""
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
