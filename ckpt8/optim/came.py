"""CAME (Luo et al., arXiv 2307.02047), as in came-pytorch: no bias correction.

    s  = g^2 + eps1;     R = b2 R + (1-b2) mean_-1(s);     C = b2 C + (1-b2) mean_-2(s)
    u  = g * approx(R, C);     approx(R, C) = rsqrt(R / mean_-1(R)) (x) rsqrt(C)
    u /= max(1, RMS(u)/d);     m = b1 m + (1-b1) u
    r  = (u - m)^2 + eps2;     Rr, Cr = b3-averages of its means, as R and C
    theta = theta (1 - lr wd) - lr m * approx(Rr, Cr)

Below two dimensions u = g * rsqrt(V), V = b2 V + (1-b2) s, and the step is m. Over blocks of rows this takes four
passes: R and C; RMS(u); Rr and Cr; the update. Each computes u and m again from the stored state. Row and column
averages are fp32 tensors of the whole parameter, summed in float64 over blocks that depend on the shape alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch

from ckpt8.codecs.companded8.reference import divide
from ckpt8.optim.packed import PackedOptimizer, Params
from ckpt8.optim.packed_tensor import Block, Factored, Values, clipping, inverse_root


def came(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float, float],
    eps: tuple[float, float],
    clip_threshold: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step for a tensor of two dimensions or more.

    ``whole`` holds ``exp_avg_sq_row``, ``exp_avg_sq_col``, ``exp_avg_res_row`` and ``exp_avg_res_col``. Yields
    ``param`` and ``exp_avg`` of every block, then the new statistics.
    """
    square = Factored(whole["exp_avg_sq_row"], whole["exp_avg_sq_col"])
    instability = Factored(whole["exp_avg_res_row"], whole["exp_avg_res_col"])
    for block in blocks:
        square.add(block, block.load("grad")[0].square_().add_(eps[0]))
    squares = square.averaged(betas[1])

    def direction(block: Block) -> torch.Tensor:
        return block.load("grad")[0].mul_(square.factor(block))

    clip = clipping(blocks, direction, clip_threshold)

    def moved(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        u, (m,) = divide(direction(block), clip), block.load("exp_avg")
        return u, m.mul_(betas[0]).add_(u * (1 - betas[0]))

    for block in blocks:
        u, m = moved(block)
        instability.add(block, u.sub_(m).square_().add_(eps[1]))
    instabilities = instability.averaged(betas[2])
    for block in blocks:
        (param,), (_, m) = block.load("param"), moved(block)
        param.mul_(1 - lr * weight_decay).sub_((m * instability.factor(block)).mul_(lr))
        yield {"param": param, "exp_avg": m}
    sq = {f"exp_avg_sq_{axis}": values for axis, values in squares.items()}
    yield sq | {f"exp_avg_res_{axis}": values for axis, values in instabilities.items()}


# A rule names the settings of its card, so both rules of CAME have the same signature.
def came_vector(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float, float],
    eps: tuple[float, float],
    clip_threshold: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step below two dimensions; yields ``param``, ``exp_avg`` and ``exp_avg_sq``."""

    def second(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        grad, v = block.load("grad", "exp_avg_sq")
        v.mul_(betas[1]).add_((grad * grad).add_(eps[0]).mul_(1 - betas[1]))
        return grad.mul_(inverse_root(v)), v

    clip = clipping(blocks, lambda block: second(block)[0], clip_threshold)
    for block in blocks:
        (u, v), (param, m) = second(block), block.load("param", "exp_avg")
        m.mul_(betas[0]).add_(divide(u, clip).mul_(1 - betas[0]))
        param.mul_(1 - lr * weight_decay).sub_(m * lr)
        yield {"param": param, "exp_avg": m, "exp_avg_sq": v}


class CAME(PackedOptimizer):
    """CAME on packed state. Arguments and defaults are came-pytorch's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.CAME(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "came"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        **packing: Any,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "clip_threshold": clip_threshold, "weight_decay": weight_decay},
            **packing,
        )
