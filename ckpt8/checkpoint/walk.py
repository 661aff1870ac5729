"""Walks over the tree of a checkpoint: every tensor and storage in it, with the path that leads there.

The walk is iterative, so that no nesting exhausts the interpreter's stack. It visits every container once: a structure
that refers to itself ends, and one that shares its parts a billion times takes no longer than its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from itertools import chain
from types import MappingProxyType
from typing import Any

from ckpt8.checkpoint.tree import Inert, StatefulDict, StorageRef, TensorRef
from ckpt8.core.errors import InputError

MAX_DEPTH = 1000
MAX_COMPONENT_CHARACTERS = 1024
_LONGEST_PATH = 600
"""Components of a path that its text shows: more than any name keeps."""

Components = tuple[str, ...]
Leaf = TensorRef | StorageRef
Child = tuple[Any, Any]
"""A name, not yet text, and the value under it."""

_NOTHING: Mapping[int, Any] = MappingProxyType({})
_LEAVES = frozenset({TensorRef, StorageRef})
_PLAIN_KEYS = frozenset({str, int})
"""Types of keys that nothing lies in; looking at every key in Python would take longer than the walk."""

_CONTAINERS = frozenset({dict, StatefulDict, list, tuple, set, frozenset, Inert})


def format_path(components: Components) -> str:
    """The components joined by ``.``; cuts a very long path. Two paths can have the same text."""
    return ".".join(components[:_LONGEST_PATH])


def iter_leaves(tree: Any, label: str = "checkpoint") -> Iterator[tuple[Components, Leaf]]:
    """Every tensor and storage of ``tree`` in the order of the document, with its path.

    A tensor that several containers hold comes once for each of them; the content of a container comes once, however
    many paths lead to it. Raises InputError that begins with ``label`` for a tree nested deeper than MAX_DEPTH.
    """
    return ((path, node) for path, node in iter_nodes(tree, label) if type(node) in _LEAVES)


def iter_nodes(
    tree: Any,
    label: str = "checkpoint",
    is_leaf: Callable[[Any], bool] | None = None,
    instead: Mapping[int, Any] = _NOTHING,
    leaves: Set[type] = _LEAVES,
) -> Iterator[tuple[Components, Any]]:
    """As ``iter_leaves``, and every container that is not empty, before its content.

    Values for which ``is_leaf`` is true come too, without their content. ``instead`` has values to walk by the ``id``
    of those whose place they take. With no types in ``leaves`` only containers come.
    """
    tree = instead.get(id(tree), tree)
    yield (), tree
    seen = {id(tree)}
    frames: list[tuple[Components, Iterator[Child]]] = [((), _children(tree, seen))]
    while frames:
        path, children = frames[-1]
        for name, child in children:
            value = instead.get(id(child), child) if instead else child
            kind = type(value)
            if kind in leaves or (is_leaf is not None and is_leaf(value)):
                yield (*path, _component(name)), value
            elif kind in _CONTAINERS and (value or kind is StatefulDict) and id(value) not in seen:
                if len(frames) >= MAX_DEPTH:
                    raise InputError(f"{label}: its objects are nested deeper than {MAX_DEPTH}")
                seen.add(id(value))
                below = (*path, _component(name))
                yield below, value
                frames.append((below, _children(value, seen)))
                break
        else:
            frames.pop()


def check_depth(tree: Any, label: str) -> None:
    """Raise InputError that begins with ``label`` for a tree nested deeper than MAX_DEPTH."""
    for _ in iter_nodes(tree, label, leaves=frozenset()):
        pass


def _children(node: Any, seen: set[int]) -> Iterator[Child]:
    """The children by name. The parts of an object count as containers: several objects may share them."""
    kind = type(node)
    if kind is dict:
        return iter(node.items()) if _PLAIN_KEYS.issuperset(map(type, node)) else _entries(node.items())
    if kind is StatefulDict:
        return chain(_entries(node.items()), _attributes(node.state, seen))
    if kind is Inert:
        return _parts(node, seen)
    return enumerate(node) if kind in _CONTAINERS else iter(())


def _parts(node: Inert, seen: set[int]) -> Iterator[Child]:
    for part in (node.args, node.items):
        if _is_new(part, seen):
            yield from enumerate(part)
    yield from _entries(node.pairs)
    yield from _attributes(node.state, seen)


def _is_new(part: Any, seen: set[int]) -> bool:
    known = id(part) in seen
    seen.add(id(part))
    return not known


def _entries(pairs: Any) -> Iterator[Child]:
    """Values by key. A key can be a tensor itself, as in ``optimizer.state``."""
    for key, value in pairs:
        if type(key) in _LEAVES or type(key) is tuple or type(key) is Inert:
            yield "key", key
        yield key, value


def _attributes(state: Any, seen: set[int]) -> Iterator[Child]:
    """Attributes by name. A state is a ``__dict__``, ``(__dict__, slots)``, or anything else."""
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    for part in parts:
        if type(part) is not dict:
            yield "state", part
        elif _is_new(part, seen):
            yield from _entries(part.items())


def _component(name: Any) -> str:
    """A short text for a key. It cuts huge keys: a path is for people, and may not outgrow the file."""
    if type(name) is str:
        text = name
    elif type(name) in (int, bool, float, type(None), complex):
        text = str(name)
    elif type(name) is bytes:
        text = repr(name[:MAX_COMPONENT_CHARACTERS])
    elif type(name) is tuple:
        parts = ("(...)" if type(part) is tuple else _component(part) for part in name[:8])
        text = f"({','.join(parts)})"
    else:
        text = getattr(name, "name", type(name).__name__)
    return text if len(text) <= MAX_COMPONENT_CHARACTERS else text[:MAX_COMPONENT_CHARACTERS] + "…"
