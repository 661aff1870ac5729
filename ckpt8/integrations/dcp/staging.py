"""The copy of a state dict that ``dcp.async_save`` makes while training waits; its memory stays for the next one."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import closing
from functools import partial
from typing import Any, cast

import torch
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor, ShardedTensorBase
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.tensor import DTensor

from ckpt8.checkpoint.sources.snapshot import Copies, Taken, Walk


def _with_shard(whole: ShardedTensor, metadata: ShardMetadata, shard: torch.Tensor) -> ShardedTensorBase:
    """``whole`` with another tensor for its one local shard."""
    return ShardedTensorBase._init_from_local_shards_and_global_metadata(
        [Shard(shard, metadata)], whole.metadata(), whole.sharding_spec()
    )


class _Staging(Walk):
    """Takes slices of DTensors and shards of FSDP1. torch copies objects of other classes, until ``stager`` closes."""

    def __init__(self, copies: list[torch.UntypedStorage], stager: DefaultStager) -> None:
        super().__init__(copies)
        self._stager = stager

    def other(self, node: Any) -> Any:
        if type(node) is DTensor and type(node._local_tensor) is torch.Tensor and vars(node).keys() <= {"_is_param"}:
            taken = self.taken(node._local_tensor)
            if taken is not None:
                taken.wrap = partial(DTensor, spec=node._spec, requires_grad=False)
                return taken
        if type(node) is ShardedTensor and len(shards := node.local_shards()) <= 1:
            if not shards:
                return node
            taken = self.taken(shards[0].tensor.detach())
            if taken is not None:
                taken.wrap = partial(_with_shard, node, shards[0].metadata)
                return taken
        if type(node) is torch.Tensor and not node.is_meta:
            # torch's stager would lose that it is a conjugate, and fails for a sparse one.
            return node.resolve_conj().resolve_neg().clone().cpu()
        return cast("dict[str, Any]", self._stager.stage({"": node}))[""]


class Staged:
    """A copy of a state dict whose tensors are on the CPU. Raises MemoryError."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._copies: list[torch.UntypedStorage] = []
        with closing(DefaultStager(StagingOptions(False, False, False, False))) as stager, torch.no_grad():
            walk = _Staging(self._copies, stager)
            self._copy = walk.copy(state)
        self._taken = Copies(walk.storages)

    def state(self) -> dict[str, Any]:
        """The state dict, once: only its tensors hold the memory then."""
        self._copies += self._taken.storages()
        state = cast("dict[str, Any]", _with_tensors(self._copy, {}))
        del self._copy, self._taken, self._copies
        return state


def _with_tensors(node: Any, made: dict[int, Any]) -> Any:
    """``node`` with tensors for what was taken of them; its dicts and lists are changed in place."""
    kind = type(node)
    if id(node) in made:
        return made[id(node)]
    if kind is Taken:
        made[id(node)] = node.tensor()
    elif kind is tuple:
        return tuple(_with_tensors(child, made) for child in node)
    elif kind in (dict, OrderedDict, list):
        made[id(node)] = node
        for key, child in enumerate(node) if kind is list else node.items():
            if not isinstance(child, (int, float, str)):
                node[key] = _with_tensors(child, made)
    return made.get(id(node), node)
