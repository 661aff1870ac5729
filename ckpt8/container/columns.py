"""Columns of tables in JSON: one for each field, instead of an object for each record.

A column of a table with ``count`` rows is a list of as many values, ``{"all": value}``, or ``{"from": k}`` for the
integers from k on. One column of every table is always a list: nothing takes memory that the text of the manifest does
not have.

``Fields`` and ``Table`` give typed access to JSON that a file states, for the manifest and other metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown

T = TypeVar("T")
LARGEST = 1 << 62
"""Counts are below it."""


def is_unicode(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON may hold half of a surrogate pair."""
    return text.isascii() or not any("\ud800" <= c <= "\udfff" for c in text)


class Fields:
    """Typed access to one JSON object. Every mismatch is an InputError that names the field.

    ``where`` opens the message: ``file: manifest``.
    """

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, Mapping):
            raise InputError(f"{where} is malformed: expected an object")
        self._value = value
        self._where = where

    def fail(self, key: str, why: str = "") -> InputError:
        """The error about a field; ``why`` says what is wrong where that is not the type of its value."""
        return InputError(f"{self._where} is malformed at {key!r}{why and f': {why}'}")

    def get(self, key: str, kind: type[T]) -> T:
        """A field of that type; an integer is no bool, and a text is valid Unicode. Raises InputError."""
        value = self._value.get(key)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise self.fail(key)
        if isinstance(value, str) and not is_unicode(value):
            raise self.fail(key, f"{shown(value)} is not valid UTF-8")
        return value

    def any(self, key: str) -> Any:
        """A field of any type; None for a missing one."""
        return self._value.get(key)

    def nested(self, value: object, key: str | None = None) -> Fields:
        """The object ``value`` of this file, or the object ``key`` in it. Raises InputError."""
        fields = Fields(value, self._where)
        return fields if key is None else Fields(fields.get(key, dict), self._where)

    def count(self, key: str, below: int = LARGEST) -> int:
        """An integer from 0 to below ``below``. Raises InputError."""
        value = self.get(key, int)
        if not 0 <= value < below:
            raise self.fail(key)
        return value

    def optional(self, key: str, kind: type[T]) -> T | None:
        """A field of type ``kind``, or None where it is null or missing. Raises InputError."""
        return None if self._value.get(key) is None else self.get(key, kind)

    def counts(self, key: str, below: int = LARGEST) -> list[int]:
        """A list of integers from 0 to below ``below``. Raises InputError."""
        values = self.get(key, list)
        if not all(type(value) is int and 0 <= value < below for value in values):
            raise self.fail(key)
        return values

    def values(self, key: str, read: Callable[[Any], T]) -> list[T]:
        """``read`` of every value of a list; none where it is missing. Raises InputError, also where ``read`` fails."""
        try:
            return [read(value) for value in self.optional(key, list) or ()]
        except (TypeError, ValueError) as exc:
            raise self.fail(key) from exc

    def pairs(self, key: str, second_below: int) -> list[list[int]]:
        """A list of pairs of counts, the second below ``second_below``. Raises InputError."""
        values = self.get(key, list)
        for value in values:
            match value:
                case [int(first), int(second)] if 0 <= first < LARGEST and 0 <= second < second_below:
                    continue
            raise self.fail(key)
        return values

    def choice(self, key: str, lookup: Callable[[str], T]) -> T:
        """``lookup`` of a text. Raises InputError, also where ``lookup`` raises KeyError or ValueError."""
        try:
            return lookup(self.get(key, str))
        except (KeyError, ValueError) as exc:
            raise self.fail(key) from exc

    def each(self, key: str, read: Callable[[Fields], T]) -> list[T]:
        """``read`` of every object in a list. Raises InputError."""
        return [read(Fields(value, self._where)) for value in self.get(key, list)]

    def mapping(self, key: str, read: Callable[[Fields], T]) -> dict[str, T]:
        """``read`` of every object in an object, by name. Raises InputError."""
        return {name: read(Fields(value, self._where)) for name, value in self.get(key, dict).items()}


FLAGS = ("conj", "neg")
"""What a tensor may say of its values: they are the conjugate, or the negative, of what is stored."""


def column(values: Sequence[Any]) -> Any:
    """The shortest form of a column."""
    if values and all(value == values[0] for value in values):
        return {"all": values[0]}
    if values and type(values[0]) is int and list(values) == list(range(values[0], values[0] + len(values))):
        return {"from": values[0]}
    return list(values)


def gaps(values: Iterable[int]) -> list[int]:
    """The first of ascending numbers, and the difference of each to the one before."""
    differences, last = [], 0
    for value in values:
        differences.append(value - last)
        last = value
    return differences


class Table:
    """Typed access to the columns of a table, of which ``key`` is a list. Every mismatch is an InputError."""

    def __init__(self, fields: Fields, key: str) -> None:
        self._fields = fields
        self.count = len(fields.get(key, list))

    def each(self, key: str, read: Callable[[Any], T]) -> Sequence[T]:
        """``read`` of every value of a column; it raises KeyError, TypeError or ValueError for one that is wrong."""
        value = self._fields.any(key)
        try:
            match value:
                case list() if len(value) == self.count:
                    return list(map(read, value))
                case {"all": same, **rest} if not rest:
                    return [read(same)] * self.count
                case {"from": int(first), **rest} if not rest and type(first) is int:
                    return [read(first + k) for k in range(self.count)]
        except (KeyError, TypeError, ValueError) as exc:
            raise self._fields.fail(key, str(exc) if isinstance(exc, UnicodeError) else "") from exc
        raise self._fields.fail(key)

    def fail(self, key: str) -> InputError:
        """The error about a column."""
        return self._fields.fail(key)


def below(limit: int) -> Callable[[Any], int]:
    """Reads integers from 0 to below ``limit``."""

    def read(value: Any) -> int:
        if type(value) is not int or not 0 <= value < limit:
            raise ValueError
        return value

    return read


as_count = below(LARGEST)


def as_step(value: Any) -> int:
    """Reads the difference of two counts."""
    return as_count(value) if type(value) is not int or value >= 0 else -as_count(-value)


def as_text(value: Any) -> str:
    """Reads valid Unicode."""
    if not isinstance(value, str):
        raise TypeError
    if not is_unicode(value):
        raise UnicodeError(f"{shown(value)} is not valid UTF-8")
    return value


def or_null(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """A function that reads null as None, and any other value by ``read``."""
    return lambda value: None if value is None else read(value)


def as_counts(value: Any) -> list[int]:
    """Reads a list of counts."""
    return [*map(as_count, _list(value))]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


def as_object(value: Any) -> dict[str, Any]:
    """Reads an object."""
    if not isinstance(value, dict):
        raise TypeError
    return value


def as_dtype(value: Any) -> DType:
    """Reads an element type."""
    return DType.from_label(as_text(value))


def as_flags(value: Any) -> list[str]:
    """Reads the flags of a tensor."""
    if not all(flag in FLAGS for flag in _list(value)):
        raise ValueError
    return value  # type: ignore[no-any-return]
