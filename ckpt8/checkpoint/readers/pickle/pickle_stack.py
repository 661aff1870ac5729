"""The lower part of the inert pickle machine: operands, scalars, the stack, its marks, the memo, the budgets.

The machine checks every announced length against the bytes that are left before it reads, and counts objects before it
builds them. Damage raises ValueError, IndexError or struct.error, to which ``inert_pickle`` adds file and place.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any

from ckpt8.checkpoint.tree import Inert

MAX_PROTOCOL = 5
MAX_MARKS = 10_000
MAX_UNITS = 64_000_000
"""The most objects in one pickle. A container counts as one, an object that a call makes as several."""
FREE_UNITS = 1_000_000
UNITS_PER_STORED_BYTE = 8
"""Beyond the free units a pickle has one for every two of its bytes, but no more than 8 for each byte on the disk."""
COPY_FACTOR = 16
"""All copies of constructors together may be this many times as large as the bytes read."""
COPY_ALLOWANCE = 65_536
MAX_INDEX_DIGITS = 20
MAX_INTEGER_DIGITS = 4300
"""Reading decimal digits takes quadratic time. Python has the same limit, but a setting can switch it off."""
MAX_INTEGER_BYTES = 1785
"""Integers of more bytes have more digits than Python shows; they stay bytes in an ``Inert``."""

_BYTE_ESCAPE = re.compile(rb"\\(x[0-9a-fA-F]{2}|[0-7]{1,3}|.)", re.DOTALL)
_ESCAPED = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}
_u16 = struct.Struct("<H").unpack
_u32 = struct.Struct("<I").unpack
_i32 = struct.Struct("<i").unpack
_u64 = struct.Struct("<Q").unpack
_f64 = struct.Struct(">d").unpack


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if code[:1] == b"x" and len(code) == 3:
        return bytes([int(code[1:], 16)])
    if code[:1].isdigit() and code[:1] < b"8":
        return bytes([int(code, 8) & 0xFF])
    return _ESCAPED.get(code, code if code in (b"\\", b"'", b'"') else match[0])


def _legacy_text(data: bytes) -> str | bytes:
    """A ``str`` of Python 2, which is text or bytes: text if it decodes as UTF-8, else bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data


class StackMachine:
    """The opcodes that read a scalar or move values. ``end`` is the position where the bytes of ``stream`` end.

    ``stack`` holds the values since the last mark, ``marks`` the stacks below it. ``stored`` are the bytes on the disk
    that ``stream`` comes from.
    """

    def __init__(self, stream: io.BufferedIOBase, end: int, stored: int) -> None:
        self.read = stream.read
        self.readline = stream.readline
        self.tell = stream.tell
        self.end = end
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.start = stream.tell()
        self.copied = 0
        self.units = 0
        self._allowed = FREE_UNITS
        self._room = UNITS_PER_STORED_BYTE * stored

    def count(self, units: int = 1) -> None:
        """Count an object before it is made. Raises ValueError for more than the pickle may have."""
        self.units += units
        if self.units > self._allowed:
            self._allowed = min(MAX_UNITS, FREE_UNITS + min((self.tell() - self.start) // 2, self._room))
            if self.units > self._allowed:
                raise ValueError(f"it builds more objects than {self.tell() - self.start} bytes of a checkpoint hold")

    def spend(self, size: int) -> None:
        """Count a copy of ``size`` parts before it is made. Raises ValueError when copies get out of proportion."""
        self.copied += size
        if self.copied > COPY_FACTOR * (self.tell() - self.start) + COPY_ALLOWANCE:
            raise ValueError("it copies the same values over and over")

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= self.end - self.tell():
            raise ValueError(f"{count} bytes are announced, {self.end - self.tell()} are left")
        data = self.read(count)
        if len(data) != count:
            raise ValueError("it ends inside a value")
        return data

    def _line(self) -> bytes:
        text = self.readline()
        if text[-1:] != b"\n":
            raise ValueError("it ends inside a line")
        return text[:-1]

    def _protocol(self) -> None:
        version = self.read(1)[0]
        if version > MAX_PROTOCOL:
            raise ValueError(f"it is of protocol {version}, known are 0 to {MAX_PROTOCOL}")

    def _frame(self) -> None:
        (size,) = _u64(self.read(8))
        if size > self.end - self.tell():
            raise ValueError(f"a frame of {size} bytes is announced, {self.end - self.tell()} are left")

    def _integer_text(self) -> None:
        text = self._line()
        if len(text) > MAX_INTEGER_DIGITS:
            raise ValueError(f"an integer has more than {MAX_INTEGER_DIGITS} digits")
        flag = {b"00": False, b"01": True}.get(text)
        self.stack.append(int(text.removesuffix(b"L")) if flag is None else flag)

    def _long_4(self) -> None:
        (size,) = _i32(self.read(4))
        data = self._take(size)
        small = size <= MAX_INTEGER_BYTES
        self.stack.append(int.from_bytes(data, "little", signed=True) if small else Inert("builtins.int", (data,)))

    def _string_text(self) -> None:
        quoted = self._line().strip()
        if len(quoted) < 2 or quoted[0] != quoted[-1] or quoted[:1] not in (b"'", b'"'):
            raise ValueError("a string is not in quotes")
        self.stack.append(_legacy_text(_BYTE_ESCAPE.sub(_unescape, quoted[1:-1])))

    def _mark(self) -> None:
        if len(self.marks) >= MAX_MARKS:
            raise ValueError(f"more than {MAX_MARKS} marks are open")
        self.marks.append(self.stack)
        self.stack = []

    def _since_mark(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def _pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self._since_mark()

    def _index(self) -> int:
        text = self._line()
        if len(text) > MAX_INDEX_DIGITS:
            raise ValueError("a memo index has too many digits")
        return int(text)

    def _put_text(self) -> None:
        self.memo[self._index()] = self.stack[-1]

    def _put_1(self) -> None:
        self.memo[self.read(1)[0]] = self.stack[-1]

    def _put_4(self) -> None:
        self.memo[_u32(self.read(4))[0]] = self.stack[-1]

    def _memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]


STACK_OPCODES: Mapping[int, Callable[[StackMachine], object]] = {
    ord("N"): lambda machine: machine.stack.append(None),
    0x88: lambda machine: machine.stack.append(True),
    0x89: lambda machine: machine.stack.append(False),
    ord("K"): lambda machine: machine.stack.append(machine.read(1)[0]),
    ord("M"): lambda machine: machine.stack.append(_u16(machine.read(2))[0]),
    ord("J"): lambda machine: machine.stack.append(_i32(machine.read(4))[0]),
    ord("I"): StackMachine._integer_text,
    ord("L"): StackMachine._integer_text,
    0x8A: lambda machine: machine.stack.append(
        int.from_bytes(machine._take(machine.read(1)[0]), "little", signed=True)
    ),
    0x8B: StackMachine._long_4,
    ord("F"): lambda machine: machine.stack.append(float(machine._line())),
    ord("G"): lambda machine: machine.stack.append(_f64(machine.read(8))[0]),
    ord("S"): StackMachine._string_text,
    ord("U"): lambda machine: machine.stack.append(_legacy_text(machine._take(machine.read(1)[0]))),
    ord("T"): lambda machine: machine.stack.append(_legacy_text(machine._take(_i32(machine.read(4))[0]))),
    ord("V"): lambda machine: machine.stack.append(machine._line().decode("raw-unicode-escape")),
    0x8C: lambda machine: machine.stack.append(machine._take(machine.read(1)[0]).decode("utf-8", "surrogatepass")),
    ord("X"): lambda machine: machine.stack.append(
        machine._take(_u32(machine.read(4))[0]).decode("utf-8", "surrogatepass")
    ),
    0x8D: lambda machine: machine.stack.append(
        machine._take(_u64(machine.read(8))[0]).decode("utf-8", "surrogatepass")
    ),
    ord("C"): lambda machine: machine.stack.append(machine._take(machine.read(1)[0])),
    ord("B"): lambda machine: machine.stack.append(machine._take(_u32(machine.read(4))[0])),
    0x8E: lambda machine: machine.stack.append(machine._take(_u64(machine.read(8))[0])),
    0x96: lambda machine: machine.stack.append(bytearray(machine._take(_u64(machine.read(8))[0]))),
    0x80: StackMachine._protocol,
    0x95: StackMachine._frame,
    ord("("): StackMachine._mark,
    ord("0"): StackMachine._pop,
    ord("1"): StackMachine._since_mark,
    ord("2"): lambda machine: machine.stack.append(machine.stack[-1]),
    ord("g"): lambda machine: machine.stack.append(machine.memo[machine._index()]),
    ord("h"): lambda machine: machine.stack.append(machine.memo[machine.read(1)[0]]),
    ord("j"): lambda machine: machine.stack.append(machine.memo[_u32(machine.read(4))[0]]),
    ord("p"): StackMachine._put_text,
    ord("q"): StackMachine._put_1,
    ord("r"): StackMachine._put_4,
    0x94: StackMachine._memoize,
}
"""The opcodes that need no objects, with their actions."""
