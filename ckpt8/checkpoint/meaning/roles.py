"""The role of every tensor of a checkpoint, from its place in the tree and never from its values.

optimizer   a dict with ``state`` and ``param_groups``, anywhere; ``state[id][key]``, id an index or a name
masters     under a key that names a list of fp32 master weights, anywhere
weights     under a key that names a model (``model``, ``state_dict``, ``state_dict_ema``, ...), the parameters of a
            pickled module or optimizer, a bare state dict: a dict of nothing but tensors, or what ``state_dicts``
            finds
other       everything else
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpt8.checkpoint.meaning.nodes import (
    LONGEST_NAME,
    find_live_objects,
    flat_states,
    flat_weights,
    is_bare_state_dict,
    is_flat_optimizer,
    is_optimizer,
    parameters_of,
)
from ckpt8.checkpoint.meaning.optimizer_state import SavedParameter, bitsandbytes_moments, with_moments
from ckpt8.checkpoint.meaning.state_dicts import evident_weights, states_by_owner, weights_of_states
from ckpt8.checkpoint.tree import (
    Components,
    Labelled,
    NamedTensor,
    StorageRef,
    TensorRef,
    format_path,
    iter_leaves,
    iter_nodes,
)
from ckpt8.checkpoint.vocabulary import MASTER_LISTS, MODEL_KEYS, STATE_LISTS
from ckpt8.core.tensors import Role, is_small
from ckpt8.core.text import printable
from ckpt8.optim.known_optimizers import MOMENT_SLOTS, STATE_ROLES, WHOLE_SHAPE, state_roles


@dataclass(slots=True)
class Names:
    """The names that a container has so far, so that each is unique, and the ``prefix`` of those of one member."""

    prefix: str = ""
    tensors: dict[str, int] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Structure:
    """Tensors and optimizer states of a tree; ``opaque`` are the storages that not only tensors refer to."""

    tensors: list[NamedTensor] = field(default_factory=list)
    parameters: list[SavedParameter] = field(default_factory=list)
    opaque: set[str] = field(default_factory=set)


def short_name(name: str) -> str:
    """``name`` for people and manifests: printable, and not endless."""
    return printable(name[:LONGEST_NAME])


def unique_name(name: str, taken: dict[str, int]) -> str:
    """``name``, printable and short, with ``#2``, ``#3``, ... where it is taken."""
    name = candidate = short_name(name)
    while candidate in taken:
        taken[name] += 1
        candidate = f"{name}#{taken[name]}"
    taken[candidate] = 1
    return candidate


def classify(
    tree: object, names: Names | None = None, role: Role | None = None, beside: Callable[[], Set[int]] = frozenset
) -> Structure:
    """Every tensor of the tree with its name and its role, or ``role``. Raises InputError for one nested too deep.

    ``beside`` tells the weights that other files of a directory show, see ``evident_weights``.
    """
    names = names or Names()
    if isinstance(tree, Labelled):
        return _classify_labelled(tree, names)
    if is_flat_optimizer(tree):
        return _classify_flat(tree, names)
    structure = Structure()
    optimizer: Components | None = None
    moments: dict[int, Role] = {}
    live = find_live_objects(tree)
    bare = is_bare_state_dict(live.instead.get(id(tree), tree))
    container = _Container(())
    for path, node in iter_nodes(tree, instead=live.instead):
        if isinstance(node, TensorRef):
            if path[:-1] != container.path:
                container = _Container(path[:-1])
            its_role = role or _role(path, container, optimizer, bare, moments.get(id(node), Role.OTHER))
            structure.tensors.append(_named(names, container.name(path) or "tensor", its_role, node))
        elif isinstance(node, StorageRef):
            structure.opaque.add(node.key)
        elif is_optimizer(node):
            if optimizer is None or path[: len(optimizer)] != optimizer:
                optimizer = path  # the outermost one that the walk is in, or was in last
            parameters, renamed = _parameter_states(format_path(path), node, names.prefix)
            structure.parameters += parameters
            moments |= renamed
    if live.instead:
        _add_hidden(structure, tree, names)
    if role is None:
        known = dict.fromkeys(live.buffers, Role.OTHER) | dict.fromkeys(live.weights, Role.WEIGHT)
        _set_roles(structure, lambda tensor: known.get(id(tensor.ref), tensor.role))
        if any(
            tensor.role is Role.OTHER and tensor.ref.dtype.is_floating and not is_small(tensor.ref.shape)
            for tensor in structure.tensors
        ):
            weights = evident_weights(tree) | beside()
            _set_roles(structure, lambda tensor: Role.WEIGHT if id(tensor.ref) in weights else tensor.role)
    return structure


def _add_hidden(structure: Structure, tree: object, names: Names) -> None:
    """Add the tensors and storages of pickled objects that their state dicts do not hold."""
    shown, hidden = {id(tensor.ref) for tensor in structure.tensors}, dict[int, tuple[Components, TensorRef]]()
    for path, leaf in iter_leaves(tree):
        if isinstance(leaf, StorageRef):
            structure.opaque.add(leaf.key)
        elif id(leaf) not in shown:
            hidden[id(leaf)] = path, leaf  # a parameter is a key of the state first, and then in its group
    structure.tensors += [_named(names, format_path(path), Role.OTHER, leaf) for path, leaf in hidden.values()]


def _named(names: Names, name: str, role: Role, ref: TensorRef) -> NamedTensor:
    """A tensor with its unique name; the name of a share ends with its place."""
    name, suffix = names.prefix + name, _suffix(ref)
    return NamedTensor(unique_name(name + suffix, names.tensors), role, ref, name if suffix else None)


def _suffix(ref: TensorRef) -> str:
    return "" if ref.share is None else ref.share.suffix(ref.shape)


def _set_roles(structure: Structure, role_of: Callable[[NamedTensor], Role]) -> None:
    for at, tensor in enumerate(structure.tensors):
        if (role := role_of(tensor)) is not tensor.role:
            structure.tensors[at] = replace(tensor, role=role)


def _classify_labelled(tree: Labelled, names: Names) -> Structure:
    structure = Structure(opaque=set(tree.opaque))
    for tensor in tree.tensors:
        whole = None if tensor.whole is None else names.prefix + tensor.whole
        name = unique_name(names.prefix + tensor.name, names.tensors)
        structure.tensors.append(replace(tensor, name=name, whole=whole))
    return structure


def _classify_flat(tree: Any, names: Names) -> Structure:
    """The tensors of a flat file: state of an optimizer, and weights that it fits."""
    structure, keys = Structure(), flat_states(tree)
    beside = {name: ref for name, ref in tree.items() if name not in keys and isinstance(ref, TensorRef)}
    weights, states = flat_weights(beside, tree, keys), states_by_owner(tree, keys)
    for path, node in iter_nodes(tree):
        if isinstance(node, StorageRef):
            structure.opaque.add(node.key)
        elif isinstance(node, TensorRef):
            name = unique_name(names.prefix + format_path(path), names.tensors)
            role = Role.WEIGHT if path[-1] in weights else Role.OTHER
            if path[-1] in keys:
                role = STATE_ROLES.get(keys[path[-1]].key, Role.OTHER)
            structure.tensors.append(NamedTensor(name, role, node))
    structure.parameters = [
        SavedParameter(names.prefix + owner, state, {})
        for owner, state in states.items()
        if MOMENT_SLOTS.keys() & state
    ]
    alike = weights_of_states(beside, states)
    _set_roles(structure, lambda tensor: Role.WEIGHT if id(tensor.ref) in alike else tensor.role)
    return structure


class _Container:
    """The dict or list that holds a tensor. Computed once for all its tensors: paths are long, tensors many."""

    def __init__(self, path: Components) -> None:
        self.path = path
        self.is_model, self.has_masters = not MODEL_KEYS.isdisjoint(path), not MASTER_LISTS.isdisjoint(path)
        self.has_states = STATE_LISTS in path
        self._text = format_path(path)

    def name(self, path: Components) -> str:
        """The ``path`` of a value in it as text."""
        return f"{self._text}.{path[-1]}" if self.path else format_path(path)


def _role(path: Components, container: _Container, optimizer: Components | None, bare: bool, moment: Role) -> Role:
    """The role of the tensor at ``path``; ``optimizer`` is the path of an optimizer that it may be in.

    ``moment`` is the role of a moment under another name than in torch, else OTHER.
    """
    depth = len(path) if optimizer is None else len(optimizer)
    is_inside = depth < len(path) and path[:depth] == optimizer
    if path[-1:] and path[-1] in MASTER_LISTS:
        return Role.WEIGHT
    if is_inside and len(path) == depth + 3 and path[depth] == "state":
        return STATE_ROLES.get(path[-1], moment)  # whatever the parameter is called
    if container.has_masters:
        return Role.WEIGHT
    if is_inside:
        return moment
    if container.has_states:
        return STATE_ROLES.get(path[-1], Role.OTHER)
    return Role.WEIGHT if bare or container.is_model else Role.OTHER


def _parameter_states(
    path: str, optimizer: Mapping[str, Any], prefix: str
) -> tuple[list[SavedParameter], dict[int, Role]]:
    """The states of one optimizer at ``path``, named as the checkpoint names its parameters, else by their place.

    The second result are the roles of moments that have other names than in torch, by the ``id`` of their reference.
    """
    groups = parameters_of(optimizer)
    parameters: list[SavedParameter] = []
    roles: dict[int, Role] = {}
    for identifier, state in optimizer["state"].items():
        if isinstance(state, dict):
            group, name = groups.get(identifier, ({}, None))
            place = f"{path}.state.{identifier}" if path else f"state.{identifier}"
            moments = bitsandbytes_moments(state, group)
            roles.update((id(ref), STATE_ROLES[key]) for key, ref in moments.items())
            tensors = {key: ref for key, ref in state.items() if isinstance(ref, TensorRef) and ref.shape}
            roles.update((id(tensors[key]), role) for key, role in state_roles(tensors).items() if key in tensors)
            suffix = next(filter(None, map(_suffix, tensors.values())), "")
            whole = _whole_shape(state, tensors.values())
            parameters.append(
                SavedParameter(prefix + (name or place) + suffix, with_moments(state, moments), group, whole)
            )
    return parameters, roles


def _whole_shape(state: Mapping[Any, Any], tensors: Iterable[TensorRef]) -> tuple[int, ...] | None:
    """The shape of the parameter that a state is a slice of, as the file says; None for a state that is whole."""
    stated = state.get(WHOLE_SHAPE)
    if isinstance(stated, list) and all(type(size) is int for size in stated):
        return tuple(stated)
    cut = (ref.share.whole for ref in tensors if ref.share and ref.share.whole != ref.shape)
    return max(cut, key=lambda shape: (len(shape), prod(shape)), default=None)
