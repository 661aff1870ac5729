"""``ckpt8.runs``: an overview of all checkpoints of a run, from the heads of their files. Imports no torch.

``Run`` is what it returns, with a ``RunRecord`` for each checkpoint. ``read`` makes a row from what ``heads`` says of
the files of one checkpoint.

``find`` groups files. A file is a checkpoint of its own, unless it is one of several parts in its folder, see
``parts_in``. Everything below a folder belongs to it where a file says that the folder is one checkpoint, such as the
``.metadata`` of a distributed one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.replacing import (
    TRAINER_STATE,
    epoch_in_name,
    is_one_checkpoint,
    may_be_checkpoint,
    parts_in,
)
from ckpt8.container import bases
from ckpt8.container.bases import KEPT, is_kept_name
from ckpt8.container.header import CONTAINER, container_names, is_meant_as_container
from ckpt8.container.joined import read_index
from ckpt8.container.manifest import BaseRecord
from ckpt8.container.sharded import INDEX, is_part
from ckpt8.container.steps import added, step_figures
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import InputError
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import is_folder, reading, refuse_url, resolved, scan
from ckpt8.core.files.source_file import listed as listed_folder
from ckpt8.core.public import checked
from ckpt8.core.summary import Summarised
from ckpt8.core.text import counted, size
from ckpt8.inspecting.heads import (
    Facts,
    Mode,
    StepFrom,
    TrainingProgress,
    fill_unknown,
    first_known,
    read_container,
    read_file,
    read_folder,
    step_of,
    sum_of_errors,
)

_DEEPEST = 3
"""Levels of folders below that of the run."""

_OF_A_RUN = re.compile(r"checkpoint[-_]\d+(?:\.ckpt8)?")


@dataclass(frozen=True, slots=True)
class Place:
    """One checkpoint: a file, or a folder and the paths of ``files`` in it, with slashes. ``name`` is for people.

    ``run`` is the folder of the run that it belongs to.
    """

    path: Path
    name: str
    run: str
    files: tuple[str, ...] = ()


@dataclass(slots=True)
class RunFiles:
    """The checkpoints of a run, and the containers in folders of bases."""

    places: list[Place] = field(default_factory=list)
    bases: list[Path] = field(default_factory=list)


def find(directory: Path) -> RunFiles:
    """All files below a directory that may be checkpoints. Raises InputError where it cannot be read."""
    run = RunFiles()
    _visit(directory, "", run)
    return run


def _visit(root: Path, above: str, into: RunFiles) -> None:
    """Look into the folder ``above``, a path with slashes."""
    run, _, folder = above.rpartition("/")
    files, folders = _listed(root / above)
    if folder == KEPT:
        into.bases += [root / above / name for name in files if is_kept_name(name)]
        files = [name for name in files if not is_kept_name(name)]
    if _is_whole(files, folders, is_top=not above):
        into.places.append(Place(root / above, above or ".", run, tuple(sorted(_below(root / above, into)))))
        return
    parts = parts_in(root / above, files)
    if parts:
        into.places.append(Place(root / above, above or ".", run, tuple(parts)))
    for name in files:
        if name not in parts and name != TRAINER_STATE and may_be_checkpoint(name):
            into.places.append(Place(root / above / name, _path(above, name), above))
    if above.count("/") + bool(above) < _DEEPEST:
        for name in folders:
            _visit(root, _path(above, name), into)


def _path(above: str, name: str) -> str:
    """The path of an entry of the folder ``above``, with slashes."""
    return f"{above}/{name}" if above else name


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """The names of files and folders, without hidden ones, and without links to others below this folder."""
    files, folders = [], []
    with reading(folder):
        for entry in scan(folder):
            if entry.name == METADATA or not entry.name.startswith("."):
                # A link to something below its folder, such as ``last.ckpt``, is another name for that.
                target = resolved(folder / entry.name) if entry.is_symlink() else None
                if is_folder(entry):
                    folders += [entry.name] if target is None else []
                elif target is None or not target.is_relative_to(resolved(folder)):
                    files.append(entry.name)
    return sorted(files), sorted(folders)


def _below(folder: Path, into: RunFiles) -> Iterator[str]:
    """The paths of all files below the folder of one checkpoint, without those of bases."""
    waiting = [""]
    while waiting:
        above = waiting.pop()
        files, folders = _listed(folder / above)
        for name in files:
            if above.rpartition("/")[2] == KEPT and is_kept_name(name):
                into.bases.append(folder / above / name)
            else:
                yield _path(above, name)
        waiting += [_path(above, name) for name in folders]


def _is_whole(files: Iterable[str], folders: Iterable[str], *, is_top: bool) -> bool:
    """Whether all below a folder with these entries is one checkpoint. At the top Trainer leaves its last state."""
    is_trained = not is_top and TRAINER_STATE in files and not any(map(_OF_A_RUN.fullmatch, (*files, *folders)))
    return is_trained or is_one_checkpoint(files)


Kind = Literal["key", "delta", "raw"]


@dataclass(slots=True, repr=False)
class RunRecord(Summarised):
    """One checkpoint of a run; ``name`` is its path below the directory, ``run`` the folder of the run in that.

    A checkpoint that is there both compressed and as it was is one record, that of the container: ``raw`` names the
    other one, which takes ``raw_bytes``.

    ``kind`` is ``key`` for a container that needs no other, ``delta`` for one that needs its ``base``, ``raw`` for any
    other checkpoint, and None where damage hides it. ``asked`` is what it was compressed with. ``bytes`` are those of
    the original, ``stored_bytes`` those of its files now. ``step_from`` says where the step was found: ``file``,
    ``name`` or ``optimizer``. ``steps`` is the measured error in steps of the optimizer, with those of
    earlier compressions. ``metric``, ``mode`` and ``score`` say by what its framework chooses the best checkpoint,
    ``best`` which ones it called that. ``base`` is the name of its base, ``missing`` where that is not to be found.
    ``damage`` says what does not hold: seal, length, or a head.
    """

    name: str
    run: str = ""
    kind: Kind | None = None
    format: str | None = None
    asked: str | None = None
    step: int | None = None
    step_from: StepFrom | None = None
    epoch: float | None = None
    loss: float | None = None
    val_loss: float | None = None
    metric: str | None = None
    mode: Mode | None = None
    score: float | None = None
    best: tuple[str, ...] = ()
    time: datetime = field(default_factory=lambda: datetime.fromtimestamp(0, timezone.utc))
    bytes: int | None = None
    stored_bytes: int = 0
    raw: str | None = None
    raw_bytes: int = 0
    steps: float | None = None
    seal: str | None = None
    base: str | None = None
    damage: str | None = None

    def _summary(self) -> Iterator[tuple[str, str]]:
        times = "" if self.ratio is None else f", {self.ratio:.2f} times smaller"
        step = "" if self.step is None else f", step {self.step:,}"
        yield "RunRecord", f"{self.name}: {self.problem or f'{self.kind}{step}, {size(self.stored_bytes)}{times}'}"

    @property
    def ratio(self) -> float | None:
        """How many times smaller than its original a container is; None for other checkpoints."""
        is_packed = self.kind in ("key", "delta") and self.stored_bytes
        return self.bytes / self.stored_bytes if is_packed and self.bytes is not None else None

    @property
    def problem(self) -> str | None:
        """Why the checkpoint cannot be read whole, in a line; None where nothing is known against it."""
        return self.damage or (f"{self.name}: its base is missing" if self.base == MISSING else None)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the time is UTC."""
        return {**asdict(self), "time": self.time.isoformat(timespec="seconds"), "ratio": self.ratio}


MISSING = "missing"
"""The base of a delta that cannot be found."""


@dataclass(slots=True, repr=False)
class Run(Summarised):
    """The checkpoints of a directory in the order of their steps, run by run; iterates over them.

    ``bases_bytes`` are those of bases that are kept for deltas alone, of checkpoints that are gone.
    """

    path: str
    checkpoints: list[RunRecord]
    bases_bytes: int = 0

    def _summary(self) -> Iterator[tuple[str, str]]:
        totals, steps = self.totals(), [record.step for record in self.checkpoints if record.step is not None]
        yield "Run", f"{self.path}: {counted(len(self), 'checkpoint')}"
        ends = dict.fromkeys((min(steps), max(steps))) if steps else ()
        yield "steps", " to ".join(f"{step:,}" for step in ends)
        yield "kinds", ", ".join(f"{totals[kind]:,} {kind}" for kind in ("key", "delta", "raw") if totals[kind])
        smaller = "" if totals["ratio"] is None else f"; containers are {totals['ratio']:.2f} times smaller"
        yield "size", size(totals["stored_bytes"] + totals["raw_bytes"]) + smaller
        yield "problems", f"{len(self.problems):,}, the first: {self.problems[0]}" if self.problems else ""

    def __iter__(self) -> Iterator[RunRecord]:
        return iter(self.checkpoints)

    def __len__(self) -> int:
        return len(self.checkpoints)

    @property
    def problems(self) -> list[str]:
        """What is damaged or lacks its base, a line each."""
        return [record.problem for record in self.checkpoints if record.problem is not None]

    def totals(self) -> dict[str, Any]:
        """Numbers of checkpoints by kind, their bytes before and now, and the ratio of those that are compressed."""
        kinds = [record.kind for record in self.checkpoints]
        packed = [record for record in self.checkpoints if record.ratio is not None]
        before, after = (sum(getattr(record, name) or 0 for record in packed) for name in ("bytes", "stored_bytes"))
        after += self.bases_bytes
        return {
            "checkpoints": len(self.checkpoints),
            **{kind: kinds.count(kind) for kind in ("key", "delta", "raw")},
            "damaged": sum(record.damage is not None for record in self.checkpoints),
            "base_missing": sum(record.base == MISSING for record in self.checkpoints),
            "bytes": sum(record.bytes or 0 for record in self.checkpoints),
            "stored_bytes": sum(record.stored_bytes for record in self.checkpoints) + self.bases_bytes,
            "packed_and_raw": sum(record.raw is not None for record in self.checkpoints),
            "raw_bytes": sum(record.raw_bytes for record in self.checkpoints),
            "bases_bytes": self.bases_bytes,
            "ratio": before / after if before and after else None,
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "path": self.path,
            "totals": self.totals(),
            "checkpoints": [record.to_json() for record in self.checkpoints],
        }


_LATEST = datetime(9999, 1, 1, tzinfo=timezone.utc).timestamp()


@dataclass(slots=True)
class Row:
    """A record, its containers by seal, the bases that they name, and the device and inode of every file.

    ``original`` is the name of what the container at ``path`` was made from.
    """

    record: RunRecord
    path: Path
    original: str | None = None
    seals: list[str] = field(default_factory=list)
    bases: list[tuple[Path, BaseRecord]] = field(default_factory=list)
    inodes: set[tuple[int, int]] = field(default_factory=set)


def read(place: Place) -> Row | None:
    """What the files of a checkpoint say; None if they are none."""
    row = Row(RunRecord(place.name, place.run), place.path)
    paths = [place.path / name for name in place.files] if place.files else [place.path]
    containers = [path for path in paths if is_meant_as_container(path)]
    heads: list[Facts] = []

    def attempt(read_facts: Callable[[], Facts | None]) -> Facts | None:
        try:
            facts = read_facts()
        except InputError as exc:
            row.record.damage = row.record.damage or exc.problem
            return None
        heads.extend([] if facts is None else [facts])
        return facts

    seals: dict[str, str] = {}
    if any(map(_is_index, place.files)):
        attempt(lambda: seals.update(read_index(place.path).files))
        containers = [path for path in containers if not seals or path.name in seals]
        paths = [path for path in paths if path.suffix != CONTAINER or path in containers]
    packed = {path.name for path in containers} if len(containers) < len(paths) else set()
    copies = [path for path in paths if path not in containers and not packed.isdisjoint(container_names(path.name))]
    paths = [path for path in paths if path not in copies]
    attempt(lambda: _measure(row, paths, copies))
    if len(containers) < len(paths):
        attempt(lambda: _read_originals(place, {*containers, *copies}))
    for path in containers:
        facts = attempt(lambda path=path: read_container(path))  # type: ignore[misc]
        if facts is not None and facts.base is not None:
            row.bases.append((path, facts.base))
        row.original = None if facts is None else facts.original
        if facts is not None and seals.pop(path.name, facts.seal) != facts.seal:
            row.record.damage = row.record.damage or f"{path}: belongs to another save than the {INDEX} beside it"
    if seals and row.record.damage is None:
        row.record.damage = f"{place.path / min(seals)}: is missing, and {INDEX} names it"
    if not heads and row.record.damage is None:
        return None
    row.seals += [facts.seal for facts in heads if facts.seal is not None]
    _complete_row(row, heads, is_raw=not containers)
    return row


def _measure(row: Row, paths: Sequence[Path], copies: Sequence[Path]) -> None:
    """Add up the sizes of files, and take the newest time. Raises InputError for one that cannot be looked up.

    ``copies`` are those whose containers are among ``paths``.
    """
    newest = 0.0
    row.record.raw = ", ".join(path.name for path in copies) or None
    for path in (*paths, *copies):
        with reading(path):
            status = path.stat()
        row.inodes.add((status.st_dev, status.st_ino))
        if path in copies:
            row.record.raw_bytes += status.st_size
        else:
            row.record.stored_bytes += status.st_size
        newest = max(newest, status.st_mtime)
    row.record.time = datetime.fromtimestamp(min(newest, _LATEST), timezone.utc)


def _read_originals(place: Place, containers: set[Path]) -> Facts | None:
    if not place.files:
        return read_file(place.path)
    files = [name for name in place.files if place.path / name not in containers and not _is_index(name)]
    return read_folder(place.path, files, needs_tensors=not containers) if files else None


def _is_index(name: str) -> bool:
    return name == INDEX or is_part(name)


_STATED = ("epoch", "loss", "val_loss", "metric", "mode", "score")
"""What the files of a checkpoint say of the training, beside its step."""


def _complete_row(row: Row, heads: Sequence[Facts], *, is_raw: bool) -> None:
    """Put together what the files say."""
    record, error = row.record, sum_of_errors(facts.error for facts in heads)
    progress = TrainingProgress()
    for facts in heads:
        progress.complete(facts.progress)
        record.asked = record.asked or facts.asked
    if is_raw:
        record.kind = "raw"
    elif row.seals:
        record.kind = "delta" if row.bases else "key"
    record.format = ", ".join(dict.fromkeys(facts.format for facts in heads)) or None
    record.bytes = None if record.damage else sum(facts.bytes for facts in heads)
    earlier = first_known(facts.earlier for facts in heads)
    steps = None if error is None else step_figures(error)["steps"]
    record.steps = added(0.0 if record.asked == "lossless" else steps, earlier) if earlier else steps
    record.seal = row.seals[0] if len(row.seals) == 1 else None
    fill_unknown(record, progress, _STATED)
    record.best = progress.best
    record.step, record.step_from = step_of(record.name, progress.step, first_known(facts.counted for facts in heads))
    if record.epoch is None:
        record.epoch = epoch_in_name(record.name.rpartition("/")[2])


@checked
def runs(directory: str | os.PathLike[str]) -> Run:
    """The checkpoints in a directory and in folders below it, compressed or not. Reads heads, no tensor.

    A damaged file is a record that says so. Raises InputError where there is no checkpoint at all.

    >>> [(record.name, record.kind, record.raw, record.step) for record in ckpt8.runs(".")]
    [('run.ckpt8', 'key', 'run.pt', 1)]
    """
    root = as_path(directory)
    refuse_url(root)
    if root.is_file():
        raise InputError(f"{root}: is a file; give the folder of a run")
    return runs_in(listed_folder(root))


def runs_in(root: Path) -> Run:
    """``runs`` of a folder; of one in a store as it was listed."""
    files = find(root)
    with without_collection():
        rows = _joined([row for place in files.places if (row := read(place)) is not None])
    if not rows:
        raise InputError(f"{root}: holds no checkpoint, nor do the folders in it")
    listed = {seal: row.record for row in rows for seal in row.seals}
    for row in rows:
        row.record.base = _base_of(row, listed, root)
    return Run(str(root), sorted((row.record for row in rows), key=_order), _kept(files.bases, rows))


def _joined(rows: Sequence[Row]) -> list[Row]:
    """The rows, those of what a container was made from joined with that of the container."""
    containers = {row.path: row for row in rows if row.path.suffix == CONTAINER}
    joined = []
    for row in rows:
        container = None if row.path in containers else _container_of(row, containers)
        if container is None:
            joined.append(row)
        else:
            _join(container, row)
    return joined


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
    is_damaged = container.damage is not None or raw.damage is not None
    is_same_step = container.step == raw.step or container.step_from != raw.step_from
    return is_damaged or (is_same_step and container.bytes == raw.bytes)


def _join(container: Row, raw: Row) -> None:
    ours, theirs = container.record, raw.record
    ours.raw = ", ".join(name for name in (ours.raw, theirs.name) if name is not None)
    ours.raw_bytes += theirs.stored_bytes
    ours.damage = ours.damage or theirs.damage
    container.inodes |= raw.inodes
    if ours.step_from != "file" and theirs.step is not None:
        ours.step, ours.step_from = theirs.step, theirs.step_from
    fill_unknown(ours, theirs, _STATED)


def _order(record: RunRecord) -> tuple[object, ...]:
    progress = (math.inf if value is None else value for value in (record.step, record.epoch))
    return record.run, *progress, record.time, record.name


def _base_of(row: Row, listed: Mapping[str, RunRecord], root: Path) -> str | None:
    """The name of the base, that of a listed checkpoint if one is the same file; None without one."""
    names = [_found(path, base, listed.get(base.seal), root) for path, base in row.bases]
    return MISSING if MISSING in names else next(iter(names), None)


def _found(container: Path, base: BaseRecord, record: RunRecord | None, root: Path) -> str:
    # Readers see what is beside the delta, and not what is listed in the folder of another run.
    is_beside = record is not None and root / record.run == container.parent
    try:
        path = container if is_beside else bases.find_base(container, base, bases.directories())
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
