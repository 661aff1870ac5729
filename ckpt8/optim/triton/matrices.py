"""Row and column averages of matrices, and what is made of them: shared by the kernels of CAME.

A tensor is (batches, height, width). For each of its two pairs of averages, ``sq`` (pair 0) and ``res`` (pair 1):

    tiles     of 128 x 128 values give float64 sums of their rows and of their columns
    lines     256 rows or columns: R = b R + (1-b) mean, and the sum of those R;  C likewise, and C^-1/2
    lines     of rows again: (R / mean(R))^-1/2, when all sums of R are there

``matrices`` has a row of int64 for each tensor, as ``table`` has; everything else lies in two buffers, of float64 for
sums and of fp32 for factors, at offsets that stand there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt8.optim.triton.arithmetic import double
from ckpt8.optim.triton.blocks import COLUMNS, NOW

AVERAGES = tl.constexpr(0)
"""Addresses of R, C, Rr and Cr."""

FACTORS = tl.constexpr(4)
"""Offsets of the factors of rows and columns, for both pairs."""

HEIGHT, WIDTH = tl.constexpr(8), tl.constexpr(9)
TILES_ACROSS, TILES_DOWN, LINES_DOWN = tl.constexpr(10), tl.constexpr(11), tl.constexpr(12)
"""Tiles beside each other, below each other, and blocks of rows; of one matrix."""

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
def row_factor(matrix, factors, pair: tl.constexpr, at, mask):
    """The factors of rows, counted through all batches; 1 where masked."""
    pointer = factors + tl.load(matrix + FACTORS + 2 * pair) + at
    return tl.load(pointer) if mask is None else tl.load(pointer, mask, 1.0)


@triton.jit
def column_factor(matrix, factors, pair: tl.constexpr, at, mask):
    """As ``row_factor``, of columns."""
    pointer = factors + tl.load(matrix + FACTORS + 2 * pair + 1) + at
    return tl.load(pointer) if mask is None else tl.load(pointer, mask, 1.0)


@triton.jit
def factors_of(matrix, factors, pair: tl.constexpr, start, count, at):
    """approx(R, C) of the elements ``start + at`` of a tensor; 1 beyond ``count``."""
    height, width = tl.load(matrix + HEIGHT), tl.load(matrix + WIDTH)
    row, batch = start // width, start // width // height
    inside = (start - row * width).to(tl.int32) + at
    down = inside // width.to(tl.int32)
    across = inside - down * width.to(tl.int32)
    skipped = ((row - batch * height).to(tl.int32) + down) // height.to(tl.int32)
    mask = None if count is None else at < count
    columns = column_factor(matrix, factors, pair, (batch + skipped) * width + across, mask)
    return row_factor(matrix, factors, pair, row + down, mask) * columns


@triton.jit(do_not_specialize=["beta"])
def average_kernel(table, scalars, lines, matrices, sums, factors, beta, pair: tl.constexpr, line: tl.constexpr):
    """Move 256 row or column averages towards their means; gives the sum of those of rows, or the columns' factors."""
    program = lines + tl.program_id(0) * 4
    number = tl.load(program).to(tl.int64)
    matrix = matrices + number * MATRIX
    if tl.load(table + number * COLUMNS + NOW) == 0:
        return
    batch, block = tl.load(program + 1).to(tl.int64), tl.load(program + 2).to(tl.int64)
    of_columns = tl.load(program + 3).to(tl.int64)
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
    each, next_part = tl.where(of_columns == 1, 1, across), tl.where(of_columns == 1, width, 1)
    at = block * line + tl.arange(0, line)
    inside = at < length
    gathered = tl.zeros([line], tl.float64)
    part = 0
    while part < parts:
        gathered += tl.load(sums + base + at * each + part * next_part, inside, 0.0)
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
    """The factors of 256 rows, of their averages and the mean of those over the matrix."""
    program = lines + tl.program_id(0) * 4
    number = tl.load(program).to(tl.int64)
    matrix = matrices + number * MATRIX
    if tl.load(table + number * COLUMNS + NOW) == 0:
        return
    batch, block = tl.load(program + 1).to(tl.int64), tl.load(program + 2).to(tl.int64)
    height, blocks = tl.load(matrix + HEIGHT), tl.load(matrix + LINES_DOWN)
    each = tl.arange(0, line)
    gathered = tl.zeros([line], tl.float64)
    begin = 0
    while begin < blocks:
        offset = tl.load(matrix + SUMS) + batch * blocks + begin
        gathered += tl.load(sums + offset + each, begin + each < blocks, 0.0)
        begin += line
    mean = (tl.sum(gathered) / height.to(tl.float64)).to(tl.float32)
    at = block * line + each
    averages = tl.load(matrix + AVERAGES + 2 * pair).to(tl.pointer_type(tl.float32)) + batch * height
    average = tl.load(averages + at, at < height, 1.0)
    factor = inverse_root(tl.div_rn(average, tl.broadcast_to(mean, average.shape)))
    offset = tl.load(matrix + FACTORS + 2 * pair) + batch * height
    tl.store(factors + offset + at, factor, at < height)
