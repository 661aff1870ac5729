"""``--full`` holds little of a checkpoint at a time, however its tensors lie in memory, and is not slow at it."""

import sys

import pytest
import torch
from memory_kit import run_measured

import ckpt8

pytestmark = pytest.mark.slow

BOUND = 120e6

SETUP = """from pathlib import Path
from ckpt8.inspecting.readiness import inspect_readiness
torch.zeros(1).half().float().sum()
"""
CODE = """
path, original = map(Path, sys.argv[1:])
report = inspect_readiness(path, full=True, original=original)
found = {"looked_at": report["looked_at"]}
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory(tmp_path):
    """200 MB in two tensors, one of them transposed."""
    tensors = {"wide": torch.randn(5000, 5000), "turned": torch.randn(5000, 5000).t()}
    source, packed = tmp_path / "large.pt", tmp_path / "large.ckpt8"
    torch.save({"model": tensors}, source)
    ckpt8.compress(source, packed, stats=False)
    found = run_measured(SETUP, CODE, packed, source)
    assert found["looked_at"] == 50_000_000
    assert found["extra"] < BOUND
