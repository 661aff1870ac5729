"""Finds the entries of a checkpoint that can be the state dict of a model or of an optimizer.

``evident_weights`` are the tensors that are weights by what the checkpoint shows, whatever their key is called.

The evidence is about *sets*: the tensors that one dict or list holds directly, without buffers, ties counted once. A
set holds weights if

by name    an optimizer names its parameters, and most of them are in the set with their shapes
by shape   the set has a tensor for every parameter of an optimizer: as many of each shape, or more
together   several sets have exactly the tensors that the parameters of an optimizer need
as a copy  its names and shapes, or in a list of several its shapes in order, are those of a set of weights: an average,
           say

A set that only holds tensors then holds nothing but weights. Of a dict with other entries, only the tensors with the
name or the shape of a parameter count. Values are never looked at.

``twins`` are the weights that several models of a checkpoint have, such as a model and its average.

Two models hold the same weights if all names and shapes of one are in the other, components that wrappers add aside.
Parts of a model count as models: a module may hold its average. A list of tensors has the weights of a model if its
shapes are those of the model, one after the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import permutations
from math import prod
from typing import Any

from ckpt8.checkpoint.meaning.nodes import (
    FlatKey,
    Inside,
    Shape,
    containers,
    dict_groups,
    find_live_objects,
    flat_states,
    holds_tensors_alone,
    is_bare_state_dict,
    is_flat_optimizer,
    is_optimizer,
    outermost,
    parameters_of,
)
from ckpt8.checkpoint.meaning.optimizer_state import parameter_shape
from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.tree import Inert, TensorRef, format_path, iter_leaves, iter_nodes
from ckpt8.checkpoint.vocabulary import BUFFERS, MODEL_KEYS, is_average
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import SMALL_NUMEL, Role
from ckpt8.optim.known_optimizers import first_moments, state_roles

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

    def fit(self, candidate: _Set) -> bool:
        """Whether the set has a tensor for every parameter, and not by chance."""
        if not self.shapes <= candidate.shapes:
            return False
        many = self.shapes.total() >= _MANY_PARAMETERS and len(self.shapes) >= _MANY_SHAPES
        return many or 2 * numel(self.shapes) >= numel(candidate.shapes)


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
    unknown = [candidate for candidate in sets if not candidate.keyed]
    evident: dict[int, Iterable[TensorRef]] = {}
    for parameters in optimizers:
        for candidate in unknown:
            if id(candidate) not in evident:
                refs = _fitting(candidate, parameters)
                evident |= {id(candidate): refs} if refs else {}
        for candidate in _together([candidate for candidate in unknown if id(candidate) not in evident], parameters):
            evident[id(candidate)] = candidate.tensors.values()
    known = [one for one in sets if one.keyed or (one.only_tensors and id(one) in evident)]
    signatures = {candidate.signature for candidate in known}
    in_order = {tuple(ref.shape for ref in candidate.weights.values()) for candidate in known}
    for candidate in unknown:
        if id(candidate) not in evident and candidate.only_tensors and numel(candidate.shapes) >= SMALL_NUMEL:
            shapes = tuple(ref.shape for ref in candidate.weights.values())
            is_list = len(shapes) > 1 and not isinstance(next(iter(candidate.tensors)), str)
            if candidate.signature in signatures or (is_list and shapes in in_order):
                evident[id(candidate)] = candidate.tensors.values()
    return {id(ref) for refs in evident.values() for ref in refs}


def weights_of_states(tensors: Mapping[str, TensorRef], states: Mapping[str, Any]) -> set[int]:
    """The ``id`` of the tensors that are weights by their shapes, beside the states of all parameters."""
    shapes = Counter(shapes_of(states).values())
    is_enough = numel(shapes) >= SMALL_NUMEL
    return set(map(id, _fitting(_Set(tensors, True, False), _Parameters({}, shapes)) if is_enough else ()))


def _collect(trees: Iterable[object]) -> tuple[list[_Set], list[_Parameters]]:
    """The sets of the tensors that containers hold directly, and the optimizers that are large enough to tell."""
    sets: list[_Set] = []
    optimizers: list[_Parameters] = []
    for tree in trees:
        live = find_live_objects(tree)
        for path, node in outermost(containers(tree, live), is_optimizer):
            if is_optimizer(node):
                optimizers.append(_parameters(node))
            elif not path and is_flat_optimizer(node):
                shapes = shapes_of(states_by_owner(node, flat_states(node)))
                optimizers.append(_Parameters(shapes, Counter(shapes.values())))
            elif isinstance(node, (dict, list, tuple)):
                entries = node if isinstance(node, Mapping) else dict(enumerate(node))
                if tensors := {name: value for name, value in entries.items() if isinstance(value, TensorRef)}:
                    is_model = id(node) in live.modules or (not path and is_bare_state_dict(node))
                    alone = len(tensors) == len(entries) or holds_tensors_alone(entries)
                    sets.append(_Set(tensors, alone, is_model or not MODEL_KEYS.isdisjoint(path)))
    most = max(1, min(MOST_OPTIMIZERS, _MOST_PAIRS // max(1, len(sets))))
    return sets, [optimizer for optimizer in optimizers if numel(optimizer.shapes) >= SMALL_NUMEL][:most]


def states_by_owner(tensors: Mapping[str, TensorRef], keys: Mapping[str, FlatKey]) -> dict[str, dict[str, TensorRef]]:
    """The state of every parameter of a flat file, whose tensors have these ``keys``."""
    states: dict[str, dict[str, TensorRef]] = defaultdict(dict)
    for name, (owner, key) in keys.items():
        states[owner][key] = tensors[name]
    return states


def shapes_of(states: Mapping[Any, Any]) -> dict[Any, Shape]:
    """The shapes of the parameters that have a state, as far as the state shows them."""
    own = ((parameter, state) for parameter, state in states.items() if isinstance(state, dict))
    return {parameter: shape for parameter, state in own if (shape := _shape(state)) is not None}


def _parameters(optimizer: Mapping[str, Any]) -> _Parameters:
    listed, shapes = parameters_of(optimizer), shapes_of(optimizer["state"])
    named = {name: shape for key, shape in shapes.items() if key in listed and (name := listed[key][1]) is not None}
    plain = plain_names(named)
    return _Parameters({plain[name]: shape for name, shape in named.items()}, Counter(shapes.values()))


def _shape(state: Mapping[Any, Any]) -> Shape | None:
    """The shape of a parameter: that of a moment, or the one that all tensors of its state have, scalars aside."""
    shapes = {ref.shape for ref in state.values() if isinstance(ref, TensorRef) and ref.shape}
    return moment_shape(state) or (shapes.pop() if len(shapes) == 1 else None)


def moment_shape(state: Mapping[Any, Any]) -> Shape | None:
    """The shape of the first moment, of another moment, of the residual or master of the weight, or of statistics."""
    first = first_moments()
    if (shown := next((ref for key in first if isinstance(ref := state.get(key), TensorRef)), None)) is not None:
        return shown.shape
    others = state_roles({key for key, ref in state.items() if isinstance(ref, TensorRef) and ref.shape})
    moments = (key for key, role in others.items() if role is not Role.OTHER)
    keys = (*moments, *(f"{name}_codes" for name in first), "residual", "master")
    shown = next((ref for key in keys if isinstance(ref := state.get(key), TensorRef)), None)
    return parameter_shape(state) if shown is None else shown.shape


def _fitting(candidate: _Set, parameters: _Parameters) -> Collection[TensorRef]:
    """The tensors of a set that are the weights of the parameters: by name, else by shape."""
    named = parameters.named
    fitting = [ref for name, ref in candidate.weights.items() if named.get(name) == ref.shape]
    if not fitting or 2 * len(fitting) < len(named):
        if not parameters.fit(candidate):
            return []
        wanted = {shape for shape, count in parameters.shapes.items() if candidate.shapes[shape] == count}
        fitting = [ref for ref in candidate.weights.values() if ref.shape in wanted]
    return candidate.tensors.values() if candidate.only_tensors else fitting


def _together(sets: Iterable[_Set], parameters: _Parameters) -> Iterator[_Set]:
    """The sets that have all parameters of an optimizer together, each parameter once; nothing where none do."""
    missing, taken = parameters.shapes.copy(), []
    for candidate in sets:
        if candidate.only_tensors and candidate.shapes and candidate.shapes <= missing:
            missing -= candidate.shapes
            taken.append(candidate)
    return iter(taken if not missing else [])


@dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """A dictionary of the tree. ``path`` are its keys joined by dots, ``(top level)`` for the tree itself.

    ``origin`` is the pickled object whose state dict ``node`` is, None for a dictionary that is in the tree.
    ``numbered``: its keys are places in lists, which are no names of parameters. ``whole`` is the path of the
    dictionary of which this is a part.
    """

    path: str
    node: dict[Any, Any]
    origin: Inert | None = None
    numbered: bool = False
    whole: str | None = None

    @property
    def value(self) -> Any:
        """What is in the tree."""
        return self.node if self.origin is None else self.origin

    @property
    def home(self) -> str:
        """The path of the container that holds it."""
        return self.path.rpartition(".")[0]


TOP_LEVEL = "(top level)"


def find(tree: object, evident: Set[int] = frozenset()) -> tuple[list[Candidate], list[Candidate]]:
    """Model state dicts and optimizer state dicts in the order of the document.

    A model has a key that names one, or ``evident_weights`` shows it. Copies of models under other keys do not count,
    unless there are several optimizers, and no key names an average. ``evident`` are the weights that other files of a
    directory show, see ``evident_weights``.
    """
    models, copies, optimizers = find_all(tree, evident)
    return models + [copy for copy in copies if len(optimizers) > 1 and not is_average(copy.path)], optimizers


def find_all(tree: object, evident: Set[int] = frozenset()) -> tuple[list[Candidate], list[Candidate], list[Candidate]]:
    """The models, their copies under keys that name no model, and the optimizers, in the order of the document."""
    models, others, optimizers = _find_every(tree)
    weights = evident_weights(tree) | evident if others else set()
    unknown = {key for key, model in others.items() if not weights.issuperset(map(id, weights_of(model.node).values()))}
    forms = {_form(model) for model in models if id(model) not in others} if others else set()
    copies = [other for key, other in others.items() if key not in unknown and _form(other) in forms]
    unknown.update(map(id, copies))
    return [model for model in models if id(model) not in unknown], copies, optimizers


def find_trees(tree: object) -> list[Candidate]:
    """All dictionaries of nothing but tensors, and modules, that are not part of an optimizer, weights or not."""
    return _find_every(tree)[0]


def _find_every(tree: object) -> tuple[list[Candidate], dict[int, Candidate], list[Candidate]]:
    """Trees of tensors, those of them under a key that names no model by ``id``, and optimizers."""
    models: list[Candidate] = []
    others: dict[int, Candidate] = {}
    optimizers: list[Candidate] = []
    entry, inert = Inside(), Inside()
    live = find_live_objects(tree)
    for path, node in containers(tree, live):
        if entry.holds(path) or (inert.holds(path) and id(node) not in live.origins):
            continue
        if is_optimizer(node):
            entry.enter(path)
            optimizers.append(Candidate(format_path(path) or TOP_LEVEL, node, live.origins.get(id(node))))
        elif isinstance(node, Inert):
            inert.enter(path)  # the content of a pickled object has no names of its own
        elif is_bare_state_dict(node):
            entry.enter(path)
            models.append(Candidate(format_path(path) or TOP_LEVEL, node, live.origins.get(id(node))))
            if path and path[-1] not in MODEL_KEYS and id(node) not in live.modules:
                others[id(models[-1])] = models[-1]
    return models, others, optimizers


def find_loose(tree: object, taken: Iterable[Candidate]) -> list[Candidate]:
    """Weights by evidence that are no state dict, by the first key: a list, a tree of dicts, entries among others.

    ``taken`` are the models and optimizers of the tree.
    """
    known = {id(value) for model in taken for value in model.node.values()}
    weights = evident_weights(tree) - known
    by_key: dict[str, dict[str, Any]] = defaultdict(dict)
    named: set[str] = set()
    for path, leaf in iter_leaves(tree):
        if id(leaf) in weights:
            key, *rest = path if len(path) > 1 else ("", *path)
            numbered = all(map(str.isdecimal, rest))
            by_key[key].setdefault(".".join(path if numbered else rest), leaf)
            if not path[-1].isdecimal():
                named.add(key)
    return [Candidate(key or TOP_LEVEL, node, numbered=key not in named) for key, node in by_key.items()]


def _form(model: Candidate) -> frozenset[tuple[str, Shape]]:
    """The names and shapes of a model's weights."""
    return frozenset((name, model.node[key].shape) for key, name in plain_names(weights_of(model.node)).items())


def parts_of(model: Candidate) -> list[Candidate]:
    """The parts of a model, by the first component in which their names differ, if there are several."""
    names = {name: str(name).split(".") for name in model.node}
    depth = next((k for k, level in enumerate(zip(*names.values(), strict=False)) if len(set(level)) > 1), 0)
    inner = grouped((parts[depth], name) for name, parts in names.items() if len(parts) > depth + 1)
    if len(inner) < 2:
        return []
    nodes = {key: {name: model.node[name] for name in own} for key, own in inner.items()}
    return [replace(model, path=f"{model.path}.{key}", node=node, whole=model.path) for key, node in nodes.items()]


CHECKS = "weight_checks"
"""Key of a group of ckpt8.optim: the ``weight_check`` of each parameter, None without a residual or master."""


def weight_checks(saved: Mapping[Any, Any]) -> dict[Any, Any]:
    """The checks of 16-bit weights in a group of ckpt8.optim, by identifier; empty where there are none."""
    checks = saved.get(CHECKS)
    return dict(zip(saved["params"], checks, strict=False)) if isinstance(checks, list) else {}


def is_packed_group(saved: Mapping[Any, Any]) -> bool:
    """Whether an optimizer of ``ckpt8.optim`` saved a group."""
    return {"rule", "master", "moment1", "moment2"} <= saved.keys()


_MOST_MODELS = 32
"""Of more models the first count: each is compared with every other."""


@dataclass(frozen=True, slots=True)
class _Model:
    """Weights by what their names do not share; a ``part`` of a model, maybe one whose key names an average."""

    weights: Mapping[str, TensorRef]
    part: bool
    average: bool


def twins(trees: Sequence[object]) -> Iterator[tuple[TensorRef, TensorRef]]:
    """Every weight of a model with the same one of another, both ways, from the trees of files that belong together."""
    models = [model for model in _models(trees) if sum(ref.numel for ref in model.weights.values()) >= SMALL_NUMEL]
    forms = [{(name, ref.shape) for name, ref in model.weights.items()} for model in models[:_MOST_MODELS]]
    for (one, form), (other, its) in permutations(zip(models, forms, strict=False), 2):
        # Layers are parts as well, and alike.
        if (form <= its or its < form) and not (one.part and other.part and one.average == other.average):
            yield from ((ref, other.weights[name]) for name, ref in one.weights.items() if name in other.weights)
    for line in _lists(trees):
        for model in models[:_MOST_MODELS]:
            own = list(untied(model.weights).values())
            if [ref.shape for ref in own] == [ref.shape for ref in line]:
                yield from (pair for both in zip(own, line, strict=True) for pair in (both, both[::-1]))


def _models(trees: Sequence[object]) -> Iterator[_Model]:
    """All models, then the parts of those that hold an average."""
    evident = evident_weights(*trees)
    models = [model for tree in trees for kind in find_all(tree, evident)[:2] for model in kind]
    for model in models:
        yield _Model(_without_prefix(weights_of(model.node)), False, is_average(model.path))
    for model in models:
        parts = [(part, is_average(part.path.rpartition(".")[2])) for part in parts_of(model)]
        if any(average for _, average in parts):
            yield from (_Model(_without_prefix(weights_of(part.node)), True, average) for part, average in parts)


def _without_prefix(weights: Mapping[Any, TensorRef]) -> dict[str, TensorRef]:
    """The weights by their names without wrappers, and without the components that all names begin with.

    Numbers among them, such as the counters of averages, are left out.
    """
    weights = {name: ref for name, ref in weights.items() if ref.shape}
    plain = plain_names(map(str, weights))
    parts = {name: plain[str(name)].split(".") for name in weights}
    levels = list(zip(*(part[:-1] for part in parts.values()), strict=False))
    shared = next((k for k, level in enumerate(levels) if len(set(level)) > 1), len(levels))
    return {".".join(part[shared:]): weights[name] for name, part in parts.items()}


def _lists(trees: Sequence[object]) -> Iterator[Sequence[TensorRef]]:
    """Lists of nothing but tensors that no optimizer holds."""
    for tree in trees:
        for _, node in outermost(iter_nodes(tree, leaves=frozenset()), is_optimizer):
            if isinstance(node, (list, tuple)) and len(node) > 1 and all(isinstance(x, TensorRef) for x in node):
                yield node


def is_packed(optimizer: Candidate) -> bool:
    """Whether one of ``ckpt8.optim`` saved a group of ``optimizer``."""
    return optimizer.origin is None and any(map(is_packed_group, dict_groups(optimizer.node)))
