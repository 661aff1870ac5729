"""The few constructors that the inert pickle machine understands: of plain values and of tensor references.

A constructor takes the pickled arguments and returns a value, or NOT_INTERPRETED for arguments of a form that torch
and Python do not write: the object then stays an ``Inert`` whose arguments remain visible. Arguments that can only be
damage raise ValueError, to which the pickle machine adds the place.

A tensor reference drops hooks and attributes. No other tensor or storage may hide in them: the tree must show every
use of a storage. So the constructors check that all they drop is plain.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

from ckpt8.checkpoint.readers.pickle.distributed import WRAPPED, local_tensor
from ckpt8.checkpoint.tree import Global, Inert, StatefulDict, StorageRef, TensorRef
from ckpt8.core.tensors import DType

MAX_DIMS = 64
"""The kernels of torch stop at 64 dimensions."""
MAX_PLAIN_ENTRIES = 64
_INT64_MAX = 2**63 - 1
_SCALARS = frozenset({str, int, float, bool, type(None), bytes, complex, Global})
_TENSOR_TYPES = frozenset({"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"})
_LATIN1 = frozenset({"latin1", "latin-1"})

NOT_INTERPRETED: Any = object()
Spend = Callable[[int], None]
"""Takes the size of a copy before it is made; raises ValueError when copies get out of proportion."""
Constructor = Callable[[tuple[Any, ...], Spend], Any]


def _is_trivial(value: Any) -> bool:
    if type(value) in _SCALARS:
        return True
    if type(value) is StatefulDict and value.state is not None:
        return False
    return type(value) in (tuple, list, dict, StatefulDict) and not value


def is_plain(value: Any) -> bool:
    """Whether no tensor or storage can hide in ``value``: a scalar, or a small container of scalars."""
    if _is_trivial(value):
        return True
    if type(value) not in (tuple, list, dict) or len(value) > MAX_PLAIN_ENTRIES:
        return False
    parts = (part for pair in value.items() for part in pair) if type(value) is dict else value
    return all(map(_is_trivial, parts))


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value can be a number of bytes or elements, or a place among them."""
    return type(value) is int and 0 <= value <= _INT64_MAX


def _count(value: Any) -> int:
    if not is_count(value):
        raise ValueError("a tensor's offset, shape or stride is not a count")
    return value


def make_tensor(storage: StorageRef, dtype: DType, offset: Any, shape: Any, stride: Any) -> TensorRef:
    """A tensor of ``dtype`` over ``storage``. Raises ValueError unless every element lies inside it.

    ``offset`` and ``stride`` are in elements of ``dtype``, relative to the start of ``storage`` (which may be
    a view).
    """
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        raise ValueError("a tensor's shape and stride do not belong together")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions, more than {MAX_DIMS}")
    last = _count(offset)
    numel = 1
    for n, step in zip(shape, stride, strict=True):
        last += (_count(n) - 1) * _count(step)
        numel *= n
    if numel > _INT64_MAX:
        raise ValueError("a tensor has more elements than can be counted")
    start, misaligned = divmod(storage.offset * storage.dtype.itemsize, dtype.itemsize)
    if misaligned:
        raise ValueError(f"a {dtype.label} tensor starts inside an element")
    available = storage.numel * storage.dtype.itemsize // dtype.itemsize
    if numel and last >= available:
        raise ValueError(f"a tensor reaches element {last} of a storage that has {available}")
    return TensorRef(storage.key, dtype, start + offset, shape, stride)


def _tensor(args: tuple[Any, ...], dtype: DType | None, metadata: tuple[Any, ...]) -> Any:
    """The tensor of ``args``: storage, offset, shape, stride, and plain values. ``metadata`` may state conj and neg."""
    if type(args[0]) is not StorageRef or not all(is_plain(arg) for arg in args[4:]):
        return NOT_INTERPRETED
    tensor = make_tensor(args[0], dtype or args[0].dtype, args[1], args[2], args[3])
    flags = metadata[0] if metadata and isinstance(metadata[0], dict) else {}
    conj, neg = bool(flags.get("conj")), bool(flags.get("neg"))
    return replace(tensor, conj=conj, neg=neg) if conj or neg else tensor


def _tensor_v2(args: tuple[Any, ...], _spend: Spend) -> Any:
    """Both ``_rebuild_tensor`` (4 arguments) and ``_rebuild_tensor_v2`` (6, or 7 with metadata)."""
    return _tensor(args, None, args[6:]) if len(args) in (4, 6, 7) else NOT_INTERPRETED


def _tensor_v3(args: tuple[Any, ...], _spend: Spend) -> Any:
    """``_rebuild_tensor_v3``: as ``_v2``, with an element type behind the sixth argument."""
    if len(args) not in (7, 8) or type(args[6]) is not Global:
        return NOT_INTERPRETED
    try:
        dtype = DType.from_label(args[6].name)
    except KeyError:
        # A dtype of a later torch: its storage is then opaque, and kept byte for byte.
        return NOT_INTERPRETED
    return _tensor(args, dtype, args[7:])


def _wrapped(args: tuple[Any, ...], _spend: Spend) -> Any:
    """``Parameter``, ``Buffer``, ``_rebuild_parameter``: a tensor first, then only flags and empty hooks."""
    if not args or len(args) > MAX_DIMS or type(args[0]) is not TensorRef:
        return NOT_INTERPRETED
    return args[0] if all(is_plain(arg) for arg in args[1:]) else NOT_INTERPRETED


def _from_type(args: tuple[Any, ...], spend: Spend) -> Any:
    """``_rebuild_from_type_v2(function, type, args, state)``: a tensor with attributes, or of a subclass.

    A subclass gives its bytes a meaning of its own, so only the plain types and those of ``distributed`` are tensors.
    """
    if len(args) != 4 or type(args[0]) is not Global or type(args[2]) is not tuple:
        return NOT_INTERPRETED
    function, kind, arguments, state = args
    if function.name == WRAPPED and type(kind) is Global:
        made = local_tensor(kind, arguments, state, spend)
        return NOT_INTERPRETED if made is None else made
    if function.name not in _TENSOR_FUNCTIONS or type(kind) is not Global:
        return NOT_INTERPRETED
    if kind.name not in _TENSOR_TYPES or not is_plain(state):
        return NOT_INTERPRETED
    return CONSTRUCTORS[function.name](arguments, spend)


def _size(args: tuple[Any, ...], _spend: Spend) -> Any:
    return args[0] if len(args) == 1 and type(args[0]) is tuple else NOT_INTERPRETED


def _ordered_dict(args: tuple[Any, ...], spend: Spend) -> Any:
    """``OrderedDict()``, filled later, or the ``OrderedDict([[key, value], ...])`` that Python 2 wrote."""
    result = StatefulDict()
    if not args:
        return result
    if len(args) != 1 or type(args[0]) is not list:
        return NOT_INTERPRETED
    spend(len(args[0]))
    for pair in args[0]:
        if type(pair) not in (list, tuple) or len(pair) != 2:
            raise ValueError("an OrderedDict is made of something other than pairs")
        set_entry(result, pair[0], pair[1])
    return result


def _default_dict(args: tuple[Any, ...], _spend: Spend) -> Any:
    return StatefulDict() if not args or (len(args) == 1 and is_plain(args[0])) else NOT_INTERPRETED


def _set(name: str, args: tuple[Any, ...], _spend: Spend) -> Any:
    """A set in the order of the pickle. Nothing hashes its items: it stays an ``Inert`` with ``items``."""
    if not args:
        return Inert(name)
    return Inert(name, items=args[0]) if len(args) == 1 and type(args[0]) is list else NOT_INTERPRETED


def _bytes(args: tuple[Any, ...], spend: Spend) -> Any:
    """``bytes()``, and ``_codecs.encode(text, "latin1")``, with which protocols below 3 write bytes."""
    if not args:
        return b""
    if len(args) != 2 or type(args[0]) is not str or type(args[1]) is not str or args[1] not in _LATIN1:
        return NOT_INTERPRETED
    spend(len(args[0]))
    return args[0].encode("latin-1")


def _bytearray(args: tuple[Any, ...], spend: Spend) -> Any:
    if len(args) == 1 and type(args[0]) is bytes:
        spend(len(args[0]))
        return bytearray(args[0])
    made = _bytes(args, spend)
    return made if made is NOT_INTERPRETED else bytearray(made)


def _complex(args: tuple[Any, ...], _spend: Spend) -> Any:
    return complex(*args) if len(args) == 2 and all(type(n) in (int, float) for n in args) else NOT_INTERPRETED


def _slice(args: tuple[Any, ...], _spend: Spend) -> Any:
    return slice(*args) if len(args) == 3 and all(type(arg) in _SCALARS for arg in args) else NOT_INTERPRETED


def _reconstructor(args: tuple[Any, ...], _spend: Spend) -> Any:
    """``copyreg._reconstructor(class, base, value of the base)``: how protocols 0 and 1 make an object."""
    if len(args) != 3 or type(args[0]) is not Global:
        return NOT_INTERPRETED
    return Inert(args[0].name, args=() if args[2] is None else (args[2],))


MAX_KEY_NODES = 64
MAX_KEY_BITS = 4096
MAX_SAME_HASH = 64
_CHECKED_FROM = 1 << 10
"""Keys in a dictionary at the first check of their hashes; the next check comes when there are twice as many."""


def dict_key(key: Any) -> Any:
    """``key``. Raises ValueError unless it hashes and compares in constant time.

    The interpreter hashes a tuple recursively, without a limit of depth, so tuples must be small and hold scalars.
    """
    pending = [key]
    seen = 0
    while pending:
        node = pending.pop()
        seen += 1
        kind = type(node)
        if kind is tuple:
            if len(node) + len(pending) + seen > MAX_KEY_NODES:
                raise ValueError("a dictionary key is too large")
            pending.extend(node)
        elif kind is int:
            if node.bit_length() > MAX_KEY_BITS:
                raise ValueError("a dictionary key is too large")
        elif kind not in _SCALARS and kind not in (Inert, TensorRef, StorageRef):
            raise ValueError(f"a {kind.__name__} is used as a dictionary key")
    return key


def set_entry(target: dict[Any, Any], key: Any, value: Any) -> None:
    """``target[key] = value`` in constant time. Raises ValueError for keys that would make it slower.

    The hash of a number is no secret: keys can be made to share one, and a dictionary of them takes quadratic time.
    """
    count = len(target)
    if count >= _CHECKED_FROM and not count & (count - 1):
        _, most = Counter(map(hash, target)).most_common(1)[0]
        if most > MAX_SAME_HASH:
            raise ValueError("the keys of a dictionary are made to collide")
    target[key if type(key) is str else dict_key(key)] = value


_TENSOR_FUNCTIONS = frozenset(
    f"torch._utils._rebuild_{name}"
    for name in ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")
)
CONSTRUCTORS: dict[str, Constructor] = {
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _wrapped,
    "torch._utils._rebuild_parameter_with_state": _wrapped,
    "torch.nn.parameter.Parameter": _wrapped,
    "torch.nn.parameter.Buffer": _wrapped,
    "torch.autograd.variable.Variable": _wrapped,
    "torch._tensor._rebuild_from_type": _from_type,
    "torch._tensor._rebuild_from_type_v2": _from_type,
    "torch.Size": _size,
    "collections.OrderedDict": _ordered_dict,
    "collections.defaultdict": _default_dict,
    "builtins.set": partial(_set, "builtins.set"),
    "builtins.frozenset": partial(_set, "builtins.frozenset"),
    "builtins.bytes": _bytes,
    "_codecs.encode": _bytes,
    "builtins.bytearray": _bytearray,
    "builtins.complex": _complex,
    "builtins.slice": _slice,
    "copyreg._reconstructor": _reconstructor,
}
