"""``ckpt8.runs``: an overview of all checkpoints of a run, from the heads of their files."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ckpt8.container import bases
from ckpt8.container.base_record import BaseRecord
from ckpt8.container.target_names import CONTAINER, container_names
from ckpt8.core.arguments import checked
from ckpt8.core.collection import without_collection
from ckpt8.core.errors import InputError
from ckpt8.core.files.urls import refuse_url
from ckpt8.inspecting.runs.finding import find
from ckpt8.inspecting.runs.reading import Row, read
from ckpt8.inspecting.runs.record import MISSING, Run, RunRecord


@checked
def runs(directory: str | os.PathLike[str]) -> Run:
    """The checkpoints in a directory and in folders below it, compressed or not. Reads heads, no tensor.

    A damaged file is a record that says so. Raises InputError where there is no checkpoint at all.

    >>> [(record.name, record.kind, record.raw, record.step) for record in ckpt8.runs(".")]
    [('run.ckpt8', 'key', 'run.pt', 1)]
    """
    root = Path(directory)
    refuse_url(root)
    if root.is_file():
        raise InputError(f"{root}: is a file; give the folder of a run")
    found = find(root)
    with without_collection():
        rows = _joined([row for place in found.places if (row := read(place)) is not None])
    if not rows:
        raise InputError(f"{root}: holds no checkpoint, nor do the folders in it")
    listed = {seal: row.record for row in rows for seal in row.seals}
    for row in rows:
        row.record.base = _base_of(row, listed, root)
    records = sorted((row.record for row in rows), key=_order)
    return Run(str(root), records, _kept(found.bases, rows))


def _joined(rows: Sequence[Row]) -> list[Row]:
    """The rows, those of what a container was made from joined with that of the container."""
    containers = {row.path: row for row in rows if row.path.suffix == CONTAINER}
    found = []
    for row in rows:
        container = None if row.path in containers else _container_of(row, containers)
        if container is None:
            found.append(row)
        else:
            _join(container, row)
    return found


def _container_of(raw: Row, containers: Mapping[Path, Row]) -> Row | None:
    """The container of a checkpoint that is not compressed, or of the directory that it is in."""
    for path in (raw.path, *raw.path.parents):
        for name in container_names(path.name) if path.name else ():
            container = containers.get(path.with_name(name))
            if container is not None and container.original in (None, path.name):
                return container if path != raw.path or _are_one(container.record, raw.record) else None
    return None


def _are_one(container: RunRecord, raw: RunRecord) -> bool:
    """Whether a container was made from this checkpoint, and not from an earlier one of the same name."""
    if container.damage is not None or raw.damage is not None:
        return True
    is_same_step = container.step == raw.step or container.step_from != raw.step_from
    return is_same_step and container.bytes == raw.bytes


def _join(container: Row, raw: Row) -> None:
    ours, theirs = container.record, raw.record
    ours.raw = theirs.name if ours.raw is None else f"{ours.raw}, {theirs.name}"
    ours.raw_bytes += theirs.stored_bytes
    ours.damage = ours.damage or theirs.damage
    container.inodes |= raw.inodes
    if ours.step_from != "file" and theirs.step is not None:
        ours.step, ours.step_from = theirs.step, theirs.step_from
    for name in ("epoch", "loss", "val_loss"):
        if getattr(ours, name) is None:
            setattr(ours, name, getattr(theirs, name))


def _order(record: RunRecord) -> tuple[object, ...]:
    step, epoch = (math.inf if value is None else value for value in (record.step, record.epoch))
    return record.run, step, epoch, record.time, record.name


def _base_of(row: Row, listed: Mapping[str, RunRecord], root: Path) -> str | None:
    """The name of the base, that of a listed checkpoint if one is the same file; None without one."""
    found = [_found(path, base, listed.get(base.seal), root) for path, base in row.bases]
    return MISSING if MISSING in found else next(iter(found), None)


def _found(container: Path, base: BaseRecord, record: RunRecord | None, root: Path) -> str:
    # Readers see what is beside the delta, and not what is listed in the folder of another run.
    if record is not None and root / record.run == container.parent:
        return record.name
    try:
        path = bases.find_base(container, base, bases.directories())
    except InputError:
        return MISSING
    if record is not None:
        return record.name
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path)


def _kept(files: Iterable[Path], rows: Iterable[Row]) -> int:
    """The bytes of bases that are no listed checkpoint under another name."""
    seen = {inode for row in rows for inode in row.inodes}
    total = 0
    for path in files:
        try:
            status = path.stat()
        except OSError:
            continue  # gone since the folder was listed
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            total += status.st_size
    return total
