"""What the heads of a checkpoint's files say: how far training was, what a container states. Imports no torch.

``read_container`` reads the head of a container, and the frames of a skeleton where step and loss stand in it.
``read_file`` and ``read_folder`` read what the reader of any other file says, without a value but the numbers of
progress. ``TrainingProgress`` is the step, epoch and loss of a checkpoint, where a file states them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ckpt8.checkpoint.meaning.nodes import is_optimizer
from ckpt8.checkpoint.readers import match_reader
from ckpt8.checkpoint.readers.directory import open_directory
from ckpt8.checkpoint.readers.entries import Entry, kept
from ckpt8.checkpoint.readers.torch_zip import tree_of_head
from ckpt8.checkpoint.replacing import TRAINER_ARGUMENTS, TRAINER_STATE, step_in_name, step_in_path
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import (
    Checkpoint,
    Components,
    Inert,
    TensorRef,
    format_path,
    iter_nodes,
    number_of,
    read_scalar,
)
from ckpt8.codecs.error_stats import StepError, read_step_error
from ckpt8.container.manifest import FILE, BaseRecord, original_name
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, open_range
from ckpt8.core.json_text import parse_any_json
from ckpt8.inspecting.container import origin_of, read_json
from ckpt8.inspecting.facts import EPOCH_KEYS, GLOBAL_KEYS, LARGEST, STEP_KEYS, asked_words, first_number

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

_MODE = re.compile(r"'mode': '(min|max)'")
"""Its direction, in the name under which Lightning keeps the state of a ModelCheckpoint."""

Mode = Literal["min", "max"]

StepFrom = Literal["file", "name", "optimizer"]

Number = Callable[[Components, TensorRef], float | None]
"""The value of a tensor of one element at a path; None where it cannot be read."""


@dataclass(slots=True)
class TrainingProgress:
    """How far training was; None where nothing says it. ``loss`` is that of training.

    ``metric`` is what the framework chooses its best checkpoint by, ``score`` its value, and ``mode`` says whether the
    lowest or the highest is the best. ``best`` are the names of those that it calls the best.
    """

    step: int | None = None
    epoch: float | None = None
    loss: float | None = None
    val_loss: float | None = None
    metric: str | None = None
    mode: Mode | None = None
    score: float | None = None
    best: tuple[str, ...] = ()

    def complete(self, other: TrainingProgress) -> None:
        """Take from ``other`` what is unknown."""
        fill_unknown(self, other, ("step", "epoch", "loss", "val_loss"))
        if self.metric is None:
            self.metric, self.mode, self.score = other.metric, other.mode, other.score
        self.best = tuple(dict.fromkeys((*self.best, *other.best)))


def fill_unknown(record: object, other: object, names: Iterable[str]) -> None:
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


def of_tree(tree: Any, number: Number, keys: Iterable[str] = STEP_KEYS) -> TrainingProgress:
    """What stands at the top of a checkpoint, its step under one of ``keys``, and in callbacks of Lightning."""
    if not isinstance(tree, dict):
        return TrainingProgress()
    progress = TrainingProgress(
        _whole(_first(tree, keys, number)),
        first_number([tree], EPOCH_KEYS, whole=False),
        _first(tree, _LOSS_KEYS, number),
        _first(tree, _VALIDATION_KEYS, number),
    )
    for monitor in _monitors(tree, progress.step, number):
        if "loss" in (monitor.metric or "").lower():
            is_training = "train" in (monitor.metric or "").lower()
            progress.complete(
                TrainingProgress(loss=monitor.score) if is_training else TrainingProgress(val_loss=monitor.score)
            )
        progress.complete(monitor if monitor.mode else TrainingProgress(best=monitor.best))
    return progress


def of_trainer_state(tree: Any, arguments: Any) -> TrainingProgress:
    """What Trainer's ``trainer_state.json`` says: the last losses of its log up to its step.

    ``arguments`` is the tree of ``training_args.bin`` beside it, which names the metric of the best checkpoint.
    """
    if not isinstance(tree, dict):
        return TrainingProgress()
    progress = TrainingProgress(
        _whole(_first(tree, STEP_KEYS, no_tensor)), first_number([tree], EPOCH_KEYS, whole=False)
    )
    given = arguments.state if isinstance(arguments, Inert) and isinstance(arguments.state, dict) else {}
    metric, is_greater_better = given.get("metric_for_best_model"), given.get("greater_is_better")
    if isinstance(metric, str) and isinstance(is_greater_better, bool):
        progress.metric = metric if metric.startswith("eval_") else f"eval_{metric}"
        progress.mode = "max" if is_greater_better else "min"
    if isinstance(best := tree.get("best_model_checkpoint"), str):
        progress.best = (Path(best).name,)
    for entry in log if isinstance(log := tree.get("log_history"), list) else []:
        if isinstance(entry, dict):
            progress.loss = _finite(entry.get("loss"), progress.loss)
            progress.val_loss = _finite(entry.get("eval_loss"), progress.val_loss)
            progress.score = _finite(entry.get(progress.metric), progress.score)
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
    return first_known(_value(tree.get(key), (key,), number) for key in keys)


T = TypeVar("T")


def first_known(values: Iterable[T | None]) -> T | None:
    """The first value that is not None; None without any."""
    return next((value for value in values if value is not None), None)


def _value(node: Any, path: Components, number: Number) -> float | None:
    """A number, plain or in a tensor of one element."""
    if isinstance(node, TensorRef):
        return _finite(number(path, node)) if node.numel == 1 else None
    return _finite(node)


def _monitors(tree: Mapping[Any, Any], step: int | None, number: Number) -> Iterator[TrainingProgress]:
    """What every ModelCheckpoint of Lightning monitors, with the score of this checkpoint, and which it calls best.

    A checkpoint that is none of the best has no score if their names tell their steps: ``current_score`` is then that
    of another one.
    """
    callbacks = tree.get("callbacks")
    for key, state in callbacks.items() if isinstance(callbacks, dict) else ():
        if isinstance(state, dict) and isinstance(metric := state.get("monitor"), str):
            best = {path: at for path, at in _dict(state.get("best_k_models")).items() if isinstance(path, str)}
            nodes: dict[Components, Any] = {(name,): state.get(name) for name in _SCORES}
            nodes |= {("best_k_models", path): node for path, node in best.items()}
            steps = {step_in_name(Path(path).name): ("best_k_models", path) for path in best}
            own: list[Components] = [("current_score",), ("best_model_score",)] if None in steps or not steps else []
            own = [steps[step]] if step in steps and step is not None else own
            # One tensor under two names is stored under one of them.
            values = (
                _value(nodes[name], ("callbacks", str(key), *place), number)
                for name in own
                for place, node in nodes.items()
                if _share_elements(nodes[name], node)
            )
            mode = _MODE.search(str(key))
            path = state.get("best_model_path")
            yield TrainingProgress(
                metric=metric,
                mode=None if mode is None else "max" if mode[1] == "max" else "min",
                score=first_known(values),
                best=(Path(path).name,) if isinstance(path, str) and path else (),
            )


def _dict(node: Any) -> dict[Any, Any]:
    return node if isinstance(node, dict) else {}


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
    ``original`` is the name of what it was made from, ``earlier`` the error in steps that this states.
    """

    format: str
    bytes: int
    progress: TrainingProgress = field(default_factory=TrainingProgress)
    counted: int | None = None
    trains: bool = False
    original: str | None = None
    asked: str | None = None
    seal: str | None = None
    base: BaseRecord | None = None
    error: StepError | None = None
    earlier: dict[str, float | None] | None = None


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
            earlier=manifest.earlier,
            error=sum_of_errors(read_step_error(parameter.steps) for parameter in manifest.parameters),
        )


def sum_of_errors(errors: Iterable[StepError | None]) -> StepError | None:
    """The sum of errors; None where none was measured, or where all that is lossy is outside."""
    total = StepError.total(error or StepError() for error in errors)
    return total if total.energy > 0 else None


def _progress(reader: ContainerReader) -> TrainingProgress:
    """What the tree of a single file says, or the state of Trainer in a directory."""

    def number(path: Components, _: TensorRef) -> float | None:
        place = reader.element(format_path(path))
        return None if place is None else number_of(*place)

    if reader.manifest.directory is None:
        return of_tree(_tree(reader, 0), number)
    progress, members = TrainingProgress(), reader.manifest.members
    places = {_name(member.path): index for index, member in enumerate(members)}
    arguments = _tree(reader, places[TRAINER_ARGUMENTS]) if TRAINER_ARGUMENTS in places else None
    for index, member in enumerate(members):
        if _name(member.path) == TRAINER_STATE and member.size <= _LONGEST_STATE:
            content = reader.skeleton(index)
            if content is not None and len(content) == member.size:
                with suppress(InputError):  # the file may have been odd before it was compressed
                    progress.complete(of_trainer_state(parse_any_json(content, TRAINER_STATE), arguments))
    for index in range(min(len(members), _MOST_MEMBERS)):
        if progress.step is None:
            progress.step = of_tree(_tree(reader, index), no_tensor, GLOBAL_KEYS).step
    return progress


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _tree(reader: ContainerReader, index: int) -> Any:
    """The tree of a member; None where it has none, or a pickle that is longer than what is read of it."""
    head, member = reader.skeleton(index), reader.manifest.members[index]
    with suppress(InputError):
        return None if head is None else tree_of_head(member.format, head, member.path)
    return None


SUFFIXES = frozenset({".ckpt8", ".pt", ".pth", ".ckpt", ".safetensors"})
"""A file of such a name that is no checkpoint is damaged."""

_PICKLE = b"\x80"


def read_file(path: Path) -> Facts | None:
    """The facts of a file; None if it is no checkpoint. Raises InputError for damage."""
    with closing(open_range(ByteRange.of(path))) as file:
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
        progress = TrainingProgress(origin["step"] if is_stated else None, origin["epoch"])
        trees = {_name(member.path): member.checkpoint.tree for member in members}
        for member in members:
            if _name(member.path) == TRAINER_STATE and member.checkpoint.format == FILE:
                progress.complete(of_trainer_state(read_json(member.checkpoint), trees.get(TRAINER_ARGUMENTS)))
        counted = None if is_stated else origin["step"]
        if progress.step is None and counted is None:
            checkpoints = (member.checkpoint for member in members)
            counted = first_known(optimizer_step(file.tree, _number(file)) for file in checkpoints)
        return Facts(origin["framework"] or "directory", bundle.size, progress, counted)
