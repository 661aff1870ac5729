"""SwitchBack's kernels compiled to machine code, without a GPU: integer tensor cores, wide accesses, nothing spilled.

For compute capability 8.0, 9.0 and 10.0, like ``test_compile.py``. bf16 by default; the other types are slow tests.
"""

from __future__ import annotations

import os
import re

import pytest

pytest.importorskip("triton", minversion="3.6")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from test_compile import TARGETS, Compiled, floating

from ckpt8.nn import triton

POINTERS = {"a": "*i8", "b": "*i8", "codes": "*i8", "states": "*fp32", "row_states": "*fp32", "state": "*fp32"}
POINTERS |= {"largest": "*i32"}
ROUNDED = {"div.rn.f32", "mul.rn.f32", "add.rn.f32", "add.rn.f32.f16", "cvt.rn.f16x2.f32", "cvt.rn.f16.f32"}
EXACT = r"(abs|neg|min|max|selp|mov|setp\.\w+)\.f(16|32)|cvt\.rn\.f32\.s32|cvt\.f32\.f16|cvt\.rzi\.s(8|16|32)\.f32"
SLOW = [
    pytest.param(*case, marks=pytest.mark.slow) for case in (("*i16", 80), ("*i16", 100), ("*fp32", 90), ("*fp16", 90))
]
KINDS = pytest.mark.parametrize(("kind", "capability"), [("*i16", 90), *SLOW])


def compiled(kernel, kinds, options, capability, folder, even=True, padded=("padded",)) -> Compiled:
    """``options`` hold constants as well. All sizes are multiples of 16, or those ``padded``."""
    flags = {name: value for name, value in options.items() if name not in kernel.arg_names}
    multiples = kernel.arg_names if even else padded
    return Compiled(kernel, {**POINTERS, **kinds}, options, capability, folder, flags, multiples)


def assert_sound(kernel: Compiled, registers: int = 128) -> None:
    """Nothing is spilled, nothing is fused, approximate or flushed."""
    assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0
    assert 0 < kernel.usage["REG"] <= registers
    assert {operation for operation in floating(kernel) if not re.fullmatch(EXACT, operation)} <= ROUNDED


def share(kernel: Compiled, kind: str, least: int) -> float:
    """The share of bytes that go by accesses of at least ``least`` bytes."""
    accesses = kernel.accesses(kind)
    total = sum(size * times for size, times in accesses.items())
    return sum(size * times for size, times in accesses.items() if size >= least) / total


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("columns", [384, 8192])
def test_codes_by_row(tmp_path, kind, columns, capability):
    options = triton.row_options(columns)
    kernel = compiled(triton.rows_kernel, {"x": kind}, options, capability, tmp_path)
    assert_sound(kernel)
    assert "div.rn.f32" in floating(kernel)
    assert {"add.rn.f32", "sub.rn.f32"} & floating(kernel)
    assert share(kernel, "ld", 16) == 1
    assert share(kernel, "st", 8) > 0.7
    kernel = compiled(triton.rows_kernel, {"x": kind}, {**options, "codes": None}, capability, tmp_path)
    assert_sound(kernel)
    assert share(kernel, "ld", 16) == 1


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("transposed", [False, True])
def test_codes_of_a_tensor(tmp_path, kind, transposed, capability):
    options = {**triton.OPTIONS, "transposed": transposed, "tile": triton.TILE}
    kernel = compiled(triton.tiles_kernel, {"x": kind}, options, capability, tmp_path)
    assert_sound(kernel)
    assert "div.rn.f32" in floating(kernel)
    assert {"add.rn.f32", "sub.rn.f32"} & floating(kernel)
    assert share(kernel, "ld", 16) > 0.8
    assert share(kernel, "st", 8) == 1


def product(kind, bias, rows, capability, folder, *, even=True) -> Compiled:
    blocks = triton.matmul_blocks(rows)
    options = {**triton.MATMUL_OPTIONS, **blocks, "group": triton.GROUP}
    if bias is None:
        options["bias"] = None
    return compiled(triton.matmul_kernel, {"y": kind, "bias": bias}, options, capability, folder, even, ("columns",))


@pytest.mark.by_default("64-*i16-90")
@KINDS
@pytest.mark.parametrize("rows", [8, 64, 4096])
def test_products(tmp_path, kind, rows, capability):
    kernel = product(kind, kind, rows, capability, tmp_path)
    multiply = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[capability if rows > 16 else 80]
    instructions = set(re.findall(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b(?!\.commit)", kernel.ptx))
    assert instructions == {multiply}
    assert re.search(r"s32\.s8\.s8|kind::i8", kernel.ptx)
    assert_sound(kernel, registers=255)
    assert len(re.findall(r"cp\.async\.cg\.shared\.global", kernel.ptx)) >= 4
    assert share(kernel, "st", 8) == 1
    # What the smallest of these devices has for one program.
    assert kernel.shared <= 160 * 1024


@pytest.mark.slow
@TARGETS
@pytest.mark.parametrize("rows", [8, 4096])
def test_products_of_any_size(tmp_path, rows, capability):
    """Rows and outputs that are no multiple of anything, no bias."""
    kernel = product("*fp32", None, rows, capability, tmp_path, even=False)
    assert_sound(kernel, registers=255)
    assert len(re.findall(r"cp\.async\.cg\.shared\.global", kernel.ptx)) >= 4
