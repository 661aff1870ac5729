"""Device functions on blocks of values: random bits, stochastic rounding and master weights, as in ``ckpt8.optim``.

    bits of an element    hash of (seed, parameter, step, element): ``packed_tensor.random_bits`` and ``stream_key``
    second moment         code floor(t) or the next, scale rounded up: ``packed_tensor.encode_second_moment``
    24-bit weight         hi = bf16(w);  d = w - hi in fp32 steps;  rho = (R d + noise) >> 15
    powers                in float64, by multiplication alone, so that they are the same everywhere

Operations are on integers, or on fp32 and rounded once: results are those of the torch path on a CPU, bit for bit.

The table of tensors on the device has one row of int64 for each tensor: addresses, size, and what the prologue
computes. ``programs`` holds a row number and a block number for each program. One launch handles all whole blocks,
without masks, another the last, short blocks of all tensors. A kernel gets the element types of its tensors as
constants:

    weight       "fp32", "fp16" (with a master) or "bf16" (with a residual: split24 of R = ``levels``, or split32)
    grad         tl.float32, tl.float16, or tl.int16 for the bits of bf16
    first        Q of the codes of the first moment, 0 where it is fp32, None where there is none
    second       the same of the second moment;  ``fourth_root`` where p = 1/2
    aligned      whether every address is a multiple of 16

``tensor`` is a row of the table. ``count`` is the number of elements of a masked block, None for a whole one. Each
thread has eight neighbouring elements, 16 bytes of bf16, so that no element changes its thread.

CAME has row and column averages of matrices, and factors from them. A tensor is (batches, height, width). For each of
its two pairs of averages, ``sq`` (pair 0) and ``res`` (pair 1):

    tiles     128 x 128 values: float64 sums of their rows and of their columns
    lines     256 rows or columns: R = b R + (1-b) mean, and the sum of those R;  C likewise, and C^-1/2
    lines     256 rows again, after all sums of R: (R / mean(R))^-1/2

``matrices`` is a table of int64 with a row for each tensor, like ``table``. Two buffers hold float64 sums and fp32
factors, at the offsets in that row. ``launches.Matrices`` makes them.

The kernels over blocks that every rule shares: a step, and a sum over the blocks of each tensor.

A kernel decodes a block to fp32, calls the rule, which is one of its constants, and stores the block encoded:

    x, m, v = rule(x, g, m, v, numbers, step, place)         weight, gradient, moments -> new weight and moments
    s = summand(g, v, numbers, place)                        what ``sum_kernel`` adds over a tensor, for example g^2

``numbers`` points to the scalars that the rule's prologue wrote; ``step`` counts from 1. A moment that the state lacks
is None; the rule returns any block in its place (device functions cannot return None), and it is not stored. ``place``
is None, or what ``matrices.approximation`` needs for a tensor with row and column averages. Both kernels list the
constants of a layout, since Triton takes no structures.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt8.codecs.companded8.triton import SMALLEST_ROOT2, compand_signed, expand_signed, expand_unsigned, normalise
from ckpt8.codecs.split24.triton import residual_steps, upper_half
from ckpt8.codecs.triton_blocks import MAGNITUDE, QUIET_NAN, bits_of, magnitude_bits, widen
from ckpt8.optim import packed_tensor

_GOLDEN64 = tl.constexpr(packed_tensor.GOLDEN64)
_GOLDEN32 = tl.constexpr(packed_tensor.GOLDEN32)
_MIX64_FIRST, _MIX64_SECOND = tl.constexpr(packed_tensor.MIX64[0]), tl.constexpr(packed_tensor.MIX64[1])
_MIX32_FIRST, _MIX32_SECOND = tl.constexpr(packed_tensor.MIX32[0]), tl.constexpr(packed_tensor.MIX32[1])
_NARROW, _NARROW_ROOT = tl.constexpr(packed_tensor.NARROW), tl.constexpr(packed_tensor.NARROW**0.5)
_WEIGHT_MARGIN = tl.constexpr(packed_tensor.WEIGHT_MARGIN)


@triton.jit
def extended_key(key, counter):
    """The uint64 key of one more counter: ``stream_key(*counters, counter)`` from ``stream_key(*counters)``."""
    key = (key + _GOLDEN64) ^ counter
    key = (key ^ (key >> 30)) * _MIX64_FIRST
    key = (key ^ (key >> 27)) * _MIX64_SECOND
    return key ^ (key >> 31)


@triton.jit
def _mixed(x, word):
    x = x ^ word
    x = (x ^ (x >> 16)) * _MIX32_FIRST
    x = (x ^ (x >> 15)) * _MIX32_SECOND
    return x ^ (x >> 16)


@triton.jit
def random_bits(key, start, at):
    """uint32 for the elements ``start + at``; ``key`` is uint64, ``start`` int64 and a multiple of the block."""
    x = _mixed(start.to(tl.uint32) + at.to(tl.uint32), key.to(tl.uint32))
    return _mixed(x, (key >> 32).to(tl.uint32) ^ (start >> 32).to(tl.uint32))


@triton.jit
def weight_noise(bits):
    """int32 from 127 to 32640, from random bits."""
    noise = ((bits * _GOLDEN32) >> 17).to(tl.int32)
    return noise - (noise >> 8) * 2 + _WEIGHT_MARGIN


@triton.jit
def split24(x, bits, levels: tl.constexpr):
    """``hi``, the bits of bf16, and ``rho``, both int32, of fp32 weights, rounded by random ``bits``. NaN is kept."""
    hi, d = upper_half(tl.minimum(magnitude_bits(x), QUIET_NAN))
    rho = (d * levels + weight_noise(bits)) >> 15
    return hi | ((bits_of(x) >> 16) & 0x8000), tl.maximum(tl.minimum(rho, levels), -levels)


@triton.jit
def split32(x):
    """``hi``, the bits of bf16 with halves rounded up, and the 16-bit remainder, both int32, of fp32 weights."""
    mag = tl.minimum(magnitude_bits(x), QUIET_NAN)
    hi = (mag + 0x8000) >> 16
    return hi | ((bits_of(x) >> 16) & 0x8000), mag - (hi << 16)


@triton.jit
def join(hi, residual, levels: tl.constexpr):
    """fp32 weights from the bits of bf16 and their residual, both int32: split24, or split32 where ``levels`` is 0.

    A parameter that somebody set to zero may keep a negative residual.
    """
    d = residual_steps(residual, levels) if levels else residual
    mag = tl.maximum(((hi << 16) & MAGNITUDE) + d, 0)
    return (mag | ((hi << 16) & ~MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def compand_unsigned_randomly(v, levels: tl.constexpr, fourth_root: tl.constexpr, bits):
    """int32 codes and scales of fp32 rows of 32 of moment2, rounded by random ``bits``.

    Rounding keeps the mean of 1/x for codes under 1/16 of the scale, the mean of v above.
    """
    root = tl.sqrt_rn(v)
    largest = tl.max(magnitude_bits(root), axis=1)
    largest = tl.where(largest == 0, 0, tl.maximum(largest, SMALLEST_ROOT2))
    scale16 = (tl.minimum(largest, QUIET_NAN) + 0x7FFF) >> 15
    n = normalise(root, scale16)
    t = (tl.sqrt_rn(n) if fourth_root else n) * levels
    # A value flushed to zero by CUDA's floor is raised to 1 like any below it.
    low = tl.maximum(tl.minimum(tl.floor(t), levels * 1.0), 1.0)
    drawn = (bits >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)
    up = drawn < _chance_up(t, low, levels, fourth_root)
    code = tl.minimum(low + up.to(tl.float32), levels * 1.0)
    return tl.where(root > 0, code, 0.0).to(tl.int32), scale16


@triton.jit
def _chance_up(t, low, levels: tl.constexpr, fourth_root: tl.constexpr):
    """The probability of the code above ``low``: see ``packed_tensor``."""
    high = low + 1.0
    narrow = low < levels / (_NARROW_ROOT if fourth_root else _NARROW)
    a, b, c = (high * high, t * t, low * low) if fourth_root else (high, t, low)
    chance = tl.div_rn(tl.where(narrow, a, b + c), tl.where(narrow, b, a + c)) * (t - low)
    return tl.div_rn(chance * (t + low), high + low) if fourth_root else chance


@triton.jit
def double(bits):
    """The float64 with these integer bits; a Python float as argument of a kernel would become fp32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def power(base, exponent):
    """``base ** exponent`` of float64 and an integer of at least 0, as ``packed_tensor.power``."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result


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


AVERAGES = tl.constexpr(0)
"""Addresses of R, C, Rr and Cr."""

FACTORS = tl.constexpr(4)
"""Offsets of the factors of rows and columns, for both pairs."""

HEIGHT, WIDTH = tl.constexpr(8), tl.constexpr(9)
TILES_ACROSS, TILES_DOWN, LINES_DOWN = tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)
"""Numbers of tiles across, tiles down, and lines of rows down, of one matrix."""

ROW_SUMS, COLUMN_SUMS, SUMS = tl.constexpr(13), tl.constexpr(14), tl.constexpr(15)
"""Offsets of the sums: (batches, height, tiles across), (batches, tiles down, width), (batches, blocks of rows)."""

MATRIX = tl.constexpr(16)
TILE = 128
LINE = 256


@triton.jit
def inverse_root(x):
    """1 / sqrt(x), each rounded."""
    return tl.div_rn(tl.full(x.shape, 1.0, tl.float32), tl.sqrt_rn(x))


@triton.jit
def read_factors(matrix, factors, pair: tl.constexpr, axis: tl.constexpr, at, mask):
    """The factors of rows (axis 0) or columns (axis 1), counted through all batches; 1 where masked."""
    return tl.load(factors + tl.load(matrix + FACTORS + 2 * pair + axis) + at, mask, 1.0)


@triton.jit
def place_of(matrix, factors, start, count, block: tl.constexpr):
    """The place of a block in its matrix, which ``approximation`` takes."""
    at = offsets(block)
    inside = tl.full(at.shape, 1, tl.int1) if count is None else at < count
    return matrix, factors, start, at, inside


@triton.jit
def approximation(place, pair: tl.constexpr):
    """approx(R, C) of the elements of a block; 1 beyond the end of the tensor."""
    matrix, factors, start, at, inside = place
    height, width = tl.load(matrix + HEIGHT), tl.load(matrix + WIDTH)
    row, batch = start // width, start // width // height
    flat = (start - row * width).to(tl.int32) + at
    down = flat // width.to(tl.int32)
    across = flat - down * width.to(tl.int32)
    skipped = ((row - batch * height).to(tl.int32) + down) // height.to(tl.int32)
    columns = read_factors(matrix, factors, pair, 1, (batch + skipped) * width + across, inside)
    return read_factors(matrix, factors, pair, 0, row + down, inside) * columns


@triton.jit
def locate_piece(table, scalars, programs, matrices):
    """The tile or line of this program: table row, scalars, matrix, batch, and two block numbers."""
    program = programs + tl.program_id(0) * 4
    row, batch = tl.load(program).to(tl.int64), tl.load(program + 1).to(tl.int64)
    matrix = matrices + row * MATRIX
    return table + row * COLUMNS, scalars + row * SCALARS, matrix, batch, tl.load(program + 2), tl.load(program + 3)


@triton.jit(do_not_specialize=["beta"])
def average_kernel(table, scalars, lines, matrices, sums, factors, beta, pair: tl.constexpr, line: tl.constexpr):
    """Move 256 row or column averages towards their means; store the sum of row averages, or the columns' factors."""
    tensor, _, matrix, batch, block, of_columns = locate_piece(table, scalars, lines, matrices)
    if tl.load(tensor + NOW) == 0:
        return
    height, width = tl.load(matrix + HEIGHT), tl.load(matrix + WIDTH)
    across, down = tl.load(matrix + TILES_ACROSS), tl.load(matrix + TILES_DOWN)
    # Along a line, and from one partial sum of it to the next.
    length = tl.where(of_columns == 1, width, height)
    divisor = tl.where(of_columns == 1, height, width)
    parts = tl.where(of_columns == 1, down, across)
    base = tl.where(
        of_columns == 1,
        tl.load(matrix + COLUMN_SUMS) + batch * down * width,
        tl.load(matrix + ROW_SUMS) + batch * height * across,
    )
    between, next_part = tl.where(of_columns == 1, 1, across), tl.where(of_columns == 1, width, 1)
    at = block.to(tl.int64) * line + tl.arange(0, line)
    inside = at < length
    gathered = tl.zeros([line], tl.float64)
    part = 0
    while part < parts:
        gathered += tl.load(sums + base + at * between + part * next_part, inside, 0.0)
        part += 1
    mean = (gathered / divisor.to(tl.float64)).to(tl.float32)
    averages = tl.load(matrix + AVERAGES + 2 * pair + of_columns).to(tl.pointer_type(tl.float32)) + batch * length
    keep, towards = double(beta).to(tl.float32), (1 - double(beta)).to(tl.float32)
    average = tl.load(averages + at, inside, 1.0) * keep + mean * towards
    tl.store(averages + at, average, inside)
    if of_columns == 1:
        offset = tl.load(matrix + FACTORS + 2 * pair + 1) + batch * width
        tl.store(factors + offset + at, inverse_root(average), inside)
    else:
        offset = tl.load(matrix + SUMS) + batch * tl.load(matrix + LINES_DOWN) + block
        tl.store(sums + offset, tl.sum(tl.where(inside, average.to(tl.float64), 0.0)))


@triton.jit
def factor_kernel(table, scalars, lines, matrices, sums, factors, pair: tl.constexpr, line: tl.constexpr):
    """The factors of 256 rows, from their averages and the mean of all row averages of the matrix."""
    tensor, _, matrix, batch, block, _ = locate_piece(table, scalars, lines, matrices)
    if tl.load(tensor + NOW) == 0:
        return
    height, blocks = tl.load(matrix + HEIGHT), tl.load(matrix + LINES_DOWN)
    lane = tl.arange(0, line)
    gathered = tl.zeros([line], tl.float64)
    begin = 0
    while begin < blocks:
        offset = tl.load(matrix + SUMS) + batch * blocks + begin
        gathered += tl.load(sums + offset + lane, begin + lane < blocks, 0.0)
        begin += line
    mean = (tl.sum(gathered) / height.to(tl.float64)).to(tl.float32)
    at = block.to(tl.int64) * line + lane
    averages = tl.load(matrix + AVERAGES + 2 * pair).to(tl.pointer_type(tl.float32)) + batch * height
    average = tl.load(averages + at, at < height, 1.0)
    factor = inverse_root(tl.div_rn(average, tl.broadcast_to(mean, average.shape)))
    offset = tl.load(matrix + FACTORS + 2 * pair) + batch * height
    tl.store(factors + offset + at, factor, at < height)


@triton.jit
def locate(table, scalars, programs, block: tl.constexpr):
    """The block of this program: number of its table row, the row, its scalars, and the first element."""
    program = programs + tl.program_id(0) * 2
    row, start = tl.load(program).to(tl.int64), tl.load(program + 1).to(tl.int64) * block
    return row, table + row * COLUMNS, scalars + row * SCALARS, start


@triton.jit
def step_kernel(
    table,
    scalars,
    programs,
    matrices,
    factors,
    rule: tl.constexpr,
    weight: tl.constexpr,
    levels: tl.constexpr,
    grad: tl.constexpr,
    first: tl.constexpr,
    second: tl.constexpr,
    fourth_root: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Update one block of one tensor."""
    row, tensor, numbers, start = locate(table, scalars, programs, block)
    count = (tl.load(tensor + NUMEL) - start).to(tl.int32) if masked else None
    place = None if matrices is None else place_of(matrices + row * MATRIX, factors, start, count, block)
    step = tl.load(tensor + NOW)
    if step == 0:
        return
    g = read_gradient(tensor, grad, scalar(numbers, GRADIENT_FACTOR), start, count, block, aligned)
    x = read_weight(tensor, weight, levels, start, count, block, aligned)
    m = None if first is None else read_moment(tensor, FIRST, first, False, start, count, block, aligned)
    v = None if second is None else read_moment(tensor, SECOND, second, fourth_root, start, count, block, aligned)
    x, m, v = rule(x, g, m, v, numbers, step, place)
    bits = random_bits(tl.load(tensor + KEY).to(tl.uint64, bitcast=True), start, offsets(block))
    write_weight(tensor, weight, levels, start, count, x, bits, block, aligned)
    write_moment(tensor, FIRST, first, False, start, count, m, bits, block, aligned)
    write_moment(tensor, SECOND, second, fourth_root, start, count, v, bits, block, aligned)


@triton.jit
def sum_kernel(
    table,
    scalars,
    programs,
    partials,
    matrices,
    factors,
    summand: tl.constexpr,
    grad: tl.constexpr,
    second: tl.constexpr,
    fourth_root: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Sum ``summand`` over one block of one tensor, in float64."""
    row, tensor, numbers, start = locate(table, scalars, programs, block)
    count = (tl.load(tensor + NUMEL) - start).to(tl.int32) if masked else None
    place = None if matrices is None else place_of(matrices + row * MATRIX, factors, start, count, block)
    if tl.load(tensor + NOW) == 0:
        return
    g = read_gradient(tensor, grad, scalar(numbers, GRADIENT_FACTOR), start, count, block, aligned)
    v = None if second is None else read_moment(tensor, SECOND, second, fourth_root, start, count, block, aligned)
    terms = without_padding(summand(g, v, numbers, place), count, block)
    tl.store(partials + tl.program_id(0), tl.sum(tl.sum(terms.to(tl.float64), axis=1)))


@triton.jit
def root_mean(table, partials, runs):
    """The root of the mean over this program's tensor of what ``sum_kernel`` added; float64.

    It always adds in the same order. ``runs`` says which ``partials`` belong to the tensor: see ``LaunchPlan.sums``.
    """
    row = tl.program_id(0)
    first, whole, short = tl.load(runs + row * 3), tl.load(runs + row * 3 + 1), tl.load(runs + row * 3 + 2)
    at = tl.arange(0, CHUNK)
    gathered = tl.zeros([CHUNK], tl.float64)
    # Older interpreters take no bounds of ``range`` that were loaded.
    begin = 0
    while begin < whole:
        gathered += tl.load(partials + first + begin + at, begin + at < whole, 0.0)
        begin += CHUNK
    total = tl.sum(gathered) + tl.load(partials + short, short >= 0, 0.0)
    return tl.sqrt(total / tl.load(table + row * COLUMNS + NUMEL).to(tl.float64))
