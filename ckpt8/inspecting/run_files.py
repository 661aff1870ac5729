"""The files of a run: which of them are one checkpoint, and what their heads say of it. Imports no torch.

``read_container`` reads the head of a container, and the frames of a skeleton where step and loss stand in it.
``Progress`` is the step, epoch and loss of a checkpoint, where a file states them.

``find`` groups files. A file is a checkpoint of its own, unless it is one of several parts in its folder, see
``parts_in``. Everything below a folder belongs to it where a file says that the folder is one checkpoint, such as the
``.metadata`` of a distributed one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ckpt8.checkpoint.meaning.nodes import is_optimizer
from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.readers.torch_zip import tree_of_head
from ckpt8.checkpoint.replacing import TRAINER_STATE, is_one_checkpoint, may_be_checkpoint, parts_in, step_in_path
from ckpt8.checkpoint.tree import Components, TensorRef, format_path, iter_nodes, number_of
from ckpt8.codecs.error_stats import StepError, read_step_error
from ckpt8.container.bases import KEPT, is_kept_name
from ckpt8.container.manifest import BaseRecord
from ckpt8.container.overview import Contained, Overview
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.json_text import Fields, parse_any_json
from ckpt8.inspecting.facts import EPOCH_KEYS, GLOBAL_KEYS, LARGEST, STEP_KEYS, asked_words, first_number

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
    files, folders = _listed(root / above)
    level = above.count("/") + bool(above)
    if above.rpartition("/")[2] == KEPT:
        kept = [name for name in files if is_kept_name(name)]
        into.bases += [root / above / name for name in kept]
        files = [name for name in files if name not in kept]
    run = above.rpartition("/")[0]
    if _is_whole(files, folders, is_top=not above):
        into.places.append(Place(root / above, above or ".", run, tuple(sorted(_below(root / above, into)))))
        return
    parts = parts_in(root / above, files)
    if parts:
        into.places.append(Place(root / above, above or ".", run if above else "", tuple(parts)))
    for name in files:
        if name not in parts and name != TRAINER_STATE and may_be_checkpoint(name):
            path = f"{above}/{name}" if above else name
            into.places.append(Place(root / path, path, above))
    if level < _DEEPEST:
        for name in folders:
            _visit(root, f"{above}/{name}" if above else name, into)


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """The names of files and folders, without hidden ones, and without links to others below this folder."""
    files, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == METADATA or not entry.name.startswith("."):
                    if not entry.is_dir():
                        files += [] if entry.is_symlink() and _stays_below(folder, entry.name) else [entry.name]
                    elif not entry.is_symlink():
                        folders.append(entry.name)
    except OSError as exc:
        raise InputError(f"{folder}: cannot be read: {exc.strerror}") from exc
    return sorted(files), sorted(folders)


def _stays_below(folder: Path, link: str) -> bool:
    """Whether a link is another name for something below its folder, such as ``last.ckpt``."""
    return (folder / link).resolve().is_relative_to(folder.resolve())


def _below(folder: Path, into: Found) -> Iterator[str]:
    """The paths of all files below the folder of one checkpoint, without those of bases."""
    waiting = [""]
    while waiting:
        above = waiting.pop()
        files, folders = _listed(folder / above)
        for name in files:
            path = f"{above}/{name}" if above else name
            if above.rpartition("/")[2] == KEPT and is_kept_name(name):
                into.bases.append(folder / path)
            else:
                yield path
        waiting += [f"{above}/{name}" if above else name for name in folders]


def _is_whole(files: Iterable[str], folders: Iterable[str], *, is_top: bool) -> bool:
    """Whether all below a folder with these entries is one checkpoint. At the top Trainer leaves its last state."""
    if is_one_checkpoint(files):
        return True
    return not is_top and TRAINER_STATE in files and not any(map(_OF_A_RUN.fullmatch, (*files, *folders)))


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

_TRAINED = "train"

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
        for name in ("step", "epoch", "loss", "val_loss"):
            if getattr(self, name) is None:
                setattr(self, name, getattr(other, name))


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
        if "loss" in monitored.lower():
            is_trained = _TRAINED in monitored.lower()
            progress.complete(Progress(loss=score) if is_trained else Progress(val_loss=score))
    return progress


def of_trainer_state(tree: Any) -> Progress:
    """What Trainer's ``trainer_state.json`` says: the last losses of its log up to its step."""
    if not isinstance(tree, dict):
        return Progress()
    progress = Progress(_whole(_first(tree, STEP_KEYS, no_tensor)), first_number([tree], EPOCH_KEYS, whole=False))
    log = tree.get("log_history")
    for entry in log if isinstance(log, list) else []:
        if isinstance(entry, dict):
            progress.loss = _finite(entry.get("loss"), progress.loss)
            progress.val_loss = _finite(entry.get("eval_loss"), progress.val_loss)
    return progress


def _whole(value: float | None) -> int | None:
    return int(value) if value is not None and value >= 0 and value.is_integer() else None


def _finite(value: object, other: float | None = None) -> float | None:
    """A finite number; ``other`` for anything else."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < LARGEST else other  # type: ignore[arg-type]


def no_tensor(_: Components, __: TensorRef) -> None:
    """The value of no tensor: nothing is read."""


def _first(tree: Mapping[Any, Any], keys: Iterable[str], number: Number) -> float | None:
    values = (_value(tree.get(key), (key,), number) for key in keys)
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
            places = [(node, other) for node in refs.values() for other, ref in refs.items() if _are_one(node, ref)]
            values = (_value(node, ("callbacks", str(key), name), number) for node, name in places)
            if (score := next((value for value in values if value is not None), None)) is not None:
                yield monitored, score


def _are_one(one: Any, other: Any) -> bool:
    if isinstance(one, TensorRef) and isinstance(other, TensorRef):
        return one.key == other.key
    return one is other


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
    with closing(SourceFile(ByteRange.of(path))) as file:
        overview = Overview(file)
        parameters = overview.parameters
        return Facts(
            format=f"ckpt8 {overview.version}",
            bytes=sum(member.size for member in overview.members),
            progress=_progress(overview),
            counted=_rule_step(parameters),
            original=overview.directory or next((member.path for member in overview.members), None),
            asked=asked_words(overview.preset, overview.budget),
            seal=overview.seal,
            base=overview.base,
            error=_error_in_steps(parameters),
        )


def _error_in_steps(parameters: Iterable[Fields]) -> StepError | None:
    """The error of all parameters together; None where it was not measured, or where all that is lossy is outside."""
    total = None
    for parameter in parameters:
        if (error := read_step_error(parameter.optional("steps", dict))) is not None:
            total = total or StepError()
            total.merge(error)
    return total if total is not None and total.energy > 0 else None


def _rule_step(parameters: Iterable[Fields]) -> int | None:
    """The step of the first parameter whose update rule has one."""
    rules = (parameter.optional("rule", dict) or {} for parameter in parameters)
    return next((step for rule in rules if type(step := rule.get("step")) is int and step > 0), None)


def _progress(overview: Overview) -> Progress:
    """What the tree of a single file says, or the state of Trainer in a directory."""
    if overview.directory is None:
        return _of_file(overview, overview.members[0]) if len(overview.members) == 1 else Progress()
    progress = Progress()
    for member in overview.members:
        if member.path.rpartition("/")[2] == TRAINER_STATE and member.size <= _LONGEST_STATE:
            content = overview.skeleton(member)
            if content is not None and len(content) == member.size:
                progress.complete(_of_state(content))
    for member in overview.members[:_MOST_MEMBERS] if progress.step is None else ():
        tree = _tree(overview, member)
        if progress.step is None and tree is not None:
            progress.step = of_tree(tree, no_tensor, GLOBAL_KEYS).step
    return progress


def _of_state(content: bytes) -> Progress:
    try:
        return of_trainer_state(parse_any_json(content, TRAINER_STATE))
    except InputError:
        return Progress()  # the file may have been odd before it was compressed


def _of_file(overview: Overview, member: Contained) -> Progress:
    def number(path: Components, _: TensorRef) -> float | None:
        place = overview.element(format_path(path))
        return None if place is None else number_of(*place)

    return of_tree(_tree(overview, member), number)


def _tree(overview: Overview, member: Contained) -> Any:
    """The tree of a member; None where it has none, or a pickle that is longer than what is read of it."""
    head = overview.skeleton(member)
    with suppress(InputError):
        return None if head is None else tree_of_head(member.format, head, member.path)
    return None
