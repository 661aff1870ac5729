"""Which rule of ``ckpt8.optim`` the parameter of a checkpoint follows, and steps of it on tensors in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt8.checkpoint.meaning.update_rules import is_lion, is_sgd, recognise
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import FIRST_MOMENTS, STATE_ROLES
from ckpt8.optim.adamw import adam
from ckpt8.optim.blocks import Values, flat_blocks, row_blocks
from ckpt8.optim.came import came, came_vector
from ckpt8.optim.lion import lion
from ckpt8.optim.sgd import sgd
from ckpt8.optim.stable_adamw import stable_adamw

ELEMENTWISE = (*FIRST_MOMENTS, "exp_avg_sq", "max_exp_avg_sq")
FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")
_LARGEST_STEP = 2**53
_INCOMPLETE = "hyperparameters are missing from the parameter group, or out of range"


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rule, the steps taken so far, and the hyperparameters. ``coupled``: weight decay is part of the gradient."""

    rule: Callable[..., Iterator[Values]]
    step: int
    lr: float
    weight_decay: float
    coupled: bool
    arguments: Mapping[str, Any]

    def gradient_scale(self, state: Values) -> Tensor:
        """The RMS of recent gradients, flat: by element from the second moment, else one number for the tensor.

        That number is the RMS that independent gradients must have for the momentum to have the RMS that it has:
        rms(m) sqrt((1+b2)/(1-b2)) for Lion, rms(b) sqrt(1-mu^2)/(1-dampening) for SGD.
        """
        if "exp_avg_sq_row" in state:
            rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            square: Tensor = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)
            return square.clamp_(min=0).nan_to_num_(0.0).sqrt_().reshape(-1)
        if "exp_avg_sq" in state:
            bias = 1 - self.arguments["betas"][1] ** self.step if self.rule is adam else 1.0
            return (state["exp_avg_sq"].clamp(min=0) / bias).sqrt_()
        if self.rule is sgd:
            momentum = state["momentum_buffer"]
            factor = math.sqrt(1 - self.arguments["momentum"] ** 2) / (1 - self.arguments["dampening"])
        else:
            momentum, beta2 = state["exp_avg"], self.arguments["betas"][1]
            factor = math.sqrt((1 + beta2) / (1 - beta2))
        rms: Tensor = momentum.double().square().mean().sqrt() * factor
        return rms.float().expand(momentum.shape)

    def advance(
        self, state: dict[str, Tensor], weight: Tensor | None, grad: Tensor, shape: tuple[int, ...], step: int
    ) -> Tensor:
        """Step number ``step``, in place; gives the update u for each unit of learning rate, flat.

        All tensors are flat fp32 of a parameter of ``shape``, but for the row and column statistics. u is what the
        rule takes from a weight of zero at a learning rate of one without decay; where the weight is unknown, that
        call alone makes the new state.
        """
        if self.coupled and self.weight_decay and weight is not None:
            grad = grad + weight * self.weight_decay
        inputs = {**state, "grad": grad}
        update = torch.empty_like(grad)
        nothing = torch.zeros(1).expand(grad.shape)
        to_keep = state if weight is None else {}
        self._call({**inputs, "param": nothing}, {**to_keep, "param": update}, shape, step, 1.0, 0.0)
        if weight is not None:
            decay = 0.0 if self.coupled else self.weight_decay
            self._call({**inputs, "param": weight}, {**state, "param": weight}, shape, step, self.lr, decay)
        return update.neg_()

    def _call(
        self,
        inputs: Mapping[str, Tensor],
        outputs: Mapping[str, Tensor],
        shape: tuple[int, ...],
        step: int,
        lr: float,
        weight_decay: float,
    ) -> None:
        """Call the rule on ``inputs`` and store what it yields where ``outputs`` has a place for it."""

        def load(start: int, stop: int, view: tuple[int, ...], names: tuple[str, ...]) -> list[Tensor]:
            return [inputs[name][start:stop].clone().view(view) for name in names]

        whole = {name: inputs[name] for name in FACTORS if name in inputs}
        cuts = row_blocks(shape, load) if whole else flat_blocks(math.prod(shape), load)
        blocks = [block for _, _, block in cuts]
        results = self.rule(blocks, whole, step=step, lr=lr, weight_decay=weight_decay, **self.arguments)
        for start, stop, _ in cuts:
            for name, value in next(results).items():
                if name in outputs:
                    outputs[name][start:stop] = value.reshape(-1)
        for values in results:
            for name, value in values.items():
                if name in outputs:
                    outputs[name].copy_(value)


def find_rule(state: Mapping[Any, Any], group: Mapping[Any, Any], step: object) -> Replayed | str:
    """The rule of one parameter from its saved state and group, or why it cannot be replayed."""
    if not any(isinstance(state.get(key), TensorRef) for key in FIRST_MOMENTS):
        reason = "its state has no first moment"
        return reason if STATE_ROLES.keys() & state.keys() else f"{reason}; the presets keep all of it lossless"
    shared = _numbers([group.get("lr"), group.get("weight_decay", 0.0)])
    if is_sgd(state, group):
        found = _sgd(group)
    elif is_lion(state, group):
        found = _lion(group)
    else:
        found = _adaptive(state, group, step)
    if isinstance(found, str):
        return found
    if not shared:
        return _INCOMPLETE
    rule, taken, arguments = found
    lr, weight_decay = shared
    if weight_decay and (group.get("decouple_lr") or group.get("fixed_decay")):
        return "its weight decay does not follow the learning rate, which is not replayed"
    return Replayed(rule, taken, lr, weight_decay, rule is sgd or _is_coupled(group), arguments)


_Found = tuple[Callable[..., Iterator[Values]], int, dict[str, Any]]
"""The rule, the steps taken so far, and arguments besides lr and weight decay."""


def _sgd(group: Mapping[Any, Any]) -> _Found | str:
    numbers = _numbers([group["momentum"], group["dampening"]])
    if not numbers or not 0 < numbers[0] < 1 or not numbers[1] < 1:
        return _INCOMPLETE
    momentum, dampening = numbers
    # No step is kept, but a momentum is there: the next step is not the first.
    return sgd, 1, {"momentum": momentum, "dampening": dampening, "nesterov": bool(group["nesterov"])}


def _lion(group: Mapping[Any, Any]) -> _Found | str:
    betas = _betas(group, 2)
    return (lion, 1, {"betas": betas}) if betas else _INCOMPLETE


def _adaptive(state: Mapping[Any, Any], group: Mapping[Any, Any], step: object) -> _Found | str:
    """Adam, StableAdamW and CAME, as far as ``recognise`` knows them."""
    number = float(step) if isinstance(step, (int, float)) and abs(step) <= _LARGEST_STEP else None
    rule = recognise(state, group, number)
    if isinstance(rule, str):
        return rule
    if group.keys() & {"bias_correction", "correct_bias"}:
        return "an Adam whose group has bias_correction or correct_bias is not replayed"
    if "RMS" in state:
        return _came(state, group)
    if number is None or number < 0 or number != int(number):
        return "the step is missing"
    return _adam(state, group, int(number), biased=rule.kind == "adam")


def _came(state: Mapping[Any, Any], group: Mapping[Any, Any]) -> _Found | str:
    betas, eps, clip = _betas(group, 3), _eps(group, 2), _clip_threshold(group)
    if not betas or not eps or not clip:
        return _INCOMPLETE
    # The rule is the same at every step.
    return (
        came if "exp_avg_sq_row" in state else came_vector,
        0,
        {"betas": betas, "eps": eps, "clip_threshold": clip},
    )


def _adam(state: Mapping[Any, Any], group: Mapping[Any, Any], step: int, *, biased: bool) -> _Found | str:
    betas, eps, clip = _betas(group, 2), _eps(group, 1), _clip_threshold(group)
    if not betas or not eps or not clip:
        return _INCOMPLETE
    arguments = {"betas": betas, "eps": eps[0]}
    if biased:
        return adam, step, {**arguments, "decoupled": True, "amsgrad": "max_exp_avg_sq" in state}
    # optimi's AdamW has the same averages, but does not clip.
    threshold = math.inf if "beta1" in group and "eps_sq" not in state else clip
    return stable_adamw, step, {**arguments, "clip_threshold": threshold}


def _clip_threshold(group: Mapping[Any, Any]) -> float:
    """RMS above which a step is scaled down: 1 where the group does not say, 0 where it is no positive number."""
    given = _numbers([group.get("clip_threshold", 1.0)])
    return max(0.0, *given) if given else 0.0


def _is_coupled(group: Mapping[Any, Any]) -> bool:
    """Whether weight decay is an L2 penalty, as in Adam. Files of old versions do not say: then it is AdamW's."""
    keys = ("decoupled_weight_decay", "decouple_wd", "weight_decouple")
    return next((group[key] for key in keys if key in group), True) is False


def _betas(group: Mapping[Any, Any], count: int) -> tuple[float, ...]:
    """``count`` betas below one, or nothing."""
    betas = _numbers(group.get("betas", [group.get("beta1"), group.get("beta2")]))
    return betas if len(betas) == count and all(0 <= beta < 1 for beta in betas) else ()


def _eps(group: Mapping[Any, Any], count: int) -> tuple[float, ...]:
    eps = group.get("eps", [group.get("eps1"), group.get("eps2")])
    found = _numbers(eps if isinstance(eps, (tuple, list)) else [eps])
    return found if len(found) == count else ()


def _numbers(values: Any) -> tuple[float, ...]:
    """Finite numbers as floats; empty for anything else."""
    given = tuple(values) if isinstance(values, (tuple, list)) else ()
    numeric = all(isinstance(n, (int, float)) and math.isfinite(n) for n in given)
    return tuple(map(float, given)) if numeric else ()
