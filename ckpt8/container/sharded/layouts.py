"""Which file holds which part of a tensor: most tensors are cut into grids, which take a few numbers however large."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, product
from math import prod
from operator import add, lt
from typing import NamedTuple, Protocol

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
        """As ``boxes``, those that share elements with a box."""


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
        self._cells = list(accumulate((1 if isinstance(each, int) else each[1] for each in owners), initial=0))

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
        """As ``boxes``, those cells that share elements with a box."""
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
    """A tensor whose boxes are no grid, or do not cover it. ``found`` are file number, offsets and sizes of each.

    ``pickled`` gives start and length in bytes, by offsets, where a value is in the bytes of the objects of its file.
    """

    found: Sequence[tuple[int, Shape, Shape]]
    pickled: Mapping[Shape, tuple[int, int]] = field(default_factory=dict)

    is_whole = False

    def __len__(self) -> int:
        """The number of boxes."""
        return len(self.found)

    def boxes(self) -> Iterator[tuple[int, Shape, Shape]]:
        """File number, offsets and sizes of every box."""
        return iter(self.found)

    def overlapping(self, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, Shape, Shape]]:
        """As ``boxes``, those that share elements with a box."""
        if not self.found or not all(sizes):
            return iter(())
        ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
        return (self.found[number] for number in sorted(self._tree.overlapping(offsets, ends)))

    @cached_property
    def _tree(self) -> _BoxTree:
        return _BoxTree(self.found, range(len(self.found)))


class _BoxTree:
    """Boxes by place, to find those that overlap another one without looking at all: a plan asks for each.

    ``numbers`` are those of its boxes in ``found``. A node halves them along the dimension in which they spread most.
    """

    _LEAF = 8

    def __init__(self, found: Sequence[tuple[int, Shape, Shape]], numbers: Sequence[int]) -> None:
        offsets = [found[number][1] for number in numbers]
        ends = [tuple(map(add, found[number][1], found[number][2])) for number in numbers]
        self._low = tuple(map(min, zip(*offsets, strict=True)))
        self._high = tuple(map(max, zip(*ends, strict=True)))
        self._boxes: Sequence[tuple[int, Shape, Shape]] = ()
        self._halves: Sequence[_BoxTree] = ()
        counts = [len(set(starts)) for starts in zip(*offsets, strict=True)]
        if len(numbers) <= self._LEAF or max(counts, default=1) == 1:
            self._boxes = list(zip(numbers, offsets, ends, strict=True))
        else:
            dim = counts.index(max(counts))
            ordered = sorted(numbers, key=lambda number: found[number][1][dim])
            middle = len(ordered) // 2
            self._halves = _BoxTree(found, ordered[:middle]), _BoxTree(found, ordered[middle:])

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
