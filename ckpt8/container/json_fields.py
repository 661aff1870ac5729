"""Typed access to JSON that a file states, for the manifest and other metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ckpt8.core.errors import InputError
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
        """As ``get``; None for a field that is null or missing."""
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
