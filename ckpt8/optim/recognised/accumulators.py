"""Rules that divide the gradient by the root of the squares so far.

rmsprop    v = a v + (1-a) g^2; centered: c = a c + (1-a) g, and v - c^2 in place of v
           theta -= lr g / (sqrt(v) + eps)                 momentum: b = mu b + g / (sqrt(v) + eps); theta -= lr b
adagrad    s = s + g^2                                     theta -= lr / (1 + (t-1) decay) g / (sqrt(s) + eps)
adadelta   v = r v + (1-r) g^2; u = sqrt(d + eps) / sqrt(v + eps) g; d = r d + (1-r) u^2; theta -= lr u

Sources: Hinton, lecture 6e, and Graves, arXiv 1308.0850 (RMSprop); Duchi et al., JMLR 12, 2011 (Adagrad); Zeiler,
arXiv 1212.5701 (Adadelta). All as torch computes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckpt8.codecs.companded8.reference import square_root
from ckpt8.optim.blocks import Block, Values


def rmsprop(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    centered: bool,
) -> Iterator[Values]:
    """One step; yields ``param``, ``square_avg``, and ``grad_avg`` and ``momentum_buffer`` where there are any."""
    for block in blocks:
        param, grad, v = block.load("param", "grad", "square_avg")
        v.mul_(alpha).add_(grad.square().mul_(1 - alpha))
        new = {"square_avg": v}
        variance = v
        if centered:
            [mean] = block.load("grad_avg")
            new["grad_avg"] = mean.lerp_(grad, 1 - alpha)
            variance = v - mean.square()
        update = grad / square_root(variance).add_(eps)
        if momentum:
            [buffer] = block.load("momentum_buffer")
            new["momentum_buffer"] = update = buffer.mul_(momentum).add_(update)
        yield {"param": param.mul_(1 - lr * weight_decay).sub_(update * lr), **new}


def adagrad(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    lr_decay: float,
    eps: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step; yields ``param`` and ``sum``."""
    step_size = lr / (1 + (step - 1) * lr_decay)
    for block in blocks:
        param, grad, total = block.load("param", "grad", "sum")
        total.add_(grad.square())
        param.mul_(1 - lr * weight_decay).sub_((grad / square_root(total).add_(eps)).mul_(step_size))
        yield {"param": param, "sum": total}


def adadelta(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    rho: float,
    eps: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step; yields ``param``, ``square_avg`` and ``acc_delta``."""
    for block in blocks:
        param, grad, v, deltas = block.load("param", "grad", "square_avg", "acc_delta")
        v.mul_(rho).add_(grad.square().mul_(1 - rho))
        update = square_root(deltas + eps).div_(square_root(v + eps)).mul_(grad)
        deltas.mul_(rho).add_(update.square().mul_(1 - rho))
        param.mul_(1 - lr * weight_decay).sub_(update.mul_(lr))
        yield {"param": param, "square_avg": v, "acc_delta": deltas}
