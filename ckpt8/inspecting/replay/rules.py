"""Finds the rule of ``ckpt8.optim`` that a parameter of a checkpoint follows, and takes steps of it in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ckpt8.checkpoint.meaning.update_rules import UNKNOWN, identify_state, recognise
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.lazy import resolve
from ckpt8.optim.blocks import Values, flat_blocks, row_blocks
from ckpt8.optim.card import Card, Form
from ckpt8.optim.known_optimizers import STATE_ROLES, first_moments, setting

_LARGEST_STEP = 2**53
_INCOMPLETE = "hyperparameters are missing from the parameter group, or out of range"


@dataclass(frozen=True, slots=True)
class Replayed:
    """A rule, the number of steps so far, the hyperparameters. ``coupled``: weight decay is part of the gradient."""

    card: Card
    form: Form
    step: int
    lr: float
    weight_decay: float
    coupled: bool
    arguments: Mapping[str, Any]

    def gradient_scale(self, state: Values) -> Tensor:
        """The RMS of recent gradients, flat: by element from the second moment, else one number for the tensor.

        That number is the RMS of independent gradients that would give the momentum m = a m + b g its RMS:
        rms(m) sqrt(1-a^2)/b.
        """
        if "exp_avg_sq_row" in state:
            rows, columns = state["exp_avg_sq_row"], state["exp_avg_sq_col"]
            square: Tensor = (rows / rows.mean(-1, keepdim=True)).unsqueeze(-1) * columns.unsqueeze(-2)
            return square.clamp_(min=0).nan_to_num_(0.0).sqrt_().reshape(-1)
        if "exp_avg_sq" in state:
            bias = 1 - self.arguments["betas"][1] ** self.step if self.form.update == "adam" else 1.0
            return (state["exp_avg_sq"].clamp(min=0) / bias).sqrt_()
        assert self.card.average is not None  # noqa: S101
        a, b = self.card.average(self.arguments)
        momentum, factor = state[self.form.tensors[0].key], math.sqrt(1 - a * a) / b
        rms: Tensor = momentum.double().square().mean().sqrt() * factor
        return rms.float().expand(momentum.shape)

    def advance(
        self, state: dict[str, Tensor], weight: Tensor | None, grad: Tensor, shape: tuple[int, ...], step: int
    ) -> Tensor:
        """Take step number ``step`` in place; return the update u per unit of learning rate, flat.

        All tensors are flat fp32 of a parameter of ``shape``, but for the row and column statistics. The rule subtracts
        u from a weight of zero at a learning rate of one without decay; if the weight is unknown, this call alone makes
        the new state.
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
        """Call the rule on ``inputs`` and copy its results into those tensors that ``outputs`` has."""

        def load(start: int, stop: int, view: tuple[int, ...], names: tuple[str, ...]) -> list[Tensor]:
            return [inputs[name][start:stop].clone().view(view) for name in names]

        whole = {each.key: inputs[each.key] for each in self.form.tensors if not each.is_moment}
        cuts = row_blocks(shape, load) if whole else flat_blocks(math.prod(shape), load)
        blocks = [block for _, _, block in cuts]
        rule: Callable[..., Iterator[Values]] = resolve(self.form.rule)
        results = rule(blocks, whole, step=step, lr=lr, weight_decay=weight_decay, **self.arguments)
        for start, stop, _ in cuts:
            for name, value in next(results).items():
                if name in outputs:
                    outputs[name][start:stop] = value.reshape(-1)
        for values in results:
            for name, value in values.items():
                if name in outputs:
                    outputs[name].copy_(value)


def find_rule(state: Mapping[Any, Any], group: Mapping[Any, Any], step: object) -> Replayed | str:
    """The rule of one parameter from its saved state and group, or why there is no replay."""
    if not any(isinstance(state.get(key), TensorRef) for key in first_moments()):
        reason = "its state has no first moment"
        return reason if STATE_ROLES.keys() & state.keys() else f"{reason}; the presets keep all of it lossless"
    found = identify_state(state, group)
    if found is None:
        return UNKNOWN
    card, form = found
    taken = _steps_taken(card, state, group, step)
    if isinstance(taken, str):
        return taken
    names = card.settings.keys() | card.fixed.keys()
    read = {name: _read(name, card, state, group) for name in names - {"lr", "weight_decay"}}
    shared = _numbers([group.get("lr"), group.get("weight_decay", 0.0)])
    if not shared or None in read.values():
        return _INCOMPLETE
    lr, weight_decay = shared
    if weight_decay and (group.get("decouple_lr") or group.get("fixed_decay")):
        return "its weight decay does not follow the learning rate, which is not replayed"
    present = {each.when: each.key in state for each in form.tensors if each.when and each.when not in names}
    return Replayed(card, form, taken, lr, weight_decay, card.coupled or _is_coupled(group), read | present)


def _steps_taken(card: Card, state: Mapping[Any, Any], group: Mapping[Any, Any], step: object) -> int | str:
    """The number of the last step, or why it is unknown; 1 if the rule needs none, since there is a momentum."""
    if not card.counts:
        return 1
    number = float(step) if isinstance(step, (int, float)) and abs(step) <= _LARGEST_STEP else None
    if isinstance(rule := recognise(state, group, number), str):
        return rule
    if group.keys() & {"bias_correction", "correct_bias"}:
        return "an Adam whose group has bias_correction or correct_bias is not replayed"
    return int(number) if number is not None and number >= 0 and number == int(number) else "the step is missing"


_RANGES: dict[str, Callable[[float], bool]] = {
    "betas": lambda beta: 0 <= beta < 1,
    "momentum": lambda momentum: 0 < momentum < 1,
    "dampening": lambda dampening: dampening < 1,
    "clip_threshold": lambda threshold: threshold > 0,
}


def _read(name: str, card: Card, state: Mapping[Any, Any], group: Mapping[Any, Any]) -> Any:
    """An argument of the rule from the group, else the fixed one of the card; None if missing or out of range."""
    if name == "clip_threshold" and "beta1" in group and "eps_sq" not in state:
        return math.inf  # optimi's AdamW has StableAdamW's averages, but does not clip.
    if name not in card.settings and name not in group:
        return card.fixed[name]
    given, count = setting(group, name), card.settings.get(name, 1)
    # Some packages keep the threshold outside the group.
    given = 1.0 if name == "clip_threshold" and name not in group else given
    numbers = _numbers(given if isinstance(given, (tuple, list)) else [given])
    fits = _RANGES.get(name, math.isfinite)
    if len(numbers) != count or not all(map(fits, numbers)):
        return None
    return numbers if count > 1 else numbers[0]


def _is_coupled(group: Mapping[Any, Any]) -> bool:
    """Whether weight decay is an L2 penalty, as in Adam. Files of old versions do not say: they count as AdamW."""
    keys = ("decoupled_weight_decay", "decouple_wd", "weight_decouple")
    return next((group[key] for key in keys if key in group), True) is False


def _numbers(values: Any) -> tuple[float, ...]:
    """Finite numbers as floats; empty for anything else."""
    given = tuple(values) if isinstance(values, (tuple, list)) else ()
    numeric = all(isinstance(n, (int, float)) and math.isfinite(n) for n in given)
    return tuple(map(float, given)) if numeric else ()
