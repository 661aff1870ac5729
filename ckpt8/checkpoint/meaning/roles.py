"""What every tensor of a checkpoint is for, read from where it sits in the tree and never from its values.

optimizer   a dict with ``state`` and ``param_groups``, anywhere; ``state[id][key]``, id an index or a name
masters     under a key that names a list of fp32 master weights, anywhere
weights     under a key that names a model (``model``, ``state_dict``, ``state_dict_ema``, ...), under the
            ``_parameters`` of a pickled module, or a bare state dict: a dict of nothing but tensors
other       everything else
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt8.checkpoint.meaning.quantised_state import bitsandbytes_moments, plain_state
from ckpt8.checkpoint.tree import Labelled, NamedTensor, StorageRef, TensorRef
from ckpt8.checkpoint.vocabulary import MASTER_LISTS, MODEL_KEYS, STATE_LISTS
from ckpt8.checkpoint.walk import Components, format_path, iter_nodes
from ckpt8.core.tensors import Role
from ckpt8.core.text import printable
from ckpt8.optim.known_optimizers import MOMENT_SLOTS, STATE_ROLES

_LONGEST_NAME = 512


@dataclass(slots=True)
class Names:
    """Names given so far in a container, so that each is unique, and what stands before those of one member."""

    prefix: str = ""
    tensors: dict[str, int] = field(default_factory=dict)
    storages: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ParameterState:
    """The optimizer state of one parameter: ``state`` maps keys to values, ``group`` is its parameter group."""

    name: str
    state: Mapping[Any, Any]
    group: Mapping[Any, Any]


@dataclass(slots=True)
class Structure:
    """``opaque`` are the keys of storages that something other than a tensor refers to."""

    tensors: list[NamedTensor] = field(default_factory=list)
    parameters: list[ParameterState] = field(default_factory=list)
    opaque: set[str] = field(default_factory=set)


def is_optimizer(node: object) -> bool:
    """Whether a node has the shape of an optimizer's state dict."""
    return isinstance(node, dict) and isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def is_bare_state_dict(tree: object) -> bool:
    """Whether the tree is a model state dict itself: names to tensors, extra states aside."""
    return _holds_tensors_alone(tree) and not is_flat_optimizer(tree)


def is_flat_optimizer(tree: object) -> bool:
    """Whether the tree is an optimizer's state with paths for keys: ``state.0.exp_avg``, as in safetensors files."""
    if not isinstance(tree, dict) or not _holds_tensors_alone(tree):
        return False
    paths = (key.rpartition(".") for key in tree)
    return any(owner and key in MOMENT_SLOTS for owner, _, key in paths)


def _holds_tensors_alone(tree: object) -> bool:
    if not isinstance(tree, dict):
        return False
    values = [value for key, value in tree.items() if not str(key).endswith("_extra_state")]
    return bool(values) and all(isinstance(key, str) for key in tree) and all(isinstance(v, TensorRef) for v in values)


def short_name(name: str) -> str:
    """``name`` for people and manifests: printable, and not endless."""
    return printable(name[:_LONGEST_NAME])


def unique_name(name: str, taken: dict[str, int]) -> str:
    """``name``, printable and short, with ``#2``, ``#3``, ... where it was given before."""
    name = candidate = short_name(name)
    while candidate in taken:
        taken[name] += 1
        candidate = f"{name}#{taken[name]}"
    taken[candidate] = 1
    return candidate


def classify(tree: object, names: Names | None = None, role: Role | None = None) -> Structure:
    """Name every tensor of the tree and give it its role, or ``role``. Raises InputError on a tree that is too deep."""
    names = names or Names()
    if isinstance(tree, Labelled):
        return _classify_labelled(tree, names)
    if is_flat_optimizer(tree):
        return _classify_flat(tree, names)
    structure = Structure()
    optimizer: Components | None = None
    moments: dict[int, Role] = {}
    bare = is_bare_state_dict(tree)
    home = _Home(())
    for path, node in iter_nodes(tree):
        if isinstance(node, TensorRef):
            if path[:-1] != home.path:
                home = _Home(path[:-1])
            name = unique_name(names.prefix + (home.name(path) or "tensor"), names.tensors)
            told = moments.get(id(node), Role.OTHER)
            structure.tensors.append(NamedTensor(name, role or _role(path, home, optimizer, bare, told), node))
        elif isinstance(node, StorageRef):
            structure.opaque.add(node.key)
        elif is_optimizer(node):
            if optimizer is None or path[: len(optimizer)] != optimizer:
                optimizer = path  # the outermost one that the walk is in, or was in last
            groups = _groups(node)
            structure.parameters += _parameter_states(format_path(path), node["state"], groups, names.prefix)
            moments |= _moments_of_others(node["state"], groups)
    return structure


def _classify_labelled(tree: Labelled, names: Names) -> Structure:
    structure = Structure(opaque=set(tree.opaque))
    for tensor in tree.tensors:
        name = unique_name(names.prefix + tensor.name, names.tensors)
        whole = None if tensor.whole is None else names.prefix + tensor.whole
        structure.tensors.append(replace(tensor, name=name, whole=whole))
    return structure


def _classify_flat(tree: Any, names: Names) -> Structure:
    structure = Structure()
    states: dict[str, dict[str, Any]] = {}
    for path, node in iter_nodes(tree):
        if isinstance(node, StorageRef):
            structure.opaque.add(node.key)
        elif isinstance(node, TensorRef):
            owner, _, key = format_path(path).rpartition(".")
            name = unique_name(names.prefix + format_path(path), names.tensors)
            structure.tensors.append(NamedTensor(name, STATE_ROLES.get(key, Role.OTHER), node))
            states.setdefault(owner, {})[key] = node
    structure.parameters = [
        ParameterState(names.prefix + owner, state, {})
        for owner, state in states.items()
        if MOMENT_SLOTS.keys() & state
    ]
    return structure


class _Home:
    """The container of a tensor: what is the same for all in it, of which there may be many under a long path."""

    def __init__(self, path: Components) -> None:
        self.path = path
        self.is_model = not MODEL_KEYS.isdisjoint(path)
        self.has_masters = not MASTER_LISTS.isdisjoint(path)
        self.has_states = STATE_LISTS in path
        self._text = format_path(path)

    def name(self, path: Components) -> str:
        """The path of something in it as text."""
        return f"{self._text}.{path[-1]}" if self.path else format_path(path)


def _role(path: Components, home: _Home, optimizer: Components | None, bare: bool, told: Role) -> Role:
    """The role of the tensor at ``path``; ``optimizer`` is the path of one that it may be in.

    ``told`` is that of a tensor in the state of an optimizer under another name.
    """
    if home.has_masters or (path[-1:] and path[-1] in MASTER_LISTS):
        return Role.WEIGHT
    depth = len(path) if optimizer is None else len(optimizer)
    if depth < len(path) and path[:depth] == optimizer:
        in_state = len(path) == depth + 3 and path[depth] == "state"
        return STATE_ROLES.get(path[-1], told) if in_state else told
    if home.has_states:
        return STATE_ROLES.get(path[-1], Role.OTHER)
    return Role.WEIGHT if bare or home.is_model else Role.OTHER


_Groups = dict[Any, tuple[Mapping[Any, Any], str | None]]
"""By identifier the group of a parameter, and its name where the checkpoint has one."""


def _groups(optimizer: Mapping[str, Any]) -> _Groups:
    groups: _Groups = {}
    for group in optimizer["param_groups"]:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            continue
        names = group.get("param_names")
        known = isinstance(names, list) and len(names) == len(group["params"])
        for position, identifier in enumerate(group["params"]):
            if isinstance(identifier, (int, str)):
                name = str(names[position]) if known and names else None
                groups[identifier] = (group, identifier if name is None and isinstance(identifier, str) else name)
    return groups


def _parameter_states(path: str, states: Mapping[Any, Any], groups: _Groups, prefix: str) -> list[ParameterState]:
    """The states of one optimizer, named as the checkpoint names its parameters, else by their place."""
    found = []
    for identifier, state in states.items():
        if isinstance(state, dict):
            group, name = groups.get(identifier, ({}, None))
            place = f"{path}.state.{identifier}" if path else f"state.{identifier}"
            found.append(ParameterState(prefix + (name or place), plain_state(state, group), group))
    return found


def _moments_of_others(states: Mapping[Any, Any], groups: _Groups) -> dict[int, Role]:
    """Roles of the moments that have other names than in torch, by the ``id`` of their reference."""
    found: dict[int, Role] = {}
    for identifier, state in states.items():
        if isinstance(state, dict) and identifier in groups:
            moments = bitsandbytes_moments(state, groups[identifier][0])
            found.update((id(ref), STATE_ROLES[key]) for key, ref in moments.items())
    return found
