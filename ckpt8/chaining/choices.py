"""What a checkpoint may become: as it is, the presets and budgets of RUNGS from fine to coarse, or gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path, PurePosixPath

from ckpt8.chaining.chain import REST, Rest, placed
from ckpt8.chaining.jobs import Look, Settings, last_change, look_at, refuse_removal
from ckpt8.checkpoint.readers.entries import is_directory
from ckpt8.checkpoint.replacing import incomplete, problem_of, turn_in_store
from ckpt8.compressing.policy import Policy
from ckpt8.container.kept_bases import remove_container
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import OutputError, UsageError, require
from ckpt8.core.files.atomic import sync_directory, writing
from ckpt8.core.files.atomic_directory import is_set_aside, remove_directory
from ckpt8.core.files.source_file import reading
from ckpt8.inspecting.prediction import Expected, expect
from ckpt8.inspecting.runs import RunRecord

_GAIN = 0.97
"""A coarser rung takes less than this part of what the finer one takes."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A preset, or a budget in steps. ``steps`` is about what it errs, where that is not known better."""

    name: str
    steps: float
    preset: str | None = None
    budget: float | None = None

    @property
    def policy(self) -> Policy:
        """What it asks for."""
        return Policy.of(self.preset, (), self.budget)


def rung(text: str) -> Rung:
    """The rung of a preset's name, or of ``budget:STEPS``. Raises UsageError."""
    name, _, number = text.partition(":")
    if name == "budget":
        try:
            budget = float(number)
        except ValueError:
            raise UsageError(f"{text!r} is no budget; give budget:STEPS, such as budget:2") from None
        Policy.of(None, (), budget)
        return Rung(f"budget:{budget:g}", budget, budget=budget)
    known = {"lossless": 0.0, "flash": 0.06, "compact": 0.15, "archive": 1.0}
    if text not in known:
        raise UsageError(f"{text!r} is neither {', '.join(known)} nor budget:STEPS")
    return Rung(text, known[text], preset=text)


RUNGS = tuple(map(rung, ("lossless", "flash", "compact", "archive", "budget:2", "budget:5")))


def rungs_between(finest: str, coarsest: str) -> list[Rung]:
    """The rungs from one to another, both included. Raises UsageError."""
    first, last = rung(finest), rung(coarsest)
    if first.steps > last.steps:
        raise UsageError(f"the finest, {finest}, is coarser than the coarsest, {coarsest}")
    inner = [each for each in RUNGS if first.steps < each.steps < last.steps]
    return list(dict.fromkeys((first, *inner, last)))


ALONE = ".ckpt8 alone"
"""The name of a choice: the original beside a container goes."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a checkpoint may become: ``nbytes`` whole, with an error of ``steps``, None where that is unknown.

    ``loss`` is what the error counts as. Without a ``rung`` nothing is compressed: ``name`` is ``as it is``, or
    ``ALONE``.
    """

    name: str
    nbytes: int
    steps: float | None
    loss: float
    rung: Rung | None = None
    expected: Expected | None = None


@dataclass
class Item:
    """A checkpoint of the run. ``raw`` is the original, ``packed`` its container, as far as they are there.

    ``base`` is the number of the item that the container is a delta to. ``leans``: its base is a checkpoint that is
    gone, in ``bases/``. ``is_sound``: it is complete, as far as its heads say. ``held`` says why it has to stay as it
    is; other ones may go, and change if ``may_change``. ``damage`` says why it cannot be read whole. ``looks`` is how
    its files looked when they were listed, or written.
    """

    record: RunRecord
    raw: Path | None
    packed: Path | None
    target: Path
    base: int | None = None
    leans: bool = False
    is_sound: bool = True
    held: str | None = None
    damage: str | None = None
    may_change: bool = True
    choices: list[Choice] = field(default_factory=list)
    looks: dict[Path, Look] = field(default_factory=dict)

    def grow(self, whole: int) -> None:
        """Note that the container became ``whole``, of so many bytes, before anything else becomes of it."""
        more = whole - self.record.stored_bytes
        self.record.stored_bytes, self.base, self.leans = whole, None, False
        self.choices = [
            each if each.rung is not None else replace(each, nbytes=each.nbytes + more) for each in self.choices
        ]

    @property
    def may_go(self) -> bool:
        """Whether it may be removed."""
        return self.held is None

    def hold(self, why: str, damage: str | None = None) -> None:
        """Leave it as it is from now on."""
        self.held, self.damage, self.may_change = self.held or why, self.damage or damage, False
        self.is_sound &= damage is None
        del self.choices[1:]

    @property
    def nbytes(self) -> int:
        """What it takes now."""
        return self.record.stored_bytes + self.record.raw_bytes

    @cached_property
    def alone(self) -> int:
        """What the container takes without a base. Raises InputError."""
        with ContainerReader(self.packed or self.target) as reader:
            return reader.whole_size

    @cached_property
    def saved(self) -> float:
        """When it was saved, in seconds: by the original, as long as that is there. Raises InputError."""
        if self.raw is None or not self.raw.exists():
            return self.record.time.timestamp()
        with reading(self.raw):
            return last_change(look_at(self.raw)) / 1e9

    @property
    def source(self) -> Path:
        """What it would be compressed from: the original, as long as that is there."""
        return self.raw if self.raw is not None and self.raw.exists() else self.packed or self.target

    def add_choices(self, rungs: Sequence[Rung], threads: int | None) -> None:
        """Predict what it may become. Raises InputError for a source that cannot be read."""
        record, now = self.record, self.record.kind == "raw" or self.record.raw is not None
        steps = 0.0 if record.kind == "raw" else record.steps
        own = _steps_asked(record.asked) if steps is None else steps
        self.choices = [Choice("as it is", self.nbytes, 0.0 if now else steps, 0.0 if now else own)]
        if not self.may_change:
            return
        if self.raw is not None and self.packed is not None:
            self.choices.append(Choice(ALONE, record.stored_bytes, steps, own))
        earlier = 0.0 if now else own
        coarser = [each for each in rungs if self.packed is None or each.steps > own]
        predicted = expect(self.source, [each.policy for each in coarser], threads) if coarser else []
        for each, expected in zip(coarser, predicted, strict=True):
            error = None if expected.steps is None or (steps is None and not now) else expected.steps + earlier
            loss = each.steps + earlier if error is None else error
            if expected.nbytes < _GAIN * self.choices[-1].nbytes:
                self.choices.append(Choice(each.name, expected.nbytes, error, loss, each, expected))


def _steps_asked(asked: str | None) -> float:
    """About what a container errs that was made with these words; 0 for unknown ones."""
    try:
        return rung((asked or "").replace("budget ", "budget:")).steps
    except UsageError:
        return 0.0


def item_of(
    directory: Path,
    record: RunRecord,
    protect: Sequence[str],
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
    if any(name == glob or fnmatchcase(name, glob) for name in names for glob in protect):
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
    item.damage = record.problem
    item.looks = looks_of(item) if held is None else {}
    return item


def looks_of(item: Item) -> dict[Path, Look]:
    """How the files of a checkpoint look. Raises InputError."""
    with reading(item.target):
        return {path: look_at(path) for path in (item.raw, item.packed) if path and path.exists()}


def remove_item(item: Item) -> None:
    """Remove the files of a checkpoint, unless they have changed since they were listed. Raises OutputError."""
    require(
        looks_of(item) == item.looks,
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
