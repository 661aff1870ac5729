"""The calls of torch's ``weights_only`` unpickler, with a rule for the arguments of each name that it calls.

A rule is a function of a ``Call``. It raises ValueError for arguments that ``torch.save`` does not write.

``TorchCalls`` judges the calls that torch's unpickler would make, by their arguments, before torch sees the file.

torch allows some names and calls them with whatever arguments a pickle has. Each name has a rule here. Calls that pass
take memory and time in proportion to the bytes of the file. Calls of classes that the user allowed pass unjudged. This
module calls nothing and does not import torch; ``foreign_names`` knows the names that all versions of torch allow.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from ckpt8.checkpoint.readers.rebuild import (
    CONSTRUCTORS,
    MAX_DIMS,
    NOT_INTERPRETED,
    dict_key,
    is_plain,
    set_entry,
)
from ckpt8.checkpoint.tree import Global, Inert, Size, StatefulDict, StorageRef, TensorRef
from ckpt8.core.tensors import DType

if TYPE_CHECKING:
    from ckpt8.checkpoint.readers.inert_pickle import Machine

TENSOR_UNITS = 8
"""A tensor takes as much memory as that many containers."""

COUNTER = "collections.Counter"
_UTILS = "torch._utils._rebuild_"
TYPED = "torch._tensor._rebuild_from_type_v2"
_LARGEST_ITEM = 16
_PACKED = {DType.QUINT4X2: 2, DType.QUINT2X4: 4}
PROPERTIES = frozenset({"data", "real", "imag", "grad", "names", "__class__", "__dict__"})
"""Attributes of a tensor that do something when they are set."""


@dataclass(slots=True)
class Call:
    """One call, for a rule to judge. The methods are checks: they raise ValueError."""

    calls: TorchCalls
    name: str
    args: tuple[Any, ...]
    made: Any
    budget: Machine

    def require(self, holds: object) -> None:
        """Raise ValueError unless ``holds`` is true."""
        if not holds:
            raise ValueError(f"the arguments of {self.name} are not those that torch.save writes")

    def is_made(self, kind: type) -> None:
        """Require that the inert machine made a ``kind`` of the call."""
        self.require(type(self.made) is kind)

    def dense(self, value: Any, itemsize: int | None = None) -> None:
        """Require a tensor that repeats no element, and count its bytes, with elements of ``itemsize`` bytes."""
        self.require(type(value) is TensorRef)
        span = 1 + sum((n - 1) * step for n, step in zip(value.shape, value.stride, strict=True))
        numel = prod(value.shape)
        self.require(numel <= max(span, 0))
        self.calls.spend_data(numel * (itemsize or value.dtype.itemsize))

    def state(self, state: Any) -> None:
        """Require attributes of a tensor: ``__dict__``, or that and the values of slots."""
        for part in state if type(state) is tuple and len(state) == 2 else (state,):
            self.require(part is None or (type(part) in (dict, StatefulDict) and PROPERTIES.isdisjoint(part)))
            self.budget.spend(len(part or ()))


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) <= MAX_DIMS and all(type(n) is int and n >= 0 for n in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)


def _parameter(call: Call) -> None:
    call.require(0 < len(call.args) <= 4 and call.calls.is_tensor(call.args[0]) and all(map(is_plain, call.args[1:3])))
    if len(call.args) == 4:
        call.state(call.args[3])


def _typed(call: Call) -> None:
    """``_rebuild_from_type_v2(function, type, args, state)`` calls the function, which has a rule of its own."""
    call.require(len(call.args) == 4)
    function, kind, arguments, state = call.args
    call.require(type(function) is Global and type(kind) is Global and type(arguments) is tuple)
    is_known = function.name in TENSOR_MAKERS or call.calls.is_trusted(function)
    call.require(is_known and function.name != TYPED)
    constructor = CONSTRUCTORS.get(function.name)
    made = NOT_INTERPRETED if constructor is None else constructor(arguments, call.budget.spend)
    call.calls.call(function, arguments, made, call.budget)
    call.state(None if call.calls.is_trusted(kind) else state)


def _quantized(call: Call) -> None:
    """Torch makes a quantized tensor anew before it sets its storage, so it may be no larger than the storage."""
    call.require(len(call.args) == 7 and type(call.args[0]) is StorageRef)
    storage, offset, size, stride, how = call.args[:5]
    call.require(_is_shape(size) and _is_shape(stride) and len(size) == len(stride))
    call.require(type(offset) is int and offset >= 0 and all(is_plain(arg) for arg in call.args[5:]))
    there = storage.numel * _PACKED.get(storage.dtype, 1)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    call.require(prod(size) <= there and (not prod(size) or last < there))
    call.calls.spend_data(storage.numel * storage.dtype.itemsize)
    call.require(type(how) is tuple and len(how) in (3, 4) and type(how[0]) is Global)
    if len(how) == 3:
        call.require(all(map(_is_number, how[1:])))
    else:
        call.require(type(how[3]) is int and 0 <= how[3] < len(size))
        for tensor in how[1:3]:
            _per_channel(call, tensor, size[how[3]])


def _per_channel(call: Call, value: Any, count: int) -> None:
    if type(value) is list:
        call.budget.spend(len(value))
        call.require(len(value) == count and all(map(_is_number, value)))
    else:
        call.dense(value)
        call.require(prod(value.shape) == count)


def _sparse(call: Call) -> None:
    """``_rebuild_sparse_tensor(layout, (tensors, size, flag))``: torch looks at all elements of the tensors."""
    call.require(len(call.args) == 2 and type(call.args[1]) is tuple and len(call.args[1]) <= 5)
    for part in call.args[1]:
        if type(part) is TensorRef:
            call.dense(part)
        else:
            call.require(_is_shape(part) or part is None or type(part) is bool)


def _nested(call: Call) -> None:
    call.require(len(call.args) == 4)
    for part in call.args:
        call.dense(part)


def _meta(call: Call) -> None:
    call.require(len(call.args) == 4 and type(call.args[0]) is Global and all(map(_is_shape, call.args[1:3])))


def _wrapper(call: Call) -> None:
    """A tensor without a storage, of a class that the user allowed."""
    call.require(len(call.args) == 8 and call.calls.is_trusted(call.args[0]) and all(map(_is_shape, call.args[2:4])))


def _converted(call: Call) -> None:
    """A tensor of a device without storages, from a tensor on the host, or from an array that the user allowed."""
    call.require(len(call.args) == 4)
    data = call.args[0]
    if type(data) is Inert and data.name in ARRAYS:
        content = data.state[-1] if type(data.state) is tuple and data.state else None
        call.require(type(content) is bytes)
        call.calls.spend_data(len(content or b"") * _LARGEST_ITEM)
    else:
        dtype = call.args[1].name.removeprefix("torch.") if type(call.args[1]) is Global else ""
        call.dense(data, _ITEMSIZES.get(dtype, _LARGEST_ITEM))


def _size(call: Call) -> None:
    call.require(len(call.args) == 1 and type(call.args[0]) in (tuple, list))
    call.budget.spend(len(call.args[0]))
    call.require(all(type(n) is int for n in call.args[0]))


def _set(call: Call) -> None:
    """A set of items that hash in constant time, and that nobody made to collide."""
    call.require(not call.args or (len(call.args) == 1 and type(call.args[0]) is list))
    seen: dict[Any, None] = {}
    call.budget.spend(sum(map(len, call.args)))
    for item in call.args[0] if call.args else ():
        set_entry(seen, dict_key(item), None)


def _counter(call: Call) -> None:
    call.require(not call.args or (len(call.args) == 1 and type(call.args[0]) in (dict, StatefulDict)))
    call.budget.spend(sum(map(len, call.args)))


def _scalars(call: Call) -> None:
    call.require(0 < len(call.args) <= 3 and all(type(arg) in (str, int, bool) for arg in call.args))


def _array(call: Call) -> None:
    """``_reconstruct(numpy.ndarray, (0,), b"b")``: an empty array, whose state has shape and content."""
    call.require(len(call.args) == 3 and call.args[1] == (0,) and type(call.args[2]) in (str, bytes))


def _never(call: Call) -> None:
    raise ValueError(f"it asks for memory of a stated size ({call.name})")


def _judge_tensor(rule: Callable[[Call], None], call: Call) -> None:
    """Judge a call that makes a tensor, and count the tensor."""
    rule(call)
    call.budget.count(TENSOR_UNITS)


_ITEMSIZES = {dtype.label: dtype.itemsize for dtype in DType}
ARRAYS = frozenset({"numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"})
NUMPY_NAMES = ARRAYS | {
    *("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar"),
    *("numpy._core.numeric._frombuffer", "numpy.core.numeric._frombuffer"),
    *("numpy.ndarray", "numpy.dtype", "builtins.bytes"),
}
"""What a pickle of numpy's arrays and scalars names, ``bytes()`` of empty ones included; see ``sources.objects``."""

_TENSOR_RULES: Mapping[str, Callable[[Call], None]] = {
    **dict.fromkeys(
        (f"{_UTILS}tensor{version}" for version in ("", "_v2", "_v3")), lambda call: call.is_made(TensorRef)
    ),
    f"{_UTILS}parameter": _parameter,
    f"{_UTILS}parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
    f"{_UTILS}qtensor": _quantized,
    f"{_UTILS}sparse_tensor": _sparse,
    f"{_UTILS}nested_tensor": _nested,
    f"{_UTILS}meta_tensor_no_storage": _meta,
    f"{_UTILS}wrapper_subclass": _wrapper,
    f"{_UTILS}device_tensor_from_cpu_tensor": _converted,
    f"{_UTILS}device_tensor_from_numpy": _converted,
}
TENSOR_MAKERS = frozenset({*_TENSOR_RULES, TYPED})
RULES: Mapping[str, Callable[[Call], None]] = {
    **{name: partial(_judge_tensor, rule) for name, rule in _TENSOR_RULES.items()},
    TYPED: _typed,
    **dict.fromkeys(ARRAYS, _array),
    "collections.OrderedDict": lambda call: call.is_made(StatefulDict),
    COUNTER: _counter,
    "torch.Size": _size,
    "torch.device": _scalars,
    "torch.serialization._get_layout": _scalars,
    "_codecs.encode": lambda call: call.is_made(bytes),
    "builtins.bytearray": lambda call: call.is_made(bytearray) if call.made is not NOT_INTERPRETED else _never(call),
    "builtins.set": _set,
    "builtins.complex": lambda call: call.is_made(complex),
    "numpy.dtype": _scalars,
    "numpy.ndarray": _never,
}
"""The rule of each name that torch calls."""


DATA_FACTOR = 4
DATA_ALLOWANCE = 1 << 26
"""Bytes of tensors that are computed or copied may be this many times those of the file, and this many more."""


class TorchCalls:
    """The judge of one file of ``size`` bytes. It raises ValueError for a call that torch must not make.

    ``allowed`` are the names that torch allows, ``trusted`` those that the user added. The names in the file that are
    neither are in ``arrays`` if they belong to numpy's arrays and scalars, else in ``foreign``. torch refuses a file
    that has one of either, so the first one ends all judging.
    """

    def __init__(self, size: int, allowed: Collection[str], trusted: Collection[str]) -> None:
        self.foreign: dict[str, None] = {}
        self.arrays: dict[str, None] = {}
        self._allowed = allowed
        self._trusted = trusted
        self._room = DATA_FACTOR * size + DATA_ALLOWANCE
        self._tensors = TENSOR_MAKERS | frozenset(trusted)

    def name(self, name: str) -> None:
        """Note a class or function that the pickle refers to."""
        if name not in self._allowed and name not in self._trusted:
            (self.arrays if name in NUMPY_NAMES else self.foreign)[name] = None

    @property
    def _is_refused(self) -> bool:
        return bool(self.foreign or self.arrays)

    def call(self, function: Any, args: tuple[Any, ...], made: Any, budget: Machine) -> Any:
        """Judge a call. ``made`` is the value that the inert machine makes of it, or NOT_INTERPRETED.

        Returns ``made``; for a ``torch.Size`` a ``Size``, as what is judged may be built as torch builds it.
        """
        if not self._is_refused:
            self._judge(function, args, made, budget)
        is_size = type(function) is Global and function.name == "torch.Size" and type(made) is tuple
        return Size(made) if is_size else made

    def _judge(self, function: Any, args: tuple[Any, ...], made: Any, budget: Machine) -> None:
        if type(function) is not Global:
            raise ValueError("it calls something that is no function")
        rule = RULES.get(function.name)
        if rule is not None:
            rule(Call(self, function.name, args, made, budget))
        elif function.name not in self._trusted:
            asks = any(type(arg) is int or (type(arg) in (tuple, list) and arg) for arg in args[:MAX_DIMS])
            why = "it asks for memory of a stated size" if asks else "it calls what torch.save never calls"
            raise ValueError(f"{why} ({function.name})")

    def build(self, target: Any, state: Any, budget: Machine) -> None:
        """Judge a state for an object."""
        if self._is_refused or (type(target) is Inert and target.name in self._trusted):
            return
        if type(target) is not StatefulDict and not (type(target) is Inert and target.name == COUNTER):
            kind = target.name if type(target) is Inert else type(target).__name__
            raise ValueError(f"a state is given to a {kind}")
        if type(state) not in (dict, StatefulDict):
            raise ValueError("the attributes of a dictionary are none")
        budget.spend(len(state))

    def fill(self, target: Inert) -> None:
        """Refuse items for an object: torch adds them to lists and dictionaries alone."""
        if not self._is_refused:
            raise ValueError(f"items are added to a {target.name}")

    def storage(self, pid: Any, storage: Any) -> None:
        """Judge a reference to a storage. torch makes one of the device ``meta`` anew for every reference."""
        if type(storage) is StorageRef and pid[3] == "meta":
            self.spend_data(storage.numel * storage.dtype.itemsize)

    def spend_data(self, nbytes: int) -> None:
        """Count bytes of tensors that are computed or copied. Raises ValueError when they are too many."""
        self._room -= nbytes
        if self._room < 0:
            raise ValueError("it has the same data copied over and over")

    def is_tensor(self, value: Any) -> bool:
        """Whether torch has a tensor for ``value``."""
        return type(value) is TensorRef or (type(value) is Inert and value.name in self._tensors)

    def is_trusted(self, value: Any) -> bool:
        """Whether ``value`` is a class that the user allowed."""
        return type(value) is Global and value.name in self._trusted


_KINDS = ("BFloat16", "Half", "Float", "Double", "Byte", "Char", "Short", "Int", "Long")
_STORED = (*_KINDS, "Bool", "ComplexFloat", "ComplexDouble")
_FLOATS = (
    *("bfloat16", "float16", "float32", "float64", "bcomplex32", "complex32", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2"),
)
_QUANTISED = ("qint8", "qint32", "quint8", "quint4x2", "quint2x4", "bits8", "bits16", "bits1x8", "bits2x4", "bits4x2")
_SCHEMES = (
    *("per_tensor_affine", "per_tensor_symmetric", "per_channel_affine", "per_channel_symmetric"),
    "per_channel_affine_float_qparams",
)

ALLOWED = frozenset(
    {
        *("_codecs.encode", "builtins.bytearray", "builtins.complex", "builtins.set"),
        *("collections.Counter", "collections.OrderedDict"),
        *TENSOR_MAKERS,
        *("torch.Size", "torch.Tensor", "torch.device"),
        *("torch.storage.TypedStorage", "torch.storage.UntypedStorage"),
        "torch.serialization._get_layout",
        *(f"torch.{name}" for name in ("bool", *_FLOATS, *_QUANTISED, *_SCHEMES)),
        *(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in (*range(1, 9), 16, 32, 64)),
        *(f"torch.{place}{kind}Storage" for place in ("", "cuda.") for kind in _STORED),
        *(f"torch.Q{kind}Storage" for kind in ("Int8", "Int32", "UInt8", "UInt4x2", "UInt2x4")),
        *(f"torch.{place}{kind}Tensor" for place in ("", "cuda.") for kind in (*_KINDS, "Bool")),
        *(f"torch.{place}sparse.{kind}Tensor" for place in ("", "cuda.") for kind in _KINDS),
    }
)


def foreign_names(names: Iterable[str]) -> list[str]:
    """Those of the names that torch does not allow, sorted."""
    return sorted(name for name in names if name not in ALLOWED)
