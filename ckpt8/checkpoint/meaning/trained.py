"""What the optimizers of a source train: the optimizer, the group and the weight of every saved state.

The weight is in the same file, or in another one of the folder: see ``pairing``. What the optimizer keeps as its own
copy of the weight, a master in fp32, is the weight that it steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt8.checkpoint.meaning.dcp import slice_pairs
from ckpt8.checkpoint.meaning.deepspeed import Universal
from ckpt8.checkpoint.meaning.names import NamesFromWeights
from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_parameters
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.tree import Checkpoint, Labelled, TensorRef, read_settings

_RANK = re.compile(r"(rank|shard)[_-]?\d+(?:_\d+)*")
"""The part of a path that numbers the processes that saved one optimizer together."""

Members = Sequence[tuple[str, Checkpoint]]
"""Path and content of every member."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The step that a saved state belongs to.

    ``optimizer`` is the number of the optimizer in the source; files that ranks wrote of one optimizer share it.
    ``group`` is its parameter group, with numbers in place of tensors. The key of ``weight`` is that of its storage in
    the source; where it is None, ``unpaired`` says why.
    """

    optimizer: int
    group: Mapping[Any, Any]
    weight: TensorRef | None
    unpaired: str | None


class Pairs:
    """The parameters of the members of a source, paired with weights of the same file or of others in its folder.

    A source of one file has nothing beside it.
    """

    def __init__(self, members: Members, *, directory: bool) -> None:
        self._members = dict(members)
        self._names = NamesFromWeights(members) if directory else None

    def of_member(self, path: str) -> tuple[list[SavedParameter], Mapping[int, str]]:
        """The parameters of a member, and the path of each weight in another one, by its ``id``. Raises InputError."""
        beside = None if self._names is None else self._names.beside(path)
        parameters = saved_parameters(self._members[path].tree, beside, as_torch=True)
        return parameters, {} if beside is None else beside.files


def trained_states(
    members: Sequence[DirectoryMember], key_of: Callable[[str, int], str], *, directory: bool
) -> dict[str, Trained]:
    """What is known of every saved state, by the key of each of its storages. Raises InputError.

    ``key_of`` gives the key in the source of a storage in the member of a number.
    """
    contents = [(member.path, member.checkpoint) for member in members]
    pairs, states = Pairs(contents, directory=directory), dict[str, Trained]()
    numbers = {path: number for number, (path, _) in enumerate(contents)}
    optimizers: dict[object, int] = {}

    def number_of(optimizer: object) -> int:
        return optimizers.setdefault(optimizer, len(optimizers))

    for number, (path, checkpoint) in enumerate(contents):
        if isinstance(checkpoint.tree, Labelled):
            continue
        parameters, files = pairs.of_member(path)
        storages = {storage.key: storage for storage in checkpoint.storages} if parameters else {}
        groups: dict[int, Mapping[Any, Any]] = {}
        for saved in parameters:
            if id(saved.group) not in groups:
                groups[id(saved.group)] = read_settings(checkpoint, storages, saved.group)
            weight, home = saved.master, number
            if weight is None and (weight := saved.weight) is not None:
                home = numbers[files[id(weight)]] if id(weight) in files else number
            weight = weight and replace(weight, key=key_of(weight.key, home))
            optimizer = number_of((_RANK.sub("rank", path), saved.optimizer))
            trained = Trained(optimizer, groups[id(saved.group)], weight, None if weight else saved.unpaired)
            states.update((key_of(ref.key, number), trained) for ref in _tensors(saved.state))
    for pair in slice_pairs(members, key_of):
        states[pair.key] = Trained(number_of(pair.optimizer), pair.group, pair.weight, pair.unpaired)
    for root, weight, state in Universal(contents).weights():
        trained = Trained(number_of(root), state.group, weight, None if weight else "it has no fp32.pt")
        states.update((ref.key, trained) for ref in _tensors(state.state))
    return states


def _tensors(state: Mapping[Any, Any]) -> Iterator[TensorRef]:
    return (ref for ref in state.values() if isinstance(ref, TensorRef))
