"""DeepSpeed's layouts: universal checkpoints, and the flat partitions of stages 1 and 2.

A universal checkpoint has one file for each tensor, whose name states the role:

    zero/<parameter>/fp32.pt, exp_avg.pt, exp_avg_sq.pt     the tensor, alone or as ``param`` of a dictionary
    zero/<parameter>/step.pt                                the step; stage 3 has it in optimizer_state.pt
    zero/optimizer_state.pt                                 ``param_groups``, and the rest of the optimizer

So the moments of a parameter are in two members, and the step and the options in others. Flat partitions keep the fp32
masters of the parameters of a model file in pieces:

    mp_rank_00_model_states.pt                        module: {name: tensor}
    zero_pp_rank_1_mp_rank_00_optim_states.pt         optimizer_state_dict: {
        single_partition_of_fp32_groups: [flat],      one for each parameter group, the share of one rank
        param_slice_mappings: [{name: {start, numel}}]}
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckpt8.checkpoint.meaning.roles import ParameterState, short_name
from ckpt8.checkpoint.meaning.update_rules import recognise
from ckpt8.checkpoint.tree import Checkpoint, Inert, TensorRef, read_scalar
from ckpt8.core.tensors import Role
from ckpt8.optim.known_optimizers import setting_names

_ROLES = {"fp32.pt": Role.WEIGHT, "exp_avg.pt": Role.MOMENT1, "exp_avg_sq.pt": Role.MOMENT2}
_MOMENTS = ("exp_avg", "exp_avg_sq")
_REST = "optimizer_state.pt"


class Universal:
    """The universal checkpoints among the members of a directory, given by path and content."""

    def __init__(self, members: Iterable[tuple[str, Checkpoint]]) -> None:
        self._members = {path: (number, checkpoint) for number, (path, checkpoint) in enumerate(members)}
        self._roots = {
            folder
            for folder, _, name in (path.rpartition("/") for path in self._members)
            if name == _REST and folder.rpartition("/")[2] == "zero"
        }

    def role(self, path: str) -> Role | None:
        """The role of the one tensor of a member; None where the path does not tell."""
        folder, _, name = path.rpartition("/")
        return _ROLES.get(name) if folder.rpartition("/")[0] in self._roots else None

    def owner(self, path: str) -> str | None:
        """The parameter that the tensor of a member belongs to; None for another member."""
        return path.split("/")[-2] if self.role(path) else None

    def parameters(self) -> list[ParameterState]:
        """The state of every parameter, with tensors whose keys are those of the bundle."""
        return [self._parameter(folder) for folder in self._folders()]

    def weights(self) -> Iterator[tuple[str, TensorRef | None, ParameterState]]:
        """The folder, the fp32 weight and the state of every parameter, with keys of the bundle.

        The groups have no learning rate where it is not the same in all.
        """
        for folder in self._folders():
            root, state = folder.rpartition("/")[0], self._parameter(folder)
            groups = groups_of(self._tree(f"{root}/{_REST}"))
            if len({(repr(group.get("lr")), repr(group.get("initial_lr"))) for group in groups}) > 1:
                state = replace(state, group={key: value for key, value in state.group.items() if key != "lr"})
            yield root, self._tensor(f"{folder}/fp32.pt"), state

    def _folders(self) -> Iterator[str]:
        """The folders of parameters."""
        for folder, _, name in (path.rpartition("/") for path in self._members):
            if name == "exp_avg.pt" and self.role(f"{folder}/{name}"):
                yield folder

    def _parameter(self, folder: str) -> ParameterState:
        root, _, name = folder.rpartition("/")
        moments = {key: self._tensor(f"{folder}/{key}.pt") for key in _MOMENTS}
        state: dict[str, Any] = {key: ref for key, ref in moments.items() if ref is not None}
        step = self._step(folder, root)
        groups, names = groups_of(self._tree(f"{root}/{_REST}")), sorted(setting_names())
        # The files do not say which group has the parameter. That does not matter if all have one rule.
        rules = {(recognise(state, group, step), *(repr(group.get(name)) for name in names)) for group in groups}
        group = groups[0] if len(rules) == 1 else {}
        return ParameterState(short_name(f"{root}:{name}"), {**state, "step": step}, group)

    def _tensor(self, path: str) -> TensorRef | None:
        """The one tensor of a member; None where there is none."""
        tensor = param_of(self._tree(path))
        return replace(tensor, key=f"{self._members[path][0]}/{tensor.key}") if isinstance(tensor, TensorRef) else None

    def _tree(self, path: str) -> Any:
        return self._members[path][1].tree if path in self._members else None

    def _step(self, folder: str, root: str) -> float | None:
        """The step of a parameter; in stage 3 that of the whole optimizer."""
        own = f"{folder}/step.pt"
        if own in self._members:
            return _number(self._members[own][1], self._tree(own))
        common = common_step(self._members[f"{root}/{_REST}"][1])
        return None if common is None else common[1]


def param_of(tree: Any) -> Any:
    """The tensor in the tree of a member: the tree itself, or its ``param``."""
    return tree.get("param") if isinstance(tree, dict) else tree


def groups_of(tree: Any) -> list[dict[Any, Any]]:
    """The groups in the tree of optimizer_state.pt."""
    groups = tree.get("param_groups") if isinstance(tree, dict) else None
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []


def common_step(checkpoint: Checkpoint) -> tuple[Any, float] | None:
    """The one step of all parameters in optimizer_state.pt, as saved and as a number; None where steps differ."""
    match checkpoint.tree:
        case {"optimizer_state_dict": {"state": dict(states)}}:
            steps = [state["step"] for state in states.values() if isinstance(state, dict) and "step" in state]
            match list({_number(checkpoint, step) for step in steps}):
                case [float() | int() as number]:
                    return steps[0], number
    return None


def _number(checkpoint: Checkpoint, value: Any) -> float | None:
    if isinstance(value, TensorRef):
        storage = next(storage for storage in checkpoint.storages if storage.key == value.key)
        return read_scalar(checkpoint, storage, value)
    return value if isinstance(value, (int, float)) else None


Piece = tuple[TensorRef, int, int]
"""``count`` elements of a flat master from ``start`` on: master, start, count."""

Partitions = Mapping[TensorRef, list[Piece]]
"""The pieces of a parameter of a model file, in order."""

_MODEL_FILE = re.compile(r"(?:.*/)?mp_rank_([\d_]+)_model_states\.pt")
_SHARE_FILE = re.compile(r"(?:.*/)?(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_([\d_]+)_optim_states\.pt")


def find_partitions(members: Iterable[tuple[str, Any]]) -> Partitions:
    """The pieces of all parameters whose numbers of elements agree. ``members`` are path and tree."""
    models: dict[tuple[str, str], Mapping[Any, Any]] = {}
    shares: dict[tuple[str, str], list[tuple[int, Mapping[Any, Any]]]] = defaultdict(list)
    for path, tree in members:
        folder, entries = path.rpartition("/")[0], tree if isinstance(tree, dict) else {}
        module, state = entries.get("module"), entries.get("optimizer_state_dict")
        if (match := _MODEL_FILE.fullmatch(path)) and isinstance(module, dict):
            models[folder, match[1]] = module
        elif (match := _SHARE_FILE.fullmatch(path)) and isinstance(state, dict):
            shares[folder, match[2]].append((int(match[1]), state))
    partitions: dict[TensorRef, list[Piece]] = {}
    for place, module in models.items():
        pieces: dict[str, list[Piece]] = defaultdict(list)
        for _, state in sorted(shares[place], key=lambda share: share[0]):
            for name, piece in _pieces(state):
                pieces[name].append(piece)
        partitions.update(
            (ref, pieces[name])
            for name, ref in module.items()
            if isinstance(ref, TensorRef) and sum(count for _, _, count in pieces.get(name, [])) == ref.numel
        )
    return partitions


def _pieces(state: Mapping[Any, Any]) -> Iterator[tuple[str, Piece]]:
    """The names and pieces of one rank, group by group."""
    flats, mappings = state.get("single_partition_of_fp32_groups"), state.get("param_slice_mappings")
    if not isinstance(flats, list) or not isinstance(mappings, list):
        return
    for flat, mapping in zip(flats, mappings, strict=False):
        if not isinstance(flat, TensorRef) or not isinstance(mapping, dict):
            continue
        for name, address in mapping.items():
            match address:
                case Inert(state={"start": int(start), "numel": int(count)}) if start >= 0 and count > 0:
                    yield name, (flat, start, count)
