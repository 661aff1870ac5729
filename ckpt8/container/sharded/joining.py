"""Joins the parts of an index that ranks have written on their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt8.container.sharded.collecting import RankFile, collect
from ckpt8.container.sharded.index import GlobalTensor, Place, ShardedIndex
from ckpt8.container.sharded.layouts import Grid, Layout, Listed, Shape
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType
from ckpt8.core.text import listed

_SHOWN = 5


def join(directory: Path, parts: Mapping[str, ShardedIndex], rank: int | None) -> ShardedIndex:
    """The index of all ranks; ``parts`` are by the names of their files. ``rank`` is that of ``read_index``.

    Raises InputError where parts are missing, or do not belong together.
    """
    world = _check(directory, parts)
    # Of equal boxes, of whole tensors, and of objects of one name, the first counts.
    order = sorted(parts.values(), key=lambda each: each.part is not None and each.part.rank != rank)
    files = [_rank_file(directory, each) for each in order]
    shapes: dict[str, Shape] = {}
    dtypes: dict[str, DType] = {}
    for each in order:
        for name, tensor in each.tensors.items():
            known = shapes.setdefault(name, tensor.shape), dtypes.setdefault(name, tensor.dtype)
            if known != (tensor.shape, tensor.dtype):
                raise InputError(f"{directory}: {name}: ranks have saved tensors of this name that are not alike")
    layouts, names = collect(files, shapes), [each.file for each in files]
    for name, layout in layouts.items():
        if not layout.is_whole:
            layouts[name] = _of_one_rank(name, order) or layout
    objects: dict[str, Place] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for each in reversed(order):
        objects |= each.objects
        paths |= each.paths or {}
    if shapes.keys() & objects.keys():
        name = min(shapes.keys() & objects.keys())
        raise InputError(f"{directory}: {name}: is a tensor to some ranks and none to others")
    return ShardedIndex(
        {each.file: each.seal for each in files if each.file},
        {name: GlobalTensor(dtypes[name], shapes[name], layouts.get(name, Listed([])), names) for name in shapes},
        objects,
        None if any(each.paths is None for each in order) else paths,
        order[0].dcp,
        next(each.part.save for each in order if each.part is not None),
        joined=world,
    )


def _check(directory: Path, parts: Mapping[str, ShardedIndex]) -> int:
    """The number of ranks. Raises InputError unless the parts are those of one save, and all of them."""
    known = {}
    for name, each in parts.items():
        if each.part is None or each.part.name != name:
            raise InputError(f"{directory / name}: is not the part of the index that its name says")
        known[each.part.rank] = each.part
    first = min(known)
    others = [part.rank for part in known.values() if part[1:] != known[first][1:]]
    if others:
        raise InputError(
            f"{directory}: ranks {listed([first, *others], _SHOWN)} have written parts of different saves; save into "
            "another directory"
        )
    world = known[first].world
    missing = [str(rank) for rank in range(min(world, len(known) + _SHOWN + 1)) if rank not in known]
    if len(known) < world:
        raise InputError(
            f"{directory}: has {len(known)} of {world} parts of its index, not those of ranks "
            f"{listed(missing, _SHOWN)}; the save was interrupted before it was complete"
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
    if len(files) > 1:
        raise InputError(f"{directory}: the part of a rank names {len(files)} files")
    slices, pickled = [], {}
    for name, tensor in part.tensors.items():
        for box in tensor.boxes():
            slices.append((name, box.offsets, box.sizes))
            if (place := tensor.pickled(box)) is not None:
                pickled[name, box.offsets] = place.start, place.length
    return RankFile.of(*(files[0] if files else ("", "")), slices, pickled=pickled)
