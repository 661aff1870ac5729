"""``--full`` holds little of a checkpoint at a time, however its tensors lie in memory, and is not slow at it."""

import json
import subprocess
import sys

import pytest
import torch

import ckpt8

pytestmark = pytest.mark.slow

BOUND = 120e6

SCRIPT = """
import json, sys
from pathlib import Path
import torch
from ckpt8.inspect.readiness.run import inspect_readiness
from ckpt8.inspect.readiness import casting, number_formats, verdicts

def memory(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(field)) * 1024

torch.zeros(1).half().float().sum()
from ckpt8.startup import settle

settle(kernels=True)  # libraries are not what is bounded
before = memory("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
path, original = map(Path, sys.argv[1:])
report = inspect_readiness(path, full=True, original=original)
print(json.dumps({"extra": memory("VmHWM") - before, "looked_at": report["looked_at"]}))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory(tmp_path):
    """200 MB in two tensors, one of them transposed."""
    tensors = {"wide": torch.randn(5000, 5000), "turned": torch.randn(5000, 5000).t()}
    source, packed = tmp_path / "large.pt", tmp_path / "large.ckpt8"
    torch.save({"model": tensors}, source)
    ckpt8.compress(source, packed, stats=False)
    command = [sys.executable, "-c", SCRIPT, str(packed), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["looked_at"] == 50_000_000
    assert found["extra"] < BOUND
