"""Chooses the base of a new container: one that was asked for, or one of its siblings.

The containers of a chain are numbered from its key on, which has the number 0. The base of number i is number
i & (i - 1), i without its lowest bit: so the 16 containers of a chain are at most four links from their key, and most
of them near to their base in time.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Generator, Iterable, Iterator
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
from ckpt8.container.kept_bases import KeptBases, containers_in, drop_unneeded, links_in
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.reading import find_sharded
from ckpt8.core.arguments import described, is_path
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.text import natural_order

AUTO = "auto"
LENGTH = 16
"""The most containers of a chain."""

_MOST_LINKS = 4
_MOST_READ = 64
"""Containers whose manifests are read, at most."""

_CALLER = 11
"""Frames from a warning to the caller of ``save``."""

_unlinked = set[str]()
"""Folders where files cannot be linked, of which somebody was warned."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The base is to be chosen among the containers ``written_once`` beside the target, and the links in ``bases/``.

    It is linked there itself. Where files cannot be linked a delta is written all the same, unless ``only_linked``.
    """

    only_linked: bool = False


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


def only_auto(base: str | None) -> Auto | None:
    """What the argument ``base`` of a framework's integration asks for. Raises UsageError."""
    if base not in (None, AUTO):
        raise UsageError(f"base is {AUTO!r} or None, not {base!r}")
    return None if base is None else Auto(only_linked=True)


@contextlib.contextmanager
def bases_kept(asked: Wanted, target: Path) -> Iterator[KeptBases | None]:
    """The links beside ``target`` until it is written, where its base is to be chosen; then what none needs goes."""
    if not isinstance(asked, Auto):
        yield None
        return
    folder = Path(os.path.realpath(target)).parent
    try:
        with KeptBases(folder) as kept:
            if target.exists():
                kept.link_needed()  # others may need what is replaced
            yield kept
    finally:
        drop_unneeded(folder)


def open_bases(
    asked: Path | Auto, target: Path, plan: Plan, policy: Policy, kept: KeptBases | None
) -> Generator[OpenBase]:
    """Bases for ``target``, the best first, each open until the next. Of a path raises InputError and UsageError.

    One that is chosen is linked among those that are ``kept``.
    """
    if isinstance(asked, Path):
        with OpenBase(asked) as base:
            base.check_target(target)
            yield base
        return
    if asked.only_linked and is_unlinked(target):
        return
    siblings = _siblings(_candidates(target), plan, policy)
    newest = next(siblings, None)
    place = LENGTH if newest is None else newest.place + 1
    if newest is None or place == LENGTH:
        return
    for each in _best(chain([newest], siblings), newest.key, place):
        # What is below it may be missing, or need the target.
        with contextlib.suppress(InputError, UsageError), OpenBase(each.path, place) as base:
            base.check_target(target)
            if kept is None or _links(kept, each.path, target, is_needed=asked.only_linked):
                yield base


def is_unlinked(target: Path) -> bool:
    """Whether files could not be linked in the folder of ``target``."""
    return os.path.realpath(target.parent) in _unlinked


def _links(kept: KeptBases, base: Path, target: Path, *, is_needed: bool) -> bool:
    """Whether a base may be one: it was linked, or need not be. Warns once for each folder. Raises InputError."""
    try:
        kept.link(base)
    except OSError as exc:
        if not is_unlinked(target):
            _unlinked.add(os.path.realpath(target.parent))
            then = "checkpoints are saved whole" if is_needed else "removing a base makes its deltas unreadable"
            warnings.warn(
                f"{target.parent}: files cannot be linked there ({exc.strerror}), which keeps the bases of deltas when "
                f"checkpoints are removed; {then}",
                RuntimeWarning,
                stacklevel=_CALLER,
            )
        return not is_needed
    return True


def _candidates(target: Path) -> list[Path]:
    """The containers that may be a base: those beside the target, the newest first, then links to what is gone."""
    beside, links = containers_in(target.parent), links_in(target.parent)
    found = {_inode(target): target}
    for path in (*_newest(written_once(beside)), *_newest(links)):
        found.setdefault(_inode(path), path)
    return list(found.values())[1 : _MOST_READ + 1]


def _inode(path: Path) -> tuple[int, int] | None:
    """What identifies a file; None where there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _newest(paths: Iterable[Path]) -> list[Path]:
    """Files, the newest first."""
    times = {}
    for path in paths:
        with contextlib.suppress(OSError):
            times[path] = path.stat().st_mtime_ns, natural_order(path.name)
    return sorted(times, key=times.__getitem__, reverse=True)


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
