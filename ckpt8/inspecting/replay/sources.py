"""One side of a replay: the parameters of a file, and the weights that other files of its directory hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ckpt8.checkpoint.meaning.pairing import SavedParameter
from ckpt8.checkpoint.meaning.replay_settings import find_rule
from ckpt8.checkpoint.meaning.replayed import Replayed
from ckpt8.checkpoint.meaning.trained import Pairs
from ckpt8.checkpoint.scalars import read_settings
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.values import Streamer
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef
from ckpt8.core.errors import InputError
from ckpt8.optim.known_optimizers import SIDE_STATE


@dataclass(frozen=True, slots=True)
class Replayable:
    """One file with its parameters. ``homes`` are the files of the weights that others hold, by the ``id`` of each."""

    checkpoint: Checkpoint
    parameters: list[SavedParameter]
    homes: Mapping[int, Checkpoint] = field(default_factory=dict)
    storages: Mapping[str, StorageInfo] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "storages", {each.key: each for each in self.checkpoint.storages})

    def load(self, ref: TensorRef) -> Tensor:
        """The values of a tensor as float32. Raises InputError."""
        values = torch.empty(ref.shape, dtype=ref.dtype.torch)
        Streamer(self.homes.get(id(ref), self.checkpoint)).copy(ref, values)
        return values.float()

    def rule(self, saved: SavedParameter) -> Replayed | str:
        """The rule of a parameter, or why it is unknown. Raises InputError."""
        own = {key: value for key, value in saved.state.items() if key in SIDE_STATE}
        group = read_settings(self.checkpoint, self.storages, saved.group)
        state = {**saved.state, **read_settings(self.checkpoint, self.storages, own)}
        rule = find_rule(state, group, state.get("step", group.get("step")))
        if isinstance(rule, Replayed) and rule.form.reach != "element" and any(map(_is_part, saved.state.values())):
            return "its step takes the whole tensor, and the file has a part of it"
        return rule


def _is_part(value: object) -> bool:
    return isinstance(value, TensorRef) and value.share is not None and value.share.whole != value.shape


class ReplaySource:
    """An open file, directory, or container of either."""

    def __init__(self, source: Bundle) -> None:
        self._source = source
        self._members = {each.path: each.checkpoint for each in source.found}
        self._pairs = Pairs(list(self._members.items()), directory=source.directory is not None)

    def of_member(self, path: str) -> Replayable:
        """What to replay of a member; of a single file, whatever its name. Raises InputError where it is missing."""
        if self._source.directory is None:
            path = self._source.found[0].path
        elif path not in self._members:
            raise InputError(f"{self._source.path / path}: no such file")
        parameters, files = self._pairs.of_member(path)
        homes = {ref: self._members[file] for ref, file in files.items()}
        return Replayable(self._members[path], parameters, homes)
