"""AdamW and Adam, fused: ``ckpt8.optim.optimizers.adam`` on blocks in registers, the same operations in the same order.

AdamW: theta = theta (1 - lr wd)                    Adam: g = g + wd theta
m = m + (1-b1) (g - m);     v = b2 v + (1-b2) g^2
theta -= m / (sqrt(v) / sqrt(1-b2^t) + eps) * lr/(1-b1^t)
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ckpt8.optim.triton.kernels import double, power, scalar
from ckpt8.optim.triton.launches import LaunchPlan, Scaler
from ckpt8.optim.triton.prologue import advance, put, rate

_DECAY, _FIRST_RATE, _KEEP, _SECOND_RATE, _STEP_SIZE, _ROOT_CORRECTION, _EPS = map(tl.constexpr, range(1, 8))


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
    numbers, step = advance(table, scalars, grad_scale, found_inf, maximize)
    eta, b1, b2, decay = rate(lr, lr_tensor), double(beta1), double(beta2), double(weight_decay)
    put(numbers, _DECAY, 1 - eta * decay if decoupled else decay)
    put(numbers, _FIRST_RATE, 1 - b1)
    put(numbers, _KEEP, b2)
    put(numbers, _SECOND_RATE, 1 - b2)
    put(numbers, _STEP_SIZE, eta / (1 - power(b1, step)))
    put(numbers, _ROOT_CORRECTION, tl.sqrt(1 - power(b2, step)))
    put(numbers, _EPS, double(eps))


@triton.jit
def undecayed(x, g, m, v, numbers, step, place):
    """Adam without weight decay."""
    m = m + (g - m) * scalar(numbers, _FIRST_RATE)
    v = v * scalar(numbers, _KEEP) + g * g * scalar(numbers, _SECOND_RATE)
    correction = tl.broadcast_to(scalar(numbers, _ROOT_CORRECTION), v.shape)
    denominator = tl.div_rn(tl.sqrt_rn(v), correction) + scalar(numbers, _EPS)
    return x - tl.div_rn(m, denominator) * scalar(numbers, _STEP_SIZE), m, v


@triton.jit
def adam(x, g, m, v, numbers, step, place):
    """Adam: weight decay is part of the gradient."""
    return undecayed(x, g + x * scalar(numbers, _DECAY), m, v, numbers, step, place)


@triton.jit
def adamw(x, g, m, v, numbers, step, place):
    """AdamW: weights shrink first."""
    return undecayed(x * scalar(numbers, _DECAY), g, m, v, numbers, step, place)


def step(plan: LaunchPlan, group: dict[str, Any], scaler: Scaler) -> None:
    """One step of the tensors of a plan."""
    decoupled = group["rule"] == "adamw"
    plan.tensors(
        prologue_kernel,
        group["lr"],
        scaler,
        [*group["betas"], group["eps"], group["weight_decay"]],
        decoupled=decoupled,
        maximize=group["maximize"],
    )
    plan.step(adamw if decoupled else adam if group["weight_decay"] else undecayed)
