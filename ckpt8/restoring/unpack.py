"""A run of ``ckpt8.optim`` as the published optimizers would have saved it: ``load(..., unpack=True)``.

optimizer    codes and scales become fp32 moments, in the layout of torch, optimi, came-pytorch or lion-pytorch
model        a 16-bit weight and the residual or master that its optimizer keeps become the fp32 weight

``converting.weights`` does the same for values that are computed when they are read. Both join weights by the rules
of ``join_weights``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar

import torch

from ckpt8.checkpoint.meaning.nodes import dict_groups
from ckpt8.checkpoint.meaning.pairing import SavedParameter, saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import Candidate, find, is_packed_group, weight_checks
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.split24 import Split32
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType
from ckpt8.optim.packed_tensor import weight_check
from ckpt8.optim.state_conversion import join_weight, unpack

Weight = TypeVar("Weight")
"""A tensor, or a reference to one that is computed when it is read."""


def is_packed(optimizer: Candidate) -> bool:
    """Whether one of ``ckpt8.optim`` saved a group of ``optimizer``."""
    return optimizer.origin is None and any(map(is_packed_group, dict_groups(optimizer.node)))


def join_weights(
    saved: Mapping[str, Any],
    parameters: Iterable[SavedParameter],
    join: Callable[[SavedParameter, str, Codec], tuple[str, Weight]],
    is_copy: Callable[[str, str], bool],
) -> dict[str, Weight]:
    """The fp32 weights by name, tied names included, that ``parameters`` of packed optimizers complete.

    ``saved`` is the state dict of the model. ``join(parameter, key, codec)`` returns the name of its weight, and that
    weight in fp32: the state holds under ``key`` a residual of ``codec``, or the master. It raises UsageError where the
    name is not certain. ``is_copy`` compares two weights of one shape and type: whether they are equal bit for bit,
    and not all zero.
    """
    full: dict[str, Weight] = {}
    for parameter in parameters:
        key = "residual" if "residual" in parameter.state else "master"
        part = parameter.state.get(key)
        if isinstance(part, TensorRef) and is_packed_group(parameter.group):
            codec = Split32() if part.dtype is DType.INT16 else codec_from_config(parameter.group["master"])
            name, weight = join(parameter, key, codec)
            full[name] = weight
    others = {name: ref for name, ref in saved.items() if name not in full and isinstance(ref, TensorRef)}
    tied = {
        other: weight
        for name, weight in full.items()
        for other, ref in others.items()
        if (ref.shape, ref.dtype) == (saved[name].shape, saved[name].dtype)
        and (_place(ref) == _place(saved[name]) or (len(ref.shape) > 1 and is_copy(name, other)))
    }
    return full | tied


def of_model(parameters: Iterable[SavedParameter], saved: Mapping[str, Any]) -> list[SavedParameter]:
    """The parameters with a weight in the state dict ``saved``, and those whose weight is unknown."""
    refs = set(map(id, saved.values()))
    return [parameter for parameter in parameters if parameter.weight is None or id(parameter.weight) in refs]


def _place(ref: TensorRef) -> tuple[object, ...]:
    return ref.key, ref.offset, ref.stride


def _join_loaded(
    saved: Mapping[str, Any],
    model: Mapping[str, torch.Tensor],
    states: Mapping[int, Mapping[str, torch.Tensor]],
    parameters: Iterable[SavedParameter],
    label: str,
) -> dict[str, torch.Tensor]:
    """The fp32 weights of the loaded ``model``. ``states`` are the loaded states, by the ``id`` of the saved ones.

    Names or order propose the weight of a parameter; the check in its group must agree.
    """

    def join(parameter: SavedParameter, key: str, codec: Codec) -> tuple[str, torch.Tensor]:
        where = f"{label}: {parameter.name}"
        if parameter.weight is None:
            raise UsageError(f"{where}: which weight it completes is unknown: {parameter.unpaired}; leave out unpack")
        name = next(own for own, ref in saved.items() if ref is parameter.weight)
        weight = model[name]
        if weight.is_meta:
            raise UsageError(f"{where}: cannot be unpacked on the meta device")
        expected = weight_checks(parameter.group).get(parameter.identifier)
        if weight.element_size() != 2 or expected != weight_check(weight):
            raise UsageError(
                f"{where}: its state belongs to another weight than {name}, which has its place; leave out unpack"
            )
        return name, join_weight(weight, states[id(parameter.state)][key], codec)

    def is_copy(name: str, other: str) -> bool:
        mine, theirs = (model[key].contiguous().view(torch.int16) for key in (name, other))
        return bool(model[name].any()) and torch.equal(mine, theirs)

    return join_weights(saved, parameters, join, is_copy)


_Found = tuple[Any, Any, Any]
"""A value of the loaded object, and where it is: ``(value, parent, key)``. ``parent`` is None for the object itself."""


def unpack_tree(obj: Any, tree: object, where: str) -> Any:
    """Unpack all state of ``ckpt8.optim`` in ``obj``, loaded from ``tree``; return ``obj``, changed in place.

    Where ``obj`` is itself a packed state, returns the plain one. Raises UsageError where it is not certain which
    weight a residual completes, where the published optimizer cannot express a state, and for a state in a tuple.
    """
    models, optimizers = find(tree)
    packed = [optimizer for optimizer in optimizers if is_packed(optimizer)]
    if not packed:
        return obj

    places = _places(tree, obj, {id(candidate.node) for candidate in (*models, *packed)})
    states: dict[int, Mapping[str, torch.Tensor]] = {}
    for candidate in packed:
        loaded = places[id(candidate.node)][0][0]["state"]
        pairs = zip(candidate.node["state"].values(), loaded.values(), strict=True)
        states.update((id(saved), state) for saved, state in pairs)
    parameters = saved_parameters(tree)
    for saved in [model.node for model in models] or [{}]:
        loaded_model: dict[str, Any] = places[id(saved)][0][0] if id(saved) in places else {}
        loaded_model.update(_join_loaded(saved, loaded_model, states, of_model(parameters, saved), where))
    for candidate in packed:
        places_of = places[id(candidate.node)]
        plain = unpack(places_of[0][0])
        for _, parent, key in places_of:
            if parent is None:
                return plain
            if isinstance(parent, tuple):
                raise UsageError(
                    f"{where}: {candidate.path} lies in a tuple, which cannot be changed; leave out unpack"
                )
            parent[key] = plain
    return obj


def _places(tree: object, obj: Any, wanted: Collection[int]) -> dict[int, list[_Found]]:
    """The places in ``obj`` of the nodes of ``tree`` with a ``wanted`` ``id``. Walks both trees in step."""
    places: dict[int, list[_Found]] = {}
    seen = set()
    stack: list[tuple[Any, _Found]] = [(tree, (obj, None, None))]
    while stack:
        node, place = stack.pop()
        if id(node) in wanted:
            places.setdefault(id(node), []).append(place)
        if id(node) in seen:
            continue
        seen.add(id(node))
        value = place[0]
        if isinstance(node, dict) and isinstance(value, dict):
            pairs = zip(node.values(), value.items(), strict=True)
            stack += [(child, (item, value, key)) for child, (key, item) in pairs]
        elif isinstance(node, (list, tuple)) and isinstance(value, (list, tuple)):
            stack += [(child, (item, value, at)) for at, (child, item) in enumerate(zip(node, value, strict=True))]
    return places
