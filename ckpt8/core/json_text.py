"""Parses JSON of untrusted files: bounds the memory of the values from the text, before it builds any of them.

A text of JSON becomes up to fifty times as large as a tree of Python's objects. ``cost`` is an upper bound of that in
bytes, measured for each kind of value. It only counts a few characters outside of strings.

``Fields`` gives typed access to the values.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from ckpt8.core.errors import InputError, require
from ckpt8.core.text import shown

FREE = 1 << 27
"""The cost that every text may have, however short."""

HEADER_COST = 32
"""The cost that each byte of a safetensors header may add: the shortest entries cost 28."""

MANIFEST_COST = 96
"""The cost that a manifest may have for each byte of its container: see FORMAT.md."""

MAX_DEPTH = 128
"""The deepest nesting; that of real files is ten."""

_BYTE, _BRACKET, _COMMA, _QUOTE, _COLON = 10, 68, 8, 8, 160
_NO_MARKS = bytes(set(range(256)) - set(b'[]{},:"'))
_SQUARE = bytes.maketrans(b"{}", b"[]")


def cost(text: bytes) -> int:
    """The most bytes that the values of a text in UTF-8 take while they are built."""
    return _measured(text)[0]


def check_json(text: bytes, where: str, allowed: int) -> None:
    """Raise InputError for a text in UTF-8 that costs more than is ``allowed``, or is nested too deeply."""
    size, brackets = _measured(text)
    require(size <= allowed, f"{where}: has more values than a checkpoint of its size can have")
    for _ in range(MAX_DEPTH):
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            return  # nothing is left, or the parser finds the error
        brackets = inner
    require(not brackets, f"{where}: its JSON is nested deeper than {MAX_DEPTH}")


def _measured(text: bytes) -> tuple[int, bytes]:
    """The cost, and the brackets outside of strings, all of them square."""
    marks = (re.sub(rb'\\[\\"]', b"", text) if b"\\" in text else text).translate(None, _NO_MARKS)
    quotes = marks.count(b'"')
    marks = re.sub(rb'"[^"]*"', b"", marks.replace(b'""', b""))
    size = _BYTE * len(text) + _COMMA * marks.count(b",") + _COLON * marks.count(b":") + _QUOTE * quotes
    return size + _BRACKET * (marks.count(b"[") + marks.count(b"{")), marks.translate(_SQUARE, b',:"')


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


T = TypeVar("T")
Reader = Callable[[Any], T]
"""Returns the value that a value of JSON stands for. Raises KeyError, TypeError or ValueError for one that is wrong."""

LARGEST = 1 << 62
"""Counts are below it."""


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON may hold half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


def of_type(value: Any, kind: type[T]) -> T:
    """A value of that type; an integer is no bool, and a text is valid Unicode. Raises as a ``Reader``."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise TypeError
    if isinstance(value, str) and not is_unicode(value):
        raise UnicodeError(f"{shown(value)} is not valid UTF-8")
    return value


as_text, as_list, as_object = partial(of_type, kind=str), partial(of_type, kind=list), partial(of_type, kind=dict)


def below(limit: int) -> Reader[int]:
    """Reads integers from 0 to below ``limit``."""

    def read(value: Any) -> int:
        if type(value) is not int or not 0 <= value < limit:
            raise ValueError
        return value

    return read


as_count = below(LARGEST)


def as_counts(value: Any, limit: int = LARGEST) -> list[int]:
    """Reads a list of integers from 0 to below ``limit``."""
    if as_list(value) and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= limit):
        raise ValueError
    return value  # type: ignore[no-any-return]


def or_null(read: Reader[T]) -> Reader[T | None]:
    """Reads null as None, and any other value by ``read``."""
    return lambda value: None if value is None else read(value)


class Fields:
    """Typed access to one JSON object. Every mismatch is an InputError that names the field.

    ``where`` opens the message: ``file: manifest``.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise InputError(f"{where} is malformed: expected an object")
        self._value, self._where = value, where

    def fail(self, key: str, error: Exception | None = None) -> InputError:
        """The error about a field, which says what is wrong with a text that is not valid."""
        why = f": {error}" if isinstance(error, UnicodeError) else ""
        return InputError(f"{self._where} is malformed at {key!r}{why}")

    def require(self, holds: object, key: str) -> None:
        """Raise the error about a field unless ``holds`` is true."""
        if not holds:
            raise self.fail(key)

    def any(self, key: str) -> Any:
        """A field of any type; None for a missing one."""
        return self._value.get(key)

    def read(self, key: str, read: Reader[T]) -> T:
        """``read`` of a field, of null where it is missing. Raises InputError."""
        try:
            return read(self._value.get(key))
        except (KeyError, TypeError, ValueError) as exc:
            raise self.fail(key, exc) from exc

    def record(self, make: Callable[..., T], readers: Mapping[str, Reader[Any]]) -> T:
        """``make`` of the fields that have a reader. Raises InputError."""
        return make(**{key: self.read(key, read) for key, read in readers.items()})

    def nested(self, value: object) -> Fields:
        """The object ``value`` of this file. Raises InputError."""
        return Fields(value, self._where)

    def each(self, key: str) -> list[Fields]:
        """The objects in a list. Raises InputError."""
        return list(map(self.nested, self.read(key, as_list)))
