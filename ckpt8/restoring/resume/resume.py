"""``ckpt8.resume``: checks that a checkpoint fits live models and optimizers, then copies it into them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.state_dicts import Candidate, find, find_trees
from ckpt8.checkpoint.sources.objects import RestBuilder
from ckpt8.checkpoint.sources.opening import OpenMember, open_member
from ckpt8.checkpoint.sources.values import Fill, Streamer
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.arguments import checked
from ckpt8.core.errors import InputError, ResumeError, ResumeWarning, UsageError
from ckpt8.core.text import listed
from ckpt8.restoring.resume import model as models
from ckpt8.restoring.resume import optimizer as optimizers
from ckpt8.restoring.resume import own_loading
from ckpt8.restoring.resume.fills import OptimizerPlan
from ckpt8.restoring.resume.given import Given, Paths, given_models, given_optimizers
from ckpt8.restoring.resume.gpu_copy import DeviceCopy
from ckpt8.restoring.resume.live_values import ValueBuilder
from ckpt8.restoring.resume.matching import Fits, TrainedWeights, candidates_at, match_several, saved_weights
from ckpt8.restoring.resume.model import ModelPlan
from ckpt8.restoring.resume.packed_state import PackedPlanner
from ckpt8.restoring.resume.state_checks import packed_optimizer

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer]


@checked
def resume(
    path: str | os.PathLike[str],
    model: Models | None = None,
    optimizer: Optimizers | None = None,
    strict: bool = True,
    *,
    model_at: Paths = None,
    optimizer_at: Paths = None,
    member: str | None = None,
    threads: int | None = None,
) -> Any:
    """Stream a ``.ckpt8`` or a raw checkpoint into a live model and optimizer; return the rest of its tree.

    A directory of ``torch.distributed.checkpoint`` is taken as well, plain, in a ``.ckpt8`` or as
    ``Ckpt8StorageWriter`` wrote it, with whole tensors put together from the slices of all ranks: what was trained on
    many goes on in one process. Models that several processes share (FSDP, DTensors) are refused:
    ``torch.distributed.checkpoint.load`` with ``Ckpt8StorageReader`` loads them.

    The tensors of ``model`` take the saved values in place, on any device. ``optimizer`` takes fresh state tensors of
    the saved element types, and the saved hyperparameters. How it computes a step (``foreach``, ``fused``, ``triton``,
    ``capturable``, ``differentiable``) stays as you chose it here. Parameters are paired by name where both sides have
    names, else by their order in equal groups; prefixes of wrappers do not matter. Where a checkpoint holds several
    models or optimizers, ``model_at`` and ``optimizer_at`` choose one by its path in the tree: ``state_dict_ema``,
    ``optimizer_states.0``. ``member`` chooses a file of a directory.

    Several models or optimizers come as a list, or as a dict by name: ``model={"netG": G, "netD": D}``. A name finds
    the entry with this key, or this stem: ``netG`` finds ``optimizer_G``. Others find the entry that they fit, by the
    names and shapes of their parameters; of several optimizers alike, the one that belongs to the weights which its
    parameters take, by the keys of the file. Never their order decides: where that leaves a choice, UsageError asks for
    ``model_at`` or ``optimizer_at``, which are then a list or a dict too.

    The rest is the tree without the entries that were used, on the CPU; what held nothing else is missing too. Objects
    of classes that are not imported are ``ckpt8.Inert`` in it: see ``checkpoint.sources.objects``. Nothing that holds
    one gets into ``model`` or ``optimizer``. Projectors of GaLore and its kin do, and objects that are nothing but
    attributes, if ``torch.serialization.add_safe_globals`` allows their class.

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
    models_here, optimizers_here = given_models(model, model_at), given_optimizers(optimizer, optimizer_at)
    with open_member(path, member=member, threads=threads) as source:
        plan = _Plan(source, models_here, optimizers_here)
        plan.decide()
        problems = plan.problems
        if problems and strict:
            more = f" (and {len(problems) - 1} more: {listed(problems[1:], 2)})" if len(problems) > 1 else ""
            raise ResumeError(f"{path}: {problems[0]}{more}; nothing was changed", tuple(problems))
        source.check()
        rest = RestBuilder(source.checkpoint, plan.consumed).tree()
        plan.apply()
    if source.notes:
        warnings.warn(f"{path}: {'; '.join(source.notes)}", ResumeWarning, stacklevel=3)
    if problems:
        warnings.warn(f"{path}: left as it was: {'; '.join(problems)}", ResumeWarning, stacklevel=3)
    return rest


class _Plan:
    """What one call of ``resume`` does: ``decide`` says what goes where and changes nothing, ``apply`` does it.

    ``problems`` are the reasons why something does not fit; ``consumed`` are the entries that are used.
    """

    def __init__(self, source: OpenMember, given: Given[nn.Module], optimizer: Given[Optimizer]) -> None:
        self.problems: list[str] = []
        self.consumed: list[Any] = []
        self._source = source
        self._models = given
        self._optimizers = optimizer
        self._values = ValueBuilder(source.checkpoint)
        self._streamer = Streamer(source.checkpoint)
        self._packed = [packed_optimizer(each) for each in optimizer.objects]
        groups = [group for each in self._packed if each is not None for group in each.param_groups]
        # The upper halves of weights whose residuals or masters an optimizer keeps, by ``id``.
        self._halves = {id(param) for group in groups for param in group["params"] if param.element_size() == 2}
        self._weights: list[ModelPlan] = []
        self._fills: list[Fill] = []
        self._states: list[OptimizerPlan | None] = []

    def decide(self) -> None:
        """Choose the entries and check that they fit.

        Raises UsageError where the choice is not clear, ResumeError for an optimizer without state of its own.
        """
        found, states = find(self._source.checkpoint.tree)
        filled = self._decide_models(found) if self._models.objects else {}
        if self._optimizers.objects:
            self._decide_optimizers(states, filled)
        self._plan_fills([state or OptimizerPlan() for state in self._states])

    def _decide_models(self, candidates: list[Candidate]) -> dict[int, TensorRef]:
        """Plan every model. Returns the saved tensors of all live ones, by ``id``."""
        given, plans = self._models, dict[tuple[int, int], ModelPlan]()

        def plan(number: int, candidate: Candidate) -> ModelPlan:
            key = number, id(candidate)
            if key not in plans:
                live = given.objects[number]
                plans[key] = models.plan_model(candidate, live, self._streamer, self._values, self._halves)
            return plans[key]

        def fits(number: int, candidate: Candidate) -> int:
            return not plan(number, candidate).problems

        numbers = range(len(given.objects)) if given.many else ()
        unfit = (number for number in numbers if not any(fits(number, each) for each in candidates))
        if given.keys or any(given.at) or next(unfit, None) is not None:
            candidates = find_trees(self._source.checkpoint.tree)
        if given.many:
            chosen = match_several(self._source.path, given, candidates, fits)
        else:
            chosen = [self._choose_model(given.objects[0], candidates, given.at[0])]
        filled: dict[int, TensorRef] = {}
        for number, (label, candidate) in enumerate(zip(given.labels, chosen, strict=True)):
            self._weights.append(plan(number, candidate))
            self.problems += [f"{label} {problem}" for problem in self._weights[-1].problems]
            self.consumed.append(candidate.value)
            for copy in self._weights[-1].copies:
                first = filled.setdefault(id(copy.target), copy.ref)
                if first.dtype is not copy.ref.dtype or not self._streamer.equal(first, copy.ref):
                    self.problems.append(f"{label} {copy.name}: is shared by two models, but was saved with two values")
        return filled

    def _decide_optimizers(self, candidates: list[Candidate], filled: Mapping[int, TensorRef]) -> None:
        """Plan every optimizer; ``filled`` are the saved tensors of live weights, by ``id``."""
        given, path, plans = self._optimizers, self._source.path, dict[tuple[int, int], OptimizerPlan]()
        for each in given.objects:
            if problem := own_loading.form_problem(each):
                raise ResumeError(f"{path}: {problem}; nothing was changed", (problem,))
        packed = [
            None if each is None else PackedPlanner(each, self._values, self._streamer, filled, self._source.stored)
            for each in self._packed
        ]

        weights = [saved_weights(each, filled) for each in given.objects]
        trained = TrainedWeights(self._source.checkpoint.tree, candidates) if any(weights) else None

        def plan(number: int, candidate: Candidate) -> OptimizerPlan:
            key = number, id(candidate)
            if key not in plans:
                plans[key] = self._plan_optimizer(candidate, given.objects[number], packed[number])
                others = trained.elsewhere(candidate, weights[number]) if trained else ""
                if others and given.at[number] is None:
                    plans[
                        key
                    ].wrong = f"belongs to {others}, whose weights this one does not step; or give optimizer_at="
            return plans[key]

        def fits(number: int, candidate: Candidate) -> int:
            found = plan(number, candidate)
            if found.wrong is not None or found.problems:
                return 0
            return 2 if trained and trained.has(candidate, weights[number]) else 1

        if given.many:
            chosen = match_several(path, given, candidates, fits)
        else:
            chosen = [_only_fitting(path, candidates_at(path, candidates, given.at[0], "optimizer_at"), fits)]
        for number, (label, candidate) in enumerate(zip(given.labels, chosen, strict=True)):
            state = plan(number, candidate)
            self.problems += [f"{label} {problem}" for problem in state.problems]
            if state.wrong is not None:
                self.problems.append(f"{label} at {candidate.path}: {state.wrong}")
            self._states.append(state if state.wrong is None else None)
            self.consumed.append(candidate.value)

    def _plan_fills(self, states: list[OptimizerPlan]) -> None:
        """Decide what fills each weight. Half of a weight does not change alone while the optimizer keeps the other."""
        alone = self._halves - {id(parameter) for state in states for parameter, _ in state.states}
        rounded = {target: fill for state in states for target, fill in state.rounded.items()}
        for copy in (copy for weights in self._weights for copy in weights.copies):
            has_state = any(each is not None and each.state.get(copy.target) for each in self._packed)
            if id(copy.target) in alone and (has_state or copy.ref.dtype.itemsize > 2):
                self.problems.append(f"model {copy.name}: cannot change alone: the optimizer keeps its other half")
            else:
                self._fills.append(rounded.get(id(copy.target), copy))

    def _choose_model(self, model: nn.Module, found: list[Candidate], at: str | None) -> Candidate:
        candidates = candidates_at(self._source.path, found, at, "model_at")
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

    def _plan_optimizer(
        self, candidate: Candidate, optimizer: Optimizer, packed: PackedPlanner | None
    ) -> OptimizerPlan:
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        owners = [model for model in self._models.objects if any(id(each) in owned for each in model.parameters())]
        # Models can have the same names: those of several do not tell their parameters apart.
        model = owners[0] if len(owners) == 1 else None
        try:
            return optimizers.plan_optimizer(candidate, optimizer, model, self._values, packed)
        except ResumeError as exc:
            return OptimizerPlan(wrong=str(exc))

    def apply(self) -> None:
        """Give the optimizers their new state, then fill the models; when that fails, give the old state back."""
        source = self._source
        streamer = Streamer(source.checkpoint, DeviceCopy(source.stored).copy if source.stored is not None else None)
        changing = [
            (label, state, optimizer)
            for label, state, optimizer in zip(
                self._optimizers.labels, self._states, self._optimizers.objects, strict=True
            )
            if state is not None
        ]
        with torch.no_grad(), ExitStack() as undone:
            for _, _, optimizer in changing:
                undone.enter_context(own_loading.undone_on_error(optimizer))
            for label, state, optimizer in changing:
                try:
                    optimizers.apply(state, optimizer, source.checkpoint, streamer)
                except ResumeError as exc:
                    raise ResumeError(f"{source.path}: {label}: {exc}; nothing was changed", (str(exc),)) from exc
            source.checkpoint.check_unchanged()
            _copy_model(source, streamer, self._fills)
        for model, weights in zip(self._models.objects, self._weights, strict=True):
            for name, value in weights.extra.items():
                model.get_submodule(name.rpartition(".")[0]).set_extra_state(value)


def _only_fitting(path: Path, candidates: list[Candidate], fits: Fits) -> Candidate:
    """The only candidate, or the only one that fits a single optimizer best. Raises UsageError."""
    if not candidates:
        raise UsageError(f"{path}: holds no optimizer state")
    if len(candidates) == 1:
        return candidates[0]
    best = max(fits(0, each) for each in candidates)
    fitting = [each for each in candidates if fits(0, each) == best > 0]
    if len(fitting) == 1:
        return fitting[0]
    paths = listed((candidate.path for candidate in candidates), 10)
    which = "none fits" if not fitting else f"{len(fitting)} fit"
    raise UsageError(
        f"{path}: holds {len(candidates)} optimizers ({paths}), of which {which}; choose with optimizer_at="
    )


def _copy_model(source: OpenMember, streamer: Streamer, fills: Iterable[Fill]) -> None:
    try:
        streamer.run(fills)
    except Exception as exc:
        raise InputError(
            f"{source.path}: could be read a moment ago but not now ({exc}); the model is partly overwritten"
        ) from exc
