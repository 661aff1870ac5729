"""Parameter groups: which hyperparameters resume restores, and whether the groups are of the same optimizer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ckpt8.checkpoint.meaning.state_dicts import CHECKS
from ckpt8.core.text import listed
from ckpt8.optim.known_optimizers import setting_names

STRUCTURE = frozenset({"params", "param_names", CHECKS})
"""Keys about the parameters themselves, not about how to step them."""

IMPLEMENTATION = frozenset({"foreach", "fused", "triton", "capturable", "differentiable"})
"""Keys for how to compute a step. This depends on the machine, so the live setting stays where there is one."""

_ADDED_BY_TORCH = IMPLEMENTATION | {"maximize", "amsgrad", "decoupled_weight_decay"}
"""Keys that files of older versions lack; the live setting stays."""

_CLASS_MARKERS = ("decoupled_weight_decay", "decouple_wd", "gradient_release")
"""Settings that turn an optimizer into another, such as AdamW into Adam."""

_OTHER_SETTINGS = frozenset(
    {
        *("alpha", "rho", "ams_bound", "centered", "lr_decay", "ns_steps"),
        *("decoupled_weight_decay", "decouple_wd", "decouple_lr", "weight_decouple", "fixed_decay", "kahan_sum"),
        *("gradient_release", "quantize", "master_bytewidth"),
        *("trust_coefficient", "momentum_decay", "rectify", "degenerated_to_sgd", "nus", "gamma", "hessian_power"),
        *("update_period", "final_lr", "k", "adanorm", "adam_debias", "stable_adamw", "cautious"),
    }
)
"""Settings that no card lists: of unknown optimizers, and of how packages implement known ones."""


def _hyperparameters() -> set[str]:
    """The settings of all optimizers. A scheduler or the user added any other key."""
    return setting_names() | _OTHER_SETTINGS


_FORMS = frozenset(
    {
        *("beta1", "beta2", "eps1", "eps2", "amsgrad", "ams_bound", "decoupled_weight_decay", "decouple_wd"),
        *("decouple_lr", "weight_decouple", "fixed_decay", "kahan_sum", "gradient_release"),
    }
)
"""Settings that packages spell differently for one and the same optimizer, or that have checks of their own."""

_BOOKKEEPING = frozenset({"step", "setup", "master", "moment1", "moment2", "seed", "rule"})
"""Keys that optimizers, of packages and ours, keep in a group for themselves."""


def class_problem(saved: Mapping[Any, Any], live: Mapping[str, Any], defaults: Mapping[str, Any]) -> str | None:
    """Why a saved group cannot be one of this optimizer, or None."""
    missing = defaults.keys() - saved.keys() - _ADDED_BY_TORCH - STRUCTURE
    if missing:
        return f"its parameter groups lack {listed(sorted(missing))}"
    foreign = (saved.keys() & _hyperparameters()) - defaults.keys() - live.keys()
    if foreign:
        return f"its parameter groups have {listed(sorted(foreign))}"
    for key in _CLASS_MARKERS:
        if key in saved and key in live and bool(saved[key]) != bool(live[key]):
            return f"it was saved with {key}={saved[key]}, here it is {live[key]}"
    return length_problem(saved, live)


def length_problem(saved: Mapping[Any, Any], live: Mapping[str, Any]) -> str | None:
    """Why ``betas`` or ``eps`` have another number of values than here, or None."""
    for key in ("betas", "eps"):
        mine, theirs = live.get(key), saved.get(key)
        if _length(mine) != _length(theirs) and key in saved and key in live:
            return f"its {key} are {theirs}, here they are {mine}"
    return None


def foreign_settings(saved: Mapping[Any, Any], arguments: Collection[str]) -> str | None:
    """Why a group is not of an optimizer with these ``arguments``: it has settings beyond them; or None."""
    found = (saved.keys() & _hyperparameters()) - set(arguments) - _FORMS
    return f"its parameter groups have {listed(sorted(found))}" if found else None


def _length(value: object) -> int:
    return len(value) if isinstance(value, (tuple, list)) else 1


def added_entries(saved: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a group that a scheduler or the user added to the settings of the optimizer."""
    known = STRUCTURE | IMPLEMENTATION | _hyperparameters() | _BOOKKEEPING
    return {key: value for key, value in saved.items() if key not in known and value is not None}


def look_permuted(saved: Sequence[Mapping[Any, Any]], live: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the groups have the same weight decays in another order: pairing them by order would mix them up."""
    before = [group.get("weight_decay") for group in saved]
    now = [group.get("weight_decay") for group in live]
    numbers = all(isinstance(value, (int, float)) for value in (*before, *now))
    return numbers and before != now and sorted(before) == sorted(now)  # type: ignore[type-var]


def restored(saved: Mapping[Any, Any], live: Mapping[str, Any]) -> dict[str, Any]:
    """The values that a live group takes from ``saved``, which holds plain values and tensors."""
    values = {}
    for key, value in saved.items():
        if key in STRUCTURE or (key in IMPLEMENTATION and live.get(key) is not None):
            continue
        current = live.get(key)
        if isinstance(current, torch.Tensor):
            new = torch.as_tensor(value, dtype=current.dtype, device=current.device).clone()
            values[key] = new.reshape(current.shape) if new.numel() == current.numel() else new
        else:
            values[key] = value.clone() if isinstance(value, torch.Tensor) else value
    return values
