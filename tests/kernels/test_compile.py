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
from triton.runtime.jit import JITFunction  # noqa: E402

from ckpt8.codecs.companded8 import triton as companded8  # noqa: E402
from ckpt8.codecs.lattice import triton as lattice  # noqa: E402
from ckpt8.codecs.lattice.triton import SYMBOL_BLOCK  # noqa: E402
from ckpt8.codecs.rclog import triton as rclog  # noqa: E402
from ckpt8.codecs.split24 import triton as split24  # noqa: E402
from ckpt8.codecs.triton_blocks import BLOCK, OPTIONS  # noqa: E402
from ckpt8.codecs.vscaled import triton as vscaled  # noqa: E402

PER_THREAD = BLOCK // (32 * OPTIONS["num_warps"])
PLANES = {"weights": "*fp32", "exponent": "*u8", "mantissa": "*u8", "rho": "*i8", "flags": "*i32"}
MOMENTS = [{"signed": True, "fourth_root": False}, {"signed": False, "fourth_root": False}]
MOMENTS += [{"signed": False, "fourth_root": True}]
TARGETS = pytest.mark.parametrize(
    "capability", [90, *(pytest.param(each, marks=pytest.mark.slow) for each in (80, 100))]
)
KINDS = pytest.mark.parametrize(("kind", "size"), [("*fp32", 4), ("*i16", 2)])
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
@KINDS
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


# --- archive ----------------------------------------------------------------------------------------------------

SYMBOLS_PER_THREAD = SYMBOL_BLOCK // (32 * OPTIONS["num_warps"])
TYPES = {"codes": "*i32", "flags": "*i32", "rows": "*i16", "columns": "*i16", "factors": "*i16", "sums": "*i64"}
TYPES |= {"second": "*fp32", "original": "*fp32", "origin": "u32", "salt": "u32"}
INTEGERS = ("S", "numbers", "skipped", "length", "across", "lowest", "highest")
NUMBERS = ("step", "reciprocal", "k", "bias1", "root_bias2", "eps", "share", "reach", "most")
TYPES |= {**dict.fromkeys(INTEGERS, "i32"), **dict.fromkeys(NUMBERS, "fp32")}
CHOICES = {"masked", "block", "tall", "wide"}
TILE = {"tall": rclog.ROWS, "wide": rclog.COLUMNS}
ARCHIVE_CASES = pytest.mark.parametrize(
    ("capability", "masked"),
    [(90, False), (90, True), *(pytest.param(each, False, marks=pytest.mark.slow) for each in (80, 100))],
)
ARCHIVE_KERNELS = {
    f"{module.__name__.split('.')[-2]} {name.removesuffix('_kernel')}": found
    for module in (lattice, rclog, vscaled)
    for name, found in vars(module).items()
    if name.endswith("_kernel") and isinstance(found, JITFunction)
}


def archive(name, kind, capability, folder, **constants) -> Compiled:
    """The kernel of that name for elements of a ``kind``."""
    types = {**TYPES, "weights": kind, "moments": kind}
    return Compiled(ARCHIVE_KERNELS[name], types, {**constants, "block": SYMBOL_BLOCK}, capability, folder)


def assert_wide_parts(kernel, direction, size, gathered=0) -> None:
    """A thread moves its elements and symbols in one access each, up to 16 bytes; it gathers factors of 2 bytes."""
    elements, symbols = ("ld", "st") if direction == "encode" else ("st", "ld")
    assert kernel.accesses(symbols)[16] >= 1
    assert kernel.accesses(elements)[size * SYMBOLS_PER_THREAD] >= 1
    assert kernel.accesses("ld")[2] == gathered
    flags = direction == "encode" and not gathered
    assert sum(times for width, times in kernel.accesses("st").items() if width < 8) == flags


def assert_floors_are_compared(kernel, count) -> None:
    """CUDA's floor takes a subnormal number for zero; a comparison with the number itself mends that."""
    assert len(re.findall(r"\bcvt\.rmi(?:\.ftz)?\.f32\.f32\b", kernel.ptx)) == count
    if "cvt.rmi.ftz" in kernel.ptx:
        assert len(re.findall(r"\bsetp\.[gl]t\.f32\b", kernel.ptx)) >= count


@pytest.mark.slow
@ARCHIVE_CASES
@KINDS
@pytest.mark.parametrize("direction", ["encode", "decode"])
@pytest.mark.parametrize("codec", ["lattice", "vscaled", "rclog", "rclog with columns"])
def test_codecs(tmp_path, codec, direction, kind, size, masked, capability):
    name, _, columns = codec.partition(" with ")
    given = {"columns": None} if codec == "rclog" else {}
    kernel = archive(f"{name} {direction}", kind, capability, tmp_path, masked=masked, **given)
    if name == "vscaled" and triton.__version__.startswith("3.6."):
        # Its assembler keeps two words on the stack, with registers to spare.
        kernel.usage["STACK"] -= 8 * (kernel.usage["STACK"] == 8)
    assert_nothing_is_spilled(kernel, masked)
    encodes = direction == "encode"
    assert_rounded_once(kernel, divides=name == "vscaled" or (name == "lattice" and encodes))
    assert_floors_are_compared(kernel, SYMBOLS_PER_THREAD * encodes * (3 if name == "vscaled" else 1))
    assert name != "vscaled" or "sqrt.rn.f32" in floating(kernel)
    assert name != "rclog" or encodes or floating(kernel) <= {"mov.f32"}
    if not masked:
        gathered = SYMBOLS_PER_THREAD * (1 + bool(columns)) if name == "rclog" else 0
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
    kernel = archive("rclog sums", kind, capability, tmp_path, **TILE, **given)
    assert_nothing_is_spilled(kernel, masked=False)
    assert floating(kernel) <= {"mov.f32"}
    # Neighbours in a warp read neighbours in a row; a result is added once for a row or a column.
    assert kernel.accesses("ld")[size] >= rclog.ROWS * rclog.COLUMNS // (32 * OPTIONS["num_warps"])
    assert kernel.ptx.count("atom.global") + kernel.ptx.count("red.global") == 2


@pytest.mark.slow
@ARCHIVE_CASES
def test_means_of_rclog(tmp_path, masked, capability):
    kernel = archive("rclog means", "*fp32", capability, tmp_path, masked=masked)
    assert_nothing_is_spilled(kernel, masked)
    assert not floating(kernel)


@pytest.mark.parametrize("name", ARCHIVE_KERNELS)
def test_one_compiled_kernel_serves_every_tensor(name):
    """No number of a codec is a constant, and none is looked at for being 1 or a multiple of 16."""
    kernel = ARCHIVE_KERNELS[name]
    assert {param.name for param in kernel.params if param.is_constexpr} <= CHOICES
    integers = {*INTEGERS, "origin", "salt", "first", "count"}
    assert {param.name for param in kernel.params if not param.do_not_specialize}.isdisjoint(integers)
    assert {param.name for param in kernel.params} <= {*TYPES, *CHOICES, *integers, "weights", "moments"}
