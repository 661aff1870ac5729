"""Codecs of a parameter group: what a user may write, and what is stored."""

from __future__ import annotations

import math
from typing import Any

from ckpt8.codecs import Codec, codec_from_config, config_of, parse_codec
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.split24 import Split24
from ckpt8.codecs.split32 import Split32
from ckpt8.errors import UsageError
from ckpt8.optim.masters import master_part

MOMENT2 = "companded8(signed=False, Q=255, p=0.5)"
"""The second moments of a run from scratch, chosen by the measurements in ``rounding``."""


def unpacked() -> Codec:
    """The codec that stands for a moment in fp32."""
    return Lossless()


def as_codec(given: Any) -> Codec:
    """A codec from text, as in ``companded8(Q=31)``, or from its stored configuration. Raises UsageError."""
    if not isinstance(given, str):
        return codec_from_config(given)
    cls, fields = parse_codec(given)
    codec: Codec = cls(**fields)
    return codec


def _fits(key: str, codec: Codec) -> bool:
    if key == "master":
        return isinstance(codec, (Split24, Split32))
    if isinstance(codec, Companded8):
        return codec.signed == (key == "moment1")
    return isinstance(codec, Lossless)


def check_group(group: dict[str, Any]) -> None:
    """Replace the codecs of a group by their configurations. Raises UsageError for what cannot be trained."""
    for key in ("master", "moment1", "moment2"):
        codec = as_codec(group[key])
        if not _fits(key, codec):
            raise UsageError(f"{key}={group[key]!r}: this codec does not hold {key}")
        group[key] = config_of(codec)
    master = codec_from_config(group["master"])
    for param in group["params"]:
        master_part(param.dtype, master)
    for key in ("lr", "weight_decay", "momentum"):
        value = float(group.get(key, 0.0))
        if not 0.0 <= value < math.inf:
            raise UsageError(f"{key} must be a number of at least 0, not {value!r}")
    if not all(0.0 <= float(beta) < 1.0 for beta in group.get("betas", ())):
        raise UsageError(f"betas must lie in [0, 1), not {group['betas']!r}")
