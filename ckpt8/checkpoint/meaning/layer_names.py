"""From the name of a tensor to the layer that it is part of, whatever wrapped the model or sliced the tensor."""

from __future__ import annotations

import re
from collections.abc import Iterable

_DIGITS = "0123456789"
_LONGEST_NUMBER = 18
"""Digits of the number of a layer that are looked at: a name may hold thousands."""

SLICE = re.compile(r"\[(?:\d+)?:(?:\d+)?(?:,(?:\d+)?:(?:\d+)?)*\]$")
"""The end of the name of a slice of a distributed tensor, such as ``[0:8,:]``."""

_REPEATED = re.compile(r"#\d+$")
"""The end of a name that was taken: the second ``bias`` is ``bias#2``."""

_AROUND_NAMES = (
    "model state_dict model_state_dict model_state module params _parameters _modules",
    "ema ema_model ema_state_dict model_ema state_dict_ema params_ema ema_params shadow_params g_ema",
    "_orig_mod _checkpoint_wrapped_module _fsdp_wrapped_module",
)

_AROUND = frozenset(name for names in _AROUND_NAMES for name in names.split())
"""Components that say where a state dict is, or who wrapped the model, and not which layer it is."""


def whole_tensor(name: str) -> str:
    """The name of a tensor without the place of a slice and without ``#2``."""
    return SLICE.sub("", _REPEATED.sub("", name))


def plain_path(name: str) -> str:
    """The path of a tensor in the model: as ``whole_tensor``, without the member and without wrappers."""
    bare = whole_tensor(name).rpartition(":")[2]
    return ".".join(part for part in bare.split(".") if part not in _AROUND) or bare


def layer_of(path: str) -> str:
    """The layer of a plain path: all up to the first number, as in ``transformer.h.3``; without one, the module."""
    parts = path.split(".")
    for end, part in enumerate(parts, 1):
        if part.isdecimal():
            return ".".join(parts[:end])
    return ".".join(parts[:-1]) or path


def in_model_order(layers: Iterable[str]) -> list[str]:
    """Layers in the order given, but those of one stack behind each other, by number."""
    places = {layer: place for place, layer in enumerate(layers)}
    first: dict[str, int] = {}
    for layer, place in places.items():
        first.setdefault(layer.rstrip(_DIGITS), place)

    def key(layer: str) -> tuple[int, int, int]:
        stack = layer.rstrip(_DIGITS)
        return first[stack], int(layer[len(stack) :][:_LONGEST_NUMBER] or 0), places[layer]

    return sorted(places, key=key)


def without_file(name: str) -> str:
    """The name of a distributed tensor without the file that a slice of it happens to lie in."""
    member, colon, bare = name.partition(":")
    folder = member.rpartition("/")[0]
    return name if not colon else f"{folder}:{bare}" if folder else bare


def whole_name(name: str) -> str:
    """The name of a tensor from that of a slice: without its place in it, and without the file that it lies in."""
    part = SLICE.search(name)
    return name if part is None else without_file(name[: part.start()])
