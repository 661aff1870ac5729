"""ScheduleFree AdamW (Defazio et al., arXiv 2405.15682) between calls of ``train`` and ``eval``: the weight is y.

v = b2 v + (1-b2) g^2; u = g / (sqrt(v / (1 - b2^t)) + eps) + wd y
c = w_t / (w_1 + ... + w_t), where w_t = t^r (largest lr so far)^p
y = (1-c) y + c z - lr (1 - b1 (1-c)) u;     z = z - lr u
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt8.codecs.companded8.reference import divide, square_root
from ckpt8.optim.blocks import Block, Values
from ckpt8.optim.rounding import power


def schedule_free_adamw(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    r: float,
    weight_lr_power: float,
    warmup_steps: float,
    weight_sum: float,
    lr_max: float,
    taken: int,
) -> Iterator[Values]:
    """One step; yields ``param``, ``z``, ``exp_avg_sq``. ``weight_sum`` and ``lr_max`` are those of step ``taken``."""
    beta1, beta2 = betas
    rate, weight = lr, 0.0
    for t in range(taken + 1, step + 1):
        rate = lr * min(1.0, t / warmup_steps) if warmup_steps else lr
        lr_max = max(rate, lr_max)
        weight = t**r * lr_max**weight_lr_power
        weight_sum += weight
    share = weight / weight_sum if weight_sum else 0.0
    for block in blocks:
        param, grad, z, v = block.load("param", "grad", "z", "exp_avg_sq")
        v.mul_(beta2).add_(grad.square().mul_(1 - beta2))
        update = grad.div_(square_root(divide(v.clone(), 1 - power(beta2, step))).add_(eps)).add_(param * weight_decay)
        param.lerp_(z, share).sub_(update * (rate * (1 - beta1 * (1 - share))))
        yield {"param": param, "z": z.sub_(update.mul_(rate)), "exp_avg_sq": v}
