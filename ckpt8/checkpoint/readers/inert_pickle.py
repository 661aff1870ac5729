"""A pickle machine that executes nothing: it returns plain values, ``Inert`` nodes and tensor references.

A pickle is a program for a stack machine. Python's machine imports names and calls them; this one has no code
that could do either. A name becomes a ``Global``, a call becomes an ``Inert`` that keeps its arguments, and the
machine understands only the constructors of ``rebuild.py``. The memory and time that a stream of n bytes can take
are proportional to n: the machine checks every announced length against the bytes that are left before it reads, counts
objects before it builds them, and has a budget for copies. Nothing here recurses, so only the walk that follows limits
the nesting. Damage raises ValueError, IndexError or struct.error, to which ``run`` adds file and place.

``StorageTable`` has the storages that the pickle of a torch file names, in the zip format and in the legacy one.
"""

from __future__ import annotations

import io
import re
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ckpt8.checkpoint.readers.rebuild import CONSTRUCTORS, NOT_INTERPRETED, dict_key, is_count, is_plain, set_entry
from ckpt8.checkpoint.readers.torch_rules import TorchCalls
from ckpt8.checkpoint.tree import Global, Inert, StatefulDict, StorageRef, TensorRef
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import SourceFile
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown

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

MAX_GLOBALS = 65_536
MAX_NAME_CHARACTERS = 1024
CALL_UNITS = 2
"""An object that a call makes takes as much memory as that many containers."""

_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names of Python 2, used by protocols 0 to 2
_DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError, struct.error)

PersistentLoad = Callable[[Any], Any]


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


def load_pickle(
    stream: io.BufferedIOBase,
    end: int,
    label: str,
    persistent_load: PersistentLoad | None = None,
    *,
    names: set[str] | None = None,
    stored: int | None = None,
    calls: TorchCalls | None = None,
) -> Any:
    """The value of one pickle, read from ``stream`` up to its last byte. Sets become ``Inert`` nodes with ``items``.

    ``end`` is the position, as ``stream.tell()`` counts, at which the bytes of the stream end. ``label`` opens every
    message. ``persistent_load`` turns a persistent id into a value or raises InputError; without it such an id is an
    error. ``names`` receives the dotted names of all classes and functions in the pickle. ``stored`` are the bytes on
    the disk, if the stream has more. ``calls`` judges what torch would do. Raises InputError for damage.
    """
    machine = Machine(stream, end, label, persistent_load, end if stored is None else stored, calls)
    value = machine.run()
    if names is not None:
        names.update(known.name for known in machine.globals.values())
    return value


def _reason(exc: BaseException) -> str:
    if isinstance(exc, KeyError):
        return "it refers to a memo entry that does not exist"
    if isinstance(exc, (IndexError, struct.error)):
        return "it ends too early or an operand is missing"
    return (str(exc).splitlines() or [type(exc).__name__])[0][:200]


class Machine:
    """One run over a ``stream``, whose bytes end at the position ``end``. The arguments are those of ``load_pickle``.

    ``stack`` holds the values since the last mark, ``marks`` the stacks below it.
    """

    def __init__(
        self,
        stream: io.BufferedIOBase,
        end: int,
        label: str,
        persistent_load: PersistentLoad | None,
        stored: int,
        calls: TorchCalls | None,
    ) -> None:
        self.read, self.readline, self.tell = stream.read, stream.readline, stream.tell
        self.end = end
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.start = stream.tell()
        self.copied = self.units = 0
        self._allowed = FREE_UNITS
        self._room = UNITS_PER_STORED_BYTE * stored
        self.label, self.persistent_load, self.calls = label, persistent_load, calls
        self.globals: dict[tuple[str, str], Global] = {}

    def run(self) -> Any:
        """Read up to STOP and return the value. Raises InputError."""
        table, read, stop = _TABLE, self.read, ord(".")
        try:
            while (code := read(1)[0]) != stop:
                table[code](self)
        except _DAMAGE as exc:
            # Any wrong byte leads to one of these errors; only the place is missing in them.
            raise InputError(f"{self.label}: damaged pickle near byte {self.tell()}: {_reason(exc)}") from exc
        if len(self.stack) != 1 or self.marks or self.tell() > self.end:
            raise InputError(f"{self.label}: damaged pickle: it ends at byte {self.tell()} with values left over")
        return self.stack[0]

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
        data = self._take(_i32(self.read(4))[0])
        is_small = len(data) <= MAX_INTEGER_BYTES
        self.stack.append(int.from_bytes(data, "little", signed=True) if is_small else Inert("builtins.int", (data,)))

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

    def _put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def _unknown(self) -> NoReturn:
        raise ValueError("the opcode there is not one that checkpoints use")

    def _push(self, value: Any) -> None:
        self.stack.append(value)

    def _push_new(self, value: Any) -> None:
        self.count()
        self.stack.append(value)

    def _extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is list:
            target.extend(items)
        elif type(target) is Inert:
            if self.calls is not None:
                self.calls.fill(target)
            target.items.extend(items)
        else:
            raise ValueError(f"items are added to a {type(target).__name__}")

    def _dict(self) -> None:
        items = self._since_mark()
        self._push_new({})
        self._update(items)

    def _update(self, items: list[Any]) -> None:
        if len(items) % 2:
            raise ValueError("a dictionary key has no value")
        target = self.stack[-1]
        pairs = zip(items[::2], items[1::2], strict=True)
        if type(target) is dict or type(target) is StatefulDict:
            for key, value in pairs:
                set_entry(target, key, value)
        elif type(target) is Inert:
            if self.calls is not None:
                self.calls.fill(target)
            target.pairs.extend((dict_key(key), value) for key, value in pairs)
        else:
            raise ValueError(f"keys are set on a {type(target).__name__}")

    def _named(self, module: Any, name: Any) -> Global:
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name is not text")
        known = self.globals.get((module, name))
        if known is None:
            if max(len(module), len(name)) > MAX_NAME_CHARACTERS or len(self.globals) >= MAX_GLOBALS:
                raise ValueError("names are too long or too many")
            known = Global(f"{_MODULES.get(module, module)}.{name}")
            self.globals[module, name] = known
            if self.calls is not None:
                self.calls.name(known.name)
        return known

    def _global_text(self) -> Global:
        return self._named(self._line().decode("utf-8"), self._line().decode("utf-8"))

    def _construct(self, function: Any, args: Any) -> Any:
        self.count(CALL_UNITS)
        if type(args) is not tuple:
            raise ValueError("a call has no argument tuple")
        constructor = CONSTRUCTORS.get(function.name) if type(function) is Global else None
        made = NOT_INTERPRETED if constructor is None else constructor(args, self.spend)
        if self.calls is not None:
            made = self.calls.call(function, args, made, self)
        if made is not NOT_INTERPRETED:
            return made
        # A callable may itself be the result of a call, for instance of getattr.
        return Inert(function.name, args=args) if type(function) is Global else Inert("<call>", args=(function, args))

    def _new_object_keywords(self) -> None:
        keywords = self.stack.pop()
        made = self._construct(self.stack.pop(-2), self.stack.pop())
        self.stack.append(Inert("<call>", args=(made, keywords)) if keywords else made)

    def _object(self) -> None:
        function, *args = self._since_mark()
        self.stack.append(self._construct(function, tuple(args)))

    def _build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if self.calls is not None:
            self.calls.build(target, state, self)
        if type(target) is Inert or type(target) is StatefulDict:
            target.state = state if target.state is None else (target.state, state)
        elif type(target) is not TensorRef or not is_plain(state):
            # A Variable of torch 0.3 carries only flags; anything else could hide a tensor in an attribute.
            raise ValueError(f"a state is given to a {type(target).__name__}")

    def _persistent(self, pid: Any) -> Any:
        if self.persistent_load is None:
            raise ValueError("it refers to data outside the pickle")
        stored = self.persistent_load(pid)
        if self.calls is not None:
            self.calls.storage(pid, stored)
        return stored


# Extension codes (EXT1, EXT2, EXT4) and out-of-band buffers name things outside the file: they stay unknown.
_OPCODES: Mapping[int, Callable[[Machine], object]] = {
    ord("N"): lambda machine: machine.stack.append(None),
    0x88: lambda machine: machine.stack.append(True),
    0x89: lambda machine: machine.stack.append(False),
    ord("K"): lambda machine: machine.stack.append(machine.read(1)[0]),
    ord("M"): lambda machine: machine.stack.append(_u16(machine.read(2))[0]),
    ord("J"): lambda machine: machine.stack.append(_i32(machine.read(4))[0]),
    ord("I"): Machine._integer_text,
    ord("L"): Machine._integer_text,
    0x8A: lambda machine: machine.stack.append(
        int.from_bytes(machine._take(machine.read(1)[0]), "little", signed=True)
    ),
    0x8B: Machine._long_4,
    ord("F"): lambda machine: machine.stack.append(float(machine._line())),
    ord("G"): lambda machine: machine.stack.append(_f64(machine.read(8))[0]),
    ord("S"): Machine._string_text,
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
    0x80: Machine._protocol,
    0x95: Machine._frame,
    ord("("): Machine._mark,
    ord("0"): Machine._pop,
    ord("1"): Machine._since_mark,
    ord("2"): lambda machine: machine.stack.append(machine.stack[-1]),
    ord("g"): lambda machine: machine.stack.append(machine.memo[machine._index()]),
    ord("h"): lambda machine: machine.stack.append(machine.memo[machine.read(1)[0]]),
    ord("j"): lambda machine: machine.stack.append(machine.memo[_u32(machine.read(4))[0]]),
    ord("p"): lambda machine: machine._put(machine._index()),
    ord("q"): lambda machine: machine._put(machine.read(1)[0]),
    ord("r"): lambda machine: machine._put(_u32(machine.read(4))[0]),
    0x94: lambda machine: machine._put(len(machine.memo)),
    ord(")"): lambda machine: machine.stack.append(()),
    ord("t"): lambda machine: machine._push_new(tuple(machine._since_mark())),
    0x85: lambda machine: machine._push_new((machine.stack.pop(),)),
    0x86: lambda machine: machine._push_new((machine.stack.pop(-2), machine.stack.pop())),
    0x87: lambda machine: machine._push_new((machine.stack.pop(-3), machine.stack.pop(-2), machine.stack.pop())),
    ord("]"): lambda machine: machine._push_new([]),
    ord("l"): lambda machine: machine._push_new(machine._since_mark()),
    ord("a"): lambda machine: machine._extend([machine.stack.pop()]),
    ord("e"): lambda machine: machine._extend(machine._since_mark()),
    ord("}"): lambda machine: machine._push_new({}),
    ord("d"): Machine._dict,
    ord("s"): lambda machine: machine._update([machine.stack.pop(-2), machine.stack.pop()]),
    ord("u"): lambda machine: machine._update(machine._since_mark()),
    0x8F: lambda machine: machine._push_new(Inert("builtins.set")),
    0x90: lambda machine: machine._extend(machine._since_mark()),
    0x91: lambda machine: machine._push_new(Inert("builtins.frozenset", items=machine._since_mark())),
    ord("c"): lambda machine: machine.stack.append(machine._global_text()),
    0x93: lambda machine: machine._push(machine._named(machine.stack.pop(-2), machine.stack.pop())),
    **dict.fromkeys(
        (ord("R"), 0x81),
        lambda machine: machine._push(machine._construct(machine.stack.pop(-2), machine.stack.pop())),
    ),
    0x92: Machine._new_object_keywords,
    ord("o"): Machine._object,
    ord("i"): lambda machine: machine._push(machine._construct(machine._global_text(), tuple(machine._since_mark()))),
    ord("b"): Machine._build,
    ord("P"): lambda machine: machine.stack.append(machine._persistent(machine._line().decode("ascii"))),
    ord("Q"): lambda machine: machine._push(machine._persistent(machine.stack.pop())),
}
_TABLE = tuple(_OPCODES.get(code, Machine._unknown) for code in range(256))


MAX_PICKLE_BYTES = 512 * 2**20
_FREE_PICKLE_BYTES = 16 * 2**20
_PICKLE_RATIO = 64
"""A pickle in a container may be 64 times as long as the container, plus 16 MiB. Real ones stay below 20 times."""


def longest_pickle(file: SourceFile) -> int:
    """The most bytes that the pickle of a checkpoint may have, by the bytes that the file takes on the disk."""
    return min(MAX_PICKLE_BYTES, _FREE_PICKLE_BYTES + _PICKLE_RATIO * file.stored)


class StorageTable:
    """Collects the storages that a pickle names. ``load`` is the ``persistent_load`` of the pickle machine.

    ``declared`` maps each key to the forms under which the pickle names it, (dtype, element count), in their order.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.declared: dict[str, dict[tuple[DType, int], None]] = {}

    def load(self, pid: Any) -> StorageRef | Global:
        """Resolve a persistent id. Raises InputError for anything but a storage or an old module class."""
        is_id = type(pid) is tuple and len(pid) in (4, 5, 6)
        if is_id and pid[0] == "module" and len(pid) == 4 and type(pid[1]) is Global:
            # Before 1.6 a pickled module carried its source text with its class.
            return pid[1]
        if not is_id or pid[0] != "storage" or len(pid) == 4:
            raise InputError(f"{self.label}: damaged pickle: a persistent id is not that of a storage")
        _, kind, key, location, numel = pid[:5]
        if type(kind) is not Global or type(key) is not str or type(location) is not str:
            raise InputError(f"{self.label}: damaged pickle: a storage has no type, key or location")
        if not is_count(numel):
            raise InputError(f"{self.label}: damaged pickle: storage {shown(key)} has no valid element count")
        dtype = self._dtype(kind.name)
        self.declared.setdefault(key, {})[dtype, numel] = None
        if len(pid) == 5 or pid[5] is None:
            return StorageRef(key, dtype, numel)
        # Old files have views of a storage: (key of the view, offset, length), in elements of the storage.
        if type(pid[5]) is not tuple or len(pid[5]) != 3:
            raise InputError(f"{self.label}: damaged pickle: storage {shown(key)} has malformed view metadata")
        name, offset, length = pid[5]
        if type(name) is not str or not is_count(offset) or not is_count(length) or offset + length > numel:
            raise InputError(f"{self.label}: damaged pickle: a view reaches outside storage {shown(key)}")
        return StorageRef(key, dtype, length, offset)

    def _dtype(self, kind: str) -> DType:
        """The element type of a storage class of any module (``torch.cuda.FloatStorage``). Raises UnsupportedError."""
        name = kind.rpartition(".")[2]
        try:
            return DType.UINT8 if name == "UntypedStorage" else DType.from_storage_class(name)
        except KeyError:
            raise UnsupportedError(
                f"{self.label}: storage type {shown(kind)} is not known to this version of ckpt8"
            ) from None

    def dtype_for(self, key: str, nbytes: int) -> DType:
        """The element type of a storage of ``nbytes`` bytes; UINT8 where the pickle names it under several.

        Raises InputError when the pickle states another size.
        """
        forms = self.declared[key]
        for dtype, numel in forms:
            if numel * dtype.itemsize != nbytes:
                raise InputError(
                    f"{self.label}: storage {shown(key)} has {nbytes} bytes, "
                    f"but the pickle names it with {numel} elements of {dtype.label}"
                )
        dtypes = {dtype for dtype, _ in forms}
        return dtypes.pop() if len(dtypes) == 1 else DType.UINT8
