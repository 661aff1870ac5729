"""DeepSpeed's universal checkpoints: one file for each tensor, whose name says what it is for.

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt     the tensor, alone or as ``param`` of a dictionary
    zero/<parameter>/step.pt                                not from stage 3, which has it in optimizer_state.pt
    zero/optimizer_state.pt                                 ``param_groups``, and what is left of the optimizer

The moments of a parameter are so in two members, and what makes a step of them in others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt8.plan import Parameter, Plan, Unit
from ckpt8.readers.base import TensorRef
from ckpt8.readers.scalars import read_scalar
from ckpt8.tensors import Role
from ckpt8.update_space import UpdateRule, recognise

if TYPE_CHECKING:
    from ckpt8.bundle import Member

_ROLES = {"fp32.pt": Role.WEIGHT, "exp_avg.pt": Role.MOMENT1, "exp_avg_sq.pt": Role.MOMENT2}
_MOMENTS = {"exp_avg": "moment1", "exp_avg_sq": "moment2"}
_REST = "optimizer_state.pt"


class Universal:
    """The universal checkpoints among the members of a directory."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = {member.path: member for member in members}
        self._roots = {
            folder
            for folder, _, name in (path.rpartition("/") for path in self._members)
            if name == _REST and folder.rpartition("/")[2] == "zero"
        }

    def role(self, path: str) -> Role | None:
        """What the one tensor of a member is for, if its path tells."""
        folder, _, name = path.rpartition("/")
        return _ROLES.get(name) if folder.rpartition("/")[0] in self._roots else None

    def join_moments(self, plan: Plan) -> None:
        """Make one unit of the moments of every parameter."""
        units = {unit.streams[0].index: unit for unit in plan.units if len(unit.streams) == 1}
        joined: list[Unit] = []
        index_of = {tensor.ref: index for tensor, index in plan.tensors}
        for folder in self._parameters():
            refs = {key: self._tensor(f"{folder}/{key}.pt") for key in _MOMENTS}
            moments = {_MOMENTS[key]: index_of[ref] for key, ref in refs.items() if ref in index_of}
            parts = [units[index] for index in sorted(moments.values()) if index in units]
            whole = [ref for ref in refs.values() if ref is not None and ref.is_contiguous and not ref.offset]
            if len(parts) == len(whole) == len(_MOMENTS) and len({ref.shape for ref in whole}) == 1:
                streams = tuple(unit.streams[0] for unit in parts)
                if all(stream.spec.numel == prod(whole[0].shape) for stream in streams):
                    joined.append(Unit(streams, self._parameter(folder, moments, refs, whole[0].shape)))
        taken = {stream.index for unit in joined for stream in unit.streams}
        joined += [unit for unit in plan.units if unit.streams[0].index not in taken]
        plan.units = sorted(joined, key=lambda unit: unit.streams[0].storage.offset)

    def _parameters(self) -> Iterator[str]:
        for path in self._members:
            folder, _, name = path.rpartition("/")
            if name == "exp_avg.pt" and self.role(path):
                yield folder

    def _tensor(self, path: str) -> TensorRef | None:
        """The one tensor of a member."""
        tree = self._tree(path)
        found = tree.get("param") if isinstance(tree, dict) else tree
        return found if isinstance(found, TensorRef) else None

    def _tree(self, path: str) -> Any:
        return self._members[path].checkpoint.tree if path in self._members else None

    def _parameter(
        self, folder: str, moments: Mapping[str, int], refs: Mapping[str, Any], shape: tuple[int, ...]
    ) -> Parameter:
        root, _, name = folder.rpartition("/")
        rest = self._tree(f"{root}/{_REST}")
        groups = rest.get("param_groups") if isinstance(rest, dict) else None
        step = self._step(folder, root)
        rules = {recognise(refs, group, step) for group in groups or () if isinstance(group, dict)}
        rule = rules.pop() if len(rules) == 1 else "its parameter group is not known"
        if isinstance(rule, UpdateRule):
            return Parameter(f"{root}:{name}", moments, rule, None, shape)
        return Parameter(f"{root}:{name}", moments, None, rule, shape)

    def _step(self, folder: str, root: str) -> float | None:
        """The step of a parameter; from stage 3 that of the whole optimizer."""
        own = f"{folder}/step.pt"
        if own in self._members:
            return self._number(own, self._tree(own))
        rest = self._tree(f"{root}/{_REST}")
        optimizer = rest.get("optimizer_state_dict") if isinstance(rest, dict) else None
        states = optimizer.get("state") if isinstance(optimizer, dict) else None
        states = states.values() if isinstance(states, dict) else ()
        steps = {self._number(f"{root}/{_REST}", state.get("step")) for state in states if isinstance(state, dict)}
        return steps.pop() if len(steps) == 1 else None

    def _number(self, path: str, value: Any) -> float | None:
        if isinstance(value, TensorRef):
            checkpoint = self._members[path].checkpoint
            storage = next(each for each in checkpoint.storages if each.key == value.key)
            return read_scalar(checkpoint, storage, value)
        return value if isinstance(value, (int, float)) else None
