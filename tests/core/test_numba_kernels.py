"""Where compiled kernels are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import ckpt8

pytest.importorskip("numba", reason="numba is not installed")

WORK = """
import torch
from ckpt8.codecs.split24 import Split24
x = torch.randn(1000)
codec = Split24()
parts = [codec.encode(x, backend=backend) for backend in ("numba", "torch")]
assert all(torch.equal(parts[0][name], parts[1][name]) for name in parts[1])
import numba
print(repr(numba.config.CACHE_DIR))
"""


def kernels(folder):
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*.nb[ic]"))


@pytest.fixture
def run(tmp_path):
    """Have a process compile a kernel; what it prints. The package has nothing new beside its source."""

    def run(**environment):
        source = Path(ckpt8.__file__).parent
        before = kernels(source)
        env = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
        env |= {"HOME": str(tmp_path / "home"), **environment}
        done = subprocess.run([sys.executable, "-c", WORK], env=env, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert kernels(source) == before
        return done.stdout.strip()

    return run


@pytest.mark.skipif(sys.platform != "linux", reason="folders of Linux")
def test_kernels_are_in_the_cache_of_the_user(run, tmp_path):
    assert run() == "''"
    assert kernels(tmp_path / "home" / ".cache" / "ckpt8")
    assert run(XDG_CACHE_HOME=str(tmp_path / "xdg")) == "''"
    assert kernels(tmp_path / "xdg" / "ckpt8")


@pytest.mark.skipif(sys.platform != "linux", reason="folders of Linux")
def test_a_relative_cache_is_none(run, tmp_path):
    run(XDG_CACHE_HOME="somewhere")
    assert kernels(tmp_path / "home" / ".cache" / "ckpt8")


def test_kernels_are_where_the_user_has_those_of_numba(run, tmp_path):
    chosen = tmp_path / "chosen"
    assert run(NUMBA_CACHE_DIR=str(chosen)) == repr(str(chosen))
    assert kernels(chosen)
    assert not (tmp_path / "home").exists()
