"""Which backend runs a codec, and that triton is imported only where its kernels run."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ckpt8 import backend
from ckpt8.codecs import CODECS, codec_class
from ckpt8.errors import UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    """As if triton were installed, and compiling."""
    monkeypatch.setattr(backend, "_triton_is_installed", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_the_device_decides():
    assert backend.resolve(None, CPU) == "torch"
    assert backend.resolve(None, CUDA) == "triton"
    assert backend.resolve(None, torch.device("mps")) == "torch"
    assert backend.resolve(None) == "torch"
    assert backend.resolve("torch", CUDA) == "torch"
    assert backend.resolve("triton", CUDA) == "triton"


def test_requests_that_cannot_be_met(monkeypatch):
    for device in (CPU, CUDA, None):
        with pytest.raises(UsageError, match="'abacus' does not exist"):
            backend.resolve("abacus", device)
    with pytest.raises(UsageError, match="CUDA device, not on 'cpu'"):
        backend.resolve("triton", CPU)
    with pytest.raises(UsageError, match="no kernels for this codec"):
        backend.resolve("triton")
    monkeypatch.setattr(backend, "_triton_is_installed", lambda: False)
    with pytest.raises(UsageError, match="not installed"):
        backend.resolve("triton", CUDA)
    assert backend.resolve(None, CUDA) == "torch"


def test_the_interpreter_has_to_be_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.resolve(None, CPU) == "torch"
    assert backend.resolve("triton", CPU) == "triton"


@pytest.mark.parametrize("codec_id", [codec_id for codec_id, _ in CODECS])
def test_every_codec_says_what_it_cannot_run(codec_id):
    codec = codec_class(codec_id)()
    with pytest.raises(UsageError, match="triton"):
        codec.encode(torch.zeros(40), backend="triton")


def test_nothing_needs_triton_on_a_cpu():
    code = """
import sys
sys.modules["triton"] = None  # importing it fails
import torch
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.split24 import Split24
from ckpt8.tensors import DType, Role, TensorSpec
x = torch.ones(40)
for codec in (Split24(), Companded8(), Companded8(signed=False, Q=255)):
    assert torch.equal(codec.decode(codec.encode(x), TensorSpec("x", Role.OTHER, DType.FLOAT32, (40,))), x)
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True)
