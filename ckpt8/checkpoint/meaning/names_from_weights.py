"""Names of the parameters of an optimizer, from the weights in its file or in other members of its directory.

An optimizer without names lists its parameters group by group, each group in the order of the model: so do torch and
the Trainer of transformers, which puts parameters that decay before the others. A state dict of torch has the order of
the model. A safetensors file is sorted by name; for the models in ``transformers_order``, ``config.json`` tells theirs.

All parameters get names where the order of all weights is known and fits: one group, or the two of the Trainer, with as
many parameters as there are weights, and with their shapes. Otherwise the parameters of one shape get names if they are
all in one group, as many as the weights of that shape, and the order of these weights is known. Numbers tell it for
names that differ in nothing else, the layers of one stack. All other parameters get no name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt8.checkpoint.meaning.nodes import is_bare_state_dict
from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_names, saved_parameters
from ckpt8.checkpoint.meaning.quantised_state import parameter_shape
from ckpt8.checkpoint.meaning.state_dicts import find
from ckpt8.checkpoint.meaning.transformers_order import LONGEST_CONFIG, ModelOrder, of_config
from ckpt8.checkpoint.meaning.weight_evidence import untied, weights_of
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.container.manifest import FILE

Shape = tuple[int, ...]

_CONFIG, _TRAINER = "config.json", "trainer_state.json"
_NUMBER = re.compile(r"[0-9]+")
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_LAYER_NORMS = frozenset({"ln_1", "ln_2", "ln_f", "ln_q", "norm1", "norm2", "norm_1", "norm_2", "norm_f"})
_LAYER_NORMS |= {"layer_norm1", "layer_norm2", "pre_layrnorm"}
"""Names of a LayerNorm that the rule of the Trainer does not match; some models give them to an RMSNorm."""


@dataclass(slots=True)
class Weights:
    """The shapes of the weights of the models in a folder, by name; ``names`` also has the further names of tied ones.

    ``ordered``: the weights are in the order of the model. ``order``: the order of the model, if known. ``unique``: no
    name occurs twice. ``trainer``: the Trainer of transformers wrote the folder.
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
        """The names whose order is known, in the order of the model.

        A sorted state dict does not count as ordered: somebody may have read it from a safetensors file.
        """
        if self.ordered and list(self.shapes) != sorted(self.shapes):
            return list(self.shapes)
        places = {} if self.order is None else self.order.places(self.shapes)
        return sorted(places, key=lambda name: places[name])


class NamesFromWeights:
    """Names for the parameters of the optimizers in a directory, from the weights in the same folder.

    ``members`` are path and content.
    """

    def __init__(self, members: Sequence[tuple[str, Checkpoint]]) -> None:
        self._folders: dict[str, dict[str, Checkpoint]] = defaultdict(dict)
        for path, checkpoint in members:
            folder, _, name = path.rpartition("/")
            self._folders[folder][name] = checkpoint
        self._weights: dict[str, Weights] = {}

    def of_member(self, path: str) -> Mapping[str, str]:
        """The names of the parameters of a member by the place of their state, as ``state.17``. Raises InputError."""
        folder, _, name = path.rpartition("/")
        if folder not in self._weights:
            files = self._folders[folder]
            weights = collect_weights((checkpoint.format, checkpoint.tree) for checkpoint in files.values())
            weights.order = _order(files.get(_CONFIG))
            weights.trainer = _TRAINER in files
            self._weights[folder] = weights
        return parameter_names(self._folders[folder][name].tree, self._weights[folder])


def _order(config: Checkpoint | None) -> ModelOrder | None:
    if config is None or config.format != FILE or config.size > LONGEST_CONFIG:
        return None
    text = bytearray(config.size)
    config.read_into(0, memoryview(text))
    return of_config(bytes(text))


def collect_weights(members: Iterable[tuple[str, object]]) -> Weights:
    """The weights of all members, given by format and tree, that are state dicts of models; tied ones count once."""
    weights = Weights()
    found = 0
    for member_format, tree in members:
        if isinstance(tree, dict) and is_bare_state_dict(tree):
            found += 1
            weights.ordered = found == 1 and member_format != "safetensors"
            weights.add(tree)
    return weights


def parameter_names(tree: object, folder: Weights) -> Mapping[str, str]:
    """The known names of the parameters of the optimizer in ``tree``, by the place of their state.

    The weights of the ``folder`` serve where ``tree`` itself has none.
    """
    models, optimizers = find(tree)
    weights = collect_weights([("", models[0].node)]) if len(models) == 1 else folder
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
    """All names, if exactly one way to make the groups fits; else none."""
    found: list[dict[int | str, str]] = []
    for grouping in _groupings(order, groups, weights.trainer) if len(order) == len(weights.shapes) else ():
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
    """The ways in which programs group all parameters: one group, or the two of the Trainer.

    A LayerNorm does not decay whatever its name. The number of parameters in a group tells whether a norm is one.
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
    """Names of parameters whose shape only one group has, if the order of the weights of that shape is known."""
    alike: dict[Shape, list[str]] = defaultdict(list)
    for name, shape in weights.shapes.items():
        alike[shape].append(name)
    listed: dict[Shape, dict[int, list[int | str]]] = defaultdict(lambda: defaultdict(list))
    for parameter in parameters:
        if (known := shapes[parameter.identifier]) is not None:
            listed[known][id(parameter.group)].append(parameter.identifier)
    rank = {name: place for place, name in enumerate(order)}
    names: dict[int | str, str] = {}
    for shape, groups in listed.items():
        identifiers = next(iter(groups.values()))
        if len(groups) == 1 and len(identifiers) == len(alike[shape]):
            names.update(zip(identifiers, _in_order(alike[shape], rank), strict=False))
    return names


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
