"""Chooses the base of a new container: one that was asked for, or one of its siblings.

The containers of a chain are numbered from its key on, which has the number 0. The base of number i is number
i & (i - 1), i without its lowest bit: so the 16 containers of a chain are at most four links from their key, and most
of them near to their base in time. A new key may have number 0 as its base too, for the frozen weights that this holds.
It gets the next multiple of 16 as its number, from which the next 15 go on.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Collection, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path

from ckpt8.checkpoint.replacing import written_once
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.compressing.deltas import OpenBase, continue_base, timeless
from ckpt8.compressing.frozen import frozen_in, kept_frozen
from ckpt8.compressing.frozen_file import FrozenFile
from ckpt8.compressing.plan import Plan
from ckpt8.compressing.policy import Policy
from ckpt8.container import header
from ckpt8.container.bases import Stated
from ckpt8.container.kept_bases import KeptBases, containers_in, drop_unneeded, links_in
from ckpt8.container.manifest import Manifest
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import find_sharded
from ckpt8.core.errors import Ckpt8Error, InputError, UsageError
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import RemotePath, resolved
from ckpt8.core.json_text import is_unicode
from ckpt8.core.public import described, is_path
from ckpt8.core.tensors import Role
from ckpt8.core.text import natural_order

AUTO = "auto"
LENGTH = 16
"""The most containers of a chain, from its key on."""

_MOST_LINKS = 4
"""The most containers from a delta to the key of its chain."""

_MOST_READ = 64
"""Containers whose manifests are read, at most."""

_CALLER = 9
"""Frames from a warning to the caller of ``save``."""

_unlinked = set[Path]()
"""Folders where files cannot be linked, of which somebody was warned."""


@dataclass(frozen=True, slots=True)
class Auto:
    """The base is to be chosen among the containers ``written_once`` beside the target, and the links in ``bases/``.

    It is linked there itself. Where files cannot be linked a delta is written all the same, unless ``only_linked``.
    With ``begins`` a new chain begins.
    """

    only_linked: bool = False
    begins: bool = False


Wanted = Path | Auto | None
"""Which base somebody asks for."""


_Sibling = tuple[Path, Stated]
"""A container of an earlier state, and what it says of its place in a chain."""


def wanted(base: str | os.PathLike[str] | Auto | None) -> Wanted:
    """What the argument ``base`` of public functions asks for. Raises UsageError."""
    if base is None or isinstance(base, Auto):
        return base
    if not is_path(base):
        raise UsageError(f"base is {described(base)}; give a path, or {AUTO!r}")
    if base == AUTO:
        return Auto()
    path = as_path(base)
    if find_sharded(path) is not None:
        raise UsageError(
            f"{base}: is a directory of containers of ranks, which is no base of a delta; give a .ckpt8 of an earlier "
            f"step, {AUTO!r}, or no base"
        )
    return path


def only_auto(base: str | None) -> Auto | None:
    """What the argument ``base`` of a framework's integration asks for. Raises UsageError."""
    if base not in (None, AUTO):
        raise UsageError(f"base is {AUTO!r} or None, not {base!r}")
    return None if base is None else Auto(only_linked=True)


def checked_frozen(path: str | os.PathLike[str] | None, asked: Wanted) -> Path | None:
    """The argument ``frozen_from`` of public functions. Raises UsageError."""
    if path is None:
        return None
    if not is_path(path):
        raise UsageError(f"frozen_from is {described(path)}; give a path")
    if isinstance(asked, Path):
        raise UsageError(f"{path}: a file has one base; give frozen_from (--frozen-from) or base (--base)")
    file = as_path(path)
    if find_sharded(file) is not None:
        raise UsageError(f"{path}: is a directory of containers of ranks; frozen weights are in a single checkpoint")
    return file


@contextlib.contextmanager
def bases_kept(asked: Wanted, target: Path, *, packs: bool) -> Iterator[KeptBases | None]:
    """The links beside ``target`` until it is written, where its base is to be chosen or, if it ``packs``, made there.

    Then what none needs goes.
    """
    if not (packs or isinstance(asked, Auto)):
        yield None
        return
    folder = resolved(target).parent
    try:
        with KeptBases(folder) as kept:
            if target.exists():
                kept.link_needed()  # others may need what is replaced
            yield kept
    finally:
        drop_unneeded(folder)


@contextlib.contextmanager
def candidates_kept(asked: Wanted, target: Path) -> Iterator[None]:
    """Every container that may become the base of ``target`` is linked, where it is to be chosen; it may be removed."""
    if not isinstance(asked, Auto):
        yield
        return
    folder = resolved(target).parent
    try:
        with KeptBases(folder) as kept:
            kept.hold(lambda: _files_beside(target))
            yield
    finally:
        drop_unneeded(folder)


def open_bases(
    asked: Path | Auto | None, target: Path, plan: Plan, policy: Policy, kept: KeptBases | None
) -> Generator[OpenBase]:
    """Bases for ``target``, the best first, each open until the next. Of a path raises InputError and UsageError.

    One that is chosen is linked among those that are ``kept``. None of them where none is asked for.
    """
    if isinstance(asked, Path):
        with OpenBase(asked) as base:
            base.check_target(target)
            yield base
        return
    if asked is None or asked.begins:
        return
    siblings = _siblings(_files_beside(target), plan, policy)
    newest = next(siblings, None)
    if newest is None:
        return
    _, stated = newest
    place = stated.place + 1
    if place % LENGTH == 0:
        return
    for path, expected in _best(chain([newest], siblings), stated.key, place):
        # What is below it may be missing, or need the target. Another save may have replaced it.
        with contextlib.suppress(InputError, UsageError), OpenBase(path, place) as base:
            base.check_target(target)
            is_same = base.reader.stated == expected
            if is_same and (kept is None or _links(kept, base, target, is_needed=asked.only_linked)):
                yield base


def _linkable(asked: Wanted, target: Path) -> Auto | None:
    """``asked`` where a base is to be chosen, and need not be linked or can be as far as is known; else None."""
    return asked if isinstance(asked, Auto) and not (asked.only_linked and is_unlinked(target)) else None


def is_unlinked(target: Path) -> bool:
    """Whether files could not be linked in the folder of ``target``, as far as is known."""
    return isinstance(target, RemotePath) or resolved(target.parent) in _unlinked


def _links(kept: KeptBases, base: OpenBase, target: Path, *, is_needed: bool) -> bool:
    """Whether a base may be one: it was linked, or need not be. Warns once for each folder. Raises InputError."""
    try:
        kept.link(base.path)
    except Ckpt8Error:
        raise
    except OSError as exc:
        # Removed or replaced meanwhile; what is held as a candidate is a link.
        if isinstance(exc, FileNotFoundError) or not base.path.exists():
            return base.reader.stated.seal in kept
        if not is_unlinked(target):
            _unlinked.add(resolved(target.parent))
            then = "checkpoints are saved whole" if is_needed else "removing a base makes its deltas unreadable"
            warnings.warn(
                f"{target.parent}: files cannot be linked there ({exc.strerror}), which keeps the bases of deltas when "
                f"checkpoints are removed; {then}",
                RuntimeWarning,
                stacklevel=_CALLER,
            )
        return not is_needed
    # Another save may have replaced the file after it was opened: then that is linked.
    return not kept.has_links or base.reader.stated.seal in kept


def _files_beside(target: Path) -> list[Path]:
    """The containers that may be a base: those beside the target, the newest first, then links to what is gone."""
    beside, links = containers_in(target.parent), links_in(target.parent)
    files = {_inode(target): target}
    for path in (*_newest(written_once(beside)), *_newest(links)):
        files.setdefault(_inode(path), path)
    return list(files.values())[1 : _MOST_READ + 1]


def _inode(path: Path) -> object:
    """What identifies a file, an object by its name; None where there is none."""
    if isinstance(path, RemotePath):
        return path
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _newest(paths: Iterable[Path]) -> list[Path]:
    """Files, the newest first; objects of a store by their names: each time would be a request."""
    times = {}
    for path in paths:
        with contextlib.suppress(OSError):
            changed = 0 if isinstance(path, RemotePath) else path.stat().st_mtime_ns
            times[path] = changed, natural_order(path.name)
    return sorted(times, key=times.__getitem__, reverse=True)


def _siblings(paths: Iterable[Path], plan: Plan, policy: Policy) -> Iterator[_Sibling]:
    """Containers of earlier states of the tensors of ``plan``."""
    for path in paths:
        with contextlib.suppress(InputError), ContainerReader(path) as reader:
            if fits(plan, policy, reader.manifest) and is_unicode(path.name):
                yield path, reader.stated


def _best(siblings: Iterable[_Sibling], key: str, place: int) -> list[_Sibling]:
    """The base of number ``place`` in the chain of ``key``, then the newest with few enough links."""
    newest = regular = None
    first = place - place % LENGTH
    most = _MOST_LINKS + (first > 0)
    for path, stated in siblings:
        if stated.key == key and stated.links < most and first <= stated.place < place:
            newest = newest or (path, stated)
            if stated.place == place & (place - 1):
                regular = path, stated
                break
    return [chosen for chosen in dict.fromkeys((regular, newest)) if chosen is not None]


_BOUND = (Role.WEIGHT, Role.MOMENT1, Role.MOMENT2)


def fits(plan: Plan, policy: Policy, base: Manifest) -> bool:
    """Whether ``base`` holds an earlier state of the weights and moments of ``plan``, compressed as ``policy`` asks.

    Other tensors may come and go: Lightning names scores after the files that had them.
    """
    budget = asdict(policy.budget) if policy.budget else None
    is_asked = (base.preset, base.rules, base.budget) == (policy.preset, [rule.text for rule in policy.rules], budget)
    return is_asked and _has_tensors(plan, base, _BOUND)


def _has_tensors(plan: Plan, base: Manifest, roles: Collection[Role]) -> bool:
    """Whether ``base`` has the tensors of these ``roles`` that ``plan`` has."""
    own_roles = {stream.index: stream.spec.role for stream in plan.streams}
    own = {
        (timeless(tensor.name), tensor.ref.dtype, *tensor.ref.shape)
        for tensor, index in plan.tensors
        if own_roles.get(index) in roles
    }
    return own == {
        (timeless(view.name), view.dtype, *view.shape)
        for view in base.tensors
        if base.storages[view.storage].role in roles
    }


def is_under_way(target: Path, plan: Plan) -> bool:
    """Whether a container beside ``target``, or there, holds an earlier state of the weights of ``plan``."""
    for path in _newest(containers_in(target.parent))[:_MOST_READ]:
        with contextlib.suppress(InputError), ContainerReader(path) as reader:
            if _has_tensors(plan, reader.manifest, (Role.WEIGHT,)):
                return True
    return False


@contextlib.contextmanager
def choose_base(
    asked: Wanted,
    target: Path,
    source: Bundle,
    plan: Plan,
    policy: Policy,
    kept: KeptBases | None,
    threads: int | None,
    frozen_from: FrozenFile | None = None,
) -> Iterator[tuple[Plan, OpenBase | None, str | None]]:
    """``plan`` with its differences to a base of ``target``, and the base, which is open inside the block.

    Without a base: the plan as it is, and the reason why none was found where one was looked for.

    A base that was asked for by its path must be sound. One that is chosen makes the file smaller, and is linked among
    those that are ``kept``. Raises InputError and UsageError, and BrokenBaseError for what is below a chosen base.

    Where none is, the file of ``frozen_from`` becomes the base of the weights that it holds bit for bit. Without it, or
    where it is missing or holds none while the run is under way, that is the first file of the chain before. A file of
    a chain, and one without such a base, holds all other frozen weights exactly itself.
    """
    reason, auto = None, _linkable(asked, target)
    if auto is not None:
        plan = replace(plan, by_index=plan.by_index | kept_frozen(plan, source, policy))
    if asked is not None:
        reason = "no container holds an earlier state of the same tensors under the same settings, in a chain with room"
        chosen = asked if isinstance(asked, Path) else auto
        with closing(open_bases(chosen, target, plan, policy, kept)) as bases:
            for base in bases:
                continued, why_new = continue_base(plan, source, base, threads)
                if why_new is None or isinstance(asked, Path):
                    yield continued, base, None
                    return
                reason = why_new
        auto = _linkable(asked, target)  # a link may have failed meanwhile
        if isinstance(asked, Auto) and auto is None:
            reason = "files cannot be linked in its folder, which would keep its base"
    with closing(_open_first(auto, target, plan, policy, kept, frozen_from)) as bases:
        for base in bases:
            frozen = frozen_in(plan, source, base, threads)
            only_linked = isinstance(asked, Auto) and asked.only_linked
            if frozen and (kept is None or _links(kept, base, target, is_needed=only_linked)):
                yield replace(plan, by_index=plan.by_index | frozen), base, None
                return
    if frozen_from is not None:
        plan = replace(plan, by_index=plan.by_index | kept_frozen(plan, source, policy))
    yield plan, None, reason


def _open_first(
    auto: Auto | None,
    target: Path,
    plan: Plan,
    policy: Policy,
    kept: KeptBases | None,
    frozen_from: FrozenFile | None,
) -> Generator[OpenBase]:
    """What may hold the frozen weights of a new key, open: ``frozen_from``, then the first file of the chain before.

    ``auto`` is None where no base is to be chosen. Raises InputError and UsageError for ``frozen_from``, unless the run
    is under way also where it holds none.
    """
    goes_on = kept is not None and (auto is not None or frozen_from is not None)
    newest = next(_siblings(_files_beside(target), plan, policy), None) if goes_on else None
    place = LENGTH if newest is None or auto is None else (newest[1].place // LENGTH + 1) * LENGTH
    if frozen_from is not None:
        error: Ckpt8Error = UsageError(
            f"{frozen_from.path}: holds none of the frozen weights bit for bit; give the file that the run began with, "
            f"or a {header.CONTAINER} of it made with --preset lossless"
        )
        try:
            with OpenBase(frozen_from.container(kept), place) as base:
                base.check_target(target)
                yield base
        except InputError as exc:
            error = exc
        frozen_from.pass_over(error, is_under_way=is_under_way(target, plan))
    if newest is not None and not (auto is not None and auto.begins):
        with contextlib.suppress(InputError, UsageError):
            with ContainerReader(newest[0]) as reader:
                first = [reader, *reader.links()][-1].path
            with OpenBase(first, place) as base:
                base.check_target(target)
                yield base
