"""Names of the parameters of an optimizer whose weights are other members of its directory.

An optimizer without names lists its parameters group by group, each group in the order of the model: so do torch and
the Trainer of transformers, which puts what decays before what does not. A state dict of torch has that order; a
safetensors file is sorted by name, which leaves the order of modules open. So among parameters of one shape, all in
one group and as many as there are weights of it, a name is given where the order of the weights is known: that of the
file, or that of the numbers in names which differ in nothing else, the layers of one stack. All others have no name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt8.policy import BUFFERS
from ckpt8.readers.base import TensorRef
from ckpt8.resuming.find import find
from ckpt8.resuming.mapping import saved_names
from ckpt8.resuming.pairing import saved_parameters
from ckpt8.roles import is_bare_state_dict

_NUMBER = re.compile(r"[0-9]+")


@dataclass(slots=True)
class Weights:
    """Names of weights by shape. ``ordered``: in the order of the model. ``unique``: no name was met twice."""

    by_shape: dict[tuple[int, ...], list[str]] = field(default_factory=lambda: defaultdict(list))
    ordered: bool = True
    unique: bool = True


def collect_weights(members: Iterable[tuple[str, object]]) -> Weights:
    """The weights of all members that are state dicts of models, given by format and tree; tied ones count once."""
    weights = Weights()
    taken: set[str] = set()
    found = 0
    for member_format, tree in members:
        if not isinstance(tree, dict) or not is_bare_state_dict(tree):
            continue
        found += 1
        weights.ordered = found == 1 and member_format != "safetensors"
        seen = set()
        for name, ref in tree.items():
            if not isinstance(ref, TensorRef) or name.rpartition(".")[2] in BUFFERS:
                continue
            weights.unique &= name not in taken
            taken.add(name)
            place = ref.key, ref.offset, ref.shape
            if place not in seen:
                seen.add(place)
                weights.by_shape[ref.shape].append(name)
    return weights


def parameter_names(tree: object, weights: Weights) -> Mapping[str, str]:
    """The names that can be told of the parameters of the optimizer in ``tree``, by the place of their state."""
    models, optimizers = find(tree)
    if models or len(optimizers) != 1 or not weights.unique:
        return {}
    groups = [group for group in optimizers[0].node["param_groups"] if isinstance(group, dict)]
    if saved_names(groups) != {}:
        return {}
    places: dict[tuple[int, ...], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for saved in saved_parameters(tree):
        if saved.shape is not None:
            places[saved.shape][id(saved.group)].append(saved.name)
    names: dict[str, str] = {}
    for shape, homes in places.items():
        alike = weights.by_shape.get(shape, [])
        home = next(iter(homes.values()))
        if len(homes) == 1 and len(home) == len(alike):
            names.update(zip(home, _in_order(alike, weights.ordered), strict=False))
    return names


def _numbers(name: str) -> list[tuple[int, str]]:
    """The numbers in a name, to be sorted by; as text, since a name may be made of more digits than Python reads."""
    return [(len(digits), digits) for digits in (number.lstrip("0") for number in _NUMBER.findall(name))]


def _in_order(names: list[str], ordered: bool) -> list[str]:
    """The names as the model has them; none where that is not known."""
    if ordered or len({_NUMBER.sub("#", name) for name in names}) == 1:
        return names if ordered else sorted(names, key=_numbers)
    return []
