"""What a node of a checkpoint's tree is by its form: the state dict of an optimizer, or of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from ckpt8.checkpoint.meaning.flat_states import flat_states
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.walk import Components

_EXTRA_STATE = "_extra_state"


@dataclass(slots=True)
class Inside:
    """The container that a walk over a tree entered last: everything in it follows it at once."""

    path: Components | None = None

    def enter(self, path: Components) -> None:
        """The walk is at the container at ``path``."""
        self.path = path

    def holds(self, path: Components) -> bool:
        """Whether ``path`` leads into the container."""
        return self.path is not None and len(path) > len(self.path) and path[: len(self.path)] == self.path


def is_optimizer(node: object) -> bool:
    """Whether a node has the shape of an optimizer's state dict."""
    return isinstance(node, dict) and isinstance(node.get("state"), dict) and isinstance(node.get("param_groups"), list)


def is_bare_state_dict(tree: object) -> bool:
    """Whether the tree itself is the state dict of a model: names to tensors, extra states aside."""
    return holds_tensors_alone(tree) and not is_flat_optimizer(tree)


def is_flat_optimizer(tree: object) -> bool:
    """Whether the tree is an optimizer's state with paths for keys: ``state.0.exp_avg``, as in safetensors files."""
    return holds_tensors_alone(tree) and bool(flat_states(tree))


def holds_tensors_alone(tree: object) -> TypeGuard[dict[str, TensorRef]]:
    """Whether the tree is a dict of names to tensors, extra states aside."""
    if not isinstance(tree, dict):
        return False
    holds_any = False
    for key, value in tree.items():
        if not isinstance(key, str):
            return False
        if not key.endswith(_EXTRA_STATE):
            if not isinstance(value, TensorRef):
                return False
            holds_any = True
    return holds_any


def dict_groups(optimizer: Mapping[str, Any]) -> list[dict[Any, Any]]:
    """The parameter groups of an optimizer, without what a damaged file may hold in their place."""
    return [group for group in optimizer["param_groups"] if isinstance(group, dict)]


def parameter_groups(optimizer: Mapping[str, Any]) -> list[dict[Any, Any]]:
    """The groups of an optimizer, each with the keys of the state that belongs to no parameter.

    A wrapper such as TRAC keeps such state, and takes other steps than the optimizer in it.
    """
    groups = dict_groups(optimizer)
    if not any(isinstance(each, int) for each in optimizer["state"]):
        return groups
    listed = {
        identifier for group in groups for identifier, _ in listed_parameters(group) if isinstance(identifier, str)
    }
    own = dict.fromkeys(each for each in optimizer["state"] if isinstance(each, str) and each not in listed)
    return [{**group, **own} for group in groups] if own else groups


def listed_parameters(group: Mapping[Any, Any]) -> list[tuple[Any, str | None]]:
    """The identifiers that a parameter group lists, each with its name, None where the group does not state one."""
    identifiers, names = group.get("params"), group.get("param_names")
    if not isinstance(identifiers, list):
        return []
    if isinstance(names, list) and len(names) == len(identifiers):
        return list(zip(identifiers, map(str, names), strict=True))
    return [(each, each if isinstance(each, str) else None) for each in identifiers]
