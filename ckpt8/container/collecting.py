"""Makes the index of what all ranks have written, from a few short columns of each.

Joins the parts of an index as well, where ranks have written on their own.
"""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpt8.container.sharded import GlobalTensor, Grid, Layout, Listed, Place, Shape, ShardedIndex
from ckpt8.core.errors import InputError, require
from ckpt8.core.tensors import DType
from ckpt8.core.text import listed

_Found = tuple[Any, Any, Any]
"""File numbers, offsets and sizes of the boxes of a tensor, as arrays in order of the offsets; of those with the same
offsets the largest come first."""

_Pickled = Mapping[tuple[int, Shape], tuple[int, int]]
"""Start and length of boxes that torch.save wrote, by number of the file and offsets."""


@dataclass(frozen=True, slots=True)
class RankFile:
    """What a rank says of its file: short, since one process gets that of all ranks.

    ``names`` are those of the tensors of its slices, ``dims`` their dimensions and ``boxes`` the offsets and sizes of
    each slice, all three compressed. ``objects`` are start and length of values that torch.save wrote, and ``pickled``
    those of slices. ``unspent`` has the numbers of slices that are not kept within a budget, by reason.
    """

    file: str
    seal: str
    names: bytes
    dims: bytes
    boxes: bytes
    objects: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    pickled: Mapping[tuple[str, Shape], tuple[int, int]] = field(default_factory=dict)
    unspent: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, file: str, seal: str, slices: Sequence[tuple[str, Shape, Shape]], **rest: Any) -> RankFile:
        """That of a file with ``slices``: name, offsets and sizes of each; none is empty."""
        names = json.dumps([name for name, _, _ in slices]).encode()
        dims = np.array([len(offsets) for _, offsets, _ in slices], np.uint8).tobytes()
        boxes = np.array([*chain.from_iterable((*offsets, *sizes) for _, offsets, sizes in slices)], np.int64).tobytes()
        return cls(file, seal, zlib.compress(names, 1), zlib.compress(dims, 1), zlib.compress(boxes, 1), **rest)


def collect(files: Sequence[RankFile], shapes: Mapping[str, Shape]) -> dict[str, Layout]:
    """The layouts of all tensors with slices in ``files``, which are numbered by their order.

    Raises KeyError for a tensor that is not in ``shapes``.
    """
    numbers: dict[str, int] = {}
    known: dict[bytes, Any] = {}
    rows: dict[int, list[tuple[Any, Any, Any]]] = defaultdict(list)
    pickled: dict[str, dict[tuple[int, Shape], tuple[int, int]]] = defaultdict(dict)
    for number, file in enumerate(files):
        if file.names not in known:  # those of most ranks are the same
            names = json.loads(zlib.decompress(file.names))
            known[file.names] = np.array([numbers.setdefault(name, len(numbers)) for name in names], np.int64)
        for (name, offsets), place in file.pickled.items():
            pickled[name][number, offsets] = place
        tensors, dims = known[file.names], np.frombuffer(zlib.decompress(file.dims), np.uint8)
        flat = np.frombuffer(zlib.decompress(file.boxes), np.int64)
        starts = np.cumsum(2 * dims.astype(np.int64)) - 2 * dims
        for count in np.unique(dims).tolist():
            chosen = np.flatnonzero(dims == count)
            boxes = flat[starts[chosen][:, None] + np.arange(2 * count)]
            rows[count].append((tensors[chosen], np.full(len(chosen), number), boxes))
    names = list(numbers)
    layouts: dict[str, Layout] = {}
    for count, parts in rows.items():
        tensors, owners, boxes = (np.concatenate(column) for column in zip(*parts, strict=True))
        volumes = boxes[:, count:].prod(axis=1)
        order = np.lexsort((-volumes, *(boxes[:, k] for k in reversed(range(count))), tensors))
        tensors, owners, boxes = tensors[order], owners[order], boxes[order]
        for first, stop in pairwise([0, *(np.flatnonzero(np.diff(tensors)) + 1).tolist(), len(tensors)]):
            name = names[int(tensors[first])]
            own = owners[first:stop], boxes[first:stop, :count], boxes[first:stop, count:]
            layouts[name] = layout_of(own, shapes[name], pickled.get(name, {}))
    return layouts


def layout_of(arrays: _Found, shape: Shape, pickled: _Pickled) -> Layout:
    """The layout of a tensor: a grid where its boxes are one. Of boxes with the same offsets it has the first."""
    owners, offsets, sizes = arrays
    if len(owners) > 1:
        new = np.append(True, (np.diff(offsets, axis=0) != 0).any(axis=1))
        owners, offsets, sizes = owners[new], offsets[new], sizes[new]
    if not pickled and (grid := _grid(owners, offsets, sizes, shape)) is not None:
        return grid
    boxes = [
        (owner, tuple(at), tuple(size))
        for owner, at, size in zip(owners.tolist(), offsets.tolist(), sizes.tolist(), strict=True)
    ]
    return Listed(boxes, {at: pickled[owner, at] for owner, at, _ in boxes if (owner, at) in pickled})


def _grid(owners: Any, offsets: Any, sizes: Any, shape: Shape) -> Grid | None:
    """The grid of boxes in order of their offsets; None where they are none, or do not cover the tensor."""
    firsts = [np.unique(column) for column in offsets.T]
    counts = [len(first) for first in firsts]
    if (
        prod(counts) != len(owners)
        or any(first[0] for first in firsts)
        or tuple((offsets[-1] + sizes[-1]).tolist()) != shape
    ):
        return None
    cuts = []
    for k, first in enumerate(firsts):
        along = [-1 if j == k else 1 for j in range(len(firsts))]
        own = np.diff(np.append(first, shape[k]))
        if (offsets[:, k].reshape(counts) != first.reshape(along)).any() or (
            sizes[:, k].reshape(counts) != own.reshape(along)
        ).any():
            return None
        cuts.append(_runs(own))
    return Grid(cuts, _steps(owners.tolist()))


def _runs(values: Any) -> list[list[int]]:
    """[value, count] of runs of equal values."""
    edges = np.append(np.flatnonzero(np.diff(values)) + 1, len(values))
    counts = np.diff(edges, prepend=0)
    return [list(run) for run in zip(values[edges - 1].tolist(), counts.tolist(), strict=True)]


def _steps(numbers: Sequence[int]) -> list[int | list[int]]:
    """The numbers, three and more in even steps as [first, count, step]."""
    steps: list[int | list[int]] = []
    at = 0
    while at < len(numbers):
        step = numbers[at + 1] - numbers[at] if at + 1 < len(numbers) else 0
        stop = at + 1
        while stop < len(numbers) and numbers[stop] - numbers[stop - 1] == step:
            stop += 1
        count = stop - at if stop - at > 2 else 1
        steps.append(numbers[at] if count == 1 else [numbers[at], count, step])
        at += count
    return steps


_SHOWN = 5


def join(directory: Path, parts: Mapping[str, ShardedIndex], rank: int | None) -> ShardedIndex:
    """The index of all ranks; ``parts`` are by the names of their files. ``rank`` is that of ``read_index``.

    Raises InputError where parts are missing, or do not belong together.
    """
    world = _check(directory, parts)
    # Of equal boxes, of whole tensors, and of objects of one name, the first counts.
    order = sorted(parts.values(), key=lambda part: part.part is not None and part.part.rank != rank)
    files = [_rank_file(directory, file) for file in order]
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, DType] = {}
    for file in order:
        for name, tensor in file.tensors.items():
            shape, dtype = shapes.setdefault(name, tensor.shape), dtypes.setdefault(name, tensor.dtype)
            if (shape, dtype) != (tensor.shape, tensor.dtype):
                raise InputError(f"{directory}: {name}: ranks have saved tensors of this name that are not alike")
    layouts, names = collect(files, shapes), [file.file for file in files]
    layouts |= {name: _of_one_rank(name, order) or layout for name, layout in layouts.items() if not layout.is_whole}
    objects: dict[str, Place] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for file in reversed(order):
        objects |= file.objects
        paths |= file.paths or {}
    if shared := shapes.keys() & objects.keys():
        raise InputError(f"{directory}: {min(shared)}: is a tensor to some ranks and none to others")
    return ShardedIndex(
        {file.file: file.seal for file in files if file.file},
        {name: GlobalTensor(dtypes[name], shapes[name], layouts.get(name, Listed([])), names) for name in shapes},
        objects,
        None if any(file.paths is None for file in order) else paths,
        order[0].dcp,
        next(file.part.save for file in order if file.part is not None),
        joined=world,
    )


def _check(directory: Path, parts: Mapping[str, ShardedIndex]) -> int:
    """The number of ranks. Raises InputError unless the parts are those of one save, and all of them."""
    known = {}
    for name, rank_file in parts.items():
        if rank_file.part is None or rank_file.part.name != name:
            raise InputError(f"{directory / name}: is not the part of the index that its name says")
        known[rank_file.part.rank] = rank_file.part
    first = min(known)
    others = [part.rank for part in known.values() if part[1:] != known[first][1:]]
    require(
        not others,
        f"{directory}: ranks {listed([first, *others], _SHOWN)} have written parts of different saves; save into "
        "another directory",
    )
    world = known[first].world
    missing = [str(rank) for rank in range(min(world, len(known) + _SHOWN + 1)) if rank not in known]
    require(
        len(known) >= world,
        f"{directory}: has {len(known)} of {world} parts of its index, not those of ranks "
        f"{listed(missing, _SHOWN)}; the save was interrupted before it was complete",
    )
    return world


def _of_one_rank(name: str, parts: Sequence[ShardedIndex]) -> Layout | None:
    """The layout of a tensor in the first of ``parts`` that has all of it: ranks may cut their copies otherwise."""
    for number, part in enumerate(parts):
        layout = part.tensors[name].layout if name in part.tensors else None
        if isinstance(layout, Grid):
            return Grid([cuts.runs for cuts in layout.cuts], [[number, len(layout), 0]])
    return None


def _rank_file(directory: Path, part: ShardedIndex) -> RankFile:
    """What the rank has said of its file; of no file where it had nothing to save."""
    files = list(part.files.items())
    require(len(files) <= 1, f"{directory}: the part of a rank names {len(files)} files")
    boxes = [(name, box, tensor.pickled(box)) for name, tensor in part.tensors.items() for box in tensor.boxes()]
    slices = [(name, box.offsets, box.sizes) for name, box, _ in boxes]
    pickled = {(name, box.offsets): (place.start, place.length) for name, box, place in boxes if place is not None}
    return RankFile.of(*(files[0] if files else ("", "")), slices, pickled=pickled)
