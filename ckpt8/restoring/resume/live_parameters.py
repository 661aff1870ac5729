"""Which saved parameter is which live one: by name where both sides know names, else by place in the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.pairing import saved_names
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.core.text import listed
from ckpt8.restoring.resume.groups import STRUCTURE, look_permuted


@dataclass(frozen=True, slots=True)
class Pair:
    """A live parameter, the identifier of its saved state, and its name for messages."""

    parameter: Tensor
    identifier: int | str
    name: str


@dataclass(slots=True)
class ParameterMap:
    """Pairs by live group, the saved group of each (None where nothing of it was found), and what does not match."""

    pairs: list[list[Pair]]
    group_of: list[int | None]
    problems: list[str] = field(default_factory=list)


def live_names(optimizer: Optimizer, model: nn.Module | None) -> dict[int, list[str]]:
    """All names of every parameter, by ``id``: from the model, else as the optimizer was given them."""
    names: dict[int, list[str]] = {}
    if model is not None:
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
    for group in optimizer.param_groups:
        given = group.get("param_names")
        for name, parameter in zip(given or (), group["params"], strict=False):
            if id(parameter) not in names:
                names[id(parameter)] = [str(name)]
    return names


def map_parameters(
    saved: Sequence[Mapping[Any, Any]], optimizer: Optimizer, model: nn.Module | None
) -> ParameterMap | str:
    """Pair saved and live parameters; a text where that cannot be done without a guess."""
    theirs, mine = saved_names(saved), live_names(optimizer, model)
    if isinstance(theirs, str):
        return theirs
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if theirs and all(id(parameter) in mine for parameter in parameters):
        return _by_name(saved, theirs, optimizer, mine)
    if any(isinstance(identifier, str) for identifier in theirs):
        return "its state is kept by parameter names, which this optimizer does not know; give model= as well"
    return _by_place(saved, optimizer, mine)


def _by_name(
    saved: Sequence[Mapping[Any, Any]],
    theirs: Mapping[int | str, str],
    optimizer: Optimizer,
    mine: Mapping[int, list[str]],
) -> ParameterMap | str:
    identifier_of = {name: identifier for identifier, name in theirs.items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    matched = match(theirs.values(), (name for parameter in parameters for name in mine[id(parameter)]))
    where = {identifier: k for k, group in enumerate(saved) for identifier in group["params"]}
    result = ParameterMap([], [])
    for group in optimizer.param_groups:
        pairs = []
        for parameter in group["params"]:
            found = {matched[name] for name in mine[id(parameter)] if name in matched}
            if len(found) > 1:
                return f"{listed(sorted(found))} are one tied parameter here, but several in the checkpoint"
            if found:
                name = found.pop()
                pairs.append(Pair(parameter, identifier_of[name], name))
            else:
                result.problems.append(f"{mine[id(parameter)][0]}: is not in the optimizer of the checkpoint")
        groups = sorted({where[pair.identifier] for pair in pairs})
        if len(groups) > 1 and not all(_same(saved[groups[0]], saved[other]) for other in groups[1:]):
            return f"parameters of one group here belong to groups {listed(groups)} with other hyperparameters"
        result.pairs.append(pairs)
        result.group_of.append(groups[0] if groups else None)
    taken = {pair.identifier for pairs in result.pairs for pair in pairs}
    extra = [name for identifier, name in theirs.items() if identifier not in taken]
    result.problems += [f"{name}: is in the optimizer of the checkpoint but not in this one" for name in extra]
    return result


def _same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    hyper = [{k: v for k, v in group.items() if k not in STRUCTURE} for group in (one, other)]
    return bool(hyper[0] == hyper[1])


def _by_place(
    saved: Sequence[Mapping[Any, Any]], optimizer: Optimizer, mine: Mapping[int, list[str]]
) -> ParameterMap | str:
    """The running index over the groups is what an identifier means; only equal groups give it a meaning."""
    live = optimizer.param_groups
    before, now = [len(group["params"]) for group in saved], [len(group["params"]) for group in live]
    if before != now:
        return f"its parameter groups hold {before} parameters, those here hold {now}, and the file has no names"
    if look_permuted(saved, live):
        return (
            "its parameter groups have the weight decays of those here in another order, and the file has no names "
            "by which to tell them apart"
        )
    pairs, number = [], 0
    for theirs, group in zip(saved, live, strict=True):
        row = []
        for identifier, parameter in zip(theirs["params"], group["params"], strict=True):
            name = mine.get(id(parameter), [f"parameter {number}"])[0]
            row.append(Pair(parameter, identifier, name))
            number += 1
        pairs.append(row)
    return ParameterMap(pairs, list(range(len(live))))
