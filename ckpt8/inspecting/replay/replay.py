"""``verify --resume-steps``: the next N steps of the optimizer, on the original and on the compressed state.

Steps are calls of the rules of ``ckpt8.optim``. Both sides take the same gradients: noise at the scale of the moments
of the original, see ``checkpoint.meaning.replayed``. Memory holds one parameter for each thread. After every step

    update   NMSE = sum (du)^2 / sum u^2 over all parameters, and max |du|
    weights  sqrt(sum (dw)^2 / sum w^2), and the largest |dw| in units of the RMS of its tensor

where d is compressed minus original. The *replay error* of a file is the largest NMSE of its steps. A parameter whose
original is not finite, or whose original takes a step that is not, is left out: compression did not do that.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ckpt8.checkpoint.meaning.pairing import SavedParameter
from ckpt8.checkpoint.meaning.replayed import Order, Replayed
from ckpt8.checkpoint.meaning.update_rules import UpdateRule, recognise
from ckpt8.checkpoint.readers import READERS
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.container.manifest import DCP
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError
from ckpt8.core.workers import Workers
from ckpt8.inspecting.diff.change import measure
from ckpt8.inspecting.replay.figures import ReplayFigures, StepFigures
from ckpt8.inspecting.replay.sources import Replayable, ReplaySource
from ckpt8.optim.card import Form

_SPREAD = "the files of a distributed checkpoint are not replayed"


def replay(
    original: Replayable, compressed: Replayable, figures: ReplayFigures, workers: Workers, prefix: str = ""
) -> None:
    """Replay every parameter of a known rule for as many steps as ``figures`` has, and add the figures to it.

    ``prefix`` comes before names. Raises InputError for damage, CheckFailedError if the two trees are not alike.
    """
    both = _Sides(original, compressed, len(figures.steps))
    mine, theirs = original.parameters, compressed.parameters
    if [saved.name for saved in mine] != [saved.name for saved in theirs]:
        raise CheckFailedError(
            "the original and the compressed file have different parameters, so no step can be replayed"
        )
    jobs = zip(mine, theirs, strict=True)
    for saved, found in zip(mine, workers.map(both.replay, jobs), strict=True):
        rule = recognise(saved.state, saved.group, None)
        needs_gradient = isinstance(rule, UpdateRule) and rule.kind == "replayed"
        figures.add(prefix + saved.name, found, saved.unpaired, needs_gradient=needs_gradient)


def replay_files(reader: ContainerReader, original: Path, steps: int, workers: Workers) -> ReplayFigures:
    """Replay every member with ``workers``; threads of its own decode the container."""
    figures = ReplayFigures([StepFigures() for _ in range(steps)])
    whole = reader.manifest.directory is None
    with open_source(original) as one, open_source(reader.path) as other:
        first, second = ReplaySource(one), ReplaySource(other)
        for record in reader.manifest.members:
            if record.format == DCP:
                names = [each.name for each in reader.manifest.parameters if each.name.startswith(f"{record.path}:")]
                figures.skipped.update(dict.fromkeys(names, _SPREAD))
            if record.format in READERS:
                prefix = "" if whole else f"{record.path}:"
                replay(first.of_member(record.path), second.of_member(record.path), figures, workers, prefix)
    return figures


@dataclass(slots=True)
class _Side:
    """State and weight of one parameter on one side: flat fp32, but for row and column statistics."""

    state: dict[str, Tensor]
    weight: Tensor | None

    def find_not_finite(self) -> str | None:
        """The key of a tensor with a NaN or an Inf, or ``the weight``; None without any."""
        weight = {} if self.weight is None else {"the weight": self.weight}
        return next((key for key, values in {**self.state, **weight}.items() if not torch.isfinite(values).all()), None)


class _Sides:
    """Reads parameters of both checkpoints; the sources take one reader at a time."""

    def __init__(self, original: Replayable, compressed: Replayable, steps: int) -> None:
        self._original, self._compressed, self._steps = original, compressed, steps
        self._lock = threading.Lock()

    def replay(self, job: tuple[SavedParameter, SavedParameter]) -> list[StepFigures] | str:
        """The figures of one parameter, step by step, or why it cannot be replayed. Thread-safe."""
        saved, theirs = job
        with self._lock:
            rule = self._original.rule(saved)
            if isinstance(rule, str):
                return rule
            shape = saved.state[rule.form.tensors[0].key].shape
            if problem := _find_misfit(rule.form, saved, shape):
                return problem
            original, compressed = _read(self._original, rule.form, saved), _read(self._compressed, rule.form, theirs)
        if rule.needs_weight and original.weight is None:
            return "its weight, which its step needs, was not found"
        order = Order.of(rule.form, saved.state[rule.form.tensors[0].key])
        return self._take_steps(rule, original, compressed, order)

    def _take_steps(self, rule: Replayed, original: _Side, compressed: _Side, order: Order) -> list[StepFigures] | str:
        if broken := original.find_not_finite():
            return f"{broken} of the original is not finite"
        if compressed.find_not_finite():
            return [StepFigures(update_error=math.inf)] * self._steps
        found = []
        gradients = rule.gradients({key: order.stored(values) for key, values in original.state.items()})
        for k in range(self._steps):
            grad = order.plain(gradients.at(k))
            step = rule.step + k + 1
            u, v = (rule.advance(s.state, s.weight, grad, order.shape, step) for s in (original, compressed))
            if not torch.isfinite(u).all() or original.find_not_finite():
                return "a replayed step of the original is not finite"
            found.append(_measure(u, v, original, compressed))
        return found


def _find_misfit(form: Form, saved: SavedParameter, shape: tuple[int, ...]) -> str | None:
    """Why the state cannot belong to one parameter of this shape, or None."""
    for tensor in form.tensors:
        ref = saved.state.get(tensor.key)
        if isinstance(ref, TensorRef) and (
            ref.shape != tensor.shape(shape) or (len(shape) < 2 and not tensor.is_moment)
        ):
            return f"{tensor.key} does not have the shape of the parameter"
    return None


def _read(source: Replayable, form: Form, saved: SavedParameter) -> _Side:
    state = {
        tensor.key: values.reshape(-1) if tensor.is_moment else values
        for tensor in form.tensors
        if isinstance(ref := saved.state.get(tensor.key), TensorRef)
        for values in [source.load(ref)]
    }
    return _Side(state, None if saved.weight is None else source.load(saved.weight).reshape(-1))


def _measure(u: Tensor, v: Tensor, original: _Side, compressed: _Side) -> StepFigures:
    update = measure(u, v)
    # ``measure`` leaves NaN and Inf out; a step with any of them is broken.
    figures = StepFigures(math.inf if update.excluded else update.change, update.square, update.max_change)
    if original.weight is not None and compressed.weight is not None:
        weight = measure(original.weight, compressed.weight)
        figures.weight_error = math.inf if weight.excluded else weight.change
        figures.weight = weight.square
        figures.max_weight = weight.max_change / weight.rms if weight.rms else 0.0
    return figures
