"""Lion, fused: ``ckpt8.optim.lion.lion`` on blocks in registers, the same operations in the same order.

c = b1 m + (1-b1) g;     theta = theta (1 - lr wd) - lr sign(c);     m = b2 m + (1-b2) g
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

_FACTOR, _DECAY, _KEEP, _RATE, _NEXT_KEEP, _NEXT_RATE, _STEP_SIZE = map(tl.constexpr, range(7))


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "weight_decay"])
def prologue_kernel(
    table, scalars, lr, lr_tensor, grad_scale, found_inf, beta1, beta2, weight_decay, maximize: tl.constexpr
):
    """The numbers of the rule for one tensor."""
    row = tl.program_id(0)
    advance(table, row, found_inf)
    put_gradient_factor(scalars, row, grad_scale, maximize)
    eta, b1, b2 = rate(lr, lr_tensor), double(beta1), double(beta2)
    put(scalars, row, _DECAY, 1 - eta * double(weight_decay))
    put(scalars, row, _KEEP, b1)
    put(scalars, row, _RATE, 1 - b1)
    put(scalars, row, _NEXT_KEEP, b2)
    put(scalars, row, _NEXT_RATE, 1 - b2)
    put(scalars, row, _STEP_SIZE, eta)


@triton.jit
def lion(param, grad, m, scalars, row):
    """One step of fp32 blocks: ``param``, ``exp_avg``. The sign of NaN is 0, as torch has it."""
    direction = m * scalar(scalars, row, _KEEP) + grad * scalar(scalars, row, _RATE)
    sign = (direction > 0).to(tl.float32) - (direction < 0).to(tl.float32)
    param = param * scalar(scalars, row, _DECAY) - sign * scalar(scalars, row, _STEP_SIZE)
    return param, m * scalar(scalars, row, _NEXT_KEEP) + grad * scalar(scalars, row, _NEXT_RATE)


@triton.jit
def step_kernel(
    table,
    scalars,
    programs,
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
    m = read_first(tensor, first, start, count, block, aligned)
    x, m = lion(x, g, m, scalars, row)
    write_weight(tensor, weight, levels, start, count, x, bits_of_block(tensor, start, block), block, aligned)
    write_first(tensor, first, start, count, m, block, aligned)


def step(plan: Plan, group: dict[str, Any], grad_scale: Any, found_inf: Any) -> None:
    """One step of the tensors of a plan."""
    numbers = map(bits_of_float, (*group["betas"], group["weight_decay"]))
    plan.tensors(prologue_kernel, group["lr"], grad_scale, found_inf, *numbers, maximize=group["maximize"])
    plan.blocks(step_kernel)
