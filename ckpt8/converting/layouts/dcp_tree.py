"""The values of a distributed checkpoint by name as the state dict that they were before it was flattened.

What belongs to a model or an optimizer is put where a training run that is saved as one file has it, whichever way
the names were made: nested, flattened, or as torchtitan does, with the weights at the top.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import MODEL_KEYS
from ckpt8.container.frames import bytes_of
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import Role
from ckpt8.core.text import shown

_MODEL, _STATE, _GROUPS, _PARAMETERS, _NAMES = "model", "state", "param_groups", "params", "param_names"
Path = tuple[str | int, ...]


class _Branch(dict[Any, Any]):
    """A dictionary of the tree in the making, which no value is."""


def build_tree(home: DcpCheckpoint, values: Mapping[str, Any], data: Composite) -> dict[str, Any]:
    """Everything in ``values``, given by name, with tensors of ``data``, in the order of the state dict that was saved.

    Optimizers have the layout of torch: parameters are numbers, ``param_names`` say what is known of them. Raises
    InputError for names that contradict each other.
    """
    known = home.metadata.paths
    order = [name for name in known if name in values] + [name for name in values if name not in known]
    places = _Places(home)
    top = _Branch()
    branches: list[tuple[_Branch, Any, _Branch]] = []
    for name in order:
        node = top
        *above, last = places.path(name)
        for part in above:
            child = node.get(part)
            if child is None:
                child = node[part] = _Branch()
                branches.append((node, part, child))
            if type(child) is not _Branch:
                raise InputError(f"{data.label}: {shown(name)} lies inside another value")
            node = child
        if last in node:
            raise InputError(f"{data.label}: {shown(name)} lies where another value does")
        node[last] = values[name]
    for node, part, branch in reversed(branches):  # from the inside out
        node[part] = _finished(branch)
    for optimizer in dict.fromkeys(places.optimizers.values()):
        _rebuild(_at(top, optimizer), data)
    return dict(top)


def _finished(branch: _Branch) -> Any:
    if branch and set(branch) == set(range(len(branch))):
        return [branch[k] for k in range(len(branch))]
    return dict(branch)


def _at(tree: Any, path: Path) -> Any:
    for part in path:
        tree = tree[part]
    return tree


class _Places:
    """Where each value is put; ``optimizers`` are the paths of those by the names that roles give them."""

    def __init__(self, home: DcpCheckpoint) -> None:
        self._metadata, self._roles = home.metadata, home.roles
        self._options = home.roles.options
        self.optimizers: dict[str, Path] = {}
        paths = self._metadata.paths
        weights = [name for name, path in paths.items() if len(path) == 1 and self._is_weight(name)]
        elsewhere = any(path[0] == _MODEL for path in paths.values())
        everything = all(len(path) == 1 for path in paths.values())
        self._model_at_top = bool(weights) and not elsewhere and not everything

    def _is_weight(self, name: str) -> bool:
        return name in self._metadata.tensors and self._roles.role(name) is Role.WEIGHT

    def path(self, name: str) -> Path:
        """The path of a value."""
        state, option = self._roles.states.get(name), self._options.get(name)
        path = self._metadata.paths.get(name)
        key = state or option
        if key is not None:
            optimizer = self._optimizer(name, key.optimizer)
            inside = () if path is None else path[len(optimizer) :]
            if len(inside) > 2 and (inside[1] == key.parameter or type(inside[1]) is int):
                # What the path knows of dictionaries in a state or a group, the name does not.
                return *optimizer, str(inside[0]), str(inside[1]), *inside[2:]
            return *optimizer, _GROUPS if state is None else _STATE, key.parameter, key.key
        if path is None:
            parts = name.split(".")
            at = next((k for k, part in enumerate(parts[:-1]) if part in MODEL_KEYS), None)
            return (name,) if at is None else (*parts[: at + 1], ".".join(parts[at + 1 :]))
        if self._model_at_top and len(path) == 1 and name in self._metadata.tensors:
            return _MODEL, name
        return path

    def _optimizer(self, name: str, optimizer: str) -> Path:
        if optimizer not in self.optimizers:
            path = self._metadata.paths.get(name, ())
            starts = (path[:k] for k in range(len(path)) if ".".join(map(str, path[:k])) == optimizer)
            self.optimizers[optimizer] = next(starts, tuple(optimizer.split(".")) if optimizer else ())
        return self.optimizers[optimizer]


def _rebuild(optimizer: Any, data: Composite) -> None:
    """Give an optimizer groups that list its parameters, and its states the numbers of those."""
    states, found = optimizer.get(_STATE, {}), optimizer.get(_GROUPS, {})
    if type(states) is not dict or type(found) is not dict or not all(type(group) is dict for group in found.values()):
        return
    groups = [*_groups(found, list(states), data)]
    numbers: dict[Any, int] = {}
    for group in groups:
        listed = group[_PARAMETERS]
        named = [isinstance(each, str) for each in listed]
        if all(named) and listed:
            group.setdefault(_NAMES, list(listed))
            group[_PARAMETERS] = [numbers.setdefault(name, len(numbers)) for name in listed]
        elif all(type(each) is int for each in listed):
            numbers.update((str(each), each) for each in listed)
    optimizer[_STATE] = {numbers.get(parameter, parameter): state for parameter, state in states.items()}
    optimizer[_GROUPS] = groups


def _groups(found: Mapping[str, Mapping[str, Any]], parameters: list[str], data: Composite) -> Iterator[dict[str, Any]]:
    """The groups, which have numbers and say what is in them, or are of one parameter each: those of equal settings."""
    numbered = {owner: group for owner, group in found.items() if isinstance(group.get(_PARAMETERS), list)}
    for owner in sorted(numbered, key=lambda owner: (len(str(owner)), str(owner))):
        yield {**numbered[owner], _PARAMETERS: list(numbered[owner][_PARAMETERS])}
    alike: dict[str, dict[str, Any]] = {}
    members: dict[int, list[str]] = defaultdict(list)
    for owner, group in found.items():
        if owner not in numbered:
            identity = repr({key: _plain(value, data) for key, value in group.items()})
            kept = alike.setdefault(identity, dict(group))
            members[id(kept)].append(owner)
    for group in alike.values():
        yield {**group, _PARAMETERS: members[id(group)]}
    if not found and parameters:
        yield {_PARAMETERS: parameters}


def _plain(value: Any, data: Composite) -> Any:
    """A setting that is a tensor of one number, such as a learning rate, as what it holds."""
    if not isinstance(value, TensorRef) or value.numel != 1:
        return value
    number = data.elements(value, 0, 1)
    return value.dtype, value.shape, bytes(bytes_of(number))
