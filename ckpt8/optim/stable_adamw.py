"""StableAdamW (Wortsman et al., arXiv 2304.13013): AdamW with Adafactor's update clipping and decay rates.

    b^  = b (1 - b^(t-1)) / (1 - b^t)                   for b in b1, b2: the moments stay free of bias (Shazeer and
                                                        Stern, arXiv 1804.04235)
    m   = m + (1-b1^) (g - m);     u = b2^ u + (1-b2^) g^2
    RMS = sqrt(mean(g^2 / max(u, eps^2)))               over the whole tensor
    eta = lr / max(1, RMS / d)                          d = 1
    theta = theta (1 - eta wd) - eta m / (sqrt(u) + eps)

A first pass over the blocks computes the mean: it forms u and keeps only sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ckpt8.codecs.companded8.reference import square_root
from ckpt8.optim.packed import PackedOptimizer, Params
from ckpt8.optim.packed_tensor import Block, Values, power, root_mean


def debiased(beta: float, step: int) -> float:
    """The beta that keeps an average free of the bias of its zero start; 0 at the first step."""
    return beta * (1 - power(beta, step - 1)) / (1 - power(beta, step)) if beta else 0.0


def _second_moment(u: torch.Tensor, square: torch.Tensor, beta2: float) -> torch.Tensor:
    return u.mul_(beta2).add_(square.mul(1 - beta2))


def stable_adamw(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_threshold: float = 1.0,
) -> Iterator[Values]:
    """One step, ``step`` counting from 1; yields ``param``, ``exp_avg`` and ``exp_avg_sq`` (free of bias).

    ``clip_threshold`` is the RMS above which the step is scaled down; infinity turns that off.
    """
    beta1, beta2 = debiased(betas[0], step), debiased(betas[1], step)

    def ratio(block: Block) -> torch.Tensor:
        grad, u = block.load("grad", "exp_avg_sq")
        square = grad.square_()
        return square / _second_moment(u, square, beta2).clamp_min_(eps * eps)

    eta = lr / max(1.0, root_mean(blocks, ratio) / clip_threshold)
    for block in blocks:
        param, grad, m, u = block.load("param", "grad", "exp_avg", "exp_avg_sq")
        m.add_((grad - m).mul_(1 - beta1))
        _second_moment(u, grad.square_(), beta2)
        param.mul_(1 - eta * weight_decay).sub_((m / square_root(u).add_(eps)).mul_(eta))
        yield {"param": param, "exp_avg": m, "exp_avg_sq": u}


class StableAdamW(PackedOptimizer):
    """StableAdamW on packed state. Arguments and defaults are optimi's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.StableAdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "stable_adamw"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        **packing: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **packing)
