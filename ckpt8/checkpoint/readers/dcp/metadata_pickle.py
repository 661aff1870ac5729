"""Writes a ``.metadata`` anew: the same values, with other places for the slices.

The writer turns the inert pickle that was read into opcodes again. It imports no class, so this torch need not know
them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt8.checkpoint.readers.dcp.metadata import Metadata, Slice
from ckpt8.checkpoint.tree import Global, Inert
from ckpt8.core.errors import InputError

_HEAD, _STOP = b"\x80\x04", b"."
_SIZE = Global("torch.Size")

_GROWTH, _ALLOWANCE = 16, 1 << 16
"""The writer repeats every text in full: a real pickle grows about threefold."""


@dataclass(frozen=True, slots=True)
class _Code:
    """Opcodes, among values that wait to be written."""

    bytes: bytes


class _Size(tuple[int, ...]):
    """A tuple that is a ``torch.Size`` in the pickle."""

    __slots__ = ()


def rewritten(metadata: Metadata, places: Mapping[Slice, tuple[int, int]], where: str) -> bytes:
    """The pickle with slices at other ``places`` (offset, length) and without their transformations.

    Raises InputError for a value that torch does not put there.
    """
    state = dict(metadata.tree.state)
    storage_data = {}
    for piece, (index, info) in zip(metadata.slices, state["storage_data"].items(), strict=True):
        moved = info
        if piece in places:
            offset, length = places[piece]
            moved = replace(info, state={"relative_path": piece.path, "offset": offset, "length": length})
        storage_data[_sized(index, "offset")] = moved
    state["storage_data"] = storage_data
    state["state_dict_metadata"] = {
        name: _sized_tensor(value) if name in metadata.tensors else value
        for name, value in state["state_dict_metadata"].items()
    }
    return _Writer(where, _GROWTH * metadata.nbytes + _ALLOWANCE).write(replace(metadata.tree, state=state))


def _sized(node: Inert, *keys: str) -> Inert:
    """``node`` with every tuple under ``keys`` as the ``torch.Size`` that it was in the file."""
    sizes = {key: _Size(node.state[key]) for key in keys if node.state.get(key) is not None}
    return replace(node, state=node.state | sizes)


def _sized_tensor(node: Inert) -> Inert:
    sized = _sized(node, "size")
    chunks = [_sized(chunk, "offsets", "sizes") for chunk in node.state["chunks"]]
    return replace(sized, state=sized.state | {"chunks": chunks})


class _Writer:
    """Writes one pickle, without recursion: ``_pending`` are the values to come, the next one last."""

    def __init__(self, where: str, limit: int) -> None:
        self._where = where
        self._limit = limit
        self._out = bytearray(_HEAD)
        self._memo: dict[str, int] = {}
        self._pending: list[Any] = []
        self._kinds: Mapping[type, Callable[[Any], None]] = {
            type(None): lambda _: self._put(b"N"),
            bool: lambda value: self._put(b"\x88" if value else b"\x89"),
            int: self._int,
            float: lambda value: self._put(b"G" + struct.pack(">d", value)),
            str: lambda value: self._put(_counted(b"X", value.encode("utf-8", "surrogatepass"))),
            bytes: lambda value: self._put(_counted(b"B", value)),
            tuple: lambda value: self._later(_Code(b"("), *value, _Code(b"t")),
            list: lambda value: self._later(_Code(b"]("), *value, _Code(b"e")),
            dict: lambda value: self._later(
                _Code(b"}("), *(part for pair in value.items() for part in pair), _Code(b"u")
            ),
            _Size: lambda value: self._later(_SIZE, tuple(value), _Code(b"\x85R")),
            _Code: lambda value: self._put(value.bytes),
            Global: self._global,
            Inert: self._object,
        }

    def write(self, value: Any) -> bytes:
        """The pickle of one value. Raises InputError."""
        self._pending.append(value)
        while self._pending:
            item = self._pending.pop()
            if len(self._out) > self._limit:
                raise InputError(f"{self._where}: repeats the same values over and over")
            kind = self._kinds.get(type(item))
            if kind is None:
                raise InputError(f"{self._where}: holds a {type(item).__name__}, which cannot be written back")
            kind(item)
        return bytes(self._out + _STOP)

    def _put(self, code: bytes) -> None:
        self._out += code

    def _later(self, *items: Any) -> None:
        self._pending += reversed(items)

    def _int(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self._put(b"J" + struct.pack("<i", value))
        else:
            content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            self._put(_counted(b"\x8b", content))

    def _global(self, value: Global) -> None:
        known = self._memo.get(value.name)
        if known is not None:
            self._put(b"j" + struct.pack("<I", known))
            return
        self._memo[value.name] = len(self._memo)
        module, _, name = value.name.rpartition(".")
        self._put(f"c{module}\n{name}\n".encode() + b"r" + struct.pack("<I", self._memo[value.name]))

    def _object(self, value: Inert) -> None:
        """An object without a state comes from a call, one with a state from ``__new__`` and BUILD."""
        made = (_Code(b"R"),) if value.state is None else (_Code(b"\x81"), value.state, _Code(b"b"))
        self._later(Global(value.name), value.args, *made)


def _counted(code: bytes, content: bytes) -> bytes:
    return code + struct.pack("<I", len(content)) + content
