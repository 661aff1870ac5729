"""Names of the parameters of an optimizer, from the weights in its file or in other members of its directory.

An optimizer without names lists its parameters group by group, each group in the order of the model: so do torch and
the Trainer of transformers, which puts what decays before what does not. A state dict of torch has that order; a
safetensors file is sorted by name, and its order follows from ``config.json`` for the models in ``model_order``.

All parameters have names where the order of all weights is known and fits: one group, or the two of the Trainer, of as
many parameters as there are weights, and of their shapes. Otherwise, among parameters of one shape, all in one group
and as many as there are weights of it, a name is given where the order of these weights is known, be it only that of
the numbers in names which differ in nothing else, the layers of one stack. All others have no name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_names, saved_parameters
from ckpt8.checkpoint.meaning.quantised_state import parameter_shape
from ckpt8.checkpoint.meaning.roles import is_bare_state_dict
from ckpt8.checkpoint.meaning.state_dicts import find, untied, weights_of
from ckpt8.checkpoint.meaning.transformers_order import LONGEST_CONFIG, ModelOrder, of_config
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.container.manifest import FILE

Shape = tuple[int, ...]

_CONFIG, _TRAINER = "config.json", "trainer_state.json"
_NUMBER = re.compile(r"[0-9]+")
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_LAYER_NORMS = frozenset({"ln_1", "ln_2", "ln_f", "ln_q", "norm1", "norm2", "norm_1", "norm_2", "norm_f"})
_LAYER_NORMS |= {"layer_norm1", "layer_norm2", "pre_layrnorm"}
"""Further names of a LayerNorm, which the rule of the Trainer does not know; some models call an RMSNorm so."""


@dataclass(slots=True)
class Weights:
    """The weights of the models in a folder by name, with their shapes; ``names`` are those of tied ones too.

    ``ordered``: in the order of the model. ``unique``: no name was met twice. ``order``: that of the model, if known.
    ``trainer``: the Trainer of transformers wrote the folder.
    """

    shapes: dict[str, Shape] = field(default_factory=dict)
    ordered: bool = True
    unique: bool = True
    order: ModelOrder | None = None
    trainer: bool = False
    names: set[str] = field(default_factory=set)

    def add(self, state_dict: Mapping[str, object]) -> None:
        """Add the weights of one state dict of a model, without its buffers."""
        weights = weights_of(state_dict)
        self.unique &= self.names.isdisjoint(weights)
        self.names.update(weights)
        self.shapes.update((name, ref.shape) for name, ref in untied(weights).items())

    def in_order(self) -> list[str]:
        """The names whose place among each other is known, in the order of the model.

        A state dict that is sorted may be what somebody read from a safetensors file.
        """
        if self.ordered and list(self.shapes) != sorted(self.shapes):
            return list(self.shapes)
        places = {} if self.order is None else self.order.places(self.shapes)
        return sorted(places, key=lambda name: places[name])


class NamesBeside:
    """Names for the parameters of optimizers in the members of a directory, from the weights in the same folder."""

    def __init__(self, members: Sequence[tuple[str, Checkpoint]]) -> None:
        self._folders: dict[str, list[tuple[str, Checkpoint]]] = defaultdict(list)
        for path, checkpoint in members:
            folder, _, name = path.rpartition("/")
            self._folders[folder].append((name, checkpoint))
        self._weights: dict[str, Weights] = {}

    def of(self, path: str) -> Mapping[str, str]:
        """The names of the parameters of a member by the place of their state, as ``state.17``. Raises InputError."""
        folder, _, name = path.rpartition("/")
        if folder not in self._weights:
            beside = self._folders[folder]
            weights = collect_weights((each.format, each.tree) for _, each in beside)
            weights.order = next((_order(each) for file, each in beside if file == _CONFIG), None)
            weights.trainer = any(file == _TRAINER for file, _ in beside)
            self._weights[folder] = weights
        return parameter_names(dict(self._folders[folder])[name].tree, self._weights[folder])


def _order(config: Checkpoint) -> ModelOrder | None:
    if config.format != FILE or config.size > LONGEST_CONFIG:
        return None
    text = bytearray(config.size)
    config.read_into(0, memoryview(text))
    return of_config(bytes(text))


def collect_weights(members: Iterable[tuple[str, object]]) -> Weights:
    """The weights of all members that are state dicts of models, given by format and tree; tied ones count once."""
    weights = Weights()
    found = 0
    for member_format, tree in members:
        if isinstance(tree, dict) and is_bare_state_dict(tree):
            found += 1
            weights.ordered = found == 1 and member_format != "safetensors"
            weights.add(tree)
    return weights


def parameter_names(tree: object, beside: Weights) -> Mapping[str, str]:
    """The known names of the parameters of the optimizer in ``tree``, by the place of their state.

    ``beside`` are the weights of the other members; they are used where ``tree`` has none.
    """
    models, optimizers = find(tree)
    weights = beside
    if len(models) == 1:
        weights = Weights()
        weights.add(models[0].node)
    if len(models) > 1 or len(optimizers) != 1 or not weights.unique:
        return {}
    groups = [group for group in optimizers[0].node["param_groups"] if isinstance(group, dict)]
    if saved_names(groups) != {}:
        return {}
    parameters = saved_parameters(tree)
    shapes = {each.identifier: each.shape or parameter_shape(each.state) for each in parameters}
    order = weights.in_order()
    names = _by_group(groups, shapes, weights, order) or _by_shape(parameters, shapes, weights, order)
    return {each.name: names[each.identifier] for each in parameters if each.identifier in names}


def _by_group(
    groups: Sequence[Mapping[Any, Any]],
    shapes: Mapping[int | str, Shape | None],
    weights: Weights,
    order: list[str],
) -> Mapping[int | str, str]:
    """All names, where one way to make the groups fits and no other does."""
    found: list[dict[int | str, str]] = []
    complete = len(order) == len(weights.shapes)
    for grouping in _groupings(order, groups, weights.trainer) if complete else ():
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


def _groupings(order: list[str], groups: Sequence[Mapping[Any, Any]], trainer: bool) -> Iterator[list[list[str]]]:
    """Ways in which a program makes groups of all parameters: one of all, or the two of the Trainer.

    Whether a norm is a LayerNorm, and so does not decay whatever its name, can be seen in the number of parameters.
    """
    if len(groups) == 1:
        yield [order]
    if trainer and len(groups) == 2 and groups[1].get("weight_decay") == 0:
        for norms in (_LAYER_NORMS, frozenset[str]()):
            spared = {name for name in order if _NO_DECAY.search(name.lower()) or norms.intersection(name.split("."))}
            yield [[name for name in order if name not in spared], [name for name in order if name in spared]]


def _by_shape(
    parameters: Iterable[SavedParameter],
    shapes: Mapping[int | str, Shape | None],
    weights: Weights,
    order: list[str],
) -> Mapping[int | str, str]:
    """Names of parameters whose shape no other group has, where the order of the weights of that shape is known."""
    alike: dict[Shape, list[str]] = defaultdict(list)
    for name, shape in weights.shapes.items():
        alike[shape].append(name)
    homes: dict[Shape, dict[int, list[int | str]]] = defaultdict(lambda: defaultdict(list))
    for parameter in parameters:
        if (known := shapes[parameter.identifier]) is not None:
            homes[known][id(parameter.group)].append(parameter.identifier)
    rank = {name: place for place, name in enumerate(order)}
    names: dict[int | str, str] = {}
    for shape, groups in homes.items():
        home = next(iter(groups.values()))
        if len(groups) == 1 and len(home) == len(alike[shape]):
            names.update(zip(home, _in_order(alike[shape], rank), strict=False))
    return names


def _numbers(name: str) -> list[tuple[int, str]]:
    """The numbers in a name, to be sorted by; as text, since a name may be made of more digits than Python reads."""
    return [(len(digits), digits) for digits in (number.lstrip("0") for number in _NUMBER.findall(name))]


def _in_order(names: list[str], rank: Mapping[str, int]) -> list[str]:
    """The names as the model has them; none where that is not known."""
    if all(name in rank for name in names):
        return sorted(names, key=lambda name: rank[name])
    if len({_NUMBER.sub("#", name) for name in names}) == 1:
        return sorted(names, key=_numbers)
    return []
