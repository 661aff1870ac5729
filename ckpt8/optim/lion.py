"""Lion (Chen et al., arXiv 2302.06675, algorithm 2).

c = b1 m + (1-b1) g;     theta = theta (1 - lr wd) - lr sign(c);     m = b2 m + (1-b2) g
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ckpt8.optim.packed import PackedOptimizer, Params
from ckpt8.optim.packed_tensor import Block, Values


def lion(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> Iterator[Values]:
    """One step; yields ``param`` and ``exp_avg``."""
    beta1, beta2 = betas
    for block in blocks:
        param, grad, m = block.load("param", "grad", "exp_avg")
        direction = (m * beta1).add_(grad * (1 - beta1)).sign_()
        param.mul_(1 - lr * weight_decay).sub_(direction.mul_(lr))
        m.mul_(beta2).add_(grad.mul_(1 - beta2))
        yield {"param": param, "exp_avg": m}


class Lion(PackedOptimizer):
    """Lion on packed state. Arguments and defaults are lion-pytorch's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.Lion(model.parameters(), lr=1e-4)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "lion"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **packing: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **packing)
