"""The roles of the values of a distributed checkpoint, by their names.

    <optimizer>.state.<parameter>.<key>             state of a parameter: get_state_dict, nested or flat; torchtitan
    <optimizer>.state.<key>.<parameter>             the same as Megatron writes it
    <optimizer>.param_groups.<number>.<option>      with the parameters under ``params``
    <optimizer>.param_groups.<parameter>.<option>   flattened: a group for every parameter

Another value is a weight if it lies under a key that names a model, or at the top of the state dict under the dotted
name of a parameter (torchtitan), or if an optimizer has state for it: under its name, or the end of its name.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ckpt8.checkpoint.readers.dcp.metadata import Metadata
from ckpt8.checkpoint.readers.pickle.rebuild import is_count
from ckpt8.checkpoint.vocabulary import MODEL_KEYS
from ckpt8.core.tensors import Role
from ckpt8.optim.known_optimizers import MEGATRON_MASTER, STATE_ROLES, state_roles

STATE, GROUPS, PARAMETERS = "state", "param_groups", "params"
"""Parts of the names of an optimizer's values; ``params`` is an option of a group."""

_KEY_ROLES: Mapping[str, Role] = ChainMap(STATE_ROLES, {MEGATRON_MASTER: Role.WEIGHT})
_MAX_COMPONENTS = 64
"""Names of modules have a few components; all behind the 64th count as one."""

Components = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StateKey:
    """A value in the state of a parameter. ``optimizer`` is the path of its optimizer, empty at the top."""

    optimizer: str
    parameter: str
    key: str


class DcpRoles:
    """Roles of all values of one checkpoint.

    ``states`` are the values that are state of a parameter, by name; ``values`` are their names by optimizer and
    parameter, then by key. ``options`` are the options of groups by name, with the number of the group for a parameter,
    or the parameter that has a group of its own.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._groups: dict[tuple[str, str], Mapping[str, str]] | None = None
        self._read: dict[int, Mapping[str, Any]] = {}
        self._names = {name: tuple(name.split(".", _MAX_COMPONENTS)) for name in metadata.names}
        self._inside: dict[str, tuple[Components, Components]] = {}
        self._find_optimizers()
        # The parameters that an optimizer has moments of, or a group for, by the path of the optimizer.
        self._owners: dict[Components, set[Components]] = defaultdict(set)
        for optimizer, path in self._inside.values():
            if len(path) > 2 and (path[0] == GROUPS or path[-1] in STATE_ROLES):
                self._owners[optimizer].add(path[1:-1])
        self.states = {name: key for name in self._inside if (key := self._state_key(name)) is not None}
        # Every parameter with the shapes that tensors of its state have.
        self._trained: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        for name, key in self.states.items():
            self._trained[key.parameter].update({metadata.tensors[name].shape} if name in metadata.tensors else ())
        self.values: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        for name, key in self.states.items():
            self.values[key.optimizer, key.parameter][key.key] = name
        # A state dict of a model: nothing but tensors in one dict, extra states aside.
        alone = all(name in metadata.tensors or "_extra_state" in name for name in self._names)
        self._is_bare = alone and not self._inside and all(len(path) == 1 for path in metadata.paths.values())
        self.options = {
            name: StateKey(".".join(optimizer), ".".join(path[1:-1]), path[-1])
            for name, (optimizer, path) in self._inside.items()
            if path[0] == GROUPS and len(path) > 2
        }

    def _find_optimizers(self) -> None:
        """Split the name of every value inside an optimizer before ``state`` or ``param_groups``."""
        prefixes: set[Components] = set()
        for parts in self._names.values():
            if GROUPS in parts:
                prefixes.add(parts[: parts.index(GROUPS)])
            elif STATE in parts:
                at = parts.index(STATE)
                if parts[-1] in STATE_ROLES or set(parts[at + 1 : at + 2]) & _KEY_ROLES.keys():
                    prefixes.add(parts[:at])
        for name, parts in self._names.items():
            for at, part in enumerate(parts[:-1]):
                if part in (STATE, GROUPS) and parts[:at] in prefixes:
                    self._inside[name] = parts[:at], parts[at:]
                    break

    def _state_key(self, name: str) -> StateKey | None:
        """The place of a value in an optimizer's state; None for an option of a group, and for other values."""
        optimizer, (kind, *path) = self._inside[name]
        if kind != STATE:
            return None
        for end in range(len(path) - 1, 0, -1):
            if tuple(path[:end]) in self._owners[optimizer]:
                return StateKey(".".join(optimizer), ".".join(path[:end]), ".".join(path[end:]))
        if len(path) > 1 and path[0] in _KEY_ROLES:
            return StateKey(".".join(optimizer), ".".join(path[1:]), path[0])
        return None

    def is_inside(self, name: str) -> bool:
        """Whether a value is in an optimizer."""
        return name in self._inside

    def role(self, name: str) -> Role:
        """The role of a tensor."""
        key = self.states.get(name)
        if key is not None:
            return _KEY_ROLES.get(key.key) or self._other_role(key)
        if name in self._inside:
            return Role.OTHER
        path = self._metadata.paths.get(name)
        in_model = any(component in MODEL_KEYS for component in (path or self._names[name])[:-1])
        at_top = path is not None and len(path) == 1 and "." in name
        return Role.WEIGHT if in_model or at_top or self._is_trained(name) or self._is_bare else Role.OTHER

    def _is_trained(self, name: str) -> bool:
        """Whether an optimizer has state for it: under its name, or under the end of it and with its shape."""
        parts, stored = self._names[name], self._metadata.tensors.get(name)
        ends = (".".join(parts[at:]) for at in range(1, len(parts)))
        return name in self._trained or any(stored and stored.shape in self._trained.get(end, ()) for end in ends)

    def _other_role(self, key: StateKey) -> Role:
        """The role of a value in the state of an optimizer without a card."""
        stored = self._metadata.tensors
        values = self.values[key.optimizer, key.parameter].items()
        tensors = [value for value, name in values if name in stored and stored[name].shape]
        return state_roles(tensors).get(key.key, Role.OTHER)

    def group(self, key: StateKey, value: Callable[[str], Any]) -> Mapping[str, Any]:
        """The options of the group of a parameter; ``value`` reads one by name."""
        names = self.option_names(key, value)
        if not names:
            return {}
        if id(names) not in self._read:
            self._read[id(names)] = {option: value(name) for option, name in names.items() if option != PARAMETERS}
        return self._read[id(names)]

    def option_names(self, key: StateKey, value: Callable[[str], Any]) -> Mapping[str, str]:
        """The names of the options of the group of a parameter, by option; empty for a parameter of no group."""
        if self._groups is None:
            self._groups = self._read_groups(value)
        return self._groups.get((key.optimizer, key.parameter), {})

    def numbers(self, optimizer: str, value: Callable[[str], Any]) -> list[list[int]]:
        """The parameters of every group of an optimizer that numbers them; empty for one that names them."""
        own = (name for name, key in self.options.items() if (key.optimizer, key.key) == (optimizer, PARAMETERS))
        listed = [value(name) for name in own]
        if not all(isinstance(group, list) and all(type(number) is int for number in group) for group in listed):
            return []
        numbers = [number for group in listed for number in group]
        return listed if len(set(numbers)) == len(numbers) else []

    def _read_groups(self, value: Callable[[str], Any]) -> dict[tuple[str, str], Mapping[str, str]]:
        """The names of the options of its group, by optimizer and parameter."""
        options: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        for name, key in self.options.items():
            options[key.optimizer, key.parameter][key.key] = name
        groups: dict[tuple[str, str], Mapping[str, str]] = {}
        for (optimizer, owner), names in options.items():
            listed = value(names[PARAMETERS]) if PARAMETERS in names else None
            members = listed if isinstance(listed, list) else [owner]
            known = (str(member) for member in members if type(member) is str or is_count(member))
            groups.update({(optimizer, member): names for member in known})
        return groups
