"""Columns of tables in JSON: one for each field, instead of an object for each record.

A column of a table with ``count`` rows is a list of as many values, ``{"all": value}``, or ``{"from": k}`` for the
integers from k on. One column of every table is always a list: nothing takes memory that the text of the manifest does
not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from ckpt8.container.json_fields import LARGEST, Fields, is_unicode
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown

T = TypeVar("T")
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
    found, last = [], 0
    for value in values:
        found.append(value - last)
        last = value
    return found


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
    """As ``read``, and None for null."""
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
