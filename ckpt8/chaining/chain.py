"""``ckpt8.chain``: every checkpoint of a run into a chain of containers, oldest first.

``placed`` decides which container a checkpoint gets, and whether it is there already. ``collected`` makes the jobs for
several sources that a user names: each gets a container beside itself, or in one folder.

The order of a run goes by the step that ``step_of`` finds, then by epoch, then by time. A checkpoint is at rest when
its files have stayed as they are for some seconds, and are complete.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt8.chaining import reader_copy
from ckpt8.chaining.jobs import Job, Look, Outcomes, Settings, finishing, last_change, look_at, source_name
from ckpt8.checkpoint.readers.entries import walk
from ckpt8.checkpoint.replacing import asked_for, checkpoints_in, epoch_in_name, incomplete, packed_in, written_once
from ckpt8.compressing.chosen_base import AUTO
from ckpt8.compressing.compress import checked_options, default_target
from ckpt8.compressing.frozen_file import FrozenFile
from ckpt8.container.header import CONTAINER, SUFFIXES, is_container
from ckpt8.container.kept_bases import KeptBases, drop_unneeded
from ckpt8.container.manifest import FILE
from ckpt8.container.sharded import is_sharded
from ckpt8.core.errors import Ckpt8Error, InputError, MissingError, OutputError, UsageError, require
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import RemotePath, refuse_target, resolved
from ckpt8.core.files.source_file import listed as listed_folder
from ckpt8.core.log import log
from ckpt8.core.public import checked
from ckpt8.core.text import listed
from ckpt8.core.workers import Progress
from ckpt8.inspecting.heads import Facts, read_file, read_folder, step_of


def placed(source: Path, settings: Settings, *, force: bool, taken: set[Path]) -> Job:
    """The job for ``source``: its container is ``run.ckpt8``, or ``run.bin.ckpt8`` where that belongs to ``run.pt``.

    ``taken`` are the targets of other jobs; that of this one is added. A container of another checkpoint of the same
    name is in the way, unless ``force`` replaces it.
    """
    places = _places(source)
    free = [path for path in places if path not in taken]
    own = [path for path in free if source_name(path) == source.name]
    targets = own or [path for path in free if not (path.exists() or path.is_symlink())] or (free if force else [])
    if not targets:
        error = OutputError(f"{places[0]}: is in the way of {source}: it was not made from it; move it away")
        return Job(source, places[0], settings, problem=error)
    taken.add(targets[0])
    is_doubted = bool(own) and _is_older(targets[0], source)
    return Job(source, targets[0], settings, force=force, present=bool(own), doubted=is_doubted)


def _places(source: Path) -> list[Path]:
    """Where the container may be, in the order of preference: only a suffix that says nothing of the step goes."""
    short, long = default_target(source), source.with_name(source.name + CONTAINER)
    return list(dict.fromkeys((short, long) if source.suffix.lower() in SUFFIXES else (long, short)))


def _is_older(target: Path, source: Path) -> bool:
    try:
        return target.stat().st_mtime_ns < last_change(look_at(source))
    except OSError:
        return True


class Rest:
    """Remembers how checkpoints looked. One is at rest once it has looked the same for ``seconds``.

    Unless all are ``watched``, one that nobody has touched for so long, by its times, is at rest when it is first seen.
    """

    def __init__(self, seconds: float, *, watched: bool) -> None:
        self.seconds = seconds
        self._watched = watched
        # How it looked last, since when, and when it was seen first.
        self._seen: dict[Path, tuple[Look | None, float, float]] = {}

    def problem(self, path: Path) -> str | None:
        """Why a checkpoint may still be being written; None if it is at rest and complete."""
        now = time.monotonic()
        known, since, first = self._seen.get(path, (None, now, now))
        try:
            look = look_at(path)
        except OSError:
            self._seen[path] = None, now, first
            return "its files change"
        since = since if look == known else now
        self._seen[path] = look, since, first
        # A time that is yet to come says nothing.
        untouched = not self._watched and time.time() - last_change(look) / 1e9 >= self.seconds
        if now - since < self.seconds and not untouched:
            return f"it changed within the last {self.seconds:g} s"
        return incomplete(path)

    def look(self, path: Path) -> Look | None:
        """How a checkpoint looked last."""
        return self._seen[path][0]

    def is_patient(self, path: Path) -> bool:
        """Whether a checkpoint was given as much time as one at rest needs."""
        return time.monotonic() - self._seen[path][2] >= self.seconds


@dataclass(frozen=True, slots=True)
class Listing:
    """The ``progress`` of the checkpoints in a folder, oldest first: step and epoch, infinite where nothing says it.

    ``skipped`` says of other files that look like checkpoints why they are left alone.
    """

    progress: dict[Path, tuple[float, float]]
    skipped: dict[Path, str]

    def newest(self, count: int, among: list[Path]) -> set[Path]:
        """The ``count`` newest ``among`` some checkpoints, which are oldest first.

        Those of the same step and epoch count once. What is written again and again, such as ``last.pt``, does not
        count where it is a copy of a checkpoint with a number, by its step, or has no step: it stays with the newest.
        """
        if not count:
            return set()
        once = set(written_once(among))
        steps = {math.inf, *(self.progress[path][0] for path in once)}
        counted = [path for path in among if path in once or self.progress[path][0] not in steps] or among
        kept = set(list(dict.fromkeys(map(self._slot, counted)))[-count:])
        kept_steps = {self.progress[path][0] for path in counted if self._slot(path) in kept} | {math.inf}
        return {
            path
            for path in among
            if (self._slot(path) in kept if path in counted else self.progress[path][0] in kept_steps)
        }

    def _slot(self, path: Path) -> tuple[float, float] | Path:
        """What checkpoints of the same state share."""
        return self.progress[path] if self.progress[path][0] < math.inf else path


def _read(path: Path) -> Facts | None:
    """Read what a checkpoint says; None for a file that is none. A damaged one counts: its error says so later."""
    try:
        if not path.is_dir():
            return read_file(path)
        return read_folder(path, [entry.path for entry in walk(path) if entry.format == FILE], needs_tensors=False)
    except (InputError, OSError):
        return Facts("damaged", 0, trains=True)


def is_there(folder: Path) -> bool:
    """Whether a folder is there, or a link; one of a store is where something is in it. Raises InputError."""
    return folder.is_symlink() or listed_folder(folder).exists()


REST = 10.0
"""Seconds that a checkpoint must not change before it is compressed."""

_SHORTEST_NAP, _LONGEST_NAP = 0.05, 1.0


class ChainRun:
    """The checkpoints of a run in a folder, as jobs. The ``keep_raw`` newest stay as they are.

    So do, where checkpoints are removed, those that a resume asks for by their names.

    A checkpoint gets a job once it is at rest. With ``watch`` the jobs never end. ``tell`` gets a line
    about checkpoints that are waited for, once for each. With ``leave_reader`` the folder gets ``read_ckpt8.py``.
    ``upkeep`` gets the folder after each list of jobs, and the names of checkpoints to leave as they are.
    """

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        *,
        force: bool,
        keep_raw: int,
        watch: bool,
        rest: float,
        leave_reader: bool = False,
        upkeep: Callable[[Path, Sequence[str]], object] | None = None,
        tell: Callable[[str], object] = log.info,
    ) -> None:
        require(rest >= 0, f"a checkpoint is at rest after 0 seconds or more, not {rest}", UsageError)
        require(
            keep_raw >= 0, f"keep_raw is the number of checkpoints to leave as they are, not {keep_raw}", UsageError
        )
        self._folder = folder
        self._known: dict[Path, tuple[Look, Facts | None]] = {}
        self._settings = settings
        self._force, self._keep_raw, self._watch = force, keep_raw, watch
        self._rest = Rest(rest, watched=watch)
        self._done: dict[Path, Look | None] = {}
        self._raw: dict[Path, str] = {}
        self._leave_reader, self._upkeep = leave_reader, upkeep
        self._tell, self._told = tell, set[Path]()

    def skipped(self) -> dict[Path, str]:
        """What looks like a checkpoint and is left alone, and why. Raises InputError."""
        return {**self._listing().skipped, **dict(sorted(self._raw.items()))}

    def packed(self) -> list[str]:
        """The names of the directories that ranks have packed: they are compressed, and stay as they are."""
        return packed_in(self._folder)

    def keep_bases(self) -> None:
        """Link the bases of all deltas there that have no link, and remove the links that no container needs.

        That of ``frozen_from`` is made again where it is gone or damaged. Raises OutputError where it cannot be.
        """
        named = self._settings.options.get("frozen_from")
        with KeptBases(self._folder) as kept:
            if named is not None and kept.has_links:
                with suppress(InputError):  # jobs that need the file say what is wrong with it
                    FrozenFile(as_path(named), resolved(self._folder), None).mend(kept)
            kept.link_needed()
        drop_unneeded(self._folder)

    def jobs(self) -> Iterator[list[Job]]:
        """Lists of jobs, to run in their order before the next list. Raises InputError for a folder without a run."""
        folder = self._folder
        while self._watch and not is_there(self._folder):
            time.sleep(_LONGEST_NAP)
        require(
            not is_sharded(listed_folder(folder)),
            f"{folder}: is one checkpoint, which ranks have packed; give the folder of a whole run",
        )
        if self._settings.remove and (left := finishing(folder, (), self._settings)):
            yield left
        listing = Listing({}, {}) if self._watch else self._listing()
        if not (self._watch or listing.progress or any(map(is_container, folder.iterdir())) or self.packed()):
            skipped = listed(f"{path.name} is left alone, {why}" for path, why in listing.skipped.items())
            raise InputError(
                f"{folder}: holds no checkpoints of a run{skipped and ': '}{skipped}; ckpt8 compress takes a single one"
            )
        if self._leave_reader and reader_copy.leave_reader(folder):
            self._tell(f"{folder / reader_copy.NAME}: reads these containers without ckpt8")
        while True:
            started = time.monotonic()
            ready, waiting = self._sorted_out()
            if ready:
                yield ready
                self._keep_up(ready[-1])
            elif not waiting and not self._watch:
                return
            else:
                if unknown := [path for path in waiting if path not in self._told]:
                    self._told.update(unknown)
                    names = listed(path.name for path in unknown)
                    self._tell(f"waiting for {names} to stay unchanged for {self._rest.seconds:g} s (--rest)")
                # Ten times as long as a look at all files takes: some folders are large, and on a network.
                idle = 10 * (time.monotonic() - started)
                time.sleep(max(min(self._rest.seconds / 4, _LONGEST_NAP), _SHORTEST_NAP, idle))

    def _keep_up(self, newest: Job) -> None:
        """Thin the run, but for the newest job, whose step may be lower than those of a run before.

        What stops that is said where the run goes on; else raises Ckpt8Error.
        """
        try:
            if self._upkeep is not None:
                self._upkeep(self._folder, [path.name for path in (newest.source, newest.target, *self._raw)])
        except Ckpt8Error as exc:
            if not self._watch:
                raise
            self._tell(str(exc))

    def _listing(self) -> Listing:
        """What is in the folder. Those that have no step come last, by epoch and time. Raises InputError.

        One that is not there is empty where it is watched.
        """
        rows = []
        skipped = {}
        try:
            entries = checkpoints_in(self._folder)
        except MissingError:
            if not self._watch:
                raise
            entries = []
        for entry in entries:
            try:
                look = look_at(entry.path)
                changed = entry.path.stat().st_mtime_ns
            except OSError:
                continue
            facts = None if entry.skipped else self._facts(entry.path, look)
            step, epoch = (None, None) if facts is None else (facts.progress.step, facts.progress.epoch)
            problem = entry.skipped
            if entry.is_doubtful and step is None and not (facts and facts.trains):
                problem = "no step and no optimizer found"
            if problem is not None:
                skipped[entry.path] = problem
                continue
            name = entry.path.name
            step, _ = step_of(name, step, None if facts is None else facts.counted)
            epoch = epoch_in_name(name) if epoch is None else epoch
            order = (math.inf if step is None else step, math.inf if epoch is None else epoch)
            rows.append((order, changed, name, entry.path))
        return Listing({path: order for order, _, _, path in sorted(rows)}, skipped)

    def _facts(self, path: Path, look: Look) -> Facts | None:
        """What a checkpoint says; None for a file that is none."""
        known = self._known.get(path)
        if known is None or known[0] != look:
            known = self._known[path] = look, _read(path)
        return known[1]

    def _sorted_out(self) -> tuple[list[Job], list[Path]]:
        """Jobs for what is at rest or, unless that is watched, will not be; and what else is waited for."""
        listing = self._listing()
        problems = {path: self._rest.problem(path) for path in listing.progress}
        left = listing.newest(self._keep_raw, [path for path, problem in problems.items() if problem is None])
        newest = "its step is the newest" if self._keep_raw == 1 else f"of the newest {self._keep_raw} steps"
        raw = dict.fromkeys(left, f"{newest} (--keep-raw)")
        if self._settings.remove:
            asked = asked_for(self._folder)
            raw = {path: why for path in problems if (why := asked(path)) is not None} | raw
        self._raw = {path: why for path, why in raw.items() if path not in self._done}
        taken: set[Path] = set()
        jobs, waiting = list[Job](), list[Path]()
        for path, problem in problems.items():
            look = self._rest.look(path)
            if path in raw or (path in self._done and (not self._watch or self._done[path] == look)):
                continue
            if problem is None:
                jobs.append(placed(path, self._settings, force=self._force, taken=taken))
            elif self._watch or not self._rest.is_patient(path):
                waiting.append(path)
                continue
            else:
                error = InputError(f"{path}: is still being written, or was never finished: {problem}")
                jobs.append(Job(path, default_target(path), self._settings, problem=error))
            self._done[path] = look
        return jobs, waiting


@checked
def chain(
    directory: str | os.PathLike[str],
    *,
    preset: str | None = None,
    budget: float | None = None,
    rules: Sequence[str] = (),
    delta: bool = True,
    frozen_from: str | os.PathLike[str] | None = None,
    remove: bool = False,
    keep_raw: int = 0,
    rest: float | None = None,
    leave_reader: bool = False,
    device: str = "auto",
    threads: int | None = None,
    force: bool = False,
    progress: Progress = lambda _: None,
) -> Outcomes:
    """Compress every checkpoint of a run, oldest first, each next to itself, as a delta if that is smaller.

    Checkpoints are the files and directories in ``directory`` that ``compress`` takes; one whose container is there,
    made with the same preset or budget and rules, is skipped, so a run that was killed goes on where it ended. A
    directory that ranks have packed stays as it is, too. What a delta needs is linked into ``bases/`` in ``directory``,
    so that any container may be removed; links that none needs go. Without ``delta`` every container is whole.

    ``remove`` removes a checkpoint once its container was verified against it, also one whose removal was interrupted.
    Those of the ``keep_raw`` newest steps stay as they are. A checkpoint is left alone while it is being written: until
    it has not changed for ``rest`` seconds, 10 by default, and has the file that its framework writes last.
    ``leave_reader`` puts ``read_ckpt8.py`` there, one file that reads the containers without ckpt8. The other
    arguments are those of ``compress``; ``force`` replaces containers that were made from something else or with other
    settings.

    Returns what became of each. The ``error`` of an ``Outcome`` is what failed; others go on. Raises InputError for a
    directory without checkpoints, UsageError for the arguments.

    >>> [outcome.target.name for outcome in ckpt8.chain(".", rest=0)]
    ['run.ckpt8']
    """
    run = ChainRun(
        as_path(directory),
        Settings(chain_options(preset, budget, rules, device, threads, frozen_from, delta=delta), remove),
        force=force,
        keep_raw=keep_raw,
        watch=False,
        rest=REST if rest is None else rest,
        leave_reader=leave_reader,
    )
    run.keep_bases()
    return Outcomes(job.run(progress) for jobs in run.jobs() for job in jobs)


def chain_options(
    preset: str | None,
    budget: float | None,
    rules: Sequence[str],
    device: str,
    threads: int | None,
    frozen_from: str | os.PathLike[str] | None,
    *,
    delta: bool,
) -> dict[str, object]:
    """The arguments of ``compress`` for a chain. Raises UsageError for those that no checkpoint can have."""
    return checked_options(
        preset=preset,
        budget=budget,
        rules=rules,
        device=device,
        threads=threads,
        base=AUTO if delta else None,
        frozen_from=frozen_from,
    )


@contextmanager
def collected(
    sources: Sequence[Path], folder: Path | None, settings: Settings, *, force: bool, dry: bool = False
) -> Iterator[Iterator[list[Job]]]:
    """The jobs for ``sources``, in lists to run one after the other: see ``_batches``.

    A ``folder`` that is missing is made, unless ``dry``, and goes again if nothing was written into it.

    Raises UsageError for arguments that no source can have and for two sources with the same target, OutputError for
    the folder.
    """
    checked_options(**settings.options)
    targets = {
        source: default_target(source) if folder is None else folder / default_target(source).name for source in sources
    }
    _refuse_twice(sources, targets)
    is_new = folder is not None and _make(folder, dry=dry)
    try:
        yield _batches(targets, settings, force=force)
    finally:
        if folder is not None and is_new:
            with suppress(OSError):
                folder.rmdir()


def _batches(targets: dict[Path, Path], settings: Settings, *, force: bool) -> Iterator[list[Job]]:
    """First the removals that killed processes left; then the sources, but for those that went so."""
    folders = dict.fromkeys(source.parent for source in targets) if settings.remove else ()
    left = [
        job for folder in folders for job in finishing(folder, [target.parent for target in targets.values()], settings)
    ]
    yield left
    gone = {job.source for job in left if not os.path.lexists(job.source)}
    yield [job_for(*pair, settings, force=force) for pair in targets.items() if pair[0] not in gone]


def job_for(source: Path, target: Path, settings: Settings, *, force: bool) -> Job:
    """The job for a source. A container of that name may be of another checkpoint, so that it is verified."""
    is_there = not force and source_name(target) == source.name
    return Job(source, target, settings, force=force, present=is_there, doubted=is_there)


def _refuse_twice(sources: Sequence[Path], targets: dict[Path, Path]) -> None:
    if len(targets) < len(sources):
        twice = next(source for at, source in enumerate(sources) if source in sources[:at])
        raise UsageError(f"{twice}: is given twice")
    owners: dict[Path, Path] = {}
    for source, target in targets.items():
        if is_container(source):
            continue  # compress refuses it, and takes the others
        other = owners.setdefault(resolved(target), source)
        require(
            other is source,
            f"{other} and {source}: would both become {target}; compress one of them with -o NAME",
            UsageError,
        )


def _make(folder: Path, *, dry: bool) -> bool:
    """Make a folder; False if it is there. Raises OutputError. If ``dry`` say only whether it could be made."""
    refuse_target(folder)
    if isinstance(folder, RemotePath):
        return False
    try:
        if folder.is_dir() or (dry and not folder.exists()):
            folder.parent.stat()
            return False
        folder.mkdir()
    except FileExistsError as exc:
        raise UsageError(f"{folder}: is a file; for several sources -o names a folder") from exc
    except OSError as exc:
        raise OutputError(f"{folder}: cannot be made: {exc.strerror}") from exc
    return True
