"""Checks the options of a parameter group, and turns its codecs into the configurations that are saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

import torch

from ckpt8.codecs import Codec, codec_from_config, config_of, parse_codec
from ckpt8.codecs.base import StateKey
from ckpt8.core.errors import UsageError
from ckpt8.optim.known_optimizers import card_of
from ckpt8.optim.master_weights import master_part

MOMENT2 = "companded8(signed=False, Q=255, p=0.5)"
"""The default codec of second moments, chosen by the measurements in ``rounding``."""

_LIMITS = {"betas": 1.0, **dict.fromkeys(("lr", "weight_decay", "momentum", "clip_threshold", "d", "eps"), math.inf)}
"""Settings whose numbers lie in [0, limit), and their limits."""


def as_codec(given: Any) -> Codec:
    """A codec from text, as in ``companded8(Q=31)``, or from its stored configuration. Raises UsageError."""
    if isinstance(given, Mapping):
        return codec_from_config(given)
    if not isinstance(given, str):
        raise UsageError(f"{given!r} is neither the name of a codec nor a stored configuration")
    cls, fields = parse_codec(given)
    codec: Codec = cls(**fields)
    return codec


def check_group(group: dict[str, Any]) -> None:
    """Replace the codecs of a group by their configurations. Raises UsageError for invalid options."""
    for key in get_args(StateKey):
        codec = as_codec(group[key])
        if not codec.trains(key):
            raise UsageError(f"{key}={group[key]!r}: this codec does not hold {key}")
        group[key] = config_of(codec)
    master = codec_from_config(group["master"])
    for param in group["params"]:
        master_part(param.dtype, master)
    card = card_of(group["rule"])
    for key, limit in _LIMITS.items():
        given, several = group.get(key, 0.0), card.settings.get(key, 1) > 1
        if several and not isinstance(given, (tuple, list)):
            raise UsageError(f"{key} must be several numbers, not {given!r}")
        for value in given if several else (given,):
            if value is not None or key not in card.nullable:
                _check_number(key, value, limit)
    for key, kind in (("maximize", bool), ("seed", int)):
        if not isinstance(group[key], kind):
            raise UsageError(f"{key} must be of the type {kind.__name__}, not {group[key]!r}")


def _check_number(key: str, value: Any, limit: float) -> None:
    """Raise UsageError unless ``value``, a number or a tensor of one, lies in [0, limit)."""
    number = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0.0 <= number < limit:
        raise UsageError(f"{key} must be a number in [0, {limit:g}), not {value!r}")
