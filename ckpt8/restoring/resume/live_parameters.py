"""Pairs the parameters of a saved optimizer with live ones: by name where both have names, else by their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.pairing import saved_names
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.core.errors import ResumeError
from ckpt8.core.text import listed
from ckpt8.restoring.resume.groups import STRUCTURE, look_permuted

Saved = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Pair:
    """A live parameter, the identifier of its saved state, and its name for messages."""

    parameter: Tensor
    identifier: int | str
    name: str


@dataclass(frozen=True, slots=True)
class GroupPair:
    """A live parameter group, the saved one (None if the checkpoint has none of its parameters), and its pairs."""

    live: dict[str, Any]
    saved: Saved | None
    pairs: list[Pair]


@dataclass(slots=True)
class ParameterMap:
    """The live groups in their order, each with its saved group; ``problems`` lists parameters without a partner."""

    groups: list[GroupPair] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def pairs(self) -> list[Pair]:
        """The pairs of all groups."""
        return [pair for group in self.groups for pair in group.pairs]


def live_names(optimizer: Optimizer, model: nn.Module | None) -> dict[int, list[str]]:
    """All names of every parameter, by ``id``: those in ``model``, else the ``param_names`` of the groups."""
    names: dict[int, list[str]] = {}
    if model is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    for group in optimizer.param_groups:
        for name, parameter in zip(group.get("param_names") or (), group["params"], strict=False):
            names.setdefault(id(parameter), [str(name)])
    return names


def map_parameters(saved: Sequence[Saved], optimizer: Optimizer, model: nn.Module | None) -> ParameterMap:
    """Pair saved and live parameters. Raises ResumeError where only a guess could do that."""
    names_there, names_here = saved_names(saved), live_names(optimizer, model)
    if isinstance(names_there, str):
        raise ResumeError(names_there)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if names_there and all(id(parameter) in names_here for parameter in parameters):
        return _map_by_name(saved, names_there, optimizer.param_groups, names_here)
    if any(isinstance(identifier, str) for identifier in names_there):
        raise ResumeError("its state has parameter names, which this optimizer does not know; give model= as well")
    return _map_by_order(saved, optimizer.param_groups, names_here)


def _map_by_name(
    saved: Sequence[Saved],
    names_there: Mapping[int | str, str],
    live: Sequence[dict[str, Any]],
    names_here: Mapping[int, list[str]],
) -> ParameterMap:
    identifier_of = {name: identifier for identifier, name in names_there.items()}
    matched = match(
        names_there.values(), (name for group in live for each in group["params"] for name in names_here[id(each)])
    )
    group_of = {identifier: k for k, group in enumerate(saved) for identifier in group["params"]}
    result = ParameterMap()
    for group in live:
        pairs = []
        for parameter in group["params"]:
            found = sorted({matched[name] for name in names_here[id(parameter)] if name in matched})
            if len(found) > 1:
                raise ResumeError(f"{listed(found)} are one tied parameter here, but several in the checkpoint")
            if found:
                pairs.append(Pair(parameter, identifier_of[found[0]], found[0]))
            else:
                result.problems.append(f"{names_here[id(parameter)][0]}: is not in the optimizer of the checkpoint")
        numbers = sorted({group_of[pair.identifier] for pair in pairs})
        if any(_settings(saved[number]) != _settings(saved[numbers[0]]) for number in numbers):
            raise ResumeError(
                f"parameters of one group here belong to groups {listed(numbers)} with other hyperparameters"
            )
        result.groups.append(GroupPair(group, saved[numbers[0]] if numbers else None, pairs))
    taken = {pair.identifier for pair in result.pairs}
    extra = [name for identifier, name in names_there.items() if identifier not in taken]
    result.problems += [f"{name}: is in the optimizer of the checkpoint but not in this one" for name in extra]
    return result


def _settings(group: Saved) -> dict[Any, Any]:
    return {key: value for key, value in group.items() if key not in STRUCTURE}


def _map_by_order(
    saved: Sequence[Saved], live: Sequence[dict[str, Any]], names_here: Mapping[int, list[str]]
) -> ParameterMap:
    """Pair by the running index over the groups, which means the same parameter only where the groups are equal."""
    before, now = ([len(group["params"]) for group in groups] for groups in (saved, live))
    if before != now:
        raise ResumeError(
            f"its parameter groups hold {before} parameters, those here hold {now}, and the file has no names; "
            "give this optimizer the groups of the saved one"
        )
    if look_permuted(saved, live):
        raise ResumeError(
            "its parameter groups have the weight decays of those here in another order, and the file has no names; "
            "give this optimizer its groups in the saved order"
        )
    result = ParameterMap()
    number = 0
    for there, group in zip(saved, live, strict=True):
        pairs = []
        for identifier, parameter in zip(there["params"], group["params"], strict=True):
            pairs.append(Pair(parameter, identifier, names_here.get(id(parameter), [f"parameter {number}"])[0]))
            number += 1
        result.groups.append(GroupPair(group, there, pairs))
    return result
