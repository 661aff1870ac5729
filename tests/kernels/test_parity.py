"""Triton's kernels give the bits of the reference: in its interpreter, and on a device if there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", minversion="3.6")
pytest.importorskip("numpy")


CODECS = ["test_codec_parity.py", "test_archive_parity.py"]
FILES = pytest.mark.parametrize("file", [*CODECS, "fused.py", "switchback.py"])
SLOW = [pytest.param(file, marks=pytest.mark.slow) for file in (*CODECS[1:], "fused.py", "switchback.py")]
"""Their kernels are compiled by default, and run on a device."""


def run(file: str, interpret: str, *under: str, cases: str = "slow or not slow") -> None:
    """Run the ``cases`` of a file of tests in a process of its own, ``under`` another program if need be.

    That one sees the borders of tensors only where torch does not keep memory for later.
    """
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-m", cases]
    result = subprocess.run(
        [*under, sys.executable, "-m", "pytest", *options, str(Path(__file__).with_name(file))],
        env={**os.environ, "TRITON_INTERPRET": interpret, "PARITY_BACKEND": "triton", "OMP_NUM_THREADS": "1"}
        | ({"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if under else {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "passed" in result.stdout
    assert "skipped" not in result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("file", [CODECS[0], *SLOW])
def test_the_interpreter_agrees_with_the_reference(file):
    """Slow cases vary constants of the kernels: numba's kernels run them, and a device."""
    run(file, "1", cases="not slow")


@pytest.mark.gpu
@FILES
def test_a_device_agrees_with_the_reference(file):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    run(file, "0")


@pytest.mark.gpu
@FILES
@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_a_device_touches_no_other_memory(file, tool):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("no compute-sanitizer")
    run(file, "0", sanitizer, "--tool", tool, "--error-exitcode", "9")
