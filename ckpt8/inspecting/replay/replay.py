"""``verify --resume-steps``: the next N steps of the optimizer, on the original and on the compressed state.

Steps are calls of the rules of ``ckpt8.optim``. Both sides take the same gradients: normal noise at the scale of the
moments of the original, a function of a seed, the place of the parameter and the step alone. Memory holds one parameter
for each thread. After every step

    update   NMSE = sum (du)^2 / sum u^2 over all parameters, and max |du|
    weights  sqrt(sum (dw)^2 / sum w^2), and the largest |dw| in units of the RMS of its tensor

where d is compressed minus original. The *drift* of a file is the largest NMSE of its steps.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_parameters
from ckpt8.checkpoint.readers import READERS, open_checkpoint
from ckpt8.checkpoint.scalars import read_scalar
from ckpt8.checkpoint.sources.opening import open_member
from ckpt8.checkpoint.sources.values import Streamer
from ckpt8.checkpoint.tree import Checkpoint, TensorRef
from ckpt8.codecs.error_stats import ErrorStats
from ckpt8.container.manifest import DCP
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError
from ckpt8.core.workers import Workers
from ckpt8.inspecting.diff.change import measure
from ckpt8.inspecting.replay.rules import Replayed, find_rule
from ckpt8.optim.known_optimizers import TENSORS

SEED = 0x5EED
_SPREAD = "the files of a distributed checkpoint are not replayed"


@dataclass(slots=True)
class StepDrift(ErrorStats):
    """Sums over parameters after one step; ``max_*`` are maxima."""

    update_error: float = 0.0
    update: float = 0.0
    max_update: float = 0.0
    weight_error: float = 0.0
    weight: float = 0.0
    max_weight: float = 0.0

    @property
    def nmse(self) -> float:
        """Sum (du)^2 / sum u^2; 0 if nothing moves and nothing differs."""
        return self.update_error / self.update if self.update else (math.inf if self.update_error else 0.0)

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
class Drift:
    """Figures by step, numbers of parameters, and by name the reason why others, or their weights, are left out."""

    steps: list[StepDrift]
    parameters: int = 0
    with_weights: int = 0
    without_weights: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def add(self, name: str, steps: list[StepDrift] | str, unpaired: str | None) -> None:
        """Add a parameter: its figures by step, or why there are none; ``unpaired`` says why it has no weight."""
        if isinstance(steps, str):
            self.skipped[name] = steps
        elif not all(step.finite for step in steps):
            self.broken.append(name)
        else:
            self.parameters += 1
            if unpaired is None:
                self.with_weights += 1
            else:
                self.without_weights[name] = unpaired
            for total, step in zip(self.steps, steps, strict=True):
                total.merge(step)

    @property
    def worst(self) -> float:
        """The drift: the largest NMSE of the updates."""
        return max((step.nmse for step in self.steps), default=0.0)

    def failures(self, limit: float | None) -> list[str]:
        """Lines about steps that broke, and about a drift above ``limit``."""
        found = [f"{name}: a replayed step is not finite" for name in self.broken]
        if limit is not None and not self.parameters:
            found.append("no parameter could be replayed, so that the drift is unknown")
        elif limit is not None and self.worst > limit:
            found.append(f"the drift of the update over {len(self.steps)} steps is {self.worst:.3g}, above {limit:.3g}")
        return found

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "drift": self.worst if math.isfinite(self.worst) else None,
            "parameters": self.parameters,
            "with_weights": self.with_weights,
            "without_weights": self.without_weights,
            "skipped": self.skipped,
            "steps": [step.to_json() for step in self.steps],
        }


def left_out(resume: Mapping[str, Any]) -> list[str]:
    """Lines about weights and parameters that the figures of ``Drift.to_json`` leave out."""
    lines = []
    weights, skipped = (sorted(Counter(resume[key].values()).items()) for key in ("without_weights", "skipped"))
    if weights:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in weights)
        lines.append(f"weights: {resume['with_weights']} of {resume['parameters']} parameters ({reasons})")
    return lines + [f"not replayed: {count} parameters: {reason}" for reason, count in skipped]


def replay(original: Checkpoint, compressed: Checkpoint, drift: Drift, workers: Workers, prefix: str = "") -> None:
    """Replay every parameter of a known rule for as many steps as ``drift`` has, and add the figures to it.

    ``prefix`` comes before names. Raises InputError for damage, CheckFailedError if the two trees are not alike.
    """
    both = _Sides(original, compressed, len(drift.steps))
    mine, theirs = saved_parameters(original.tree), saved_parameters(compressed.tree)
    if [saved.name for saved in mine] != [saved.name for saved in theirs]:
        raise CheckFailedError(
            "the original and the compressed file have different parameters, so no step can be replayed"
        )
    jobs = enumerate(zip(mine, theirs, strict=True))
    for saved, found in zip(mine, workers.map(both.replay, jobs), strict=True):
        drift.add(prefix + saved.name, found, saved.unpaired)


def replay_files(reader: ContainerReader, original: Path, steps: int, workers: Workers) -> Drift:
    """Replay every member with ``workers``; threads of its own decode the container."""
    drift = Drift([StepDrift() for _ in range(steps)])
    whole = reader.manifest.directory is None
    for record in reader.manifest.members:
        if record.format == DCP:
            names = [each.name for each in reader.manifest.parameters if each.name.startswith(f"{record.path}:")]
            drift.skipped.update(dict.fromkeys(names, _SPREAD))
        if record.format in READERS:
            path, prefix = (original, "") if whole else (original / record.path, f"{record.path}:")
            with open_checkpoint(path) as first, open_member(reader.path, member=record.path) as second:
                replay(first, second.checkpoint, drift, workers, prefix)
    return drift


@dataclass(slots=True)
class _Side:
    """State and weight of one parameter on one side: flat fp32, but for row and column statistics."""

    state: dict[str, Tensor]
    weight: Tensor | None


class _Sides:
    """Reads parameters of both checkpoints; the sources take one reader at a time."""

    def __init__(self, original: Checkpoint, compressed: Checkpoint, steps: int) -> None:
        self._original, self._compressed, self._steps = original, compressed, steps
        self._storages = {storage.key: storage for storage in original.storages}
        self._lock = threading.Lock()

    def replay(self, job: tuple[int, tuple[SavedParameter, SavedParameter]]) -> list[StepDrift] | str:
        """The drift of one parameter, step by step, or why it cannot be replayed. Thread-safe.

        ``job`` is the number of the parameter, and its state on both sides.
        """
        number, (saved, theirs) = job
        with self._lock:
            rule = self._rule(saved)
            if isinstance(rule, str):
                return rule
            shape = saved.shape or ()
            if problem := _find_misfit(saved, shape):
                return problem
            original, compressed = _read(self._original, saved), _read(self._compressed, theirs)
        if rule.coupled and rule.weight_decay and original.weight is None:
            return "its weight, which an L2 penalty needs, was not found"
        if broken := _find_not_finite(original):
            return f"{broken} of the original is not finite"
        if _find_not_finite(compressed):
            return [StepDrift(update_error=math.inf)] * self._steps
        found = []
        scale = rule.gradient_scale(original.state)
        for k in range(self._steps):
            grad = _noise(scale, number, k)
            u, v = (
                rule.advance(side.state, side.weight, grad, shape, rule.step + k + 1) for side in (original, compressed)
            )
            found.append(_measure(u, v, original, compressed))
        return found

    def _rule(self, saved: SavedParameter) -> Replayed | str:
        step = saved.state.get("step", saved.group.get("step"))
        if isinstance(step, TensorRef):
            step = read_scalar(self._original, self._storages[step.key], step)
        return find_rule(saved.state, saved.group, step)


def _refs(saved: SavedParameter) -> dict[str, TensorRef]:
    return {key: ref for key in TENSORS if isinstance(ref := saved.state.get(key), TensorRef)}


def _find_misfit(saved: SavedParameter, shape: tuple[int, ...]) -> str | None:
    """Why the state cannot belong to one parameter of this shape, or None."""
    if not math.prod(shape):
        return "it has no elements"
    for key, ref in _refs(saved).items():
        tensor = TENSORS[key]
        if ref.shape != tensor.shape(shape) or (len(shape) < 2 and not tensor.is_moment):
            return f"{key} does not have the shape of the parameter"
    return None


def _read(checkpoint: Checkpoint, saved: SavedParameter) -> _Side:
    streamer = Streamer(checkpoint)
    state = {key: _load(streamer, ref) for key, ref in _refs(saved).items()}
    flat = {key: values.reshape(-1) if TENSORS[key].is_moment else values for key, values in state.items()}
    return _Side(flat, None if saved.weight is None else _load(streamer, saved.weight).reshape(-1))


def _load(streamer: Streamer, ref: TensorRef) -> Tensor:
    values = torch.empty(ref.shape, dtype=ref.dtype.torch)
    streamer.copy(ref, values)
    return values.float()


def _find_not_finite(side: _Side) -> str | None:
    return next((key for key, values in side.state.items() if not torch.isfinite(values).all()), None)


def _noise(scale: Tensor, number: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(SEED + (number << 20) + step)
    return torch.randn(scale.shape, generator=generator) * scale


def _measure(u: Tensor, v: Tensor, original: _Side, compressed: _Side) -> StepDrift:
    update = measure(u, v)
    # ``measure`` leaves NaN and Inf out; a step with any of them is broken.
    drift = StepDrift(math.inf if update.excluded else update.change, update.square, update.max_change)
    if original.weight is not None and compressed.weight is not None:
        weight = measure(original.weight, compressed.weight)
        drift.weight_error = math.inf if weight.excluded else weight.change
        drift.weight = weight.square
        drift.max_weight = weight.max_change / weight.rms if weight.rms else 0.0
    return drift
