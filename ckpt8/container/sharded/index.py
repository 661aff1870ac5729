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
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckpt8.container.sharded import INDEX
from ckpt8.container.sharded.covering import check_cover
from ckpt8.container.sharded.layouts import Grid, Layout, Listed, Shape, Slice
from ckpt8.core.files.atomic import AtomicFile, sync_directory
from ckpt8.core.tensors import DType

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
        found = self.layout.pickled.get(box.offsets) if isinstance(self.layout, Listed) else None
        return None if found is None else Place(box.file, *found)

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
