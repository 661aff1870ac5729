"""The files of one rank, which mean nothing without those of the other ranks: what they hold, and those to refuse."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ckpt8.checkpoint.readers.pickle.distributed import EMPTY, is_distributed
from ckpt8.checkpoint.tree import Global, Inert, TensorRef
from ckpt8.checkpoint.walk import format_path, iter_leaves, iter_nodes
from ckpt8.core.errors import UnsupportedError
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown

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


def check_shares(tree: Any, names: Collection[str], where: str) -> None:
    """Leave out the tensors of which this rank has nothing. ``names`` are the globals of the pickle.

    Raises UnsupportedError for a tensor whose place in the whole is not understood, and for one that shares its storage
    with what tells the place.
    """
    if not any(map(is_distributed, names)):
        return
    keys, rests = set(), []
    for path, node in iter_nodes(tree):
        if type(node) is TensorRef:
            keys.add(node.key)
            rests += [node.share.rest] if node.share is not None else []
        elif type(node) is Inert and any(type(each) is Global and is_distributed(each.name) for each in node.args):
            raise UnsupportedError(
                f"{where}: a file of one rank: the place of {shown(format_path(path))} in the whole tensor is not known"
            )
        elif isinstance(node, dict):
            empty = [key for key, value in node.items() if type(value) is Inert and value.name == EMPTY]
            rests += [node.pop(key) for key in empty]
    if any(leaf.key in keys for _, leaf in iter_leaves(rests)):
        raise UnsupportedError(f"{where}: a file of one rank: a tensor shares its storage with the mesh of the ranks")


def refuse_share(tree: Any, where: str) -> None:
    """Raise UnsupportedError for the tree of a file with a part of a tensor that is spread over ranks."""
    if any(
        type(leaf) is TensorRef and leaf.share is not None and leaf.share.whole != leaf.shape
        for _, leaf in iter_leaves(tree)
    ):
        raise UnsupportedError(
            f"{where}: the file of one rank, with its parts of the tensors; give the folder with the files of all ranks"
        )


def refuse_buckets(tree: Any, where: str) -> None:
    """Raise UnsupportedError for a ``distrib_optim.pt`` of Megatron."""
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
