"""Step, epoch and loss of a checkpoint, where a file states them. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ckpt8.checkpoint.meaning.nodes import is_optimizer
from ckpt8.checkpoint.run_folder import step_in_path
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.walk import Components, iter_nodes
from ckpt8.inspecting.counters import EPOCH_KEYS, LARGEST, STEP_KEYS, first_number

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
    found = Progress(
        _whole(_first(tree, keys, number)),
        first_number([tree], EPOCH_KEYS, whole=False),
        _first(tree, _LOSS_KEYS, number),
        _first(tree, _VALIDATION_KEYS, number),
    )
    for monitored, score in _scores(tree, number):
        if "loss" in monitored.lower():
            is_trained = _TRAINED in monitored.lower()
            found.complete(Progress(loss=score) if is_trained else Progress(val_loss=score))
    return found


def of_trainer_state(tree: Any) -> Progress:
    """What Trainer's ``trainer_state.json`` says: the last losses of its log up to its step."""
    if not isinstance(tree, dict):
        return Progress()
    found = Progress(_whole(_first(tree, STEP_KEYS, no_tensor)), first_number([tree], EPOCH_KEYS, whole=False))
    log = tree.get("log_history")
    for entry in log if isinstance(log, list) else []:
        if isinstance(entry, dict):
            found.loss = _finite(entry.get("loss"), found.loss)
            found.val_loss = _finite(entry.get("eval_loss"), found.val_loss)
    return found


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
            places = [(node, other) for node in refs.values() for other, each in refs.items() if _are_one(node, each)]
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
