"""What a survey looks at: the floating tensors of a checkpoint, each element once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.compressing.plan import Plan
from ckpt8.container.manifest import Manifest
from ckpt8.inspecting.manifest_facts import shown_names
from ckpt8.inspecting.survey.pieces import Piece, View, make_pieces

ReadBytes = Callable[[int, int, memoryview], None]
"""Fills a buffer with bytes of the storage of that index, from that byte on."""


@dataclass(frozen=True, slots=True)
class Owner:
    """A parameter and the pieces of its ``moments``; one that is not ``named`` is called by the path of its state."""

    name: str
    named: bool
    moments: list[Piece]


class Subject:
    """The pieces of a checkpoint; ``owners`` are the parameters whose moments are storages of their own.

    ``parameters`` are rows of ``shown_names``, each with the indices of the storages of its moments.
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


def subject_of(source: Bundle, plan: Plan, manifest: Manifest) -> Subject:
    """All tensors of a source; ``manifest`` describes it."""

    def read(storage: int, start: int, buffer: memoryview) -> None:
        source.read_into(source.storages[storage].offset + start, buffer)

    views = (View(tensor.name, tensor.role, index, tensor.ref, tensor.whole) for tensor, index in plan.tensors)
    moments = (parameter.moments.values() for parameter in manifest.parameters)
    return Subject(views, zip(shown_names(manifest), moments, strict=True), read)
