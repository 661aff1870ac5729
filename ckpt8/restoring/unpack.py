"""A run of ``ckpt8.optim`` as the published optimizers would have saved it: ``load(..., unpack=True)``.

optimizer    codes and scales become fp32 moments, in the layout of torch, optimi, came-pytorch or lion-pytorch
model        a 16-bit weight and the residual or master that its optimizer keeps become the fp32 weight

``converting.unpacked`` does the same for values that are computed when they are read. Both join weights by the rules
in ``CompletedWeights``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find, is_packed_group, weight_checks
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.split32 import Split32
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType
from ckpt8.optim.master_weights import weight_check
from ckpt8.optim.state_conversion import join_weight, unpack

Weight = TypeVar("Weight")
"""A tensor, or a reference to one that is computed when it is read."""


def is_packed(optimizer: Candidate) -> bool:
    """Whether one of ``ckpt8.optim`` saved a group of ``optimizer``."""
    return any(is_packed_group(group) for group in optimizer.node["param_groups"] if isinstance(group, dict))


class CompletedWeights(ABC, Generic[Weight]):
    """Joins the 16-bit weights of the state dict ``saved`` with what packed optimizers keep of them."""

    def __init__(self, saved: Mapping[str, Any]) -> None:
        self.saved = saved

    def join_all(self, parameters: Iterable[SavedParameter]) -> dict[str, Weight]:
        """The fp32 weights by name, tied names included. Raises UsageError where a weight is not certain."""
        full: dict[str, Weight] = {}
        for parameter in parameters:
            key = "residual" if "residual" in parameter.state else "master"
            part = parameter.state.get(key)
            if isinstance(part, TensorRef) and is_packed_group(parameter.group):
                config = parameter.group["master"]
                codec = Split32() if part.dtype is DType.INT16 else codec_from_config(config)
                name = self.weight_of(parameter, part)
                full[name] = self.join(name, parameter, key, codec)
        others = [name for name in self.saved if name not in full]
        tied = {other: joined for name, joined in full.items() for other in others if self._is_tied(name, other)}
        return full | tied

    def _is_tied(self, name: str, other: str) -> bool:
        """Whether ``other`` is the same tensor as ``name``, or a matrix that was copied from it bit for bit."""
        mine, theirs = self.saved[name], self.saved[other]
        if not isinstance(theirs, TensorRef) or (theirs.shape, theirs.dtype) != (mine.shape, mine.dtype):
            return False
        same = (theirs.key, theirs.offset, theirs.stride) == (mine.key, mine.offset, mine.stride)
        return same or (len(mine.shape) > 1 and self.is_copy(name, other))

    @abstractmethod
    def weight_of(self, parameter: SavedParameter, part: TensorRef) -> str:
        """The name of the weight that ``part`` completes. Raises UsageError where that is not certain."""

    @abstractmethod
    def join(self, name: str, parameter: SavedParameter, key: str, codec: Codec) -> Weight:
        """The weight ``name`` in fp32. ``key`` in the parameter's state is a residual of ``codec``, or the master."""

    @abstractmethod
    def is_copy(self, name: str, other: str) -> bool:
        """Whether two weights of one shape are equal bit for bit, and not all zero."""


class _LoadedWeights(CompletedWeights[torch.Tensor]):
    """Weights of the loaded ``model``. ``states`` are the loaded states, by the ``id`` of the saved ones."""

    def __init__(
        self,
        saved: Mapping[str, Any],
        model: Mapping[str, torch.Tensor],
        states: Mapping[int, Mapping[str, torch.Tensor]],
        where: str,
    ) -> None:
        super().__init__(saved)
        self._model = model
        self._states = states
        self._where = where

    def weight_of(self, parameter: SavedParameter, part: TensorRef) -> str:  # noqa: ARG002
        """Names or order propose the weight; the check in the parameter's group must agree."""
        where = f"{self._where}: {parameter.name}"
        if parameter.weight is None:
            raise UsageError(f"{where}: which weight it completes is unknown: {parameter.unpaired}; leave out unpack")
        name = next(key for key, value in self.saved.items() if value is parameter.weight)
        weight = self._model[name]
        if weight.is_meta:
            raise UsageError(f"{where}: cannot be unpacked on the meta device")
        expected = weight_checks(parameter.group).get(parameter.identifier)
        if weight.element_size() != 2 or expected != weight_check(weight):
            raise UsageError(
                f"{where}: its state belongs to another weight than {name}, which has its place; leave out unpack"
            )
        return name

    def join(self, name: str, parameter: SavedParameter, key: str, codec: Codec) -> torch.Tensor:
        """In memory of its own, on the device of the weight."""
        return join_weight(self._model[name], self._states[id(parameter.state)][key], codec)

    def is_copy(self, name: str, other: str) -> bool:
        """Compares the bits."""
        mine, theirs = (self._model[key].contiguous().view(torch.int16) for key in (name, other))
        return bool(self._model[name].any()) and torch.equal(mine, theirs)


@dataclass(frozen=True, slots=True)
class _Place:
    """A value of the loaded object and where it is: ``parent[key]``, or the object itself where ``parent`` is None."""

    value: Any
    parent: Any
    key: Any


def unpack_tree(obj: Any, tree: object, where: str) -> Any:
    """Unpack all state of ``ckpt8.optim`` in ``obj``, which was loaded from ``tree``; return ``obj``, changed in place.

    Where ``obj`` is itself a packed state, returns the plain one. Raises UsageError where it is not certain which
    weight a residual completes, where the published optimizer cannot express a state, and for a state in a tuple.
    """
    models, optimizers = find(tree)
    packed = [each for each in optimizers if is_packed(each)]
    if not packed:
        return obj

    places = _places(tree, obj, {id(each.node) for each in (*models, *packed)})
    states: dict[int, Mapping[str, torch.Tensor]] = {}
    for candidate in packed:
        loaded = places[id(candidate.node)][0].value["state"]
        pairs = zip(candidate.node["state"].values(), loaded.values(), strict=True)
        states.update((id(saved), state) for saved, state in pairs)
    # Of several models none is the one that a state completes, and ``saved_parameters`` says so.
    saved: dict[str, Any] = models[0].node if models else {}
    model: dict[str, Any] = places[id(saved)][0].value if id(saved) in places else {}
    model.update(_LoadedWeights(saved, model, states, where).join_all(saved_parameters(tree)))
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
    """The places in ``obj`` of the nodes of ``tree`` that are ``wanted`` by their ``id``; walks both side by side."""
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
