"""SGD with momentum, fused: ``ckpt8.optim.sgd.sgd`` on blocks in registers, the same operations in the same order.

g = g + wd theta;     b = g at the first step, then mu b + (1 - dampening) g
theta -= lr (g + mu b  if nesterov  else b);     without momentum: theta -= lr g
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ckpt8.optim.triton.arithmetic import double
from ckpt8.optim.triton.blocks import (
    NOW,
    bits_of_block,
    elements,
    read_first,
    read_gradient,
    read_weight,
    scalar,
    work,
    write_first,
    write_weight,
)
from ckpt8.optim.triton.launches import Plan
from ckpt8.optim.triton.prologue import advance, bits_of_float, put, put_gradient_factor, rate

_FACTOR, _DECAY, _KEEP, _RATE, _STEP_SIZE = map(tl.constexpr, range(5))


@triton.jit(do_not_specialize=["lr", "momentum", "dampening", "weight_decay"])
def prologue_kernel(
    table, scalars, lr, lr_tensor, grad_scale, found_inf, momentum, dampening, weight_decay, maximize: tl.constexpr
):
    """The numbers of the rule for one tensor."""
    row = tl.program_id(0)
    advance(table, row, found_inf)
    put_gradient_factor(scalars, row, grad_scale, maximize)
    put(scalars, row, _DECAY, double(weight_decay))
    put(scalars, row, _KEEP, double(momentum))
    put(scalars, row, _RATE, 1 - double(dampening))
    put(scalars, row, _STEP_SIZE, rate(lr, lr_tensor))


@triton.jit
def sgd(param, grad, buffer, first_step, scalars, row, decays: tl.constexpr, nesterov: tl.constexpr):
    """One step of fp32 blocks: ``param``, ``momentum_buffer``; ``buffer`` is None without momentum."""
    if decays:
        grad = grad + param * scalar(scalars, row, _DECAY)
    update = grad
    if buffer is not None:
        keep = scalar(scalars, row, _KEEP)
        buffer = tl.where(first_step, grad, buffer * keep + grad * scalar(scalars, row, _RATE))
        update = grad + buffer * keep if nesterov else buffer
    return param - update * scalar(scalars, row, _STEP_SIZE), buffer


@triton.jit
def step_kernel(
    table,
    scalars,
    programs,
    momentum: tl.constexpr,
    decays: tl.constexpr,
    nesterov: tl.constexpr,
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
    count = elements(tensor, start) if masked else None
    if tl.load(tensor + NOW) == 0:
        return
    g = read_gradient(tensor, grad, scalar(scalars, row, _FACTOR), start, count, block, aligned)
    x = read_weight(tensor, weight, levels, start, count, block, aligned)
    buffer = read_first(tensor, first, start, count, block, aligned) if momentum else None
    x, buffer = sgd(x, g, buffer, tl.load(tensor + NOW) == 1, scalars, row, decays, nesterov)
    write_weight(tensor, weight, levels, start, count, x, bits_of_block(tensor, start, block), block, aligned)
    if momentum:
        write_first(tensor, first, start, count, buffer, block, aligned)


def step(plan: Plan, group: dict[str, Any], grad_scale: Any, found_inf: Any) -> None:
    """One step of the tensors of a plan."""
    numbers = map(bits_of_float, (group["momentum"], group["dampening"], group["weight_decay"]))
    plan.tensors(prologue_kernel, group["lr"], grad_scale, found_inf, *numbers, maximize=group["maximize"])
    plan.blocks(
        step_kernel,
        momentum=bool(group["momentum"]),
        decays=bool(group["weight_decay"]),
        nesterov=group["nesterov"],
    )
