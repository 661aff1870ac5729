"""``load(..., unpack=True)``: a run of ``ckpt8.optim`` as the published optimizers would have saved it.

optimizer    codes and scales become fp32 moments, in the layout of torch, optimi, came-pytorch or lion-pytorch
model        a 16-bit weight and what its optimizer keeps of it become the fp32 weight
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find, is_packed_group, weight_checks
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs import codec_from_config
from ckpt8.codecs.split32 import Split32
from ckpt8.core.errors import UsageError
from ckpt8.optim.master_weights import weight_check
from ckpt8.optim.state_conversion import join_weight, unpack


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

    places = _places(tree, obj, {id(each.node) for each in (*models, *packed)})
    _join_weights(_Loaded(saved_parameters(tree), models, packed, places), where)
    for candidate in packed:
        found = places[id(candidate.node)]
        plain = unpack(found[0].value)
        for place in found:
            if place.parent is None:
                return plain
            if isinstance(place.parent, tuple):
                raise UsageError(
                    f"{where}: {candidate.path} lies in a tuple, which cannot be changed; leave out unpack"
                )
            place.parent[place.key] = plain
    return obj


def _places(tree: object, obj: Any, wanted: Collection[int]) -> dict[int, list[_Place]]:
    """Where the values hang that nodes of ``tree``, given by ``id``, have become; both are walked side by side."""
    places: dict[int, list[_Place]] = {}
    seen = set()
    stack: list[tuple[Any, _Place]] = [(tree, _Place(obj, None, None))]
    while stack:
        node, place = stack.pop()
        if id(node) in wanted:
            places.setdefault(id(node), []).append(place)
        if id(node) in seen:
            continue
        seen.add(id(node))
        value = place.value
        if isinstance(node, dict) and isinstance(value, dict):
            pairs = zip(node.values(), value.items(), strict=True)
            stack += [(child, _Place(item, value, key)) for child, (key, item) in pairs]
        elif isinstance(node, (list, tuple)) and isinstance(value, (list, tuple)):
            stack += [(child, _Place(item, value, k)) for k, (child, item) in enumerate(zip(node, value, strict=True))]
    return places


@dataclass(frozen=True, slots=True)
class _Loaded:
    """Saved parameters, and the models and optimizers that they are of, with where these are in the loaded object."""

    parameters: list[SavedParameter]
    models: list[Candidate]
    packed: list[Candidate]
    places: Mapping[int, list[_Place]]

    def model(self) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The only model, as it was saved and as it was loaded."""
        node = self.models[0].node
        return node, self.places[id(node)][0].value

    def states(self) -> dict[int, Mapping[str, torch.Tensor]]:
        """The loaded state of each saved one, by ``id``."""
        found: dict[int, Mapping[str, torch.Tensor]] = {}
        for candidate in self.packed:
            loaded = self.places[id(candidate.node)][0].value["state"]
            pairs = zip(candidate.node["state"].values(), loaded.values(), strict=True)
            found.update((id(saved), state) for saved, state in pairs)
        return found


def _join_weights(loaded: _Loaded, where: str) -> None:
    """Put fp32 weights in the place of 16-bit ones, under all of their names.

    Names or order propose which weight a state completes, the check in its group decides.
    """
    states = loaded.states()
    full: dict[str, torch.Tensor] = {}
    for parameter in loaded.parameters:
        state = states.get(id(parameter.state))
        part = None if state is None else state.get("residual", state.get("master"))
        if part is not None:
            name, joined = _joined(loaded, parameter, part, where)
            full[name] = joined
    if not full:
        return
    saved, model = loaded.model()
    aliases = {}
    for name, joined in full.items():
        for other in model:
            if other not in full and _is_alias(saved, model, name, other):
                aliases[other] = joined
    model.update(full | aliases)


def _joined(loaded: _Loaded, parameter: SavedParameter, part: torch.Tensor, where: str) -> tuple[str, torch.Tensor]:
    """Name and fp32 value of the weight that ``part`` completes. Raises UsageError."""
    where = f"{where}: {parameter.name}"
    if part.is_meta:
        raise UsageError(f"{where}: cannot be unpacked on the meta device")
    if parameter.weight is None:
        raise UsageError(f"{where}: its weight in full cannot be told, since {parameter.unpaired}; leave out unpack")
    saved, model = loaded.model()
    name = next(key for key, value in saved.items() if value is parameter.weight)
    weight = model[name]
    expected = weight_checks(parameter.group).get(parameter.identifier)
    if weight.element_size() != 2 or expected != weight_check(weight):
        raise UsageError(
            f"{where}: its state belongs to another weight than {name}, which has its place; leave out unpack"
        )
    codec = Split32() if part.dtype == torch.int16 else codec_from_config(parameter.group["master"])
    return name, join_weight(weight, part, codec)


def _is_alias(saved: Mapping[str, Any], model: Mapping[str, torch.Tensor], name: str, other: str) -> bool:
    """Whether ``other`` is the same tensor as ``name``, or a matrix that was copied from it bit for bit."""
    mine, theirs = saved[name], saved[other]
    if not isinstance(theirs, TensorRef) or theirs.shape != mine.shape or theirs.dtype is not mine.dtype:
        return False
    if (theirs.key, theirs.offset, theirs.stride) == (mine.key, mine.offset, mine.stride):
        return True
    return len(mine.shape) > 1 and bool(model[name].any()) and _bits_equal(model[name], model[other])


def _bits_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int16), other.contiguous().view(torch.int16))
