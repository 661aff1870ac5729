"""Writes and reads the state and the parameter groups of published classes, without their packages.

The cards in ``known_optimizers`` say what each class keeps and where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ckpt8.core.errors import UsageError
from ckpt8.optim.known_optimizers import CARDS, SIDE_STATE, SPELLINGS

_EXACT_IN_FP32 = 1 << 24
_STEPS = 1 << 62
_OURS = frozenset({"master", "moment1", "moment2", "seed", "rule"})


def plain_state(group: Mapping[str, Any], step: int, moments: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """One parameter's state in the layout of the first published class of the group's rule."""
    published = CARDS[group["rule"]].published[0]
    counter: dict[str, Any] = {"step": step} if published.step == "int" else {}
    if published.step == "tensor":
        counter["step"] = torch.tensor(step, dtype=torch.float32 if step <= _EXACT_IN_FP32 else torch.float64)
    more = {
        key: torch.tensor(value(group), dtype=torch.float32) if callable(value) else value
        for key, value in published.state.items()
    }
    return {**counter, **moments, **more}


def plain_group(group: Mapping[str, Any], steps: set[int]) -> dict[str, Any]:
    """A group in the layout of the first published class of its rule. ``steps``: the steps of its parameters.

    Raises UsageError where that class cannot express the group.
    """
    rule = group["rule"]
    published = CARDS[rule].published[0]
    if group.get("maximize") and not published.takes_maximize:
        raise UsageError(f"the published {rule} has no maximize")
    known = _OURS if published.takes_maximize else _OURS | {"maximize"}
    plain = {key: value for key, value in group.items() if key not in known} | dict(published.group)
    if published.splits_betas:
        plain["beta1"], plain["beta2"] = plain.pop("betas")
    if published.step == "group":
        if len(steps) > 1:
            raise UsageError(
                f"{published.package} keeps one step for a group; its parameters are at steps {sorted(steps)}"
            )
        plain["step"] = torch.tensor(max(steps, default=0), dtype=torch.int32)
    return plain


def step_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> int:
    """The step of a parameter, from its state or its group; 1 where neither has one (SGD, Lion). Raises UsageError."""
    step = state.get("step", group.get("step", 1))
    if isinstance(step, torch.Tensor) and step.numel() == 1:
        step = step.item()
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < _STEPS or step != int(step):
        shown = "too large" if isinstance(step, int) and step >= _STEPS else f"{repr(step)[:40]}, not a whole number"
        raise UsageError(f"its step is {shown}")
    return int(step)


def class_problem(given: Mapping[Any, Any], rule: str, arguments: Sequence[str]) -> str | None:
    """Why a group of a published class does not fit ``rule``, or None."""
    try:
        found = packed_group(given, rule, arguments)
    except UsageError as exc:
        return str(exc)
    card = CARDS[rule]
    missing = {*arguments} - found.keys() - {"clip_threshold"}
    # A group without it may belong to another optimizer with two moments.
    missing |= {"amsgrad"} - given.keys() if card.matrix.update == "adam" else set()
    if missing:
        return f"its parameter groups lack {', '.join(sorted(missing))}"
    expected = {
        "decoupled_weight_decay": card.fixed.get("decoupled", True),
        "weight_decouple": True,
        "fixed_decay": False,
    }
    for key, value in expected.items():
        if key in given and bool(given[key]) != value:
            return f"it was saved with {key}={given[key]}"
    return None


def state_problem(keys: Collection[str], expected: Collection[str], rule: str, group: Mapping[Any, Any]) -> str | None:
    """Why a published state with these ``keys`` does not fit ``rule``, which needs ``expected``; or None."""
    card = CARDS[rule]
    published = next((each for each in card.published if each.splits_betas == ("beta1" in group)), None)
    if card.published[0].step is not None and "step" not in keys and group.get("step") is None:
        return "its step is missing"
    needed = {*expected} | ({published.sign} if published is not None and published.sign else set())
    if missing := needed - set(keys):
        return f"its optimizer state lacks {', '.join(sorted(missing))}"
    if extra := set(keys) - needed - SIDE_STATE:
        return f"its optimizer state has {', '.join(sorted(map(str, extra)))}, which no {rule} has"
    return None


def packed_group(given: Mapping[str, Any], rule: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """The settings of a rule from a published group, with the entries of schedulers and torch.

    Raises UsageError for moments with another bias convention, for amsgrad, and for decoupled learning rates.
    """
    if given.get("amsgrad"):
        raise UsageError("amsgrad is not supported")
    if given.get("decouple_lr"):
        raise UsageError("decouple_lr is not supported")
    update = CARDS[rule].matrix.update if rule else None
    if (update == "adam" and "beta1" in given) or (update == "stable_adamw" and "amsgrad" in given):
        raise UsageError(f"the moments have another convention than {rule}; see adamw_to_stable_adamw and its inverse")
    spelled = {name: tuple(given[part] for part in parts) for name, parts in SPELLINGS.items() if parts[0] in given}
    found = {**given, **spelled}
    kept = {*arguments, "maximize", "initial_lr", "param_names"}
    return {key: value for key, value in found.items() if key in kept}
