"""AdamW and Adam, fused: ``ckpt8.optim.adamw.adam`` on blocks in registers, the same operations in the same order.

AdamW: theta = theta (1 - lr wd)                    Adam: g = g + wd theta
m = m + (1-b1) (g - m);     v = b2 v + (1-b2) g^2
theta -= m / (sqrt(v) / sqrt(1-b2^t) + eps) * lr/(1-b1^t)
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ckpt8.optim.triton.arithmetic import double, power
from ckpt8.optim.triton.blocks import (
    NOW,
    bits_of_block,
    elements,
    read_first,
    read_gradient,
    read_second,
    read_weight,
    scalar,
    work,
    write_first,
    write_second,
    write_weight,
)
from ckpt8.optim.triton.launches import Plan
from ckpt8.optim.triton.prologue import advance, bits_of_float, put, put_gradient_factor, rate

_FACTOR, _DECAY, _FIRST_RATE, _KEEP, _SECOND_RATE, _STEP_SIZE, _ROOT_CORRECTION, _EPS = map(tl.constexpr, range(8))


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "eps", "weight_decay"])
def prologue_kernel(
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
    row = tl.program_id(0)
    step = advance(table, row, found_inf)
    put_gradient_factor(scalars, row, grad_scale, maximize)
    eta, b1, b2, decay = rate(lr, lr_tensor), double(beta1), double(beta2), double(weight_decay)
    put(scalars, row, _DECAY, 1 - eta * decay if decoupled else decay)
    put(scalars, row, _FIRST_RATE, 1 - b1)
    put(scalars, row, _KEEP, b2)
    put(scalars, row, _SECOND_RATE, 1 - b2)
    put(scalars, row, _STEP_SIZE, eta / (1 - power(b1, step)))
    put(scalars, row, _ROOT_CORRECTION, tl.sqrt(1 - power(b2, step)))
    put(scalars, row, _EPS, double(eps))


@triton.jit
def adam(param, grad, m, v, scalars, row, decoupled: tl.constexpr, decays: tl.constexpr):
    """One step of fp32 blocks: ``param``, ``exp_avg``, ``exp_avg_sq``."""
    decay = scalar(scalars, row, _DECAY)
    if decoupled:
        param = param * decay
    elif decays:
        grad = grad + param * decay
    m = m + (grad - m) * scalar(scalars, row, _FIRST_RATE)
    v = v * scalar(scalars, row, _KEEP) + grad * grad * scalar(scalars, row, _SECOND_RATE)
    correction = tl.broadcast_to(scalar(scalars, row, _ROOT_CORRECTION), v.shape)
    denominator = tl.div_rn(tl.sqrt_rn(v), correction) + scalar(scalars, row, _EPS)
    return param - tl.div_rn(m, denominator) * scalar(scalars, row, _STEP_SIZE), m, v


@triton.jit
def step_kernel(
    table,
    scalars,
    programs,
    decoupled: tl.constexpr,
    decays: tl.constexpr,
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
    v = read_second(tensor, second, fourth_root, start, count, block, aligned)
    x, m, v = adam(x, g, m, v, scalars, row, decoupled, decays)
    bits = bits_of_block(tensor, start, block)
    write_weight(tensor, weight, levels, start, count, x, bits, block, aligned)
    write_first(tensor, first, start, count, m, block, aligned)
    write_second(tensor, second, fourth_root, start, count, v, bits, block, aligned)


def step(plan: Plan, group: dict[str, Any], grad_scale: Any, found_inf: Any) -> None:
    """One step of the tensors of a plan."""
    decoupled = group["rule"] == "adamw"
    plan.tensors(
        prologue_kernel,
        group["lr"],
        grad_scale,
        found_inf,
        *map(bits_of_float, (*group["betas"], group["eps"], group["weight_decay"])),
        decoupled=decoupled,
        maximize=group["maximize"],
    )
    plan.blocks(step_kernel, decoupled=decoupled, decays=bool(group["weight_decay"]))
