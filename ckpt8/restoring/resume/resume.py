"""``ckpt8.resume``: checks that a checkpoint fits live models and optimizers, then copies it into them.

``Given`` is what the caller gave: one live object, or several as a list, a tuple or a dict; and the paths for them.

``match_several`` finds the entry of the checkpoint that belongs to each of several live objects.

A path that was given decides. Then come the keys of a dict, as the path of an entry or the end of it. For the rest
decides what fits, by names and shapes; of several optimizers that fit, the one that the file has for the weights of the
live one. What fits alike is refused: order decides nothing.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from torch.optim import Optimizer

from ckpt8.checkpoint.meaning.pairing import owners
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find, find_trees
from ckpt8.checkpoint.sources.composite import Fill, Streamer
from ckpt8.checkpoint.sources.objects import RestBuilder, ValueBuilder
from ckpt8.checkpoint.sources.opening import OpenMember, open_member
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import is_average
from ckpt8.core.errors import InputError, ResumeError, ResumeWarning, UsageError, require
from ckpt8.core.files.paths import as_path
from ckpt8.core.public import checked, described
from ckpt8.core.text import counted, listed
from ckpt8.restoring.resume import optimizer as optimizers
from ckpt8.restoring.resume.companions import (
    Companion,
    check_random_states,
    extra_states,
    find_random_states,
    given_companion,
    loaded,
    set_random_states,
    takes_state,
)
from ckpt8.restoring.resume.live import ModelPlan, OptimizerPlan, copy_of, fitting_models, plan_model
from ckpt8.restoring.resume.new_state import DeviceCopy, PackedPlanner
from ckpt8.restoring.resume.optimizer import packed_optimizer, unwrapped

T = TypeVar("T")

Paths = str | Sequence[str | None] | Mapping[str, str | None] | None
"""Paths in the tree: one, or as many as there are objects, in their order or under their keys."""

_FSDP = "FullyShardedDataParallel"
_SHARDED = frozenset({_FSDP, "DTensor", "FlatParameter", "ShardedTensor"})
"""Classes of torch, by name, of what a process has only a part of."""


@dataclass(frozen=True, slots=True)
class Given(Generic[T]):
    """The ``objects`` of one argument, which is called ``what``, with the path that was given for each.

    ``keys`` are those of a dict. ``labels`` are what messages call them. ``many`` is false for an object alone.
    """

    what: str
    objects: list[T]
    labels: list[str]
    at: list[str | None]
    many: bool = False
    keys: list[str] | None = None


def _given(what: str, value: Any, at: Paths, check: Callable[[str, Any], set[int]]) -> Given[Any]:
    """The objects of an argument. ``check`` returns the ``id`` of what makes one, and raises UsageError for another."""
    if value is None:
        require(at is None, f"resume: {what}_at is given, and {what} is not", UsageError)
        return Given(what, [], [], [])
    if not isinstance(value, (list, tuple, Mapping)):
        check(what, value)
        if at is not None and not isinstance(at, str):
            raise UsageError(f"resume: {what}_at is {described(at)}; give one path in the tree, as text")
        return Given(what, [value], [what], [at])
    keys = list(value) if isinstance(value, Mapping) else None
    objects = list(value.values() if isinstance(value, Mapping) else value)
    if keys is not None:
        is_state_dict = {"state", "param_groups"} <= set(keys) or (
            bool(objects) and all(isinstance(obj, torch.Tensor) for obj in objects)
        )
        if is_state_dict or not all(isinstance(key, str) for key in keys):
            kind = "a state dict" if is_state_dict else "a dict whose keys are no texts"
            raise UsageError(f"resume: {what} is {kind}; give the live {what} itself, or a dict of several by name")
    require(objects, f"resume: {what} is an empty {type(value).__name__}; leave it out, or give a {what}", UsageError)
    labels = [f"{what}[{key!r}]" for key in (keys or range(len(objects)))]
    owned = [check(label, obj) for label, obj in zip(labels, objects, strict=True)]
    for place, mine in enumerate(owned):
        if (first := owned.index(mine)) < place:
            raise UsageError(f"resume: {labels[first]} and {labels[place]} are the same {what}; give it once")
    return Given(what, objects, labels, _paths(what, at, keys, len(objects)), True, keys)


def _paths(what: str, at: Any, keys: list[str] | None, count: int) -> list[str | None]:
    """The path for each of several objects. Raises UsageError."""
    if at is None:
        return [None] * count
    paths: Any = None
    if keys is not None and isinstance(at, Mapping) and at.keys() <= set(keys):
        paths = [at.get(key) for key in keys]
    elif keys is None and isinstance(at, (list, tuple)) and len(at) == count:
        paths = list(at)
    if paths is None or not all(path is None or isinstance(path, str) for path in paths):
        form = f"a list of {count} paths" if keys is None else "a dict of paths under the same keys"
        raise UsageError(f"resume: {what}_at is {described(at)}; give {form}, as {what} is")
    return cast("list[str | None]", paths)


def _check_model(label: str, value: Any) -> set[int]:
    require(
        isinstance(value, nn.Module),
        f"resume: {label} is {described(value)}; give a torch.nn.Module, or a list or dict of several",
        UsageError,
    )
    tensors = [*value.parameters(), *value.buffers()]
    wrapped = any(type(part).__name__ == _FSDP for part in value.modules())
    _refuse_sharded(label, [_FSDP] if wrapped else [type(part).__name__ for part in tensors])
    return set(map(id, tensors)) or {id(value)}


def _check_optimizer(label: str, value: Any) -> set[int]:
    require(
        not isinstance(value, (type, nn.Module)) and (isinstance(value, Optimizer) or takes_state(value)),
        f"resume: {label} is {described(value)}; give an optimizer of torch, or a list or dict of several",
        UsageError,
    )
    groups = getattr(value, "param_groups", None) or ()
    _refuse_sharded(label, (type(identifier).__name__ for group in groups for identifier in group["params"]))
    return {id(unwrapped(value))}


def _refuse_sharded(label: str, kinds: Iterable[str]) -> None:
    """Raise UsageError where one of the tensors, or the module around them, is a part of what several ranks have."""
    sharded = next((kind for kind in kinds if kind in _SHARDED), None)
    require(
        sharded is None,
        f"resume: {label} is shared by several processes ({sharded}), and resume fills what one process has whole; "
        "load a packed directory with torch.distributed.checkpoint.load and Ckpt8StorageReader, then "
        "set_state_dict",
        UsageError,
    )


_SHOWN = 10

Fits = Callable[[int, Candidate], int]
"""How well a candidate fits the object of a number: 0 for not at all."""


def candidates_at(path: Path, candidates: list[Candidate], at: str | None, keyword: str) -> list[Candidate]:
    """The candidate at the path ``at``, or all of them where none is given. Raises UsageError for an unknown path."""
    if at is None:
        return candidates
    there = [candidate for candidate in candidates if candidate.path == at]
    if not there:
        paths = listed((candidate.path for candidate in candidates), _SHOWN) or "nothing of the kind"
        raise UsageError(f"{path}: {keyword}={at!r} is not one of {paths}")
    return there


def match_several(path: Path, given: Given[Any], candidates: list[Candidate], fits: Fits) -> list[Candidate]:
    """The candidate of each object; of several that fit, the one that fits best.

    Where one object and one candidate are left, it gets what does not fit, so that the caller can say why. Raises
    UsageError where the choice is not clear.
    """
    matching = _Matching(path, given, candidates)
    if len(candidates) < len(given.objects):
        raise matching.unclear(f"{len(given.objects)} were given")
    for number, at in enumerate(given.at):
        if at is not None:
            matching.choose(number, candidates_at(path, candidates, at, f"{given.what}_at")[0])
    for number, key in enumerate(given.keys or ()):
        if number not in matching.chosen:
            same = [candidate for candidate in candidates if candidate.path == key]
            same = same or [candidate for candidate in candidates if f".{candidate.path}".endswith(f".{key}")]
            if len(same) == 1:
                matching.choose(number, same[0])
    matching.settle(fits)
    return [matching.chosen[number] for number in range(len(given.objects))]


@dataclass(slots=True)
class _Matching:
    """The candidates that are ``chosen`` so far, by the number of the object."""

    path: Path
    given: Given[Any]
    candidates: list[Candidate]
    chosen: dict[int, Candidate] = field(default_factory=dict)

    def unclear(self, why: str) -> UsageError:
        paths = listed((candidate.path for candidate in self.candidates), _SHOWN)
        if not paths:
            return UsageError(f"{self.path}: holds no state dict of any {self.given.what}, and {why}")
        holds = f"{counted(len(self.candidates), f'{self.given.what} state')} ({paths})"
        return UsageError(
            f"{self.path}: holds {holds}, and {why}; give a dict with these keys, or {self.given.what}_at="
        )

    def choose(self, number: int, candidate: Candidate) -> None:
        for other, taken in self.chosen.items():
            if taken is candidate:
                both = f"{self.given.labels[other]} and {self.given.labels[number]}"
                raise self.unclear(f"both {both} may be {candidate.path}")
        self.chosen[number] = candidate

    def settle(self, fits: Fits) -> None:
        """Choose by fit: first where one open candidate fits an object, and no other object alone."""
        while True:
            taken = set(map(id, self.chosen.values()))
            left = [candidate for candidate in self.candidates if id(candidate) not in taken]
            options: dict[int, list[Candidate]] = {}
            for number in (number for number in range(len(self.given.objects)) if number not in self.chosen):
                own = [fits(number, candidate) for candidate in left]
                options[number] = [one for one, fit in zip(left, own, strict=True) if fit == max(own) > 0]
            fitting = list(options.values())
            alone = [number for number, fit in options.items() if len(fit) == 1 and fitting.count(fit) == 1]
            if not alone:
                break
            self.choose(alone[0], options[alone[0]][0])
        for number, fit in options.items():
            if fit:
                paths = listed((candidate.path for candidate in fit), _SHOWN)
                raise self.unclear(f"{self.given.labels[number]} may be one of {paths}")
        if options and not len(options) == len(left) == 1:
            raise self.unclear(f"none fits {self.given.labels[next(iter(options))]}")
        self.chosen.update(dict.fromkeys(options, left[0]) if options else {})


def _places_of(refs: Iterable[object]) -> set[tuple[str, int]]:
    """Saved tensors, each as the key of its storage and where it begins in it."""
    return {(ref.key, ref.offset) for ref in refs if isinstance(ref, TensorRef)}


@checked
def resume(
    path: str | os.PathLike[str],
    model: nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module] | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | Mapping[str, Optimizer] | None = None,
    strict: bool = True,
    *,
    scheduler: Any = None,
    scaler: Any = None,
    ema: Any = None,
    rng: bool = False,
    model_at: Paths = None,
    optimizer_at: Paths = None,
    scheduler_at: str | None = None,
    scaler_at: str | None = None,
    ema_at: str | None = None,
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
    the entry with this key. Others find the entry that they fit, by the names and shapes of their parameters; of
    several optimizers alike, the one that belongs to the weights which its parameters take, by the keys of the file.
    Never their order decides: where that leaves a choice, UsageError asks for ``model_at`` or ``optimizer_at``, which
    are then a list or a dict too.

    ``scheduler``, ``scaler`` and ``ema`` (an ``AveragedModel``, a copy of the model, an object of a package) take their
    entries by their own ``load_state_dict``. ``rng`` sets the random numbers of Python, numpy, torch and CUDA to the
    states in the file whose names say so (``rng_state``, ``torch_rng``, ``numpy``); that of a sampler, a loader or a
    generator stays in the rest. Each entry is found by its keys and its name, or at the path that ``scheduler_at`` and
    its kin give. Of two entries that fit ``model``, the one that is no average is taken.

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
    path = as_path(path)
    models_here = _given("model", model, model_at, _check_model)
    optimizers_here = _given("optimizer", optimizer, optimizer_at, _check_optimizer)
    given = [
        given_companion("scheduler", scheduler, scheduler_at),
        given_companion("scaler", scaler, scaler_at),
        given_companion("ema", ema, ema_at),
    ]
    beside = [companion for companion in given if companion is not None]
    with open_member(path, member=member, threads=threads) as source:
        plan = _Plan(source, models_here, optimizers_here, beside, rng=rng)
        plan.decide()
        problems = plan.problems
        if problems and strict:
            more = f" (and {len(problems) - 1} more: {listed(problems[1:], 2)})" if len(problems) > 1 else ""
            raise ResumeError(f"{path}: {problems[0]}{more}; nothing was changed", tuple(problems))
        for check in source.checks:
            check()
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

    def __init__(
        self,
        source: OpenMember,
        given: Given[nn.Module],
        optimizer: Given[Optimizer],
        beside: Sequence[Companion],
        *,
        rng: bool,
    ) -> None:
        self.problems: list[str] = []
        self.consumed: list[Any] = []
        self._source = source
        self._models = given
        self._optimizers = optimizer
        self._beside = beside
        self._rng = rng
        self._random: dict[str, Any] = {}
        self._values = ValueBuilder(source.checkpoint)
        self._streamer = Streamer(source.checkpoint)
        self._packed = [packed_optimizer(obj) for obj in optimizer.objects]
        groups = [group for packed in self._packed if packed is not None for group in packed.param_groups]
        # The upper halves of weights whose residuals or masters an optimizer keeps, by ``id``.
        self._halves = {id(param) for group in groups for param in group["params"] if param.element_size() == 2}
        self._weights: list[ModelPlan] = []
        self._fills: list[Fill] = []
        self._states: list[OptimizerPlan | None] = []

    def decide(self) -> None:
        """Choose the entries and check that they fit.

        Raises UsageError where the choice is not clear, ResumeError for an optimizer without state of its own.
        """
        saved, states = find(self._source.checkpoint.tree)
        filled = self._decide_models(saved) if self._models.objects else {}
        if self._optimizers.objects:
            self._decide_optimizers(states, filled)
        self._plan_fills([state or OptimizerPlan() for state in self._states])
        tree = self._source.checkpoint.tree
        for companion in self._beside:
            self.problems += companion.choose(tree, self._values, self.consumed)
        self.consumed += [companion.node for companion in self._beside if companion.node is not None]
        if self._rng:
            self._random, nodes, problems = find_random_states(tree, self._values)
            self.consumed += nodes
            self.problems += problems

    def _decide_models(self, candidates: list[Candidate]) -> dict[int, TensorRef]:
        """Plan every model. Returns the saved tensors of all live ones, by ``id``."""
        given = self._models

        @cache
        def plan(number: int, candidate: Candidate) -> ModelPlan:
            return plan_model(candidate, given.objects[number], self._streamer, self._values, self._halves)

        def fits(number: int, candidate: Candidate) -> int:
            return not plan(number, candidate).problems

        def all_fit() -> bool:
            return all(any(fits(number, one) for one in candidates) for number in range(len(given.objects)))

        if given.keys or any(given.at) or (given.many and not all_fit()):
            candidates = find_trees(self._source.checkpoint.tree)
        chosen = (
            match_several(self._source.path, given, candidates, fits)
            if given.many
            else [self._choose_model(given.objects[0], candidates, given.at[0], partial(plan, 0))]
        )
        filled: dict[int, TensorRef] = {}
        for number, (label, candidate) in enumerate(zip(given.labels, chosen, strict=True)):
            self._weights.append(plan(number, candidate))
            self.problems += [f"{label} {problem}" for problem in self._weights[-1].problems]
            self.consumed.append(candidate.value)
            for name, ref, target in self._weights[-1].copies:
                first = filled.setdefault(id(target), ref)
                if first.dtype is not ref.dtype or not self._streamer.equal(first, ref):
                    self.problems.append(f"{label} {name}: is shared by two models, but was saved with two values")
        return filled

    def _decide_optimizers(self, candidates: list[Candidate], filled: Mapping[int, TensorRef]) -> None:
        """Plan every optimizer; ``filled`` are the saved tensors of live weights, by ``id``."""
        given, path = self._optimizers, self._source.path
        for obj in given.objects:
            if problem := optimizers.form_problem(obj):
                raise ResumeError(f"{path}: {problem}; nothing was changed", (problem,))
        weights = [
            _places_of(filled.get(id(parameter)) for group in obj.param_groups for parameter in group["params"])
            for obj in given.objects
        ]
        models = find_trees(self._source.checkpoint.tree) if any(weights) else []
        owned = dict(zip(candidates, owners(candidates, models, by_order=False), strict=True))

        def has(number: int, model: Candidate) -> bool:
            return not weights[number].isdisjoint(_places_of(model.node.values()))

        @cache
        def plan(number: int, candidate: Candidate) -> OptimizerPlan:
            trial = self._plan_optimizer(candidate, number, filled)
            keyed = owned[candidate].keyed if weights[number] and given.at[number] is None else ()
            if keyed and not any(has(number, model) for model in keyed):
                others = listed((model.path for model in keyed), _SHOWN)
                trial.wrong = f"belongs to {others}, whose weights this one does not step; or give optimizer_at="
            return trial

        def fits(number: int, candidate: Candidate) -> int:
            trial = plan(number, candidate)
            if trial.wrong is not None or trial.problems:
                return 0
            model = owned[candidate].model
            return 2 if model is not None and has(number, model) else 1

        chosen = (
            match_several(path, given, candidates, fits)
            if given.many
            else [_only_fitting(path, candidates_at(path, candidates, given.at[0], "optimizer_at"), fits)]
        )
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
        for name, ref, target in (copy for weights in self._weights for copy in weights.copies):
            has_state = any(optimizer is not None and optimizer.state.get(target) for optimizer in self._packed)
            if id(target) in alone and (has_state or ref.dtype.itemsize > 2):
                self.problems.append(f"model {name}: cannot change alone: the optimizer keeps its other half")
            else:
                self._fills.append(rounded.get(id(target)) or copy_of(ref, target))

    def _choose_model(
        self, model: nn.Module, saved: list[Candidate], at: str | None, plan: Callable[[Candidate], ModelPlan]
    ) -> Candidate:
        path, candidates = self._source.path, candidates_at(self._source.path, saved, at, "model_at")
        if not candidates:
            others = listed((tree.path for tree in find_trees(self._source.checkpoint.tree)), _SHOWN)
            more = f" under a name of models; choose one of {others} with model_at=" if others else ""
            raise UsageError(f"{path}: holds no model state dict{more}")
        fitting = fitting_models(candidates, model)
        if len(fitting) > 1:
            fitting = [candidate for candidate in fitting if not is_average(candidate.path)] or fitting
        if len(fitting) == 1:
            return fitting[0]
        problems = {candidate: plan(candidate).problems for candidate in fitting or candidates}
        nearest = min(problems, key=lambda candidate: len(problems[candidate]))
        paths = listed((candidate.path for candidate in problems), _SHOWN)
        if not (wrong := problems[nearest]):
            raise UsageError(f"{path}: holds several state dicts that fit the model ({paths}); choose with model_at=")
        first = wrong[0] + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else "")
        raise ResumeError(
            f"{path}: no state dict in it fits the model. Nearest is {nearest.path}: {first}. "
            f"Looked at {paths}; name another place with model_at=",
            tuple(wrong),
        )

    def _plan_optimizer(self, candidate: Candidate, number: int, filled: Mapping[int, TensorRef]) -> OptimizerPlan:
        optimizer, packed = self._optimizers.objects[number], self._packed[number]
        owned = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        models = [model for model in self._models.objects if not owned.isdisjoint(map(id, model.parameters()))]
        # Models can have the same names: those of several do not tell their parameters apart.
        model = models[0] if len(models) == 1 else None
        planner = None
        if packed is not None:
            planner = PackedPlanner(packed, self._values, self._streamer, filled, self._source.stored)
        try:
            return optimizers.plan_optimizer(candidate, optimizer, model, self._values, planner)
        except ResumeError as exc:
            return OptimizerPlan(wrong=str(exc))

    def apply(self) -> None:
        """Give companions and optimizers their new state, then fill the models; on failure, give the old state back."""
        source = self._source
        streamer = Streamer(source.checkpoint, DeviceCopy(source.stored).copy if source.stored is not None else None)
        given = self._optimizers
        plans = zip(given.labels, self._states, given.objects, strict=True)
        changing = [(label, state, optimizer) for label, state, optimizer in plans if state is not None]
        if self._random:
            check_random_states(self._random, source.path)
        with torch.no_grad(), ExitStack() as undone:
            # A companion may change an optimizer, so those are remembered first.
            for _, _, optimizer in changing:
                undone.enter_context(optimizers.undone_on_error(optimizer))
            for label, model, weights in zip(self._models.labels, self._models.objects, self._weights, strict=True):
                undone.enter_context(extra_states(label, model, weights.extra, source.path))
            undone.enter_context(loaded(self._beside, source.path))
            for label, state, optimizer in changing:
                try:
                    optimizers.apply(state, optimizer, source.checkpoint, streamer)
                except ResumeError as exc:
                    raise ResumeError(f"{source.path}: {label}: {exc}; nothing was changed", (str(exc),)) from exc
            source.checkpoint.check_unchanged()
            try:
                streamer.run(self._fills)
            except Exception as exc:
                raise InputError(
                    f"{source.path}: could be read a moment ago but not now ({exc}); the model is partly overwritten"
                ) from exc
        set_random_states(self._random)


def _only_fitting(path: Path, candidates: list[Candidate], fits: Fits) -> Candidate:
    """The only candidate, or the only one that fits a single optimizer best. Raises UsageError."""
    require(candidates, f"{path}: holds no optimizer state", UsageError)
    if len(candidates) == 1:
        return candidates[0]
    how = [fits(0, candidate) for candidate in candidates]
    fitting = [candidate for candidate, fit in zip(candidates, how, strict=True) if fit == max(how) > 0]
    if len(fitting) == 1:
        return fitting[0]
    paths = listed((candidate.path for candidate in candidates), _SHOWN)
    which = "none fits" if not fitting else f"{len(fitting)} fit"
    raise UsageError(f"{path}: holds {len(candidates)} optimizers ({paths}), and {which}; choose with optimizer_at=")
