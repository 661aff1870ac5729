"""DeepSpeed's universal checkpoints: one file for each tensor, whose name says what it is for.

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt     the tensor, alone or as ``param`` of a dictionary
    zero/<parameter>/step.pt                                not from stage 3, which has it in optimizer_state.pt
    zero/optimizer_state.pt                                 ``param_groups``, and the rest of the optimizer

The moments of a parameter are so in two members, and what makes a step of them in others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ckpt8.checkpoint.meaning.roles import ParameterState, short_name
from ckpt8.checkpoint.meaning.update_rules import recognise
from ckpt8.checkpoint.scalars import read_scalar
from ckpt8.checkpoint.tree import Checkpoint, TensorRef
from ckpt8.core.tensors import Role

_ROLES = {"fp32.pt": Role.WEIGHT, "exp_avg.pt": Role.MOMENT1, "exp_avg_sq.pt": Role.MOMENT2}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_REST = "optimizer_state.pt"


class Member(Protocol):
    """An open file of a directory."""

    @property
    def path(self) -> str:
        """Its path there."""

    @property
    def checkpoint(self) -> Checkpoint:
        """What it holds."""


class Universal:
    """The universal checkpoints among the members of a directory."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = {member.path: (number, member) for number, member in enumerate(members)}
        self._roots = {
            folder
            for folder, _, name in (path.rpartition("/") for path in self._members)
            if name == _REST and folder.rpartition("/")[2] == "zero"
        }

    def role(self, path: str) -> Role | None:
        """What the one tensor of a member is for, if its path tells."""
        folder, _, name = path.rpartition("/")
        return _ROLES.get(name) if folder.rpartition("/")[0] in self._roots else None

    def owner(self, path: str) -> str | None:
        """The name of the parameter that the tensor of a member is, or is a state of."""
        return path.split("/")[-2] if self.role(path) else None

    def parameters(self) -> list[ParameterState]:
        """The state of every parameter; its tensors have the keys of their storages in the bundle."""
        return [
            self._parameter(folder)
            for folder, _, name in (path.rpartition("/") for path in self._members)
            if name == "exp_avg.pt" and self.role(f"{folder}/{name}")
        ]

    def _parameter(self, folder: str) -> ParameterState:
        root, _, name = folder.rpartition("/")
        found = {key: self._tensor(f"{folder}/{key}.pt") for key in _MOMENTS}
        state: dict[str, Any] = {key: ref for key, ref in found.items() if ref is not None}
        step = self._step(folder, root)
        return ParameterState(short_name(f"{root}:{name}"), {**state, "step": step}, self._group(root, state, step))

    def _tensor(self, path: str) -> TensorRef | None:
        """The one tensor of a member."""
        found = param_of(self._tree(path))
        return replace(found, key=f"{self._members[path][0]}/{found.key}") if isinstance(found, TensorRef) else None

    def _tree(self, path: str) -> Any:
        return self._members[path][1].checkpoint.tree if path in self._members else None

    def _group(self, root: str, state: Mapping[str, Any], step: float | None) -> Mapping[Any, Any]:
        """The settings of a parameter; which group it was in is not told, and must not matter."""
        groups = groups_of(self._tree(f"{root}/{_REST}"))
        return groups[0] if len({recognise(state, group, step) for group in groups}) == 1 else {}

    def _step(self, folder: str, root: str) -> float | None:
        """The step of a parameter; from stage 3 that of the whole optimizer."""
        own = f"{folder}/step.pt"
        if own in self._members:
            return _number(self._members[own][1].checkpoint, self._tree(own))
        step = common_step(self._members[f"{root}/{_REST}"][1].checkpoint)
        return None if step is None else step[1]


def param_of(tree: Any) -> Any:
    """What the tree of a member holds of its parameter: the tree itself, or its ``param``."""
    return tree.get("param") if isinstance(tree, dict) else tree


def groups_of(tree: Any) -> list[dict[Any, Any]]:
    """The groups in the tree of optimizer_state.pt."""
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def common_step(checkpoint: Checkpoint) -> tuple[Any, float] | None:
    """The step of all parameters in optimizer_state.pt, as saved and as a number; None where there is not just one."""
    match checkpoint.tree:
        case {"optimizer_state_dict": {"state": dict(states)}}:
            steps = [state["step"] for state in states.values() if isinstance(state, dict) and "step" in state]
            match list({_number(checkpoint, step) for step in steps}):
                case [float() | int() as number]:
                    return steps[0], number
    return None


def _number(checkpoint: Checkpoint, value: Any) -> float | None:
    if isinstance(value, TensorRef):
        storage = next(each for each in checkpoint.storages if each.key == value.key)
        return read_scalar(checkpoint, storage, value)
    return value if isinstance(value, (int, float)) else None
