"""Row and column averages of matrices, and the factors that CAME's kernels compute from them.

A tensor is (batches, height, width). For each of its two pairs of averages, ``sq`` (pair 0) and ``res`` (pair 1):

    tiles     128 x 128 values: float64 sums of their rows and of their columns
    lines     256 rows or columns: R = b R + (1-b) mean, and the sum of those R;  C likewise, and C^-1/2
    lines     256 rows again, after all sums of R: (R / mean(R))^-1/2

``matrices`` is a table of int64 with a row for each tensor, like ``table``. Two buffers hold float64 sums and fp32
factors, at the offsets in that row. ``Matrices`` makes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import torch
import triton
import triton.language as tl

from ckpt8.optim.triton.arithmetic import double
from ckpt8.optim.triton.blocks import COLUMNS, NOW, SCALARS, offsets
from ckpt8.optim.triton.rows import Row

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
    """What ``approximation`` needs to know of a block."""
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
    each, next_part = tl.where(of_columns == 1, 1, across), tl.where(of_columns == 1, width, 1)
    at = block.to(tl.int64) * line + tl.arange(0, line)
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
    """The factors of 256 rows, from their averages and the mean of all row averages of the matrix."""
    tensor, _, matrix, batch, block, _ = locate_piece(table, scalars, lines, matrices)
    if tl.load(tensor + NOW) == 0:
        return
    height, blocks = tl.load(matrix + HEIGHT), tl.load(matrix + LINES_DOWN)
    each = tl.arange(0, line)
    gathered = tl.zeros([line], tl.float64)
    begin = 0
    while begin < blocks:
        offset = tl.load(matrix + SUMS) + batch * blocks + begin
        gathered += tl.load(sums + offset + each, begin + each < blocks, 0.0)
        begin += line
    mean = (tl.sum(gathered) / height.to(tl.float64)).to(tl.float32)
    at = block.to(tl.int64) * line + each
    averages = tl.load(matrix + AVERAGES + 2 * pair).to(tl.pointer_type(tl.float32)) + batch * height
    average = tl.load(averages + at, at < height, 1.0)
    factor = inverse_root(tl.div_rn(average, tl.broadcast_to(mean, average.shape)))
    offset = tl.load(matrix + FACTORS + 2 * pair) + batch * height
    tl.store(factors + offset + at, factor, at < height)


class Matrices:
    """The tables of the matrices in the ``rows`` of a plan: ``table``, two buffers, and the programs of the kernels."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        numbers, factors, sums = [], 0, 0
        tiles, row_lines, column_lines = [], [], []
        for index, row in enumerate(rows):
            height, width = row.shape[-2:]
            batches = math.prod(row.shape[:-2])
            across, down, blocks = -(-width // TILE), -(-height // TILE), -(-height // LINE)
            sizes = (batches * size for size in (height, width, height, width))
            *offsets, factors = accumulate(sizes, initial=factors)
            sizes = (batches * size for size in (height * across, down * width, blocks))
            *partials, sums = accumulate(sizes, initial=sums)
            numbers.append([*row.factored, *offsets, height, width, across, down, blocks, *partials])
            tiles.append(_pieces(index, batches, down, across))
            row_lines.append(_pieces(index, batches, blocks, 1))
            column_lines.append(_pieces(index, batches, -(-width // LINE), 1, axis=1))
        self.table = torch.tensor(numbers, dtype=torch.int64).to(device)
        self.factors = torch.zeros(factors, dtype=torch.float32, device=device)
        self.sums = torch.zeros(sums, dtype=torch.float64, device=device)
        self.tiles = torch.cat(tiles).to(device)
        self.rows = torch.cat(row_lines).to(device)
        self.lines = torch.cat([*row_lines, *column_lines]).to(device)


def _pieces(index: int, batches: int, down: int, across: int, axis: int = 0) -> torch.Tensor:
    """(row of the table, batch, block down, block across or ``axis``) of every program, int32."""
    grid = torch.cartesian_prod(*(torch.arange(size, dtype=torch.int32) for size in (batches, down, across)))
    return torch.cat((torch.full((len(grid), 1), index, dtype=torch.int32), grid[:, :2], grid[:, 2:] + axis), 1)
