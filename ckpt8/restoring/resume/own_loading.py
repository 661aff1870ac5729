"""Optimizers that take their state through their own ``load_state_dict``.

Their class is unknown, and has a ``load_state_dict`` of its own, as in bitsandbytes, or keeps more than tensors and
numbers, as in torchao. They get what ``torch.load`` would give them, in the order of their parameters. When their code
fails, resume raises ResumeError and gives the optimizer its old state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt8.core.errors import ResumeError
from ckpt8.core.text import listed
from ckpt8.restoring.resume.fills import OptimizerPlan
from ckpt8.restoring.resume.groups import STRUCTURE, restored
from ckpt8.restoring.resume.live_parameters import ParameterMap
from ckpt8.restoring.resume.live_values import ValueBuilder, is_plain
from ckpt8.restoring.resume.state_checks import (
    foreign_state_problem,
    layout_of,
    object_problem,
    packed_optimizer,
    unwrapped,
)

_FORM = {"state", "param_groups"}
_OTHERWISE = "restore the checkpoint and give its state to load_state_dict"


def form_problem(optimizer: Optimizer) -> str | None:
    """Why resume cannot match the state of ``optimizer`` with a checkpoint, or None."""
    name = type(optimizer).__name__
    if not hasattr(optimizer, "state") or not hasattr(optimizer, "param_groups"):
        return f"{name} has no state or parameter groups of its own; {_OTHERWISE}"
    if unwrapped(optimizer) is optimizer and (packed_optimizer(optimizer) or layout_of(optimizer)):
        return None
    missing = _FORM - optimizer.state_dict().keys()
    return f"the state dict of {name} has no {listed(sorted(missing))}; {_OTHERWISE}" if missing else None


def loads_itself(optimizer: Optimizer, node: Mapping[str, Any]) -> bool:
    """Whether the saved state ``node`` goes through the ``load_state_dict`` of ``optimizer``."""
    if layout_of(optimizer) is not None:
        return False
    if type(unwrapped(optimizer)).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return True
    states = (state for state in node["state"].values() if isinstance(state, dict))
    return not all(is_plain(value) for state in states for value in state.values())


def plan_own_state(node: Mapping[str, Any], mapped: ParameterMap, builder: ValueBuilder) -> OptimizerPlan:
    """The plan for an optimizer that loads the saved state ``node`` itself, as a whole or not at all."""
    states, pairs = node["state"], mapped.pairs
    known = {each for group in node["param_groups"] for each in group["params"]}
    has_names = any(isinstance(each, str) for each in known)
    # Some classes keep sums over all parameters among the states, under a name, or next to them.
    sums = {key: value for key, value in states.items() if key not in known}
    shared = sums | {key: value for key, value in node.items() if key not in _FORM}
    found = [
        (pair.name, foreign_state_problem(states.get(pair.identifier), pair, group.saved or {}, builder))
        for group in mapped.groups
        for pair in group.pairs
    ]
    problems = [*mapped.problems, *(f"{name}: {problem}" for name, problem in found if problem)]
    if unlisted := [key for key in sums if has_names or not isinstance(key, str)]:
        problems.append(f"state of {listed(unlisted)}: belongs to no parameter of its groups")
    if shared and [pair.identifier for pair in pairs] != list(range(len(pairs))):
        problems.append(f"{listed(shared)}: may count parameters, which are in another order here")
    if problem := object_problem(shared, builder, "its state dict"):
        problems.append(problem)
    wrong = "its state is taken as a whole or not at all" if problems else None
    return OptimizerPlan(problems=problems, wrong=wrong, build=partial(_build, node, sums, mapped, builder))


def _build(
    node: Mapping[str, Any], sums: Mapping[Any, Any], mapped: ParameterMap, builder: ValueBuilder
) -> dict[str, Any]:
    """The state dict. Raises InputError for damage, ResumeError for parts that do not make a tensor."""
    states = node["state"]
    number_of = {id(pair): number for number, pair in enumerate(mapped.pairs)}
    state = {
        number_of[id(pair)]: _with_objects_on(pair.parameter.device, builder.build(states[pair.identifier]))
        for pair in mapped.pairs
        if pair.identifier in states
    }
    groups = []
    for group in mapped.groups:
        plain = {key: builder.build(value) for key, value in (group.saved or {}).items() if key not in STRUCTURE}
        numbers = [number_of[id(pair)] for pair in group.pairs]
        groups.append({**group.live, **restored(plain, group.live), "params": numbers})
    state |= {key: builder.build(value) for key, value in sums.items()}
    others = {key: builder.build(value) for key, value in node.items() if key not in _FORM}
    return {**others, "state": state, "param_groups": groups}


def _with_objects_on(device: torch.device, state: Any) -> Any:
    """A state whose objects hold their tensors on ``device``: ``Optimizer.load_state_dict`` does not look into them."""
    values = state.values() if isinstance(state, dict) else ()
    for held in (getattr(value, "__dict__", {}) for value in values if not isinstance(value, torch.Tensor)):
        held.update((key, _on(device, value)) for key, value in list(held.items()))
    return state


def _on(device: torch.device, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_on(device, each) for each in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value


def load(optimizer: Optimizer, take_state: Callable[[], object]) -> None:
    """Call ``take_state``, which runs code of the optimizer's class. Raises ResumeError for whatever that raises."""
    try:
        take_state()
    except Exception as exc:
        reason = (str(exc).splitlines() or [""])[0]
        raise ResumeError(
            f"{type(optimizer).__name__} does not take the saved state: {type(exc).__name__}: {reason}"
        ) from exc


@contextmanager
def undone_on_error(optimizer: Optimizer) -> Iterator[None]:
    """Give ``optimizer`` back its state, groups and attributes when the block raises."""
    inner = unwrapped(optimizer)
    states = [state for state in optimizer.state.values() if isinstance(state, dict)]
    changing = [optimizer.__dict__, inner.__dict__, *optimizer.param_groups, optimizer.state, *states]
    backups = [(live, dict(live)) for live in changing]
    try:
        yield
    except BaseException:
        for live, before in backups:
            live.clear()
            live.update(before)
        raise
