"""CAME, fused: ``ckpt8.optim.optimizers`` on blocks in registers.

    s  = g^2 + eps1;     R, C = b2-averages of the means of s;     u = g * approx(R, C)
    u /= max(1, RMS(u)/d);     m = b1 m + (1-b1) u
    r  = (u - m)^2 + eps2;     Rr, Cr = b3-averages of its means
    theta = theta (1 - lr wd) - lr m * approx(Rr, Cr)

Below two dimensions V = b2 V + (1-b2) s, u = g * rsqrt(V), and the step is m: a launch for RMS(u), one for the update.

All matrices of a group take twelve launches, however many they are: tiles of s give sums of rows and columns, lines
average them (two launches, since a mean over all rows comes between), blocks give RMS(u), tiles and lines do the same
for r, and blocks make the update. Sums are in float64, always in the same order; they differ from the torch path's by
some 1e-16 of their value.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ckpt8.codecs.companded8.triton import expand_signed_each
from ckpt8.codecs.triton_blocks import widen
from ckpt8.optim.triton.kernels import (
    COLUMN_SUMS,
    FIRST,
    GRAD,
    GRADIENT_FACTOR,
    HEIGHT,
    LINE,
    NOW,
    ROW_SUMS,
    TILE,
    TILES_ACROSS,
    TILES_DOWN,
    WIDTH,
    address,
    approximation,
    average_kernel,
    double,
    factor_kernel,
    inverse_root,
    locate_piece,
    read_factors,
    root_mean,
    scalar,
)
from ckpt8.optim.triton.launches import LaunchPlan, Scaler
from ckpt8.optim.triton.prologue import advance, bits_of_float, own_numbers, put, rate

_EPS, _KEEP, _RATE, _RESIDUAL_EPS, _DECAY, _STEP_SIZE, _CLIP, _SECOND_KEEP, _SECOND_RATE = map(
    tl.constexpr, range(1, 10)
)


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
    """The numbers of the rule for one tensor, without the divisor of u."""
    numbers, _ = advance(table, scalars, grad_scale, found_inf, maximize)
    eta = rate(lr, lr_tensor)
    put(numbers, _EPS, double(eps1))
    put(numbers, _KEEP, double(beta1))
    put(numbers, _RATE, 1 - double(beta1))
    put(numbers, _SECOND_KEEP, double(beta2))
    put(numbers, _SECOND_RATE, 1 - double(beta2))
    put(numbers, _RESIDUAL_EPS, double(eps2))
    put(numbers, _DECAY, 1 - eta * double(weight_decay))
    put(numbers, _STEP_SIZE, eta)


@triton.jit(do_not_specialize=["lr", "threshold"])
def clip_kernel(table, scalars, lr, lr_tensor, partials, runs, threshold):
    """The divisor of the direction of one tensor: max(1, RMS(u)/d)."""
    ratio = root_mean(table, partials, runs) / double(threshold)
    put(own_numbers(scalars), _CLIP, tl.where(ratio > 1.0, ratio, 1.0))


@triton.jit
def second_moment(g, v, numbers):
    """The new second moment of a vector."""
    return v * scalar(numbers, _SECOND_KEEP) + (g * g + scalar(numbers, _EPS)) * scalar(numbers, _SECOND_RATE)


@triton.jit
def direction(g, v, numbers, place):
    """The direction u before it is clipped; ``v`` is the old second moment, None for a matrix."""
    return g * (approximation(place, 0) if v is None else inverse_root(second_moment(g, v, numbers)))


@triton.jit
def squared_direction(g, v, numbers, place):
    """u^2 before it is clipped."""
    u = direction(g, v, numbers, place)
    return u * u


@triton.jit
def momentum(u, m, numbers):
    """The clipped direction and the new momentum."""
    u = tl.div_rn(u, tl.broadcast_to(scalar(numbers, _CLIP), u.shape))
    return u, m * scalar(numbers, _KEEP) + u * scalar(numbers, _RATE)


@triton.jit
def came(x, g, m, v, numbers, step, place):
    """One step of fp32 blocks."""
    # First the factor that is read last: in the other order the assembler spills two words for 8.0.
    factor = approximation(place, 1) if v is None else None
    _, m = momentum(direction(g, v, numbers, place), m, numbers)
    update = m * factor if v is None else m
    v = m if v is None else second_moment(g, v, numbers)
    return x * scalar(numbers, _DECAY) - update * scalar(numbers, _STEP_SIZE), m, v


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
    tensor, numbers, matrix, batch, down, across = locate_piece(table, scalars, tiles, matrices)
    if tl.load(tensor + NOW) == 0:
        return
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
        g = g * scalar(numbers, GRADIENT_FACTOR)
        if pair == 0:
            x = g * g + scalar(numbers, _EPS)
        else:
            rows = read_factors(matrix, factors, 0, 0, batch * height + line, line < height)
            across_rows = read_factors(matrix, factors, 0, 1, batch * width + column, column < width)
            u = g * (rows[:, None] * across_rows[None, :])
            if first == 0:
                m = tl.load(address(tensor, FIRST, tl.float32, aligned) + at, mask, 0)
            else:
                code = tl.load(address(tensor, FIRST, tl.int8, aligned) + at, mask, 0).to(tl.int32)
                scale16 = tl.load(address(tensor, FIRST + 1, tl.uint16, aligned) + at // 32, mask, 0)
                m = expand_signed_each(code, scale16.to(tl.int32), first)
            u, m = momentum(u, m, numbers)
            x = (u - m) * (u - m) + scalar(numbers, _RESIDUAL_EPS)
        wide = tl.where(mask, x, 0.0).to(tl.float64)
        tl.store(row_sums + line.to(tl.int64) * tl.load(matrix + TILES_ACROSS), tl.sum(wide, axis=1), line < height)
        columns += wide
        top += 8
    place = tl.load(matrix + COLUMN_SUMS) + (batch * tl.load(matrix + TILES_DOWN) + down) * width
    tl.store(sums + place + column, tl.sum(columns, axis=0), column < width)


def step(plan: LaunchPlan, group: dict[str, Any], scaler: Scaler) -> None:
    """One step of the tensors of a plan."""
    lr, (beta1, beta2, beta3) = group["lr"], group["betas"]
    plan.tensors(
        prologue_kernel,
        lr,
        scaler,
        [beta1, beta2, *group["eps"], group["weight_decay"]],
        maximize=group["maximize"],
    )
    _move_averages(plan, 0, beta2)
    plan.tensors(clip_kernel, lr, plan.sums(squared_direction), [group["clip_threshold"]])
    _move_averages(plan, 1, beta3)
    plan.step(came)


def _move_averages(plan: LaunchPlan, pair: int, beta: float) -> None:
    """Move R and C (pair 0) or Rr and Cr (pair 1) of all matrices, and compute their factors."""
    if (tables := plan.matrices) is not None:
        shared = tables.table, tables.sums, tables.factors
        plan.launch(tile_kernel, tables.tiles, *shared, pair=pair, tile=TILE)
        plan.launch(average_kernel, tables.lines, *shared, bits_of_float(beta), pair=pair, line=LINE)
        plan.launch(factor_kernel, tables.rows, *shared, pair=pair, line=LINE)
