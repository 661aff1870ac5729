"""Pickled modules and optimizers as the state dicts that they would give, read from the inert objects alone.

    module      the entries of ``_parameters`` and ``_buffers``, its own and those of all in ``_modules``, by name
    optimizer   ``state`` and ``param_groups``; its parameters are the tensors themselves, and become numbers

An optimizer and a module of one file hold the same tensors, so the module names the parameters of the optimizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt8.checkpoint.meaning.nodes import Inside
from ckpt8.checkpoint.tree import Inert, TensorRef
from ckpt8.checkpoint.walk import iter_nodes

_LONGEST_NAME = 512

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

    def walk(self, tree: object) -> Iterator[tuple[tuple[str, ...], Any]]:
        """As ``iter_nodes``, with the state dicts instead of the objects."""
        return iter_nodes(tree, instead=self.instead)

    def containers(self, tree: object) -> Iterator[tuple[tuple[str, ...], Any]]:
        """As ``walk``, without tensors and storages."""
        return iter_nodes(tree, instead=self.instead, leaves=frozenset())


def find_live_objects(tree: object) -> LiveObjects:
    """The pickled modules and optimizers in ``tree``."""
    found = LiveObjects()
    names: dict[Any, str] = {}
    optimizers: list[tuple[Inert, Mapping[str, Any]]] = []
    module = Inside()
    for path, node in iter_nodes(tree, leaves=frozenset()):
        if not isinstance(node, Inert) or module.holds(path):
            continue
        attributes = _attributes(node)
        if _is_module(attributes):
            module.enter(path)
            tensors = _module(node, found)
            for name, ref in tensors.items():
                names.setdefault(_place(ref), name)
            found.modules.add(id(tensors))
            _add(found, node, tensors)
        elif isinstance(attributes.get("state"), dict) and isinstance(attributes.get("param_groups"), list):
            optimizers.append((node, attributes))
    for optimizer, state in optimizers:
        _add(found, optimizer, _optimizer(state, names, found))
    return found


def _add(found: LiveObjects, node: Inert, state_dict: dict[Any, Any]) -> None:
    found.instead[id(node)] = state_dict
    found.origins[id(state_dict)] = node


def _attributes(node: Inert) -> dict[str, Any]:
    """The ``__dict__`` of an object, with or without the values of slots beside it."""
    state = node.state[0] if isinstance(node.state, tuple) and len(node.state) == 2 else node.state
    return state if isinstance(state, dict) else {}


def _is_module(attributes: Mapping[str, Any]) -> bool:
    return isinstance(attributes.get("_parameters"), dict) and isinstance(attributes.get("_modules"), dict)


def _place(ref: TensorRef) -> tuple[object, ...]:
    return ref.key, ref.offset, ref.shape, ref.stride


def _module(module: Inert, found: LiveObjects) -> dict[str, TensorRef]:
    """The state dict of a module. A module that it holds several times has the first of its names."""
    tensors: dict[str, TensorRef] = {}
    seen = set()
    waiting = [("", module)]
    while waiting:
        prefix, node = waiting.pop()
        attributes = _attributes(node)
        if id(node) in seen or len(prefix) > _LONGEST_NAME or not _is_module(attributes):
            continue
        if not found.may_use(node):
            continue
        seen.add(id(node))
        for key, ids in (("_parameters", found.weights), ("_buffers", found.buffers)):
            own = attributes.get(key)
            for name, ref in own.items() if isinstance(own, dict) else ():
                if isinstance(ref, TensorRef) and isinstance(name, str):
                    tensors[prefix + name[:_LONGEST_NAME]] = ref
                    ids.add(id(ref))
        children = [(f"{prefix}{name}.", child) for name, child in attributes["_modules"].items()]
        waiting += [(name, child) for name, child in reversed(children) if isinstance(child, Inert)]
    return tensors


def _optimizer(attributes: Mapping[str, Any], names: Mapping[Any, str], found: LiveObjects) -> dict[str, Any]:
    """The state dict of an optimizer, with ``param_names`` in each group whose parameters all have one."""
    numbers: dict[Any, int] = {}
    groups = []
    for group in attributes["param_groups"]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            groups.append(group)
            continue
        if not found.may_use(group["params"]):
            continue
        refs = [ref for ref in group["params"] if isinstance(ref, TensorRef)]
        found.weights.update(map(id, refs))
        known = [names.get(_place(ref)) for ref in refs]
        own = {**group, "params": [numbers.setdefault(_place(ref), len(numbers)) for ref in refs]}
        if "param_names" not in group and known and None not in known:
            own["param_names"] = known
        groups.append(own)
    states = {
        numbers.get(_place(each), each) if isinstance(each, TensorRef) else each: state
        for each, state in (attributes["state"].items() if found.may_use(attributes["state"]) else ())
    }
    return {"state": states, "param_groups": groups}
