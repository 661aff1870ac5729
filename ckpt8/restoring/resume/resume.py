"""``resume``: every check first, then the copy."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.state_dicts import Candidate, find, holds_module
from ckpt8.checkpoint.sources.objects import RestBuilder
from ckpt8.checkpoint.sources.one_file import Source, open_source
from ckpt8.checkpoint.sources.values import Fill, Streamer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.errors import InputError, ResumeError, ResumeWarning, UsageError
from ckpt8.core.text import listed
from ckpt8.optim.packed import PackedOptimizer
from ckpt8.restoring.resume import model as models
from ckpt8.restoring.resume import optimizer as optimizers
from ckpt8.restoring.resume import own_loading
from ckpt8.restoring.resume.gpu_copy import DeviceCopy
from ckpt8.restoring.resume.live_values import ValueBuilder
from ckpt8.restoring.resume.packed_state import PackedPlanner
from ckpt8.restoring.resume.plans import OptimizerPlan
from ckpt8.restoring.resume.published_state import is_packed, unwrapped
from ckpt8.restoring.resume.state_checks import object_problem


def resume(
    path: str | os.PathLike[str],
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    strict: bool = True,
    *,
    model_at: str | None = None,
    optimizer_at: str | None = None,
    member: str | None = None,
    threads: int | None = None,
) -> Any:
    """Stream a ``.ckpt8`` or a raw checkpoint into a live model and optimizer; the rest of its tree.

    Values are copied into the tensors of ``model`` in place, on whatever device they are. The state of ``optimizer``
    is replaced by fresh tensors of the saved element types, its hyperparameters by the saved ones; how a step is
    computed (``foreach``, ``fused``, ``triton``, ``capturable``, ``differentiable``) stays as it was chosen here.
    Parameters are paired by name (``param_names``, or names as identifiers, beside the names of ``model``), else by
    their place in equal groups. Wrappers' prefixes do not matter. ``model_at`` and ``optimizer_at`` are the path in
    the tree where several entries could be meant, with dots: ``state_dict_ema``, ``optimizer_states.0``.

    The rest is the tree without the two entries, on the CPU. Objects of classes that are not imported come in it as
    ``ckpt8.Inert``: see ``checkpoint.sources.objects``. None gets into ``model`` or ``optimizer``: what holds one is
    refused.

    An optimizer of an unknown class that has a ``load_state_dict`` of its own, or keeps more than tensors and numbers,
    as those of bitsandbytes and torchao, loads its state by itself; where that fails, everything is as it was.

    All or nothing: structure and every byte are checked before a live byte changes. Raises ResumeError where the
    checkpoint does not fit, with all ``problems``; UsageError where it is not clear which entry is meant; InputError
    for damage. With ``strict`` False, what does not fit is left as it is, and one ResumeWarning lists it; an
    optimizer of another class, or one that cannot be paired without a guess, is left alone as a whole. An unclear
    choice of entries and damage stay errors.
    """
    path = Path(path)
    with open_source(path, member=member, threads=threads) as source:
        plan = _Planner(source, model, optimizer).plan(model_at, optimizer_at)
        if plan.problems and strict:
            raise _refusal(path, plan.problems)
        source.check()
        rest = plan.builder.tree()
        _apply(source, plan, model, optimizer)
    if plan.problems:
        warnings.warn(f"{path}: left as it was: {'; '.join(plan.problems)}", ResumeWarning, stacklevel=2)
    return rest


def _refusal(path: Path, problems: list[str]) -> ResumeError:
    more = f" (and {len(problems) - 1} more: {listed(problems[1:], 2)})" if len(problems) > 1 else ""
    return ResumeError(f"{path}: {problems[0]}{more}; nothing was changed", tuple(problems))


@dataclass(slots=True)
class _Plan:
    builder: RestBuilder
    model: models.ModelPlan | None = None
    fills: list[Fill] = field(default_factory=list)
    optimizer: OptimizerPlan | None = None
    problems: list[str] = field(default_factory=list)


class _Planner:
    """Decides what goes where, and changes nothing."""

    def __init__(self, source: Source, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        self._source = source
        self._model = model
        self._optimizer = optimizer
        self._tree = source.checkpoint.tree
        self._models, self._optimizers = find(self._tree)
        self._values = ValueBuilder(source.checkpoint)
        self._filled: dict[int, TensorRef] = {}

    def plan(self, model_at: str | None, optimizer_at: str | None) -> _Plan:
        consumed: list[Candidate] = []
        problems: list[str] = []
        weights = state = None
        fills: list[Fill] = []
        if self._model is not None:
            chosen = self._choose_model(self._model, model_at)
            equal = Streamer(self._source.checkpoint).equal
            weights = models.plan_model(chosen, self._model, equal, _narrow(self._optimizer))
            self._filled = weights.filled
            problems += [f"model {problem}" for problem in weights.problems]
            problems += self._build_extra(weights)
            consumed.append(chosen)
        if self._optimizer is not None:
            chosen, state = self._choose_optimizer(self._optimizer, optimizer_at)
            problems += [f"optimizer {problem}" for problem in state.problems]
            if state.wrong is not None:
                problems.append(f"optimizer at {chosen.path}: {state.wrong}")
                state = None
            consumed.append(chosen)
        if weights is not None:
            fills = self._share(weights, state, problems)
        builder = RestBuilder(self._source.checkpoint, [candidate.node for candidate in consumed])
        return _Plan(builder, weights, fills, state, problems)

    def _build_extra(self, weights: models.ModelPlan) -> list[str]:
        """Make the extra states of modules; what is wrong with those that cannot be made."""
        found = {name: object_problem(value, self._values, "its extra state") for name, value in weights.extra.items()}
        fitting = {name: value for name, value in weights.extra.items() if found[name] is None}
        weights.extra = {name: self._values.build(value) for name, value in fitting.items()}
        return [f"model {name}: {problem}" for name, problem in found.items() if problem is not None]

    def _share(self, weights: models.ModelPlan, state: OptimizerPlan | None, problems: list[str]) -> list[Fill]:
        """The copies, with the optimizer's share of 16-bit weights; where the other share stays there is a problem."""
        if self._optimizer is None or not is_packed(self._optimizer):
            return list(weights.copies)
        fills: list[Fill] = []
        narrow = _narrow(self._optimizer)
        replaced = {id(each.pair.parameter) for each in state.states} if state is not None else set()
        rounded = state.rounded if state is not None else {}
        for copy in weights.copies:
            parted = id(copy.target) in narrow and id(copy.target) not in replaced
            if parted and (self._optimizer.state.get(copy.target) or copy.ref.dtype.itemsize > 2):
                problems.append(f"model {copy.name}: cannot change alone, without what the optimizer keeps of it")
            else:
                fills.append(rounded.get(id(copy.target), copy))
        return fills

    def _choose_model(self, model: nn.Module, at: str | None) -> Candidate:
        candidates = _at(self._source.path, self._models, at, "model_at")
        if not candidates:
            why = "a pickled module; save its state_dict()" if holds_module(self._tree) else "no model state dict"
            raise UsageError(f"{self._source.path}: holds {why}")
        chosen = models.choose(candidates, model)
        if isinstance(chosen, str):
            raise UsageError(f"{self._source.path}: {chosen}")
        return chosen

    def _choose_optimizer(self, optimizer: Optimizer, at: str | None) -> tuple[Candidate, OptimizerPlan]:
        path = self._source.path
        problem = own_loading.form_problem(optimizer)
        if problem is not None:
            raise ResumeError(f"{path}: {problem}; nothing was changed", (problem,))
        candidates = _at(path, self._optimizers, at, "optimizer_at")
        if not candidates:
            raise UsageError(f"{path}: holds no optimizer state")
        plans = [(each, self._plan_optimizer(each, optimizer)) for each in candidates]
        if len(plans) == 1:
            return plans[0]
        fitting = [(each, plan) for each, plan in plans if plan.wrong is None and not plan.problems]
        if len(fitting) == 1:
            return fitting[0]
        paths = listed((candidate.path for candidate in candidates), 10)
        which = "none fits" if not fitting else f"{len(fitting)} fit"
        raise UsageError(
            f"{path}: holds {len(plans)} optimizers ({paths}), of which {which}; choose with optimizer_at="
        )

    def _plan_optimizer(self, candidate: Candidate, optimizer: Optimizer) -> OptimizerPlan:
        try:
            packed = self._packed_planner(optimizer)
            return optimizers.plan_optimizer(candidate, optimizer, self._model, self._values, packed)
        except ResumeError as exc:
            return OptimizerPlan(wrong=str(exc))

    def _packed_planner(self, optimizer: Optimizer) -> PackedPlanner | None:
        if not is_packed(optimizer):
            return None

        packed = cast("PackedOptimizer", unwrapped(optimizer))
        streamer = Streamer(self._source.checkpoint)
        return PackedPlanner(packed, self._values, streamer, self._filled, self._source.stored)


def _narrow(optimizer: Optimizer | None) -> set[int]:
    """The ``id`` of parameters that are the upper half of weights whose rest a packed optimizer keeps."""
    groups = optimizer.param_groups if optimizer is not None and is_packed(optimizer) else []
    return {id(param) for group in groups for param in group["params"] if param.element_size() == 2}


def _at(path: Path, candidates: list[Candidate], at: str | None, keyword: str) -> list[Candidate]:
    if at is None:
        return candidates
    found = [candidate for candidate in candidates if candidate.path == at]
    if not found:
        paths = listed((candidate.path for candidate in candidates), 10) or "nothing of the kind"
        raise UsageError(f"{path}: {keyword}={at!r} is not one of {paths}")
    return found


def _apply(source: Source, plan: _Plan, model: nn.Module | None, optimizer: Optimizer | None) -> None:
    """The optimizer has its new state before the first byte of the model changes, and the old one where that fails."""
    streamer = Streamer(source.checkpoint, DeviceCopy(source.stored) if source.stored is not None else None)
    with torch.no_grad(), own_loading.undone_on_error(optimizer if plan.optimizer is not None else None):
        if plan.optimizer is not None and optimizer is not None:
            try:
                streamer.run(optimizers.allocate(plan.optimizer))
                source.checkpoint.check_unchanged()
                optimizers.assign(plan.optimizer, optimizer)
            except ResumeError as exc:
                raise ResumeError(f"{source.path}: optimizer: {exc}; nothing was changed", (str(exc),)) from exc
        source.checkpoint.check_unchanged()
        if plan.model is not None:
            _copy_model(source, streamer, plan.fills)
    if plan.model is not None and model is not None:
        for name, value in plan.model.extra.items():
            model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def _copy_model(source: Source, streamer: Streamer, fills: Iterable[Fill]) -> None:
    try:
        streamer.run(fills)
    except Exception as exc:
        raise InputError(
            f"{source.path}: could be read a moment ago but not now ({exc}); the model is partly overwritten"
        ) from exc
