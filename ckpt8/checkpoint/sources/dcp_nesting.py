"""Nests the values of a distributed checkpoint again, as the state dict was before torch flattened its names.

Models and optimizers go where a training run saved as one file has them, whether the names came from a nested state
dict, a flattened one, or torchtitan's with the weights at the top.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any, cast

from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint
from ckpt8.checkpoint.readers.dcp.names import GROUPS, PARAMETERS, STATE
from ckpt8.checkpoint.readers.dcp.nesting import Path, nest
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import model_path
from ckpt8.container.frames import bytes_of
from ckpt8.core.tensors import Role

_MODEL, _NAMES = "model", "param_names"


def build_tree(home: DcpCheckpoint, values: Mapping[str, Any], data: Composite) -> dict[str, Any]:
    """The state dict of ``values``, given by name, in the order of the saved state dict.

    Its tensors are those of ``data``. Optimizers have the layout of torch: numbers for parameters, and known names in
    ``param_names``. Raises InputError for names that contradict each other.
    """
    known = home.metadata.paths
    order = [name for name in known if name in values] + [name for name in values if name not in known]
    places = _Places(home)
    top = nest(((name, places.find_path(name), values[name]) for name in order), data.label)
    for path in dict.fromkeys(places.optimizers.values()):
        _rebuild(reduce(getitem, path, cast("Any", top)), data)
    return top


class _Places:
    """Finds the path of each value. ``optimizers`` are the paths of optimizers, by the names that roles give them."""

    def __init__(self, home: DcpCheckpoint) -> None:
        self._metadata, self._roles = home.metadata, home.roles
        self.optimizers: dict[str, Path] = {}
        paths = self._metadata.paths
        flat = [name for name, path in paths.items() if len(path) == 1]
        weights = [name for name in flat if name in home.metadata.tensors and self._roles.role(name) is Role.WEIGHT]
        elsewhere = any(path[0] == _MODEL for path in paths.values())
        self._model_at_top = bool(weights) and not elsewhere and len(flat) < len(paths)

    def find_path(self, name: str) -> Path:
        """The keys that lead to a value."""
        state, option = self._roles.states.get(name), self._roles.options.get(name)
        path = self._metadata.paths.get(name)
        key = state or option
        if key is not None:
            optimizer = self._optimizer(name, key.optimizer)
            inside = () if path is None else path[len(optimizer) :]
            if len(inside) > 2 and (inside[1] == key.parameter or type(inside[1]) is int):
                # The path tells which dots separate dictionaries inside a state or a group; the name does not.
                return *optimizer, str(inside[0]), str(inside[1]), *inside[2:]
            return *optimizer, GROUPS if state is None else STATE, key.parameter, key.key
        if path is None:
            return model_path(name) or (name,)
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
    """Give an optimizer a list of groups that list their parameters by number, and key its states by these numbers."""
    states, found = optimizer.get(STATE, {}), optimizer.get(GROUPS, {})
    if type(states) is not dict or type(found) is not dict or not all(type(group) is dict for group in found.values()):
        return
    groups = [*_groups(found, list(states), data)]
    numbers: dict[Any, int] = {}
    for group in groups:
        listed = group[PARAMETERS]
        if listed and all(isinstance(each, str) for each in listed):
            group.setdefault(_NAMES, list(listed))
            group[PARAMETERS] = [numbers.setdefault(name, len(numbers)) for name in listed]
        elif all(type(each) is int for each in listed):
            numbers.update((str(each), each) for each in listed)
    optimizer[STATE] = {numbers.get(parameter, parameter): state for parameter, state in states.items()}
    optimizer[GROUPS] = groups


def _groups(found: Mapping[str, Mapping[str, Any]], parameters: list[str], data: Composite) -> Iterator[dict[str, Any]]:
    """The groups of an optimizer: numbered groups as they are; groups of one parameter, merged where settings agree."""
    numbered = {owner: group for owner, group in found.items() if isinstance(group.get(PARAMETERS), list)}
    for owner in sorted(numbered, key=lambda owner: (len(str(owner)), str(owner))):
        yield {**numbered[owner], PARAMETERS: list(numbered[owner][PARAMETERS])}
    alike: dict[str, list[str]] = defaultdict(list)
    for owner in (each for each in found if each not in numbered):
        alike[repr({key: _plain(value, data) for key, value in found[owner].items()})].append(owner)
    for owners in alike.values():
        yield {**found[owners[0]], PARAMETERS: owners}
    if not found and parameters:
        yield {PARAMETERS: parameters}


def _plain(value: Any, data: Composite) -> Any:
    """A setting to compare: its content where it is a tensor of one number, such as a learning rate."""
    if not isinstance(value, TensorRef) or value.numel != 1:
        return value
    return value.dtype, value.shape, bytes(bytes_of(data.elements(value, 0, 1)))
