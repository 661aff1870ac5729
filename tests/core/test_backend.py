"""Which backend runs a codec, and that triton is imported only where its kernels run."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch

from ckpt8.codecs import CODECS, codec_class
from ckpt8.core import backend
from ckpt8.core.errors import UsageError

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 1)
_FAULT_OF_TRITON = backend._fault_of_triton.__wrapped__


@pytest.fixture(autouse=True)
def _triton(monkeypatch):
    """As if triton were installed, and compiling."""
    monkeypatch.setattr(backend, "_fault_of_triton", lambda: None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_the_device_decides_where_a_request_can_be_met(monkeypatch):
    assert backend.resolve(None, CPU) == "torch"
    assert backend.resolve(None, CUDA) == "triton"
    assert backend.resolve(None, torch.device("mps")) == "torch"
    assert backend.resolve(None) == "torch"
    assert backend.resolve("torch", CUDA) == "torch"
    assert backend.resolve("triton", CUDA) == "triton"
    monkeypatch.setattr(backend, "_fault_of_numba", lambda **_: "needs the package numba")
    assert backend.resolve(None, CPU, 1 << 20) == "torch"
    for name, device, said in (
        *(("abacus", device, "'abacus' does not exist") for device in (CPU, CUDA, None)),
        ("triton", CPU, "CUDA device, not on 'cpu'"),
        ("triton", None, "no kernels for this codec"),
        ("numba", CPU, "'numba' needs the package numba; use 'torch'"),
        ("numba", CUDA, "'numba' needs tensors on the CPU, not on 'cuda:1'"),
        ("numba", None, "no kernels for this codec"),
    ):
        with pytest.raises(UsageError, match=said):
            backend.resolve(name, device)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert backend.resolve(None, CPU) == "torch"
    assert backend.resolve("triton", CPU) == "triton"


def test_a_small_checkpoint_waits_neither_for_torch_nor_for_a_compiler(monkeypatch):
    small, large = backend.LEAST_FOR_NUMBA - 1, backend.LEAST_FOR_NUMBA
    monkeypatch.setattr(backend, "_fault_of_numba", lambda **_: None)
    assert [backend.for_arrays(size, writes=True) for size in (small, large)] == ["torch", "numba"]
    for compiled, expected in ((True, "numba"), (False, "torch")):
        monkeypatch.setattr(backend, "_is_compiled", lambda *, writes, compiled=compiled: compiled and writes)
        with monkeypatch.context() as patch:
            modules = {name: module for name, module in sys.modules.items() if name != "torch"}
            patch.setattr(backend, "sys", SimpleNamespace(modules=modules))
            assert backend.for_arrays(small, writes=True) == expected
            assert backend.for_arrays(small) == "torch"
            assert backend.for_arrays(large) == "numba"


@pytest.mark.parametrize(
    ("installed", "fault"),
    [
        (None, "cannot be imported"),
        ("3.2.0", "needs triton 3.6 or newer, not 3.2.0"),
        ("3.5.1+git0123", "3.6 or newer"),
        ("3.6.0", None),
        ("3.10.0a1", None),
        ("4.0.0", None),
    ],
)
def test_triton_has_to_be_new_enough(monkeypatch, installed, fault):
    monkeypatch.setattr(backend, "_fault_of_triton", _FAULT_OF_TRITON)
    monkeypatch.setitem(sys.modules, "triton", installed and SimpleNamespace(__version__=installed))
    assert backend.resolve(None, CPU) == "torch"
    if fault is None:
        assert backend.resolve(None, CUDA) == backend.resolve("triton", CUDA) == "triton"
        return
    assert backend.resolve(None, CUDA) == "torch"
    with pytest.raises(UsageError, match=fault):
        backend.resolve("triton", CUDA)


@pytest.mark.parametrize("codec_id", [codec_id for codec_id, _ in CODECS])
def test_every_codec_says_what_it_cannot_run(codec_id):
    codec = codec_class(codec_id)()
    with pytest.raises(UsageError, match="triton"):
        codec.encode(torch.zeros(40), backend="triton")


ROUND_TRIPS = """
import sys
import torch
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.split24 import Split24
from ckpt8.core.tensors import DType, Role, TensorSpec
x = torch.ones({numel})
for codec in (Split24(), Companded8(), Companded8(signed=False, Q=255)):
    assert torch.equal(codec.decode(codec.encode(x), TensorSpec("x", Role.OTHER, DType.FLOAT32, ({numel},))), x)
kernels = [name for name in sys.modules if name.startswith("ckpt8.codecs.") and name.endswith(".numba")]
"""
LARGE, SMALL = ROUND_TRIPS.format(numel=1 << 17), ROUND_TRIPS.format(numel=(1 << 17) - 1)


HIDDEN = "import sys; sys.modules[{!r}] = None  # importing it fails\n"


def test_nothing_needs_triton_or_numba_whose_import_small_tensors_are_not_worth(run_program, tmp_path):
    run_program(HIDDEN.format("triton") + SMALL + "assert not kernels and 'numba' not in sys.modules")
    run_program(HIDDEN.format("numba") + LARGE + "assert not kernels, kernels", HOME=tmp_path, XDG_CACHE_HOME="")
    run_program(LARGE + "assert not kernels, kernels", NUMBA_DISABLE_JIT="1")


@pytest.mark.slow
def test_large_tensors_take_numba_whose_kernels_need_no_place_to_be_kept(run_program, tmp_path):
    pytest.importorskip("numba", reason="numba is not installed")
    (tmp_path / "file").write_bytes(b"")
    run_program(LARGE + "assert len(kernels) == 2, kernels", NUMBA_CACHE_DIR=tmp_path / "file", HOME=tmp_path)
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
