"""Which weight of a checkpoint belongs to which state of its optimizer, from the file alone.

By name where the file has names. Else the parameters of every group are taken to stand in the order of the model, so
that among those of one shape the order decides, if all of that shape are in one group and as many as there are weights
of the shape, ties counted once. Where that does not hold, the weight is unknown: None, never a guess.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ckpt8.readers.base import TensorRef
from ckpt8.resuming.find import Candidate, find
from ckpt8.resuming.mapping import saved_names
from ckpt8.resuming.names import match

_MOMENT = "exp_avg"


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """State and group of one parameter, and its weight where it is known. ``name`` is for people."""

    name: str
    state: Mapping[Any, Any]
    group: Mapping[Any, Any]
    weight: TensorRef | None


def saved_parameters(tree: object) -> list[SavedParameter]:
    """All parameters that have a state with a first moment, in the order of the optimizers' groups."""
    models, optimizers = find(tree)
    weights = models[0] if len(models) == 1 and len(optimizers) == 1 else None
    return [parameter for optimizer in optimizers for parameter in _parameters(optimizer, weights)]


def _parameters(optimizer: Candidate, weights: Candidate | None) -> list[SavedParameter]:
    groups = [group for group in optimizer.node["param_groups"] if isinstance(group, dict)]
    names = saved_names(groups)
    if isinstance(names, str):
        return []
    states = optimizer.node["state"]
    shapes = {
        identifier: states[identifier][_MOMENT].shape
        for group in groups
        for identifier in group["params"]
        if isinstance(states.get(identifier), dict) and isinstance(states[identifier].get(_MOMENT), TensorRef)
    }
    found = {} if weights is None else _weights(groups, names, shapes, weights)
    place = "state" if optimizer.path.startswith("(") else f"{optimizer.path}.state"
    return [
        SavedParameter(names.get(each, f"{place}.{each}"), states[each], group, found.get(each))
        for group in groups
        for each in group["params"]
        if each in shapes
    ]


def _weights(
    groups: list[dict[Any, Any]],
    names: Mapping[int | str, str],
    shapes: Mapping[int | str, tuple[int, ...]],
    weights: Candidate,
) -> dict[int | str, TensorRef]:
    if names:
        live = match(weights.node, names.values())
        found = {each: weights.node[live[name]] for each, name in names.items() if name in live}
        return {each: ref for each, ref in found.items() if each in shapes and _is(ref, shapes[each])}
    by_shape: dict[tuple[int, ...], list[TensorRef]] = defaultdict(list)
    seen = set()
    for ref in weights.node.values():
        if isinstance(ref, TensorRef) and (ref.key, ref.offset, ref.shape) not in seen:
            seen.add((ref.key, ref.offset, ref.shape))
            by_shape[ref.shape].append(ref)
    found = {}
    for shape in set(shapes.values()):
        homes = [[each for each in group["params"] if shapes.get(each) == shape] for group in groups]
        homes = [home for home in homes if home]
        if len(homes) == 1 and len(homes[0]) == len(by_shape[shape]):
            found.update(zip(homes[0], by_shape[shape], strict=True))
    return found


def _is(ref: object, shape: tuple[int, ...]) -> bool:
    return isinstance(ref, TensorRef) and ref.shape == shape
