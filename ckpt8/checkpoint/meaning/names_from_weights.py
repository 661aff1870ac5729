"""Names of the parameters of an optimizer, from the weights in its file or in other members of its directory.

An optimizer without names lists its parameters group by group, each group in the order of the model: so do torch and
the Trainer of transformers, which puts parameters that decay before the others. A state dict of torch has the order of
the model. A safetensors file is sorted by name; for the models in ``transformers_order``, ``config.json`` tells theirs.

Where the order of all weights is known, it pairs the parameters with them: see ``pairing.places_in_order``; for the two
groups of the Trainer, their names do. Otherwise the parameters of one shape get names if they are all in one group, as
many as the weights of that shape, and the order of these weights is known. Numbers tell it for names that differ in
nothing else, the layers of one stack. All other parameters get no name.

Where several models fit an optimizer alike, the names that they agree on stay. Names in a tree with several optimizers
begin with the key of the model.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ckpt8.checkpoint.meaning.nodes import dict_groups
from ckpt8.checkpoint.meaning.ownership import Owner, owners
from ckpt8.checkpoint.meaning.pairing import (
    Beside,
    models_and_optimizers,
    place,
    places_in_order,
    places_of_shapes,
    saved_names,
)
from ckpt8.checkpoint.meaning.rank_files import home_of
from ckpt8.checkpoint.meaning.state_dicts import TOP_LEVEL, Candidate, find
from ckpt8.checkpoint.meaning.transformers_order import LONGEST_CONFIG, ModelOrder, of_config
from ckpt8.checkpoint.meaning.weight_evidence import evident_weights, shapes_of, untied, weights_of
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.container.manifest import FILE

Shape = tuple[int, ...]

_CONFIG, _TRAINER = "config.json", "trainer_state.json"
_MOST_ALIKE = 16
"""Of more models that fit alike, no name is agreed on."""

_NUMBER = re.compile(r"[0-9]+")
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_LAYER_NORMS = frozenset({"ln_1", "ln_2", "ln_f", "ln_q", "norm1", "norm2", "norm_1", "norm_2", "norm_f"})
_LAYER_NORMS |= {"layer_norm1", "layer_norm2", "pre_layrnorm"}
"""Names of a LayerNorm that the rule of the Trainer does not match; some models give them to an RMSNorm."""


@dataclass(slots=True)
class Weights:
    """The shapes of the weights of one model, by name; ``names`` also has the further names of tied ones.

    ``path`` and ``node`` are those of a ``Candidate``; a model in shards has the entries of all. ``ordered``: the
    weights are in the order of the model. ``order``: the order of the model, if known. ``trainer``: the Trainer of
    transformers wrote the folder. ``files`` are the paths of the files of values, by the ``id`` of each.
    """

    path: str = ""
    shapes: dict[str, Shape] = field(default_factory=dict)
    ordered: bool = True
    order: ModelOrder | None = None
    trainer: bool = False
    names: set[str] = field(default_factory=set)
    node: dict[str, Any] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

    def add(self, state_dict: Mapping[str, object], files: Mapping[int, str] | None = None) -> None:
        """Add the weights of one state dict of a model, without its buffers."""
        self.files.update(files or {})
        weights = weights_of(state_dict)
        self.ordered &= not self.names
        self.names.update(weights)
        self.node.update(state_dict)
        self.shapes.update((name, ref.shape) for name, ref in untied(weights).items())

    def in_order(self) -> list[str]:
        """The names whose order is known, in the order of the model.

        A sorted state dict does not count as ordered: somebody may have read it from a safetensors file.
        """
        if self.ordered and list(self.shapes) != sorted(self.shapes):
            return list(self.shapes)
        places = {} if self.order is None else self.order.places(self.shapes)
        return sorted(places, key=lambda name: places[name])


class NamesFromWeights:
    """Names for the parameters of the optimizers in a directory, from the weights in the same folder.

    ``members`` are path and content. The weights beside the file of one rank are those of the same rank.
    """

    def __init__(self, members: Sequence[tuple[str, Checkpoint]]) -> None:
        self._members = dict(members)
        self._homes = {path: home_of(path, checkpoint.tree) for path, checkpoint in members}
        self._models: dict[tuple[str, int | None], list[Weights]] = {}

    def of_member(self, path: str) -> Mapping[str, str]:
        """The names of the parameters of a member by the place of their state, as ``state.17``. Raises InputError."""
        return parameter_names(self._members[path].tree, partial(self._models_beside, path))

    def beside(self, path: str) -> Beside:
        """The models in the folder of a member, and what they say of its parameters. Raises InputError."""
        models = self._models_beside(path)
        files = {ref: file for each in models for ref, file in each.files.items()}
        names = bare_names(self._members[path].tree, lambda: models)
        return Beside([Candidate(each.path, each.node) for each in models], names, files)

    def _models_beside(self, path: str) -> list[Weights]:
        home = self._homes[path]
        if home not in self._models:
            above = f"{home[0]}/" if home[0] else ""
            files = {each: self._members[each] for each, its_home in self._homes.items() if its_home == home}
            found = models_of_files(files)
            order = _order(files.get(f"{above}{_CONFIG}"))
            for weights in found:
                weights.order, weights.trainer = order, f"{above}{_TRAINER}" in files
            self._models[home] = found or models_of_files(self._further(above))
        return self._models[home]

    def _further(self, above: str) -> dict[str, Checkpoint]:
        """The files that serve where a folder has no model: all, if one alone has optimizers; else those below."""
        owners = (path for path, each in self._members.items() if find(each.tree)[1])
        alone = next(owners, None) is not None and next(owners, None) is None
        return {path: each for path, each in self._members.items() if alone or path.startswith(above)}


def _order(config: Checkpoint | None) -> ModelOrder | None:
    if config is None or config.format != FILE or config.size > LONGEST_CONFIG:
        return None
    text = bytearray(config.size)
    config.read_into(0, memoryview(text))
    return of_config(bytes(text))


def models_of_files(files: Mapping[str, Checkpoint]) -> list[Weights]:
    """The models in files, by path. Files of weights that share no name can be one model."""
    models: list[Weights] = []
    shards: list[list[Weights]] = []
    evident = evident_weights(*(checkpoint.tree for checkpoint in files.values()))
    for name, checkpoint in files.items():
        ordered = checkpoint.format != "safetensors"
        for model in find(checkpoint.tree, evident)[0]:
            is_bare = model.path == TOP_LEVEL
            own = Weights(name if is_bare else f"{name}:{model.path}", ordered=ordered)
            own.add(model.node, {id(ref): name for ref in model.node.values()})
            models.append(own)
            if is_bare:
                whole = next((each for each in shards if all(own.names.isdisjoint(part.names) for part in each)), None)
                if whole is None:
                    shards.append([own])
                else:
                    whole.append(own)
    return models + [_joined(parts) for parts in shards if len(parts) > 1]


def _joined(parts: Iterable[Weights]) -> Weights:
    """All parts of a model in one; tied weights count once."""
    whole = Weights()
    for part in parts:
        whole.path = whole.path or part.path
        whole.ordered &= part.ordered
        whole.add(part.node, part.files)
    return whole


def parameter_names(tree: object, folder: Callable[[], Sequence[Weights]] = tuple) -> Mapping[str, str]:
    """The known names of the parameters of the optimizers in ``tree``, by the place of their state.

    ``folder`` returns the models that serve where ``tree`` itself has none.
    """
    found = list(_names(tree, folder))
    several = len(found) > 1
    return {
        place(optimizer, each): f"{key}.{name}" if key else name
        for optimizer, owner, names in found
        for key in (owner.model.before_names if several and owner.model else "",)
        for each, name in names.items()
    }


def bare_names(tree: object, folder: Callable[[], Sequence[Weights]] = tuple) -> Mapping[str, str]:
    """As ``parameter_names``, without the keys of models."""
    return {
        place(optimizer, each): name for optimizer, _, names in _names(tree, folder) for each, name in names.items()
    }


def _names(
    tree: object, folder: Callable[[], Sequence[Weights]]
) -> Iterator[tuple[Candidate, Owner, Mapping[int | str, str]]]:
    """Every optimizer of ``tree`` with its model, and the names of its parameters by identifier."""
    models, optimizers = models_and_optimizers(tree)
    others = () if models or not optimizers else folder()
    beside = {id(each.node): each for each in others}
    candidates = models or [Candidate(each.path, each.node) for each in others]
    owned = owners(optimizers, candidates)
    unnamed = [saved_names(dict_groups(each.node)) == {} for each in optimizers]
    together: dict[int, list[Candidate]] = defaultdict(list)
    for optimizer, owner, is_unnamed in zip(optimizers, owned, unnamed, strict=True):
        if owner.model is not None and is_unnamed:
            together[id(owner.model)].append(optimizer)
    for optimizer, owner, is_unnamed in zip(optimizers, owned, unnamed, strict=True):
        found = []
        if is_unnamed and len(owner.models) <= _MOST_ALIKE:
            for model in (each for each in owner.models if not each.numbered):
                weights = beside.get(id(model.node)) or _of_candidate(model)
                same = [each for each in together.get(id(owner.model), ()) if each is not optimizer]
                found.append(_names_in([optimizer, *same], weights))
        yield optimizer, owner, _agreed(found, owner)


def _of_candidate(model: Candidate) -> Weights:
    weights = Weights(model.path)
    weights.add(model.node)
    return weights


def _agreed(found: Sequence[Mapping[int | str, str]], owner: Owner) -> Mapping[int | str, str]:
    """The names from the model that is certain, or those that all models which fit alike give."""
    if owner.certain or not found:
        return found[0] if found else {}
    given: dict[int | str, set[str]] = defaultdict(set)
    for names in found:
        for each, name in names.items():
            given[each].add(name)
    return {each: names.pop() for each, names in given.items() if len(names) == 1}


def _names_in(optimizers: Sequence[Candidate], weights: Weights) -> Mapping[int | str, str]:
    """The names of the parameters of the first optimizer; the others step the same model."""
    order = weights.in_order()
    described = [(dict_groups(each.node), shapes_of(each.node)) for each in optimizers]
    groups, shapes = described[0]
    if len(order) < len(weights.shapes):
        return _by_shape(groups, shapes, weights, order)
    found = _by_trainer(groups, shapes, weights, order)
    if not found:
        if len(order) != sum(len(group["params"]) for own, _ in described for group in own):
            order = [name for name in order if weights.node[name].dtype.is_floating]  # others are buffers
        places = places_in_order(described, [weights.shapes[name] for name in order])[0]
        found = {each: order[at] for each, at in places.items() if isinstance(at, int)}
    return found


def _by_trainer(
    groups: Sequence[Mapping[Any, Any]], shapes: Mapping[int | str, Shape], weights: Weights, order: list[str]
) -> Mapping[int | str, str]:
    """All names, if exactly one way to make the two groups of the Trainer fits; else none."""
    found: list[dict[int | str, str]] = []
    for grouping in _groupings(order, groups) if weights.trainer else ():
        if [len(group["params"]) for group in groups] != [len(names) for names in grouping]:
            continue
        pairs = [
            pair
            for group, names in zip(groups, grouping, strict=True)
            for pair in zip(group["params"], names, strict=True)
        ]
        known = [shape == weights.shapes[name] for each, name in pairs if (shape := shapes.get(each)) is not None]
        if known and all(known) and dict(pairs) not in found:
            found.append(dict(pairs))
    return found[0] if len(found) == 1 else {}


def _groupings(order: list[str], groups: Sequence[Mapping[Any, Any]]) -> Iterator[list[list[str]]]:
    """The ways in which the Trainer makes two groups of all parameters.

    A LayerNorm does not decay whatever its name. The number of parameters in a group tells whether a norm is one.
    """
    if len(groups) == 2 and groups[1].get("weight_decay") == 0:
        for norms in (_LAYER_NORMS, frozenset[str]()):
            spared = {name for name in order if _NO_DECAY.search(name.lower()) or norms.intersection(name.split("."))}
            yield [[name for name in order if name not in spared], [name for name in order if name in spared]]


def _by_shape(
    groups: Sequence[Mapping[Any, Any]],
    shapes: Mapping[int | str, Shape],
    weights: Weights,
    order: list[str],
) -> Mapping[int | str, str]:
    """Names of parameters whose shape only one group has, if the order of the weights of that shape is known."""
    alike: dict[Shape, list[str]] = defaultdict(list)
    for name, shape in weights.shapes.items():
        alike[shape].append(name)
    rank = {name: place for place, name in enumerate(order)}
    names = [name for of_shape in alike.values() for name in _in_order(of_shape, rank)]
    places = places_of_shapes(groups, shapes, [weights.shapes[name] for name in names])
    return {each: names[at] for each, at in places.items() if isinstance(at, int)}


def _numbers(name: str) -> list[tuple[int, str]]:
    """The numbers in a name as a sort key; they stay text, since Python refuses to read thousands of digits."""
    return [(len(digits), digits) for digits in (number.lstrip("0") for number in _NUMBER.findall(name))]


def _in_order(names: list[str], rank: Mapping[str, int]) -> list[str]:
    """The names in the order of the model; none where it is unknown."""
    if all(name in rank for name in names):
        return sorted(names, key=lambda name: rank[name])
    if len({_NUMBER.sub("#", name) for name in names}) == 1:
        return sorted(names, key=_numbers)
    return []
