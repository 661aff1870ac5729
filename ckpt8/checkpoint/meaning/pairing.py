"""Which weight of a checkpoint belongs to which state of its optimizer, from the file alone.

``saved_parameters`` looks in the model that the optimizer trains, see ``owners``. There the weight of a parameter is
found by name where the file has names. Else every group lists its parameters in the order of the model. So the order
pairs the parameters of one shape with the weights of that shape, if they are all in one group and as many as the
weights, ties counted once and buffers left out. Parameters that are frozen or not used have no state and no known
shape: where the groups of the optimizer, or of all optimizers of the model, list every weight once, a parameter has the
weight that order and shapes leave it. Otherwise the weight is unknown, with the reason, and never a guess.

The order of a file beside that of the optimizer may not be that of the model: only names pair its weights.

``owners`` chooses the model of each optimizer as follows.

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

``find_masters`` finds the fp32 masters that optimizers keep of weights in 16 bits: in the state of a parameter, or in a
list beside it.

    state[3]["master_param"]                                              in the state
    {"optimizer": ..., "fp32_from_fp16_params": [[a, b], [c]]}            Megatron, apex: by parameter group
    {"base_optimizer_state": ..., "single_partition_of_fp32_groups": [flat]}    DeepSpeed: one for each parameter

A list is in the order in which the groups list their parameters.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ckpt8.checkpoint.meaning.nodes import Shape, is_optimizer, listed_parameters, parameter_groups, parameters_of
from ckpt8.checkpoint.meaning.optimizer_state import SavedParameter, bitsandbytes_moments, with_moments
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.checkpoint.meaning.state_dicts import (
    MOST_OPTIMIZERS,
    Candidate,
    find_all,
    find_loose,
    moment_shape,
    parts_of,
    shapes_of,
    untied,
    weights_of,
)
from ckpt8.checkpoint.tree import TensorRef, iter_nodes
from ckpt8.checkpoint.vocabulary import MASTER_LISTS, MODEL_KEYS, is_average, words
from ckpt8.core.grouping import grouped
from ckpt8.core.text import listed
from ckpt8.optim.known_optimizers import MASTER_KEYS

_MOST_MODELS = 500
"""Of more models in a file the first count: each is compared with every optimizer."""

_MOST_TOGETHER = 6
"""Of more models no optimizer has several: their orders are tried."""

_COMMON = re.compile(
    r"(?:opt|optim|optimizer|state|dict|model|net|weight|param)s?|sd|network|module|checkpoint|ckpt|pth?|bin|safetensors"
    r"|top|level"
)
"""Words that say nothing about which model or optimizer is meant."""

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
    parts = [
        _Weights(part)
        for inner in map(parts_of, models)
        if len(optimizers) > 1 or len({is_average(part.path) for part in inner}) > 1
        for part in inner
    ]
    fits = [_best(_Parameters(optimizer), described, parts) for optimizer in optimizers[:MOST_OPTIMIZERS]]
    fits += [list(models)] * (len(optimizers) - len(fits))
    keyed = _by_keys(optimizers, fits, [*models, *(part.model for part in parts)])
    alike = [set(map(id, candidates)) for candidates in keyed]
    chosen = [[model for model in fit if id(model) in ids] or fit for fit, ids in zip(fits, alike, strict=True)]
    chosen = [
        # Lightning calls the model in training "current" where ``state_dict`` is its average.
        _keep(fit, lambda model: "current" in words(model.path), lambda model: not is_average(model.path))
        for fit in chosen
    ]
    taken = {id(fit[0]) for fit in chosen if len(fit) == 1}

    def still_free(optimizer: Candidate, fit: list[Candidate]) -> list[Candidate]:
        """Of several models that fit: those that no other optimizer trains, in its folder, under a usual key."""
        return _keep(
            fit,
            lambda model: id(model) not in taken,
            lambda model: model.home == optimizer.home,
            lambda model: model.path.rpartition(".")[2] in MODEL_KEYS,
        )

    chosen = [
        still_free(optimizer, fit) if len(fit) > 1 else fit for optimizer, fit in zip(optimizers, chosen, strict=True)
    ]
    if by_order:
        chosen = _in_order(chosen)
    return [
        Owner(certain if len(certain) == 1 else fit, len(certain) == 1, like)
        for certain, fit, like in zip(chosen, fits, keyed, strict=True)
    ]


class _Parameters:
    """The parameters of an optimizer: names and shapes in the order of its groups, as far as they are known."""

    def __init__(self, optimizer: Candidate) -> None:
        listed, shapes = parameters_of(optimizer.node), shapes_of(optimizer.node["state"])
        self.names = {name: shapes.get(identifier) for identifier, (_, name) in listed.items() if name is not None}
        self.shapes = Counter(shapes.values())
        self.order = list(map(shapes.get, listed))
        self.count = len(listed)


class _Weights:
    """The weights of a model."""

    def __init__(self, model: Candidate) -> None:
        self.model, self.refs = model, weights_of(model.node)
        self.order = [ref.shape for ref in untied(self.refs).values()]
        self.shapes = Counter(self.order)

    def fit(self, parameters: _Parameters) -> int:
        """How well they are the weights of the parameters, 0 for not at all."""
        if parameters.names:
            matched = match(self.refs, parameters.names)
            agree = sum(parameters.names[name] in (None, self.refs[saved].shape) for name, saved in matched.items())
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
    fits = [(model.fit(parameters), model.model) for model in models]
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
    usable = [model for model in models if model.order and not is_average(model.model.path)]
    if parameters.names or None in parameters.order or not 1 < len(usable) <= _MOST_TOGETHER:
        return None
    ways: dict[tuple[tuple[Shape, ...], ...], tuple[_Weights, ...]] = {}
    waiting: list[tuple[int, tuple[_Weights, ...]]] = [(0, ())]
    while waiting:
        at, taken = waiting.pop()
        if at == parameters.count:
            ways.setdefault(tuple(tuple(part.order) for part in taken), taken)
        fitting = [part for part in usable if parameters.order[at : at + len(part.order)] == part.order]
        waiting += [(at + len(part.order), (*taken, part)) for part in reversed(fitting) if part not in taken]
    if len(ways) != 1:
        return None
    (taken,) = ways.values()
    return Candidate("", {f"{part.model.path}.{name}": ref for part in taken for name, ref in part.refs.items()})


Chosen = list[list[Candidate]]


def _keep(fit: list[Candidate], *wishes: Callable[[Candidate], bool]) -> list[Candidate]:
    """Those that fulfil all wishes, one after the other; a wish that none fulfils does not count."""
    for wish in wishes:
        fit = [model for model in fit if wish(model)] or fit
    return fit


def _by_keys(optimizers: Sequence[Candidate], fits: Chosen, models: Sequence[Candidate]) -> Chosen:
    """For every optimizer the ``models`` whose keys have as much in common with its key as those that fit."""
    places = dict(zip(map(id, models), _places(models), strict=True))
    told = {id(model): _telling_words(model.path) for model in models}
    chosen = []
    for optimizer, own, fit in zip(optimizers, _places(optimizers), fits, strict=True):
        mine = _telling_words(optimizer.path)
        shared = {
            id(choice): sum(_is_shared(word, mine) for word in told.get(id(choice), ()))
            + len(own & places.get(id(choice), set()))
            for choice in (*models, *fit)
        }
        most = max((shared[id(choice)] for choice in fit), default=0)
        chosen.append([model for model in models if shared[id(model)] >= most] if most else [])
    return chosen


def _places(candidates: Sequence[Candidate]) -> list[set[tuple[int, str, int]]]:
    """The places of entries in lists: how deep from the end of the path, the number, and how many such entries."""
    paths = [candidate.path.split(".") for candidate in candidates]
    numbers = [[(k, tuple(path[:k])) for k, part in enumerate(path) if part.isdecimal()] for path in paths]
    inside = grouped((home, path[k]) for path, places in zip(paths, numbers, strict=True) for k, home in places)
    return [
        {(len(path) - 1 - k, path[k], len(set(inside[home]))) for k, home in places}
        for path, places in zip(paths, numbers, strict=True)
    ]


def _telling_words(path: str) -> set[str]:
    named = ".".join(part for part in path.split(".") if not part.isdecimal())
    return {word for word in words(named) if not _COMMON.fullmatch(word)}


def _is_shared(word: str, others: set[str]) -> bool:
    """Whether a word, or a short form of it, is among others: g stands for generator, and nothing for an average."""
    return word in others or any(
        (word.startswith(other) or other.startswith(word)) and not (word + other).isdecimal() and not is_average(word)
        for other in others
    )


def _in_order(chosen: Chosen) -> Chosen:
    alike = grouped((tuple(map(id, fit)), number) for number, fit in enumerate(chosen))
    ordered = list(chosen)
    for models, numbers in alike.items():
        if len(models) == len(numbers) > 1:
            for place, number in enumerate(numbers):
                ordered[number] = [chosen[number][place]]
    return ordered


Identifier = int | str


def lists_of_masters(tree: object) -> dict[int, list[Any]]:
    """The list of masters beside each optimizer that has one, by the ``id`` of the optimizer."""
    lists_of: dict[int, list[Any]] = {}
    for _, node in iter_nodes(tree):
        lists = [node[key] for key in MASTER_LISTS & node.keys()] if isinstance(node, dict) else []
        if len(lists) == 1 and isinstance(lists[0], list):
            lists_of.update((id(value), lists[0]) for value in node.values() if is_optimizer(value))
    return lists_of


def find_masters(
    states: Mapping[Identifier, Mapping[Any, Any]],
    groups: Sequence[Mapping[Any, Any]],
    shapes: Mapping[Identifier, tuple[int, ...]],
    beside: Sequence[Any],
) -> dict[Identifier, TensorRef]:
    """The master of every parameter that has one; ``beside`` is the list of the optimizer, empty without one.

    The parameters of a group have masters from a list if these are as many, and of their shapes. Flat ones may end
    before the padding of the moments.
    """
    masters: dict[Identifier, TensorRef] = {}
    listed: list[list[Identifier]] = [group["params"] for group in groups]
    by_group = [refs if isinstance(refs, list) else [refs] for refs in beside]
    if len(by_group) != len(listed) or not all(isinstance(refs, list) for refs in beside):
        listed, by_group = (
            [[identifier for group in listed for identifier in group]],
            [[ref for refs in by_group for ref in refs]],
        )
    for identifiers, refs in zip(listed, by_group, strict=True):
        pairs = list(zip(identifiers, refs, strict=False)) if len(identifiers) == len(refs) else []
        if all(isinstance(ref, TensorRef) and _may_be(ref, shapes.get(identifier)) for identifier, ref in pairs):
            masters.update(pairs)
    for identifier, state in states.items():
        own = (ref for key in MASTER_KEYS if isinstance(ref := state.get(key), TensorRef))
        if (ref := next((ref for ref in own if ref.shape == shapes.get(identifier)), None)) is not None:
            masters[identifier] = ref
    return masters


def _may_be(ref: TensorRef, shape: tuple[int, ...] | None) -> bool:
    return shape is None or ref.shape == shape or len(ref.shape) == len(shape) == 1


State = tuple[int, ...]
"""How many parameters of each group have a weight."""

_MOST_STATES, _MOST_GROUPS = 20_000, 16
"""Groups that leave more ways leave a choice: they are not followed further."""

Parameters = tuple[Sequence[Mapping[Any, Any]], Mapping[Identifier, Shape]]
"""The groups of an optimizer, and the shapes of the parameters that have a state."""

NOT_NAMED = "no weight has its name"


@dataclass(frozen=True, slots=True)
class Beside:
    """What other files of a directory say of the optimizers in one: models, and names of parameters by their place.

    ``files`` are the paths of the files that hold the weights, by the ``id`` of each.
    """

    models: Sequence[Candidate] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OwnedOptimizer:
    """An optimizer with the model that it trains.

    ``names`` are those that its groups state, or why they make no sense. ``mates`` are the numbers of the optimizers
    without names that step the same model, its own among them if it has none; the order of the weights pairs their
    parameters.
    """

    candidate: Candidate
    owner: Owner
    groups: Sequence[Mapping[Any, Any]]
    names: Mapping[Identifier, str] | str
    mates: tuple[int, ...]


def owned_optimizers(optimizers: Sequence[Candidate], models: Sequence[Candidate]) -> list[OwnedOptimizer]:
    """Every optimizer of a tree with the one of the ``models`` that it trains."""
    owned = owners(optimizers, models)
    groups = [parameter_groups(optimizer.node) for optimizer in optimizers]
    names = list(map(saved_names, groups))
    mates = grouped(
        (id(owner.model), number)
        for number, owner in enumerate(owned)
        if owner.model is not None and names[number] == {}
    )
    return [
        OwnedOptimizer(*described, tuple(mates.get(id(described[1].model), ())))
        for described in zip(optimizers, owned, groups, names, strict=True)
    ]


def saved_parameters(tree: object, beside: Beside | None = None, *, as_torch: bool = False) -> list[SavedParameter]:
    """All parameters that have a state, in the order of the optimizers' groups.

    The models ``beside`` serve where the tree itself has none. With ``as_torch`` the 32-bit moments of bitsandbytes
    have the names of torch.
    """
    models, optimizers = models_and_optimizers(tree)
    beside = Beside() if models or beside is None else beside
    owned = owned_optimizers(optimizers, models or beside.models)
    all_states = [_states(optimizer, as_torch) for optimizer in optimizers]
    all_shapes = [
        {own: shape for own, state in states.items() if (shape := moment_shape(state)) is not None}
        for states in all_states
    ]
    pairs: dict[int, Mapping[Identifier, tuple[str, TensorRef] | str]] = {}
    for mates in {optimizer.mates for optimizer in owned if optimizer.mates and models}:
        model = cast("Candidate", owned[mates[0]].owner.model)
        together = [(owned[number].groups, all_shapes[number]) for number in mates]
        pairs.update(zip(mates, paired_in_order(together, untied(weights_of(model.node))), strict=True))
    lists = lists_of_masters(tree) if optimizers else {}
    rows = []
    listed: list[tuple[Mapping[Any, Any], Identifier]]
    for number, optimizer in enumerate(owned):
        states, shapes = all_states[number], all_shapes[number]
        groups, names = optimizer.groups, optimizer.names
        weights: Mapping[Identifier, TensorRef | str]
        if isinstance(names, str):
            weights, names, masters = dict.fromkeys(states, names), {}, {}
            listed = [({}, identifier) for identifier in states]
        else:
            known = ((own, pair) for own, pair in pairs.get(number, {}).items() if own in shapes)
            by_order = {own: pair if isinstance(pair, str) else pair[1] for own, pair in known}
            weights = by_order or _find_weights(optimizer, names, shapes, models, beside)
            masters = find_masters(states, groups, shapes, lists.get(id(optimizer.candidate.node), ()))
            listed = [(group, identifier) for group in groups for identifier in group["params"] if identifier in states]
        for group, identifier in listed:
            weight = weights.get(identifier, "its shape is not known, for want of a first moment")
            row = SavedParameter(
                names.get(identifier, place(optimizer.candidate, identifier)),
                states[identifier],
                group,
                optimizer=number,
                identifier=identifier,
                shape=shapes.get(identifier),
                weight=None if isinstance(weight, str) else weight,
                unpaired=weight if isinstance(weight, str) else None,
                home=beside.files.get(id(weight)),
                master=masters.get(identifier),
            )
            rows.append(row)
    return rows


def models_and_optimizers(tree: object) -> tuple[list[Candidate], list[Candidate]]:
    """All that can be the model of an optimizer: state dicts, their copies, and other weights; and the optimizers."""
    models, copies, optimizers = find_all(tree)
    models += copies
    return (models or find_loose(tree, optimizers)) if optimizers else models, optimizers


def _states(optimizer: Candidate, as_torch: bool) -> Mapping[Identifier, Mapping[Any, Any]]:
    """The state of every parameter that has one."""
    states: Mapping[Identifier, Mapping[Any, Any]] = {
        own: state for own, state in optimizer.node["state"].items() if isinstance(state, dict) and state
    }
    if not as_torch:
        return states
    listed = parameters_of(optimizer.node)
    holders = {own: listed[own][0] if own in listed else {} for own in states}
    return {own: dict(with_moments(state, bitsandbytes_moments(state, holders[own]))) for own, state in states.items()}


def _find_weights(
    optimizer: OwnedOptimizer,
    names: Mapping[Identifier, str],
    shapes: Mapping[Identifier, Shape],
    models: Sequence[Candidate],
    beside: Beside,
) -> dict[Identifier, TensorRef | str]:
    """The weight of every parameter of a known shape, by its name, or why it is unknown."""
    owner = optimizer.owner
    if owner.model is None:
        reason = "the file has no state dict of a model"
        if owner.models:
            reason = f"several models fit it: {listed((model.path for model in owner.models), 4)}"
        elif models or beside.models:
            reason = "no model in the file has weights of its shapes"
        return dict.fromkeys(shapes, reason)
    if not names:
        places = {identifier: place(optimizer.candidate, identifier) for identifier in shapes}
        names = {identifier: beside.names[at] for identifier, at in places.items() if at in beside.names}
    saved = match(owner.model.node, names.values())
    unordered = "the optimizer gives no names, and the file of the model no order"
    weights: dict[Identifier, TensorRef | str] = dict.fromkeys(shapes, unordered)
    for identifier, name in names.items():
        if identifier in shapes:
            ref = owner.model.node[saved[name]] if name in saved else None
            weights[identifier] = NOT_NAMED
            if isinstance(ref, TensorRef):
                is_alike = ref.shape == shapes[identifier]
                weights[identifier] = ref if is_alike else "the weight of its name has another shape"
    return weights


def place(optimizer: Candidate, identifier: int | str) -> str:
    """Where an optimizer keeps the state of a parameter."""
    return f"state.{identifier}" if optimizer.path.startswith("(") else f"{optimizer.path}.state.{identifier}"


def paired_in_order(
    optimizers: Sequence[Parameters], weights: Mapping[str, TensorRef]
) -> list[dict[Identifier, tuple[str, TensorRef] | str]]:
    """The weight, with its name, of the parameters of each of the optimizers of one model, or why it is unknown.

    ``weights`` are those of the model in its order. What is no float is a buffer, unless the optimizers list it.
    """
    if len(weights) != sum(len(group["params"]) for groups, _ in optimizers for group in groups):
        weights = {name: ref for name, ref in weights.items() if ref.dtype.is_floating}
    named = list(weights.items())
    places = places_in_order(optimizers, [ref.shape for ref in weights.values()])
    return [{own: named[at] if isinstance(at, int) else at for own, at in its.items()} for its in places]


def places_in_order(optimizers: Sequence[Parameters], weights: Sequence[Shape]) -> list[dict[Identifier, int | str]]:
    """The place among the ``weights`` of the parameters of each of the ``optimizers``, or why it is unknown.

    The order pairs the parameters of one shape: see ``places_of_shapes``. Others have the weight that they have in all
    ways in which order and shapes fit, where the groups of the optimizer, or of all, list as many parameters as there
    are weights.
    """
    pairs = [dict(places_of_shapes(groups, shapes, weights)) for groups, shapes in optimizers]
    numbers = tuple(range(len(optimizers)))
    for together in dict.fromkeys([*((number,) for number in numbers), numbers]):
        lists = [
            [(number, identifier) for identifier in group["params"]]
            for number in together
            for group in optimizers[number][0]
        ]
        if any(not isinstance(pairs[number].get(identifier), int) for keys in lists for number, identifier in keys):
            shapes = [[optimizers[number][1].get(identifier) for number, identifier in keys] for keys in lists]
            for (at, place), weight in _covering(shapes, weights).items():
                number, identifier = lists[at][place]
                pairs[number][identifier] = weight
    return pairs


def places_of_shapes(
    groups: Sequence[Mapping[Any, Any]], shapes: Mapping[Identifier, Shape], weights: Sequence[Shape]
) -> dict[Identifier, int | str]:
    """The place of every parameter of a known shape, if one group has all of the shape, as many as there are weights.

    Else why it is unknown. The order of the group is that of the weights of the shape.
    """
    by_shape = grouped((shape, number) for number, shape in enumerate(weights))
    alike = [grouped((shapes[own], own) for own in group["params"] if own in shapes) for group in groups]
    known: dict[Identifier, int | str] = {}
    for shape, lists in grouped(entry for by_group in alike for entry in by_group.items()).items():
        places = by_shape.get(shape, [])
        if len(lists) == 1 and len(lists[0]) == len(places):
            known.update(zip(lists[0], places, strict=True))
            continue
        reason = "cannot be told apart: there are not as many weights of the shape as parameters"
        if len(lists) > 1:
            reason = "cannot be told apart: the same shape in several groups"
        known.update((own, reason if places else "no weight has its shape") for owns in lists for own in owns)
    return known


def _covering(groups: Sequence[Sequence[Shape | None]], weights: Sequence[Shape]) -> dict[tuple[int, int], int]:
    """The weights that parameters have in all ways of giving each one, in the order of its group.

    ``groups`` are the shapes of parameters, None where it is unknown; there are as many as weights. Returns the place
    of the weight by the number of the group and the place in it: nothing where there is no way, or too many.
    """
    known = any(shape is not None for group in groups for shape in group)
    if not known or sum(map(len, groups)) != len(weights) or len(groups) > _MOST_GROUPS:
        return {}

    def moves(state: State, shape: Shape) -> Iterator[tuple[int, State]]:
        """The groups whose next parameter may have a weight of the shape, and the state after it."""
        for number, (group, done) in enumerate(zip(groups, state, strict=True)):
            if done < len(group) and group[done] in (None, shape):
                yield number, (*state[:number], done + 1, *state[number + 1 :])

    reached: list[set[State]] = [{(0,) * len(groups)}]
    room = _MOST_STATES + len(weights)
    for shape in weights:
        reached.append({after for state in reached[-1] for _, after in moves(state, shape)})
        room -= len(reached[-1])
        if room < 0:
            return {}
    ending = reached.pop()
    options: dict[tuple[int, int], set[int]] = defaultdict(set)
    for at, (states, shape) in reversed(list(enumerate(zip(reached, weights, strict=True)))):
        before = set()
        for state in states:
            for number, after in moves(state, shape):
                if after in ending:
                    before.add(state)
                    options[number, state[number]].add(at)
        ending = before
    return {key: places.pop() for key, places in options.items() if len(places) == 1}


def saved_names(groups: Sequence[Mapping[Any, Any]]) -> dict[Identifier, str] | str:
    """The name of every identifier in ``groups``, empty where not all have one, or why the groups make no sense."""
    lists = [group.get("params") for group in groups]
    if not all(isinstance(own, list) and all(type(each) in (int, str) for each in own) for own in lists):
        return "its parameter groups do not list parameters"
    listed = [parameter for group in groups for parameter in listed_parameters(group)]
    if len({identifier for identifier, _ in listed}) != len(listed):
        return "its parameter groups list a parameter twice"
    names = {identifier: name for identifier, name in listed if name is not None}
    if len(set(names.values())) != len(names):
        return "it has two parameters of one name"
    return names if len(names) == len(listed) else {}
