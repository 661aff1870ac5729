"""Finds the rule of ``ckpt8.optim`` that a parameter of a checkpoint follows, and its settings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from ckpt8.checkpoint.meaning.quantised_state import is_low_bit
from ckpt8.checkpoint.meaning.replayed import Replayed
from ckpt8.checkpoint.meaning.update_rules import UNKNOWN, identify_state, recognise
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.optim.card import Card
from ckpt8.optim.known_optimizers import first_moments, setting, state_roles, why_unknown
from ckpt8.optim.recognised.cards import VARIANTS

_LARGEST_STEP = 2**53
_MISSING = object()
_INCOMPLETE = "hyperparameters are missing from the parameter group, or out of range"


def find_rule(state: Mapping[Any, Any], group: Mapping[Any, Any], step: object) -> Replayed | str:
    """The rule of one parameter from its saved state and group, or why there is no replay.

    Numbers in tensors must have been read, see ``scalars.read_settings``.
    """
    found = identify_state(state, group)
    if found is None or found[1].update is None:
        return _why_unknown(state, group)
    card, form = found
    if card.step_key != "step":
        step = group.get(card.step_key)
    taken = _steps_taken(card, state, group, step)
    if isinstance(taken, str):
        return taken
    names = card.settings.keys() | card.fixed.keys()
    settings = {**{key: value for key, value in state.items() if key in card.settings}, **group}
    read = {name: _read(name, card, state, settings) for name in names - {"lr", "weight_decay"}}
    shared = _numbers([group.get("lr"), group.get("weight_decay", 0.0)])
    if not shared or _MISSING in read.values():
        return _INCOMPLETE
    lr, weight_decay = shared
    if weight_decay and (group.get("decouple_lr") or group.get("fixed_decay")):
        return "its weight decay does not follow the learning rate, which is not replayed"
    choices = {*VARIANTS, *card.choices, *names}
    present = {each.when: each.key in state for each in form.tensors if each.when and each.when not in choices}
    counted = {"taken": taken} if "taken" in card.fixed else {}
    coupled = not card.own_decay and _is_coupled(group, card.coupled)
    return Replayed(card, form, taken, lr, weight_decay, coupled, read | present | counted)


def _why_unknown(state: Mapping[Any, Any], group: Mapping[Any, Any]) -> str:
    """Why no rule fits a state: what can be seen of it, and nothing about how it is stored."""
    tensors = {key: each for key, each in state.items() if isinstance(each, TensorRef) and each.shape}
    if is_low_bit(state):
        return "its state is in low precision already, which is not replayed"
    if reason := why_unknown(tensors, state, group):
        return reason
    known = {*first_moments(), *state_roles(tensors)}
    return UNKNOWN if not tensors or tensors.keys() & known else "its state has no first moment"


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
    "momentum": lambda momentum: 0 <= momentum < 1,
    "dampening": lambda dampening: dampening < 1,
    "clip_threshold": lambda threshold: threshold > 0,
}


def _read(name: str, card: Card, state: Mapping[Any, Any], group: Mapping[Any, Any]) -> Any:
    """An argument of the rule from the group, else the fixed one of the card; _MISSING, also if it is out of range."""
    if name == "clip_threshold" and "beta1" in group and "eps_sq" not in state:
        return math.inf  # optimi's AdamW has StableAdamW's averages, but does not clip.
    if name not in card.settings and (name not in group or not card.cls):
        return card.fixed[name]
    given, count = setting(group, name), card.settings.get(name, 1)
    if not count:
        return given
    # Some packages keep the threshold outside the group.
    given = 1.0 if name == "clip_threshold" and name not in group else given
    numbers = _numbers(given if isinstance(given, (tuple, list)) else [given])
    fits = _RANGES.get(name, math.isfinite)
    if len(numbers) != count or not all(map(fits, numbers)):
        return _MISSING
    return numbers if count > 1 else numbers[0]


def _is_coupled(group: Mapping[Any, Any], default: bool) -> bool:
    """Whether weight decay is an L2 penalty, as in Adam, where a group says so; else the ``default`` of the card."""
    keys = ("decoupled_weight_decay", "decouple_wd", "weight_decouple")
    return next((group[key] is False for key in keys if key in group), default)


def _numbers(values: Any) -> tuple[float, ...]:
    """Finite numbers as floats; empty for anything else."""
    given = tuple(values) if isinstance(values, (tuple, list)) else ()
    numeric = all(isinstance(n, (int, float)) and abs(n) <= sys.float_info.max for n in given)
    return tuple(map(float, given)) if numeric else ()
