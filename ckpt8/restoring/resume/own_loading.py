"""Optimizers whose own ``load_state_dict`` takes their state.

Those are of unknown classes and have a ``load_state_dict`` of their own, as bitsandbytes' do, or keep more than tensors
and numbers, as torchao's do. They get what ``torch.load`` would have given them, in the order of their parameters. What
fails in there is a ResumeError, and the optimizer is as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from ckpt8.core.errors import ResumeError
from ckpt8.core.text import listed
from ckpt8.restoring.resume.groups import STRUCTURE, restored
from ckpt8.restoring.resume.live_parameters import ParameterMap
from ckpt8.restoring.resume.live_values import ValueBuilder, is_plain
from ckpt8.restoring.resume.published_state import is_packed, layout_of, unwrapped
from ckpt8.restoring.resume.state_checks import foreign_state_problem, object_problem

_FORM = {"state", "param_groups"}
_OTHERWISE = "restore the checkpoint and give its state to load_state_dict"


def form_problem(optimizer: Optimizer) -> str | None:
    """Why the state of ``optimizer`` is in no form that a checkpoint can be matched with, or None."""
    name = type(optimizer).__name__
    if not hasattr(optimizer, "state") or not hasattr(optimizer, "param_groups"):
        return f"{name} has no state or parameter groups of its own; {_OTHERWISE}"
    if unwrapped(optimizer) is optimizer and (is_packed(optimizer) or layout_of(optimizer) is not None):
        return None
    missing = _FORM - optimizer.state_dict().keys()
    if missing:
        return f"the state dict of {name} has no {listed(sorted(missing))}; {_OTHERWISE}"
    return None


def loads_itself(optimizer: Optimizer, node: Mapping[str, Any]) -> bool:
    """Whether ``optimizer`` is to load a saved state by itself."""
    if layout_of(optimizer) is not None:
        return False
    if type(unwrapped(optimizer)).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return True
    states = [state for state in node["state"].values() if isinstance(state, dict)]
    return not all(is_plain(value) for state in states for value in state.values())


class OwnState:
    """The state dict that an optimizer will load by itself. ``problems`` are the reasons why it cannot be made."""

    def __init__(
        self, node: Mapping[str, Any], mapped: ParameterMap, groups: Sequence[dict[str, Any]], builder: ValueBuilder
    ) -> None:
        self._node = node
        self._mapped = mapped
        self._groups = groups
        self._builder = builder
        self._known = {each for group in node["param_groups"] for each in group["params"]}
        # Some classes keep sums over all parameters beside their states, under a name.
        self._shared = {key: value for key, value in node["state"].items() if key not in self._known}
        self._beside = {key: value for key, value in node.items() if key not in _FORM}
        self.problems = list(self._find_problems())

    def _find_problems(self) -> Iterator[str]:
        yield from self._mapped.problems
        pairs = [pair for row in self._mapped.pairs for pair in row]
        for pair in pairs:
            problem = foreign_state_problem(self._node["state"].get(pair.identifier), pair, self._builder)
            if problem is not None:
                yield f"{pair.name}: {problem}"
        named = any(isinstance(each, str) for each in self._known)
        unlisted = [key for key in self._shared if named or not isinstance(key, str)]
        if unlisted:
            yield f"state of {listed(unlisted)}: belongs to no parameter of its groups"
        beside = self._shared | self._beside
        if beside and [pair.identifier for pair in pairs] != list(range(len(pairs))):
            yield f"{listed(beside)}: may count parameters, which are in another order here"
        problem = object_problem(beside, self._builder, "its state dict")
        if problem is not None:
            yield problem

    def build(self) -> dict[str, Any]:
        """Read everything. Raises InputError for damage, ResumeError for parts that do not make a tensor."""
        state: dict[Any, Any] = {}
        groups = []
        number = 0
        for live, pairs, index in zip(self._groups, self._mapped.pairs, self._mapped.group_of, strict=True):
            identifiers = []
            for pair in pairs:
                if pair.identifier in self._node["state"]:
                    state[number] = self._builder.build(self._node["state"][pair.identifier])
                identifiers.append(number)
                number += 1
            saved = self._node["param_groups"][index] if index is not None else {}
            plain = {key: self._builder.build(value) for key, value in saved.items() if key not in STRUCTURE}
            kept = {key: value for key, value in live.items() if key != "params"}
            groups.append({**kept, **restored(plain, live), "params": identifiers})
        state |= {key: self._builder.build(value) for key, value in self._shared.items()}
        beside = {key: self._builder.build(value) for key, value in self._beside.items()}
        return {**beside, "state": state, "param_groups": groups}


def load(optimizer: Optimizer, take: Callable[[], object]) -> None:
    """Call ``take``, which is code of the optimizer's class. Raises ResumeError for whatever it raises."""
    try:
        take()
    except Exception as exc:
        reason = (str(exc).splitlines() or [""])[0]
        raise ResumeError(
            f"{type(optimizer).__name__} does not take the saved state: {type(exc).__name__}: {reason}"
        ) from exc


@contextmanager
def undone_on_error(optimizer: Optimizer | None) -> Iterator[None]:
    """Give ``optimizer`` back its state, groups and attributes where the block raises."""
    if optimizer is None:
        yield
        return
    owners = [optimizer] if unwrapped(optimizer) is optimizer else [optimizer, unwrapped(optimizer)]
    attributes = [(owner.__dict__, dict(owner.__dict__)) for owner in owners]
    groups = [(group, dict(group)) for group in optimizer.param_groups]
    states = (optimizer.state, dict(optimizer.state))
    entries = [(entry, dict(entry)) for entry in optimizer.state.values() if isinstance(entry, dict)]
    try:
        yield
    except BaseException:
        for live, before in [*attributes, *groups, states, *entries]:
            live.clear()
            live.update(before)
        raise
