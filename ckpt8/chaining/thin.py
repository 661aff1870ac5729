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
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ckpt8.chaining import reader_copy
from ckpt8.chaining.choices import ALONE, Item, Rung, item_of, looks_of, remove_item, rungs_between
from ckpt8.chaining.jobs import (
    check_made_from,
    finish_removals,
    remove_verified,
)
from ckpt8.chaining.keeping import Keep, Ranking
from ckpt8.chaining.layout import Form
from ckpt8.chaining.room import Planner, RoomError
from ckpt8.checkpoint.replacing import asked_for
from ckpt8.compressing.compress import coarsen, compress
from ckpt8.container.bases import KEPT, looked_for_in
from ckpt8.container.kept_bases import KeptBases, drop_unneeded, release
from ckpt8.container.reader import ContainerReader
from ckpt8.container.writer import rebase
from ckpt8.core.errors import CheckFailedError, Ckpt8Error, InputError, OutputError, UsageError, require
from ckpt8.core.files.atomic import remove_abandoned_of, workspace, writing
from ckpt8.core.files.atomic_directory import without_remains
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import RemotePath, refuse_target
from ckpt8.core.files.source_file import listed as listed_folder
from ckpt8.core.public import checked, parse_size
from ckpt8.core.summary import Summarised
from ckpt8.core.text import counted, listed, size
from ckpt8.inspecting.runs import MISSING, find, runs_in
from ckpt8.inspecting.verify import verify

_SPARE = 1 << 20
"""Bytes of the disk that stay free."""


@dataclass(frozen=True, slots=True)
class ThinRecord:
    """One checkpoint: ``bytes`` now and ``then``, 0 for one that goes, with errors in ``steps`` and ``steps_then``.

    ``score`` is its value of ``Thinning.metric``. ``becomes`` is ``as it is``, ``whole`` where a delta loses its base,
    ``.ckpt8 alone`` where the original beside it goes, a preset or a budget, or ``gone``. ``base`` is the checkpoint
    that it is then a delta to. ``twice``: it is compressed from a lossy container, and errors add up. ``held`` says why
    it has to stay as it is, ``damage`` why it cannot be read whole. ``drops_original``: the original goes, once its
    container was verified against it.
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
    damage: str | None = None
    drops_original: bool = False


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

    @property
    def problems(self) -> list[str]:
        """Why some cannot be read whole, which stay as they are, a line each."""
        return [record.damage for record in self.records if record.damage is not None]

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

    def __init__(self, directory: Path, options: Options, tell: Callable[[str], object]) -> None:
        self._directory, self._options, self._tell = directory, options, tell
        self._run = runs_in(directory)
        folders = list(dict.fromkeys(record.run for record in self._run))
        require(
            len(folders) == 1,
            f"{directory}: holds several runs, in {listed(name or '.' for name in folders)}; give the folder of one",
        )
        self._folder = directory / folders[0]
        self._workspace, self._is_remote = workspace(self._folder), isinstance(self._folder, RemotePath)
        taken, asked = set[Path](), asked_for(self._folder)
        self._items = [item_of(directory, record, options.protect, taken, asked) for record in self._run]
        records = [item.record for item in self._items]
        self._ranking = Ranking.of(records)
        numbers = {record.name: index for index, record in enumerate(records)}
        for item in self._items:
            item.base = numbers.get(item.record.base or "")
            item.leans = item.record.base not in (None, MISSING, *numbers)
        self._spread_damage()

    def plan(self) -> Thinning:
        """What would become of the checkpoints. Raises OutputError where they do not fit."""
        kept, firm = self._staying()
        while self._predict(kept):
            self._spread_damage()
            kept, firm = self._staying()
        self._planner = Planner(
            self._items,
            self._options.room,
            kept,
            kept if self._options.keep.is_given else firm,
            outside=self._run.bases_bytes,
            delta=self._options.delta,
            threads=self._options.threads,
            tell=lambda name: self._tell(f"{name}: predicting its delta"),
        )
        forms = self._forms(self._planner.plan)
        then = self._planner.taken()
        records = [self._record(index, form) for index, form in enumerate(forms)]
        room, before = self._options.room, sum(item.nbytes for item in self._items) + self._run.bases_bytes
        needs, ranking = self._needs(forms), self._ranking
        place, workspace = str(self._directory), str(self._workspace)
        return Thinning(place, records, before, then, room, needs, workspace, ranking.metric, ranking.is_highest)

    def _newest(self) -> set[int]:
        """The numbers of the newest, and of the newest with a step: none that is damaged or was never finished.

        Where a run began again at lower steps, the one that was saved last is among them.
        """
        sound = [index for index, item in enumerate(self._items) if item.is_sound]
        # Whatever is written in a store becomes the latest there.
        latest = [] if self._is_remote else sorted(sound, key=lambda index: (self._items[index].saved, index))
        stepped = [index for index in sound if self._items[index].record.step is not None]
        return {*sound[-1:], *stepped[-1:], *latest[-1:]}

    def _staying(self) -> tuple[set[int], set[int]]:
        """The numbers of those that rules keep, and of those that stay in any case."""
        sound = [index for index, item in enumerate(self._items) if item.is_sound]
        firm = {index for index, item in enumerate(self._items) if not item.may_go} | self._newest()
        kept = self._options.keep.kept([self._items[index].record for index in sound])
        return {sound[number] for number in kept} | firm, firm

    def _predict(self, kept: Set[int]) -> bool:
        """Predict what those may become that are kept; whether one turned out to be damaged."""
        # Where all fit as they are, nothing is read.
        now = sum(self._items[index].nbytes for index in kept) + self._run.bases_bytes
        is_tight, is_damaged = self._options.room is not None and now > self._options.room, False
        for index, item in enumerate(self._items):
            is_open = is_tight and index in kept and item.may_change
            if item.choices and not (is_open and len(item.choices) == 1):
                continue
            if is_open:
                self._tell(f"{item.record.name}: predicting sizes")
            try:
                item.add_choices(self._options.rungs if is_open else (), self._options.threads)
            except InputError as exc:
                item.hold(exc.problem, exc.problem)
                is_damaged = True
        return is_damaged

    def _spread_damage(self) -> None:
        """Hold what needs a damaged one, which cannot be read either, and what a damaged one needs, for a salvage."""
        damaged = [index for index, item in enumerate(self._items) if item.damage is not None]
        for index in damaged:
            name = self._items[index].record.name
            for above, item in enumerate(self._items):
                if item.base == index and item.damage is None:
                    item.hold(why := f"it needs {name}, which cannot be read", f"{item.record.name}: {why}")
                    damaged.append(above)
            base = self._items[index].base
            while base is not None:
                self._items[base].hold(f"{name} needs it, which cannot be read")
                base = self._items[base].base

    def apply(self) -> Thinning:
        """Do it. Raises OutputError where the disk has too little room, CheckFailedError where a figure fails.

        What was done until then stays. So does what turns out to be damaged.
        """
        planned = self.plan()
        while any(record.becomes == "gone" for record in planned) and self._newest_is_damaged():
            self._spread_damage()
            planned = self.plan()
        free = shutil.disk_usage(self._workspace).free
        require(
            planned.needs <= free,
            f"{planned.needs_in}: has {size(free)} free, and {size(planned.needs)} are needed; nothing was changed",
            OutputError,
        )
        with writing(self._folder):
            remove_abandoned_of(".*?", list(self._folder.iterdir()))
        while (next_one := self._next()) is not None:
            try:
                self._do(*next_one)
            except _UnreadableError as exc:
                self._leave(next_one[0], exc.problem)
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

    def _newest_is_damaged(self) -> bool:
        """Whether a newest one that may change does not hold: then it stays, and is not the newest."""
        for item in (self._items[index] for index in self._newest()):
            if item.held is None and item.raw is None and item.packed is not None and not self._is_remote:
                try:
                    verify(item.packed, threads=self._options.threads)
                except (InputError, CheckFailedError) as exc:
                    item.hold(exc.problem, exc.problem)
                    return True
        return False

    def _next(self) -> tuple[int, Form] | None:
        """What is done next: a delta before its base, which becomes another file in place; then what goes."""
        forms = [each for each in enumerate(self._forms(self._planner.go_on)) if each[0] not in self._planner.done]
        rebased = [each for each in forms if each[1].is_rebased]
        gone = [each for each in forms if each[1].choice is None]
        return next(iter([*reversed(rebased), *reversed(gone), *forms]), None)

    def _leave(self, index: int, problem: str) -> None:
        """Leave an item as it is that turned out to be damaged, and plan the rest again."""
        item = self._items[index]
        self._tell(f"{item.record.name}: stays as it is: {problem}")
        item.hold(problem, problem)
        outside = 0
        with suppress(InputError, OSError), ContainerReader(item.target) as reader:
            # What has become another file stays in ``bases/``, and has no other name.
            below = [link.path for link in reader.links() if link.path.parent.name == KEPT]
            outside = sum(path.stat().st_size for path in below if path.stat().st_nlink == 1)
        self._spread_damage()
        item.leans |= outside > 0
        self._planner.hold({at for at, each in enumerate(self._items) if each.held}, outside)
        self._planner.settle(index, Form(item.choices[0], item.nbytes))

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
            twice=is_packed and form.is_new,
            held=item.held,
            damage=item.damage,
            drops_original=item.raw is not None and (form.is_new or name == ALONE),
        )

    def _needs(self, forms: Sequence[Form]) -> int:
        """The bytes that have to be free, at most, while it is done: see ``apply`` for the order."""
        if self._is_remote:
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
        order += [index for index, form in enumerate(forms) if form.is_new]
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
                remove_item(item)
            elif choice.rung is not None:
                form = self._compress(item, form, choice.rung)
            else:
                if form.is_rebased and item.packed is not None:
                    with _reading_source():
                        form = replace(form, nbytes=form.nbytes - item.alone + self._rebase(item))
                if alone and item.raw is not None:
                    remove_verified(item.raw, item.target, threads=self._options.threads)
            if choice is not None and not self._is_remote:
                # It was saved then, and what is saved last is the newest.
                with suppress(OSError):  # another user's, or a file system without such times
                    os.utime(item.target, (item.saved, item.saved))
            item.looks = {} if choice is None else looks_of(item)
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
                item.looks = looks_of(item)

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
            with _reading_source():
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

            with _reading_source():
                coarsen(
                    item.target, preset=rung.preset, budget=rung.budget, base=base, threads=threads, approve=approve
                )
        with ContainerReader(item.target) as reader:
            steps, nbytes = reader.manifest.error_in_steps, reader.size
        assert form.choice is not None  # noqa: S101 - it has a rung
        choice = replace(form.choice, steps=steps, nbytes=nbytes if base is None else form.choice.nbytes)
        return replace(form, choice=choice, nbytes=nbytes)


class _UnreadableError(InputError):
    """A checkpoint turned out to be damaged as it was read."""


@contextmanager
def _reading_source() -> Iterator[None]:
    """For a block that reads a checkpoint: raises _UnreadableError where that is damaged."""
    try:
        yield
    except InputError as exc:
        raise _UnreadableError(exc.problem) from exc


class Upkeep:
    """Applies rules and a room to the folder of a run again and again, as checkpoints come."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(
        self, folder: Path, protect: Sequence[str] = (), tell: Callable[[str], object] = lambda _: None
    ) -> None:
        """Thin a folder; nothing where there is no checkpoint yet. Warns of damaged ones. Raises as ``thin``."""
        folder = without_remains(folder, remove=True)
        if _finish(folder, self._options, tell):
            for problem in Thinner(folder, replace(self._options, protect=protect), tell).apply().problems:
                warnings.warn(f"{problem}; it stays as it is", RuntimeWarning, stacklevel=2)


def _finish(directory: Path, options: Options, tell: Callable[[str], object]) -> bool:
    """Finish what killed processes left in the folders of a run; ``tell`` gets a line about what has to stay.

    Returns whether there is a checkpoint.
    """
    folders = {directory / place.run for place in find(directory).places}
    for folder in folders:
        try:
            finish_removals(folder, options.threads)
        except Ckpt8Error as exc:
            tell(str(exc))
    return bool(folders)


def upkeep(keep: str | None, to: int | str | None, *, delta: bool = True, threads: int | None = None) -> Upkeep | None:
    """An ``Upkeep``; None where nothing is asked for. Raises UsageError."""
    return None if keep is None and to is None else Upkeep(Options.of(keep, to, delta=delta, threads=threads))


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
