"""The index of a directory of containers of ranks: what their slices make together, and which file holds which.

The file is JSON. A file is given by its number in ``files``; "place" is [file, start, length]: bytes of the tensor
``objects`` there, as torch.save writes a value.

    format      "ckpt8-dcp";  version: "2.0"
    dcp         version of torch's planner data, or null;  save_id: text or null
    files       [[name, seal], ...]: the files of this checkpoint, and the SHA-256 that each ends with
    tensors     {name: {"dtype", "shape", and one of two layouts}}
                    "cuts", "owners"    a grid: for every dimension [[size, count], ...], runs of equal parts, and the
                                        files of the cells in row-major order: a number, or [first, count, step]
                    "boxes"             [[file, offsets, sizes], ...]; with "pickled": a list with [start, length] for
                                        a box that is kept as an object is, null for any other
    objects     {name: place}: values that are no tensors
    paths       {name: [key, ...]}: the keys that lead to a value in the state dict that was saved; null if unknown
    part        {"rank", "world", "save"} in a part of an index, which only tells of the file of one rank; absent else

Boxes are not empty, and have none where the tensor is. The tensor of a box has its name and its offsets in the table
``slices`` of its container.

Most tensors are cut into grids, which take a few numbers however large they are.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from math import prod
from operator import add, lt
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ckpt8.container.sharded import INDEX
from ckpt8.core.errors import InputError
from ckpt8.core.files.atomic import AtomicFile, sync_directory
from ckpt8.core.tensors import DType

Shape = tuple[int, ...]


class Slice(NamedTuple):
    """A box of a tensor, and the file that holds it."""

    file: str
    offsets: Shape
    sizes: Shape


class Layout(Protocol):
    """The boxes of one tensor. Each is not empty and lies in the tensor."""

    @property
    def is_whole(self) -> bool:
        """Whether the boxes cover the tensor, each element once, as far as the layout tells."""

    def __len__(self) -> int:
        """The number of boxes."""

    def boxes(self) -> Iterator[tuple[int, Shape, Shape]]:
        """File number, offsets and sizes of every box."""

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, Shape, Shape]]:
        """File number, offsets and sizes of every box that shares elements with the given one."""


class Cuts:
    """The cuts of one dimension: ``runs`` are [size, count] of equal parts that follow each other."""

    def __init__(self, runs: Sequence[Sequence[int]]) -> None:
        self.runs = runs
        self._cells = list(accumulate((count for _, count in runs), initial=0))
        self._starts = list(accumulate((size * count for size, count in runs), initial=0))

    def __len__(self) -> int:
        """The number of parts."""
        return self._cells[-1]

    @property
    def length(self) -> int:
        """The sum of the sizes."""
        return self._starts[-1]

    def at(self, position: int) -> int:
        """The number of the part that holds a position."""
        run = bisect_right(self._starts, position) - 1
        return self._cells[run] + (position - self._starts[run]) // self.runs[run][0]

    def part(self, number: int) -> tuple[int, int]:
        """Offset and size of a part."""
        run = bisect_right(self._cells, number) - 1
        size = self.runs[run][0]
        return self._starts[run] + (number - self._cells[run]) * size, size


class Grid:
    """A tensor cut in every dimension. ``owners`` are the file numbers of the cells in row-major order.

    An owner is a number, or [first, count, step] for numbers in even steps.
    """

    is_whole = True

    def __init__(self, cuts: Sequence[Sequence[Sequence[int]]], owners: Sequence[int | Sequence[int]]) -> None:
        self.cuts = [Cuts(runs) for runs in cuts]
        self.owners = owners
        self._cells = list(accumulate((1 if isinstance(owner, int) else owner[1] for owner in owners), initial=0))

    @property
    def shape(self) -> Shape:
        """The shape of the tensor."""
        return tuple(cuts.length for cuts in self.cuts)

    @property
    def owned(self) -> int:
        """The number of cells that ``owners`` name; that of all cells in a sound grid."""
        return self._cells[-1]

    def __len__(self) -> int:
        """The number of cells."""
        return prod(map(len, self.cuts))

    def _owner(self, cell: int) -> int:
        run = bisect_right(self._cells, cell) - 1
        owner = self.owners[run]
        return owner if isinstance(owner, int) else owner[0] + (cell - self._cells[run]) * owner[2]

    def boxes(self) -> Iterator[tuple[int, Shape, Shape]]:
        """File number, offsets and sizes of every cell."""
        return self._within([range(len(cuts)) for cuts in self.cuts])

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, Shape, Shape]]:
        """File number, offsets and sizes of every cell that shares elements with the given box."""
        if not all(sizes):
            return iter(())
        ranges = [
            range(cuts.at(offset), cuts.at(offset + size - 1) + 1)
            for cuts, offset, size in zip(self.cuts, offsets, sizes, strict=True)
        ]
        return self._within(ranges)

    def _within(self, ranges: Sequence[range]) -> Iterator[tuple[int, Shape, Shape]]:
        for numbers in product(*ranges):
            cell, offsets, sizes = 0, [], []
            for cuts, number in zip(self.cuts, numbers, strict=True):
                cell = cell * len(cuts) + number
                offset, size = cuts.part(number)
                offsets.append(offset)
                sizes.append(size)
            yield self._owner(cell), tuple(offsets), tuple(sizes)


@dataclass(frozen=True)
class Listed:
    """A tensor whose boxes are no grid, or do not cover it. ``listed`` are file number, offsets and sizes of each.

    ``pickled`` gives start and length in bytes, by offsets, where a value is in the bytes of the objects of its file.
    """

    listed: Sequence[tuple[int, Shape, Shape]]
    pickled: Mapping[Shape, tuple[int, int]] = field(default_factory=dict)

    is_whole = False

    def __len__(self) -> int:
        """The number of boxes."""
        return len(self.listed)

    def boxes(self) -> Iterator[tuple[int, Shape, Shape]]:
        """File number, offsets and sizes of every box."""
        return iter(self.listed)

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, Shape, Shape]]:
        """File number, offsets and sizes of every box that shares elements with the given one."""
        if not self.listed or not all(sizes):
            return iter(())
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        return (self.listed[number] for number in sorted(self._tree.overlapping(offsets, ends)))

    @cached_property
    def _tree(self) -> _BoxTree:
        return _BoxTree(self.listed, range(len(self.listed)))


class _BoxTree:
    """Boxes by place, to find those that overlap another one without looking at all: a plan asks for each.

    ``numbers`` are those of its boxes in ``found``. A node halves them along the dimension in which they spread most.
    """

    _LEAF = 8

    def __init__(self, boxes: Sequence[tuple[int, Shape, Shape]], numbers: Sequence[int]) -> None:
        offsets = [boxes[number][1] for number in numbers]
        ends = [tuple(map(add, boxes[number][1], boxes[number][2])) for number in numbers]
        self._low = tuple(map(min, zip(*offsets, strict=True)))
        self._high = tuple(map(max, zip(*ends, strict=True)))
        self._boxes: Sequence[tuple[int, Shape, Shape]] = ()
        self._halves: Sequence[_BoxTree] = ()
        counts = [len(set(starts)) for starts in zip(*offsets, strict=True)]
        if len(numbers) <= self._LEAF or max(counts, default=1) == 1:
            self._boxes = list(zip(numbers, offsets, ends, strict=True))
        else:
            dim = counts.index(max(counts))
            ordered = sorted(numbers, key=lambda number: boxes[number][1][dim])
            middle = len(ordered) // 2
            self._halves = _BoxTree(boxes, ordered[:middle]), _BoxTree(boxes, ordered[middle:])

    def overlapping(self, offsets: Sequence[int], ends: Sequence[int]) -> Iterator[int]:
        """The numbers of the boxes that share elements with the box from ``offsets`` to ``ends``."""
        if _meet(self._low, self._high, offsets, ends):
            for half in self._halves:
                yield from half.overlapping(offsets, ends)
            for number, low, high in self._boxes:
                if _meet(low, high, offsets, ends):
                    yield number


def _meet(low: Shape, high: Shape, offsets: Sequence[int], ends: Sequence[int]) -> bool:
    return all(map(lt, low, ends)) and all(map(lt, offsets, high))


MAX_SHARDED = 6
"""A tensor may be cut along so many dimensions; a mesh of processes has three or four."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes by dimension."""


def check_cover(where: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise InputError unless every element of ``shape`` is in one box.

    Compares corners. Those of a box count 1 and -1 in turn, so that they cancel out where boxes meet. The corners of
    the whole tensor are left if, and only if, the boxes fill it without overlap.
    """
    whole = (0,) * len(shape), shape
    cut_dims = [dim for dim in range(len(shape)) if any(sizes[dim] != shape[dim] for _, sizes in boxes)]
    if len(cut_dims) > MAX_SHARDED:
        raise InputError(f"{where}: is cut along {len(cut_dims)} dimensions, more than {MAX_SHARDED}")
    corners: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        _add_corners(corners, (offsets, sizes), cut_dims, 1)
    _add_corners(corners, whole, cut_dims, -1)
    if any(corners.values()):
        there = sum(prod(sizes) for _, sizes in boxes)
        if there < prod(shape):
            what = f"slices are missing: {there} of {prod(shape)} elements are there; the checkpoint is not complete"
        else:
            what = "its slices overlap"
        raise InputError(f"{where}: {what}")


def _add_corners(corners: Counter[tuple[int, ...]], box: Box, dims: Sequence[int], weight: int) -> None:
    ends = [((box[0][dim], 1), (box[0][dim] + box[1][dim], -1)) for dim in dims]
    for corner in product(*ends):
        corners[tuple(place for place, _ in corner)] += weight * prod(sign for _, sign in corner)


FORMAT = "ckpt8-dcp"
VERSION = "2.0"

OBJECTS = "objects"
"""The tensor of bytes in a container with the values that are no plain tensors, as torch.save writes them."""


class Place(NamedTuple):
    """Where a value is that torch.save wrote: bytes of the tensor OBJECTS of a file."""

    file: str
    start: int
    length: int


class Part(NamedTuple):
    """Which part of an index this is: that of ``rank`` of ``world``, which all have the same ``save``."""

    rank: int
    world: int
    save: str

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"ckpt8-dcp.{self.rank}.json"


@dataclass(frozen=True, slots=True)
class GlobalTensor:
    """A tensor of all ranks, and where its parts are. ``names`` are those of the files."""

    dtype: DType
    shape: Shape
    layout: Layout
    names: Sequence[str] = field(repr=False)

    @property
    def is_whole(self) -> bool:
        """Whether the tensor is cut into a grid, which has every element once."""
        return self.layout.is_whole

    def boxes(self) -> list[Slice]:
        """All parts of the tensor; none of a tensor without elements."""
        return [Slice(self.names[file], *box) for file, *box in self.layout.boxes()]

    def check_cover(self, where: str) -> None:
        """Raise InputError, which begins with ``where``, unless the parts make up the tensor. A grid does."""
        if not self.is_whole and all(self.shape):
            check_cover(where, self.shape, [(offsets, sizes) for _, offsets, sizes in self.layout.boxes()])

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> list[Slice]:
        """The parts that share elements with a box in the tensor."""
        return [Slice(self.names[file], *box) for file, *box in self.layout.overlapping(offsets, sizes)]

    def pickled(self, box: Slice) -> Place | None:
        """Where a part is that is kept as an object is; None for those that are tensors of their file."""
        place = self.layout.pickled.get(box.offsets) if isinstance(self.layout, Listed) else None
        return None if place is None else Place(box.file, *place)

    def to_json(self) -> dict[str, Any]:
        """The values of JSON."""
        tree: dict[str, Any] = {"dtype": self.dtype.label, "shape": list(self.shape)}
        if isinstance(self.layout, Grid):
            return tree | {"cuts": [cuts.runs for cuts in self.layout.cuts], "owners": self.layout.owners}
        boxes = list(self.layout.boxes())
        tree["boxes"] = [[file, list(offsets), list(sizes)] for file, offsets, sizes in boxes]
        if isinstance(self.layout, Listed) and self.layout.pickled:
            tree["pickled"] = [self.layout.pickled.get(offsets) for _, offsets, _ in boxes]
        return tree


@dataclass(frozen=True, slots=True)
class ShardedIndex:
    """What a directory holds. ``files`` are the seals by name; ``paths`` are None where the keys are unknown.

    ``part`` is that of a part; an index that was joined of parts has the number of them in ``joined``.
    """

    files: Mapping[str, str]
    tensors: Mapping[str, GlobalTensor]
    objects: Mapping[str, Place]
    paths: Mapping[str, tuple[str | int, ...]] | None = None
    dcp: str | None = None
    save_id: str | None = None
    part: Part | None = None
    joined: int = 0

    def to_bytes(self) -> bytes:
        """The text of the file."""
        numbers = {name: number for number, name in enumerate(self.files)}
        tree: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "dcp": self.dcp,
            "save_id": self.save_id,
            "files": [[name, seal] for name, seal in self.files.items()],
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
            "objects": {name: [numbers[at.file], at.start, at.length] for name, at in self.objects.items()},
            "paths": None if self.paths is None else {name: list(path) for name, path in self.paths.items()},
        }
        if self.part is not None:
            tree["part"] = self.part._asdict()
        return json.dumps(tree, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")

    def write(self, directory: Path) -> None:
        """Write the file into the directory, which is a checkpoint from then on. Raises OutputError."""
        with AtomicFile(directory / (INDEX if self.part is None else self.part.name), force=True, tidy=False) as output:
            with output.guard():
                output.file.write(self.to_bytes())
                sync_directory(directory.resolve().parent)  # a run makes a new directory for every checkpoint
            output.publish()
