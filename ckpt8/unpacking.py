"""``load(..., unpack=True)``: a run of ``ckpt8.optim`` as the published optimizers would have saved it.

optimizer    codes and scales become fp32 moments, in the layout of torch, optimi, came-pytorch or lion-pytorch
model        a 16-bit weight and what its optimizer keeps of it become the fp32 weight
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt8.errors import UsageError
from ckpt8.readers.base import TensorRef
from ckpt8.resuming.find import Candidate, find
from ckpt8.resuming.groups import is_packed_group
from ckpt8.resuming.pairing import SavedParameter, saved_parameters

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class _Place:
    """A value of the loaded object, and where it hangs; ``parent`` is None for the object itself."""

    value: Any
    parent: Any
    key: Any


def unpack_tree(obj: Any, tree: object, where: str) -> Any:
    """``obj``, which was loaded from ``tree``, with everything of ``ckpt8.optim`` unpacked, in place where it can be.

    Raises UsageError where it is not clear which weight a residual completes, where a packed state cannot be
    expressed by the published optimizer, and where it lies in a tuple.
    """
    models, optimizers = find(tree)
    packed = [each for each in optimizers if any(is_packed_group(group) for group in each.node["param_groups"])]
    if not packed:
        return obj
    from ckpt8.optim.convert import unpack

    places = _places(tree, obj, {id(each.node) for each in (*models, *packed)})
    _join_weights(saved_parameters(tree), models, packed, places, where)
    for candidate in packed:
        place = places[id(candidate.node)]
        plain = unpack(place.value)
        if place.parent is None:
            return plain
        if isinstance(place.parent, tuple):
            raise UsageError(
                f"{where}: {candidate.path} lies in a tuple, which cannot be changed; load it without unpack"
            )
        place.parent[place.key] = plain
    return obj


def _places(tree: object, obj: Any, wanted: Collection[int]) -> dict[int, _Place]:
    """The values that nodes of ``tree``, given by ``id``, have become; both are walked side by side."""
    places: dict[int, _Place] = {}
    seen = set()
    stack: list[tuple[Any, _Place]] = [(tree, _Place(obj, None, None))]
    while stack:
        node, place = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if id(node) in wanted:
            places[id(node)] = place
        value = place.value
        if isinstance(node, dict) and isinstance(value, dict):
            pairs = zip(node.values(), value.items(), strict=True)
            stack += [(child, _Place(item, value, key)) for child, (key, item) in pairs]
        elif isinstance(node, (list, tuple)) and isinstance(value, (list, tuple)):
            stack += [(child, _Place(item, value, k)) for k, (child, item) in enumerate(zip(node, value, strict=True))]
    return places


def _join_weights(
    parameters: list[SavedParameter],
    models: list[Candidate],
    packed: list[Candidate],
    places: Mapping[int, _Place],
    where: str,
) -> None:
    """Put fp32 weights in the place of 16-bit ones, under all of their names."""
    import torch

    from ckpt8.codecs import codec_from_config
    from ckpt8.codecs.split32 import Split32
    from ckpt8.optim.convert import join_weight

    states = {id(state): place for each in packed for state, place in _states(each, places[id(each.node)].value)}
    joined: dict[tuple[str, int], torch.Tensor] = {}
    for parameter in parameters:
        state = states.get(id(parameter.state))
        part = None if state is None else state.get("residual", state.get("master"))
        if part is None:
            continue
        ref = parameter.weight
        if ref is None:
            raise UsageError(
                f"{where}: {parameter.name}: its weight in full cannot be told, since {parameter.unpaired}; "
                "load it without unpack"
            )
        codec = Split32() if part.dtype == torch.int16 else codec_from_config(parameter.group["master"])
        model = places[id(models[0].node)].value
        name = next(key for key, value in models[0].node.items() if value is ref)
        joined[ref.key, ref.offset] = join_weight(model[name], part, codec)
    for candidate in models:
        model = places[id(candidate.node)].value
        for name, value in candidate.node.items():
            if isinstance(value, TensorRef) and (value.key, value.offset) in joined:
                full = joined[value.key, value.offset]
                model[name] = full if model[name].shape == full.shape else model[name]


def _states(candidate: Candidate, loaded: Mapping[str, Any]) -> list[tuple[object, Mapping[str, Any]]]:
    """The states of an optimizer, each beside the one that was loaded."""
    return list(zip(candidate.node["state"].values(), loaded["state"].values(), strict=True))
