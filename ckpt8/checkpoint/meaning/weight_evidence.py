"""Which tensors of a checkpoint are weights, by what the checkpoint shows, whatever their key is called.

The evidence is about *sets*: the tensors that one dict or list holds directly, without buffers, ties counted once. A
set holds weights if

by name    an optimizer names its parameters, and most of them are in the set with their shapes
by shape   the set has a tensor for every parameter of an optimizer: as many of each shape, or more
together   several sets have exactly the tensors that the parameters of an optimizer need
as a copy  its names and shapes, or in a list of several its shapes in order, are those of a set of weights: an average,
           say

A set that only holds tensors then holds nothing but weights. Of a dict with other entries, only the tensors with the
name or the shape of a parameter count. Values are never looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ckpt8.checkpoint.meaning.flat_states import flat_states
from ckpt8.checkpoint.meaning.live_objects import find_live_objects
from ckpt8.checkpoint.meaning.nodes import (
    Inside,
    dict_groups,
    holds_tensors_alone,
    is_bare_state_dict,
    is_flat_optimizer,
    is_optimizer,
    listed_parameters,
)
from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.quantised_state import parameter_shape
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import BUFFERS, MODEL_KEYS
from ckpt8.core.tensors import SMALL_NUMEL, Role
from ckpt8.optim.known_optimizers import first_moments, state_roles

Shape = tuple[int, ...]

_MANY_PARAMETERS, _MANY_SHAPES = 8, 3
"""An optimizer of so many parameters, of so many shapes, does not fit a set by chance."""

MOST_OPTIMIZERS = 64
_MOST_PAIRS = 100_000
"""Optimizers after these show nothing: each is compared with every set, and a hostile file may have any number."""


@dataclass(slots=True, eq=False)
class _Set:
    """The tensors of one container. ``only_tensors``: it holds nothing else; ``keyed``: its key names a model."""

    tensors: Mapping[Any, TensorRef]
    only_tensors: bool
    keyed: bool
    weights: dict[str, TensorRef] = field(init=False)
    shapes: Counter[Shape] = field(init=False)

    def __post_init__(self) -> None:
        names = plain_names(str(name) for name, ref in self.tensors.items() if ref.shape)
        self.weights = untied({names.get(str(name), str(name)): ref for name, ref in weights_of(self.tensors).items()})
        self.shapes = Counter(ref.shape for ref in self.weights.values())

    @property
    def signature(self) -> frozenset[tuple[str, Shape]]:
        """What a copy of the set has as well; numbers that are beside the weights, such as counters, aside."""
        return frozenset((name, ref.shape) for name, ref in self.weights.items() if ref.shape)


@dataclass(slots=True)
class _Parameters:
    """The parameters of one optimizer, as far as it shows their shapes; ``named`` are those with a name."""

    named: dict[str, Shape]
    shapes: Counter[Shape]

    def is_enough(self) -> bool:
        """Whether agreement with them says anything."""
        return numel(self.shapes) >= SMALL_NUMEL

    def fit(self, each: _Set) -> bool:
        """Whether the set has a tensor for every parameter, and not by chance."""
        if not self.shapes <= each.shapes:
            return False
        many = self.shapes.total() >= _MANY_PARAMETERS and len(self.shapes) >= _MANY_SHAPES
        return many or 2 * numel(self.shapes) >= numel(each.shapes)


def weights_of(state_dict: Mapping[Any, Any]) -> dict[str, TensorRef]:
    """The tensors of a model's state dict that are no buffers, by name; tied ones have several."""
    return {
        name: ref
        for name, ref in state_dict.items()
        if isinstance(ref, TensorRef) and str(name).rpartition(".")[2] not in BUFFERS
    }


def untied(weights: Mapping[str, TensorRef]) -> dict[str, TensorRef]:
    """The weights without those that are the same tensor as one before them."""
    first: dict[Any, tuple[str, TensorRef]] = {}
    for name, ref in weights.items():
        first.setdefault((ref.key, ref.offset, ref.shape), (name, ref))
    return dict(first.values())


def numel(shapes: Mapping[Shape, int]) -> int:
    """The elements of all tensors of these shapes."""
    return sum(prod(shape) * count for shape, count in shapes.items())


def evident_weights(*trees: object) -> set[int]:
    """The ``id`` of every TensorRef that is a weight by evidence, from the trees of files that belong together.

    Those under keys that name a model, and those of a file that is a state dict, are not listed.
    """
    sets, optimizers = _collect(trees)
    unknown = [each for each in sets if not each.keyed]
    found: dict[int, Iterable[TensorRef]] = {}
    for parameters in optimizers:
        for each in unknown:
            if id(each) not in found and (refs := _by_name(each, parameters) or _by_shape(each, parameters)):
                found[id(each)] = refs
        for each in _together([each for each in unknown if id(each) not in found], parameters):
            found[id(each)] = each.tensors.values()
    known = [each for each in sets if each.keyed or (each.only_tensors and id(each) in found)]
    signatures = {each.signature for each in known}
    in_order = {tuple(ref.shape for ref in each.weights.values()) for each in known}
    for each in unknown:
        if id(each) not in found and each.only_tensors and numel(each.shapes) >= SMALL_NUMEL:
            shapes = tuple(ref.shape for ref in each.weights.values())
            is_list = len(shapes) > 1 and not isinstance(next(iter(each.tensors)), str)
            if each.signature in signatures or (is_list and shapes in in_order):
                found[id(each)] = each.tensors.values()
    return {id(ref) for refs in found.values() for ref in refs}


def weights_of_states(tensors: Mapping[str, TensorRef], states: Iterable[Mapping[str, Any]]) -> set[int]:
    """The ``id`` of the tensors that are weights by their shapes, beside the states of all parameters."""
    parameters = _Parameters({}, Counter(shape for state in states if (shape := _shape(state)) is not None))
    found = _by_shape(_Set(tensors, True, False), parameters) if parameters.is_enough() else []
    return set(map(id, found))


def _collect(trees: Iterable[object]) -> tuple[list[_Set], list[_Parameters]]:
    sets: list[_Set] = []
    optimizers: list[_Parameters] = []
    for tree in trees:
        optimizer = Inside()
        live = find_live_objects(tree)
        for path, node in live.containers(tree):
            if optimizer.holds(path):
                continue
            if is_optimizer(node):
                optimizer.enter(path)
                optimizers.append(_parameters(node))
            elif not path and is_flat_optimizer(node):
                optimizers.append(_flat_parameters(node))
            elif isinstance(node, (dict, list, tuple)):
                is_model = id(node) in live.modules or (not path and is_bare_state_dict(node))
                sets += _sets(node, is_model or not MODEL_KEYS.isdisjoint(path))
    most = max(1, min(MOST_OPTIMIZERS, _MOST_PAIRS // max(1, len(sets))))
    return sets, [each for each in optimizers if each.is_enough()][:most]


def _sets(node: Mapping[Any, Any] | Sequence[Any], keyed: bool) -> list[_Set]:
    """The set of the tensors that a container holds directly; nothing where it holds none."""
    entries = node if isinstance(node, Mapping) else dict(enumerate(node))
    tensors = {name: value for name, value in entries.items() if isinstance(value, TensorRef)}
    alone = len(tensors) == len(entries) or holds_tensors_alone(entries)
    return [_Set(tensors, alone, keyed)] if tensors else []


def _flat_parameters(tree: Mapping[str, TensorRef]) -> _Parameters:
    """The parameters of a flat file of an optimizer."""
    states: dict[str, dict[str, TensorRef]] = defaultdict(dict)
    for name, (owner, key) in flat_states(tree).items():
        states[owner][key] = tree[name]
    shapes = {owner: shape for owner, state in states.items() if (shape := _shape(state)) is not None}
    return _Parameters(shapes, Counter(shapes.values()))


def given_names(optimizer: Mapping[str, Any]) -> dict[int | str, str | None]:
    """Every parameter that the groups of an optimizer list, in their order, with the name that they state, or None."""
    groups = dict_groups(optimizer)
    return {each: name for group in groups for each, name in listed_parameters(group) if isinstance(each, (int, str))}


def shapes_of(optimizer: Mapping[str, Any]) -> dict[int | str, Shape]:
    """The shapes of the parameters of an optimizer that has a state for them, as far as the state shows them."""
    states = ((each, state) for each, state in optimizer["state"].items() if isinstance(state, dict))
    return {each: shape for each, state in states if (shape := _shape(state)) is not None}


def _parameters(optimizer: Mapping[str, Any]) -> _Parameters:
    names, shapes = given_names(optimizer), shapes_of(optimizer)
    named = {name: shape for each, shape in shapes.items() if (name := names.get(each)) is not None}
    plain = plain_names(named)
    return _Parameters({plain[name]: shape for name, shape in named.items()}, Counter(shapes.values()))


def _shape(state: Mapping[Any, Any]) -> Shape | None:
    """The shape of a parameter: that of a moment, or the one that all tensors of its state have, scalars aside."""
    shapes = {ref.shape for ref in state.values() if isinstance(ref, TensorRef) and ref.shape}
    return moment_shape(state) or parameter_shape(state) or (shapes.pop() if len(shapes) == 1 else None)


def moment_shape(state: Mapping[Any, Any]) -> Shape | None:
    """The shape of the first moment, of another moment, or of the residual or master of the weight."""
    first = first_moments()
    if (shown := next((ref for key in first if isinstance(ref := state.get(key), TensorRef)), None)) is not None:
        return shown.shape
    others = state_roles({key for key, ref in state.items() if isinstance(ref, TensorRef) and ref.shape})
    moments = (key for key, role in others.items() if role is not Role.OTHER)
    keys = (*moments, *(f"{name}_codes" for name in first), "residual", "master")
    return next((ref.shape for key in keys if isinstance(ref := state.get(key), TensorRef)), None)


def _by_name(each: _Set, parameters: _Parameters) -> list[TensorRef]:
    named = parameters.named
    found = [ref for name, ref in each.weights.items() if named.get(name) == ref.shape]
    if not found or 2 * len(found) < len(named):
        return []
    return list(each.tensors.values()) if each.only_tensors else found


def _by_shape(each: _Set, parameters: _Parameters) -> list[TensorRef]:
    if not parameters.fit(each):
        return []
    if each.only_tensors:
        return list(each.tensors.values())
    wanted = {shape for shape, count in parameters.shapes.items() if each.shapes[shape] == count}
    return [ref for ref in each.weights.values() if ref.shape in wanted]


def _together(sets: Iterable[_Set], parameters: _Parameters) -> Iterator[_Set]:
    """The sets that have all parameters of an optimizer together, each parameter once; nothing where none do."""
    missing, taken = parameters.shapes.copy(), []
    for each in sets:
        if each.only_tensors and each.shapes and each.shapes <= missing:
            missing -= each.shapes
            taken.append(each)
    return iter(taken if not missing else [])
