"""CAME, fused: ``ckpt8.optim.came`` for tensors of two dimensions or more; ``came_vector`` has the others.

    s  = g^2 + eps1;     R, C = b2-averages of the means of s;     u = g * approx(R, C)
    u /= max(1, RMS(u)/d);     m = b1 m + (1-b1) u
    r  = (u - m)^2 + eps2;     Rr, Cr = b3-averages of its means
    theta = theta (1 - lr wd) - lr m * approx(Rr, Cr)

Twelve launches for all matrices of a group, however many: tiles of s give sums of rows and columns, lines average them
(two launches, since a mean over all rows comes between), blocks give RMS(u), tiles and lines do the same for r, and
blocks make the update. Sums are in float64, always in the same order; from the torch path's they differ by some 1e-16
of their value.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ckpt8.codecs.companded8.triton import expand_signed_each
from ckpt8.codecs.triton_blocks import widen
from ckpt8.optim.triton import came_vector
from ckpt8.optim.triton.arithmetic import double
from ckpt8.optim.triton.blocks import (
    COLUMNS,
    FIRST,
    FIRST_SCALES,
    GRAD,
    NOW,
    NUMEL,
    address,
    bits_of_block,
    elements,
    offsets,
    read_first,
    read_gradient,
    read_weight,
    scalar,
    total,
    without_padding,
    work,
    write_first,
    write_weight,
)
from ckpt8.optim.triton.came_rule import (
    CLIP,
    DECAY,
    EPS,
    FACTOR,
    KEEP,
    RATE,
    RESIDUAL_EPS,
    SECOND_KEEP,
    SECOND_RATE,
    STEP_SIZE,
    moved,
)
from ckpt8.optim.triton.came_tables import Matrices
from ckpt8.optim.triton.launches import Plan
from ckpt8.optim.triton.matrices import (
    COLUMN_SUMS,
    HEIGHT,
    LINE,
    MATRIX,
    ROW_SUMS,
    TILE,
    TILES_ACROSS,
    TILES_DOWN,
    WIDTH,
    average_kernel,
    column_factor,
    factor_kernel,
    factors_of,
    row_factor,
)
from ckpt8.optim.triton.prologue import advance, bits_of_float, put, put_gradient_factor, rate

CHUNK = 256
"""How many partial sums are read at once."""


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "eps1", "eps2", "weight_decay"])
def prologue_kernel(
    table,
    scalars,
    lr,
    lr_tensor,
    grad_scale,
    found_inf,
    beta1,
    beta2,
    eps1,
    eps2,
    weight_decay,
    maximize: tl.constexpr,
):
    """The numbers of the rule for one tensor, but for what u is divided by."""
    row = tl.program_id(0)
    advance(table, row, found_inf)
    put_gradient_factor(scalars, row, grad_scale, maximize)
    eta = rate(lr, lr_tensor)
    put(scalars, row, EPS, double(eps1))
    put(scalars, row, KEEP, double(beta1))
    put(scalars, row, RATE, 1 - double(beta1))
    put(scalars, row, SECOND_KEEP, double(beta2))
    put(scalars, row, SECOND_RATE, 1 - double(beta2))
    put(scalars, row, RESIDUAL_EPS, double(eps2))
    put(scalars, row, DECAY, 1 - eta * double(weight_decay))
    put(scalars, row, STEP_SIZE, eta)


@triton.jit(do_not_specialize=["lr", "threshold"])
def clip_kernel(table, scalars, lr, lr_tensor, partials, runs, threshold, chunk: tl.constexpr):
    """What the direction of one tensor is divided by: max(1, RMS(u)/d)."""
    row = tl.program_id(0)
    count = tl.load(table + row * COLUMNS + NUMEL).to(tl.float64)
    ratio = tl.sqrt(total(partials, runs, row, chunk) / count) / double(threshold)
    put(scalars, row, CLIP, tl.where(ratio > 1.0, ratio, 1.0))


@triton.jit
def tile_kernel(
    table,
    scalars,
    tiles,
    matrices,
    sums,
    factors,
    pair: tl.constexpr,
    grad: tl.constexpr,
    first: tl.constexpr,
    aligned: tl.constexpr,
    even: tl.constexpr,
    tile: tl.constexpr,
):
    """Sums of the rows and columns of one tile of s (pair 0) or r (pair 1)."""
    program = tiles + tl.program_id(0) * 4
    row = tl.load(program).to(tl.int64)
    tensor, matrix = table + row * COLUMNS, matrices + row * MATRIX
    if tl.load(tensor + NOW) == 0:
        return
    batch, down, across = tl.load(program + 1).to(tl.int64), tl.load(program + 2), tl.load(program + 3)
    height, width = tl.load(matrix + HEIGHT).to(tl.int32), tl.load(matrix + WIDTH).to(tl.int32)
    if even:
        width = tl.multiple_of(width, 16)
    column = across * tile + tl.max_contiguous(tl.arange(0, tile), 8)
    begin = batch * height * width
    columns = tl.zeros([8, tile], tl.float64)
    row_sums = sums + tl.load(matrix + ROW_SUMS) + batch * height * tl.load(matrix + TILES_ACROSS) + across
    top, bottom = down * tile, tl.minimum(down * tile + tile, height)
    while top < bottom:
        line = top + tl.arange(0, 8)
        mask = (line < height)[:, None] & (column < width)[None, :]
        at = begin + line.to(tl.int64)[:, None] * width + column[None, :]
        g = widen(tl.load(address(tensor, GRAD, grad, aligned) + at, mask, 0)).to(tl.float32)
        g = g * scalar(scalars, row, FACTOR)
        if pair == 0:
            x = g * g + scalar(scalars, row, EPS)
        else:
            rows = row_factor(matrix, factors, 0, batch * height + line, line < height)
            u = g * (rows[:, None] * column_factor(matrix, factors, 0, batch * width + column, column < width)[None, :])
            if first == 0:
                m = tl.load(address(tensor, FIRST, tl.float32, aligned) + at, mask, 0)
            else:
                code = tl.load(address(tensor, FIRST, tl.int8, aligned) + at, mask, 0).to(tl.int32)
                scale16 = tl.load(address(tensor, FIRST_SCALES, tl.uint16, aligned) + at // 32, mask, 0)
                m = expand_signed_each(code, scale16.to(tl.int32), first)
            u, m = moved(u, m, scalars, row)
            x = (u - m) * (u - m) + scalar(scalars, row, RESIDUAL_EPS)
        wide = tl.where(mask, x, 0.0).to(tl.float64)
        tl.store(row_sums + line.to(tl.int64) * tl.load(matrix + TILES_ACROSS), tl.sum(wide, axis=1), line < height)
        columns += wide
        top += 8
    place = tl.load(matrix + COLUMN_SUMS) + (batch * tl.load(matrix + TILES_DOWN) + down) * width
    tl.store(sums + place + column, tl.sum(columns, axis=0), column < width)


@triton.jit
def sum_kernel(
    table,
    scalars,
    programs,
    partials,
    matrices,
    factors,
    grad: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """The sum of u^2 over one block of one tensor."""
    row, tensor, start = work(table, programs, block)
    count = elements(tensor, start) if masked else None
    if tl.load(tensor + NOW) == 0:
        return
    g = read_gradient(tensor, grad, scalar(scalars, row, FACTOR), start, count, block, aligned)
    u = g * factors_of(matrices + row * MATRIX, factors, 0, start, count, offsets(block))
    square = without_padding(u * u, count, block).to(tl.float64)
    tl.store(partials + tl.program_id(0), tl.sum(tl.sum(square, axis=1)))


@triton.jit
def step_kernel(
    table,
    scalars,
    programs,
    matrices,
    factors,
    weight: tl.constexpr,
    levels: tl.constexpr,
    grad: tl.constexpr,
    first: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Update one block of one tensor."""
    row, tensor, start = work(table, programs, block)
    matrix = matrices + row * MATRIX
    count = elements(tensor, start) if masked else None
    if tl.load(tensor + NOW) == 0:
        return
    g = read_gradient(tensor, grad, scalar(scalars, row, FACTOR), start, count, block, aligned)
    x = read_weight(tensor, weight, levels, start, count, block, aligned)
    m = read_first(tensor, first, start, count, block, aligned)
    u = g * factors_of(matrix, factors, 0, start, count, offsets(block))
    m = moved(u, m, scalars, row)[1]
    update = m * factors_of(matrix, factors, 1, start, count, offsets(block))
    x = x * scalar(scalars, row, DECAY) - update * scalar(scalars, row, STEP_SIZE)
    write_weight(tensor, weight, levels, start, count, x, bits_of_block(tensor, start, block), block, aligned)
    write_first(tensor, first, start, count, m, block, aligned)


def step(plan: Plan, group: dict[str, Any], grad_scale: Any, found_inf: Any) -> None:
    """One step of the tensors of a plan."""
    betas, eps = group["betas"], group["eps"]
    numbers = map(bits_of_float, (*betas[:2], *eps, group["weight_decay"]))
    plan.tensors(prologue_kernel, group["lr"], grad_scale, found_inf, *numbers, maximize=group["maximize"])
    threshold = bits_of_float(group["clip_threshold"])
    if not plan.layout.matrix:
        sums = plan.sums(came_vector.sum_kernel)
        plan.tensors(clip_kernel, group["lr"], *sums, threshold, chunk=CHUNK)
        plan.blocks(came_vector.step_kernel)
        return
    if plan.extra is None:
        plan.extra = Matrices(plan)
    tables: Matrices = plan.extra
    for pair, beta in enumerate(betas[1:]):
        if pair:
            sums = plan.sums(sum_kernel, tables.table, tables.factors)
            plan.tensors(clip_kernel, group["lr"], *sums, threshold, chunk=CHUNK)
        shared = tables.table, tables.sums, tables.factors
        plan.launch(tile_kernel, tables.tiles, *shared, pair=pair, tile=TILE)
        plan.launch(average_kernel, tables.lines, *shared, bits_of_float(beta), pair=pair, line=LINE)
        plan.launch(factor_kernel, tables.rows, *shared, pair=pair, line=LINE)
    plan.blocks(step_kernel, tables.table, tables.factors)
