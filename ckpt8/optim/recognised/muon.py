"""Muon (Jordan et al., kellerjordan.github.io/posts/muon, 2024) on matrices, as three packages compute it.

m = mu m + (1-mu) g;     O = NS(mu m + (1-mu) g), or NS(m) without Nesterov's momentum
theta = theta (1 - lr wd) - lr s O;     s = sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns))

NS takes a matrix, transposed if it is tall, in bfloat16: X = G / |G|; then X = a X + (b A + c A A) X, A = X X^T, some
times. torch and pytorch_optimizer round once for each matrix product and sum (``fused``), Keller Jordan's code after
each operation; the results differ by a rounding of bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ckpt8.optim.blocks import Block, Values

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def muon(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    fused: bool,
    nesterov: bool = True,
    ns_coefficients: tuple[float, ...] = _COEFFICIENTS,
    eps: float = 1e-7,
    ns_steps: float = 5,
    adjust_lr_fn: str | None = None,
    use_adjusted_lr: bool = False,
) -> Iterator[Values]:
    """One step of one block that is the matrix; yields ``param`` and ``momentum_buffer``."""
    for block in blocks:
        param, grad, m = block.load("param", "grad", "momentum_buffer")
        rows, columns = param.shape
        m.lerp_(grad, 1 - momentum)
        update = grad.lerp_(m, momentum) if nesterov else m
        direction = _orthogonal(update, ns_coefficients, eps, int(ns_steps), fused=fused)
        scale = math.sqrt(max(1, rows / columns))
        if use_adjusted_lr or adjust_lr_fn == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        if not fused:
            direction *= scale
            scale = 1.0
        param.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr * scale)
        yield {"param": param, "momentum_buffer": m}


def _orthogonal(
    matrix: torch.Tensor, coefficients: tuple[float, ...], eps: float, steps: int, *, fused: bool
) -> torch.Tensor:
    """NS of a matrix, in bfloat16."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps) if fused else x / (x.norm() + eps)
    for _ in range(steps):
        gram = x @ x.T
        if fused:
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        else:
            x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x
