"""``verify --resume-steps``: the next N steps of the optimizer, on the original and on the compressed state.

Steps are calls of the rules of ``ckpt8.optim``. Both sides take the same gradients: noise at the scale of the moments
of the original, see ``checkpoint.meaning.replayed``. Memory holds one parameter for each thread. After every step

    update   NMSE = sum (du)^2 / sum u^2 over all parameters, and max |du|
    weights  sqrt(sum (dw)^2 / sum w^2), and the largest |dw| in units of the RMS of its tensor

where d is compressed minus original. The *replay error* of a file is the largest NMSE of its steps. A parameter whose
original is not finite, or whose original takes a step that is not, is left out: compression did not do that.

``ReplayFigures`` are these figures by step, over all parameters. A ``ReplaySource`` is one side of a replay: the
parameters of a file, and the weights that other files of its directory hold.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.names import NamesFromWeights
from ckpt8.checkpoint.meaning.optimizer_state import SavedParameter, UpdateRule, recognise
from ckpt8.checkpoint.meaning.pairing import saved_parameters
from ckpt8.checkpoint.meaning.replayed import Gradients, Order, Replayed, find_rule
from ckpt8.checkpoint.readers import READERS
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Streamer
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef, read_settings
from ckpt8.codecs.error_stats import NoiseError
from ckpt8.container.manifest import DCP
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arrays import as_array
from ckpt8.core.errors import CheckFailedError, InputError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Workers
from ckpt8.inspecting.change import Change, measure
from ckpt8.optim.cards import Form
from ckpt8.optim.known_optimizers import SIDE_STATE


@dataclass(slots=True)
class ReplayedStepError(NoiseError):
    """Error of the update after one step, and of the weights, as sums over parameters; ``max_*`` are maxima."""

    max_update: float = 0.0
    weight_error: float = 0.0
    weight: float = 0.0
    max_weight: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain figures; None for unknown weights, and for an error without any update."""
        known = self.weight > 0
        return {
            "update_nmse": self.nmse if math.isfinite(self.nmse) else None,
            "update_max": self.max_update,
            "weight_rms": math.sqrt(self.weight_error / self.weight) if known else None,
            "weight_max": self.max_weight if known else None,
        }


@dataclass(slots=True)
class ReplayFigures:
    """Figures by step, numbers of parameters, and by name the reason why others, or their weights, are left out.

    ``first`` is the first step of the parameters, ``with_gradient`` in number, whose step needs a gradient: the figure
    that a container states of them.
    """

    steps: list[ReplayedStepError]
    first: ReplayedStepError = field(default_factory=ReplayedStepError)
    with_gradient: int = 0
    parameters: int = 0
    with_weights: int = 0
    without_weights: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def add(
        self, name: str, steps: list[ReplayedStepError] | str, unpaired: str | None, *, needs_gradient: bool
    ) -> None:
        """Add a parameter: its figures by step, or why there are none; ``unpaired`` says why it has no weight."""
        if isinstance(steps, str):
            self.skipped[name] = steps
        elif not all(step.finite for step in steps):
            self.broken.append(name)
        else:
            self.parameters += 1
            self.with_weights += unpaired is None
            self.without_weights |= {} if unpaired is None else {name: unpaired}
            for total, step in zip(self.steps, steps, strict=True):
                total.merge(step)
            if needs_gradient:
                self.with_gradient += 1
                self.first.merge(steps[0])

    @property
    def worst(self) -> float:
        """The replay error: the largest NMSE of the updates; infinite if no parameter was replayed."""
        return max((step.nmse for step in self.steps), default=0.0) if self.parameters else math.inf

    def failures(self, limit: float | None) -> list[str]:
        """Lines about steps that broke, and about a replay error above ``limit``."""
        problems = [f"{name}: a replayed step is not finite" for name in self.broken]
        if limit is not None and not self.parameters:
            problems.append("no parameter could be replayed, so that the replay error is unknown")
        elif limit is not None and self.worst > limit:
            problems.append(f"the replay error of {len(self.steps)} steps is {self.worst:.3g}, above {limit:.3g}")
        return problems

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "replay_error": self.worst if math.isfinite(self.worst) else None,
            "parameters": self.parameters,
            "with_weights": self.with_weights,
            "without_weights": self.without_weights,
            "skipped": self.skipped,
            "steps": [step.to_json() for step in self.steps if self.parameters],
            "first_of_gradient_rules": {"parameters": self.with_gradient, **self.first.to_json()}
            if self.with_gradient
            else None,
        }


def left_out(resume: Mapping[str, Any]) -> list[str]:
    """Lines about weights and parameters that the figures of ``ReplayFigures.to_json`` leave out."""
    lines = []
    weights, skipped = (sorted(Counter(resume[key].values()).items()) for key in ("without_weights", "skipped"))
    if weights:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in weights)
        lines.append(f"weights: {resume['with_weights']} of {resume['parameters']} parameters ({reasons})")
    return lines + [f"not replayed: {count} parameters: {reason}" for reason, count in skipped]


@dataclass(frozen=True, slots=True)
class Replayable:
    """One file with its parameters, by path the files that may hold their weights, and its storages by key."""

    checkpoint: Checkpoint
    parameters: list[SavedParameter]
    files: Mapping[str, Checkpoint]
    storages: Mapping[str, StorageInfo]

    def read(self, form: Form, saved: SavedParameter) -> _Side:
        """The state and the weight of a parameter. Raises InputError."""
        state = {
            tensor.key: values.reshape(-1) if tensor.is_moment else values
            for tensor in form.tensors
            if isinstance(ref := saved.state.get(tensor.key), TensorRef)
            for values in [self._load(ref)]
        }
        return _Side(state, None if saved.weight is None else self._load(saved.weight, saved.home).reshape(-1))

    def _load(self, ref: TensorRef, home: str | None = None) -> torch.Tensor:
        """The values of a tensor as float32, from the file at the path ``home`` or this one. Raises InputError."""
        values = torch.empty(ref.shape, dtype=ref.dtype.torch)
        Streamer(self.checkpoint if home is None else self.files[home]).copy(ref, values)
        return values.float()

    def rule(self, saved: SavedParameter) -> Replayed | str:
        """The rule of a parameter, or why it is unknown. Raises InputError."""
        own = {key: value for key, value in saved.state.items() if key in SIDE_STATE}
        group = read_settings(self.checkpoint, self.storages, saved.group)
        state = {**saved.state, **read_settings(self.checkpoint, self.storages, own)}
        rule = find_rule(state, group, state.get("step", group.get("step")))
        refs = (value for value in saved.state.values() if isinstance(value, TensorRef))
        is_part = any(ref.share is not None and ref.share.whole != ref.shape for ref in refs)
        if isinstance(rule, Replayed) and rule.form.reach != "element" and is_part:
            return "its step takes the whole tensor, and the file has a part of it"
        return rule


class ReplaySource:
    """An open file, directory, or container of either."""

    def __init__(self, source: Bundle) -> None:
        self._source = source
        self._members = {member.path: member.checkpoint for member in source.opened}
        self._names = None if source.directory is None else NamesFromWeights(list(self._members.items()))

    def of_member(self, path: str) -> Replayable:
        """What to replay of a member; of a single file, whatever its name. Raises InputError where it is missing."""
        if self._source.directory is None:
            path = self._source.opened[0].path
        elif path not in self._members:
            raise InputError(f"{self._source.path / path}: no such file")
        checkpoint, beside = self._members[path], None if self._names is None else self._names.beside(path)
        parameters = saved_parameters(checkpoint.tree, beside, as_torch=True)
        return Replayable(checkpoint, parameters, self._members, {each.key: each for each in checkpoint.storages})


_SPREAD = "the files of a distributed checkpoint are not replayed"


def replay(
    original: Replayable, compressed: Replayable, figures: ReplayFigures, workers: Workers, prefix: str = ""
) -> None:
    """Replay every parameter of a known rule for as many steps as ``figures`` has, and add the figures to it.

    ``prefix`` comes before names. Raises InputError for damage, CheckFailedError if the two trees are not alike.
    """
    mine, theirs = original.parameters, compressed.parameters
    if [saved.name for saved in mine] != [saved.name for saved in theirs]:
        raise CheckFailedError(
            "the original and the compressed file have different parameters, so no step can be replayed"
        )
    replay_one = partial(_replay, original, compressed, len(figures.steps), threading.Lock())
    for saved, figures_of in zip(mine, workers.map(replay_one, zip(mine, theirs, strict=True)), strict=True):
        rule = recognise(saved.state, saved.group, None)
        needs_gradient = isinstance(rule, UpdateRule) and rule.kind == "replayed"
        figures.add(prefix + saved.name, figures_of, saved.unpaired, needs_gradient=needs_gradient)


def replay_files(reader: ContainerReader, original: Path, steps: int, workers: Workers) -> ReplayFigures:
    """Replay every member with ``workers``; threads of its own decode the container."""
    figures = ReplayFigures([ReplayedStepError() for _ in range(steps)])
    with open_source(original) as one, open_source(reader.path) as other:
        first, second = ReplaySource(one), ReplaySource(other)
        for record in reader.manifest.members:
            if record.format == DCP:
                names = (parameter.name for parameter in reader.manifest.parameters)
                figures.skipped.update({name: _SPREAD for name in names if name.startswith(f"{record.path}:")})
            if record.format in READERS:
                prefix = "" if reader.manifest.directory is None else f"{record.path}:"
                replay(first.of_member(record.path), second.of_member(record.path), figures, workers, prefix)
    return figures


@dataclass(slots=True)
class _Side:
    """State and weight of one parameter on one side: flat fp32, but for row and column statistics."""

    state: dict[str, torch.Tensor]
    weight: torch.Tensor | None

    def find_not_finite(self) -> str | None:
        """The key of a tensor with a NaN or an Inf, or ``the weight``; None without any."""
        tensors = self.state if self.weight is None else {**self.state, "the weight": self.weight}
        return next((key for key, values in tensors.items() if not torch.isfinite(values).all()), None)


def _replay(
    one: Replayable, other: Replayable, steps: int, lock: threading.Lock, pair: tuple[SavedParameter, SavedParameter]
) -> list[ReplayedStepError] | str:
    """The figures of one parameter, step by step, or why it cannot be replayed. Thread-safe.

    The sources take one reader at a time, which has the ``lock``.
    """
    saved, theirs = pair
    with lock:
        rule = one.rule(saved)
        if isinstance(rule, str):
            return rule
        first = saved.state[rule.form.tensors[0].key]
        if problem := _find_misfit(rule.form, saved, first.shape):
            return problem
        original, compressed = one.read(rule.form, saved), other.read(rule.form, theirs)
    is_lost, broken = rule.needs_weight and original.weight is None, original.find_not_finite()
    if is_lost or broken:
        lost = "its weight, which its step needs, was not found"
        return lost if is_lost else f"{broken} of the original is not finite"
    if compressed.find_not_finite():
        return [ReplayedStepError(sum_square_error=math.inf)] * steps
    order, figures = Order.of(rule.form, first), []
    gradients = Gradients(rule, {key: order.stored(values) for key, values in original.state.items()})
    for k in range(steps):
        grad = order.plain(gradients.at(k))
        u, v = (rule.advance(s.state, s.weight, grad, order.shape, rule.step + k + 1) for s in (original, compressed))
        if not torch.isfinite(u).all() or original.find_not_finite():
            return "a replayed step of the original is not finite"
        figures.append(_measure(u, v, original, compressed))
    return figures


def _find_misfit(form: Form, saved: SavedParameter, shape: tuple[int, ...]) -> str | None:
    """Why the state cannot belong to one parameter of this shape, or None."""
    for tensor in form.tensors:
        ref = saved.state.get(tensor.key)
        if isinstance(ref, TensorRef) and (
            ref.shape != tensor.shape(shape) or (len(shape) < 2 and not tensor.is_moment)
        ):
            return f"{tensor.key} does not have the shape of the parameter"
    return None


def _change(x: torch.Tensor, y: torch.Tensor) -> Change:
    """Of fp32."""
    return measure(as_array(x), as_array(y), (DType.FLOAT32, DType.FLOAT32))


def _measure(u: torch.Tensor, v: torch.Tensor, original: _Side, compressed: _Side) -> ReplayedStepError:
    update, weight = _change(u, v), Change()
    if original.weight is not None and compressed.weight is not None:
        weight = _change(original.weight, compressed.weight)
    return ReplayedStepError(
        # ``measure`` leaves NaN and Inf out; a step with any of them is broken.
        sum_square_error=math.inf if update.excluded else update.change,
        sum_square=update.square,
        max_update=update.max_change,
        weight_error=math.inf if weight.excluded else weight.change,
        weight=weight.square,
        max_weight=weight.max_change / weight.rms if weight.rms else 0.0,
    )
