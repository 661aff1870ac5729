"""StableAdamW, fused: ``ckpt8.optim.stable_adamw.stable_adamw`` on blocks in registers.

    b^  = b (1 - b^(t-1)) / (1 - b^t)
    m   = m + (1-b1^) (g - m);     u = b2^ u + (1-b2^) g^2
    RMS = sqrt(mean(g^2 / max(u, eps^2)))               over the whole tensor
    eta = lr / max(1, RMS)
    theta = theta (1 - eta wd) - eta m / (sqrt(u) + eps)

One launch sums over blocks and one over the blocks of a tensor, in float64 and always in the same order. The torch path
adds exactly; the two sums differ by some 1e-16 of their value, so that eta, which is fp32, nearly always agrees.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ckpt8.optim.triton.arithmetic import double, power
from ckpt8.optim.triton.blocks import (
    COLUMNS,
    NOW,
    NUMEL,
    bits_of_block,
    elements,
    read_first,
    read_gradient,
    read_second,
    read_weight,
    scalar,
    total,
    without_padding,
    work,
    write_first,
    write_second,
    write_weight,
)
from ckpt8.optim.triton.launches import Plan
from ckpt8.optim.triton.prologue import advance, bits_of_float, put, put_gradient_factor, rate

CHUNK = 256
"""How many partial sums are read at once."""

_FACTOR, _FIRST_RATE, _KEEP, _SECOND_RATE, _EPS, _FLOOR, _DECAY, _STEP_SIZE = map(tl.constexpr, range(8))


@triton.jit
def debiased(beta, step):
    """The beta that keeps an average free of the bias of its zero start; float64."""
    return beta * (1 - power(beta, step - 1)) / (1 - power(beta, step))


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "eps"])
def prologue_kernel(table, scalars, lr, lr_tensor, grad_scale, found_inf, beta1, beta2, eps, maximize: tl.constexpr):
    """The numbers of the rule for one tensor, but for the step size."""
    row = tl.program_id(0)
    step = advance(table, row, found_inf)
    put_gradient_factor(scalars, row, grad_scale, maximize)
    keep = debiased(double(beta2), step)
    put(scalars, row, _FIRST_RATE, 1 - debiased(double(beta1), step))
    put(scalars, row, _KEEP, keep)
    put(scalars, row, _SECOND_RATE, 1 - keep)
    put(scalars, row, _EPS, double(eps))
    put(scalars, row, _FLOOR, double(eps) * double(eps))


@triton.jit
def second_moment(u, square, scalars, row):
    """The new second moment, free of bias."""
    return u * scalar(scalars, row, _KEEP) + square * scalar(scalars, row, _SECOND_RATE)


@triton.jit
def sum_kernel(
    table,
    scalars,
    programs,
    partials,
    grad: tl.constexpr,
    second: tl.constexpr,
    fourth_root: tl.constexpr,
    aligned: tl.constexpr,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """The sum of g^2 / max(u, eps^2) over one block of one tensor."""
    row, tensor, start = work(table, programs, block)
    count = elements(tensor, start) if masked else None
    if tl.load(tensor + NOW) == 0:
        return
    g = read_gradient(tensor, grad, scalar(scalars, row, _FACTOR), start, count, block, aligned)
    square = g * g
    u = second_moment(read_second(tensor, second, fourth_root, start, count, block, aligned), square, scalars, row)
    ratio = tl.div_rn(square, tl.maximum(u, scalar(scalars, row, _FLOOR), tl.PropagateNan.ALL))
    if masked:
        ratio = without_padding(ratio, count, block)
    tl.store(partials + tl.program_id(0), tl.sum(tl.sum(ratio.to(tl.float64), axis=1)))


@triton.jit(do_not_specialize=["lr", "weight_decay"])
def clip_kernel(table, scalars, lr, lr_tensor, partials, runs, weight_decay, chunk: tl.constexpr):
    """The step size of one tensor."""
    row = tl.program_id(0)
    count = tl.load(table + row * COLUMNS + NUMEL).to(tl.float64)
    rms = tl.sqrt(total(partials, runs, row, chunk) / count)
    # A NaN leaves the step size as it is, as Python's max does.
    eta = rate(lr, lr_tensor) / tl.where(rms > 1.0, rms, 1.0)
    put(scalars, row, _DECAY, 1 - eta * double(weight_decay))
    put(scalars, row, _STEP_SIZE, eta)


@triton.jit
def stable_adamw(param, grad, m, u, scalars, row):
    """One step of fp32 blocks: ``param``, ``exp_avg``, ``exp_avg_sq``."""
    m = m + (grad - m) * scalar(scalars, row, _FIRST_RATE)
    u = second_moment(u, grad * grad, scalars, row)
    step = tl.div_rn(m, tl.sqrt_rn(u) + scalar(scalars, row, _EPS)) * scalar(scalars, row, _STEP_SIZE)
    return param * scalar(scalars, row, _DECAY) - step, m, u


@triton.jit
def step_kernel(
    table,
    scalars,
    programs,
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
    row, tensor, start = work(table, programs, block)
    count = elements(tensor, start) if masked else None
    if tl.load(tensor + NOW) == 0:
        return
    g = read_gradient(tensor, grad, scalar(scalars, row, _FACTOR), start, count, block, aligned)
    x = read_weight(tensor, weight, levels, start, count, block, aligned)
    m = read_first(tensor, first, start, count, block, aligned)
    u = read_second(tensor, second, fourth_root, start, count, block, aligned)
    x, m, u = stable_adamw(x, g, m, u, scalars, row)
    bits = bits_of_block(tensor, start, block)
    write_weight(tensor, weight, levels, start, count, x, bits, block, aligned)
    write_first(tensor, first, start, count, m, block, aligned)
    write_second(tensor, second, fourth_root, start, count, u, bits, block, aligned)


def step(plan: Plan, group: dict[str, Any], grad_scale: Any, found_inf: Any) -> None:
    """One step of the tensors of a plan."""
    numbers = map(bits_of_float, (*group["betas"], group["eps"]))
    plan.tensors(prologue_kernel, group["lr"], grad_scale, found_inf, *numbers, maximize=group["maximize"])
    sums = plan.sums(sum_kernel)
    plan.tensors(clip_kernel, group["lr"], *sums, bits_of_float(group["weight_decay"]), chunk=CHUNK)
    plan.blocks(step_kernel)
