"""Refuses checkpoint files that hold the share of one rank, which mean nothing without the other ranks."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from ckpt8.checkpoint.tree import Global
from ckpt8.core.errors import UnsupportedError
from ckpt8.core.tensors import DType

_SHARDED_CLASS = re.compile(r"torch\.distributed\.(?:.*\.)?(?:DTensor|ShardedTensor)")
_SHARD_SUFFIX = ".distcp"
_COALESCED = "buckets_coalesced"


def is_named_shard(name: str) -> bool:
    """Whether a file has the name of a shard, which torch.distributed.checkpoint writes next to its ``.metadata``.

    Content cannot tell: a shard of one slice looks like a file of torch.save, one of several like a damaged file.
    """
    return name.endswith(_SHARD_SUFFIX)


def lone_shard(where: str) -> UnsupportedError:
    """The error for a shard that no ``.metadata`` lists."""
    return UnsupportedError(
        f"{where}: a file of a distributed checkpoint without the .metadata that tells what is in it; "
        "give the folder of the checkpoint"
    )


def refuse_shard(tree: Any, names: Collection[str], where: str) -> None:
    """Raise UnsupportedError, which names the layout, for the pickle of one rank. ``names`` are the globals in it."""
    for name in sorted(names):
        if _SHARDED_CLASS.fullmatch(name):
            raise UnsupportedError(
                f"{where}: a per-rank {name.rpartition('.')[2]} file: the share of one rank; "
                "save with torch.distributed.checkpoint"
            )
    if _is_megatron_optimizer(tree):
        raise UnsupportedError(
            f"{where}: a distrib_optim.pt of Megatron: buckets of an optimizer without names or shapes; "
            "save in the torch_dist format, with an optimizer that is sharded by parameter"
        )


def _is_megatron_optimizer(tree: Any) -> bool:
    """Whether this is the state of a distributed optimizer: by buffer, then by type of parameter and gradient."""
    if type(tree) is not dict:
        return False
    buffers = [value for key, value in tree.items() if type(key) is int]
    return _COALESCED in tree or any(type(buffer) is dict and any(map(_is_dtypes, buffer)) for buffer in buffers)


def _is_dtypes(key: Any) -> bool:
    types = key if type(key) is tuple else (key,)
    return bool(types) and all(type(each) is Global and each.name in DTYPE_NAMES for each in types)


DTYPE_NAMES = frozenset(f"torch.{dtype.label}" for dtype in DType)
"""The names of element types in a pickle."""
