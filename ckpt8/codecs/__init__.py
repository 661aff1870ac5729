"""Codecs turn a tensor into named parts and back, and say what error they make. Imports core only.

To add a codec, say ``half/1``, which would store fp32 as fp16:

1. Write its package, ``codecs/half/``; ``companded8`` is an example. ``__init__.py`` imports no torch. It has a
   frozen dataclass that derives from ``base.Codec``, with ``id``, ``accepts`` and ``layout``; its fields, if any, are
   what a file stores. ``reference.py`` has ``encode(x, parts)``, which fills the parts, and ``decode(parts, out)``,
   which fills ``out``, in plain torch: both get flat tiles. The other facts in ``base.Codec`` have defaults that fit
   most codecs.

   * Let ``accepts`` take ``Role.OTHER`` too, the role of tensors that ckpt8 does not recognise but a rule names.
   * Parts are integers: int8, uint8, int16 or uint16. int32 is for symbols, which ``container/symbols.py`` packs.
     Bits of a float are stored as those of an integer: ``half.view(torch.int16)``.
   * A lossy codec sets ``measured_as``, without which its error is not measured: "moment" for moments, "weight" for
     weights, and "lattice" for weights in even steps. Let ``accepts`` take only roles that fit.
   * For values that it cannot keep, NaN and Inf among them, ``encode`` raises RefusedError("holds NaN or ..."). The
     tensor then takes the next codec, at last lossless, and the other moments of its parameter do too. The report
     shows the text.

2. Add its line to ``CODECS``. ``--rule '*.exp_avg=half'`` uses it now: a rule has the name without the number. It is
   imported when it is first needed. A preset uses it if ``compressing/policy.py`` says so.
   ``tests/codecs/test_conformance.py`` tests it against the contract. If it has fields, add values that it does not
   take to ``UNKNOWN`` there. Its own tests stand in ``tests/codecs/test_half.py``.
3. Files with it need a new minor version of the format: a constant in ``container/header.py``, and a line at the top
   of ``needs`` in ``Manifest.version``, such as ``HALF_VERSION: "half/1" in ids``. That counts storages in packs and
   deltas.
4. Describe it in ``container/FORMAT.md``: title and versions on top, the table under Codecs, and a section that says
   how to decode. Add the version to ``guide/changelog.md`` and the name to Rules in ``guide/formats.md``. Search the
   tests for the last version, as some list all.
5. Add it to ``container/plain_reader.py``, which reads a container with numpy alone: a decoder, its line in ``CODECS``
   there, and in ``layout_of`` what that line cannot say. Until then ``tests/container/test_plain_reader.py`` fails. Add
   its fields and its version to ``tests/kits/strict_reader.py``.
6. Add a source of a few KB and its presets to ``sources`` of ``fixtures/golden/make_golden.py``, and its rules to
   ``RULES`` there. It writes the file. ``tests/whole/test_golden.py`` lists the codecs and versions, and
   limits all files to 1.85 MB; ``tests/container/test_format.py`` reads each with the plain reader. The case ``runs``
   of ``tests/whole/test_behaviour.py`` changes with a new file: that module says how to record it.
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
"""(id, "module:Class") of every codec that rules name by its id without the number."""

BUDGETED: tuple[tuple[str, str], ...] = (
    ("lattice/1", "ckpt8.codecs.lattice:Lattice"),
    ("lattice/2", "ckpt8.codecs.lattice:MomentLattice"),
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

RULED: Mapping[str, str] = {**{codec_id.partition("/")[0]: codec_id for codec_id, _ in CODECS}, "lattice2": "lattice/2"}
"""The id of each codec that a rule may name, by the name that it has there."""

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
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\)\s*)?", text)
    if match is None or match[1] not in RULED:
        raise UsageError(f"codec {text!r}: expected one of {', '.join(RULED)}, with parameters as in companded8(Q=31)")
    cls = codec_class(RULED[match[1]])
    known = {field.name for field in fields(cls)}
    given: dict[str, Any] = {}
    for item in (match[2] or "").split(",") if (match[2] or "").strip() else ():
        key, equals, value = (piece.strip() for piece in item.partition("="))
        if not equals or key not in known or key in given:
            raise UsageError(f"codec {text!r}: parameters must read {match[1]}(key=value, ...)")
        given[key] = _parse_value(value, text)
    if RULED[match[1]] in dict(BUDGETED) and "k" not in given:
        raise UsageError(f"codec {text!r}: give k, which makes the step 2^(k/4), as in {match[1]}(k=-60)")
    return cls, given


def _parse_value(value: str, text: str) -> bool | int | float:
    """Read a parameter: True, False or a number."""
    words = {"True": True, "False": False}
    try:
        return words[value] if value in words else int(value) if value.removeprefix("-").isdigit() else float(value)
    except ValueError as exc:
        raise UsageError(f"codec {text!r}: {value!r} is not a number, True or False") from exc
