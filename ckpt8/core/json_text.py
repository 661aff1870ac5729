"""Parses JSON of untrusted files: bounds the memory of the values from the text, before it builds any of them.

A text of JSON becomes up to fifty times as large as a tree of Python's objects. ``cost`` is an upper bound of that in
bytes, measured for each kind of value. It only counts a few characters outside of strings.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

from ckpt8.core.errors import InputError

FREE = 1 << 27
"""The cost that every text may have, however short."""

HEADER_COST = 32
"""The cost that each byte of a safetensors header may add: the shortest entries cost 28."""

MANIFEST_COST = 96
"""The cost that a manifest may have for each byte of its container: see FORMAT.md."""

MAX_DEPTH = 128
"""The deepest nesting; that of real files is ten."""

_BYTE, _BRACKET, _COMMA, _QUOTE, _COLON = 10, 68, 8, 8, 160
_ESCAPED = re.compile(rb'\\[\\"]')
_STRING = re.compile(rb'"[^"]*"')
_NO_MARKS = bytes(set(range(256)) - set(b'[]{},:"'))
_NO_BRACKETS = b',:"'
_SQUARE = bytes.maketrans(b"{}", b"[]")


def cost(text: bytes) -> int:
    """The most bytes that the values of a text in UTF-8 take while they are built."""
    return _measured(text)[0]


def check_json(text: bytes, where: str, allowed: int) -> None:
    """Raise InputError for a text in UTF-8 that costs more than is ``allowed``, or is nested too deeply."""
    size, brackets = _measured(text)
    if size > allowed:
        raise InputError(f"{where}: has more values than a checkpoint of its size can have")
    for _ in range(MAX_DEPTH):
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            return  # nothing is left, or the parser finds the error
        brackets = inner
    if brackets:
        raise InputError(f"{where}: its JSON is nested deeper than {MAX_DEPTH}")


def _measured(text: bytes) -> tuple[int, bytes]:
    """The cost, and the brackets outside of strings, all of them square."""
    marks = (_ESCAPED.sub(b"", text) if b"\\" in text else text).translate(None, _NO_MARKS)
    quotes = marks.count(b'"')
    marks = _STRING.sub(b"", marks.replace(b'""', b""))
    opening = marks.count(b"[") + marks.count(b"{")
    size = _BYTE * len(text) + _BRACKET * opening + _COMMA * marks.count(b",") + _COLON * marks.count(b":")
    return size + _QUOTE * quotes, marks.translate(_SQUARE, _NO_BRACKETS)


def parse_json(text: bytes, where: str, allowed: int | None = None) -> Any:
    """Strict JSON: UTF-8, no duplicate keys, no NaN. Raises InputError, also as ``check_json``.

    By default the text may cost as much as a header.
    """
    check_json(text, where, FREE + HEADER_COST * len(text) if allowed is None else allowed)
    try:
        return json.loads(
            text.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constants, parse_float=_finite
        )
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{where}: is not valid JSON: {exc}") from exc


def parse_any_json(text: bytes | bytearray, where: str) -> Any:
    """JSON as Python accepts it, since other programs write NaN too. Raises InputError, also as ``check_json``."""
    try:
        content = text.decode(json.detect_encoding(text))
        plain = content.encode()
        check_json(plain, where, FREE + HEADER_COST * len(plain))
        return json.loads(content)
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{where}: is not valid JSON: {exc}") from exc


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise ValueError("a key occurs twice")
    return unique


def _no_constants(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value
