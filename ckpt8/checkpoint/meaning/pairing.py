"""Which weight of a checkpoint belongs to which state of its optimizer, from the file alone.

``ownership`` tells the model that an optimizer trains. In it the weight of a parameter is found by name where the file
has names. Else every group lists its parameters in the order of the model. So the order pairs the parameters of one
shape with the weights of that shape, if they are all in one group and as many as the weights, ties counted once and
buffers left out. Parameters that are frozen or not used have no state and no known shape: where the groups of the
optimizer, or of all optimizers of the model, list every weight once, a parameter has the weight that order and shapes
leave it. Otherwise the weight is unknown, with the reason, and never a guess.

The order of a file beside that of the optimizer may not be that of the model: only names pair its weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ckpt8.checkpoint.meaning.masters import find_masters, lists_of_masters
from ckpt8.checkpoint.meaning.nodes import listed_parameters, parameter_groups
from ckpt8.checkpoint.meaning.ownership import Owner, owners
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.checkpoint.meaning.quantised_state import bitsandbytes_moments, with_moments
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find_all, find_loose
from ckpt8.checkpoint.meaning.weight_evidence import moment_shape, untied, weights_of
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.text import listed

Shape = tuple[int, ...]
State = tuple[int, ...]
"""How many parameters of each group have a weight."""

_MOST_STATES, _MOST_GROUPS = 20_000, 16
"""Groups that leave more ways leave a choice: they are not followed further."""

Identifier = int | str
Parameters = tuple[Sequence[Mapping[Any, Any]], Mapping[Identifier, Shape]]
"""The groups of an optimizer, and the shapes of the parameters that have a state."""

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


@dataclass(frozen=True, slots=True)
class _Optimizer:
    """An optimizer with the model that it trains, its number in the tree, and the masters that are listed beside it.

    ``names`` are those of its parameters, or why its groups make no sense; ``shapes`` are known where there is a state.
    """

    number: int
    candidate: Candidate
    owner: Owner
    masters: Sequence[Any]
    groups: Sequence[Mapping[Any, Any]]
    states: Mapping[Identifier, Mapping[Any, Any]]
    names: Mapping[Identifier, str] | str
    shapes: Mapping[Identifier, Shape]


def saved_parameters(tree: object, beside: Beside | None = None, *, as_torch: bool = False) -> list[SavedParameter]:
    """All parameters that have a state, in the order of the optimizers' groups.

    The models ``beside`` serve where the tree itself has none. With ``as_torch`` the 32-bit moments of bitsandbytes
    have the names of torch.
    """
    models, optimizers = models_and_optimizers(tree)
    beside = Beside() if models or beside is None else beside
    found = owners(optimizers, models or beside.models)
    lists = lists_of_masters(tree) if optimizers else {}
    described = [
        _described(number, optimizer, owner, lists.get(id(optimizer.node), ()), as_torch)
        for number, (optimizer, owner) in enumerate(zip(optimizers, found, strict=True))
    ]
    ordered = _by_order(described) if models else {}
    names = None if models else beside.names
    return [
        parameter
        for optimizer in described
        for parameter in _parameters(optimizer, models or beside.models, names, ordered)
    ]


def models_and_optimizers(tree: object) -> tuple[list[Candidate], list[Candidate]]:
    """All that can be the model of an optimizer: state dicts, their copies, and other weights; and the optimizers."""
    models, copies, optimizers = find_all(tree)
    models += copies
    return (models or find_loose(tree, optimizers)) if optimizers else models, optimizers


def _described(number: int, optimizer: Candidate, owner: Owner, masters: Sequence[Any], as_torch: bool) -> _Optimizer:
    groups = parameter_groups(optimizer.node)
    states = {each: state for each, state in optimizer.node["state"].items() if isinstance(state, dict) and state}
    if as_torch:
        holders = {each: group for group in groups for each, _ in listed_parameters(group) if type(each) in (int, str)}
        moments = {each: bitsandbytes_moments(state, holders.get(each, {})) for each, state in states.items()}
        states = {each: dict(with_moments(state, moments[each])) for each, state in states.items()}
    shapes = {each: shape for each, state in states.items() if (shape := moment_shape(state)) is not None}
    return _Optimizer(number, optimizer, owner, masters, groups, states, saved_names(groups), shapes)


def _parameters(
    optimizer: _Optimizer,
    models: Sequence[Candidate],
    names_beside: Mapping[str, str] | None,
    ordered: Mapping[int, Mapping[Identifier, TensorRef | str]],
) -> list[SavedParameter]:
    number, owner, names, shapes = optimizer.number, optimizer.owner, optimizer.names, optimizer.shapes
    if isinstance(names, str):
        return [
            SavedParameter(
                place(optimizer.candidate, each), each, state, {}, shapes.get(each), None, names, number, None
            )
            for each, state in optimizer.states.items()
        ]
    found: Mapping[Identifier, TensorRef | str]
    if owner.model is None:
        found = dict.fromkeys(shapes, _unknown_model(owner, models))
    elif names:
        found = _by_name(names, shapes, owner.model)
    elif names_beside is None:
        found = ordered[number]
    else:
        given = ((each, names_beside.get(place(optimizer.candidate, each))) for each in shapes)
        known = {each: name for each, name in given if name is not None}
        found = dict.fromkeys(shapes, _UNORDERED) | _by_name(known, shapes, owner.model)
    masters = find_masters(optimizer.states, optimizer.groups, shapes, optimizer.masters)
    result = []
    for group in optimizer.groups:
        for each in group["params"]:
            if each in optimizer.states:
                weight = found.get(each, _NO_SHAPE)
                ref, reason = (None, weight) if isinstance(weight, str) else (weight, None)
                name = names.get(each, place(optimizer.candidate, each))
                own = (optimizer.states[each], group, shapes.get(each))
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
    names: Mapping[Identifier, str], shapes: Mapping[Identifier, tuple[int, ...]], weights: Candidate
) -> dict[Identifier, TensorRef | str]:
    """The weight of every named parameter of a known shape, or why it is unknown."""
    saved = match(weights.node, names.values())
    return {each: _named(weights.node, saved.get(name), shapes[each]) for each, name in names.items() if each in shapes}


def _named(weights: Mapping[Any, Any], name: str | None, shape: tuple[int, ...]) -> TensorRef | str:
    ref = None if name is None else weights[name]
    if not isinstance(ref, TensorRef):
        return _NOT_NAMED
    return ref if ref.shape == shape else _MISNAMED


def _by_order(optimizers: Sequence[_Optimizer]) -> dict[int, dict[Identifier, TensorRef | str]]:
    """The weight of every parameter of a known shape, or why it is unknown, by the number of the optimizer.

    Only optimizers without names count. Those of one model are paired together.
    """
    found: dict[int, dict[Identifier, TensorRef | str]] = {}
    by_model: dict[int, list[_Optimizer]] = defaultdict(list)
    for optimizer in optimizers:
        if optimizer.names == {} and optimizer.owner.model is not None:
            by_model[id(optimizer.owner.model)].append(optimizer)
    for together in by_model.values():
        model = cast("Candidate", together[0].owner.model)
        refs = list(untied(weights_of(model.node)).values())
        if len(refs) != sum(len(group["params"]) for each in together for group in each.groups):
            refs = [ref for ref in refs if ref.dtype.is_floating]  # others are buffers
        places = places_in_order([(each.groups, each.shapes) for each in together], [ref.shape for ref in refs])
        for each, its in zip(together, places, strict=True):
            found[each.number] = {
                own: refs[at] if isinstance(at, int) else at for own, at in its.items() if own in each.shapes
            }
    return found


def places_in_order(optimizers: Sequence[Parameters], weights: Sequence[Shape]) -> list[dict[Identifier, int | str]]:
    """The place among the ``weights`` of the parameters of each of the ``optimizers``, or why it is unknown.

    The order pairs the parameters of one shape: see ``places_of_shapes``. Others have the weight that they have in all
    ways in which order and shapes fit, where the groups of the optimizer, or of all, list as many parameters as there
    are weights.
    """
    found = [dict(places_of_shapes(groups, shapes, weights)) for groups, shapes in optimizers]
    numbers = tuple(range(len(optimizers)))
    for together in dict.fromkeys([*((number,) for number in numbers), numbers]):
        lists = [[(number, each) for each in group["params"]] for number in together for group in optimizers[number][0]]
        if any(not isinstance(found[number].get(each), int) for keys in lists for number, each in keys):
            shapes = [[optimizers[number][1].get(each) for number, each in keys] for keys in lists]
            for (at, place), weight in _covering(shapes, weights).items():
                number, each = lists[at][place]
                found[number][each] = weight
    return found


def places_of_shapes(
    groups: Sequence[Mapping[Any, Any]], shapes: Mapping[Identifier, Shape], weights: Sequence[Shape]
) -> dict[Identifier, int | str]:
    """The place of every parameter of a known shape, if one group has all of the shape, as many as there are weights.

    Else why it is unknown. The order of the group is that of the weights of the shape.
    """
    by_shape: dict[Shape, list[int]] = defaultdict(list)
    for number, shape in enumerate(weights):
        by_shape[shape].append(number)
    listed: dict[Shape, list[list[Identifier]]] = defaultdict(list)
    for group in groups:
        alike: dict[Shape, list[Identifier]] = defaultdict(list)
        for each in group["params"]:
            if each in shapes:
                alike[shapes[each]].append(each)
        for shape, identifiers in alike.items():
            listed[shape].append(identifiers)
    found: dict[Identifier, int | str] = {}
    for shape, of_shape in listed.items():
        places = by_shape.get(shape, [])
        if len(of_shape) == 1 and len(of_shape[0]) == len(places):
            found.update(zip(of_shape[0], places, strict=True))
        else:
            reason = _NONE_ALIKE if not places else _SCATTERED if len(of_shape) > 1 else _UNEQUAL
            found.update((each, reason) for identifiers in of_shape for each in identifiers)
    return found


def _covering(groups: Sequence[Sequence[Shape | None]], weights: Sequence[Shape]) -> dict[tuple[int, int], int]:
    """The weights that parameters have in all ways of giving each one, in the order of its group.

    ``groups`` are the shapes of parameters, None where it is unknown; there are as many as weights. Returns the place
    of the weight by the number of the group and the place in it: nothing where there is no way, or too many.
    """
    known = any(shape is not None for group in groups for shape in group)
    if not known or sum(map(len, groups)) != len(weights) or len(groups) > _MOST_GROUPS:
        return {}
    if len(groups) == 1:
        fits = all(own in (None, shape) for own, shape in zip(groups[0], weights, strict=True))
        return {(0, at): at for at in range(len(weights))} if fits else {}

    def moves(state: State, shape: Shape) -> Iterator[tuple[int, State]]:
        """The groups whose next parameter may have a weight of the shape, and the state after it."""
        for number, (group, done) in enumerate(zip(groups, state, strict=True)):
            if done < len(group) and group[done] in (None, shape):
                yield number, (*state[:number], done + 1, *state[number + 1 :])

    reached: list[set[State]] = [{(0,) * len(groups)}]
    room = _MOST_STATES + len(weights)
    for shape in weights:
        reached.append({after for state in reached[-1] for _, after in moves(state, shape)})
        room -= len(reached[-1])
        if room < 0:
            return {}
    ending = reached.pop()
    options: dict[tuple[int, int], set[int]] = defaultdict(set)
    for at, (states, shape) in reversed(list(enumerate(zip(reached, weights, strict=True)))):
        before = set()
        for state in states:
            for number, after in moves(state, shape):
                if after in ending:
                    before.add(state)
                    options[number, state[number]].add(at)
        ending = before
    return {key: places.pop() for key, places in options.items() if len(places) == 1}


def saved_names(groups: Sequence[Mapping[Any, Any]]) -> dict[Identifier, str] | str:
    """The name of every identifier in ``groups``, empty where not all have one, or why the groups make no sense."""
    names: dict[Identifier, str] = {}
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
