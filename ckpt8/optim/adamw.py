"""AdamW and Adam (Loshchilov and Hutter, arXiv 1711.05101; Kingma and Ba, arXiv 1412.6980), as torch computes them.

AdamW: theta = theta (1 - lr wd)                    Adam: g = g + wd theta
m = m + (1-b1) (g - m)                              first moment
v = b2 v + (1-b2) g^2                               second moment
theta -= lr/(1-b1^t) * m / (sqrt(v) / sqrt(1-b2^t) + eps)     amsgrad: with the largest v so far
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ckpt8.codecs.companded8.reference import divide, square_root
from ckpt8.optim.packed import PackedOptimizer, Params
from ckpt8.optim.packed_tensor import Block, Values, power


def adam(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    amsgrad: bool = False,
) -> Iterator[Values]:
    """One step, ``step`` counting from 1; yields ``param``, ``exp_avg``, ``exp_avg_sq``, or ``max_exp_avg_sq`` too."""
    beta1, beta2 = betas
    step_size = lr / (1 - power(beta1, step))
    root_correction = math.sqrt(1 - power(beta2, step))
    for block in blocks:
        param, grad, m, v = block.load("param", "grad", "exp_avg", "exp_avg_sq")
        if weight_decay and decoupled:
            param.mul_(1 - lr * weight_decay)
        elif weight_decay:
            grad.add_(param * weight_decay)
        m.add_((grad - m).mul_(1 - beta1))
        v.mul_(beta2).add_(grad.square_().mul_(1 - beta2))
        new = {"param": param, "exp_avg": m, "exp_avg_sq": v}
        if amsgrad:
            new["max_exp_avg_sq"] = v = torch.maximum(block.load("max_exp_avg_sq")[0], v)
        denominator = divide(square_root(v), root_correction).add_(eps)
        param.sub_((m / denominator).mul_(step_size))
        yield new


class AdamW(PackedOptimizer):
    """AdamW on packed state. Arguments are those of ``torch.optim.AdamW``; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "adamw"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        **packing: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **packing)


# Constructors repeat their arguments: signatures and defaults are those of the published classes.
class Adam(AdamW):
    """Adam, whose weight decay is part of the gradient. Arguments are those of ``torch.optim.Adam``.

    >>> optimizer = ckpt8.optim.Adam(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "adam"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        **packing: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, **packing)
