"""Codecs turn a tensor into named parts and back, and say what error they make. Imports core only.

To add a codec:

1. Write its package: in ``__init__.py`` a frozen dataclass that derives from ``base.Codec``, with ``id``, ``accepts``
   and ``layout``, which imports no torch; and ``reference.py`` with ``encode(x, parts)`` and ``decode(parts, out)``
   in plain torch. A value that it cannot keep, such as NaN or one out of range, raises RefusedError: the tensor then
   takes the next codec. A lossy codec sets ``measured_as``, without which its error is not measured; ``base.Codec``
   lists the other facts. Parts are integers; int32 is for symbols, which ``container/symbols.py`` packs.
2. Add its line to ``CODECS``. The class is imported when it is first needed, and ``--rule GLOB=NAME`` uses it. A preset
   does if ``compressing/policy.py`` says so.
3. Describe its bytes in a section of ``container/FORMAT.md``. Files with it need a new minor version: see
   ``Manifest.version`` and the constants of ``container/header.py``.
4. Let ``fixtures/golden/make_golden.py`` write a file with it.

``tests/codecs/test_conformance.py`` then tests the codec against the contract.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any, cast

from ckpt8.codecs.base import Codec, config_of
from ckpt8.core.errors import UnsupportedError, UsageError
from ckpt8.core.public import resolve

CODECS: tuple[tuple[str, str], ...] = (
    ("lossless/1", "ckpt8.codecs.lossless:Lossless"),
    ("split24/1", "ckpt8.codecs.split24:Split24"),
    ("split32/1", "ckpt8.codecs.split24:Split32"),
    ("companded8/1", "ckpt8.codecs.companded8:Companded8"),
)
"""(id, "module:Class") of every codec that a rule may name."""

BUDGETED: tuple[tuple[str, str], ...] = (
    ("lattice/1", "ckpt8.codecs.lattice:Lattice"),
    ("rclog/1", "ckpt8.codecs.rclog:RowColumnLog"),
    ("vscaled/1", "ckpt8.codecs.vscaled:VScaled"),
)
"""(id, "module:Class") of every codec whose fields the compressor computes from a budget."""

RELATIONS: tuple[tuple[str, str], ...] = (
    ("reference/1", "ckpt8.codecs.rounded_copy:Reference"),
    ("reference16/1", "ckpt8.codecs.rounded_copy:HalfReference"),
    ("reference/2", "ckpt8.codecs.rounded_copy:LatticeReference"),
)
"""(id, "module:Class") of every codec that only the compressor chooses: copies of other storages."""

_SHOWN = 200

__all__ = ["BUDGETED", "CODECS", "RELATIONS", "Codec", "codec_class", "codec_from_config", "config_of", "parse_codec"]


@lru_cache
def codec_class(codec_id: str) -> type[Any]:
    """The class of a codec id. Raises KeyError."""
    return cast("type[Any]", resolve(dict((*CODECS, *BUDGETED, *RELATIONS))[codec_id]))


def codec_from_config(config: Mapping[str, Any]) -> Codec:
    """The codec that a stored configuration names. Raises UnsupportedError for one this version does not have."""
    given = {key: value for key, value in config.items() if key != "id"}
    try:
        return cast("Codec", codec_class(config["id"])(**given))
    except (KeyError, TypeError, UsageError) as exc:
        shown = str(dict(config))[:_SHOWN]
        raise UnsupportedError(f"codec {shown} is not known to this version of ckpt8") from exc


def parse_codec(text: str) -> tuple[type[Any], dict[str, Any]]:
    """Read ``name`` or ``name(key=value, ...)`` into a codec class and its given fields. Raises UsageError."""
    names = {codec_id.partition("/")[0]: codec_id for codec_id, _ in CODECS}
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\)\s*)?", text)
    if match is None or match[1] not in names:
        raise UsageError(f"codec {text!r}: expected one of {', '.join(names)}, with parameters as in companded8(Q=31)")
    cls = codec_class(names[match[1]])
    known = {field.name for field in fields(cls)}
    given: dict[str, Any] = {}
    for item in (match[2] or "").split(",") if (match[2] or "").strip() else ():
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or key not in known or key in given:
            raise UsageError(f"codec {text!r}: parameters must read {match[1]}(key=value, ...)")
        given[key] = _parse_value(value, text)
    return cls, given


def _parse_value(value: str, text: str) -> bool | int | float:
    """Read a parameter: True, False or a number."""
    words = {"True": True, "False": False}
    try:
        return words[value] if value in words else int(value) if value.isdigit() else float(value)
    except ValueError as exc:
        raise UsageError(f"codec {text!r}: {value!r} is not a number, True or False") from exc
