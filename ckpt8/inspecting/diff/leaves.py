"""Collects the tensors and values of a source by the paths that match them with those of the other source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from ckpt8.checkpoint.meaning.deepspeed import Universal
from ckpt8.checkpoint.meaning.roles import classify, unique_name
from ckpt8.checkpoint.meaning.weight_evidence import evident_weights
from ckpt8.checkpoint.tree import Global, Inert, StorageRef, TensorRef
from ckpt8.checkpoint.walk import iter_nodes
from ckpt8.core.tensors import Role
from ckpt8.inspecting.diff.naming import Naming, join
from ckpt8.inspecting.diff.sides import Part, Side
from ckpt8.inspecting.diff.values import Leaves

K = TypeVar("K")
_PARAM_NAMES = "param_names"
_ALONE = "\0"
"""Stands before a path without a counterpart; no other name begins with it."""

_LONGEST = 600
"""Paths are cut to this many characters while they are made; names are shorter."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a part. ``name`` is its path, ``parameter`` the path of the weight that it is or belongs to.

    ``tied`` is the path of an earlier tensor over the same elements of the same storage.
    """

    name: str
    ref: TensorRef
    part: Part
    role: Role
    parameter: str | None
    tied: str | None


@dataclass(slots=True)
class Found:
    """Tensors and values by their path in the first source, or by one that nothing has there.

    A value comes with its path in its own source.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, tuple[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Place:
    """The path of a node; its path in the first source and its parameter, or None."""

    own: str
    name: str | None
    parameter: str | None = None

    def below(self, component: str) -> _Place:
        own = join(self.own, component)[:_LONGEST]
        if self.name is None or self.name == self.own:
            return _Place(own, None if self.name is None else own, self.parameter)
        return _Place(own, join(self.name, component)[:_LONGEST], self.parameter)

    def renamed(self, key: K, names: Mapping[K, str | None], owners: Mapping[K, str]) -> _Place:
        """The place with the name and the parameter that are known under ``key``."""
        if key not in names and key not in owners:
            return self
        return _Place(self.own, names.get(key, self.name), owners.get(key, self.parameter))


def collect(side: Side, naming: Naming, *, param_names: bool) -> Found:
    """All tensors and values of a source. ``param_names`` False leaves out these lists of an optimizer's groups.

    Raises InputError for a tree that is too deep.
    """
    found = Found()
    own: dict[str, int] = {}
    taken: dict[str, int] = {}
    ties: dict[tuple[object, ...], str] = {}
    universal = Universal((part.path, part.checkpoint) for part in side.parts)
    beside = cache(lambda: evident_weights(*(part.data.tree for part in side.parts)))
    for part in side.parts:
        classified = classify(part.data.tree, role=universal.role(part.path), beside=beside)
        roles = {id(tensor.ref): tensor.role for tensor in reversed(classified.tensors)}
        for place, leaf in _walk(part, naming, param_names=param_names):
            called = unique_name(place.own, own)
            name = f"{_ALONE}{called}" if place.name is None else unique_name(place.name, taken)
            if isinstance(leaf, (TensorRef, StorageRef)):
                ref = leaf if isinstance(leaf, TensorRef) else _flat(leaf)
                first = called
                if ref.numel:  # an empty tensor shares its place with nothing
                    elements = (id(part), ref.key, ref.dtype, ref.offset, ref.shape, ref.stride, ref.conj, ref.neg)
                    first = ties.setdefault(elements, called)
                role = roles.get(id(leaf), Role.OTHER)
                parameter = universal.owner(part.path) or place.parameter
                found.tensors[name] = Tensor(called, ref, part, role, parameter, None if first == called else first)
            else:
                found.values[name] = called, leaf
    return found


def _flat(storage: StorageRef) -> TensorRef:
    return TensorRef(storage.key, storage.dtype, storage.offset, (storage.numel,), (1,))


def _walk(part: Part, naming: Naming, *, param_names: bool) -> Iterator[tuple[_Place, Any]]:
    """Every tensor and value of a part, in the order of the document."""
    tree = part.data.tree
    is_leaf = Leaves()
    if isinstance(tree, (TensorRef, StorageRef)) or is_leaf(tree):
        whole = join(part.prefix, "value" if is_leaf(tree) else "tensor")
        yield _Place(whole, whole), tree
        return
    places: list[tuple[_Place, int]] = []
    for path, node in iter_nodes(tree, part.data.label, is_leaf):
        del places[len(path) :]
        place = _Place(part.prefix, part.prefix)
        if path:
            above, above_id = places[-1]
            place = above.below(path[-1]).renamed((above_id, path[-1]), naming.entries, naming.weight_owners)
        if isinstance(node, (TensorRef, StorageRef)) or is_leaf(node):
            if param_names or path[-1] != _PARAM_NAMES:
                yield place, node
            continue
        place = place.renamed(id(node), naming.places, naming.state_owners)
        places.append((place, id(node)))
        if isinstance(node, Inert):
            yield place.below("(class)"), Global(node.name)
