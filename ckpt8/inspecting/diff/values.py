"""Values that are not tensors: which nodes are values, when two are equal, and how reports show one."""

from __future__ import annotations

from typing import Any

from ckpt8.checkpoint.tree import Global, Inert, StatefulDict, StorageRef, TensorRef
from ckpt8.core.text import printable

_SCALARS = frozenset({str, int, float, bool, type(None), bytes, bytearray, complex, Global})
_SEQUENCES = (list, tuple)
_SETS = frozenset({"builtins.set", "builtins.frozenset"})
_DICTIONARIES = (dict, StatefulDict)
_LONGEST = 60
_FEW = 8
_MOST_BITS = 1024
"""Longer integers are shown by their length: Python does not print thousands of digits."""


class Leaves:
    """Tells which nodes of a tree are values: scalars, lists, tuples and sets of scalars, and empty containers."""

    def __init__(self) -> None:
        # A tree may hold one list a million times; each list is checked once.
        self._flat: dict[int, bool] = {}

    def __call__(self, value: Any) -> bool:
        """Whether ``value`` is one value."""
        kind = type(value)
        if kind in _SEQUENCES:
            return self._is_flat(value)
        if kind is Inert:
            return value.name in _SETS and not value.args and value.state is None and self._is_flat(value.items)
        if kind in _DICTIONARIES:
            return not value and getattr(value, "state", None) is None
        return kind not in (TensorRef, StorageRef)

    def _is_flat(self, values: Any) -> bool:
        known = self._flat.get(id(values))
        if known is None:
            known = self._flat[id(values)] = all(type(each) in _SCALARS for each in values)
        return known


class Equality:
    """Tells whether two values are the same: of one type, NaN like any other number, sets in any order."""

    def __init__(self) -> None:
        # As in Leaves: two trees may hold the same two lists a million times.
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, a: Any, b: Any) -> bool:
        """Whether ``a`` and ``b`` are the same."""
        if type(a) is not type(b):
            return _is_empty_dictionary(a) and _is_empty_dictionary(b)
        if type(a) not in (*_SEQUENCES, Inert):
            return _mark(a) == _mark(b)
        pair = id(a), id(b)
        if pair not in self._known:
            if type(a) is Inert:
                same = a.name == b.name and sorted(map(_mark, a.items)) == sorted(map(_mark, b.items))
            else:
                same = len(a) == len(b) and all(_mark(x) == _mark(y) for x, y in zip(a, b, strict=True))
            self._known[pair] = same
        return self._known[pair]


def _is_empty_dictionary(value: Any) -> bool:
    return type(value) in _DICTIONARIES and not value


def _mark(value: Any) -> tuple[str, Any]:
    """A key that is equal for equal scalars and can be sorted."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, value.hex()
    if isinstance(value, complex):
        return kind, (value.real.hex(), value.imag.hex())
    if isinstance(value, Global):
        return kind, value.name
    return kind, 0 if value is None or _is_empty_dictionary(value) else value


def text(value: Any) -> str:
    """One printable line of bounded length."""
    kind = type(value)
    if kind is Inert:
        return _sequence(value.items, "{", "}")
    if kind in _SEQUENCES:
        return _sequence(value, *("[]" if kind is list else "()"))
    if kind in _SCALARS:
        return _scalar(value)
    return "{}" if kind in _DICTIONARIES else f"<{kind.__name__}>"


def _sequence(values: Any, first: str, last: str) -> str:
    shown = ", ".join(_scalar(value) for value in values[:_FEW])
    if len(values) > _FEW:
        return f"{first}{_cut(shown[:_LONGEST])}, … {len(values):,} in all{last}"
    return f"{first}{_cut(shown)}{last}"


def _scalar(value: Any) -> str:
    if isinstance(value, Global):
        return _cut(value.name)
    if isinstance(value, (bytes, bytearray)) and len(value) > _FEW:
        return f"{len(value):,} bytes"
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return f"a number of {value.bit_length():,} bits"
    return _cut(repr(value[: 2 * _LONGEST] if isinstance(value, str) else value))


def _cut(line: str) -> str:
    line = printable(line)
    return line if len(line) <= _LONGEST else line[:_LONGEST] + "…"
