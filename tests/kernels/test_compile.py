"""Every kernel compiled to machine code, without a GPU: nothing spilled, wide accesses, each operation rounded once.

For compute capability 8.0, 9.0 and 10.0. The pointers are declared to be aligned as those of torch's allocator are.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", minversion="3.6")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ckpt8.codecs.companded8 import triton as companded8  # noqa: E402
from ckpt8.codecs.split24 import triton as split24  # noqa: E402
from ckpt8.codecs.triton_blocks import BLOCK, OPTIONS  # noqa: E402

PER_THREAD = BLOCK // (32 * OPTIONS["num_warps"])
PLANES = {"weights": "*fp32", "exponent": "*u8", "mantissa": "*u8", "rho": "*i8", "flags": "*i32"}
MOMENTS = [{"signed": True, "fourth_root": False}, {"signed": False, "fourth_root": False}]
MOMENTS += [{"signed": False, "fourth_root": True}]
TARGETS = pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 100))]
)
MASKED = pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])


class Compiled:
    """The PTX of a kernel, and what its machine code uses. ``types`` has those of its arguments without ``constants``.

    Pointers are aligned, and the integers that ``even`` names are multiples of 16.
    """

    def __init__(self, kernel, types, constants, capability: int, folder: Path, options=OPTIONS, even=()):
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        kinds = {name: "constexpr" if name in constants else types.get(name, "i32") for name in kernel.arg_names}
        aligned = [
            k for k, (name, kind) in enumerate(kinds.items()) if kind[0] == "*" or (kind == "i32" and name in even)
        ]
        attributes = {(k,): [["tt.divisibility", 16]] for k in aligned}
        source = ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
        self.ptx, self.shared = compiled.asm["ptx"], compiled.metadata.shared
        cubin = folder / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        self.usage = resource_usage(cubin)

    def accesses(self, kind: str) -> Counter[int]:
        """Global accesses of a thread, ``ld`` or ``st``, by their width in bytes."""
        found = re.findall(rf"\b{kind}\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)\b", self.ptx)
        assert len(found) == self.ptx.count(f"{kind}.global")
        return Counter(int(vector or 1) * int(bits) // 8 for vector, bits in found)


def resource_usage(cubin: Path) -> dict[str, int]:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    text = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}


def assert_nothing_is_spilled(kernel: Compiled, masked: bool) -> None:
    """A spilled register would lie in local memory, on the stack."""
    assert kernel.usage["STACK"] == kernel.usage["LOCAL"] == 0
    # With 64 registers, four programs share a multiprocessor. A masked one runs alone.
    assert 0 < kernel.usage["REG"] <= (128 if masked else 64)


def floating(kernel: Compiled) -> set[str]:
    """The instructions on floating point, those on pairs of numbers without their x2."""
    code = re.sub(r"//.*", "", kernel.ptx)
    return {
        found.replace("f32x2", "f32") for found in re.findall(r"\b[a-z]\w*(?:\.\w+)*\.[bt]?f\d+\w*(?:\.\w+)*", code)
    }


def assert_rounded_once(kernel: Compiled, *, divides: bool = True) -> None:
    """Nothing fused, approximate or flushed but what CUDA's floor takes: the code is such that this does not show."""
    assert not re.search(r"\bcall\b", kernel.ptx)
    rounding = {"add.rn.f32", "sub.rn.f32", "mul.rn.f32", "div.rn.f32", "sqrt.rn.f32"}
    exact = (
        r"(abs|neg|min|max|selp|mov|setp\.\w+)\.f32|cvt\.rmi(\.ftz)?\.f32\.f32|cvt\.rn\.f32\.[su]\d+|cvt\.rzi\.s32\.f32"
    )
    operations = floating(kernel)
    assert ("div.rn.f32" in operations) == divides
    assert {operation for operation in operations if not re.fullmatch(exact, operation)} <= rounding


def assert_wide(accesses: Counter[int], width: int, total: int, others: int = 0) -> None:
    """``total`` bytes go by accesses of at least ``width``; no more than ``others`` are narrower."""
    assert sum(size * times for size, times in accesses.items() if size >= width) == total
    assert sum(times for size, times in accesses.items() if size < width) <= others


def split(direction, levels, masked, capability, folder) -> Compiled:
    constants = {"levels": levels, "masked": masked, "block": BLOCK}
    return Compiled(getattr(split24, f"{direction}_kernel"), PLANES, constants, capability, folder)


@pytest.mark.slow
@TARGETS
@MASKED
@pytest.mark.parametrize("levels", [127, 7])
@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_split24(tmp_path, direction, levels, masked, capability):
    kernel = split(direction, levels, masked, capability, tmp_path)
    assert_nothing_is_spilled(kernel, masked)
    assert floating(kernel) <= {"mov.f32"}
    weights, planes, flags = ("ld", "st", 1) if direction == "encode" else ("st", "ld", 0)
    if not masked:
        assert_wide(kernel.accesses(weights), 16, 4 * PER_THREAD)
        assert_wide(kernel.accesses(planes), 16 if flags else 4, 3 * PER_THREAD, others=flags)
        assert flags or kernel.shared == 0  # no element changes its thread


def companded(direction, kind, moment, masked, capability, folder) -> Compiled:
    pointers = {"moments": kind, "codes": "*i8" if moment["signed"] else "*u8", "scales": "*u16", "flags": "*i32"}
    levels = 127 if moment["signed"] else 63 if moment["fourth_root"] else 255
    constants = {"levels": levels, "masked": masked, "block": BLOCK, **moment}
    return Compiled(getattr(companded8, f"{direction}_kernel"), pointers, constants, capability, folder)


@pytest.mark.slow
@TARGETS
@MASKED
@pytest.mark.parametrize("moment", MOMENTS, ids=str)
@pytest.mark.parametrize(("kind", "size"), [("*fp32", 4), ("*i16", 2)])
@pytest.mark.parametrize("direction", ["encode", "decode"])
def test_companded8(tmp_path, direction, kind, size, moment, masked, capability):
    kernel = companded(direction, kind, moment, masked, capability, tmp_path)
    assert_nothing_is_spilled(kernel, masked)
    assert_rounded_once(kernel)
    if masked:
        return
    if direction == "encode":
        assert_wide(kernel.accesses("ld"), 16, size * PER_THREAD)
        assert_wide(kernel.accesses("st"), 16, PER_THREAD, others=2)
    else:
        assert_wide(kernel.accesses("ld"), 16 // size, PER_THREAD, others=PER_THREAD * size // 16)
        assert_wide(kernel.accesses("st"), 16, size * PER_THREAD)
        assert kernel.shared == 0
