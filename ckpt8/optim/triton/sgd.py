"""SGD with momentum, fused: ``ckpt8.optim.optimizers.sgd`` on blocks in registers, in the same order.

g = g + wd theta;     b = g at the first step, then mu b + (1 - dampening) g
theta -= lr (g + mu b  if nesterov  else b);     without momentum: theta -= lr g
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ckpt8.optim.triton.kernels import double, scalar
from ckpt8.optim.triton.launches import LaunchPlan, Scaler
from ckpt8.optim.triton.prologue import advance, put, rate

_DECAY, _KEEP, _RATE, _STEP_SIZE, _LOOKAHEAD = map(tl.constexpr, range(1, 6))


@triton.jit(do_not_specialize=["lr", "momentum", "dampening", "weight_decay"])
def prologue_kernel(
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


def step(plan: LaunchPlan, group: dict[str, Any], scaler: Scaler) -> None:
    """One step of the tensors of a plan."""
    plan.tensors(
        prologue_kernel,
        group["lr"],
        scaler,
        [group["momentum"], group["dampening"], group["weight_decay"]],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
    )
    plan.step(sgd)
