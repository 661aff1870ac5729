"""What a survey reads: the floating tensors of a checkpoint as runs of elements, each element of a storage once.

Of a strided view the survey reads the whole span, and a mask picks its elements. A view inside another one adds
nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch

from ckpt8.checkpoint.meaning.parameter_names import whole_name
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import TensorRef, is_dense
from ckpt8.compressing.plan import Plan
from ckpt8.container.manifest import Manifest
from ckpt8.core.tensors import DType, Role
from ckpt8.inspecting.manifest_facts import shown_names

ReadBytes = Callable[[int, int, memoryview], None]
"""Fills a buffer with bytes of the storage of that index, from that byte on."""

_MOST_STRIDED = 16
"""The survey reads strided views of one storage up to this many times its length; it takes further ones for dense."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor over storage number ``storage``; of a slice, ``whole`` is the name of the whole tensor."""

    name: str
    role: Role
    storage: int
    ref: TensorRef
    whole: str | None = None


@dataclass(frozen=True)
class Piece:
    """A tensor to read. Elements count from its first one, over ``span`` elements of its storage.

    ``numel`` of them are its own: a strided view leaves some of the span out.
    """

    view: View
    span: int
    numel: int

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.view.ref.dtype

    @property
    def stop(self) -> int:
        """Where the span ends, in elements of the storage."""
        return self.view.ref.offset + self.span

    @property
    def is_dense(self) -> bool:
        """Whether the span holds nothing but the tensor."""
        return self.numel == self.span

    @property
    def tensor(self) -> str:
        """The name of the whole tensor, whichever files its slices are in."""
        return whole_name(self.view.name) if self.view.whole else self.view.name

    @cached_property
    def row(self) -> int:
        """Elements of one row, an index of the first dimension, if rows follow each other; 0 if there are none.

        A slice has rows only if it has them whole.
        """
        shape = self.view.ref.shape
        suffix = self.view.name[len(self.view.whole) :].strip("[]").split(",")[1:] if self.view.whole else []
        if len(shape) < 2 or not self.is_dense or any(part != ":" for part in suffix):
            return 0
        row = prod(shape[1:])
        return row if self.view.ref.stride[0] == row else 0

    def own(self, start: int, count: int) -> torch.Tensor:
        """A mask of ``count`` elements of the span from ``start`` on: True for those of the tensor."""
        left = torch.arange(start, start + count, device="cpu")
        inside = torch.ones(count, dtype=torch.bool, device="cpu")
        for stride, size in _steps(self.view.ref):
            index = left.div(stride, rounding_mode="floor")
            inside &= index < size
            left -= index * stride
        return inside & (left == 0)


def _steps(ref: TensorRef) -> list[tuple[int, int]]:
    """Stride and size of the dimensions that lead to other elements, the largest step first."""
    return sorted(((st, n) for st, n in zip(ref.stride, ref.shape, strict=True) if st and n > 1), reverse=True)


def _is_nested(ref: TensorRef) -> bool:
    """Whether every stride is longer than all that the smaller ones reach: then no two indices share an element."""
    reach = 1
    for stride, size in reversed(_steps(ref)):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True


def make_pieces(views: Iterable[View]) -> list[Piece]:
    """The views that add elements, in their given order."""
    by_storage: dict[tuple[int, DType], list[tuple[int, Piece]]] = defaultdict(list)
    for number, view in enumerate(views):
        if view.ref.dtype.is_floating and 0 not in view.ref.shape:
            by_storage[view.storage, view.ref.dtype].append((number, _piece(view)))
    found = [each for views_of_storage in by_storage.values() for each in _without_inner(views_of_storage)]
    return [piece for _, piece in sorted(found, key=lambda each: each[0])]


def _piece(view: View) -> Piece:
    ref, steps = view.ref, _steps(view.ref)
    span = 1 + sum(stride * (size - 1) for stride, size in steps)
    exact = not is_dense(ref) and _is_nested(ref)
    return Piece(view, span, prod(size for _, size in steps) if exact else span)


def _without_inner(pieces: Sequence[tuple[int, Piece]]) -> Iterator[tuple[int, Piece]]:
    """The pieces of one storage, without elements that an earlier dense piece has."""
    reached = strided = 0
    most = _MOST_STRIDED * max(piece.stop for _, piece in pieces)
    for number, piece in sorted(pieces, key=lambda each: (each[1].view.ref.offset, -each[1].span, each[0])):
        if piece.stop <= reached:
            continue
        if not piece.is_dense:
            strided += piece.span
            if strided <= most:
                yield number, piece
                continue
        exact = piece.is_dense and piece.view.ref.offset >= reached
        yield number, piece if exact else _from(piece, max(reached, piece.view.ref.offset))
        reached = piece.stop


def _from(piece: Piece, start: int) -> Piece:
    """The span of a piece from element ``start`` of its storage on, as a dense piece."""
    count = piece.stop - start
    ref = replace(piece.view.ref, offset=start, shape=(count,), stride=(1,))
    return Piece(replace(piece.view, ref=ref), count, count)


class Subject:
    """The pieces of a checkpoint; ``owners`` are the parameters whose moments are storages of their own.

    ``parameters`` are rows of ``shown_names``, each with the indices of the storages of its moments; ``owners`` are
    such rows, each with the pieces of its moments.
    """

    def __init__(
        self, views: Iterable[View], parameters: Iterable[tuple[dict[str, Any], Iterable[int]]], read: ReadBytes
    ) -> None:
        self.pieces = make_pieces(views)
        self._read = read
        by_storage: dict[int, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            by_storage[piece.view.storage].append(piece)
        found = [(row, [by_storage[index] for index in moments]) for row, moments in parameters]
        self.owners = [
            (row, [pieces[0] for pieces in moments])
            for row, moments in found
            if all(len(pieces) == 1 for pieces in moments)
        ]

    @property
    def numel(self) -> int:
        """Elements of all pieces."""
        return sum(piece.numel for piece in self.pieces)

    def read(self, piece: Piece, start: int, count: int) -> torch.Tensor:
        """Elements of a piece, flat, in their own type, from ``count`` elements of its span. Raises InputError."""
        size = piece.dtype.itemsize
        buffer = bytearray(count * size)
        self._read(piece.view.storage, (piece.view.ref.offset + start) * size, memoryview(buffer))
        x = torch.frombuffer(buffer, dtype=torch.uint8).view(piece.dtype.torch)
        return x if piece.is_dense else x[piece.own(start, count)]


def subject_of(source: Bundle, plan: Plan, manifest: Manifest) -> Subject:
    """All tensors of a source; ``manifest`` describes it."""

    def read(storage: int, start: int, buffer: memoryview) -> None:
        source.read_into(source.storages[storage].offset + start, buffer)

    views = (View(tensor.name, tensor.role, index, tensor.ref, tensor.whole) for tensor, index in plan.tensors)
    moments = (parameter.moments.values() for parameter in manifest.parameters)
    return Subject(views, zip(shown_names(manifest), moments, strict=True), read)
