"""Compares what two files of torch.save hold, without importing a class: any object, with the tensors in it."""

from __future__ import annotations

from typing import Any

import torch

from ckpt8.checkpoint.sources.objects import RestBuilder
from ckpt8.checkpoint.tree import Checkpoint, Inert, StatefulDict, StorageRef, TensorRef
from ckpt8.inspecting.diff.values import Equality, Leaves


def same_object(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether two files hold the same object. Raises InputError for damage.

    Tensors are the same where type, shape and the bits of all elements are, however their storages are laid out.
    """
    return _Comparison(a, b).same(a.tree, b.tree)


class _Comparison:
    def __init__(self, a: Checkpoint, b: Checkpoint) -> None:
        self._a, self._b = RestBuilder(a), RestBuilder(b)
        self._is_value, self._equal = Leaves(), Equality()
        # By id: both trees keep their nodes.
        self._known: dict[tuple[int, int], bool] = {}

    def same(self, a: Any, b: Any) -> bool:
        """Whether two nodes of the trees are the same. Nodes that lead back to themselves are, if all else is."""
        if self._is_value(a) or self._is_value(b):
            return self._is_value(a) and self._is_value(b) and self._equal(a, b)
        if type(a) is not type(b):
            return False
        pair = id(a), id(b)
        if pair not in self._known:
            self._known[pair] = True
            self._known[pair] = self._compare(a, b)
        return self._known[pair]

    def _compare(self, a: Any, b: Any) -> bool:
        if isinstance(a, TensorRef):
            return (a.dtype, a.shape) == (b.dtype, b.shape) and _bits_equal(self._a.build(a), self._b.build(b))
        if isinstance(a, StorageRef):
            place = (a.dtype, a.numel, a.offset) == (b.dtype, b.numel, b.offset)
            return place and bytes(self._a.build(a)) == bytes(self._b.build(b))
        if isinstance(a, Inert):
            return a.name == b.name and all(
                self.same(getattr(a, field), getattr(b, field)) for field in ("args", "state", "items", "pairs")
            )
        if isinstance(a, dict):
            states = (each.state if isinstance(each, StatefulDict) else None for each in (a, b))
            return a.keys() == b.keys() and all(self.same(a[key], b[key]) for key in a) and self.same(*states)
        return len(a) == len(b) and all(map(self.same, a, b))


def _bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape have the same bits."""
    flat = [each.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for each in (a, b)]
    return torch.equal(*flat)
