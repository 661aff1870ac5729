"""Rules that divide an average of gradients by the root of an average of squares, or by a norm like it.

m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; m^ = m / (1 - b1^t); v^ = v / (1 - b2^t)

adamax      n = max(b2 n, |g| + eps)                        theta -= lr m^ / n
nadam       mu_t = b1 (1 - 0.96^(t psi) / 2), M_t = mu_1 ... mu_t
            theta -= lr (g (1 - mu_t) / (1 - M_t) + m mu_(t+1) / (1 - M_(t+1))) / (sqrt(v^) + eps)
radam       rho = 2 / (1 - b2) - 1; r = rho - 2 t b2^t / (1 - b2^t)
            theta -= lr m^                                  while r <= 5, then
            theta -= lr m^ sqrt(1 - b2^t) / (sqrt(v) + eps) sqrt((r-4)(r-2) rho / ((rho-4)(rho-2) r))
adabelief   s = b2 s + (1-b2) (g - m)^2 + eps               theta -= lr m^ / (sqrt(s) / sqrt(1 - b2^t) + eps)
ademamix    l = b3 l + (1-b3) g                             theta -= lr (m^ + alpha l) / (sqrt(v^) + eps)
adan        d = g - g_(t-1); e = b2 e + (1-b2) d; n = b3 n + (1-b3) (g + b2 d)^2
            theta -= lr (m / (1 - b1^t) + b2 e / (1 - b2^t)) / (sqrt(n) / sqrt(1 - b3^t) + eps)
            theta = theta / (1 + lr wd)                     or theta (1 - lr wd) before the step

Sources: Kingma and Ba, arXiv 1412.6980 (Adamax); Dozat, ICLR 2016 workshop (NAdam); Liu et al., arXiv 1908.03265
(RAdam); Zhuang et al., arXiv 2010.07468 (AdaBelief); Pagliardini et al., arXiv 2409.03137 (AdEMAMix); Xie et al.,
arXiv 2208.06677 (Adan). Decay is theta (1 - lr wd) unless said otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from ckpt8.codecs.companded8.reference import divide, square_root
from ckpt8.optim.blocks import Block, Values
from ckpt8.optim.rounding import power


def adamax(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step; yields ``param``, ``exp_avg`` and ``exp_inf``."""
    beta1, beta2 = betas
    step_size = lr / (1 - power(beta1, step))
    for block in blocks:
        param, grad, m, norm = block.load("param", "grad", "exp_avg", "exp_inf")
        m.lerp_(grad, 1 - beta1)
        norm = torch.maximum(norm.mul_(beta2), grad.abs_().add_(eps))
        param.mul_(1 - lr * weight_decay).sub_((m / norm).mul_(step_size))
        yield {"param": param, "exp_avg": m, "exp_inf": norm}


def nadam(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    momentum_decay: float,
) -> Iterator[Values]:
    """One step; yields ``param``, ``exp_avg`` and ``exp_avg_sq``."""
    beta1, beta2 = betas
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (step, step + 1))
    product = _mu_product(beta1, momentum_decay, step)
    for_grad, for_m = lr * (1 - mu) / (1 - product), lr * mu_next / (1 - product * mu_next)
    for block in blocks:
        param, grad, m, v = block.load("param", "grad", "exp_avg", "exp_avg_sq")
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).add_(grad.square().mul_(1 - beta2))
        denominator = square_root(divide(v.clone(), 1 - power(beta2, step))).add_(eps)
        param.mul_(1 - lr * weight_decay).sub_((grad / denominator).mul_(for_grad)).sub_((m / denominator).mul_(for_m))
        yield {"param": param, "exp_avg": m, "exp_avg_sq": v}


_WARM = 1 << 17
"""Steps after which mu is beta1, to nine digits at the default decay."""


def _mu_product(beta1: float, momentum_decay: float, step: int) -> float:
    """M_t for settings that never changed; 0 once it no longer matters to 1 - M_t, the limit of mu after many steps."""
    product = 1.0
    for t in range(1, min(step, _WARM) + 1):
        product *= beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))
        if product < 1e-20:
            return 0.0
    return product * beta1 ** max(step - _WARM, 0)


def radam(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step; yields ``param``, ``exp_avg`` and ``exp_avg_sq``."""
    beta1, beta2 = betas
    bias2 = 1 - power(beta2, step)
    last = 2 / (1 - beta2) - 1
    length = last - 2 * step * power(beta2, step) / bias2
    step_size = lr / (1 - power(beta1, step))
    if length > 5:
        step_size *= math.sqrt((length - 4) * (length - 2) * last / ((last - 4) * (last - 2) * length) * bias2)
    for block in blocks:
        param, grad, m, v = block.load("param", "grad", "exp_avg", "exp_avg_sq")
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).add_(grad.square_().mul_(1 - beta2))
        direction = m / square_root(v).add_(eps) if length > 5 else m.clone()
        param.mul_(1 - lr * weight_decay).sub_(direction.mul_(step_size))
        yield {"param": param, "exp_avg": m, "exp_avg_sq": v}


def adabelief(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> Iterator[Values]:
    """One step; yields ``param``, ``exp_avg`` and ``exp_avg_var``."""
    beta1, beta2 = betas
    step_size, root_correction = lr / (1 - power(beta1, step)), math.sqrt(1 - power(beta2, step))
    for block in blocks:
        param, grad, m, variance = block.load("param", "grad", "exp_avg", "exp_avg_var")
        m.lerp_(grad, 1 - beta1)
        variance.mul_(beta2).add_((grad - m).square_().mul_(1 - beta2)).add_(eps)
        denominator = divide(square_root(variance), root_correction).add_(eps)
        param.mul_(1 - lr * weight_decay).sub_((m / denominator).mul_(step_size))
        yield {"param": param, "exp_avg": m, "exp_avg_var": variance}


def ademamix(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float, float],
    eps: float,
    weight_decay: float,
    alpha: float,
) -> Iterator[Values]:
    """One step; yields ``param``, ``exp_avg``, ``exp_avg_sq`` and ``exp_avg_slow``."""
    beta1, beta2, beta3 = betas
    bias1, root_correction = 1 - power(beta1, step), math.sqrt(1 - power(beta2, step))
    for block in blocks:
        param, grad, m, v, slow = block.load("param", "grad", "exp_avg", "exp_avg_sq", "exp_avg_slow")
        m.lerp_(grad, 1 - beta1)
        slow.lerp_(grad, 1 - beta3)
        v.mul_(beta2).add_(grad.square_().mul_(1 - beta2))
        denominator = divide(square_root(v), root_correction).add_(eps)
        update = divide(m.clone(), bias1).add_(slow * alpha).div_(denominator)
        param.mul_(1 - lr * weight_decay).sub_(update.mul_(lr))
        yield {"param": param, "exp_avg": m, "exp_avg_sq": v, "exp_avg_slow": slow}


def adan(
    blocks: Sequence[Block],
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float, float],
    eps: float,
    weight_decay: float,
    debiased: bool,
    last: str,
    weight_decouple: float = 0,
    no_prox: float = 0,
) -> Iterator[Values]:
    """One step; yields ``param``, ``exp_avg``, ``exp_avg_diff``, ``exp_avg_sq`` and the last gradient.

    ``last`` is the key of the last gradient, which is stored with its sign turned. ``debiased`` averages are stored
    after their division by 1 - b^t. With ``weight_decouple`` or ``no_prox`` weight decay comes first, as in AdamW.
    """
    decoupled = weight_decouple or no_prox
    beta1, beta2, beta3 = betas
    bias1, bias2, bias3 = (1 - power(beta, step) for beta in betas)
    to1, to2, to3 = 1 - beta1, 1 - beta2, 1 - beta3
    if debiased:
        to1, to2, to3 = to1 / bias1, to2 / bias2, to3 / bias3
        bias1 = bias2 = bias3 = 1.0
    for block in blocks:
        param, grad, m, e, n, difference = block.load("param", "grad", "exp_avg", "exp_avg_diff", "exp_avg_sq", last)
        difference.add_(grad)
        m.lerp_(grad, to1)
        e.lerp_(difference, to2)
        n.mul_(1 - to3).add_(difference.mul_(beta2).add_(grad).square_().mul_(to3))
        denominator = divide(square_root(n), math.sqrt(bias3)).add_(eps)
        if decoupled:
            param.mul_(1 - lr * weight_decay)
        param.sub_((m / denominator).mul_(lr / bias1)).sub_((e / denominator).mul_(lr * beta2 / bias2))
        if not decoupled:
            param = divide(param, 1 + lr * weight_decay)
        yield {"param": param, "exp_avg": m, "exp_avg_diff": e, "exp_avg_sq": n, last: grad.neg_()}
