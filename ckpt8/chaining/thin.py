"""``ckpt8.thin``: a run in so much room. It plans, and does what it planned where it is asked to.

What goes, goes first, and frees its room. Then the oldest checkpoint is compressed, verified against what it was made
from, and takes its place; then the next one. After each of them the rest is planned again with the size that it really
has, so that the run takes no more than the room in the end. A container is compressed from the original where that is
there. Otherwise from what it holds; errors then add up, which it states: see ``Manifest.earlier``.

A process that is killed leaves each checkpoint as it was or as it becomes. What is a base of others is linked into
``bases/`` before it changes, and frees its room once nothing needs it. A store has no links: there all that need it,
directly or not, become whole before.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from ckpt8.chaining import reader_copy
from ckpt8.chaining.chain import REST, Rest, placed
from ckpt8.chaining.choices import Item, Rung, rungs_between
from ckpt8.chaining.jobs import (
    Look,
    Settings,
    check_made_from,
    finish_removals,
    look_at,
    refuse_removal,
    remove_verified,
)
from ckpt8.chaining.keeping import Keep, Ranking
from ckpt8.chaining.layout import Form
from ckpt8.chaining.room import Planner, RoomError
from ckpt8.checkpoint.readers.entries import is_directory
from ckpt8.checkpoint.replacing import asked_for, incomplete, problem_of, turn_in_store
from ckpt8.compressing.compress import coarsen, compress
from ckpt8.container.bases import looked_for_in
from ckpt8.container.kept_bases import KeptBases, drop_unneeded, release, remove_container
from ckpt8.container.reader import ContainerReader
from ckpt8.container.writer import rebase
from ckpt8.core.errors import Ckpt8Error, OutputError, UsageError, require
from ckpt8.core.files.atomic import (
    remove_abandoned_of,
    sync_directory,
    workspace,
    writing,
)
from ckpt8.core.files.atomic_directory import is_set_aside, remove_directory, without_remains
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import listed as listed_folder
from ckpt8.core.files.source_file import reading, refuse_target
from ckpt8.core.public import checked, parse_size
from ckpt8.core.summary import Summarised
from ckpt8.core.text import counted, listed, size
from ckpt8.inspecting.runs import MISSING, RunRecord, find, runs_in

_SPARE = 1 << 20
"""Bytes of the disk that stay free."""


@dataclass(frozen=True, slots=True)
class ThinRecord:
    """One checkpoint: ``bytes`` now and ``then``, 0 for one that goes, with errors in ``steps`` and ``steps_then``.

    ``score`` is its value of ``Thinning.metric``. ``becomes`` is ``as it is``, ``whole`` where a delta loses its base,
    ``.ckpt8 alone`` where the original beside it goes, a preset or a budget, or ``gone``. ``base`` is the checkpoint
    that it is then a delta to. ``twice``: it is compressed from a lossy container, and errors add up. ``held`` says why
    it has to stay as it is.
    """

    name: str
    step: int | None
    score: float | None
    bytes: int
    then: int
    becomes: str
    steps: float | None
    steps_then: float | None
    base: str | None = None
    twice: bool = False
    held: str | None = None


@dataclass(slots=True, repr=False)
class Thinning(Summarised):
    """What became of the checkpoints of a run, oldest first, or would become of them.

    They take ``bytes`` now, with what is in ``bases/``, and ``then`` so many, of ``to`` that were given. On the way
    ``needs`` bytes have to be free in ``needs_in``: the directory itself, or that of temporary files for one in a
    store. ``metric`` is what the best ones are chosen by, the highest if ``is_highest``: what the framework recorded,
    else a loss. ``applied`` says that it was done: sizes are then the real ones.
    """

    directory: str
    records: list[ThinRecord]
    bytes: int
    then: int
    to: int | None
    needs: int
    needs_in: str
    metric: str = "loss"
    is_highest: bool = False
    applied: bool = False

    def __iter__(self) -> Iterator[ThinRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    @property
    def gone(self) -> list[str]:
        """The names of those that go."""
        return [record.name for record in self.records if record.becomes == "gone"]

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "gone": self.gone}

    def _summary(self) -> Iterator[tuple[str, str]]:
        word = "takes" if self.applied else "would take"
        yield "Thinning", f"{self.directory}: {counted(len(self), 'checkpoint')}, {len(self.gone):,} gone"
        yield "size", f"{word} {size(self.then)}, of {size(self.bytes)}"
        yield "needs", f"{size(self.needs)} free in {self.needs_in}"


@dataclass(frozen=True, slots=True)
class Options:
    """What is asked for. ``room`` is in bytes, None for as much as it takes."""

    keep: Keep
    room: int | None
    rungs: Sequence[Rung]
    protect: Sequence[str]
    delta: bool
    threads: int | None

    @classmethod
    def of(
        cls,
        keep: str | None,
        to: int | str | None,
        finest: str = "flash",
        coarsest: str = "budget:5",
        protect: Sequence[str] = (),
        *,
        delta: bool = True,
        threads: int | None = None,
    ) -> Options:
        """The options of public functions. Raises UsageError."""
        require(keep is not None or to is not None, "thin: give rules (keep), a room (to), or both", UsageError)
        room = parse_size(to, "to") if isinstance(to, str) else to
        require(room is None or room > 0, f"to is a number of bytes above 0, not {room}", UsageError)
        return cls(Keep.of(keep), room, rungs_between(finest, coarsest), protect, delta, threads)


class Thinner:
    """The checkpoints of a run, what becomes of each, and how to do it. ``tell`` gets a line about what is done.

    A directory in a store is as it was listed. Raises InputError for one without a run or with several.
    """

    def __init__(self, directory: Path, options: Options, tell: Callable[[str], object] = lambda _: None) -> None:
        self._directory, self._options, self._tell = directory, options, tell
        self._run = runs_in(directory)
        folders = list(dict.fromkeys(record.run for record in self._run))
        require(
            len(folders) == 1,
            f"{directory}: holds several runs, in {listed(name or '.' for name in folders)}; give the folder of one",
        )
        self._folder = directory / folders[0]
        self._workspace = workspace(self._folder)
        taken, asked = set[Path](), asked_for(self._folder)
        self._items = [_item(directory, record, options, taken, asked) for record in self._run]
        records = [item.record for item in self._items]
        self._ranking = Ranking.of(records)
        numbers = {record.name: index for index, record in enumerate(records)}
        for item in self._items:
            item.base = numbers.get(item.record.base or "")
            item.leans = item.record.base not in (None, MISSING, *numbers)
        # One that is damaged or was never finished is not the newest: the one before it is all that there is.
        sound = [index for index, item in enumerate(self._items) if item.is_sound]
        newest = {*sound[-1:], *[index for index in sound if records[index].step is not None][-1:]}
        firm = {index for index, item in enumerate(self._items) if not item.may_go} | newest
        self._kept = {sound[number] for number in options.keep.kept([records[index] for index in sound])} | firm
        self._planner = Planner(
            self._items,
            options.room,
            self._kept,
            firm if not options.keep.is_given else self._kept,
            outside=self._run.bases_bytes,
            delta=options.delta,
            threads=options.threads,
            tell=lambda name: tell(f"{name}: predicting its delta"),
        )

    def plan(self) -> Thinning:
        """What would become of the checkpoints. Raises OutputError where they do not fit."""
        # Where all fit as they are, nothing is read.
        now = sum(item.nbytes for index, item in enumerate(self._items) if index in self._kept) + self._run.bases_bytes
        is_tight = self._options.room is not None and now > self._options.room
        for index, item in enumerate(self._items):
            is_open = is_tight and index in self._kept and item.may_change
            if is_open:
                self._tell(f"{item.record.name}: predicting sizes")
            item.add_choices(self._options.rungs if is_open else (), self._options.threads)
        forms = self._forms(self._planner.plan)
        then = self._planner.taken()
        records = [self._record(index, form) for index, form in enumerate(forms)]
        room, before = self._options.room, sum(item.nbytes for item in self._items) + self._run.bases_bytes
        needs, ranking = self._needs(forms), self._ranking
        place, workspace = str(self._directory), str(self._workspace)
        return Thinning(place, records, before, then, room, needs, workspace, ranking.metric, ranking.is_highest)

    def apply(self) -> Thinning:
        """Do it. Raises OutputError where the disk has too little room, CheckFailedError where a figure fails.

        What was done until then stays.
        """
        planned, free = self.plan(), shutil.disk_usage(self._workspace).free
        require(
            planned.needs <= free,
            f"{planned.needs_in}: has {size(free)} free, and {size(planned.needs)} are needed; nothing was changed",
            OutputError,
        )
        with writing(self._folder):
            remove_abandoned_of(".*?", list(self._folder.iterdir()))
        forms = self._forms(self._planner.go_on)
        # A delta before its base: in place that becomes another file.
        for index, form in reversed([*enumerate(forms)]):
            if form.is_rebased:
                self._do(index, form)
        for index, form in reversed([*enumerate(forms)]):
            if form.choice is None:
                self._do(index, form)
        for index in range(len(self._items)):
            if index not in self._planner.done:
                self._do(index, self._forms(self._planner.go_on)[index])
        self._fit()
        with KeptBases(self._folder) as kept:
            kept.link_needed()
        with suppress(Ckpt8Error):  # somebody saves there: what is to spare goes with that
            release(self._folder)
        after = runs_in(listed_folder(self._directory)).totals()
        records = [
            replace(self._record(index, self._planner.done[index]), bytes=record.bytes)
            for index, record in enumerate(planned)
        ]
        return replace(planned, records=records, then=after["stored_bytes"] + after["raw_bytes"], applied=True)

    def _fit(self) -> None:
        """Let the least useful go where files are larger than predicted. Raises OutputError where none may."""
        room = self._options.room
        while room is not None and self._planner.taken() > room:
            index = self._planner.least_useful()
            if index is None:
                raise OutputError(
                    f"{self._directory}: what has to stay takes a little more than was predicted, and more than "
                    f"{size(room)}; give more"
                )
            self._do(index, Form(None))

    def _forms(self, plan: Callable[[], list[Form]]) -> list[Form]:
        try:
            return plan()
        except RoomError as exc:
            held = listed((f"{item.record.name} ({item.held})" for item in self._items if item.held), 3)
            raise OutputError(
                f"{self._directory}: what has to stay takes about {size(exc.least)} at "
                f"{self._options.rungs[-1].name}, more than {size(self._options.room or 0)}; keep fewer, or give more"
                + (f"; as it is stays {held}" if held else "")
            ) from None

    def _record(self, index: int, form: Form) -> ThinRecord:
        item, choice = self._items[index], form.choice
        record, is_packed = item.record, item.packed is not None and item.raw is None
        name = "gone" if choice is None else "whole" if form.is_rebased else choice.name
        return ThinRecord(
            record.name,
            record.step,
            self._ranking.scores[index],
            item.nbytes,
            form.nbytes,
            name,
            record.steps if is_packed else 0.0,
            None if choice is None else choice.steps,
            None if form.base is None else self._items[form.base].record.name,
            twice=is_packed and choice is not None and choice.rung is not None,
            held=item.held,
        )

    def _needs(self, forms: Sequence[Form]) -> int:
        """The bytes that have to be free, at most, while it is done: see ``apply`` for the order."""
        if self._workspace != self._folder:
            # Only what takes the place of a container that it was made from is a file here, and only one at a time.
            pairs = zip(forms, self._items, strict=True)
            sizes = [form.nbytes for form, item in pairs if form.is_new and item.raw is None]
            return max(sizes) + _SPARE if sizes else 0
        taken = most = 0
        held: dict[int, int] = {}
        done: set[int] = set()

        def settle(index: int) -> int:
            """What is freed once an item is done: its old files, and those of bases that nothing needs any more."""
            done.add(index)
            item = self._items[index]
            freed = item.record.raw_bytes if item.packed else item.nbytes
            if item.packed:
                held[index] = item.record.stored_bytes
            free = held.keys() - self._needed(done)
            return freed + sum(held.pop(base) for base in free)

        order = [index for index, form in enumerate(forms) if form.is_rebased][::-1]
        order += [index for index, form in enumerate(forms) if form.choice is None][::-1]
        order += [index for index, form in enumerate(forms) if form.choice is not None and form.choice.rung is not None]
        for index in order:
            taken += forms[index].nbytes
            most = max(most, taken)
            taken -= settle(index)
        return most + _SPARE if order else 0

    def _needed(self, done: set[int]) -> set[int]:
        """The items whose old containers are below one that is not done yet."""
        needed = set[int]()
        for index, item in enumerate(self._items):
            below = None if index in done else item.base
            while below is not None and below not in needed:
                needed.add(below)
                below = self._items[below].base
        return needed

    def _do(self, index: int, form: Form) -> None:
        """Make an item what it becomes, and note what that takes."""
        item, choice = self._items[index], form.choice
        alone = item.raw is not None and choice is not None and choice.nbytes < item.nbytes
        if choice is not None and choice.rung is None and not (form.is_rebased or alone):
            self._planner.settle(index, form)
            return
        if choice is None:
            self._tell(f"{item.record.name}: goes")
        elif form.is_rebased:
            self._tell(f"{item.record.name}: becomes whole")
        elif choice.rung is not None:
            self._tell(f"{item.record.name}: becomes {choice.name}")
        with KeptBases(self._folder) as kept:
            kept.link_needed()
            if not kept.has_links:
                self._make_whole_above(index)
            if choice is None:
                _remove(item)
            elif choice.rung is not None:
                form = self._compress(item, form, choice.rung)
            else:
                if form.is_rebased and item.packed is not None:
                    form = replace(form, nbytes=form.nbytes - item.alone + self._rebase(item))
                if alone and item.raw is not None:
                    remove_verified(item.raw, item.target, threads=self._options.threads)
            item.looks = {} if choice is None else _looks(item)
            if choice is None or form.is_new or form.is_rebased:
                item.base = None
        drop_unneeded(self._folder)
        self._planner.settle(index, form)

    def _make_whole_above(self, base: int) -> None:
        """Make the deltas whole that need an item, those first that need them in turn."""
        for index, item in enumerate(self._items):
            if item.base == base and item.packed is not None:
                self._make_whole_above(index)
                self._tell(f"{item.record.name}: becomes whole, since its base changes")
                item.grow(self._rebase(item))
                self._planner.forget()
                item.looks = _looks(item)

    def _rebase(self, item: Item) -> int:
        """Make a delta whole; its size."""
        assert item.packed is not None  # noqa: S101 - a delta is a container
        return rebase(item.packed, threads=self._options.threads).stat().st_size

    def _compress(self, item: Item, form: Form, rung: Rung) -> Form:
        """Compress an item, verify it, and have it take the place of what was there; its form with real figures."""
        base = None if form.base is None else self._items[form.base].target
        threads = self._options.threads
        if item.raw is not None:
            if item.packed is not None:
                check_made_from(item.raw, item.raw, item.packed, threads)
            compress(
                item.raw,
                item.target,
                preset=rung.preset,
                budget=rung.budget,
                base=base,
                threads=threads,
                force=item.packed is not None,
            )
            item.packed = item.target
            remove_verified(item.raw, item.target, threads=threads)
        else:

            def approve(written: Path) -> None:
                with looked_for_in([item.target.parent]):  # it is elsewhere where that is in a store
                    check_made_from(item.target, item.target, written, threads)

            coarsen(item.target, preset=rung.preset, budget=rung.budget, base=base, threads=threads, approve=approve)
        with ContainerReader(item.target) as reader:
            steps, nbytes = reader.manifest.error_in_steps, reader.size
        assert form.choice is not None  # noqa: S101 - it has a rung
        choice = replace(form.choice, steps=steps, nbytes=nbytes if base is None else form.choice.nbytes)
        return replace(form, choice=choice, nbytes=nbytes)


class Upkeep:
    """Applies rules and a room to the folder of a run again and again, as checkpoints come."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(
        self, folder: Path, protect: Sequence[str] = (), tell: Callable[[str], object] = lambda _: None
    ) -> None:
        """Thin a folder; nothing where there is no checkpoint yet. Raises as ``thin``."""
        folder = without_remains(folder, remove=True)
        _finish(folder, self._options, tell)
        if find(folder).places:
            Thinner(folder, replace(self._options, protect=protect), tell).apply()


def _finish(directory: Path, options: Options, tell: Callable[[str], object]) -> None:
    """Finish what killed processes left in the folders of a run; ``tell`` gets a line about what has to stay."""
    for folder in {directory / place.run for place in find(directory).places}:
        try:
            finish_removals(folder, options.threads)
        except Ckpt8Error as exc:
            tell(str(exc))


def upkeep(keep: str | None, to: int | str | None, *, delta: bool = True, threads: int | None = None) -> Upkeep | None:
    """An ``Upkeep``; None where nothing is asked for. Raises UsageError."""
    return None if keep is None and to is None else Upkeep(Options.of(keep, to, delta=delta, threads=threads))


def _item(
    directory: Path,
    record: RunRecord,
    options: Options,
    taken: set[Path],
    asked: Callable[[Path], str | None],
) -> Item:
    """A checkpoint with its files.

    What is damaged, not at rest, of several files, protected or ``asked`` for by its name stays as it is. A directory
    that ranks have packed may go, and does not change; nor does one with a container of another checkpoint in its way.
    ``taken`` are the containers that others are to become; its own is added.
    """
    path = directory / record.name
    is_plain = record.kind == "raw"
    beside = directory / PurePosixPath(record.name).parent
    raw = path if is_plain else None if record.raw is None else beside / record.raw.rpartition("/")[2]
    packed = None if is_plain else path
    target = path
    names = {record.name, path.name, *(() if record.raw is None else (record.raw, Path(record.raw).name))}
    is_packed_by_ranks = packed is not None and packed.is_dir()
    if is_packed_by_ranks:
        raw, packed = (packed, None) if raw is None else (None, None)
    held = record.problem or (None if record.kind else "nothing says what it is")
    is_sound = held is None and not (is_plain and incomplete(path))
    if any(name == glob or fnmatchcase(name, glob) for name in names for glob in options.protect):
        held = held or "it is protected"
    held = held or next(filter(None, (asked(file) for file in (raw, packed) if file is not None)), None)
    may_change = not is_packed_by_ranks and (raw is None or is_set_aside(raw) or not raw.is_dir())
    if raw is not None and held is None:
        # A folder of other things as well is no checkpoint to remove, nor is that of the run itself.
        held = problem_of(raw) if raw.exists() else "it is gone"
    if raw is not None and held is None:
        job = placed(raw, Settings(), force=False, taken=taken)
        held = (None if job.problem is None else str(job.problem)) or Rest(REST, watched=False).problem(raw)
        if record.name == "." or (packed is not None and job.target != packed):
            held = held or "it is in several files"
        target, may_change = packed or job.target, may_change and job.present == (packed is not None)
    if raw is None and packed is None:
        held = held or "it is in several files"
    item = Item(record, raw, packed, target, held=held, is_sound=is_sound, may_change=held is None and may_change)
    item.looks = _looks(item) if held is None else {}
    return item


def _looks(item: Item) -> dict[Path, Look]:
    """How the files of a checkpoint look. Raises InputError."""
    with reading(item.target):
        return {path: look_at(path) for path in (item.raw, item.packed) if path and path.exists()}


def _remove(item: Item) -> None:
    """Remove the files of a checkpoint, unless they have changed since they were listed. Raises OutputError."""
    require(
        _looks(item) == item.looks,
        f"{item.target}: is kept: it, or what it was made from, changed after it was listed; run the command again",
        OutputError,
    )
    for path in item.looks:
        refuse_removal(path)
        with writing(path):
            if path != item.raw:
                remove_container(path)
            elif is_directory(path):
                remove_directory(path, turn_in_store)
            else:
                path.unlink()
            sync_directory(path.parent)


@checked
def thin(
    directory: str | os.PathLike[str],
    *,
    keep: str | None = None,
    to: int | str | None = None,
    finest: str = "flash",
    coarsest: str = "budget:5",
    protect: Sequence[str] = (),
    delta: bool = True,
    leave_reader: bool = False,
    apply: bool = False,
    threads: int | None = None,
    tell: Callable[[str], object] = lambda _: None,
) -> Thinning:
    """Fit a run into so much room, or say what that would do: compress old checkpoints more, and keep fewer.

    ``keep`` are rules such as ``last:3,best:1,every:1000,log``, which add up; what none of them keeps goes. ``to`` is
    the room in bytes, or as in "50GB". Where there are no rules, checkpoints go for the lack of room as well, the least
    useful first; the newest stays. ``finest`` and ``coarsest`` are presets, or budgets as ``budget:5``: what is
    compressed is that fine at most, and that coarse. Those whose names match one of ``protect`` stay as they are.
    Without ``delta`` all files are whole. Nothing is changed unless ``apply``; then ``leave_reader`` puts
    ``read_ckpt8.py`` there, as ``chain`` does. ``tell`` gets a line about each step.

    A checkpoint that is compressed is verified against what it was made from before that goes, as ``remove`` of
    ``chain`` does; for a ``directory`` in a bucket, as ``s3://BUCKET/run``, in a temporary file. Raises InputError for
    a folder without checkpoints or with several runs, OutputError where they do not fit or the disk has too little
    room, UsageError for the arguments.

    >>> ckpt8.thin(".", keep="last:1").gone
    []
    """
    path = as_path(directory)
    refuse_target(path)
    options = Options.of(keep, to, finest, coarsest, protect, delta=delta, threads=threads)
    folder = without_remains(path, remove=apply)
    if apply:
        _finish(folder, options, tell)
    thinner = Thinner(folder, options, tell)
    if apply and leave_reader:
        reader_copy.leave_reader(path)
    return thinner.apply() if apply else thinner.plan()
