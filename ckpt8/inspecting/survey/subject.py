"""What a survey looks at: the floating tensors of a raw checkpoint or of a ``.ckpt8``, each element once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ckpt8.checkpoint.meaning.layer_names import SLICE
from ckpt8.checkpoint.meaning.parameter_names import display_names
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.compressing.plan import Plan
from ckpt8.container import layout
from ckpt8.container.frames import FRAME, bytes_of
from ckpt8.container.manifest import TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError
from ckpt8.inspecting.survey.pieces import Piece, View, count_of, make_pieces, span_of

ReadBytes = Callable[[int, int, memoryview], None]
"""Fills a buffer from a storage, given by its index, from a byte of it on."""


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
        self.pieces = make_pieces(views)
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
    if (ref.offset + span_of(ref)) * ref.dtype.itemsize > record.nbytes and count_of(ref.shape):
        raise InputError(f"{reader.path}: {tensor.name}: reaches outside its storage")
    part = SLICE.search(tensor.name)
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
        if self._last is None or self._last[0] != (storage, chunk):
            record = self._reader.manifest.storages[storage]
            spec = layout.chunk_spec(record.name, record.role, record.dtype, record.numel, chunk)
            out = torch.empty(spec.numel, dtype=record.dtype.torch, device="cpu")
            self._reader.decode_chunk(storage, chunk, out)
            self._last = (storage, chunk), out
        return self._last[1]
