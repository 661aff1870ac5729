"""Adafactor (Shazeer and Stern, arXiv 1804.04235), as torch computes it: no momentum, a factored second moment.

    w  = t^gamma;     rho = min(lr, 1/sqrt(t));     alpha = max(eps2, RMS(theta)) rho
    R += w (mean_-1(g^2) - R);     C += w (mean_-2(g^2) - C);     V = R (x) C / max(mean_-2(R), eps1)
    u  = g / sqrt(max(V, eps1^2));     theta = theta (1 - lr wd) - alpha u / max(1, RMS(u)/d)

Below two dimensions V += w (g^2 - V). By default eps1 is the machine epsilon of fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ckpt8.optim.packed import PackedOptimizer, Params
from ckpt8.optim.packed_tensor import Block, Factored, Values, clipping, inverse_root, root_mean


def adafactor(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    beta2_decay: float,
    eps: tuple[float | None, float],
    d: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step, ``step`` counting from 1.

    ``whole`` holds ``row_var`` (..., rows, 1) and ``col_var`` (..., 1, columns) from two dimensions on. Yields
    ``param`` of every block, and ``variance`` below two dimensions; then the new statistics.
    """
    eps1 = torch.finfo(torch.float32).eps if eps[0] is None else eps[0]
    change = float(step) ** beta2_decay
    rms = root_mean(blocks, lambda block: block.load("param")[0].square_())
    alpha = max(eps[1], rms) * min(lr, 1 / math.sqrt(step))
    if whole:
        averages = Factored(whole["row_var"], whole["col_var"])
        for block in blocks:
            averages.add(block, block.load("grad")[0].square_())
        new = averages.averaged(1 - change)
        shares = averages.rows / averages.rows.double().mean(-1, keepdim=True).float().clamp_min_(eps1)

    def second_moment(block: Block) -> torch.Tensor:
        if whole:
            rows = shares[block.batches, block.rows].unsqueeze(-1)
            return rows * averages.columns[block.batches].unsqueeze(-2)
        variance, grad = block.load("variance", "grad")
        return variance.add_((grad.square_() - variance).mul_(change))

    def direction(block: Block) -> torch.Tensor:
        return block.load("grad")[0].mul_(inverse_root(second_moment(block).clamp_min_(eps1 * eps1)))

    clip = clipping(blocks, direction, d)
    for block in blocks:
        (param,) = block.load("param")
        param.mul_(1 - lr * weight_decay).sub_(direction(block).mul_(alpha / clip))
        yield {"param": param} | ({} if whole else {"variance": second_moment(block)})
    if whole:
        yield {"row_var": new["row"], "col_var": new["col"]}


class Adafactor(PackedOptimizer):
    """Adafactor on packed state. Arguments and defaults are torch's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.Adafactor(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "adafactor"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        **packing: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}, **packing
        )
