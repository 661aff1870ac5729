"""``restore --salvage`` of a directory of containers of ranks: a plain directory of all that is whole.

A tensor is written if all of its slices are whole, under its name, cut as it was. One that has lost a slice, or a part
of one, is not: no program can take it for the tensor that was saved. What is lost of it is told slice by slice.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from ckpt8.container.damaged import DamagedContainer
from ckpt8.container.decoding import decode_tensor
from ckpt8.container.frames import FRAME
from ckpt8.container.joined import JoinedReader, slice_problem
from ckpt8.container.sharded import INDEX, GlobalTensor, Place, ShardedIndex, Slice
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType
from ckpt8.core.text import box_text, counted, listed
from ckpt8.core.workers import Progress, Workers
from ckpt8.restoring.members import Restored
from ckpt8.restoring.salvage import find_lost, lost_elements
from ckpt8.restoring.sharded import plain_target, write_plain

_SHOWN = 3
"""Slices of one tensor in a file, and files, that a line tells; the JSON has them all."""


@dataclass(frozen=True, slots=True)
class LostSlice:
    """A part of a tensor that is not whole: its place and size, the file that has it, and why it is lost."""

    offsets: list[int]
    sizes: list[int]
    file: str
    reason: str

    @property
    def where(self) -> str:
        """The file and the reason, for a line of text."""
        return f"({self.file}: {self.reason})"


@dataclass(frozen=True, slots=True)
class LostValue:
    """A tensor that is not written, with its ``shape`` and the ``slices`` that it lacks; ``elements`` counts theirs.

    A value that is no tensor has no shape, and a single slice without a place.
    """

    name: str
    shape: list[int] | None
    elements: int
    slices: list[LostSlice]

    def line(self) -> str:
        """The name and what is lost, as a line of text."""
        if self.shape is None:
            return f"  {self.name}: not written: {self.slices[0].where}"
        boxes: dict[str, list[str]] = {}
        for piece in self.slices:
            boxes.setdefault(piece.where, []).append(box_text(piece.offsets, piece.sizes, self.shape))
        places = [f"{listed(own, _SHOWN)} {where}".strip() for where, own in boxes.items()]
        more = f"; and {len(places) - _SHOWN} more" if len(places) > _SHOWN else ""
        lacks = f"lacks {self.elements:,} of {prod(self.shape):,} elements"
        return f"  {self.name}: not written, {lacks}: {'; '.join(places[:_SHOWN])}{more}"


@dataclass(kw_only=True, slots=True, repr=False)
class SalvagedDirectory(Restored):
    """What was recovered: ``tensors`` and ``values`` count those that were written, ``lost`` lists the others.

    ``damage`` says what is wrong with a file, by its name: with the index, a header or a manifest, so that nothing
    proves the names, shapes and places that it states, or why nothing of it was read.
    """

    tensors: int = 0
    values: int = 0
    damage: dict[str, str] = field(default_factory=dict)
    lost: list[LostValue] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all files are undamaged."""
        return not self.lost and not self.damage

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, and ``complete``."""
        return {**asdict(self), "path": str(self.path), "complete": self.complete}

    def lines(self) -> list[str]:
        """What to tell the user, as lines of text."""
        written = f"{counted(self.tensors, 'tensor')} and {counted(self.values, 'other value')} written"
        lines = [f"{self.path}: {written}, {len(self.lost):,} not whole", *Restored.lines(self)]
        lines += [f"{file}: {problem}" for file, problem in self.damage.items()]
        return lines + [loss.line() for loss in self.lost]


class _Directory:
    """The containers that can be read, whose lost chunks are marked, and what is lost of slices and values."""

    def __init__(self, joined: JoinedReader) -> None:
        self.joined = joined
        self.readers = {name: reader for name, reader in joined.by_name.items() if isinstance(reader, DamagedContainer)}

    def why_lost(self, name: str, tensor: GlobalTensor, box: Slice) -> str | None:
        """Why a slice is lost, or None. Damage inside it is told by runs of its elements."""
        if box.file in self.joined.unread:
            return self.joined.unread[box.file]
        if (place := tensor.pickled(box)) is not None:
            return self.why_lost_value(place)
        reader, record = self.readers[box.file], self.joined.slices[box.file].get((name, box.offsets))
        problem = slice_problem(reader.manifest, record, tensor, box)
        if problem is not None or record is None:
            return problem
        if not record.is_contiguous:  # no writer makes such slices
            return f"is not of the type and shape that {INDEX} states"
        lost = ", ".join(f"{start} to {stop - 1}" for start, stop in lost_elements(reader, record))
        return f"elements {lost} of its {record.numel} are damaged" if lost else None

    def why_lost_value(self, place: Place) -> str | None:
        """Why a value that torch.save wrote is lost, or None."""
        if place.file in self.joined.unread:
            return self.joined.unread[place.file]
        reader, record = self.readers[place.file], self.joined.objects[place.file]
        if record is None or reader.manifest.storages[record.storage].dtype is not DType.UINT8:
            return f"is not in this file, and {INDEX} names it"
        if place.start + place.length > record.numel:
            return "its file ends before it"
        return None if reader.lost.get(record.storage, set()).isdisjoint(_chunks(place)) else "is damaged"

    def tensor_of(self, name: str, box: Slice) -> torch.Tensor:
        """The content of a slice that is not lost."""
        return decode_tensor(self.readers[box.file], self.joined.slices[box.file][name, box.offsets])

    def value_of(self, _: str, place: Place) -> bytes:
        """The bytes of a value that is not lost."""
        record = self.joined.objects[place.file]
        assert record is not None  # noqa: S101 - it would be lost
        chunks = (self.readers[place.file].read_chunk(record.storage, chunk) for chunk in _chunks(place))
        start = place.start % FRAME
        return b"".join(chunk.tobytes() for chunk in chunks)[start : start + place.length]


def _chunks(place: Place) -> range:
    return range(place.start // FRAME, -(-(place.start + place.length) // FRAME))


def salvage_directory(
    source: Path, target: str | os.PathLike[str] | None, *, force: bool, threads: int | None, progress: Progress
) -> SalvagedDirectory:
    """Write what is whole as a plain directory that torch's FileSystemReader reads.

    Raises InputError where nothing is, OutputError for the target, UsageError without one.
    """
    path = plain_target(source, target, "what is whole")
    try:
        joined = JoinedReader(source, strict=False)
    except InputError as exc:
        advice = f"salvage its files one by one: restore {source}/FILE.ckpt8 --salvage"
        raise exc.told(f"{exc.problem}; nothing can be recovered of the whole, {advice}") from exc
    directory = _Directory(joined)
    with joined, Workers(threads) as workers:
        for reader in directory.readers.values():
            find_lost(reader, workers)
        result = SalvagedDirectory(path=path, original=source.resolve().name, other_name=None)
        result.damage = joined.damage | joined.unread
        result.damage |= {name: reader.damage for name, reader in directory.readers.items() if reader.damage}
        whole = _whole(directory, result)
        result.tensors, result.values = len(whole.tensors), len(whole.objects)
        used = {box.file for tensor in whole.tensors.values() for box in tensor.boxes()}
        used |= {place.file for place in whole.objects.values()}
        names = [file for file in whole.files if file in used]
        if not names:
            first = "".join(f" ({file}: {problem})" for file, problem in list(result.damage.items())[:1])
            raise InputError(f"{source}: no tensor is whole{first}; nothing can be recovered")
        result.replaced = write_plain(
            path, source, whole, names, directory.tensor_of, directory.value_of, progress, force=force
        )
    return result


def _whole(directory: _Directory, result: SalvagedDirectory) -> ShardedIndex:
    """The index without what is lost, which goes into ``result``."""
    index = directory.joined.index
    for name, tensor in index.tensors.items():
        slices = [
            LostSlice(list(box.offsets), list(box.sizes), box.file, reason)
            for box in tensor.boxes()
            if (reason := directory.why_lost(name, tensor, box)) is not None
        ]
        if slices:
            elements = sum(prod(piece.sizes) for piece in slices)
            result.lost.append(LostValue(name, list(tensor.shape), elements, slices))
    for name, place in index.objects.items():
        if (reason := directory.why_lost_value(place)) is not None:
            result.lost.append(LostValue(name, None, 0, [LostSlice([], [], place.file, reason)]))
    lost = {loss.name for loss in result.lost}
    return replace(
        index,
        tensors={name: tensor for name, tensor in index.tensors.items() if name not in lost},
        objects={name: place for name, place in index.objects.items() if name not in lost},
        paths=None if index.paths is None else {name: keys for name, keys in index.paths.items() if name not in lost},
    )
