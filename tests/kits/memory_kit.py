"""How much memory a piece of code takes beyond what its process had before it, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

_SCRIPT = """
import json, sys
import torch
import ckpt8
from ckpt8.core.startup import settle

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

torch.set_num_threads(1)
{setup}
settle(kernels=True)  # libraries are not what is bounded
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
