"""Lion, fused: ``ckpt8.optim.optimizers.lion`` on blocks in registers, the same operations in the same order.

c = b1 m + (1-b1) g;     theta = theta (1 - lr wd) - lr sign(c);     m = b2 m + (1-b2) g
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ckpt8.optim.triton.kernels import double, scalar
from ckpt8.optim.triton.launches import LaunchPlan, Scaler
from ckpt8.optim.triton.prologue import advance, put, rate

_DECAY, _KEEP, _RATE, _NEXT_KEEP, _NEXT_RATE, _STEP_SIZE = map(tl.constexpr, range(1, 7))


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "weight_decay"])
def prologue_kernel(
    table, scalars, lr, lr_tensor, grad_scale, found_inf, beta1, beta2, weight_decay, maximize: tl.constexpr
):
    """The numbers of the rule for one tensor."""
    numbers, _ = advance(table, scalars, grad_scale, found_inf, maximize)
    eta, b1, b2 = rate(lr, lr_tensor), double(beta1), double(beta2)
    put(numbers, _DECAY, 1 - eta * double(weight_decay))
    put(numbers, _KEEP, b1)
    put(numbers, _RATE, 1 - b1)
    put(numbers, _NEXT_KEEP, b2)
    put(numbers, _NEXT_RATE, 1 - b2)
    put(numbers, _STEP_SIZE, eta)


@triton.jit
def lion(x, g, m, v, numbers, step, place):
    """One step of fp32 blocks. The sign of NaN is 0, as in torch."""
    direction = m * scalar(numbers, _KEEP) + g * scalar(numbers, _RATE)
    sign = (direction > 0).to(tl.float32) - (direction < 0).to(tl.float32)
    m = m * scalar(numbers, _NEXT_KEEP) + g * scalar(numbers, _NEXT_RATE)
    return x * scalar(numbers, _DECAY) - sign * scalar(numbers, _STEP_SIZE), m, m


def step(plan: LaunchPlan, group: dict[str, Any], scaler: Scaler) -> None:
    """One step of the tensors of a plan."""
    plan.tensors(
        prologue_kernel, group["lr"], scaler, [*group["betas"], group["weight_decay"]], maximize=group["maximize"]
    )
    plan.step(lion)
