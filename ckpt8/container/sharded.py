"""Directories of containers of ranks, which hold slices of tensors: their index, and what a manifest says of slices.

No torch.distributed is needed. ``collecting`` makes the index of what all ranks have written, ``joined`` opens the
containers as one.

The index says what the slices make together, and which file holds which: see FORMAT.md. Reading it checks all of it:
nobody has to be trusted who could write it.

Most tensors are cut into grids, which take a few numbers however large they are.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from itertools import accumulate, chain, product
from math import prod
from operator import add, lt
from pathlib import Path
from typing import Any, NamedTuple

from ckpt8.container.checks import name_problem
from ckpt8.container.manifest import SEAL, Manifest, TensorRecord
from ckpt8.core.errors import DamagedError, InputError, UnsupportedError, require
from ckpt8.core.files.atomic import AtomicFile, sync_directory
from ckpt8.core.files.source_file import ByteRange, crc32, open_range, scan
from ckpt8.core.json_text import (
    LARGEST,
    Fields,
    as_count,
    as_counts,
    as_list,
    as_object,
    as_text,
    is_unicode,
    or_null,
    parse_json,
)
from ckpt8.core.tensors import Box, DType
from ckpt8.core.text import shown

INDEX = "ckpt8-dcp.json"
"""The file that makes a directory a checkpoint."""

FOLDER = "ckpt8"
"""The folder for such a directory in the checkpoint of a trainer, which keeps its own files beside it."""

PART = r"ckpt8-dcp\.\d+\.json"
"""Pattern of the names of parts of an index: all of them together make a directory a checkpoint as well."""

RANK_FILE = r"__\d+_\d+\.ckpt8"
"""Pattern of the names of the containers: the number of the rank, and of its file."""


def is_part(name: str) -> bool:
    """Whether a file has the name of a part of an index."""
    return re.fullmatch(PART, name) is not None


Shape = tuple[int, ...]


class Slice(NamedTuple):
    """A box of a tensor, and the file that holds it."""

    file: str
    offsets: Shape
    sizes: Shape


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
    """Whether the boxes cover the tensor, each element once, as far as the layout tells."""

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
        return self._within(
            [
                range(cuts.at(offset), cuts.at(offset + size - 1) + 1)
                for cuts, offset, size in zip(self.cuts, offsets, sizes, strict=True)
            ]
        )

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


Layout = Grid | Listed
"""The boxes of one tensor. Each is not empty and lies in the tensor."""


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


def check_cover(where: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise InputError unless every element of ``shape`` is in one box.

    Compares corners. Those of a box count 1 and -1 in turn, so that they cancel out where boxes meet. The corners of
    the whole tensor are left if, and only if, the boxes fill it without overlap.
    """
    cut_dims = [dim for dim in range(len(shape)) if any(sizes[dim] != shape[dim] for _, sizes in boxes)]
    require(len(cut_dims) <= MAX_SHARDED, f"{where}: is cut along {len(cut_dims)} dimensions, more than {MAX_SHARDED}")
    corners: Counter[tuple[int, ...]] = Counter()
    whole = (0,) * len(shape), shape
    for (offsets, sizes), weight in chain(((box, 1) for box in boxes), [(whole, -1)]):
        for corner in product(*[((offsets[dim], 1), (offsets[dim] + sizes[dim], -1)) for dim in cut_dims]):
            corners[tuple(place for place, _ in corner)] += weight * prod(sign for _, sign in corner)
    if any(corners.values()):
        there, count = sum(prod(sizes) for _, sizes in boxes), prod(shape)
        missing = f"slices are missing: {there} of {count} elements are there; the checkpoint is not complete"
        raise InputError(f"{where}: {missing if there < count else 'its slices overlap'}")


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
        place = None if isinstance(self.layout, Grid) else self.layout.pickled.get(box.offsets)
        return None if place is None else Place(box.file, *place)

    def to_json(self) -> dict[str, Any]:
        """The values of JSON."""
        tree: dict[str, Any] = {"dtype": self.dtype.label, "shape": list(self.shape)}
        if isinstance(self.layout, Grid):
            return tree | {"cuts": [cuts.runs for cuts in self.layout.cuts], "owners": self.layout.owners}
        boxes = list(self.layout.boxes())
        tree["boxes"] = [[file, list(offsets), list(sizes)] for file, offsets, sizes in boxes]
        if self.layout.pickled:
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
        text = json.dumps(tree, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")[:-1]
        return b'%b%b%08x"}' % (text, _CHECKSUM, crc32(text))

    def write(self, directory: Path) -> None:
        """Write the file into the directory, which is a checkpoint from then on. Raises OutputError."""
        with AtomicFile(directory / (INDEX if self.part is None else self.part.name), force=True, tidy=False) as output:
            with output.guard():
                output.file.write(self.to_bytes())
                sync_directory(directory.resolve().parent)  # a run makes a new directory for every checkpoint
            output.publish()


_CHECKSUM = b',"crc32":"'
"""What is behind the bytes that the checksum counts; an index of an earlier version has none."""

_LONGEST = 512 << 20
"""Bytes of an index: that of a thousand ranks has ten million."""

_FREE_CELLS, _CELLS = 1 << 16, 64
"""Cells of grids that any index may have, and further ones for each of its bytes: a few numbers can say very many."""


def is_sharded(directory: Path) -> bool:
    """Whether a directory is a checkpoint of containers of ranks, or a part of one; False where it cannot be read."""
    with suppress(OSError):
        if directory.is_dir():
            return (directory / INDEX).exists() or any(is_part(entry.name) for entry in scan(directory))
    return False


def find_sharded(path: Path) -> Path | None:
    """The directory of containers of ranks at ``path``, or in the folder that a trainer's checkpoint has for it.

    None where there is neither.
    """
    if is_sharded(path):
        return path
    folder = path / FOLDER
    return folder if is_sharded(folder) else None


def has_other_parts(directory: Path, part: Part) -> bool:
    """Whether a directory holds an index, or parts that would not belong with ``part``, which is not written yet.

    The first rank looks for parts of ranks that its save does not have, the others at that of the first rank alone:
    a list of the directory would be as long as there are ranks.
    """
    if (directory / INDEX).exists() or (directory / part.name).exists():
        return True
    if not part.rank:
        own = {part._replace(rank=rank).name for rank in range(part.world)}
        return any(name not in own for name in part_names(directory))
    first = directory / part._replace(rank=0).name
    if not first.exists():
        return False
    stated = read_file(first).part
    return stated is None or stated[1:] != part[1:]


def part_names(directory: Path) -> list[str]:
    """The names of the parts of an index, by rank."""
    try:
        names = [entry.name for entry in scan(directory) if is_part(entry.name)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as exc:
        raise InputError(f"{directory}: cannot be read: {exc.strerror}") from exc
    return sorted(names, key=lambda name: (len(name), name))


def read_file(path: Path, damage: dict[str, str] | None = None) -> ShardedIndex:
    """The index of one file, or a part of one. Raises InputError, UnsupportedError.

    Where its checksum does not match, ``damage`` gets that by the name of the file; without it raises DamagedError.
    """
    with closing(open_range(ByteRange.of(path))) as file:
        require(file.source.length <= _LONGEST, f"{path}: has {file.source.length} bytes, more than {_LONGEST}")
        text = file.read(0, file.source.length)
    head, mark, stated = text.rpartition(_CHECKSUM)
    if mark and stated != b'%08x"}' % crc32(head):
        problem = "checksum does not match; the file is damaged"
        if damage is None:
            raise DamagedError(f"{path}: {problem}")
        damage[path.name] = problem
    return parse_index(text, str(path))


def refuse_directory(path: Path) -> None:
    """Raise InputError, which says why, for a directory that is no checkpoint of ckpt8."""
    with suppress(OSError):
        if path.is_dir():
            raise InputError(explain_missing(path))


def explain_missing(directory: Path) -> str:
    """Says why a directory is no checkpoint of ckpt8, in one line."""
    if (directory / ".metadata").exists():
        return f"{directory}: was written by torch's own FileSystemWriter; read it with FileSystemReader"
    if directory.is_dir() and any(fnmatch(entry.name, "__*.ckpt8") for entry in scan(directory)):
        return f"{directory}: has no {INDEX}; the save was interrupted before it was complete"
    return f"{directory}: holds no checkpoint of Ckpt8StorageWriter (no {INDEX}); give a .ckpt8, or such a directory"


def parse_index(text: bytes, where: str) -> ShardedIndex:
    """The index of that text. Raises as ``read_file``."""
    fields = Fields(parse_json(text, where), f"{where}:")
    require(fields.read("format", as_text) == FORMAT, f"{where}: is not the index of a checkpoint of ckpt8")
    version = fields.read("version", as_text)
    require(
        version.partition(".")[0] == VERSION.partition(".")[0],
        f"{where}: has version {version}; this ckpt8 reads version {VERSION}",
        UnsupportedError,
    )
    files = _read_files(fields, where)
    names = list(files)
    tensors = {
        name: _read_tensor(Fields(value, f"{where}: {shown(name)}"), names)
        for name, value in fields.read("tensors", as_object).items()
    }
    objects = {
        name: _read_place(fields, name, value, names) for name, value in fields.read("objects", as_object).items()
    }
    fields.require(not tensors.keys() & objects.keys(), "objects")
    cells = sum(len(tensor.layout) for tensor in tensors.values())
    fields.require(cells <= _FREE_CELLS + _CELLS * len(text), "tensors")
    paths = fields.read("paths", or_null(as_object))
    for name, path in (paths or {}).items():
        fields.require(isinstance(path, list) and path and all(type(key) in (str, int) for key in path), name)
    for name in chain(tensors, objects, *(paths or {}).values()):
        if isinstance(name, str) and not is_unicode(name):
            raise InputError(f"{where}: names the value {shown(name)}, which is not valid UTF-8")
    return ShardedIndex(
        files,
        tensors,
        objects,
        None if paths is None else {name: tuple(path) for name, path in paths.items()},
        fields.read("dcp", or_null(as_text)),
        fields.read("save_id", or_null(as_text)),
        _read_part(fields),
    )


def _read_part(fields: Fields) -> Part | None:
    stored = fields.read("part", or_null(as_object))
    if stored is None:
        return None
    part = fields.nested(stored).record(Part, {"rank": as_count, "world": as_count, "save": as_text})
    fields.require(part.rank < part.world, "rank")
    return part


def _read_files(fields: Fields, where: str) -> dict[str, str]:
    seals: dict[str, str] = {}
    for pair in fields.read("files", as_list):
        match pair:
            case [str(name), str(seal)] if SEAL.fullmatch(seal) and name not in seals:
                if (problem := name_problem(name)) is not None:
                    raise InputError(f"{where}: names the file {shown(name)}, which {problem}")
                seals[name] = seal
            case _:
                raise fields.fail("files")
    return seals


def _read_place(fields: Fields, key: str, value: Any, names: Sequence[str]) -> Place:
    fields.require(_counts(value, 3) and value[0] < len(names), key)
    return Place(names[value[0]], value[1], value[2])


def _counts(value: Any, length: int) -> bool:
    """Whether this is a list of so many counts."""
    return isinstance(value, list) and len(value) == length and all(type(k) is int and 0 <= k < LARGEST for k in value)


def _read_tensor(fields: Fields, names: Sequence[str]) -> GlobalTensor:
    shape = tuple(fields.read("shape", as_counts))
    fields.require(prod(max(size, 1) for size in shape) < LARGEST, "shape")
    read = _read_grid if fields.any("boxes") is None else _read_boxes
    return GlobalTensor(
        fields.read("dtype", lambda label: DType.from_label(as_text(label))),
        shape,
        read(fields, shape, len(names)),
        names,
    )


def _read_grid(fields: Fields, shape: Shape, files: int) -> Layout:
    cuts, owners = fields.read("cuts", as_list), fields.read("owners", as_list)
    fields.require(
        all(isinstance(runs, list) and all(_counts(run, 2) and all(run) for run in runs) for runs in cuts), "cuts"
    )
    fields.require(all(_is_owner(owner, files) for owner in owners), "owners")
    grid = Grid(cuts, owners)
    fields.require(grid.shape == shape and all(shape), "cuts")
    fields.require(grid.owned == len(grid), "owners")
    return grid


def _is_owner(value: Any, files: int) -> bool:
    """Whether this is the number of a file, or [first, count, step] of such numbers."""
    match value:
        case [int(first), int(count), int(step)] if not any(isinstance(number, bool) for number in value):
            return 0 < count < LARGEST and 0 <= first < files and 0 <= (first + (count - 1) * step) < files
    return type(value) is int and 0 <= value < files


def _read_boxes(fields: Fields, shape: Shape, files: int) -> Layout:
    dims = len(shape)
    boxes: list[tuple[int, Shape, Shape]] = []
    for box in fields.read("boxes", as_list):
        match box:
            case [int(file), offsets, sizes] if _counts(offsets, dims) and _counts(sizes, dims) and all(sizes):
                inside = all(at + size <= whole for at, size, whole in zip(offsets, sizes, shape, strict=True))
                if inside and _is_owner(file, files):
                    boxes.append((file, tuple(offsets), tuple(sizes)))
                    continue
        raise fields.fail("boxes")
    fields.require(len({offsets for _, offsets, _ in boxes}) == len(boxes), "boxes")
    pickled = [None] * len(boxes) if fields.any("pickled") is None else fields.read("pickled", as_list)
    fields.require(
        len(pickled) == len(boxes) and all(place is None or _counts(place, 2) for place in pickled), "pickled"
    )
    return Listed(
        boxes,
        {
            offsets: (place[0], place[1])
            for (_, offsets, _), place in zip(boxes, pickled, strict=True)
            if place is not None
        },
    )


SliceKey = tuple[str, tuple[int, ...]]
"""The name of a tensor in the state dict of all ranks, and the offsets of a part of it."""


def slices_of(manifest: Manifest) -> dict[SliceKey, TensorRecord]:
    """The tensors of a container that are slices, by what they are slices of; none in most containers."""
    return {(piece.name, tuple(piece.offsets)): manifest.tensors[piece.tensor] for piece in manifest.slices}
