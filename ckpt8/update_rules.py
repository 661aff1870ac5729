"""Update rules as pure float32 functions of one parameter: state in, update out, nothing of how either is stored.

    adamw         m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;  u = m/(1-b1^t) / (sqrt(v/(1-b2^t)) + eps)
    stable_adamw  the same averages with b^ = b (1-b^(t-1)) / (1-b^t);  u = m / (sqrt(v) + eps);
                  lr / max(1, sqrt(mean(g^2 / max(v, eps^2))))
    came          u^ = g / sqrt(R (x) C / mean(R)), clipped to RMS d;  m = b1 m + (1-b1) u^;
                  u = m / sqrt(Rr (x) Cr / mean(Rr)), with R, C of g^2 + eps1 and Rr, Cr of (u^ - m)^2 + eps2;
                  below two dimensions u^ = g / sqrt(v) and u = m

Sources: torch.optim.AdamW; Wortsman et al., arXiv 2304.13013; Luo et al., arXiv 2307.02047. The weight then becomes
w (1 - lr' wd) - lr' u, with lr' = lr times the factor that the rule returns beside u.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

State = dict[str, "Tensor"]


@dataclass(frozen=True, slots=True)
class Hyper:
    """Hyperparameters of one group; ``betas`` and ``eps`` have as many members as the optimizer has.

    ``clip`` is the RMS above which CAME and StableAdamW scale a step down.
    """

    lr: float
    betas: tuple[float, ...]
    eps: tuple[float, ...]
    weight_decay: float = 0.0
    clip: float = 1.0


Rule = Callable[[State, "Tensor", int, Hyper], tuple["Tensor", float]]
"""(state, gradient, step from 1, hyperparameters) -> (update, factor of the learning rate).

All tensors are float32, of the shape of the parameter or of its factored statistics. ``state`` is updated in place.
"""


def adamw(state: State, grad: Tensor, step: int, hyper: Hyper) -> tuple[Tensor, float]:
    """One step of Adam or AdamW; ``max_exp_avg_sq`` is used where the state has it."""
    beta1, beta2 = hyper.betas
    moment = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    if "max_exp_avg_sq" in state:
        second = state["max_exp_avg_sq"].copy_(state["max_exp_avg_sq"].maximum(second))
    root = (second.sqrt() / math.sqrt(1 - beta2**step)).add_(hyper.eps[0])
    return moment / root / (1 - beta1**step), 1.0


def stable_adamw(state: State, grad: Tensor, step: int, hyper: Hyper) -> tuple[Tensor, float]:
    """One step of StableAdamW; its averages carry no bias."""
    beta1, beta2 = (beta * (1 - beta ** (step - 1)) / (1 - beta**step) for beta in hyper.betas)
    moment = state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
    second = state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    rms = (grad.square() / second.clamp(min=hyper.eps[0] ** 2)).mean().sqrt().item()
    return moment / (second.sqrt() + hyper.eps[0]), 1.0 / max(1.0, rms / hyper.clip)


def came(state: State, grad: Tensor, step: int, hyper: Hyper) -> tuple[Tensor, float]:  # noqa: ARG001
    """One step of CAME; factored where the state has row and column statistics."""
    beta1, beta2, beta3 = hyper.betas
    square = grad.square().add_(hyper.eps[0])
    factored = "exp_avg_sq_row" in state
    if factored:
        update = grad * _follow(state, "exp_avg_sq", square, beta2)
    else:
        update = grad * state["exp_avg_sq"].mul_(beta2).add_(square, alpha=1 - beta2).rsqrt()
    update.div_(max(1.0, update.square().mean().sqrt().item() / hyper.clip))
    moment = state["exp_avg"].mul_(beta1).add_(update, alpha=1 - beta1)
    if not factored:
        return moment.clone(), 1.0
    residual = (update - moment).square_().add_(hyper.eps[1])
    return moment * _follow(state, "exp_avg_res", residual, beta3), 1.0


def _follow(state: State, name: str, square: Tensor, beta: float) -> Tensor:
    """Average the row and column means of ``square``; the inverse root of what they stand for."""
    state[f"{name}_row"].mul_(beta).add_(square.mean(-1), alpha=1 - beta)
    state[f"{name}_col"].mul_(beta).add_(square.mean(-2), alpha=1 - beta)
    return factored_variance(state, name).rsqrt_()


def factored_variance(state: State, name: str) -> Tensor:
    """R (x) C / mean(R)."""
    rows, columns = state[f"{name}_row"], state[f"{name}_col"]
    return (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)


RULES: dict[str, Rule] = {"adam": adamw, "stable_adamw": stable_adamw, "came": came}
"""By kind of ``update_space.UpdateRule``."""
