"""``verify --resume-steps``: the next N steps of the optimizer, on the original and on the compressed state.

Both sides take the same gradients, normal noise scaled to the second moments of the original, drawn from a seed, the
place of the parameter and the step alone. One parameter at a time is in memory, per thread. After every step

    update   NMSE = sum (du)^2 / sum u^2 over all parameters, and max |du|
    weights  sqrt(sum (dw)^2 / sum w^2), and the largest |dw| in units of the RMS of its tensor

where d is compressed minus original. The *drift* of a file is the largest NMSE of its steps.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt8.drift import Drift, StepDrift, difference
from ckpt8.errors import CheckFailedError
from ckpt8.plan import read_scalar
from ckpt8.readers import open_checkpoint
from ckpt8.readers.base import Checkpoint, TensorRef
from ckpt8.resuming.pairing import SavedParameter, saved_parameters
from ckpt8.resuming.source import open_source
from ckpt8.resuming.streaming import Streamer
from ckpt8.update_rules import RULES, Hyper, Rule, State, factored_variance
from ckpt8.update_space import UpdateRule, recognise
from ckpt8.workers import Workers

if TYPE_CHECKING:
    from torch import Tensor

SEED = 0x5EED
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col")


def replay(original: Checkpoint, compressed: Checkpoint, steps: int, workers: Workers) -> Drift:
    """Replay ``steps`` steps of every parameter whose rule is known. Both have the same tree.

    Raises InputError for damage, CheckFailedError where the two are not of one structure.
    """
    drift = Drift([StepDrift() for _ in range(steps)])
    both = _Sides(original, compressed)
    mine, theirs = saved_parameters(original.tree), saved_parameters(compressed.tree)
    if [saved.name for saved in mine] != [saved.name for saved in theirs]:
        raise CheckFailedError("the original has other parameters than the compressed file; there is nothing to replay")
    jobs = [_Job(number, a, b, steps) for number, (a, b) in enumerate(zip(mine, theirs, strict=True))]
    for job, found in zip(jobs, workers.map(both.replay, jobs), strict=True):
        if isinstance(found, str):
            drift.skipped[job.original.name] = found
        elif not all(step.finite for step in found):
            drift.broken.append(job.original.name)
        else:
            drift.parameters += 1
            drift.with_weights += job.original.weight is not None
            for total, step in zip(drift.steps, found, strict=True):
                total.merge(step)
    return drift


def replay_files(container: Path, original: Path, steps: int, workers: Workers) -> Drift:
    """``replay`` of two files. ``workers`` compute; the container is decoded by threads of its own."""
    with open_checkpoint(original) as first, open_source(container) as second:
        return replay(first, second.checkpoint, steps, workers)


@dataclass(frozen=True, slots=True)
class _Job:
    number: int
    original: SavedParameter
    compressed: SavedParameter
    steps: int


@dataclass(slots=True)
class _Side:
    """State and weight of one parameter on one side."""

    state: State
    weight: Tensor | None

    def advance(self, rule: Rule, grad: Tensor, step: int, hyper: Hyper, *, coupled: bool) -> Tensor:
        """One step; the update."""
        if coupled and self.weight is not None:
            grad = grad + hyper.weight_decay * self.weight
        update, factor = rule(self.state, grad, step, hyper)
        if self.weight is not None:
            lr = hyper.lr * factor
            if not coupled:
                self.weight.mul_(1 - lr * hyper.weight_decay)
            self.weight.sub_(update, alpha=lr)
        return update


class _Sides:
    """Reads parameters of both checkpoints; the sources take one reader at a time."""

    def __init__(self, original: Checkpoint, compressed: Checkpoint) -> None:
        self._original, self._compressed = original, compressed
        self._lock = threading.Lock()

    def replay(self, job: _Job) -> list[StepDrift] | str:
        """The drift of one parameter by step, or why it cannot be replayed."""
        with self._lock:
            known = self._rule(job.original)
            if isinstance(known, str):
                return known
            sides = _read(self._original, job.original), _read(self._compressed, job.compressed)
        rule, step, hyper = known
        problem = _unfit(sides[0], rule)
        if problem is not None:
            return problem
        coupled = hyper.weight_decay != 0 and _is_coupled(job.original.group)
        if coupled and sides[0].weight is None:
            return "its weight, which an L2 penalty needs, was not found"
        found = []
        scale = _gradient_scale(sides[0].state, rule, step, hyper)
        for k in range(job.steps):
            grad = _noise(scale, job.number, k)
            u, v = (side.advance(RULES[rule.kind], grad, step + k + 1, hyper, coupled=coupled) for side in sides)
            found.append(_measure(u, v, *sides))
        return found

    def _rule(self, saved: SavedParameter) -> tuple[UpdateRule, int, Hyper] | str:
        """The rule, the steps taken so far, the hyperparameters."""
        step = saved.state.get("step", saved.group.get("step"))
        if isinstance(step, TensorRef):
            step = read_scalar(self._original, step)
        rule = recognise(saved.state, saved.group, step if isinstance(step, (int, float)) else None)
        if isinstance(rule, str):
            return rule
        if "RMS" in saved.state:
            rule = UpdateRule("came")
        if rule.kind not in RULES or saved.group.keys() & {"bias_correction", "correct_bias"}:
            return f"steps of the kind {rule.kind!r} are not replayed"
        hyper = _hyper(saved.group, rule)
        if hyper is None:
            return "hyperparameters are missing from the parameter group"
        if rule.kind == "stable_adamw" and "beta1" in saved.group and "eps_sq" not in saved.state:
            hyper = replace(hyper, clip=math.inf)  # optimi's AdamW: unbiased averages, but no clipping
        if not isinstance(step, (int, float)) and rule.kind != "came":
            return "the step is missing"
        return rule, int(step or 0), hyper


def _is_coupled(group: Mapping[Any, Any]) -> bool:
    """Whether weight decay is an L2 penalty, as in Adam. Files of old versions do not say: then it is AdamW's."""
    return group.get("decoupled_weight_decay", group.get("decouple_wd", True)) is False


def _hyper(group: Mapping[Any, Any], rule: UpdateRule) -> Hyper | None:
    betas = _numbers(group.get("betas", [group.get("beta1"), group.get("beta2")]))
    eps = group.get("eps", [group.get("eps1"), group.get("eps2")])
    eps = _numbers(eps if isinstance(eps, (tuple, list)) else [eps])
    rest = _numbers([group.get("lr"), group.get("weight_decay", 0.0), group.get("clip_threshold", 1.0)])
    count = 3 if rule.kind == "came" else 2
    if len(betas) != count or len(eps) != count - 1 or not rest or not all(0 <= beta < 1 for beta in betas):
        return None
    return Hyper(rest[0], betas, eps, rest[1], rest[2])


def _numbers(values: Any) -> tuple[float, ...]:
    """Finite numbers as floats; empty for anything else."""
    given = tuple(values) if isinstance(values, (tuple, list)) else ()
    numeric = all(isinstance(n, (int, float)) and math.isfinite(n) for n in given)
    return tuple(map(float, given)) if numeric else ()


def _read(checkpoint: Checkpoint, saved: SavedParameter) -> _Side:
    streamer = Streamer(checkpoint)
    refs = {key: ref for key in (*_MOMENTS, *_FACTORS) if isinstance(ref := saved.state.get(key), TensorRef)}
    weight = None if saved.weight is None else _load(streamer, saved.weight)
    return _Side({key: _load(streamer, ref) for key, ref in refs.items()}, weight)


def _load(streamer: Streamer, ref: TensorRef) -> Tensor:
    import torch

    values = torch.empty(ref.shape, dtype=ref.dtype.torch)
    streamer.copy(ref, values)
    return values.float()


def _unfit(side: _Side, rule: UpdateRule) -> str | None:
    import torch

    shape = side.state["exp_avg"].shape
    for key, value in side.state.items():
        factor = rule.kind == "came" and key in _FACTORS
        expected = (shape[:-1] if key.endswith("row") else shape[:-2] + shape[-1:]) if factor else shape
        if value.shape != expected:
            return f"{key} does not have the shape of the parameter"
        if not torch.isfinite(value).all():
            return f"{key} of the original is not finite"
    return None


def _gradient_scale(state: State, rule: UpdateRule, step: int, hyper: Hyper) -> Tensor:
    """The RMS of recent gradients, element by element."""
    if rule.kind == "came" and "exp_avg_sq_row" in state:
        return factored_variance(state, "exp_avg_sq").clamp_(min=0).nan_to_num_(0.0).sqrt_()
    bias = 1 - hyper.betas[1] ** step if rule.kind == "adam" and step else 1.0
    return (state["exp_avg_sq"].clamp(min=0) / bias).sqrt_()


def _noise(scale: Tensor, number: int, step: int) -> Tensor:
    import torch

    generator = torch.Generator().manual_seed(SEED + (number << 20) + step)
    return torch.randn(scale.shape, generator=generator) * scale


def _measure(u: Tensor, v: Tensor, original: _Side, compressed: _Side) -> StepDrift:
    drift = StepDrift(*difference(u, v))
    if original.weight is not None and compressed.weight is not None:
        drift.weight_error, drift.weight, largest = difference(original.weight, compressed.weight)
        rms = math.sqrt(drift.weight / max(1, u.numel()))
        drift.weight_max = largest / rms if rms else 0.0
    return drift
