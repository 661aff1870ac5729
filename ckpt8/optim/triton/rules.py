"""The rules as Triton device functions on blocks in registers: the operations of ``ckpt8.optim.optimizers``, in order.

A prologue kernel computes the numbers of a rule, once per tensor and step. StableAdamW and CAME need a sum over each
tensor before they know the last number: one launch sums over blocks, another over the blocks of a tensor, in float64
and always in the same order. The torch path adds exactly; the two sums differ by some 1e-16 of their value, so the
quotient, which is fp32, nearly always agrees.

All matrices of a group take CAME twelve launches, however many they are: tiles of s give sums of rows and columns,
lines average them (two launches, since a mean over all rows comes between), blocks give RMS(u), tiles and lines do the
same for r, and blocks make the update. Vectors take a launch for RMS(u) and one for the update.
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
    power,
    read_factors,
    root_mean,
    scalar,
)
from ckpt8.optim.triton.launches import LaunchPlan, Scaler, advance, bits_of_float, own_numbers, put, rate

_DECAY, _STEP_SIZE, _KEEP, _RATE, _SECOND_KEEP, _SECOND_RATE, _EPS, _FLOOR, _DIVISOR, _LOOKAHEAD = map(
    tl.constexpr, range(1, 11)
)
"""Places of the numbers of a tensor. ``_KEEP`` is the beta of an average, ``_RATE`` the rest of it to 1."""


@triton.jit
def _put_average(numbers, keep: tl.constexpr, beta):
    """Store the beta of an average, and in the next place the rest of it to 1."""
    put(numbers, keep, beta)
    put(numbers, keep + 1, 1 - beta)


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "eps", "weight_decay"])
def adamw_prologue(
    table,
    scalars,
    lr,
    lr_tensor,
    grad_scale,
    found_inf,
    beta1,
    beta2,
    eps,
    weight_decay,
    decoupled: tl.constexpr,
    maximize: tl.constexpr,
):
    """The numbers of the rule for one tensor."""
    numbers, step = advance(table, scalars, grad_scale, found_inf, maximize)
    eta, b1, b2, decay = rate(lr, lr_tensor), double(beta1), double(beta2), double(weight_decay)
    put(numbers, _DECAY, 1 - eta * decay if decoupled else decay)
    _put_average(numbers, _KEEP, b1)
    _put_average(numbers, _SECOND_KEEP, b2)
    put(numbers, _STEP_SIZE, eta / (1 - power(b1, step)))
    put(numbers, _DIVISOR, tl.sqrt(1 - power(b2, step)))
    put(numbers, _EPS, double(eps))


@triton.jit
def adam_undecayed(x, g, m, v, numbers, step, place):
    """Adam without weight decay."""
    m = m + (g - m) * scalar(numbers, _RATE)
    v = v * scalar(numbers, _SECOND_KEEP) + g * g * scalar(numbers, _SECOND_RATE)
    correction = tl.broadcast_to(scalar(numbers, _DIVISOR), v.shape)
    denominator = tl.div_rn(tl.sqrt_rn(v), correction) + scalar(numbers, _EPS)
    return x - tl.div_rn(m, denominator) * scalar(numbers, _STEP_SIZE), m, v


@triton.jit
def adam(x, g, m, v, numbers, step, place):
    """Adam: weight decay is part of the gradient."""
    return adam_undecayed(x, g + x * scalar(numbers, _DECAY), m, v, numbers, step, place)


@triton.jit
def adamw(x, g, m, v, numbers, step, place):
    """AdamW: weights shrink first."""
    return adam_undecayed(x * scalar(numbers, _DECAY), g, m, v, numbers, step, place)


@triton.jit(do_not_specialize=["lr", "momentum", "dampening", "weight_decay"])
def sgd_prologue(
    table,
    scalars,
    lr,
    lr_tensor,
    grad_scale,
    found_inf,
    momentum,
    dampening,
    weight_decay,
    nesterov: tl.constexpr,
    maximize: tl.constexpr,
):
    """The numbers of the rule for one tensor."""
    numbers, _ = advance(table, scalars, grad_scale, found_inf, maximize)
    put(numbers, _DECAY, double(weight_decay))
    put(numbers, _KEEP, double(momentum))
    put(numbers, _RATE, 1 - double(dampening))
    put(numbers, _STEP_SIZE, rate(lr, lr_tensor))
    put(numbers, _LOOKAHEAD, double(momentum) if nesterov else tl.full([], 0.0, tl.float64))


@triton.jit
def sgd(x, g, m, v, numbers, step, place):
    """One step of fp32 blocks; ``m`` is None without momentum."""
    # Where a factor is 0 nothing is added: a product with an infinite weight would be NaN.
    decay, lookahead = scalar(numbers, _DECAY), scalar(numbers, _LOOKAHEAD)
    g = tl.where(decay == 0, g, g + x * decay)
    update = g
    if m is None:
        m = g
    else:
        m = tl.where(step == 1, g, m * scalar(numbers, _KEEP) + g * scalar(numbers, _RATE))
        update = tl.where(lookahead == 0, m, g + m * lookahead)
    return x - update * scalar(numbers, _STEP_SIZE), m, m


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "weight_decay"])
def lion_prologue(
    table, scalars, lr, lr_tensor, grad_scale, found_inf, beta1, beta2, weight_decay, maximize: tl.constexpr
):
    """The numbers of the rule for one tensor."""
    numbers, _ = advance(table, scalars, grad_scale, found_inf, maximize)
    eta, b1, b2 = rate(lr, lr_tensor), double(beta1), double(beta2)
    put(numbers, _DECAY, 1 - eta * double(weight_decay))
    _put_average(numbers, _KEEP, b1)
    _put_average(numbers, _SECOND_KEEP, b2)
    put(numbers, _STEP_SIZE, eta)


@triton.jit
def lion(x, g, m, v, numbers, step, place):
    """One step of fp32 blocks. The sign of NaN is 0, as in torch."""
    direction = m * scalar(numbers, _KEEP) + g * scalar(numbers, _RATE)
    sign = (direction > 0).to(tl.float32) - (direction < 0).to(tl.float32)
    m = m * scalar(numbers, _SECOND_KEEP) + g * scalar(numbers, _SECOND_RATE)
    return x * scalar(numbers, _DECAY) - sign * scalar(numbers, _STEP_SIZE), m, m


@triton.jit
def debiased(beta, step):
    """The beta that keeps an average free of the bias of its zero start; float64."""
    return beta * (1 - power(beta, step - 1)) / (1 - power(beta, step))


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "eps"])
def stable_adamw_prologue(
    table, scalars, lr, lr_tensor, grad_scale, found_inf, beta1, beta2, eps, maximize: tl.constexpr
):
    """The numbers of the rule for one tensor, without the step size."""
    numbers, step = advance(table, scalars, grad_scale, found_inf, maximize)
    _put_average(numbers, _KEEP, debiased(double(beta1), step))
    _put_average(numbers, _SECOND_KEEP, debiased(double(beta2), step))
    put(numbers, _EPS, double(eps))
    put(numbers, _FLOOR, double(eps) * double(eps))


@triton.jit(do_not_specialize=["lr", "weight_decay"])
def stable_adamw_clip(table, scalars, lr, lr_tensor, partials, runs, weight_decay):
    """The step size of one tensor."""
    numbers, rms = own_numbers(scalars), root_mean(table, partials, runs)
    # A NaN leaves the step size as it is, as Python's max does.
    eta = rate(lr, lr_tensor) / tl.where(rms > 1.0, rms, 1.0)
    put(numbers, _DECAY, 1 - eta * double(weight_decay))
    put(numbers, _STEP_SIZE, eta)


@triton.jit
def unbiased_moment(u, square, numbers):
    """The new second moment, free of bias."""
    return u * scalar(numbers, _SECOND_KEEP) + square * scalar(numbers, _SECOND_RATE)


@triton.jit
def ratio(g, u, numbers, place):
    """g^2 / max(u, eps^2), with the new u."""
    square = g * g
    floored = tl.maximum(unbiased_moment(u, square, numbers), scalar(numbers, _FLOOR), tl.PropagateNan.ALL)
    return tl.div_rn(square, floored)


@triton.jit
def stable_adamw(x, g, m, u, numbers, step, place):
    """One step of fp32 blocks."""
    m = m + (g - m) * scalar(numbers, _RATE)
    u = unbiased_moment(u, g * g, numbers)
    update = tl.div_rn(m, tl.sqrt_rn(u) + scalar(numbers, _EPS)) * scalar(numbers, _STEP_SIZE)
    return x * scalar(numbers, _DECAY) - update, m, u


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "beta3", "eps1", "eps2", "weight_decay"])
def came_prologue(
    table,
    scalars,
    lr,
    lr_tensor,
    grad_scale,
    found_inf,
    beta1,
    beta2,
    beta3,
    eps1,
    eps2,
    weight_decay,
    maximize: tl.constexpr,
):
    """The numbers of the rule for one tensor, without the divisor of u."""
    numbers, _ = advance(table, scalars, grad_scale, found_inf, maximize)
    eta = rate(lr, lr_tensor)
    put(numbers, _EPS, double(eps1))
    _put_average(numbers, _KEEP, double(beta1))
    _put_average(numbers, _SECOND_KEEP, double(beta2))
    put(numbers, _FLOOR, double(eps2))
    put(numbers, _DECAY, 1 - eta * double(weight_decay))
    put(numbers, _STEP_SIZE, eta)


@triton.jit(do_not_specialize=["lr", "threshold"])
def came_clip(table, scalars, lr, lr_tensor, partials, runs, threshold):
    """The divisor of the direction of one tensor: max(1, RMS(u)/d)."""
    excess = root_mean(table, partials, runs) / double(threshold)
    put(own_numbers(scalars), _DIVISOR, tl.where(excess > 1.0, excess, 1.0))


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
    u = tl.div_rn(u, tl.broadcast_to(scalar(numbers, _DIVISOR), u.shape))
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
            x = (u - m) * (u - m) + scalar(numbers, _FLOOR)
        wide = tl.where(mask, x, 0.0).to(tl.float64)
        tl.store(row_sums + line.to(tl.int64) * tl.load(matrix + TILES_ACROSS), tl.sum(wide, axis=1), line < height)
        columns += wide
        top += 8
    place = tl.load(matrix + COLUMN_SUMS) + (batch * tl.load(matrix + TILES_DOWN) + down) * width
    tl.store(sums + place + column, tl.sum(columns, axis=0), column < width)


_RULES = {
    "adamw": (adamw_prologue, ("betas", "eps", "weight_decay"), adamw),
    "adam": (adamw_prologue, ("betas", "eps", "weight_decay"), adam),
    "sgd": (sgd_prologue, ("momentum", "dampening", "weight_decay"), sgd),
    "lion": (lion_prologue, ("betas", "weight_decay"), lion),
    "stable_adamw": (stable_adamw_prologue, ("betas", "eps"), stable_adamw),
    "came": (came_prologue, ("betas", "eps", "weight_decay"), came),
}
"""The prologue of each rule, the settings whose numbers it takes, and the rule."""


def step(plan: LaunchPlan, group: dict[str, Any], scaler: Scaler) -> None:
    """One step of the tensors of a plan."""
    name, lr = group["rule"], group["lr"]
    prologue, settings, rule = _RULES[name]
    given = (group[setting] for setting in settings)
    numbers = [number for value in given for number in (value if isinstance(value, (tuple, list)) else (value,))]
    constants = {"decoupled": name == "adamw", "nesterov": group.get("nesterov"), "maximize": group["maximize"]}
    plan.tensors(
        prologue, lr, scaler, numbers, **{name: constants[name] for name in prologue.arg_names if name in constants}
    )
    if name == "stable_adamw":
        plan.tensors(stable_adamw_clip, lr, plan.sums(ratio), [group["weight_decay"]])
    elif name == "came":
        _move_averages(plan, 0, group["betas"][1])
        plan.tensors(came_clip, lr, plan.sums(squared_direction), [group["clip_threshold"]])
        _move_averages(plan, 1, group["betas"][2])
    plan.step(adam_undecayed if name == "adam" and not group["weight_decay"] else rule)


def _move_averages(plan: LaunchPlan, pair: int, beta: float) -> None:
    """Move R and C (pair 0) or Rr and Cr (pair 1) of all matrices, and compute their factors."""
    if (tables := plan.matrices) is not None:
        shared = tables.table, tables.sums, tables.factors
        plan.launch(tile_kernel, tables.tiles, *shared, pair=pair, tile=TILE)
        plan.launch(average_kernel, tables.lines, *shared, bits_of_float(beta), pair=pair, line=LINE)
        plan.launch(factor_kernel, tables.rows, *shared, pair=pair, line=LINE)
