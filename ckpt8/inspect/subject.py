"""What a survey looks at: the floating tensors of a raw checkpoint or of a ``.ckpt8``, each element once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt8.container import layout
from ckpt8.container.frames import FRAME, bytes_of
from ckpt8.errors import InputError
from ckpt8.inspect.parameters import display_names
from ckpt8.plan import is_dense
from ckpt8.readers.base import TensorRef
from ckpt8.tensors import DType, Role

if TYPE_CHECKING:
    import torch

    from ckpt8.bundle import Bundle
    from ckpt8.container.manifest import TensorRecord
    from ckpt8.container.reader import ContainerReader
    from ckpt8.plan import Plan

_FLOAT8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ})

_SLICE = re.compile(r"\[(?:\d+)?:(?:\d+)?(?:,(?:\d+)?:(?:\d+)?)*\]$")
"""What the name of a slice of a distributed checkpoint ends in."""

ReadBytes = Callable[[int, int, memoryview], None]
"""Fills a buffer from a storage, given by its index, from a byte of it on."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor over storage number ``storage``; ``whole`` is the name of what it is a slice of."""

    name: str
    role: Role
    storage: int
    ref: TensorRef
    whole: str | None = None


@dataclass(frozen=True)
class Piece:
    """A tensor that is looked at. Elements are counted from its first one, over ``span`` elements of its storage.

    ``numel`` of them are its own: a strided view leaves some of the span out.
    """

    view: View
    span: int
    numel: int

    @property
    def name(self) -> str:
        """The name of the tensor, of a slice too."""
        return self.view.name

    @property
    def dtype(self) -> DType:
        """Element type."""
        return self.view.ref.dtype

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
        """Elements of one row, an index of the first dimension, where rows follow each other; 0 where there are none.

        A slice has rows only if it has them whole.
        """
        shape = self.view.ref.shape
        suffix = self.view.name[len(self.view.whole) :].strip("[]").split(",")[1:] if self.view.whole else []
        if len(shape) < 2 or not self.is_dense or any(part != ":" for part in suffix):
            return 0
        row = _count(shape[1:])
        return row if self.view.ref.stride[0] == row else 0

    def own(self, start: int, count: int) -> torch.Tensor:
        """Which of ``count`` elements of the span from ``start`` on are those of the tensor, as a mask."""
        import torch

        rest = torch.arange(start, start + count, device="cpu")
        inside = torch.ones(count, dtype=torch.bool, device="cpu")
        for stride, size in _steps(self.view.ref):
            index = rest.div(stride, rounding_mode="floor")
            inside &= index < size
            rest -= index * stride
        return inside & (rest == 0)


def whole_name(name: str) -> str:
    """The name of a tensor from that of a slice: without its place in it, and without the file that it lies in."""
    part = _SLICE.search(name)
    if part is None:
        return name
    member, _, bare = name[: part.start()].rpartition(":")
    folder = member.rpartition("/")[0]
    return f"{folder}:{bare}" if folder else bare


def _count(shape: tuple[int, ...]) -> int:
    return prod(shape)


def _steps(ref: TensorRef) -> list[tuple[int, int]]:
    """Stride and size of the dimensions that lead to other elements, the largest step first."""
    return sorted(((st, n) for st, n in zip(ref.stride, ref.shape, strict=True) if st and n > 1), reverse=True)


def _is_nested(ref: TensorRef) -> bool:
    """Whether every step leads over all that the smaller ones reach: then an element has one place."""
    reach = 1
    for stride, size in reversed(_steps(ref)):
        if stride < reach:
            return False
        reach = stride * (size - 1) + reach
    return True


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter and its ``moments``; the name is that of the place of its state where it is not ``named``."""

    name: str
    named: bool
    moments: list[Piece]


class Subject:
    """The pieces of a checkpoint; ``owners`` are the parameters whose moments are storages of their own.

    ``parameters`` give names as ``display_names`` does, and the indices of these storages.
    """

    def __init__(
        self, views: Iterable[View], parameters: Iterable[tuple[dict[str, Any], Iterable[int]]], read: ReadBytes
    ) -> None:
        self.pieces = _pieces(views)
        self._read = read
        alone: dict[int, list[Piece]] = defaultdict(list)
        for piece in self.pieces:
            alone[piece.view.storage].append(piece)
        found = [(row, [alone[index] for index in moments]) for row, moments in parameters]
        self.owners = [
            Owner(row["name"], row["named"], [owned[0] for owned in moments])
            for row, moments in found
            if all(len(owned) == 1 for owned in moments)
        ]

    @property
    def numel(self) -> int:
        """Elements of all pieces."""
        return sum(piece.numel for piece in self.pieces)

    def read(self, piece: Piece, start: int, count: int) -> torch.Tensor:
        """Elements of the span of a piece, flat, in their own type. Raises InputError."""
        import torch

        size = piece.dtype.itemsize
        buffer = bytearray(count * size)
        self._read(piece.view.storage, (piece.view.ref.offset + start) * size, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=torch.uint8).view(piece.dtype.torch)


def of_bundle(source: Bundle, plan: Plan) -> Subject:
    """The tensors of a raw checkpoint."""

    def read(storage: int, start: int, buffer: memoryview) -> None:
        source.read_into(source.storages[storage].offset + start, buffer)

    views = (View(tensor.name, tensor.role, index, tensor.ref, tensor.whole) for tensor, index in plan.tensors)
    found = [unit.parameter for unit in plan.units if unit.parameter is not None]
    storages = {stream.index: stream.spec.name for unit in plan.units for stream in unit.streams}
    given = [(each.name, [storages[index] for index in each.moments.values()]) for each in found]
    shown = display_names(given, directory=source.directory is not None)
    return Subject(views, zip(shown, [each.moments.values() for each in found], strict=True), read)


def of_container(reader: ContainerReader) -> Subject:
    """The tensors of a ``.ckpt8``, with the values that it gives back. Decodes chunk by chunk."""
    manifest = reader.manifest
    views = [_stored_view(reader, tensor) for tensor in manifest.tensors]
    moments = [each.moments.values() for each in manifest.parameters]
    given = [
        (each.name, [manifest.storages[index].name for index in indices])
        for each, indices in zip(manifest.parameters, moments, strict=True)
    ]
    shown = display_names(given, directory=manifest.directory is not None)
    return Subject(views, zip(shown, moments, strict=True), _Chunks(reader).read)


def _stored_view(reader: ContainerReader, tensor: TensorRecord) -> View:
    record = reader.manifest.storages[tensor.storage]
    ref = TensorRef(str(tensor.storage), tensor.dtype, tensor.offset, tuple(tensor.shape), tuple(tensor.stride))
    if (ref.offset + _span(ref)) * ref.dtype.itemsize > record.nbytes and _count(ref.shape):
        raise InputError(f"{reader.path}: {tensor.name}: reaches outside its storage")
    part = _SLICE.search(tensor.name)
    return View(tensor.name, record.role, tensor.storage, ref, part and tensor.name[: part.start()])


class _Chunks:
    """Reads storages of a container by bytes; the chunk that was decoded last is kept."""

    def __init__(self, reader: ContainerReader) -> None:
        self._reader = reader
        self._last: tuple[tuple[int, int], torch.Tensor] | None = None

    def read(self, storage: int, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the decoded bytes of a storage from ``start`` on. Raises InputError."""
        length = FRAME * self._reader.manifest.storages[storage].dtype.itemsize
        done = 0
        while done < len(buffer):
            chunk, origin = divmod(start + done, length)
            content = bytes_of(self._chunk(storage, chunk))[origin : origin + len(buffer) - done]
            buffer[done : done + len(content)] = content
            done += len(content)

    def _chunk(self, storage: int, chunk: int) -> torch.Tensor:
        import torch

        if self._last is None or self._last[0] != (storage, chunk):
            record = self._reader.manifest.storages[storage]
            spec = layout.chunk_spec(record.name, record.role, record.dtype, record.numel, chunk)
            out = torch.empty(spec.numel, dtype=record.dtype.torch, device="cpu")
            self._reader.decode_chunk(storage, chunk, out)
            self._last = (storage, chunk), out
        return self._last[1]


def _pieces(views: Iterable[View]) -> list[Piece]:
    """Of all views those that add elements, in the order that they are given in."""
    by_storage: dict[tuple[int, DType], list[tuple[int, Piece]]] = defaultdict(list)
    for number, view in enumerate(views):
        if (view.ref.dtype.is_plane_float or view.ref.dtype in _FLOAT8) and _count(view.ref.shape):
            by_storage[view.storage, view.ref.dtype].append((number, _piece(view)))
    found = [each for beside in by_storage.values() for each in _without_inner(beside)]
    return [piece for _, piece in sorted(found, key=lambda each: each[0])]


def _span(ref: TensorRef) -> int:
    """Elements of the storage from the first to the last one of a tensor that is not empty."""
    return 1 + sum(stride * (size - 1) for stride, size in zip(ref.stride, ref.shape, strict=True))


def _piece(view: View) -> Piece:
    ref = view.ref
    span = _span(ref)
    if is_dense(ref) or not _is_nested(ref):
        return Piece(view, span, span)
    return Piece(view, span, prod(size for _, size in _steps(ref)))


def _without_inner(beside: Sequence[tuple[int, Piece]]) -> Iterator[tuple[int, Piece]]:
    """Those that reach beyond the dense ones before them in their storage."""
    reached = 0
    for number, piece in sorted(beside, key=lambda each: (each[1].view.ref.offset, -each[1].span, each[0])):
        stop = piece.view.ref.offset + piece.span
        if stop > reached:
            yield number, piece
            reached = stop if piece.is_dense else reached
