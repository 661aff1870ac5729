"""What a node of a checkpoint's tree is by its form: the state dict of an optimizer, or of a model.

``flat_states`` finds the state of an optimizer in a flat file, where the path of every tensor names its parameter and
its key.

    state.0.exp_avg   layer.weight.exp_avg   exp_avg.layer.weight   optimizer/state/0/exp_avg_sq

The key is one component of the path, and the rest of the path is its owner. It counts where it is the last component
after a dot, where the owner has another moment of the same shape, or where a weight with the name of the owner has it.

``find_live_objects`` reads pickled modules and optimizers as the state dicts that they would give, from the inert
objects alone.

    module      the entries of ``_parameters`` and ``_buffers``, its own and those of all in ``_modules``, by name
    optimizer   ``state`` and ``param_groups``; its parameters are the tensors themselves, and become numbers

An optimizer and a module of one file hold the same tensors, so the module names the parameters of the optimizer.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeGuard

from ckpt8.checkpoint.tree import Components, Inert, TensorRef, iter_nodes
from ckpt8.optim.known_optimizers import MOMENT_SLOTS, STATE_ROLES

Shape = tuple[int, ...]

_SEPARATOR = re.compile(r"[./]")
_MOST_COMPONENTS = 32
"""Of a longer path the rest counts as one component."""


class FlatKey(NamedTuple):
    """What a tensor of the state is: the ``key`` of the parameter ``owner``."""

    owner: str
    key: str


def flat_states(tree: Mapping[str, Any]) -> dict[str, FlatKey]:
    """The tensors that are state of a parameter, by name; empty where none is."""
    tensors = {name: ref for name, ref in tree.items() if isinstance(ref, TensorRef)}
    keys = {*STATE_ROLES, "step"}
    states: dict[str, FlatKey] = {}
    shown: set[str] = set()
    shapes: dict[str, Counter[Shape]] = defaultdict(Counter)
    for name, ref in tensors.items():
        parts = _SEPARATOR.split(name, _MOST_COMPONENTS)
        if len(parts) == 1 or keys.isdisjoint(parts):
            continue
        places = [k for k, part in enumerate(parts) if part in keys]
        if len(places) != 1:
            continue
        (k,) = places
        states[name] = key = FlatKey(".".join(parts[:k] + parts[k + 1 :]), parts[k])
        if key.key in MOMENT_SLOTS:
            shapes[key.owner][ref.shape] += 1
            if name.endswith(f".{key.key}"):
                shown.add(key.owner)
    if not shapes:
        return {}
    weights = _Named((name, ref) for name, ref in tensors.items() if name not in states)
    for owner, counts in shapes.items():
        if max(counts.values()) > 1 or any(map(partial(weights.has, owner), counts)):
            shown.add(owner)
    return {name: key for name, key in states.items() if key.owner in shown}


def flat_weights(beside: Mapping[str, TensorRef], tree: Mapping[str, Any], states: Mapping[str, FlatKey]) -> set[str]:
    """The names of the tensors ``beside`` the ``states`` in a tree that have the name and the shape of an owner."""
    owners = _Named((key.owner, tree[name]) for name, key in states.items() if key.key in MOMENT_SLOTS)
    return {name for name, ref in beside.items() if owners.has(name, ref.shape)}


class _Named:
    """Tensors by name: two names mean the same where one is the end of the other."""

    def __init__(self, tensors: Iterable[tuple[str, TensorRef]]) -> None:
        self._whole: dict[str, set[Shape]] = defaultdict(set)
        self._ends: dict[str, set[Shape]] = defaultdict(set)
        for name, ref in tensors:
            ends = _ends(name)
            self._whole[ends[0]].add(ref.shape)
            for end in ends:
                self._ends[end].add(ref.shape)

    def has(self, name: str, shape: Shape) -> bool:
        """Whether there is a tensor of this name and shape."""
        ends = _ends(name)
        return shape in self._ends.get(ends[0], ()) or any(shape in self._whole.get(end, ()) for end in ends)


def _ends(name: str) -> list[str]:
    """The name with dots between its components, and all its ends."""
    parts = _SEPARATOR.split(name, _MOST_COMPONENTS)
    return [".".join(parts[k:]) for k in range(len(parts))]


@dataclass(slots=True)
class Inside:
    """The container that a walk over a tree entered last: everything in it follows it at once."""

    path: Components | None = None

    def enter(self, path: Components) -> None:
        """The walk is at the container at ``path``."""
        self.path = path

    def holds(self, path: Components) -> bool:
        """Whether ``path`` leads into the container."""
        return self.path is not None and len(path) > len(self.path) and path[: len(self.path)] == self.path


def outermost(
    nodes: Iterable[tuple[Components, Any]], is_entry: Callable[[Any], bool]
) -> Iterator[tuple[Components, Any]]:
    """The nodes of a walk without those inside an entry; the entries themselves come."""
    entry = Inside()
    for path, node in nodes:
        if not entry.holds(path):
            if is_entry(node):
                entry.enter(path)
            yield path, node


def is_optimizer(node: object) -> bool:
    """Whether a node has the shape of an optimizer's state dict."""
    return isinstance(node, dict) and isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def is_bare_state_dict(tree: object) -> bool:
    """Whether the tree itself is the state dict of a model: names to tensors, extra states aside."""
    return holds_tensors_alone(tree) and not is_flat_optimizer(tree)


def is_flat_optimizer(tree: object) -> bool:
    """Whether the tree is an optimizer's state with paths for keys: ``state.0.exp_avg``, as in safetensors files."""
    return holds_tensors_alone(tree) and bool(flat_states(tree))


def holds_tensors_alone(tree: object) -> TypeGuard[dict[str, TensorRef]]:
    """Whether the tree is a dict of names to tensors, extra states aside."""
    if not isinstance(tree, dict):
        return False
    holds_any = False
    for key, value in tree.items():
        if not isinstance(key, str):
            return False
        if not key.endswith("_extra_state"):
            if not isinstance(value, TensorRef):
                return False
            holds_any = True
    return holds_any


def dict_groups(optimizer: object) -> list[dict[Any, Any]]:
    """The parameter groups of an optimizer, without what a damaged file may hold in their place."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, Mapping) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def parameter_groups(optimizer: Mapping[str, Any]) -> list[dict[Any, Any]]:
    """The groups of an optimizer, each with the keys of the state that belongs to no parameter.

    A wrapper such as TRAC keeps such state, and takes other steps than the optimizer in it.
    """
    groups = dict_groups(optimizer)
    if not any(isinstance(key, int) for key in optimizer["state"]):
        return groups
    listed = {
        identifier for group in groups for identifier, _ in listed_parameters(group) if isinstance(identifier, str)
    }
    own = dict.fromkeys(key for key in optimizer["state"] if isinstance(key, str) and key not in listed)
    return [{**group, **own} for group in groups] if own else groups


def parameters_of(optimizer: Mapping[str, Any]) -> dict[int | str, tuple[dict[Any, Any], str | None]]:
    """Every parameter that an optimizer lists, in order, with its group and the name that this states, or None."""
    return {
        identifier: (group, name)
        for group in parameter_groups(optimizer)
        for identifier, name in listed_parameters(group)
        if isinstance(identifier, (int, str))
    }


def listed_parameters(group: Mapping[Any, Any]) -> list[tuple[Any, str | None]]:
    """The identifiers that a parameter group lists, each with its name, None where the group does not state one."""
    identifiers, names = group.get("params"), group.get("param_names")
    if not isinstance(identifiers, list):
        return []
    if isinstance(names, list) and len(names) == len(identifiers):
        return list(zip(identifiers, map(str, names), strict=True))
    return [(identifier, identifier if isinstance(identifier, str) else None) for identifier in identifiers]


LONGEST_NAME = 512

_MOST_USES = 8
"""A part that more objects share counts for the first of them: a hostile file may have any number."""


@dataclass(slots=True)
class LiveObjects:
    """The outermost pickled modules and the optimizers of a tree.

    ``instead`` are their state dicts by the ``id`` of the object, ``modules`` the ``id`` of those that are of modules,
    ``origins`` the objects by the ``id`` of the state dict. ``weights`` and ``buffers`` are the ``id`` of tensors.
    """

    instead: dict[int, dict[Any, Any]] = field(default_factory=dict)
    modules: set[int] = field(default_factory=set)
    origins: dict[int, Inert] = field(default_factory=dict)
    weights: set[int] = field(default_factory=set)
    buffers: set[int] = field(default_factory=set)
    _uses: Counter[int] = field(default_factory=Counter)

    def may_use(self, part: object) -> bool:
        """Whether one more object may count with a part that it shares."""
        self._uses[id(part)] += 1
        return self._uses[id(part)] <= _MOST_USES


def containers(tree: object, live: LiveObjects) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every node of ``tree`` that is no tensor or storage with its path, and state dicts instead of the objects."""
    return iter_nodes(tree, instead=live.instead, leaves=frozenset())


def find_live_objects(tree: object) -> LiveObjects:
    """The pickled modules and optimizers in ``tree``."""
    live = LiveObjects()
    names: dict[Any, str] = {}
    optimizers: list[Inert] = []
    objects = ((path, node) for path, node in iter_nodes(tree, leaves=frozenset()) if isinstance(node, Inert))
    for _, node in outermost(objects, _is_module):
        if _is_module(node):
            live.instead[id(node)] = tensors = _module(node, live)
            for name, ref in tensors.items():
                names.setdefault(place_of(ref), name)
            live.modules.add(id(tensors))
            live.origins[id(tensors)] = node
        elif is_optimizer(_attributes(node)):
            optimizers.append(node)
    for optimizer in optimizers:
        live.instead[id(optimizer)] = made = _optimizer(_attributes(optimizer), names, live)
        live.origins[id(made)] = optimizer
    return live


def _attributes(node: Inert) -> dict[str, Any]:
    """The ``__dict__`` of an object, with or without the values of slots beside it."""
    state = node.state[0] if isinstance(node.state, tuple) and len(node.state) == 2 else node.state
    return state if isinstance(state, dict) else {}


def _is_module(node: Inert) -> bool:
    attributes = _attributes(node)
    return isinstance(attributes.get("_parameters"), dict) and isinstance(attributes.get("_modules"), dict)


def place_of(ref: TensorRef) -> tuple[object, ...]:
    """What two references to one tensor have in common."""
    return ref.key, ref.offset, ref.shape, ref.stride


def _module(module: Inert, live: LiveObjects) -> dict[str, TensorRef]:
    """The state dict of a module. A module that it holds several times has the first of its names."""
    tensors, seen, waiting = dict[str, TensorRef](), set[int](), [("", module)]
    while waiting:
        prefix, node = waiting.pop()
        attributes = _attributes(node)
        odd = id(node) in seen or len(prefix) > LONGEST_NAME or not _is_module(node)
        if odd or not live.may_use(node):
            continue
        seen.add(id(node))
        for key, ids in (("_parameters", live.weights), ("_buffers", live.buffers)):
            own = attributes.get(key)
            for name, ref in own.items() if isinstance(own, dict) else ():
                if isinstance(ref, TensorRef) and isinstance(name, str):
                    tensors[prefix + name[:LONGEST_NAME]] = ref
                    ids.add(id(ref))
        children = [(f"{prefix}{name}.", child) for name, child in attributes["_modules"].items()]
        waiting += [(name, child) for name, child in reversed(children) if isinstance(child, Inert)]
    return tensors


def _optimizer(attributes: Mapping[str, Any], names: Mapping[Any, str], live: LiveObjects) -> dict[str, Any]:
    """The state dict of an optimizer, with ``param_names`` in each group whose parameters all have one."""
    numbers: dict[Any, int] = {}
    groups = []
    for group in attributes["param_groups"]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            groups.append(group)
        elif live.may_use(group["params"]):
            refs = [ref for ref in group["params"] if isinstance(ref, TensorRef)]
            live.weights.update(map(id, refs))
            known = [names.get(place_of(ref)) for ref in refs]
            own = {**group, "params": [numbers.setdefault(place_of(ref), len(numbers)) for ref in refs]}
            if "param_names" not in group and known and None not in known:
                own["param_names"] = known
            groups.append(own)
    states = {
        numbers.get(place_of(key), key) if isinstance(key, TensorRef) else key: state
        for key, state in (attributes["state"].items() if live.may_use(attributes["state"]) else ())
    }
    return {"state": states, "param_groups": groups}
