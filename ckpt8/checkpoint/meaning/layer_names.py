"""From the name of a parameter to the layer that it is part of, whatever wrapped the model or sliced the tensor."""

from __future__ import annotations

import re

_SLICE = re.compile(r"\[[0-9:,]*\]$")

_REPEATED = re.compile(r"#\d+$")

_AROUND_NAMES = (
    "model state_dict model_state_dict model_state module params _parameters _modules",
    "ema ema_model ema_state_dict model_ema state_dict_ema params_ema ema_params shadow_params g_ema",
    "_orig_mod _checkpoint_wrapped_module _fsdp_wrapped_module",
)

_AROUND = frozenset(name for names in _AROUND_NAMES for name in names.split())
"""Components that say where a state dict is, or who wrapped the model, and not which layer it is."""


def plain_path(name: str) -> str:
    """The path of a tensor in the model: without member, wrappers, the place of a slice, and ``#2``."""
    bare = _SLICE.sub("", _REPEATED.sub("", name)).rpartition(":")[2]
    return ".".join(part for part in bare.split(".") if part not in _AROUND) or bare


def layer_of(path: str) -> str:
    """The path of a parameter up to its first number, as in ``transformer.h.3``; without one, that of its module."""
    parts = path.split(".")
    for end, part in enumerate(parts, 1):
        if part.isdecimal():
            return ".".join(parts[:end])
    return ".".join(parts[:-1]) or path


SLICE = re.compile(r"\[(?:\d+)?:(?:\d+)?(?:,(?:\d+)?:(?:\d+)?)*\]$")
"""What the name of a slice of a distributed checkpoint ends in."""


def whole_name(name: str) -> str:
    """The name of a tensor from that of a slice: without its place in it, and without the file that it lies in."""
    part = SLICE.search(name)
    if part is None:
        return name
    member, _, bare = name[: part.start()].rpartition(":")
    folder = member.rpartition("/")[0]
    return f"{folder}:{bare}" if folder else bare
