"""Finds the rule of ``ckpt8.optim`` that a parameter of a checkpoint follows, and its settings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch

from ckpt8.checkpoint.meaning.quantised_state import is_low_bit
from ckpt8.checkpoint.meaning.replayed import Replayed
from ckpt8.checkpoint.meaning.update_rules import UNKNOWN, identify_state, recognise
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.optim.card import Card
from ckpt8.optim.known_optimizers import CARDS, first_moments, setting, state_roles, why_unknown
from ckpt8.optim.recognised.cards import VARIANTS

_LARGEST_STEP = 2**53
_MOST_ITERATIONS = 64
"""Of Newton and Schulz; five are usual."""

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
    rule = Replayed(card, form, taken, lr, weight_decay, coupled, read | present | counted)
    return _why_impossible(rule, state) or rule


def _why_impossible(rule: Replayed, state: Mapping[Any, Any]) -> str | None:
    """Why the rule takes no step from a state, or None."""
    tensors = tuple(each.key for each in rule.form.tensors if isinstance(state.get(each.key), TensorRef))
    if not {each.key for each in rule.form.present(rule.arguments)} <= set(tensors):
        return "its state lacks a tensor that its hyperparameters ask for"
    shape = state[tensors[0]].shape
    given = tuple(sorted(rule.arguments.items()))
    numbers = rule.step, rule.lr, rule.weight_decay, rule.coupled
    where = rule.card.rule_id, rule.card.forms.index(rule.form)
    if problem := rule.misfit(shape):
        return problem
    is_possible = _takes_a_step(*where, numbers, given, tensors, len(shape))
    return None if is_possible else "its rule takes no step from such a state with such hyperparameters"


@lru_cache(maxsize=4096)
def _takes_a_step(
    rule_id: str,
    form: int,
    numbers: tuple[int, float, float, bool],
    given: tuple[tuple[str, Any], ...],
    tensors: tuple[str, ...],
    dimensions: int,
) -> bool:
    """Whether the rule takes a step of a few elements: some settings divide by zero, some rules take matrices alone."""
    card = CARDS[rule_id]
    rule = Replayed(card, card.forms[form], *numbers, dict(given))
    shape = (*[1] * (dimensions - 2), *[2] * min(dimensions, 2))
    try:
        state = {}
        for each in (tensor for tensor in rule.form.tensors if tensor.key in tensors):
            values = torch.full(each.shape(shape), 0.5)
            state[each.key] = values.reshape(-1) if each.is_moment else values
        grad = rule.gradient_scale(state)
        rule.advance(state, torch.ones(grad.shape), grad, shape, rule.step + 1)
    except (ArithmeticError, ValueError, TypeError, RuntimeError):
        return False
    return True


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
    "ns_steps": lambda steps: 0 <= steps <= _MOST_ITERATIONS,
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
