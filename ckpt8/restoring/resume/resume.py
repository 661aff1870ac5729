"""``ckpt8.resume``: checks that a checkpoint fits a live model and optimizer, then copies it into them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.state_dicts import Candidate, find
from ckpt8.checkpoint.sources.objects import RestBuilder
from ckpt8.checkpoint.sources.opening import OpenMember, open_member
from ckpt8.checkpoint.sources.values import Fill, Streamer
from ckpt8.core.errors import InputError, ResumeError, ResumeWarning, UsageError
from ckpt8.core.text import listed
from ckpt8.restoring.resume import model as models
from ckpt8.restoring.resume import optimizer as optimizers
from ckpt8.restoring.resume import own_loading
from ckpt8.restoring.resume.fills import OptimizerPlan
from ckpt8.restoring.resume.gpu_copy import DeviceCopy
from ckpt8.restoring.resume.live_values import ValueBuilder
from ckpt8.restoring.resume.packed_state import PackedPlanner
from ckpt8.restoring.resume.state_checks import packed_optimizer


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
    """Stream a ``.ckpt8`` or a raw checkpoint into a live model and optimizer; return the rest of its tree.

    The tensors of ``model`` take the saved values in place, on any device. ``optimizer`` takes fresh state tensors of
    the saved element types, and the saved hyperparameters. How it computes a step (``foreach``, ``fused``, ``triton``,
    ``capturable``, ``differentiable``) stays as you chose it here. Parameters are paired by name where both sides have
    names, else by their order in equal groups; prefixes of wrappers do not matter. Where a checkpoint holds several
    models or optimizers, ``model_at`` and ``optimizer_at`` choose one by its path in the tree: ``state_dict_ema``,
    ``optimizer_states.0``. ``member`` chooses a file of a directory.

    The rest is the tree without these two entries, on the CPU. Objects of classes that are not imported are
    ``ckpt8.Inert`` in it: see ``checkpoint.sources.objects``. Nothing that holds one gets into ``model`` or
    ``optimizer``.

    An optimizer of an unknown class that has its own ``load_state_dict``, or keeps more than tensors and numbers, loads
    its state itself, as those of bitsandbytes and torchao do. When it fails, everything is as it was.

    All or nothing: structure and every byte are checked before a live byte changes. Raises ResumeError where the
    checkpoint does not fit, with all ``problems``; UsageError where several entries could be meant; InputError for
    damage. With ``strict`` False, what does not fit stays as it is and one ResumeWarning lists it. An optimizer of
    another class, or one that only a guess could pair, then stays as it is as a whole.

    >>> ckpt8.resume("run.ckpt8", model=model, optimizer=optimizer)
    {'step': 1}
    """
    path = Path(path)
    with open_member(path, member=member, threads=threads) as source:
        plan = _Plan(source, model, optimizer)
        plan.decide(model_at, optimizer_at)
        problems = plan.problems
        if problems and strict:
            more = f" (and {len(problems) - 1} more: {listed(problems[1:], 2)})" if len(problems) > 1 else ""
            raise ResumeError(f"{path}: {problems[0]}{more}; nothing was changed", tuple(problems))
        source.check()
        rest = RestBuilder(source.checkpoint, plan.consumed).tree()
        plan.apply()
    if problems:
        warnings.warn(f"{path}: left as it was: {'; '.join(problems)}", ResumeWarning, stacklevel=2)
    return rest


class _Plan:
    """What one call of ``resume`` does: ``decide`` says what goes where and changes nothing, ``apply`` does it.

    ``problems`` are the reasons why something does not fit; ``consumed`` are the entries that are used.
    """

    def __init__(self, source: OpenMember, model: nn.Module | None, optimizer: Optimizer | None) -> None:
        self.problems: list[str] = []
        self.consumed: list[Any] = []
        self._source = source
        self._model = model
        self._optimizer = optimizer
        self._candidates = find(source.checkpoint.tree)
        self._values = ValueBuilder(source.checkpoint)
        self._streamer = Streamer(source.checkpoint)
        self._packed = packed_optimizer(optimizer)
        groups = self._packed.param_groups if self._packed is not None else []
        # The upper halves of weights whose residuals or masters the optimizer keeps, by ``id``.
        self._halves = {id(param) for group in groups for param in group["params"] if param.element_size() == 2}
        self._weights = models.ModelPlan()
        self._fills: list[Fill] = []
        self._state: OptimizerPlan | None = None

    def decide(self, model_at: str | None, optimizer_at: str | None) -> None:
        """Choose the entries and check that they fit.

        Raises UsageError where the choice is not clear, ResumeError for an optimizer without state of its own.
        """
        if self._model is not None:
            chosen = self._choose_model(self._model, model_at)
            self._weights = models.plan_model(chosen, self._model, self._streamer, self._values, self._halves)
            self.problems += [f"model {problem}" for problem in self._weights.problems]
            self.consumed.append(chosen.value)
        if self._optimizer is not None:
            chosen, state = self._choose_optimizer(self._optimizer, optimizer_at)
            self.problems += [f"optimizer {problem}" for problem in state.problems]
            if state.wrong is None:
                self._state = state
            else:
                self.problems.append(f"optimizer at {chosen.path}: {state.wrong}")
            self.consumed.append(chosen.value)
        self._plan_fills(self._state or OptimizerPlan())

    def _plan_fills(self, state: OptimizerPlan) -> None:
        """Decide what fills each weight. Half of a weight does not change alone while the optimizer keeps the other."""
        alone = self._halves - {id(parameter) for parameter, _ in state.states}
        live = self._packed.state if self._packed is not None else {}
        for copy in self._weights.copies:
            if id(copy.target) in alone and (live.get(copy.target) or copy.ref.dtype.itemsize > 2):
                self.problems.append(f"model {copy.name}: cannot change alone: the optimizer keeps its other half")
            else:
                self._fills.append(state.rounded.get(id(copy.target), copy))

    def _choose_model(self, model: nn.Module, at: str | None) -> Candidate:
        candidates = _candidates_at(self._source.path, self._candidates[0], at, "model_at")
        if not candidates:
            raise UsageError(f"{self._source.path}: holds no model state dict")
        fitting = models.fitting(candidates, model)
        if len(fitting) != 1:
            paths = listed((candidate.path for candidate in fitting or candidates), 10)
            raise UsageError(
                f"{self._source.path}: holds {len(candidates)} state dicts that may be meant ({paths}); "
                "choose with model_at="
            )
        return fitting[0]

    def _choose_optimizer(self, optimizer: Optimizer, at: str | None) -> tuple[Candidate, OptimizerPlan]:
        path = self._source.path
        if problem := own_loading.form_problem(optimizer):
            raise ResumeError(f"{path}: {problem}; nothing was changed", (problem,))
        candidates = _candidates_at(path, self._candidates[1], at, "optimizer_at")
        if not candidates:
            raise UsageError(f"{path}: holds no optimizer state")
        packed = None
        if self._packed is not None:
            filled, stored = self._weights.filled, self._source.stored
            packed = PackedPlanner(self._packed, self._values, self._streamer, filled, stored)
        plans = [(each, self._plan_optimizer(each, optimizer, packed)) for each in candidates]
        fitting = [(each, plan) for each, plan in plans if plan.wrong is None and not plan.problems]
        for found in (plans, fitting):
            if len(found) == 1:
                return found[0]
        paths = listed((candidate.path for candidate in candidates), 10)
        which = "none fits" if not fitting else f"{len(fitting)} fit"
        raise UsageError(
            f"{path}: holds {len(plans)} optimizers ({paths}), of which {which}; choose with optimizer_at="
        )

    def _plan_optimizer(
        self, candidate: Candidate, optimizer: Optimizer, packed: PackedPlanner | None
    ) -> OptimizerPlan:
        try:
            return optimizers.plan_optimizer(candidate, optimizer, self._model, self._values, packed)
        except ResumeError as exc:
            return OptimizerPlan(wrong=str(exc))

    def apply(self) -> None:
        """Give the optimizer its new state, then fill the model; when that fails, give the old state back."""
        source, optimizer = self._source, self._optimizer if self._state is not None else None
        streamer = Streamer(source.checkpoint, DeviceCopy(source.stored).copy if source.stored is not None else None)
        with torch.no_grad(), own_loading.undone_on_error(optimizer):
            if self._state is not None and optimizer is not None:
                try:
                    optimizers.apply(self._state, optimizer, source.checkpoint, streamer)
                except ResumeError as exc:
                    raise ResumeError(f"{source.path}: optimizer: {exc}; nothing was changed", (str(exc),)) from exc
            source.checkpoint.check_unchanged()
            _copy_model(source, streamer, self._fills)
        if self._model is not None:
            for name, value in self._weights.extra.items():
                self._model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def _candidates_at(path: Path, candidates: list[Candidate], at: str | None, keyword: str) -> list[Candidate]:
    """The candidate at the path ``at``, or all of them where none is given. Raises UsageError for an unknown path."""
    if at is None:
        return candidates
    found = [candidate for candidate in candidates if candidate.path == at]
    if not found:
        paths = listed((candidate.path for candidate in candidates), 10) or "nothing of the kind"
        raise UsageError(f"{path}: {keyword}={at!r} is not one of {paths}")
    return found


def _copy_model(source: OpenMember, streamer: Streamer, fills: Iterable[Fill]) -> None:
    try:
        streamer.run(fills)
    except Exception as exc:
        raise InputError(
            f"{source.path}: could be read a moment ago but not now ({exc}); the model is partly overwritten"
        ) from exc
