"""Which model of a checkpoint each of its optimizers trains.

An optimizer fits a model whose weights have the names and shapes of its parameters, or as many of each shape. Of
several models that fit as well, these decide, one after the other, as far as each leaves a choice:

keys        the keys of both share a word: netG and optG, actor and actor_optimizer; or the place in lists that are
            equally long: models.0 and optimizers.0
averages    a key that names an average or a target network is no model in training, unless all are
distinct    another optimizer trains the model for certain
beside      the optimizer and the model are in the same container
named       the key is one of those that name a model
order       as many models as optimizers fit each other: the first goes with the first

Where no model has all parameters of an optimizer, several models one after the other can. What still fits alike is not
told apart. Values are never looked at.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.meaning.weight_evidence import MOST_OPTIMIZERS, given_names, shapes_of, untied, weights_of
from ckpt8.checkpoint.vocabulary import MODEL_KEYS, is_average, words

Shape = tuple[int, ...]

_MOST_MODELS = 500
"""Of more models in a file the first count: each is compared with every optimizer."""

_MOST_TOGETHER = 6
"""Of more models no optimizer has several: their orders are tried."""

_COMMON = re.compile(
    r"(?:opt|optim|optimizer|state|dict|model|net|weight|param)s?|sd|network|module|checkpoint|ckpt|pth?|bin|safetensors"
    r"|top|level"
)
"""Words that say nothing about which model or optimizer is meant."""

_CURRENT = "current"
"""Lightning's word for the model in training where ``state_dict`` is its average."""


_UNKNOWN, _PARTLY, _SOME, _ALL, _IN_ORDER = range(1, 6)
"""How well a model fits: half of the parameters do, or no shape is known; they are as many, or half of the names
agree; they are some of its weights; they are all of them; they are all, and in its order."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The models that fit an optimizer best; the one that it trains if that is ``certain``.

    ``keyed`` are the models, and parts of models, whose keys have as much in common with that of the optimizer as those
    of the models that fit; none where these have nothing in common with it.
    """

    models: Sequence[Candidate] = ()
    certain: bool = False
    keyed: Sequence[Candidate] = ()

    @property
    def model(self) -> Candidate | None:
        """The model that the optimizer trains; None where it cannot be told."""
        return self.models[0] if self.certain else None


def owners(optimizers: Sequence[Candidate], models: Sequence[Candidate], *, by_order: bool = True) -> list[Owner]:
    """The model of every optimizer; the order of both decides only ``by_order``.

    With several optimizers it may be a part of one in the file; so it may with a single one, beside its average.
    """
    models = models[:_MOST_MODELS]
    described = [_Weights(model) for model in models]
    inner = [parts_of(model) for model in models]
    parts = [
        _Weights(part)
        for each in inner
        if len(optimizers) > 1 or len({is_average(part.path) for part in each}) > 1
        for part in each
    ]
    fits = [_best(_Parameters(each), described, parts) for each in optimizers[:MOST_OPTIMIZERS]]
    fits += [list(models)] * (len(optimizers) - len(fits))
    every = [*models, *(part.model for part in parts)]
    keyed = _by_keys(optimizers, fits, every)
    alike = [set(map(id, each)) for each in keyed]
    chosen = [_keep(fit, lambda each, ids=ids: id(each) in ids) for fit, ids in zip(fits, alike, strict=True)]  # type: ignore[misc]
    for narrow in (_without_averages, _distinct, _beside, _named, *([_in_order] if by_order else [])):
        chosen = narrow(optimizers, chosen)
    return [
        Owner(certain if len(certain) == 1 else fit, len(certain) == 1, like)
        for certain, fit, like in zip(chosen, fits, keyed, strict=True)
    ]


class _Parameters:
    """The parameters of an optimizer: names and shapes in the order of its groups, as far as they are known."""

    def __init__(self, optimizer: Candidate) -> None:
        names, shapes = given_names(optimizer.node), shapes_of(optimizer.node)
        self.names = {name: shapes.get(each) for each, name in names.items() if name is not None}
        self.shapes = Counter(shapes.values())
        self.order = [shapes.get(each) for each in names]
        self.count = len(names)


class _Weights:
    """The weights of a model."""

    def __init__(self, model: Candidate) -> None:
        self.model = model
        self.refs = weights_of(model.node)
        self.order = [ref.shape for ref in untied(self.refs).values()]
        self.shapes = Counter(self.order)

    def fit(self, parameters: _Parameters) -> int:
        """How well they are the weights of the parameters, 0 for not at all."""
        if parameters.names:
            found = match(self.refs, parameters.names)
            agree = sum(parameters.names[name] in (None, self.refs[saved].shape) for name, saved in found.items())
            if agree == len(parameters.names):
                return _ALL if agree == len(self.order) else _SOME
            return _PARTLY if 2 * agree >= len(parameters.names) else 0
        is_all = parameters.count == len(self.order)
        if not parameters.shapes:
            return _PARTLY if is_all else _UNKNOWN
        if is_all and all(mine in (None, its) for mine, its in zip(parameters.order, self.order, strict=True)):
            return _IN_ORDER
        if parameters.shapes <= self.shapes:
            return _ALL if is_all else _SOME
        return _UNKNOWN if 2 * (parameters.shapes & self.shapes).total() >= parameters.shapes.total() else 0


def _best(parameters: _Parameters, models: Sequence[_Weights], parts: Sequence[_Weights]) -> list[Candidate]:
    """The models that fit best; a part counts where all of it fits, and better than the whole.

    A single model is never left out: why a parameter is not in it is worth a reason.
    """
    fits = [(each.fit(parameters), each.model) for each in models]
    best = max((fit for fit, _ in fits), default=0)
    if best < _SOME and (whole := _together(parameters, models)) is not None:
        return [whole]
    inner = [(fit, part.model) for part in parts if (fit := part.fit(parameters)) > max(best, _SOME)]
    best, fits = (max(fit for fit, _ in inner), inner) if inner else (best, fits)
    return [model for fit, model in fits if fit == best and (fit or len(fits) == 1)]


def _together(parameters: _Parameters, models: Sequence[_Weights]) -> Candidate | None:
    """Models that have all parameters, one model after the other, as one with their keys before the names.

    Of models with the same shapes, the first in the file come first. None where the models could meet otherwise.
    """
    usable = [each for each in models if each.order and not is_average(each.model.path)]
    if parameters.names or None in parameters.order or not 1 < len(usable) <= _MOST_TOGETHER:
        return None
    found: dict[tuple[tuple[Shape, ...], ...], tuple[_Weights, ...]] = {}
    waiting: list[tuple[int, tuple[_Weights, ...]]] = [(0, ())]
    while waiting:
        at, taken = waiting.pop()
        if at == parameters.count:
            found.setdefault(tuple(tuple(each.order) for each in taken), taken)
        fitting = [each for each in usable if parameters.order[at : at + len(each.order)] == each.order]
        waiting += [(at + len(each.order), (*taken, each)) for each in reversed(fitting) if each not in taken]
    if len(found) != 1:
        return None
    (taken,) = found.values()
    return Candidate("", {f"{each.model.path}.{name}": ref for each in taken for name, ref in each.refs.items()})


def parts_of(model: Candidate) -> list[Candidate]:
    """The parts of a model, by the first component in which their names differ, if there are several."""
    names = {name: str(name).split(".") for name in model.node}
    depth = next((k for k, level in enumerate(zip(*names.values(), strict=False)) if len(set(level)) > 1), 0)
    found: dict[str, dict[Any, Any]] = defaultdict(dict)
    for name, parts in names.items():
        if len(parts) > depth + 1:
            found[parts[depth]][name] = model.node[name]
    inner = [replace(model, path=f"{model.path}.{key}", node=node, whole=model.path) for key, node in found.items()]
    return inner if len(inner) > 1 else []


Chosen = list[list[Candidate]]


def _keep(fit: list[Candidate], wanted: Callable[[Candidate], bool]) -> list[Candidate]:
    """The wanted ones, or all where none is."""
    return [each for each in fit if wanted(each)] or fit


def _by_keys(optimizers: Sequence[Candidate], fits: Chosen, models: Sequence[Candidate]) -> Chosen:
    """For every optimizer the ``models`` whose keys have as much in common with its key as those that fit."""
    places = dict(zip(map(id, models), _places(models), strict=True))
    told = {id(each): _telling_words(each.path) for each in models}
    found = []
    for optimizer, own, fit in zip(optimizers, _places(optimizers), fits, strict=True):
        mine = _telling_words(optimizer.path)
        shared = {
            id(each): sum(_is_shared(word, mine) for word in told.get(id(each), ()))
            + len(own & places.get(id(each), set()))
            for each in (*models, *fit)
        }
        most = max((shared[id(each)] for each in fit), default=0)
        found.append([each for each in models if shared[id(each)] >= most] if most else [])
    return found


def _places(candidates: Sequence[Candidate]) -> list[set[tuple[int, str, int]]]:
    """The places of entries in lists: how deep from the end of the path, the number, and how many such entries."""
    numbered = []
    inside: dict[str, set[str]] = defaultdict(set)
    for each in candidates:
        parts = each.path.split(".")
        numbered.append([(k, ".".join(parts[:k]), part) for k, part in enumerate(parts) if part.isdecimal()])
        for _, home, part in numbered[-1]:
            inside[home].add(part)
    return [
        {(each.path.count(".") - k, part, len(inside[home])) for k, home, part in its}
        for each, its in zip(candidates, numbered, strict=True)
    ]


def _telling_words(path: str) -> set[str]:
    named = ".".join(part for part in path.split(".") if not part.isdecimal())
    return {word for word in words(named) if not _COMMON.fullmatch(word)}


def _is_shared(word: str, others: set[str]) -> bool:
    """Whether a word, or a short form of it, is among others: g stands for generator, and nothing for an average."""
    return word in others or any(
        (word.startswith(each) or each.startswith(word)) and not (word + each).isdecimal() and not is_average(word)
        for each in others
    )


def _without_averages(_: Sequence[Candidate], chosen: Chosen) -> Chosen:
    found = [_keep(fit, lambda each: _CURRENT in words(each.path)) for fit in chosen]
    return [_keep(fit, lambda each: not is_average(each.path)) for fit in found]


def _distinct(_: Sequence[Candidate], chosen: Chosen) -> Chosen:
    taken = {id(fit[0]) for fit in chosen if len(fit) == 1}
    return [_keep(fit, lambda each: id(each) not in taken) if len(fit) > 1 else fit for fit in chosen]


def _beside(optimizers: Sequence[Candidate], chosen: Chosen) -> Chosen:
    return [
        _keep(fit, lambda each, at=optimizer.home: each.home == at)  # type: ignore[misc]
        for optimizer, fit in zip(optimizers, chosen, strict=False)
    ]


def _named(_: Sequence[Candidate], chosen: Chosen) -> Chosen:
    return [_keep(fit, lambda each: each.path.rpartition(".")[2] in MODEL_KEYS) for fit in chosen]


def _in_order(_: Sequence[Candidate], chosen: Chosen) -> Chosen:
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for number, fit in enumerate(chosen):
        alike[tuple(map(id, fit))].append(number)
    found = list(chosen)
    for models, numbers in alike.items():
        if len(models) == len(numbers) > 1:
            for place, number in enumerate(numbers):
                found[number] = [chosen[number][place]]
    return found
