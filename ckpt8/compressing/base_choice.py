"""Chooses the base of a new container: one that was asked for, or one of its siblings.

The containers of a chain are numbered from its key on, which has the number 0. The base of number i is number
i & (i - 1), i without its lowest bit: so the 16 containers of a chain are at most four links from their key, and most
of them near to their base in time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ckpt8.checkpoint.run_folder import written_once
from ckpt8.compressing.open_base import OpenBase
from ckpt8.compressing.partners import fits
from ckpt8.compressing.plan import Plan
from ckpt8.compressing.policy import Policy
from ckpt8.container.json_fields import is_unicode
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.reading import find_sharded
from ckpt8.container.target_names import CONTAINER
from ckpt8.core.arguments import described, is_path
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.text import natural_order

AUTO = "auto"
LENGTH = 16
"""The most containers of a chain."""

_MOST_LINKS = 4
_MOST_READ = 64
"""Containers whose manifests are read, at most."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The base is to be chosen among ``candidates``; None are the containers ``written_once`` beside the target."""

    candidates: Sequence[Path] | None = None


Wanted = Path | Auto | None
"""Which base somebody asks for."""


class _Sibling(NamedTuple):
    path: Path
    key: str
    place: int
    links: int


def wanted(base: str | os.PathLike[str] | Auto | None) -> Wanted:
    """What the argument ``base`` of public functions asks for. Raises UsageError."""
    if base is None or isinstance(base, Auto):
        return base
    if not is_path(base):
        raise UsageError(f"base is {described(base)}; give a path, or {AUTO!r}")
    if base == AUTO:
        return Auto()
    if find_sharded(Path(base)) is not None:
        raise UsageError(
            f"{base}: is a directory of containers of ranks, which is no base of a delta; give a .ckpt8 of an earlier "
            f"step, {AUTO!r}, or no base"
        )
    return Path(base)


def open_bases(asked: Path | Auto, target: Path, plan: Plan, policy: Policy) -> Generator[OpenBase]:
    """Bases for ``target``, the best first, each open until the next. Of a path raises InputError and UsageError."""
    if isinstance(asked, Path):
        with OpenBase(asked) as base:
            base.check_target(target)
            yield base
        return
    found = asked.candidates
    if found is None:
        found = written_once(target.parent.glob(f"*{CONTAINER}"))
    siblings = _siblings(_newest(found, target), plan, policy)
    newest = next(siblings, None)
    place = LENGTH if newest is None else newest.place + 1
    if newest is None or place == LENGTH:
        return
    for each in _best(chain([newest], siblings), newest.key, place):
        # What is below it may be missing, or need the target.
        with contextlib.suppress(InputError, UsageError), OpenBase(each.path, place) as base:
            base.check_target(target)
            yield base


def _newest(paths: Iterable[Path], target: Path) -> list[Path]:
    """The newest of some files, the newest first; the target is none of them."""
    own = os.path.realpath(target)
    times = {}
    for path in paths:
        with contextlib.suppress(OSError):
            if path.is_file() and os.path.realpath(path) != own:
                times[path] = path.stat().st_mtime_ns, natural_order(path.name)
    return sorted(times, key=times.__getitem__, reverse=True)[:_MOST_READ]


def _siblings(paths: Iterable[Path], plan: Plan, policy: Policy) -> Iterator[_Sibling]:
    """Containers of earlier states of the tensors of ``plan``."""
    for path in paths:
        with contextlib.suppress(InputError), ContainerReader(path) as reader:
            if fits(plan, policy, reader.manifest) and is_unicode(path.name):
                seal, below = reader.seal.hex(), reader.manifest.base
                yield _Sibling(path, *(below.key, below.place, below.links) if below else (seal, 0, 0))


def _best(siblings: Iterable[_Sibling], key: str, place: int) -> Iterator[_Sibling]:
    """The base of number ``place`` in the chain of ``key``, then the newest with few enough links."""
    newest = regular = None
    for each in siblings:
        if each.key == key and each.links < _MOST_LINKS and each.place < place:
            newest = newest or each
            if each.place == place & (place - 1):
                regular = each
                break
    return (each for each in dict.fromkeys((regular, newest)) if each is not None)
