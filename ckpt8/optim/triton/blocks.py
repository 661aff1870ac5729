"""The table of tensors on the device, and how kernels read and write a block of their values.

The table has one row of int64 for each tensor: addresses, size, and what the prologue computes. ``programs`` holds a
row number and a block number for each program. One launch handles all whole blocks, without masks, another the last,
short blocks of all tensors. A kernel gets the element types of its tensors as constants:

    weight       "fp32", "fp16" (with a master) or "bf16" (with a residual: split24 of R = ``levels``, or split32)
    grad         tl.float32, tl.float16, or tl.int16 for the bits of bf16
    first        Q of the codes of the first moment, 0 where it is fp32, None where there is none
    second       the same of the second moment;  ``fourth_root`` where p = 1/2
    aligned      whether every address is a multiple of 16

``tensor`` is a row of the table. ``count`` is the number of elements of a masked block, None for a whole one. Each
thread has eight neighbouring elements, 16 bytes of bf16, so that no element changes its thread.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt8.codecs.companded8.triton import compand_signed, expand_signed, expand_unsigned
from ckpt8.codecs.triton_blocks import widen
from ckpt8.optim.triton.arithmetic import compand_unsigned_randomly, join, split24, split32

PARAM, GRAD, PART = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
FIRST, SECOND = tl.constexpr(3), tl.constexpr(5)
"""The moments: fp32 values or codes, whose scales are in the next column."""

ABSENT = tl.constexpr(1 << 61)
"""The address of a gradient where there is none."""

STEP = tl.constexpr(7)
"""Address of the step counter, int64."""

NUMEL = tl.constexpr(8)

STREAM = tl.constexpr(9)
"""``stream_key(seed, index of the parameter)``."""

KEY = tl.constexpr(10)
"""``stream_key(seed, index, step)``, from the prologue."""

NOW = tl.constexpr(11)
"""The number of the step, from the prologue; 0 to skip the tensor, whose addresses no kernel then reads."""

COLUMNS = tl.constexpr(12)

SCALARS = tl.constexpr(12)
"""How many fp32 numbers the prologue writes for each tensor."""

GRADIENT_FACTOR = tl.constexpr(0)
"""The first of them; it multiplies gradients."""

CHUNK = tl.constexpr(256)
"""How many partial sums a program reads at once."""

BLOCK = 1024
"""Elements of a program: 8 for each of its 128 threads."""

OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""How the kernels over blocks are compiled."""


@triton.jit
def offsets(block: tl.constexpr):
    """Offsets in a block, as rows of 32; a thread has 8 neighbours."""
    column = tl.max_contiguous(tl.arange(0, 32), 8)
    return tl.arange(0, block // 32)[:, None] * 32 + column[None, :]


@triton.jit
def address(tensor, column: tl.constexpr, kind: tl.constexpr, aligned: tl.constexpr):
    """A pointer to elements of ``kind``."""
    pointer = tl.load(tensor + column).to(tl.pointer_type(kind))
    if aligned:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def scalar(numbers, which: tl.constexpr):
    """One of the fp32 scalars of a tensor."""
    return tl.load(numbers + which)


@triton.jit
def read(tensor, column: tl.constexpr, kind: tl.constexpr, start, count, block: tl.constexpr, aligned: tl.constexpr):
    """The values of a block; zero beyond ``count``."""
    at = offsets(block)
    pointer = address(tensor, column, kind, aligned) + start + at
    return tl.load(pointer) if count is None else tl.load(pointer, at < count, 0)


@triton.jit
def write(
    tensor, column: tl.constexpr, kind: tl.constexpr, start, count, values, block: tl.constexpr, aligned: tl.constexpr
):
    """Store the values of a block."""
    at = offsets(block)
    pointer = address(tensor, column, kind, aligned) + start + at
    tl.store(pointer, values.to(kind), None if count is None else at < count)


@triton.jit
def _read_scales(tensor, column: tl.constexpr, start, count, block: tl.constexpr, aligned: tl.constexpr):
    group = tl.arange(0, block // 32)
    pointer = address(tensor, column, tl.uint16, aligned) + start // 32 + group
    return (tl.load(pointer) if count is None else tl.load(pointer, group * 32 < count, 0)).to(tl.int32)


@triton.jit
def _write_scales(tensor, column: tl.constexpr, start, count, scale16, block: tl.constexpr, aligned: tl.constexpr):
    group = tl.arange(0, block // 32)
    pointer = address(tensor, column, tl.uint16, aligned) + start // 32 + group
    tl.store(pointer, scale16.to(tl.uint16), None if count is None else group * 32 < count)


@triton.jit
def without_padding(x, count, block: tl.constexpr):
    """``x`` with zeros beyond ``count``."""
    return x if count is None else tl.where(offsets(block) < count, x, 0.0)


@triton.jit
def read_gradient(tensor, kind: tl.constexpr, factor, start, count, block: tl.constexpr, aligned: tl.constexpr):
    """Gradients in fp32, multiplied by ``factor``."""
    return widen(read(tensor, GRAD, kind, start, count, block, aligned)).to(tl.float32) * factor


@triton.jit
def read_weight(
    tensor, weight: tl.constexpr, levels: tl.constexpr, start, count, block: tl.constexpr, aligned: tl.constexpr
):
    """fp32 master weights."""
    if weight == "fp32":
        x = read(tensor, PARAM, tl.float32, start, count, block, aligned)
    elif weight == "fp16":
        x = read(tensor, PART, tl.float32, start, count, block, aligned)
    else:
        kind: tl.constexpr = tl.int8 if levels else tl.int16
        hi = read(tensor, PARAM, tl.int16, start, count, block, aligned).to(tl.int32)
        x = join(hi, read(tensor, PART, kind, start, count, block, aligned).to(tl.int32), levels)
    return x


@triton.jit
def write_weight(
    tensor,
    weight: tl.constexpr,
    levels: tl.constexpr,
    start,
    count,
    x,
    bits,
    block: tl.constexpr,
    aligned: tl.constexpr,
):
    """Store fp32 master weights, and the parameter that is rounded from them."""
    if weight == "fp32":
        write(tensor, PARAM, tl.float32, start, count, x, block, aligned)
    elif weight == "fp16":
        write(tensor, PART, tl.float32, start, count, x, block, aligned)
        write(tensor, PARAM, tl.float16, start, count, x, block, aligned)
    else:
        hi, residual = split24(x, bits, levels) if levels else split32(x)
        write(tensor, PARAM, tl.int16, start, count, hi, block, aligned)
        write(tensor, PART, tl.int8 if levels else tl.int16, start, count, residual, block, aligned)


@triton.jit
def read_moment(
    tensor,
    column: tl.constexpr,
    levels: tl.constexpr,
    fourth_root: tl.constexpr,
    start,
    count,
    block: tl.constexpr,
    aligned: tl.constexpr,
):
    """The moment in ``column``, FIRST or SECOND, in fp32."""
    if levels == 0:
        x = read(tensor, column, tl.float32, start, count, block, aligned)
    else:
        kind: tl.constexpr = tl.int8 if column == FIRST else tl.uint8
        code = read(tensor, column, kind, start, count, block, aligned).to(tl.int32)
        scale16 = _read_scales(tensor, column + 1, start, count, block, aligned)
        if column == FIRST:
            x = expand_signed(code, scale16, levels)
        else:
            x = expand_unsigned(code, scale16, levels, fourth_root)
    return x


@triton.jit
def write_moment(
    tensor,
    column: tl.constexpr,
    levels: tl.constexpr,
    fourth_root: tl.constexpr,
    start,
    count,
    x,
    bits,
    block: tl.constexpr,
    aligned: tl.constexpr,
):
    """Store a moment; codes of a first moment are rounded to nearest, those of a second by random ``bits``."""
    if levels == 0:
        write(tensor, column, tl.float32, start, count, x, block, aligned)
    elif levels is not None:
        kind: tl.constexpr = tl.int8 if column == FIRST else tl.uint8
        x = without_padding(x, count, block)
        if column == FIRST:
            code, scale16 = compand_signed(x, levels)
        else:
            code, scale16 = compand_unsigned_randomly(x, levels, fourth_root, bits)
        write(tensor, column, kind, start, count, code, block, aligned)
        _write_scales(tensor, column + 1, start, count, scale16, block, aligned)
