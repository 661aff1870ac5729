"""StableAdamW, fused: ``ckpt8.optim.optimizers.stable_adamw`` on blocks in registers.

    b^  = b (1 - b^(t-1)) / (1 - b^t)
    m   = m + (1-b1^) (g - m);     u = b2^ u + (1-b2^) g^2
    RMS = sqrt(mean(g^2 / max(u, eps^2)))               over the whole tensor
    eta = lr / max(1, RMS)
    theta = theta (1 - eta wd) - eta m / (sqrt(u) + eps)

One launch sums over blocks, another over the blocks of a tensor, in float64 and always in the same order. The torch
path adds exactly; the two sums differ by some 1e-16 of their value, so eta, which is fp32, nearly always agrees.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ckpt8.optim.triton.kernels import double, power, root_mean, scalar
from ckpt8.optim.triton.launches import LaunchPlan, Scaler
from ckpt8.optim.triton.prologue import advance, own_numbers, put, rate

_FIRST_RATE, _KEEP, _SECOND_RATE, _EPS, _FLOOR, _DECAY, _STEP_SIZE = map(tl.constexpr, range(1, 8))


@triton.jit
def debiased(beta, step):
    """The beta that keeps an average free of the bias of its zero start; float64."""
    return beta * (1 - power(beta, step - 1)) / (1 - power(beta, step))


@triton.jit(do_not_specialize=["lr", "beta1", "beta2", "eps"])
def prologue_kernel(table, scalars, lr, lr_tensor, grad_scale, found_inf, beta1, beta2, eps, maximize: tl.constexpr):
    """The numbers of the rule for one tensor, without the step size."""
    numbers, step = advance(table, scalars, grad_scale, found_inf, maximize)
    keep = debiased(double(beta2), step)
    put(numbers, _FIRST_RATE, 1 - debiased(double(beta1), step))
    put(numbers, _KEEP, keep)
    put(numbers, _SECOND_RATE, 1 - keep)
    put(numbers, _EPS, double(eps))
    put(numbers, _FLOOR, double(eps) * double(eps))


@triton.jit(do_not_specialize=["lr", "weight_decay"])
def clip_kernel(table, scalars, lr, lr_tensor, partials, runs, weight_decay):
    """The step size of one tensor."""
    numbers, rms = own_numbers(scalars), root_mean(table, partials, runs)
    # A NaN leaves the step size as it is, as Python's max does.
    eta = rate(lr, lr_tensor) / tl.where(rms > 1.0, rms, 1.0)
    put(numbers, _DECAY, 1 - eta * double(weight_decay))
    put(numbers, _STEP_SIZE, eta)


@triton.jit
def second_moment(u, square, numbers):
    """The new second moment, free of bias."""
    return u * scalar(numbers, _KEEP) + square * scalar(numbers, _SECOND_RATE)


@triton.jit
def ratio(g, u, numbers, place):
    """g^2 / max(u, eps^2), with the new u."""
    square = g * g
    floored = tl.maximum(second_moment(u, square, numbers), scalar(numbers, _FLOOR), tl.PropagateNan.ALL)
    return tl.div_rn(square, floored)


@triton.jit
def stable_adamw(x, g, m, u, numbers, step, place):
    """One step of fp32 blocks."""
    m = m + (g - m) * scalar(numbers, _FIRST_RATE)
    u = second_moment(u, g * g, numbers)
    update = tl.div_rn(m, tl.sqrt_rn(u) + scalar(numbers, _EPS)) * scalar(numbers, _STEP_SIZE)
    return x * scalar(numbers, _DECAY) - update, m, u


def step(plan: LaunchPlan, group: dict[str, Any], scaler: Scaler) -> None:
    """One step of the tensors of a plan."""
    plan.tensors(prologue_kernel, group["lr"], scaler, [*group["betas"], group["eps"]], maximize=group["maximize"])
    plan.tensors(clip_kernel, group["lr"], plan.sums(ratio), [group["weight_decay"]])
    plan.step(stable_adamw)
