"""A pickle machine that executes nothing: it returns plain values, ``Inert`` nodes and tensor references.

A pickle is a program for a stack machine. Python's machine imports names and calls them; this one has no code
that could do either. A name becomes a ``Global``, a call becomes an ``Inert`` that keeps its arguments, and the
machine understands only the constructors of ``rebuild.py``. The memory and time that a stream of n bytes can take
are proportional to n: the machine checks every announced length against the bytes that are left, and has budgets
for objects and for copies. Nothing here recurses, so only the walk that follows limits the nesting.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ckpt8.checkpoint.readers.pickle.pickle_stack import STACK_OPCODES, StackMachine
from ckpt8.checkpoint.readers.pickle.rebuild import CONSTRUCTORS, NOT_INTERPRETED, dict_key, is_plain, set_entry
from ckpt8.checkpoint.readers.pickle.torch_rules import TorchCalls
from ckpt8.checkpoint.tree import Global, Inert, StatefulDict, TensorRef
from ckpt8.core.errors import InputError

MAX_GLOBALS = 65_536
MAX_NAME_CHARACTERS = 1024
CALL_UNITS = 2
"""An object that a call makes takes as much memory as that many containers."""

_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg"}  # names of Python 2, used by protocols 0 to 2
_DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError, struct.error)

PersistentLoad = Callable[[Any], Any]


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
    machine = _Machine(stream, end, label, persistent_load, end if stored is None else stored, calls)
    value = machine.run()
    if names is not None:
        names.update(known.name for known in machine.globals.values())
    return value


class _Stop(Exception):  # noqa: N818
    """The STOP opcode was reached. A signal, not an error."""


def _reason(exc: BaseException) -> str:
    if isinstance(exc, KeyError):
        return "it refers to a memo entry that does not exist"
    if isinstance(exc, (IndexError, struct.error)):
        return "it ends too early or an operand is missing"
    return (str(exc).splitlines() or [type(exc).__name__])[0][:200]


class _Machine(StackMachine):
    """One run: containers, names, calls and object state."""

    def __init__(
        self,
        stream: io.BufferedIOBase,
        end: int,
        label: str,
        persistent_load: PersistentLoad | None,
        stored: int,
        calls: TorchCalls | None,
    ) -> None:
        super().__init__(stream, end, stored)
        self.label = label
        self.persistent_load = persistent_load
        self.calls = calls
        self.globals: dict[tuple[str, str], Global] = {}

    def run(self) -> Any:
        """Read up to STOP and return the value. Raises InputError."""
        table, read = _TABLE, self.read
        try:
            while True:
                table[read(1)[0]](self)
        except _Stop:
            pass
        except _DAMAGE as exc:
            # Any wrong byte leads to one of these errors; only the place is missing in them.
            raise InputError(f"{self.label}: damaged pickle near byte {self.tell()}: {_reason(exc)}") from exc
        if len(self.stack) != 1 or self.marks or self.tell() > self.end:
            raise InputError(f"{self.label}: damaged pickle: it ends at byte {self.tell()} with values left over")
        return self.stack[0]

    def _unknown(self) -> NoReturn:
        raise ValueError("the opcode there is not one that checkpoints use")

    def _stop(self) -> NoReturn:
        raise _Stop

    def _tuple(self) -> None:
        self.count()
        items = tuple(self._since_mark())
        self.stack.append(items)

    def _tuple_1(self) -> None:
        self.count()
        self.stack[-1] = (self.stack[-1],)

    def _tuple_2(self) -> None:
        self.count()
        self.stack[-2:] = [(self.stack[-2], self.stack[-1])]

    def _tuple_3(self) -> None:
        self.count()
        self.stack[-3:] = [(self.stack[-3], self.stack[-2], self.stack[-1])]

    def _empty_list(self) -> None:
        self.count()
        self.stack.append([])

    def _list(self) -> None:
        self.count()
        items = self._since_mark()
        self.stack.append(items)

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

    def _empty_dict(self) -> None:
        self.count()
        self.stack.append({})

    def _dict(self) -> None:
        self.count()
        items = self._since_mark()
        self.stack.append({})
        self._update(items)

    def _set_item(self) -> None:
        value = self.stack.pop()
        key = self.stack.pop()
        self._update([key, value])

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

    def _empty_set(self) -> None:
        self.count()
        self.stack.append(Inert("builtins.set"))

    def _frozen_set(self) -> None:
        self.count()
        items = self._since_mark()
        self.stack.append(Inert("builtins.frozenset", items=items))

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
        module = self._line().decode("utf-8")
        return self._named(module, self._line().decode("utf-8"))

    def _global_stack(self) -> None:
        name = self.stack.pop()
        self.stack.append(self._named(self.stack.pop(), name))

    def _construct(self, function: Any, args: Any) -> Any:
        self.count(CALL_UNITS)
        if type(args) is not tuple:
            raise ValueError("a call has no argument tuple")
        constructor = CONSTRUCTORS.get(function.name) if type(function) is Global else None
        made = NOT_INTERPRETED if constructor is None else constructor(args, self.spend)
        if self.calls is not None:
            self.calls.call(function, args, made, self)
        if made is not NOT_INTERPRETED:
            return made
        # A callable may itself be the result of a call, for instance of getattr.
        return Inert(function.name, args=args) if type(function) is Global else Inert("<call>", args=(function, args))

    def _reduce(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self._construct(self.stack[-1], args)

    def _new_object_keywords(self) -> None:
        keywords = self.stack.pop()
        args = self.stack.pop()
        made = self._construct(self.stack[-1], args)
        self.stack[-1] = Inert("<call>", args=(made, keywords)) if keywords else made

    def _object(self) -> None:
        function, *args = self._since_mark()
        self.stack.append(self._construct(function, tuple(args)))

    def _instance(self) -> None:
        function = self._global_text()
        args = tuple(self._since_mark())
        self.stack.append(self._construct(function, args))

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

    def _persistent_stack(self) -> None:
        self.stack[-1] = self._persistent(self.stack[-1])


# Extension codes (EXT1, EXT2, EXT4) and out-of-band buffers name things outside the file: they stay unknown.
_OPCODES: Mapping[int, Callable[[_Machine], object]] = {
    **STACK_OPCODES,
    ord("."): _Machine._stop,
    ord(")"): lambda machine: machine.stack.append(()),
    ord("t"): _Machine._tuple,
    0x85: _Machine._tuple_1,
    0x86: _Machine._tuple_2,
    0x87: _Machine._tuple_3,
    ord("]"): _Machine._empty_list,
    ord("l"): _Machine._list,
    ord("a"): lambda machine: machine._extend([machine.stack.pop()]),
    ord("e"): lambda machine: machine._extend(machine._since_mark()),
    ord("}"): _Machine._empty_dict,
    ord("d"): _Machine._dict,
    ord("s"): _Machine._set_item,
    ord("u"): lambda machine: machine._update(machine._since_mark()),
    0x8F: _Machine._empty_set,
    0x90: lambda machine: machine._extend(machine._since_mark()),
    0x91: _Machine._frozen_set,
    ord("c"): lambda machine: machine.stack.append(machine._global_text()),
    0x93: _Machine._global_stack,
    ord("R"): _Machine._reduce,
    0x81: _Machine._reduce,
    0x92: _Machine._new_object_keywords,
    ord("o"): _Machine._object,
    ord("i"): _Machine._instance,
    ord("b"): _Machine._build,
    ord("P"): lambda machine: machine.stack.append(machine._persistent(machine._line().decode("ascii"))),
    ord("Q"): _Machine._persistent_stack,
}
_TABLE = tuple(_OPCODES.get(code, _Machine._unknown) for code in range(256))
