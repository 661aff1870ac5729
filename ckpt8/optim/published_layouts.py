"""How the published packages lay out their state and parameter groups, without any of them at hand.

torch AdamW, Adam, SGD, Adafactor; optimi StableAdamW (betas apart, step in the group); came-pytorch CAME; lion-pytorch
Lion.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ckpt8.core.errors import UsageError

_EXACT_IN_FP32 = 1 << 24
_STEPS = 1 << 62
_TORCH: dict[str, Any] = {"foreach": None, "differentiable": False, "fused": None}
_ADAM: dict[str, Any] = {**_TORCH, "amsgrad": False, "capturable": False}
_OPTIMI: dict[str, Any] = {
    "decouple_lr": False,
    "max_lr": None,
    "kahan_sum": False,
    "foreach": False,
    "triton": False,
    "gradient_release": False,
    "setup": True,
}
_EXTRA: dict[str, dict[str, Any]] = {
    "adamw": {**_ADAM, "decoupled_weight_decay": True},
    "adam": {**_ADAM, "decoupled_weight_decay": False},
    "sgd": _TORCH,
    "stable_adamw": _OPTIMI,
    "came": {},
    "lion": {},
    "adafactor": {"foreach": None},
}
_OURS = frozenset({"master", "moment1", "moment2", "seed", "rule"})
_ALSO_SAVED = frozenset({"step", "RMS", "eps_sq", "kahan_comp", "mean_square", "group"})
"""State that packed optimizers do without."""

_TAKES_MAXIMIZE = frozenset({"adamw", "adam", "sgd", "adafactor"})


def plain_state(group: Mapping[str, Any], step: int, moments: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """One parameter's state as the package of the group's rule has it."""
    rule = group["rule"]
    if rule in ("adamw", "adam", "adafactor"):
        dtype = torch.float32 if step <= _EXACT_IN_FP32 else torch.float64
        return {"step": torch.tensor(float(step), dtype=dtype), **moments}
    if rule == "stable_adamw":
        return {**moments, "eps_sq": torch.tensor(group["eps"] ** 2, dtype=torch.float32), "kahan_comp": None}
    if rule == "came":
        return {"step": step, **moments, "RMS": 0.0}
    return dict(moments)


def plain_group(group: Mapping[str, Any], steps: set[int]) -> dict[str, Any]:
    """A parameter group as the package of its rule has it. ``steps`` are those of its parameters."""
    rule = group["rule"]
    if group.get("maximize") and rule not in _TAKES_MAXIMIZE:
        raise UsageError(f"the published {rule} has no maximize")
    known = _OURS if rule in _TAKES_MAXIMIZE else _OURS | {"maximize"}
    plain = {key: value for key, value in group.items() if key not in known} | _EXTRA[rule]
    if rule == "stable_adamw":
        if len(steps) > 1:
            raise UsageError(f"optimi keeps one step for a group; its parameters are at steps {sorted(steps)}")
        plain["beta1"], plain["beta2"] = plain.pop("betas")
        plain["step"] = torch.tensor(max(steps, default=0), dtype=torch.int32)
    return plain


def step_of(state: Mapping[str, Any], group: Mapping[str, Any]) -> int:
    """The step of a parameter, from its state or its group; 1 where none is kept (SGD, Lion)."""
    step = state.get("step", group.get("step", 1))
    if isinstance(step, torch.Tensor) and step.numel() == 1:
        step = step.item()
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 <= step < _STEPS or step != int(step):
        shown = "too large" if isinstance(step, int) and step >= _STEPS else f"{repr(step)[:40]}, not a whole number"
        raise UsageError(f"its step is {shown}")
    return int(step)


def class_problem(given: Mapping[Any, Any], rule: str, arguments: Sequence[str]) -> str | None:
    """Why a plain group is none of ``rule``, or None."""
    try:
        found = packed_group(given, rule, arguments)
    except UsageError as exc:
        return str(exc)
    missing = {*arguments} - found.keys() - {"clip_threshold"}
    missing |= {"amsgrad"} - given.keys() if rule in ("adamw", "adam") else set()
    if missing:
        return f"its parameter groups lack {', '.join(sorted(missing))}"
    expected = {"decoupled_weight_decay": rule != "adam", "weight_decouple": True, "fixed_decay": False}
    for key, value in expected.items():
        if key in given and bool(given[key]) != value:
            return f"it was saved with {key}={given[key]}"
    return None


def state_problem(keys: Collection[str], expected: Collection[str], rule: str, group: Mapping[Any, Any]) -> str | None:
    """Why the ``keys`` of a plain state are none of ``rule``, which has ``expected`` tensors; or None."""
    needed = set(expected)
    if rule not in ("sgd", "lion") and "step" not in keys and group.get("step") is None:
        return "its step is missing"
    if rule == "stable_adamw":
        needed.add("eps_sq" if "beta1" in group else "kahan_comp")  # what tells it from an AdamW
    if missing := needed - set(keys):
        return f"its optimizer state lacks {', '.join(sorted(missing))}"
    if extra := set(keys) - needed - _ALSO_SAVED:
        return f"its optimizer state has {', '.join(sorted(map(str, extra)))}, which no {rule} has"
    return None


def packed_group(given: Mapping[str, Any], rule: str | None, arguments: Sequence[str]) -> dict[str, Any]:
    """The arguments of a rule out of a plain group, and what schedulers and torch keep there.

    Raises UsageError for a group of another convention of bias, amsgrad and decoupled learning rates.
    """
    if given.get("amsgrad"):
        raise UsageError("amsgrad is not supported")
    if given.get("decouple_lr"):
        raise UsageError("decouple_lr is not supported")
    optimi = "beta1" in given
    if (rule in ("adamw", "adam") and optimi) or (rule == "stable_adamw" and "amsgrad" in given):
        raise UsageError(f"the moments have another convention than {rule}; see adamw_to_stable_adamw and its inverse")
    found = dict(given)
    if optimi:
        found["betas"] = (given["beta1"], given["beta2"])
    if "eps1" in given:
        found["eps"] = (given["eps1"], given["eps2"])
    kept = {*arguments, "maximize", "initial_lr", "param_names"}
    return {key: value for key, value in found.items() if key in kept}
