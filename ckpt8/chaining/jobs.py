"""One checkpoint of many: compress it, verify and remove it, and say what became of it. A failure is an outcome.

A checkpoint is removed once its container was verified against it, and never otherwise. It first gets another name in
one step, ``.NAME.SEAL.ckpt8-removed``, so that it never looks like one with files missing; a directory then becomes
``.NAME.SEAL.ckpt8-removing`` before the first of its files goes. A process that is killed leaves one of them.
``finishing`` finds these, and a job verifies again before it removes one.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.codecs import codec_from_config
from ckpt8.compressing.chosen_base import Auto, checked_frozen, is_under_way, wanted
from ckpt8.compressing.compress import compress, default_target, target_of
from ckpt8.compressing.frozen_file import FrozenFile
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.checks import name_problem
from ckpt8.container.facts import total_errors
from ckpt8.container.header import is_container, stated_seal
from ckpt8.container.manifest import Manifest, original_name
from ckpt8.container.reader import ContainerReader
from ckpt8.container.steps import step_facts
from ckpt8.core.errors import CheckFailedError, Ckpt8Error, InputError, OutputError, UsageError, require
from ckpt8.core.files.atomic import any_file, may_write, noting_replaced, remove, rename_new, sync_directory
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import RemotePath, reading, resolved, scan
from ckpt8.core.summary import Summarised, shrunk
from ckpt8.core.text import counted, listed
from ckpt8.core.workers import Progress
from ckpt8.inspecting.facts import asked_words
from ckpt8.inspecting.prediction import predicted_bytes
from ckpt8.inspecting.verify import verify

Look = tuple[tuple[str, int, int, int, int], ...]
"""Path, mode, size, time and inode of every file, link and folder; of a folder no time, and no size."""


def look_at(path: Path) -> Look:
    """What a file, or a directory with everything in it, looks like without following links. Raises OSError."""
    entries, waiting = [], [("", path)]
    for name, place in waiting:
        entries.append(_entry(name, place.lstat()))
        if stat.S_ISDIR(entries[-1][1]):
            waiting += [(f"{name}/{entry.name}".lstrip("/"), place / entry.name) for entry in scan(place)]
    return tuple(sorted(entries))


def _entry(path: str, status: os.stat_result) -> tuple[str, int, int, int, int]:
    if stat.S_ISDIR(status.st_mode):
        return path, status.st_mode, 0, 0, status.st_ino
    return path, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino


def last_change(look: Look) -> int:
    """The latest time of a file, in nanoseconds."""
    return max(changed for _, _, _, changed, _ in look)


_WHOLE, _PARTIAL = ".ckpt8-removed", ".ckpt8-removing"
_NAME_KEPT, _SEAL_KEPT = 222, 16
"""Bytes of a name, so that it has no more than the 255 of a file system with the rest, and digits of a seal."""
_CUT = "…"
_ASIDE = re.compile(rf"\.(.+)\.([0-9a-f]{{{_SEAL_KEPT}}})\.ckpt8-(?:removed|removing)", re.DOTALL)


def refuse_removal(source: Path) -> None:
    """Raise UsageError for a source that must not be removed, and OutputError for one that cannot be."""
    if isinstance(source, RemotePath):
        source.check_target()
        return
    require(
        not source.is_symlink(),
        f"{source}: is a link; to have --remove remove its target, give the target",
        UsageError,
    )
    with reading(source):
        final = source.resolve()
        homes = Path.cwd(), Path(os.path.expanduser("~")).resolve()  # noqa: PTH111 - a user may have none
        require(
            not any(final in (home, *home.parents) for home in homes),
            f"{source}: is or holds the current or the home directory, which --remove leaves alone",
            UsageError,
        )
        device = final.stat().st_dev
        folders = [Path(folder) for folder, _, _ in os.walk(final)] if final.is_dir() else []
        for folder in folders:
            require(
                folder.lstat().st_dev == device and not os.path.ismount(folder),
                f"{source}: holds another file system, {folder}, and cannot be removed",
                OutputError,
            )
        for folder in (final.parent, *folders):
            require(
                os.access(folder, os.W_OK | os.X_OK),
                f"{source}: cannot be removed: {folder} cannot be written",
                OutputError,
            )


def remove_verified(
    source: Path, container: Path, *, threads: int | None = None, progress: Progress = lambda _: None
) -> None:
    """Verify ``container``, also against ``source``; then remove ``source``.

    Raises CheckFailedError if they do not agree, InputError for damage or where ``source``, ``container`` or a file
    below it changes meanwhile, UsageError where ``source`` holds one of these, OutputError where it cannot be removed.
    It is then still there.
    """
    refuse_removal(source)
    looks = _verified(source, source, container, threads, progress)
    if isinstance(source, RemotePath):
        # One object goes in one step, and only the version that was verified.
        _check(source, container, looks, source)
        source.unlink()
        return
    remove_as_verified(source, container, looks)


def remove_as_verified(source: Path, container: Path, looks: Mapping[Path, Look]) -> None:
    """Remove ``source``, against which ``container`` was verified, if all is as in ``looks``. Raises as the above.

    It gets another name first. ``finish_removals`` finds that where this process is killed.
    """
    aside = source.with_name(f".{_shortened(source.name)}.{(stated_seal(container) or '')[:_SEAL_KEPT]}{_WHOLE}")
    try:
        _check(source, container, looks, source)
        rename_new(source, aside)
        try:
            _check(source, container, looks, aside)
            sync_directory(aside.parent)
            going = _going(aside)
        except BaseException:
            with suppress(OSError):
                rename_new(aside, source)
            raise
    except Ckpt8Error:
        raise
    except OSError as exc:
        raise OutputError(f"{source}: cannot be removed: {exc.strerror}") from exc
    _remove(going)


def _verified(
    original: Path, source: Path, container: Path, threads: int | None, progress: Progress
) -> dict[Path, Look]:
    """Verify ``container`` against ``original``, which is or was ``source``.

    Returns how ``source``, then the files that the container is read from, looked before. Raises as
    ``remove_verified``.
    """
    kept = _needed(container)
    for path in kept:
        require(
            original.resolve() not in (path, *path.parents),
            f"{source}: is kept: {path} in it is what {container} is read from",
            UsageError,
        )
    looks = {source: _look(original)} | {path: _look(path) for path in kept}
    check_made_from(original, source, container, threads, progress)
    return looks


def check_made_from(
    original: Path, source: Path, container: Path, threads: int | None, progress: Progress = lambda _: None
) -> None:
    """Raise CheckFailedError for a container that does not hold against ``original``, which is or was ``source``."""
    result = verify(container, original, threads=threads, progress=progress)
    if result.failures:
        raise CheckFailedError(f"{source}: is kept: {container}: {result.failures[0]}")
    require(
        not result.unmeasured,
        f"{source}: is kept: {container} carries no statistics, so its tensors cannot be checked",
        CheckFailedError,
    )


def _needed(container: Path) -> list[Path]:
    """The files that ``container`` is read from: itself and those below it. Raises InputError."""
    with ContainerReader(container) as reader:
        return [link.path.resolve() for link in (reader, *reader.links())]


def _look(path: Path) -> Look:
    with reading(path):
        return look_at(path)


def anew(path: Path) -> Path:
    """The same path, which asks a store again."""
    return type(path)(path)


def _check(source: Path, container: Path, looks: Mapping[Path, Look], place: Path) -> None:
    """Raise InputError unless ``source``, which is at ``place`` now, and all other paths still have these looks."""
    for path, known in looks.items():
        if _look(anew(place if path == source else path)) != known:
            name = "it" if path == source else str(path)
            raise InputError(f"{source}: is kept: {name} changed after {container} was verified against it")


def _shortened(name: str) -> str:
    """The beginning of a name, at most _NAME_KEPT bytes."""
    while len(os.fsencode(name)) > _NAME_KEPT:
        name = name[:-1]
    return name


def _going(aside: Path) -> Path:
    """The name of what is set aside once its removal begins: a directory gets another one. Raises OSError."""
    if not aside.is_dir():
        return aside
    going = aside.with_name(aside.name.removesuffix(_WHOLE) + _PARTIAL)
    rename_new(aside, going)
    return going


def _remove(path: Path) -> None:
    remove(path)
    require(not os.path.lexists(path), f"{path}: was verified and cannot be removed; remove it yourself", OutputError)


def source_name(container: Path) -> str | None:
    """The name of what a container was made from; None for another file, and for a damaged one."""
    try:
        if not is_container(container):
            return None
        with ContainerReader(container) as reader:
            return original_name(reader.manifest)
    except Ckpt8Error:
        return None


def _name_of(start: str, container: Path | None) -> str:
    """The name of a checkpoint that begins so, by its container where it may have been cut."""
    if len(os.fsencode(start)) <= _NAME_KEPT - 4:  # the bytes of the longest character
        return start
    name = None if container is None else source_name(container)
    return name if name is not None and name_problem(name) is None and _shortened(name) == start else start + _CUT


def _brought_back(aside: Path, source: Path) -> str:
    """Give what was set aside its name again; say where it is."""
    if source.name.endswith(_CUT):
        return f"it stays at {aside}, since its whole name is not known"
    try:
        rename_new(aside, source)
        sync_directory(source.parent)
    except FileExistsError:
        return f"another {source.name} is there, so that it stays at {aside}"
    except OSError as exc:
        return f"it stays at {aside}, which cannot be renamed: {exc.strerror}"
    return f"{source.name} is back"


@dataclass(frozen=True, slots=True)
class Settings:
    """What holds for all checkpoints; ``options`` are those of ``compress``.

    With ``takes_any`` the removal of what a container was made from is finished, whatever options that has.
    """

    options: dict[str, Any] = field(default_factory=dict)
    remove: bool = False
    takes_any: bool = False

    def removes(self, source: Path) -> bool:
        """Whether a source goes once it is compressed: never what ``frozen_from`` names, nor a directory with that."""
        named = self.options.get("frozen_from")
        file = None if named is None else resolved(as_path(named))
        return self.remove and (file is None or resolved(source) not in (file, *file.parents))

    def difference(self, manifest: Manifest) -> str | None:
        """How a container is not what these settings make, by what it states; None where it is."""
        preset, budget, rules, bound = map(self.options.get, ("preset", "budget", "rules", "max_update_error"))
        policy = Policy.of(preset, rules or (), budget)
        there = asked_words(manifest.preset, manifest.budget)
        asked = asked_words(policy.preset, asdict(policy.budget) if policy.budget else None)
        if there != asked:
            default = ", the default" if preset is None and budget is None else ""
            return f"was made with {there}, not with {asked}{default}"
        if manifest.rules != (wanted := [rule.text for rule in policy.rules]):
            return f"was made with {_rules(manifest.rules)}, not with {_rules(wanted)}"
        if bound is not None:
            errors = total_errors(manifest, count_whole)
            if unknown := errors["update_unknown"]:
                return f"does not state the max |Δu| of {counted(unknown, 'parameter')}, which is to keep to {bound:g}"
            most = max((errors[kind]["max_error"] for kind in ("update", "replayed") if errors[kind]), default=0.0)
            if not most <= bound:
                return f"has a max |Δu| of {most:.3g}, above {bound:g}"
        lossy = [storage for storage in manifest.storages if codec_from_config(storage.codec).measured_as is not None]
        if lossy and all(storage.error is None for storage in lossy):
            return "carries no statistics, by which it could be checked"
        return None


def _rules(texts: Sequence[str]) -> str:
    return f"the rules {listed(texts)}" if texts else "no rules"


@dataclass(slots=True, repr=False)
class Outcome(Summarised):
    """What became of a checkpoint: ``bytes`` of ``source`` and ``stored`` bytes of ``target``, None while it has none.

    ``steps`` is the error in steps that it states, and what is under no budget: see ``container.steps``; None without a
    budget. ``present``: the container was there already. ``removed``: the source is gone. ``replaced`` says what the
    container took the place of. ``error``: what failed, after which the source is as it was.

    Of a job that was not done: ``predicted`` are the bytes that a container would take, at most where it may become a
    delta, ``would_remove`` says whether the source would go, and ``replaced`` what would be replaced.
    """

    source: Path
    target: Path
    bytes: int = 0
    stored: int | None = None
    seconds: float = 0.0
    base: str | None = None
    steps: dict[str, Any] | None = field(default=None, repr=False)
    present: bool = False
    removed: bool = False
    replaced: str | None = None
    predicted: int | None = None
    would_remove: bool = False
    error: Exception | None = None

    def _summary(self) -> Iterator[tuple[str, str]]:
        became = "not done" if self.stored is None else shrunk(self.bytes, self.stored)
        notes = {", was there already": self.present, ", source removed": self.removed}
        told = became + "".join(note for note, holds in notes.items() if holds)
        yield "Outcome", f"{self.source} -> {self.target}: {self.error or told}"


class Outcomes(Summarised, list[Outcome]):
    """What became of every checkpoint of a run, oldest first."""

    __slots__ = ()

    def _summary(self) -> Iterator[tuple[str, str]]:
        failed = [outcome for outcome in self if outcome.error is not None]
        packed = [outcome for outcome in self if outcome.stored is not None]
        before, after = sum(outcome.bytes for outcome in packed), sum(outcome.stored or 0 for outcome in packed)
        yield "Outcomes", f"{counted(len(self), 'checkpoint')}, {len(failed):,} failed"
        yield "size", shrunk(before, after)
        yield "failed", listed((outcome.error for outcome in failed), 1)


@dataclass(frozen=True, slots=True)
class Job:
    """A checkpoint to compress into ``target``, with as much ``work`` as it has bytes to read.

    ``present``: the target is its container already, though ``doubted`` where the source may have changed since.
    ``problem``: why it cannot be compressed. ``aside``: where a killed process left it, for its removal to be finished.
    """

    source: Path
    target: Path
    settings: Settings
    force: bool = False
    present: bool = False
    doubted: bool = False
    problem: Exception | None = None
    aside: Path | None = None

    @property
    def work(self) -> int:
        """Bytes that will be read; 0 for a source that cannot be read."""
        try:
            # ``verify`` reads it twice: it decodes as many bytes, then compares them.
            times = (not self.present) + 2 * (self.doubted + self.settings.removes(self.source))
            return 0 if self.problem else size_of(self.aside or self.source) * times
        except Ckpt8Error:
            return 0

    def run(self, progress: Progress = lambda _: None, *, dry: bool = False) -> Outcome:
        """Do it; if ``dry``, find out what that would do, without writing. An exception is part of the outcome."""
        started, outcome = time.perf_counter(), Outcome(self.source, self.target, error=self.problem)
        if self.problem is not None:
            return outcome
        with noting_replaced() as replaced:
            try:
                if self.aside is None and self.settings.removes(self.source):
                    refuse_removal(self.source)
                if dry:
                    self._preview(outcome)
                elif self.aside is not None:
                    self._finish(self.aside, outcome, progress)
                else:
                    self._run(outcome, progress)
            except Exception as exc:
                outcome.error = exc
        outcome.replaced = outcome.replaced or next(iter(replaced), None)
        outcome.seconds = time.perf_counter() - started
        return outcome

    def _run(self, outcome: Outcome, progress: Progress) -> None:
        outcome.present = self.is_done(progress)
        if not outcome.present:
            compress(self.source, self._named_target, **self.settings.options, force=self.force, progress=progress)
        self._read(outcome)
        if self.settings.removes(self.source):
            remove_verified(
                self.source, anew(self.target), threads=self.settings.options.get("threads"), progress=progress
            )
            outcome.removed = True

    def _preview(self, outcome: Outcome) -> None:
        options = self.settings.options
        require(
            self.aside is None or self.present,
            f"{self.source}: its removal was interrupted, and its container is gone; it gets its name back",
        )
        outcome.present = self.is_done(None)
        if outcome.present:
            self._read(outcome)
        else:
            target_of(self.source, self._named_target, force=self.force)
            outcome.replaced = any_file(self.target) if self.target.exists() else None
            require(
                may_write(self.target.parent) or not self.target.parent.is_dir(),
                f"{self.target}: cannot be written: {os.strerror(errno.EACCES)}",
                OutputError,
            )
            asked = wanted(options.get("base"))
            frozen = checked_frozen(options.get("frozen_from"), asked)
            if frozen is not None:
                outcome.base = self._base_of_frozen(frozen)
            elif isinstance(asked, Path):
                with ContainerReader(asked) as reader:
                    outcome.base = reader.path.name
            if isinstance(asked, Auto):
                outcome.base = None
            preset, rules, budget, bound = map(options.get, ("preset", "rules", "budget", "max_update_error"))
            outcome.bytes, outcome.predicted = predicted_bytes(
                self.source, Policy.of(preset, rules or (), budget, bound), options.get("threads")
            )
        outcome.would_remove = self.settings.removes(self.source)

    def _base_of_frozen(self, path: Path) -> str | None:
        """The name of the file with frozen weights; None where the run goes on without it. Raises as ``compress``."""
        frozen = FrozenFile.beside(self.target, path)
        try:
            if frozen.is_container:
                ContainerReader(path).close()
            else:
                frozen.name()
        except InputError as exc:
            with open_source(self.source, containers=False) as source:
                plan = plan_bundle(source, Policy.of("lossless"))
            frozen.pass_over(exc, is_under_way=is_under_way(self.target, plan), stacklevel=2)
            return None
        return path.name

    @property
    def _named_target(self) -> Path | None:
        """The target; None for the default one, which is replaced only if it is a checkpoint."""
        return None if self.target == default_target(self.source) else self.target

    def _finish(self, aside: Path, outcome: Outcome, progress: Progress) -> None:
        """Verify the container against what was set aside, and every byte of the files below it; then remove that.

        Otherwise, and where the container is not what was asked for now, it becomes the source again, unless that name
        is taken or files of it are gone. Raises a Ckpt8Error that says why, and where it is.
        """
        source, container, threads = self.source, self.target, self.settings.options.get("threads")
        is_partial = aside.name.endswith(_PARTIAL)
        try:
            require(self.settings.removes(self.source), "--frozen-from names it")
            require(self.present, "the container that it was verified against is not here")
            if is_partial:
                for path in _needed(container):
                    verify(path, threads=threads, progress=progress)
            else:
                with ContainerReader(container) as reader:
                    difference = self.settings.difference(reader.manifest)
                takes = difference is None or self.settings.takes_any
                require(takes, f"{container}: {difference}", CheckFailedError)
                looks = _verified(aside, source, container, threads, progress)
                for path in [*looks][2:]:
                    verify(path, threads=threads)
                _check(source, container, looks, aside)
                aside = _going(aside)
        except (Ckpt8Error, OSError) as exc:
            reason = (exc.problem if isinstance(exc, Ckpt8Error) else str(exc)).removeprefix(f"{source}: is kept: ")
            where = f"what is left of it is {aside}, with files missing" if is_partial else _brought_back(aside, source)
            problem = f"{source}: its removal was interrupted, and is not finished: {reason}; {where}"
            raise (exc.told(problem) if isinstance(exc, Ckpt8Error) else OutputError(problem)) from exc
        _remove(aside)
        self._read(outcome)
        outcome.present = outcome.removed = True

    def _read(self, outcome: Outcome) -> None:
        """Add what the target says of itself, which is there now."""
        with ContainerReader(anew(self.target)) as reader:
            manifest = reader.manifest
            outcome.base = manifest.base.path if manifest.base else None
            outcome.steps = step_facts(manifest, count_whole)
            outcome.bytes = sum(member.size for member in manifest.members)
            outcome.stored = reader.size

    def is_done(self, progress: Progress | None) -> bool:
        """Whether the target is what was asked for; False where it is to be replaced. Without ``progress`` by its head.

        Unless ``force`` replaces them, raises CheckFailedError for a container of other settings, OutputError for one
        of another source, and InputError where a file below it is missing.
        """
        if not self.present:
            return False
        error: Ckpt8Error | None = None
        with ContainerReader(self.target) as reader:
            difference = self.settings.difference(reader.manifest)
            try:
                reader.links()
            except InputError as exc:
                error = exc
        if difference is not None:
            error = CheckFailedError(
                f"{self.target}: {difference}; {self.source} stays as it is, force=True compresses it anew"
            )
        elif error is None and self.doubted and progress is not None and not self._is_of_source(progress):
            error = OutputError(
                f"{self.target}: was not made from {self.source} as it is now; force=True replaces it, or move it away"
            )
        if error is not None and not self.force:
            raise error
        return error is None

    def _is_of_source(self, progress: Progress) -> bool:
        """Whether the target holds against the source."""
        try:
            result = verify(self.target, self.source, threads=self.settings.options.get("threads"), progress=progress)
        except CheckFailedError:
            return False
        return not result.failures and not result.unmeasured


def finishing(folder: Path, homes: Iterable[Path], settings: Settings) -> list[Job]:
    """Jobs that finish the removals which killed processes left in ``folder``; the containers may be in ``homes``.

    A long name ends with ``…`` where no container has the seal, since it may have been cut. Empty where a folder
    cannot be read.
    """
    jobs = []
    with suppress(OSError):
        asides = [(path, match) for path in sorted(folder.iterdir()) if (match := _ASIDE.fullmatch(path.name))]
        homes = dict.fromkeys((*homes, folder)) if asides else ()
        seals = {(stated_seal(path) or "")[:_SEAL_KEPT]: path for home in homes for path in sorted(home.iterdir())}
        for aside, match in asides:
            if stat.S_IFMT(aside.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR):
                container = seals.get(match[2])
                source = folder / _name_of(match[1], container)
                target, is_present = container or default_target(source), container is not None
                jobs.append(Job(source, target, settings, present=is_present, aside=aside))
    return jobs


def finish_removals(folder: Path, threads: int | None) -> None:
    """Finish the removals that killed processes left in a folder, whatever its containers were made with.

    Raises Ckpt8Error for the first that cannot be finished, after all others.
    """
    jobs = finishing(folder, (), Settings({"threads": threads}, remove=True, takes_any=True))
    errors = [error for job in jobs if (error := job.run().error) is not None]
    if errors:
        raise errors[0]
