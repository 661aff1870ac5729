"""``ckpt8.runs``: an overview of all checkpoints of a run, from the heads of their files. Imports no torch.

``Run`` is what it returns, with a ``RunRecord`` for each checkpoint. ``read`` makes a row from the files of one
checkpoint: ``read_container`` reads the head of a container, and the frames of a skeleton where step and loss stand in
it; ``read_file`` of any other file reads what its reader says, without a value but the numbers of progress.
``Progress`` is the step, epoch and loss of a checkpoint, where a file states them.

``find`` groups files. A file is a checkpoint of its own, unless it is one of several parts in its folder, see
``parts_in``. Everything below a folder belongs to it where a file says that the folder is one checkpoint, such as the
``.metadata`` of a distributed one.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, TypeVar

from ckpt8.checkpoint.meaning.nodes import is_optimizer
from ckpt8.checkpoint.readers import match_reader
from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.readers.directory import open_directory
from ckpt8.checkpoint.readers.entries import Entry, kept
from ckpt8.checkpoint.readers.torch_zip import tree_of_head
from ckpt8.checkpoint.replacing import (
    TRAINER_STATE,
    epoch_in_name,
    is_one_checkpoint,
    may_be_checkpoint,
    parts_in,
    step_in_path,
)
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import Checkpoint, Components, TensorRef, format_path, iter_nodes, number_of, read_scalar
from ckpt8.codecs.error_stats import StepError, read_step_error
from ckpt8.container import bases
from ckpt8.container.bases import KEPT, is_kept_name
from ckpt8.container.header import CONTAINER, container_names, is_container
from ckpt8.container.joined import read_index
from ckpt8.container.manifest import FILE, BaseRecord, original_name
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import INDEX, is_part
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile, refuse_url
from ckpt8.core.json_text import parse_any_json
from ckpt8.core.public import checked
from ckpt8.inspecting.container import origin_of, read_json
from ckpt8.inspecting.facts import EPOCH_KEYS, GLOBAL_KEYS, LARGEST, STEP_KEYS, asked_words, first_number, step_figures

SUFFIXES = frozenset({".ckpt8", ".pt", ".pth", ".ckpt", ".safetensors"})
"""A file of such a name that is no checkpoint is damaged."""

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
class Found:
    """The checkpoints of a run, and the containers in folders of bases."""

    places: list[Place] = field(default_factory=list)
    bases: list[Path] = field(default_factory=list)


def find(directory: Path) -> Found:
    """All files below a directory that may be checkpoints. Raises InputError where it cannot be read."""
    run = Found()
    _visit(directory, "", run)
    return run


def _visit(root: Path, above: str, into: Found) -> None:
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
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == METADATA or not entry.name.startswith("."):
                    # A link to something below its folder, such as ``last.ckpt``, is another name for that.
                    target = (folder / entry.name).resolve() if entry.is_symlink() else None
                    if entry.is_dir():
                        folders += [entry.name] if target is None else []
                    elif target is None or not target.is_relative_to(folder.resolve()):
                        files.append(entry.name)
    except OSError as exc:
        raise InputError(f"{folder}: cannot be read: {exc.strerror}") from exc
    return sorted(files), sorted(folders)


def _below(folder: Path, into: Found) -> Iterator[str]:
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


_LOSS_KEYS = ("loss", "train_loss", "training_loss")
_VALIDATION_KEYS = (
    "val_loss",
    "eval_loss",
    "valid_loss",
    "validation_loss",
    "test_loss",
    "best_val_loss",
    "best_loss",
)

_SCORES = ("current_score", "best_model_score")
"""What Lightning's ModelCheckpoint keeps of the quantity that it monitors."""

StepFrom = Literal["file", "name", "optimizer"]

Number = Callable[[Components, TensorRef], float | None]
"""The value of a tensor of one element at a path; None where it cannot be read."""


@dataclass(slots=True)
class Progress:
    """How far training was; None where nothing says it. ``loss`` is that of training."""

    step: int | None = None
    epoch: float | None = None
    loss: float | None = None
    val_loss: float | None = None

    def complete(self, other: Progress) -> None:
        """Take from ``other`` what is unknown."""
        _complete(self, other, ("step", "epoch", "loss", "val_loss"))


def _complete(record: object, other: object, names: Iterable[str]) -> None:
    """Take those attributes from ``other`` that are None in ``record``."""
    for name in names:
        if getattr(record, name) is None:
            setattr(record, name, getattr(other, name))


def step_of(path: str, stated: int | None, counted: int | None) -> tuple[int | None, StepFrom | None]:
    """The step of a checkpoint at ``path``, with slashes, and where it was found.

    The step that a file ``stated`` under a name of its own comes first, then that in the path. What an optimizer
    ``counted`` is last: it may count other steps than the run does.
    """
    steps: dict[StepFrom, int | None] = {"file": stated, "name": step_in_path(path), "optimizer": counted}
    return next(((step, source) for source, step in steps.items() if step is not None), (None, None))


def of_tree(tree: Any, number: Number, keys: Iterable[str] = STEP_KEYS) -> Progress:
    """What stands at the top of a checkpoint, its step under one of ``keys``, and in callbacks of Lightning."""
    if not isinstance(tree, dict):
        return Progress()
    progress = Progress(
        _whole(_first(tree, keys, number)),
        first_number([tree], EPOCH_KEYS, whole=False),
        _first(tree, _LOSS_KEYS, number),
        _first(tree, _VALIDATION_KEYS, number),
    )
    for monitored, score in _scores(tree, number):
        if "loss" in monitored:
            progress.complete(Progress(loss=score) if "train" in monitored else Progress(val_loss=score))
    return progress


def of_trainer_state(tree: Any) -> Progress:
    """What Trainer's ``trainer_state.json`` says: the last losses of its log up to its step."""
    if not isinstance(tree, dict):
        return Progress()
    progress = Progress(_whole(_first(tree, STEP_KEYS, no_tensor)), first_number([tree], EPOCH_KEYS, whole=False))
    for entry in log if isinstance(log := tree.get("log_history"), list) else []:
        if isinstance(entry, dict):
            progress.loss = _finite(entry.get("loss"), progress.loss)
            progress.val_loss = _finite(entry.get("eval_loss"), progress.val_loss)
    return progress


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and value >= 0 and value.is_integer() else None


def _finite(value: object, other: float | None = None) -> float | None:
    """A finite number; ``other`` for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST
    return float(value) if is_number else other  # type: ignore[arg-type]


def no_tensor(_: Components, __: TensorRef) -> None:
    """The value of no tensor: nothing is read."""


def _first(tree: Mapping[Any, Any], keys: Iterable[str], number: Number) -> float | None:
    return _first_known(_value(tree.get(key), (key,), number) for key in keys)


T = TypeVar("T")


def _first_known(values: Iterable[T | None]) -> T | None:
    return next((value for value in values if value is not None), None)


def _value(node: Any, path: Components, number: Number) -> float | None:
    """A number, plain or in a tensor of one element."""
    if isinstance(node, TensorRef):
        return _finite(number(path, node)) if node.numel == 1 else None
    return _finite(node)


def _scores(tree: Mapping[Any, Any], number: Number) -> Iterator[tuple[str, float]]:
    """For every ModelCheckpoint of Lightning what it monitors, and the score of the last save, else the best one."""
    callbacks = tree.get("callbacks")
    for key, state in callbacks.items() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and isinstance(monitored := state.get("monitor"), str):
            refs = {name: state.get(name) for name in _SCORES}
            # One tensor under two names is stored under one of them.
            places = ((node, name) for node in refs.values() for name in refs if _share_elements(node, refs[name]))
            score = _first_known(_value(node, ("callbacks", str(key), name), number) for node, name in places)
            if score is not None:
                yield monitored.lower(), score


def _share_elements(one: Any, other: Any) -> bool:
    return one.key == other.key if isinstance(one, TensorRef) and isinstance(other, TensorRef) else one is other


def optimizer_step(tree: Any, number: Number) -> int | None:
    """The step in the state of the first parameter of an optimizer that counts them."""
    for path, node in iter_nodes(tree):
        if is_optimizer(node):
            for key, state in node["state"].items():
                step = state.get("step") if isinstance(state, dict) else None
                value = _value(step, (*path, "state", str(key), "step"), number)
                if value is not None and value >= 0:
                    return int(value)
    return None


@dataclass(slots=True)
class Facts:
    """``bytes`` are those of the original, ``counted`` the step in the state of an optimizer.

    ``trains``: a file that is not compressed holds the state of an optimizer and more. The rest is that of a container:
    ``original`` is the name of what it was made from.
    """

    format: str
    bytes: int
    progress: Progress = field(default_factory=Progress)
    counted: int | None = None
    trains: bool = False
    original: str | None = None
    asked: str | None = None
    seal: str | None = None
    base: BaseRecord | None = None
    error: StepError | None = None


_LONGEST_STATE = 16 << 20

_MOST_MEMBERS = 8
"""Files of a directory in which a step is looked for."""


def read_container(path: Path) -> Facts:
    """The facts of a container. Raises InputError for damage."""
    with ContainerReader(path) as reader:
        manifest = reader.manifest
        rules = (parameter.rule or {} for parameter in manifest.parameters)
        return Facts(
            format=f"ckpt8 {manifest.version}",
            bytes=sum(member.size for member in manifest.members),
            progress=_progress(reader),
            counted=next((step for rule in rules if type(step := rule.get("step")) is int and step > 0), None),
            original=original_name(manifest),
            asked=asked_words(manifest.preset, manifest.budget),
            seal=reader.seal.hex(),
            base=manifest.base,
            error=_total(read_step_error(parameter.steps) for parameter in manifest.parameters),
        )


def _total(errors: Iterable[StepError | None]) -> StepError | None:
    """The sum of errors; None where none was measured, or where all that is lossy is outside."""
    total = StepError()
    for error in errors:
        total.merge(error or StepError())
    return total if total.energy > 0 else None


def _progress(reader: ContainerReader) -> Progress:
    """What the tree of a single file says, or the state of Trainer in a directory."""

    def number(path: Components, _: TensorRef) -> float | None:
        place = reader.element(format_path(path))
        return None if place is None else number_of(*place)

    if reader.manifest.directory is None:
        return of_tree(_tree(reader, 0), number)
    progress, members = Progress(), reader.manifest.members
    for index, member in enumerate(members):
        if member.path.rpartition("/")[2] == TRAINER_STATE and member.size <= _LONGEST_STATE:
            content = reader.skeleton(index)
            if content is not None and len(content) == member.size:
                with suppress(InputError):  # the file may have been odd before it was compressed
                    progress.complete(of_trainer_state(parse_any_json(content, TRAINER_STATE)))
    for index in range(min(len(members), _MOST_MEMBERS)):
        if progress.step is None:
            progress.step = of_tree(_tree(reader, index), no_tensor, GLOBAL_KEYS).step
    return progress


def _tree(reader: ContainerReader, index: int) -> Any:
    """The tree of a member; None where it has none, or a pickle that is longer than what is read of it."""
    head, member = reader.skeleton(index), reader.manifest.members[index]
    with suppress(InputError):
        return None if head is None else tree_of_head(member.format, head, member.path)
    return None


Kind = Literal["key", "delta", "raw"]


@dataclass(slots=True)
class RunRecord:
    """One checkpoint of a run; ``name`` is its path below the directory, ``run`` the folder of the run in that.

    A checkpoint that is there both compressed and as it was is one record, that of the container: ``raw`` names the
    other one, which takes ``raw_bytes``.

    ``kind`` is ``key`` for a container that needs no other, ``delta`` for one that needs its ``base``, ``raw`` for any
    other checkpoint, and None where damage hides it. ``asked`` is what it was compressed with. ``bytes`` are those of
    the original, ``stored_bytes`` those of its files now. ``step_from`` says where the step was found: ``file``,
    ``name`` or ``optimizer``. ``steps`` is the measured error in steps of the optimizer. ``base`` is the name of its
    base, ``missing`` where that is not to be found. ``damage`` says what does not hold: seal, length, or a head.
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
    time: datetime = field(default_factory=lambda: datetime.fromtimestamp(0, timezone.utc))
    bytes: int | None = None
    stored_bytes: int = 0
    raw: str | None = None
    raw_bytes: int = 0
    steps: float | None = None
    seal: str | None = None
    base: str | None = None
    damage: str | None = None

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


@dataclass(slots=True)
class Run:
    """The checkpoints of a directory in the order of their steps, run by run; iterates over them.

    ``bases_bytes`` are those of bases that are kept for deltas alone, of checkpoints that are gone.
    """

    path: str
    checkpoints: list[RunRecord]
    bases_bytes: int = 0

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


_PICKLE = b"\x80"


def read_file(path: Path) -> Facts | None:
    """The facts of a file; None if it is no checkpoint. Raises InputError for damage."""
    with closing(SourceFile(ByteRange.of(path))) as file:
        size = file.source.length
        reader = match_reader(file) if size else None
        if reader is None:
            if path.suffix not in SUFFIXES or (size and file.read(0, 1) == _PICKLE):
                return None
            what = "is no checkpoint; it is damaged" if size else "is empty"
            raise InputError(f"{path}: {what}, or its save was interrupted")
        try:
            checkpoint = reader.read(file)
        except UnsupportedError as exc:
            return Facts(kept(exc, file.source), size)
        if not any(storage.nbytes for storage in checkpoint.storages):
            return None
        progress = of_tree(checkpoint.tree, _number(checkpoint))
        counted = optimizer_step(checkpoint.tree, _number(checkpoint)) if progress.step is None else None
        trains = any(is_optimizer(node) for at, node in iter_nodes(checkpoint.tree) if at)
        return Facts(checkpoint.format, size, progress, counted, trains)


def _number(checkpoint: Checkpoint) -> Number:
    storages = {storage.key: storage for storage in checkpoint.storages}

    def number(_: Components, ref: TensorRef) -> float | None:
        return read_scalar(checkpoint, storages[ref.key], ref) if ref.key in storages else None

    return number


def read_folder(path: Path, files: Sequence[str], *, needs_tensors: bool) -> Facts | None:
    """The facts of files in a folder; None if they need tensors and hold none. Raises InputError for damage."""
    with open_directory(path, [Entry(name, FILE) for name in files], decode=False) as members:
        bundle = Bundle(path, members, path.name)
        if needs_tensors and not bundle.holds_tensors:
            return None
        origin = origin_of(bundle)
        is_stated = origin["step_from"] == "file"
        progress = Progress(origin["step"] if is_stated else None, origin["epoch"])
        for member in members:
            if member.path.rpartition("/")[2] == TRAINER_STATE and member.checkpoint.format == FILE:
                progress.complete(of_trainer_state(read_json(member.checkpoint)))
        counted = None if is_stated else origin["step"]
        if progress.step is None and counted is None:
            checkpoints = (member.checkpoint for member in members)
            counted = _first_known(optimizer_step(file.tree, _number(file)) for file in checkpoints)
        return Facts(origin["framework"] or "directory", bundle.size, progress, counted)


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
    containers = [path for path in paths if path.suffix == CONTAINER or is_container(path)]
    heads: list[Facts] = []

    def attempt(read_facts: Callable[[], Facts | None]) -> Facts | None:
        try:
            facts = read_facts()
        except InputError as exc:
            row.record.damage = row.record.damage or str(exc)
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
        try:
            status = path.stat()
        except OSError as exc:
            raise InputError(f"{path}: cannot be read: {exc.strerror}") from exc
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


def _complete_row(row: Row, heads: Sequence[Facts], *, is_raw: bool) -> None:
    """Put together what the files say."""
    record, error = row.record, _total(facts.error for facts in heads)
    progress = Progress()
    for facts in heads:
        progress.complete(facts.progress)
        record.asked = record.asked or facts.asked
    if is_raw:
        record.kind = "raw"
    elif row.seals:
        record.kind = "delta" if row.bases else "key"
    record.format = ", ".join(dict.fromkeys(facts.format for facts in heads)) or None
    record.bytes = None if record.damage else sum(facts.bytes for facts in heads)
    record.steps = None if error is None else step_figures(error)["steps"]
    record.seal = row.seals[0] if len(row.seals) == 1 else None
    record.epoch, record.loss, record.val_loss = progress.epoch, progress.loss, progress.val_loss
    record.step, record.step_from = step_of(record.name, progress.step, _first_known(facts.counted for facts in heads))
    if record.epoch is None:
        record.epoch = epoch_in_name(record.name.rpartition("/")[2])


@checked
def runs(directory: str | os.PathLike[str]) -> Run:
    """The checkpoints in a directory and in folders below it, compressed or not. Reads heads, no tensor.

    A damaged file is a record that says so. Raises InputError where there is no checkpoint at all.

    >>> [(record.name, record.kind, record.raw, record.step) for record in ckpt8.runs(".")]
    [('run.ckpt8', 'key', 'run.pt', 1)]
    """
    root = Path(directory)
    refuse_url(root)
    if root.is_file():
        raise InputError(f"{root}: is a file; give the folder of a run")
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
    _complete(ours, theirs, ("epoch", "loss", "val_loss"))


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
