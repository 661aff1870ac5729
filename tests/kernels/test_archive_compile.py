"""The kernels of the archive codecs compiled to machine code, without a GPU, like ``test_compile.py``."""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("triton", minversion="3.6")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

import triton
from test_compile import TARGETS, Compiled, assert_nothing_is_spilled, assert_rounded_once, floating
from triton.runtime.jit import JITFunction

from ckpt8.codecs.lattice import triton as lattice
from ckpt8.codecs.lattice.triton import SYMBOL_BLOCK
from ckpt8.codecs.rclog import triton as rclog
from ckpt8.codecs.triton_blocks import OPTIONS
from ckpt8.codecs.vscaled import triton as vscaled

PER_THREAD = SYMBOL_BLOCK // (32 * OPTIONS["num_warps"])
POINTERS = {"codes": "*i32", "flags": "*i32", "rows": "*i16", "columns": "*i16", "factors": "*i16", "sums": "*i64"}
POINTERS |= {"second": "*fp32", "original": "*fp32"}
INTEGERS = ("S", "numbers", "skipped", "length", "across", "lowest", "highest")
NUMBERS = ("step", "reciprocal", "k", "bias1", "root_bias2", "eps", "share", "reach", "most")
TYPES = {**POINTERS, **dict.fromkeys(INTEGERS, "i32"), **dict.fromkeys(NUMBERS, "fp32"), "origin": "u32", "salt": "u32"}
CHOICES = {"masked", "block", "tall", "wide"}
TILE = {"tall": rclog.ROWS, "wide": rclog.COLUMNS}
KINDS = pytest.mark.parametrize(("kind", "size"), [("*fp32", 4), ("*i16", 2)])
CASES = pytest.mark.parametrize(
    ("capability", "masked"),
    [(90, False), (90, True), *(pytest.param(each, False, marks=pytest.mark.slow) for each in (80, 100))],
)
KERNELS = {
    f"{module.__name__.split('.')[-2]} {name.removesuffix('_kernel')}": found
    for module in (lattice, rclog, vscaled)
    for name, found in vars(module).items()
    if name.endswith("_kernel") and isinstance(found, JITFunction)
}


def compiled(name, kind, capability, folder, **constants) -> Compiled:
    """The kernel of that name for elements of a ``kind``."""
    types = {**TYPES, "weights": kind, "moments": kind}
    return Compiled(KERNELS[name], types, {**constants, "block": SYMBOL_BLOCK}, capability, folder)


def assert_wide_parts(kernel, direction, size, gathered=0) -> None:
    """A thread moves its elements and symbols in one access each, up to 16 bytes; it gathers factors of 2 bytes."""
    elements, symbols = ("ld", "st") if direction == "encode" else ("st", "ld")
    assert kernel.accesses(symbols)[16] >= 1
    assert kernel.accesses(elements)[size * PER_THREAD] >= 1
    assert kernel.accesses("ld")[2] == gathered
    flags = direction == "encode" and not gathered
    assert sum(times for width, times in kernel.accesses("st").items() if width < 8) == flags


def assert_floors_are_compared(kernel, count) -> None:
    """CUDA's floor takes a subnormal number for zero; a comparison with the number itself mends that."""
    assert len(re.findall(r"\bcvt\.rmi(?:\.ftz)?\.f32\.f32\b", kernel.ptx)) == count
    if "cvt.rmi.ftz" in kernel.ptx:
        assert len(re.findall(r"\bsetp\.[gl]t\.f32\b", kernel.ptx)) >= count


@pytest.mark.slow
@CASES
@KINDS
@pytest.mark.parametrize("direction", ["encode", "decode"])
@pytest.mark.parametrize("codec", ["lattice", "vscaled", "rclog", "rclog with columns"])
def test_codecs(tmp_path, codec, direction, kind, size, masked, capability):
    name, _, columns = codec.partition(" with ")
    given = {"columns": None} if codec == "rclog" else {}
    kernel = compiled(f"{name} {direction}", kind, capability, tmp_path, masked=masked, **given)
    if name == "vscaled" and triton.__version__.startswith("3.6."):
        # Its assembler keeps two words on the stack, with registers to spare.
        kernel.usage["STACK"] -= 8 * (kernel.usage["STACK"] == 8)
    assert_nothing_is_spilled(kernel, masked)
    encodes = direction == "encode"
    assert_rounded_once(kernel, divides=name == "vscaled" or (name == "lattice" and encodes))
    assert_floors_are_compared(kernel, PER_THREAD * encodes * (3 if name == "vscaled" else 1))
    assert name != "vscaled" or "sqrt.rn.f32" in floating(kernel)
    assert name != "rclog" or encodes or floating(kernel) <= {"mov.f32"}
    if not masked:
        gathered = PER_THREAD * (1 + bool(columns)) if name == "rclog" else 0
        assert_wide_parts(kernel, direction, size, gathered)
    if not masked and name == "vscaled":
        # The second moments, and these as they were.
        assert kernel.accesses("ld")[16] == 1 + encodes + (not encodes or size == 4)


@pytest.mark.slow
@TARGETS
@KINDS
@pytest.mark.parametrize("columns", [False, True])
def test_sums_of_rclog(tmp_path, kind, size, columns, capability):
    given = {} if columns else {"rows": None}
    kernel = compiled("rclog sums", kind, capability, tmp_path, **TILE, **given)
    assert_nothing_is_spilled(kernel, masked=False)
    assert floating(kernel) <= {"mov.f32"}
    # Neighbours in a warp read neighbours in a row; a result is added once for a row or a column.
    assert kernel.accesses("ld")[size] >= rclog.ROWS * rclog.COLUMNS // (32 * OPTIONS["num_warps"])
    assert kernel.ptx.count("atom.global") + kernel.ptx.count("red.global") == 2


@pytest.mark.slow
@CASES
def test_means_of_rclog(tmp_path, masked, capability):
    kernel = compiled("rclog means", "*fp32", capability, tmp_path, masked=masked)
    assert_nothing_is_spilled(kernel, masked)
    assert not floating(kernel)


@pytest.mark.parametrize("name", KERNELS)
def test_one_compiled_kernel_serves_every_tensor(name):
    """No number of a codec is a constant, and none is looked at for being 1 or a multiple of 16."""
    kernel = KERNELS[name]
    assert {param.name for param in kernel.params if param.is_constexpr} <= CHOICES
    integers = {*INTEGERS, "origin", "salt", "first", "count"}
    assert {param.name for param in kernel.params if not param.do_not_specialize}.isdisjoint(integers)
    assert {param.name for param in kernel.params} <= {*TYPES, *CHOICES, *integers, "weights", "moments"}
