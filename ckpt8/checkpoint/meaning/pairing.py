"""Which weight of a checkpoint belongs to which state of its optimizer, from the file alone.

``ownership`` tells the model that an optimizer trains. In it the weight of a parameter is found by name where the file
has names. Else every group lists its parameters in the order of the model. So the order pairs the parameters of one
shape with the weights of that shape, if they are all in one group and as many as the weights, ties counted once and
buffers left out. Otherwise the weight is unknown, with the reason, and never a guess.

The order of a file beside that of the optimizer may not be that of the model: only names pair its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ckpt8.checkpoint.meaning.masters import find_masters, lists_of_masters
from ckpt8.checkpoint.meaning.nodes import listed_parameters, parameter_groups
from ckpt8.checkpoint.meaning.ownership import Owner, owners
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.checkpoint.meaning.quantised_state import bitsandbytes_moments, with_moments
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find_all, find_loose
from ckpt8.checkpoint.meaning.weight_evidence import moment_shape, untied, weights_of
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.text import listed

_NO_MODEL = "the file has no state dict of a model"
_NONE_FITS = "no model in the file has weights of its shapes"
_LISTED = 4
_NO_SHAPE = "its shape is not known, for want of a first moment"
_NOT_NAMED = "no weight has its name"
_MISNAMED = "the weight of its name has another shape"
_NONE_ALIKE = "no weight has its shape"
_UNEQUAL = "cannot be told apart: there are not as many weights of the shape as parameters"
_UNORDERED = "its name is not known, nor the order of the weights in another file"
_SCATTERED = "cannot be told apart: the same shape in several groups"


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """State, group and weight of one parameter. ``unpaired`` says why the weight is unknown. ``name`` is for people.

    ``identifier`` stands for the parameter in its group. ``shape`` is that of the first moment or residual, None
    without one. ``optimizer`` is the number of its optimizer in the tree. ``master`` is the fp32 weight that the
    optimizer keeps itself, if it does.
    """

    name: str
    identifier: int | str
    state: Mapping[Any, Any]
    group: Mapping[Any, Any]
    shape: tuple[int, ...] | None
    weight: TensorRef | None
    unpaired: str | None
    optimizer: int
    master: TensorRef | None


@dataclass(frozen=True, slots=True)
class Beside:
    """What other files of a directory say of the optimizers in one: models, and names of parameters by their place.

    ``files`` are the paths of the files that hold the weights, by the ``id`` of each.
    """

    models: Sequence[Candidate] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[int, str] = field(default_factory=dict)


class _Optimizer(NamedTuple):
    """An optimizer, its number in the tree, and the masters that are listed beside it."""

    number: int
    candidate: Candidate
    masters: Sequence[Any]


def saved_parameters(tree: object, beside: Beside | None = None, *, as_torch: bool = False) -> list[SavedParameter]:
    """All parameters that have a state, in the order of the optimizers' groups.

    The models ``beside`` serve where the tree itself has none. With ``as_torch`` the 32-bit moments of bitsandbytes
    have the names of torch.
    """
    models, optimizers = models_and_optimizers(tree)
    beside = Beside() if models or beside is None else beside
    found = owners(optimizers, models or beside.models)
    lists = lists_of_masters(tree) if optimizers else {}
    names = None if models else beside.names
    return [
        parameter
        for number, (optimizer, owner) in enumerate(zip(optimizers, found, strict=True))
        for parameter in _parameters(
            _Optimizer(number, optimizer, lists.get(id(optimizer.node), ())),
            owner,
            models or beside.models,
            names,
            as_torch,
        )
    ]


def models_and_optimizers(tree: object) -> tuple[list[Candidate], list[Candidate]]:
    """All that can be the model of an optimizer: state dicts, their copies, and other weights; and the optimizers."""
    models, copies, optimizers = find_all(tree)
    models += copies
    return (models or find_loose(tree, optimizers)) if optimizers else models, optimizers


def _parameters(
    saved: _Optimizer,
    owner: Owner,
    models: Sequence[Candidate],
    names_beside: Mapping[str, str] | None,
    as_torch: bool,
) -> list[SavedParameter]:
    number, optimizer, listed = saved
    groups = parameter_groups(optimizer.node)
    states = {each: state for each, state in optimizer.node["state"].items() if isinstance(state, dict) and state}
    if as_torch:
        holders = {each: group for group in groups for each, _ in listed_parameters(group) if type(each) in (int, str)}
        moments = {each: bitsandbytes_moments(state, holders.get(each, {})) for each, state in states.items()}
        states = {each: dict(with_moments(state, moments[each])) for each, state in states.items()}
    names = saved_names(groups)
    if isinstance(names, str):
        return [
            SavedParameter(place(optimizer, each), each, state, {}, moment_shape(state), None, names, number, None)
            for each, state in states.items()
        ]
    shapes = {each: shape for each, state in states.items() if (shape := moment_shape(state)) is not None}
    found: Mapping[int | str, TensorRef | str]
    if owner.model is None:
        found = dict.fromkeys(shapes, _unknown_model(owner, models))
    elif names:
        found = _by_name(names, shapes, owner.model)
    elif names_beside is None:
        found = _by_order(groups, shapes, owner.model)
    else:
        known = {each: name for each in shapes if (name := names_beside.get(place(optimizer, each))) is not None}
        found = dict.fromkeys(shapes, _UNORDERED) | _by_name(known, shapes, owner.model)
    masters = find_masters(states, groups, shapes, listed)
    result = []
    for group in groups:
        for each in group["params"]:
            if each in states:
                weight = found.get(each, _NO_SHAPE)
                ref, reason = (None, weight) if isinstance(weight, str) else (weight, None)
                name = names.get(each, place(optimizer, each))
                own = (states[each], group, shapes.get(each))
                result.append(SavedParameter(name, each, *own, ref, reason, number, masters.get(each)))
    return result


def place(optimizer: Candidate, identifier: int | str) -> str:
    """Where an optimizer keeps the state of a parameter."""
    return f"state.{identifier}" if optimizer.path.startswith("(") else f"{optimizer.path}.state.{identifier}"


def _unknown_model(owner: Owner, models: Sequence[Candidate]) -> str:
    """Why it is unknown which model an optimizer trains."""
    if owner.models:
        return f"several models fit it: {listed((each.path for each in owner.models), _LISTED)}"
    return _NONE_FITS if models else _NO_MODEL


def _by_name(
    names: Mapping[int | str, str], shapes: Mapping[int | str, tuple[int, ...]], weights: Candidate
) -> dict[int | str, TensorRef | str]:
    """The weight of every named parameter of a known shape, or why it is unknown."""
    saved = match(weights.node, names.values())
    return {each: _named(weights.node, saved.get(name), shapes[each]) for each, name in names.items() if each in shapes}


def _named(weights: Mapping[Any, Any], name: str | None, shape: tuple[int, ...]) -> TensorRef | str:
    ref = None if name is None else weights[name]
    if not isinstance(ref, TensorRef):
        return _NOT_NAMED
    return ref if ref.shape == shape else _MISNAMED


def _by_order(
    groups: Sequence[Mapping[Any, Any]], shapes: Mapping[int | str, tuple[int, ...]], weights: Candidate
) -> dict[int | str, TensorRef | str]:
    """The weight of every parameter of a known shape by the order of those of that shape, or why it is unknown."""
    by_shape: dict[tuple[int, ...], list[TensorRef]] = defaultdict(list)
    for ref in untied(weights_of(weights.node)).values():
        by_shape[ref.shape].append(ref)
    found: dict[int | str, TensorRef | str] = {}
    for shape in set(shapes.values()):
        of_shape = [[each for each in group["params"] if shapes.get(each) == shape] for group in groups]
        of_shape = [identifiers for identifiers in of_shape if identifiers]
        alike = by_shape.get(shape, [])
        if len(of_shape) == 1 and len(of_shape[0]) == len(alike):
            found.update(zip(of_shape[0], alike, strict=True))
        else:
            reason = _NONE_ALIKE if not alike else _SCATTERED if len(of_shape) > 1 else _UNEQUAL
            found.update((each, reason) for identifiers in of_shape for each in identifiers)
    return found


def saved_names(groups: Sequence[Mapping[Any, Any]]) -> dict[int | str, str] | str:
    """The name of every identifier in ``groups``, empty where not all have one, or why the groups make no sense."""
    names: dict[int | str, str] = {}
    seen: set[int | str] = set()
    for group in groups:
        identifiers = group.get("params")
        if not isinstance(identifiers, list) or not all(type(each) in (int, str) for each in identifiers):
            return "its parameter groups do not list parameters"
        if len({*seen, *identifiers}) != len(seen) + len(identifiers):
            return "its parameter groups list a parameter twice"
        seen.update(identifiers)
        names.update((each, name) for each, name in listed_parameters(group) if name is not None)
    if len(set(names.values())) != len(names):
        return "it has two parameters of one name"
    return names if len(names) == len(seen) else {}
