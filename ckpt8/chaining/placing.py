"""Decides which container a checkpoint of a run gets, and whether it is there already."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt8.chaining.jobs import Job, Settings
from ckpt8.chaining.rest import last_change, look_at
from ckpt8.compressing.compress import default_target
from ckpt8.container.header import is_container
from ckpt8.container.reader import ContainerReader
from ckpt8.container.target_names import CONTAINER, SUFFIXES, original_name
from ckpt8.core.errors import Ckpt8Error, OutputError


def placed(source: Path, settings: Settings, *, force: bool, taken: set[Path]) -> Job:
    """The job for ``source``: its container is ``run.ckpt8``, or ``run.bin.ckpt8`` where that belongs to ``run.pt``.

    ``taken`` are the targets of other jobs; that of this one is added. A container of another checkpoint of the same
    name is in the way, unless ``force`` replaces it.
    """
    places = [path for path in _places(source) if path not in taken]
    target = next((path for path in places if source_name(path) == source.name), None)
    is_present = target is not None
    target = target or next((path for path in places if not os.path.lexists(path)), None)
    if target is None and force:
        target = next(iter(places), None)
    if target is None:
        target = _places(source)[0]
        error = OutputError(f"{target}: is in the way of {source}: it was not made from it; move it away")
        return Job(source, target, settings, problem=error)
    taken.add(target)
    is_doubted = is_present and _is_older(target, source)
    return Job(source, target, settings, force=force, present=is_present, doubted=is_doubted)


def _places(source: Path) -> list[Path]:
    """Where the container may be, in the order of preference: only a suffix that says nothing of the step goes."""
    short, long = default_target(source), source.with_name(source.name + CONTAINER)
    return list(dict.fromkeys((short, long) if source.suffix.lower() in SUFFIXES else (long, short)))


def source_name(target: Path) -> str | None:
    """The name of what a container was made from; None for another file, and for a damaged one."""
    try:
        if not is_container(target):
            return None
        with ContainerReader(target) as reader:
            return original_name(reader.manifest)
    except Ckpt8Error:
        return None


def _is_older(target: Path, source: Path) -> bool:
    try:
        return target.stat().st_mtime_ns < last_change(look_at(source))
    except OSError:
        return True
