"""Which weight of a checkpoint belongs to which state of its optimizer, from the file alone.

By name where the file has names. Else every group lists its parameters in the order of the model. So the order pairs
the parameters of one shape with the weights of that shape, if they are all in one group and as many as the weights,
ties counted once and buffers left out. Otherwise the weight is unknown, with the reason, and never a guess.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt8.checkpoint.meaning.nodes import listed_parameters
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find
from ckpt8.checkpoint.meaning.weight_evidence import untied, weights_of
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.optim.known_optimizers import first_moments

_NO_MODEL = "the file has no state dict of a model"
_SEVERAL = "the file has several models or optimizers"
_NO_SHAPE = "its shape is not known, for want of a first moment"
_NOT_NAMED = "no weight has its name"
_MISNAMED = "the weight of its name has another shape"
_NONE_ALIKE = "no weight has its shape"
_UNEQUAL = "cannot be told apart: there are not as many weights of the shape as parameters"
_SCATTERED = "cannot be told apart: the same shape in several groups"


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """State, group and weight of one parameter. ``unpaired`` says why the weight is unknown. ``name`` is for people.

    ``identifier`` stands for the parameter in its group. ``shape`` is that of the first moment or residual, None
    without one.
    """

    name: str
    identifier: int | str
    state: Mapping[Any, Any]
    group: Mapping[Any, Any]
    shape: tuple[int, ...] | None
    weight: TensorRef | None
    unpaired: str | None


def saved_parameters(tree: object) -> list[SavedParameter]:
    """All parameters that have a state, in the order of the optimizers' groups."""
    models, optimizers = find(tree)
    weights: Candidate | str = _SEVERAL if models else _NO_MODEL
    if len(models) == len(optimizers) == 1:
        weights = models[0]
    return [parameter for optimizer in optimizers for parameter in _parameters(optimizer, weights)]


def _parameters(optimizer: Candidate, weights: Candidate | str) -> list[SavedParameter]:
    groups = [group for group in optimizer.node["param_groups"] if isinstance(group, dict)]
    states = {each: state for each, state in optimizer.node["state"].items() if isinstance(state, dict) and state}
    place = "state" if optimizer.path.startswith("(") else f"{optimizer.path}.state"
    names = saved_names(groups)
    if isinstance(names, str):
        return [
            SavedParameter(f"{place}.{each}", each, state, {}, _shape(state), None, names)
            for each, state in states.items()
        ]
    shapes = {each: shape for each, state in states.items() if (shape := _shape(state)) is not None}
    found: Mapping[int | str, TensorRef | str] = (
        dict.fromkeys(shapes, weights) if isinstance(weights, str) else _weights(groups, names, shapes, weights)
    )
    result = []
    for group in groups:
        for each in group["params"]:
            if each in states:
                known = found.get(each, _NO_SHAPE)
                weight, reason = (None, known) if isinstance(known, str) else (known, None)
                name = names.get(each, f"{place}.{each}")
                result.append(SavedParameter(name, each, states[each], group, shapes.get(each), weight, reason))
    return result


def _shape(state: Mapping[Any, Any]) -> tuple[int, ...] | None:
    """The shape of the first moment, or of the residual or master of the weight."""
    first = first_moments()
    keys = (*first, *(f"{name}_codes" for name in first), "residual", "master")
    return next((ref.shape for key in keys if isinstance(ref := state.get(key), TensorRef)), None)


def _weights(
    groups: list[dict[Any, Any]],
    names: Mapping[int | str, str],
    shapes: Mapping[int | str, tuple[int, ...]],
    weights: Candidate,
) -> dict[int | str, TensorRef | str]:
    """The weight of every parameter of a known shape, or why it is unknown."""
    if names:
        saved = match(weights.node, names.values())
        return {each: _named(weights.node, saved.get(names[each]), shape) for each, shape in shapes.items()}
    by_shape: dict[tuple[int, ...], list[TensorRef]] = defaultdict(list)
    for ref in untied(weights_of(weights.node)).values():
        by_shape[ref.shape].append(ref)
    found: dict[int | str, TensorRef | str] = {}
    for shape in set(shapes.values()):
        of_shape = [[each for each in group["params"] if shapes.get(each) == shape] for group in groups]
        of_shape = [identifiers for identifiers in of_shape if identifiers]
        alike = by_shape.get(shape, [])
        if len(of_shape) == 1 and len(of_shape[0]) == len(alike):
            found.update(zip(of_shape[0], alike, strict=True))
        else:
            reason = _NONE_ALIKE if not alike else _SCATTERED if len(of_shape) > 1 else _UNEQUAL
            found.update((each, reason) for identifiers in of_shape for each in identifiers)
    return found


def _named(weights: Mapping[Any, Any], name: str | None, shape: tuple[int, ...]) -> TensorRef | str:
    ref = None if name is None else weights[name]
    if not isinstance(ref, TensorRef):
        return _NOT_NAMED
    return ref if ref.shape == shape else _MISNAMED


def saved_names(groups: Sequence[Mapping[Any, Any]]) -> dict[int | str, str] | str:
    """The name of every identifier in ``groups``, empty where not all have one, or why the groups make no sense."""
    names: dict[int | str, str] = {}
    seen: set[int | str] = set()
    for group in groups:
        identifiers = group.get("params")
        if not isinstance(identifiers, list) or not all(type(each) in (int, str) for each in identifiers):
            return "its parameter groups do not list parameters"
        if len({*seen, *identifiers}) != len(seen) + len(identifiers):
            return "its parameter groups list a parameter twice"
        seen.update(identifiers)
        names.update((each, name) for each, name in listed_parameters(group) if name is not None)
    if len(set(names.values())) != len(names):
        return "it has two parameters of one name"
    return names if len(names) == len(seen) else {}
