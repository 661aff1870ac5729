"""Checks a packed state dict against an optimizer and copies it; raises before anything changes.

``torch.optim.Optimizer.load_state_dict`` casts state to the element type of the parameter, which destroys codes and
scales, and it shares memory with the state dict. This module does neither.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from ckpt8.core.errors import UsageError
from ckpt8.optim.master_weights import CHECKS
from ckpt8.optim.packed_state import PackedState
from ckpt8.optim.packing_options import check_group

Found = Mapping[str, tuple[torch.dtype, tuple[int, ...]] | None]
"""Element type and shape of every entry of a saved state; None for an entry that is no tensor."""

State = defaultdict[torch.Tensor, dict[str, Any]]


def matched_state(optimizer: PackedState, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], State]:
    """New parameter groups and state for ``optimizer``, copied from a state dict. Raises UsageError."""
    saved = state_dict["param_groups"]
    sizes, expected = ([len(group["params"]) for group in groups] for groups in (saved, optimizer.param_groups))
    if sizes != expected:
        raise UsageError(f"parameter groups of {sizes} parameters do not fit an optimizer with groups of {expected}")
    extra = state_dict["state"].keys() - {identifier for group in saved for identifier in group["params"]}
    if extra:
        raise UsageError(f"state of parameters that no group has: {sorted(map(str, extra))[:5]}")
    groups = [_matched_group(*pair, optimizer.rule_id) for pair in zip(optimizer.param_groups, saved, strict=True)]
    state: State = defaultdict(dict)
    for group, given in zip(groups, saved, strict=True):
        for param, identifier in zip(group["params"], given["params"], strict=True):
            if found := state_dict["state"].get(identifier):
                state[param] = _matched_tensors(optimizer, group, param, found, f"state of parameter {identifier}")
    return groups, state


def _matched_group(current: Mapping[str, Any], given: Mapping[str, Any], rule_id: str) -> dict[str, Any]:
    if given.get("rule") != rule_id:
        raise UsageError(
            f"state of {given.get('rule', 'another optimizer')!r} does not fit {rule_id!r}; "
            "see ckpt8.optim.state_conversion"
        )
    kept = {key: deepcopy(value) for key, value in given.items() if key not in ("params", CHECKS)}
    group = {**current, **kept, "params": current["params"]}
    check_group(group)
    return group


def _matched_tensors(
    optimizer: PackedState, group: dict[str, Any], param: torch.Tensor, given: Mapping[str, Any], what: str
) -> dict[str, torch.Tensor]:
    found: Found = {
        name: (value.dtype, tuple(value.shape)) if isinstance(value, torch.Tensor) else None
        for name, value in given.items()
    }
    problem = layout_problem(optimizer, group, param, found)
    if problem is not None:
        raise UsageError(f"{what}: {problem}")
    state = optimizer.initial_state(group, param, exact_names(found))
    for name, tensor in state.items():
        tensor.copy_(given[name])
    return state


def exact_names(found: Found) -> set[str]:
    """The exact tensors of a state: moments under their own name, and a residual of 16 bits."""
    return {name for name, what in found.items() if name != "residual" or (what and what[0] == torch.int16)}


def layout_problem(optimizer: PackedState, group: dict[str, Any], param: torch.Tensor, found: Found) -> str | None:
    """Why ``param`` cannot have a state of these element types and shapes, or None."""
    layout = optimizer.state_layout(group, param, exact_names(found))
    if found.keys() != layout.keys():
        return f"has {', '.join(sorted(found))}, expected {', '.join(sorted(layout))}"
    for name, (dtype, shape) in layout.items():
        what = found[name]
        if what != (dtype, shape):
            return f"{name} is {'no tensor' if what is None else f'{what[0]} {what[1]}'}, expected {dtype} {shape}"
    return None
