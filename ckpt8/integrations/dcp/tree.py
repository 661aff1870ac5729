"""What the values of a distributed state dict are for, read from their names, and the object that a rank's file holds.

A state dict has flat names: ``model.layers.0.weight``, ``optimizer.state.layers.0.weight.exp_avg``,
``optimizer.param_groups.0.lr``. A rank writes its slices as what they are slices of: a model, and an optimizer with
the settings and steps of its parameters, so that roles and update rules are recognised as in any other checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import MODEL_KEYS
from ckpt8.checkpoint.walk import format_path
from ckpt8.core.tensors import DType
from ckpt8.optim.known_optimizers import STATE_ROLES

_STATE = re.compile(r"(?:(?P<prefix>.*?)\.)?state\.(?P<parameter>.+)\.(?P<key>[^.]+)", re.DOTALL)
_GROUP = re.compile(r"(?:(?P<prefix>.*?)\.)?param_groups\.(?P<owner>.+)\.(?P<key>[^.]+)", re.DOTALL)
_SETTINGS = (bool, int, float, str, type(None))
WEIGHTS, OPTIMIZER, OTHER = "weights", "optimizer", "other"
"""Where values are put whose name does not say it: weights at the top level of a state dict, a state dict that is an
optimizer's, and everything else."""

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of the value of that number."""

    number: int


class Naming:
    """Where values are put in the object of a file, by the names of all values. ``objects`` are no tensors."""

    def __init__(self, names: Iterable[str], objects: Iterable[str] = ()) -> None:
        names = list(names)
        found = [match for match in map(_STATE.fullmatch, names) if match and match["key"] in STATE_ROLES]
        self._prefixes = {match["prefix"] for match in found}
        self._trained = {match["parameter"] for match in found}
        has_model = any(self._model_key(name) is not None for name in names)
        self._bare = not found and not has_model and not any(True for _ in objects)

    @staticmethod
    def _model_key(name: str) -> int | None:
        parts = name.split(".")[:-1]
        return next((k for k, part in enumerate(parts) if part in MODEL_KEYS), None)

    def state(self, name: str) -> tuple[str, str, str] | None:
        """Optimizer, parameter and key of a value that is part of an optimizer's state."""
        match = _STATE.fullmatch(name)
        if match is None or match["prefix"] not in self._prefixes:
            return None
        return match["prefix"] or OPTIMIZER, match["parameter"], match["key"]

    def setting(self, name: str) -> tuple[str, str, str] | None:
        """Optimizer, group or parameter, and key of a value that is a setting of an optimizer."""
        match = _GROUP.fullmatch(name)
        if match is None or match["prefix"] not in self._prefixes:
            return None
        return match["prefix"] or OPTIMIZER, match["owner"], match["key"]

    def place(self, name: str) -> Path:
        """The path of a tensor."""
        state = self.state(name)
        if state is not None:
            optimizer, parameter, key = state
            return optimizer, "state", parameter, key
        at = self._model_key(name)
        if at is not None:
            parts = name.split(".")
            return (*parts[: at + 1], ".".join(parts[at + 1 :]))
        return (WEIGHTS if self._bare or name in self._trained else OTHER), name

    def text(self, name: str) -> str:
        """The name that a tensor gets in its file, but for a few that collide or are too long."""
        return format_path(self.place(name))


def build(naming: Naming, items: Sequence[tuple[str, tuple[int, ...]]], known: Mapping[str, Any]) -> dict[str, Any]:
    """The object of a file with a Slot for each of ``items``: name, and offset in the tensor that it is a slice of.

    ``known`` are the values of the state dict by name, as far as this rank has them: settings and steps of the
    optimizer are taken from there, wherever they are stored.
    """
    tree: dict[str, Any] = {}
    for number, (name, offset) in enumerate(items):
        _put(tree, naming.place(name), offset, Slot(number))
    _add_settings(tree, naming, known)
    return tree


def _put(tree: dict[str, Any], path: Path, offset: tuple[int, ...], slot: Slot) -> None:
    """Put a slot at ``path``, and a further slice of the same tensor beside it."""
    at = "x".join(map(str, offset))
    beside = (*path[:-2], f"{path[-2]}@{at}", path[-1]) if "state" in path[-3:-2] else (*path[:-1], f"{path[-1]}@{at}")
    for candidate in (path, beside, (OTHER, f"{slot.number}:{format_path(path)}")):
        node: Any = tree
        for component in candidate[:-1]:
            node = node.setdefault(component, {}) if isinstance(node, dict) else None
        if isinstance(node, dict) and candidate[-1] not in node:
            node[candidate[-1]] = slot
            return
    raise AssertionError("the last candidate holds the number of the slot")


def _add_settings(tree: dict[str, Any], naming: Naming, known: Mapping[str, Any]) -> None:
    """Complete the optimizers in ``tree``: groups that name its parameters, and steps that another rank stores."""
    states: dict[tuple[str, str], dict[str, Any]] = {}
    settings: dict[str, dict[str, dict[str, Any]]] = {}
    for name, value in known.items():
        state, setting = naming.state(name), naming.setting(name)
        if state is not None:
            states.setdefault(state[:2], {})[state[2]] = value
        elif setting is not None:
            settings.setdefault(setting[0], {}).setdefault(setting[1], {})[setting[2]] = value
    for optimizer, node in tree.items():
        if not isinstance(node, dict) or not isinstance(node.get("state"), dict):
            continue
        whole = []
        for name, own in node["state"].items():
            everywhere = states.get((optimizer, _base(name)), {})
            if "step" in everywhere:
                own.setdefault("step", _number(everywhere["step"]))
            if everywhere.keys() <= own.keys():
                whole.append(name)
        node["param_groups"] = _groups(whole, settings.get(optimizer, {}))


def _base(parameter: str) -> str:
    """The name of a parameter without the place of its slice, as ``_put`` gives it."""
    return re.sub(r"@[\dx]*$", "", parameter)


def _groups(parameters: Sequence[str], settings: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Groups of ``parameters``, all of whose state is here: of any other the step could not be told."""
    groups = []
    for owner, values in settings.items():
        listed = values.get("params")
        names = {str(each) for each in listed} if isinstance(listed, list) else {owner}
        here = [name for name in parameters if _base(name) in names]
        if here:
            plain = {key: value for key, value in values.items() if key != "params" and _is_plain(value)}
            groups.append({"params": here, **plain})
    return groups


def _is_plain(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return all(isinstance(each, _SETTINGS) for each in value)
    return isinstance(value, _SETTINGS)


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        return float(value.item()) if type(value) is torch.Tensor and value.numel() == 1 else None
    return value if isinstance(value, (int, float)) else None


def filled(node: Any, value: Callable[[int], Any]) -> Any:
    """A copy of ``node`` with ``value(number)`` in every slot."""
    if isinstance(node, Slot):
        return value(node.number)
    return {key: filled(child, value) for key, child in node.items()} if isinstance(node, dict) else node


def tensor_names(tree: dict[str, Any]) -> dict[int, str]:
    """The names that a container gives the tensors of ``tree``, by number."""
    shape = filled(tree, lambda number: TensorRef(str(number), DType.UINT8, 0, (), ()))
    return {int(tensor.ref.key): tensor.name for tensor in classify(shape).tensors}
