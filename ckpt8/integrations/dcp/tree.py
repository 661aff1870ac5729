"""Builds the object for a rank's file: the slices of a distributed state dict as a model and an optimizer.

A state dict has flat names: ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.exp_avg``,
``optimizer.param_groups.0.lr``. The object nests the slices again and adds settings and steps, so that compression
recognises roles and update rules as in any other checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch

from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.readers.dcp.names import GROUPS, PARAMETERS, STATE
from ckpt8.checkpoint.tree import TensorRef, format_path, is_setting
from ckpt8.checkpoint.vocabulary import model_path
from ckpt8.core.tensors import DType
from ckpt8.optim.known_optimizers import SIDE_STATE, STATE_ROLES, TENSORS, WHOLE_SHAPE

_STATE = re.compile(r"(?:(?P<prefix>.*?)\.)?state\.(?P<owner>.+)\.(?P<key>[^.]+)", re.DOTALL)
_GROUP = re.compile(r"(?:(?P<prefix>.*?)\.)?param_groups\.(?P<owner>.+)\.(?P<key>[^.]+)", re.DOTALL)
WEIGHTS, OPTIMIZER, OTHER = "weights", "optimizer", "other"
"""Keys for values without one in their names: weights at the top level of a state dict, the state of an optimizer that
is the state dict itself, and everything else."""

Path = tuple[str, ...]
Shape = tuple[int, ...]

Box = tuple[Shape, Shape]
"""Offsets and sizes of a slice."""


@dataclass(frozen=True, slots=True)
class Slot:
    """A placeholder for the value of that number; ``fill_slots`` puts the value there."""

    number: int


class Naming:
    """Finds the place of a value in the object of a file. ``names`` are of all values, ``objects`` of non-tensors."""

    def __init__(self, names: Iterable[str], objects: Iterable[str] = ()) -> None:
        names = list(names)
        matches = [match for match in map(_STATE.fullmatch, names) if match and match["key"] in STATE_ROLES]
        self._prefixes = {match["prefix"] for match in matches}
        self._trained = {match["owner"] for match in matches}
        self._bare = not (matches or any(True for _ in objects) or any(model_path(name) for name in names))

    def state(self, name: str) -> tuple[str, str, str] | None:
        """Optimizer, parameter and key of a value that is part of an optimizer's state."""
        return self._match(_STATE, name)

    def setting(self, name: str) -> tuple[str, str, str] | None:
        """Optimizer, group or parameter, and key of a value that is a setting of an optimizer."""
        return self._match(_GROUP, name)

    def _match(self, pattern: re.Pattern[str], name: str) -> tuple[str, str, str] | None:
        match = pattern.fullmatch(name)
        if match is None or match["prefix"] not in self._prefixes:
            return None
        return match["prefix"] or OPTIMIZER, match["owner"], match["key"]

    def place(self, name: str) -> Path:
        """The path of a tensor. Joined by dots it is its name in the file, unless names collide or are too long."""
        state = self.state(name)
        if state is not None:
            optimizer, parameter, key = state
            return optimizer, STATE, parameter, key
        return model_path(name) or (WEIGHTS if self._bare or name in self._trained else OTHER, name)


def build(
    naming: Naming,
    items: Sequence[tuple[str, tuple[int, ...]]],
    known: Mapping[str, Any],
    shapes: Sequence[tuple[Shape, Shape]] = (),
) -> dict[str, Any]:
    """The object of a file with a Slot for each of ``items``: the name of a tensor, and the offset of a slice of it.

    ``known`` are the values that the state dict of this rank has, by name. They give the settings and steps of the
    optimizer, whichever rank stores them. ``shapes`` are those of an item and of its whole tensor. An average over rows
    or columns is with the moments of every slice that it belongs to.
    """
    tree: dict[str, Any] = {}
    states: dict[Path, list[tuple[Box, dict[str, Any]]]] = {}
    averages = []
    for number, ((name, offset), (shape, whole)) in enumerate(zip(items, shapes or repeat(((), ())), strict=False)):
        path = naming.place(name)
        slot = slot_of(path[-1]) if path[-3:-2] == (STATE,) else None
        if slot == "statistic":
            averages.append(number)
            continue
        own = _put(tree, path, offset, Slot(number))
        if slot == "moment1":
            states.setdefault(path[:-1], []).append(((offset, shape), own))
            if shape != whole:
                own[WHOLE_SHAPE] = [*whole]
    for number in averages:
        name, offset = items[number]
        path, box = naming.place(name), (offset, shapes[number][0] if shapes else ())
        homes = [own for place, own in states.get(path[:-1], ()) if average_of(path[-1], place) == box]
        for own in homes:
            own[path[-1]] = Slot(number)
        if not homes:
            _put(tree, path, offset, Slot(number))
    _add_settings(tree, naming, known)
    return tree


def slot_of(key: str) -> str | None:
    """The slot of a key of an optimizer's state; None for an unknown one."""
    return TENSORS[key].slot if key in TENSORS else None


def average_of(key: str, box: Box) -> Box | None:
    """The slice of the average ``key`` that belongs to a slice of a parameter; None where its shape is unknown."""
    offsets, sizes = box
    if len(offsets) != len(sizes):
        return None
    ends = TENSORS[key].shape(tuple(offset + size for offset, size in zip(offsets, sizes, strict=True)))
    sizes = TENSORS[key].shape(tuple(sizes))
    return tuple(end - size for end, size in zip(ends, sizes, strict=True)), sizes


def _put(tree: dict[str, Any], path: Path, offset: tuple[int, ...], slot: Slot) -> dict[str, Any]:
    """Put a slot at ``path``, or next to it for a further slice of the same tensor. Returns the node that holds it."""
    at = "x".join(map(str, offset))
    sliced = (*path[:-2], f"{path[-2]}@{at}", path[-1]) if STATE in path[-3:-2] else (*path[:-1], f"{path[-1]}@{at}")
    for candidate in (path, sliced, (OTHER, f"{slot.number}:{format_path(path)}")):
        node: Any = tree
        for component in candidate[:-1]:
            node = node.setdefault(component, {}) if isinstance(node, dict) else None
        if isinstance(node, dict) and candidate[-1] not in node:
            node[candidate[-1]] = slot
            return node
    raise AssertionError("the last candidate holds the number of the slot")


def _add_settings(tree: dict[str, Any], naming: Naming, known: Mapping[str, Any]) -> None:
    """Complete the optimizers in ``tree``: groups that name its parameters, and scalars that another rank stores."""
    states: dict[tuple[str, str], dict[str, Any]] = {}
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for name, value in known.items():
        state, setting = naming.state(name), naming.setting(name)
        if state is not None:
            states.setdefault(state[:2], {})[state[2]] = value
        elif setting is not None:
            settings.setdefault(setting[0], {}).setdefault(setting[1], {})[setting[2]] = value
    for optimizer, node in tree.items():
        if not isinstance(node, dict) or not isinstance(node.get(STATE), dict):
            continue
        whole = []
        for name, own in node[STATE].items():
            complete = states.get((optimizer, _base(name)), {})
            for key in complete.keys() & SIDE_STATE - own.keys():
                own[key] = _plain(complete[key])
            if complete.keys() <= own.keys():
                whole.append(name)
        node[GROUPS] = _groups(whole, settings.get(optimizer, {}))


def _base(parameter: str) -> str:
    """The name of a parameter without the place of its slice, as ``_put`` gives it."""
    return re.sub(r"@[\dx]*$", "", parameter)


def _groups(parameters: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of ``parameters``, which have their whole state here. The step of any other is unknown."""
    groups = []
    for owner, values in settings.items():
        listed = values.get(PARAMETERS)
        names = {str(parameter) for parameter in listed} if isinstance(listed, list) else {owner}
        here = [name for name in parameters if _base(name) in names]
        if here:
            plain = {key: _plain(value) for key, value in values.items() if key != PARAMETERS}
            groups.append({PARAMETERS: here, **{key: value for key, value in plain.items() if is_setting(value)}})
    return groups


def _plain(value: Any) -> Any:
    """The number in a tensor of one element; None for another tensor, other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.item() if type(value) is torch.Tensor and value.numel() == 1 else None
    return value


def fill_slots(node: Any, value: Callable[[int], Any]) -> Any:
    """A copy of ``node`` with ``value(number)`` in every slot."""
    if isinstance(node, Slot):
        return value(node.number)
    return {key: fill_slots(child, value) for key, child in node.items()} if isinstance(node, dict) else node


def tensor_names(tree: dict[str, Any]) -> dict[int, str]:
    """The names that a container gives the tensors of ``tree``, by number."""
    shape = fill_slots(tree, lambda number: TensorRef(str(number), DType.UINT8, 0, (), ()))
    return {int(tensor.ref.key): tensor.name for tensor in classify(shape).tensors}
