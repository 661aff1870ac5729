"""The few constructors that the inert pickle machine understands: of plain values and of tensor references.

A constructor takes the pickled arguments and returns a value, or NOT_INTERPRETED for arguments of a form that torch
and Python do not write: the object then stays an ``Inert`` whose arguments remain visible. Arguments that can only be
damage raise ValueError, to which the pickle machine adds the place.

A tensor reference drops hooks and attributes. No other tensor or storage may hide in them: the tree must show every
use of a storage. So the constructors check that all they drop is plain.

Of tensors of torch.distributed a pickle tells what one rank has, and its place in the whole:

    DTensor         a local tensor, with placements on a mesh of ranks and the coordinate of this one
    ShardedTensor   a list of local shards, each with its offsets

Nothing here is imported or called. A form that torch does not write is not interpreted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from math import prod
from typing import Any, TypeGuard

from ckpt8.checkpoint.tree import Global, Inert, Share, Size, StatefulDict, StorageRef, TensorRef
from ckpt8.core.tensors import DType

WRAPPED = "torch._utils._rebuild_wrapper_subclass"
"""The function that makes a tensor of tensors, and gets the class first."""

EMPTY = "torch.distributed._shard.sharded_tensor.api.ShardedTensor without local shards"
"""The name of the node for a tensor of which this rank has nothing."""

MAX_DIMS = 64
"""The kernels of torch stop at 64 dimensions."""
MAX_PLAIN_ENTRIES = 64
_INT64_MAX = 2**63 - 1
_MODULE = "torch.distributed."
_COPIED = "Replicate"

Run = tuple[int, int]
"""Start and stop."""
Spend = Callable[[int], None]
"""Takes the size of a copy before it is made; raises ValueError when copies get out of proportion."""
Constructor = Callable[[tuple[Any, ...], Spend], Any]
NOT_INTERPRETED: Any = object()


def is_distributed(name: str) -> bool:
    """Whether a class is one of those of torch.distributed."""
    return name.startswith(_MODULE) and name.rpartition(".")[2] in _KINDS


def local_tensor(kind: Global, arguments: tuple[Any, ...], state: Any, spend: Spend) -> Any:
    """The tensor that this rank has, with its share; None where that is not interpreted."""
    if not is_distributed(kind.name) or len(arguments) != 8 or type(arguments[1]) is not Global:
        return None
    whole, read = arguments[2], _KINDS[kind.name.rpartition(".")[2]]
    tensor = read(tuple(whole), state, spend) if _is_counts(whole) else None
    if type(tensor) is TensorRef and (tensor.conj or tensor.neg or arguments[1].name != f"torch.{tensor.dtype.label}"):
        return None
    return tensor


def _dtensor(whole: tuple[int, ...], state: Any, spend: Spend) -> TensorRef | None:
    fields = _fields(state)
    ref, spec = fields.get("_local_tensor"), fields.get("_spec")
    if len(fields) != 2 or type(ref) is not TensorRef or ref.share is not None or type(spec) is not Inert:
        return None
    stated = _fields(spec.state)
    meta, mesh, placements = (stated.get(name) for name in ("tensor_meta", "mesh", "placements"))
    if type(meta) is Inert and (not meta.args or meta.args[0] != whole):
        return None
    at = _fields(mesh.state if type(mesh) is Inert else None)
    sizes, coordinate = _mesh_shape(at), at.get("_coordinate_on_dim")
    if sizes is None or not _is_counts(coordinate) or type(placements) is not tuple:
        return None
    fits = len(sizes) == len(coordinate) == len(placements) and all(map(int.__lt__, coordinate, sizes))
    if not fits or not _is_in_order(stated.get("shard_order")):
        return None
    runs = _runs(whole, list(zip(sizes, coordinate, placements, strict=True)), spend)
    if runs is None or ref.shape != tuple(stop - start for start, stop in runs):
        return None
    copies = prod(size for size, placement in zip(sizes, placements, strict=True) if _kind(placement) == _COPIED)
    return replace(ref, share=Share(tuple(start for start, _ in runs), whole, prod(sizes), copies, spec))


def _mesh_shape(mesh: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape of a mesh: that of its tensor of ranks, or since torch 2.10 that of its layout."""
    ranks, layout = mesh.get("mesh"), mesh.get("_layout")
    if type(ranks) is TensorRef:
        return ranks.shape
    stated = _fields(layout.state if type(layout) is Inert else None)
    axes = stated.get("axes", stated.get("shape"))
    axes = (axes,) if type(axes) is int else axes
    if type(axes) is not tuple or len(axes) > MAX_DIMS:
        return None
    sizes = tuple(_size_of_axis(_fields(axis.state).get("shape") if type(axis) is Inert else axis) for axis in axes)
    return sizes if _is_counts(sizes) else None


def _size_of_axis(shape: Any) -> int:
    """The size of an axis that may be made of several; -1 for what is none."""
    sizes = (shape,) if type(shape) is int else shape
    return prod(sizes) if _is_counts(sizes) else -1


def _is_in_order(order: Any) -> bool:
    """Whether meshes are applied from their first dimension to the last, as placements say without an order."""
    entries = order if type(order) is tuple else ()
    if len(entries) > MAX_DIMS:  # many tensors may share one order
        return False
    dims = [entry.args[1] if type(entry) is Inert and len(entry.args) == 2 else None for entry in entries]
    return all(_is_counts(dim) and all(a < b for a, b in pairwise(dim)) for dim in dims)


def _runs(whole: tuple[int, ...], placed: Sequence[tuple[int, int, Any]], spend: Spend) -> list[Run] | None:
    """What a rank has by dimension of the tensor; None unless that is one run of each.

    ``placed`` are the size of each dimension of the mesh, the place of the rank in it, and the placement.
    """
    runs = [[(0, size)] for size in whole]
    for size, at, placement in placed:
        kind = _kind(placement)
        if kind == _COPIED:
            continue
        stated = _fields(placement.state) if kind in ("Shard", "_StridedShard") else {}
        dim, factor = stated.get("dim"), stated.get("split_factor") if kind == "_StridedShard" else 1
        if type(dim) is not int or type(factor) is not int or not 0 <= dim < len(whole) or factor < 1:
            return None
        spend(factor + len(runs[dim]))
        own = []
        for start, stop in _chunks(sum(end - begin for begin, end in runs[dim]), factor):
            length = -(-(stop - start) // size)
            first = min(start + at * length, stop)
            own.append((first, min(first + length, stop)))
        runs[dim] = _cut(runs[dim], own)
    joined = [_joined(runs_of) or [(size, size)] for runs_of, size in zip(runs, whole, strict=True)]
    return [runs_of[0] for runs_of in joined] if all(len(runs_of) == 1 for runs_of in joined) else None


def _kind(placement: Any) -> str | None:
    return placement.name.rpartition(".")[2] if type(placement) is Inert else None


def _chunks(size: int, count: int) -> list[Run]:
    """``size`` elements in so many chunks, or fewer: all but the last are of one size."""
    length = max(-(-size // count), 1)
    return [(start, min(start + length, size)) for start in range(0, size, length)]


def _cut(runs: Sequence[Run], own: Sequence[Run]) -> list[Run]:
    """The parts ``own`` of elements that lie in ``runs``; both are in order."""
    parts: list[Run] = []
    waiting, before = list(reversed(own)), 0
    for start, stop in runs:
        after = before + stop - start
        while waiting and waiting[-1][0] < after:
            first, last = waiting[-1]
            parts.append((start + max(first, before) - before, start + min(last, after) - before))
            if last > after:
                break
            waiting.pop()
        before = after
    return parts


def _joined(runs: Sequence[Run]) -> list[Run]:
    """The runs that are not empty, in order; those that touch are one."""
    joined: list[Run] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        elif start < stop:
            joined.append((start, stop))
    return joined


def _sharded_tensor(whole: tuple[int, ...], state: Any, _spend: Spend) -> TensorRef | Inert | None:
    is_known = type(state) is tuple and len(state) == 5 and type(state[1]) is Inert
    shards, stated = (state[0], _fields(state[1].state)) if is_known else (None, {})
    everywhere = stated.get("shards_metadata")
    if stated.get("size") != whole or type(everywhere) is not list or type(shards) is not list or len(shards) > 1:
        return None
    if not shards:
        return Inert(EMPTY, state=state[1:])
    fields = _fields(shards[0].state if type(shards[0]) is Inert else None)
    ref, place = fields.get("tensor"), fields.get("metadata")
    own = _fields(place.state if type(place) is Inert else None)
    offsets, sizes = own.get("shard_offsets"), own.get("shard_sizes")
    if type(ref) is not TensorRef or ref.share is not None or not _is_counts(offsets) or not _is_counts(sizes):
        return None
    if ref.shape != tuple(sizes) or not len(offsets) == len(sizes) == len(whole):
        return None
    if any(at + size > most for at, size, most in zip(offsets, sizes, whole, strict=True)):
        return None
    return replace(ref, share=Share(tuple(offsets), whole, len(everywhere), None, (place, *state[1:])))


_KINDS = {"DTensor": _dtensor, "ShardedTensor": _sharded_tensor}


def _fields(state: Any) -> dict[str, Any]:
    """The attributes of an object, in its ``__dict__`` or in slots; none where it has both."""
    if type(state) is tuple and len(state) == 2:
        state = (state[1] if not state[0] else None) if type(state[0]) in (dict, type(None)) else None
    return state if type(state) is dict else {}


def _is_counts(value: Any) -> TypeGuard[Sequence[int]]:
    return isinstance(value, (tuple, list)) and len(value) <= MAX_DIMS and all(map(is_count, value))


_SCALARS = frozenset({str, int, float, bool, type(None), bytes, complex, Global})
_TENSOR_TYPES = frozenset({"torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"})


def _is_trivial(value: Any) -> bool:
    is_empty = type(value) in (tuple, list, dict, StatefulDict) and not value
    return type(value) in _SCALARS or (is_empty and getattr(value, "state", None) is None)


def is_plain(value: Any) -> bool:
    """Whether no tensor or storage can hide in ``value``: a scalar, or a small container of scalars."""
    if _is_trivial(value):
        return True
    if type(value) not in (tuple, Size, list, dict) or len(value) > MAX_PLAIN_ENTRIES:
        return False
    parts = (part for pair in value.items() for part in pair) if type(value) is dict else value
    return all(map(_is_trivial, parts))


def is_count(value: Any) -> TypeGuard[int]:
    """Whether a value can be a number of bytes or elements, or a place among them."""
    return type(value) is int and 0 <= value <= _INT64_MAX


def make_tensor(storage: StorageRef, dtype: DType, offset: Any, shape: Any, stride: Any) -> TensorRef:
    """A tensor of ``dtype`` over ``storage``. Raises ValueError unless every element lies inside it.

    ``offset`` and ``stride`` are in elements of ``dtype``, relative to the start of ``storage`` (which may be
    a view).
    """
    if type(shape) is not tuple or type(stride) is not tuple or len(shape) != len(stride):
        raise ValueError("a tensor's shape and stride do not belong together")
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has {len(shape)} dimensions, more than {MAX_DIMS}")
    if not all(map(is_count, (offset, *shape, *stride))):
        raise ValueError("a tensor's offset, shape or stride is not a count")
    last = offset + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    numel = prod(shape)
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
    conj, neg, requires_grad = bool(flags.get("conj")), bool(flags.get("neg")), len(args) > 4 and bool(args[4])
    is_plain_one = not (conj or neg or requires_grad)
    return tensor if is_plain_one else replace(tensor, conj=conj, neg=neg, requires_grad=requires_grad)


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
    """``Buffer`` and ``Variable``: a tensor first, then only flags and empty hooks."""
    has_tensor = bool(args) and len(args) <= MAX_DIMS and type(args[0]) is TensorRef
    return args[0] if has_tensor and all(map(is_plain, args[1:])) else NOT_INTERPRETED


def _parameter(args: tuple[Any, ...], spend: Spend) -> Any:
    """``Parameter(data, requires_grad)``, and the functions with hooks and attributes behind these two."""
    if (tensor := _wrapped(args, spend)) is NOT_INTERPRETED:
        return NOT_INTERPRETED
    requires_grad = len(args) == 1 or bool(args[1])
    return replace(tensor, is_parameter=True, requires_grad=requires_grad, attributes=args[3] if args[3:] else None)


def _from_type(args: tuple[Any, ...], spend: Spend) -> Any:
    """``_rebuild_from_type_v2(function, type, args, state)``: a tensor with attributes, or of a subclass.

    A subclass gives its bytes a meaning of its own, so only the plain types and those of torch.distributed are tensors.
    """
    if len(args) != 4 or not type(args[0]) is type(args[1]) is Global or type(args[2]) is not tuple:
        return NOT_INTERPRETED
    function, kind, arguments, state = args
    if function.name == WRAPPED:
        made = local_tensor(kind, arguments, state, spend)
        return NOT_INTERPRETED if made is None else made
    is_tensor = function.name in _TENSOR_FUNCTIONS and kind.name in _TENSOR_TYPES and is_plain(state)
    made = CONSTRUCTORS[function.name](arguments, spend) if is_tensor else NOT_INTERPRETED
    return replace(made, attributes=state) if type(made) is TensorRef and state else made


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
    if len(args) != 2 or type(args[0]) is not str or type(args[1]) is not str or args[1] not in ("latin1", "latin-1"):
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
    is_known = len(args) == 3 and type(args[0]) is Global
    return Inert(args[0].name, args=() if args[2] is None else (args[2],)) if is_known else NOT_INTERPRETED


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
        if (issubclass(kind, tuple) and len(node) + len(pending) + seen > MAX_KEY_NODES) or (
            kind is int and node.bit_length() > MAX_KEY_BITS
        ):
            raise ValueError("a dictionary key is too large")
        if issubclass(kind, tuple):
            pending.extend(node)
        elif kind not in _SCALARS and kind not in (Inert, TensorRef, StorageRef):
            raise ValueError(f"a {kind.__name__} is used as a dictionary key")
    return key


def check_hashes(target: dict[Any, Any]) -> None:
    """Raise ValueError where the keys of a growing dictionary are made to collide; call it before each new one.

    The hash of a number is no secret: keys can be made to share one, and a dictionary of them takes quadratic time.
    """
    count = len(target)
    if count >= _CHECKED_FROM and not count & (count - 1):
        _, most = Counter(map(hash, target)).most_common(1)[0]
        if most > MAX_SAME_HASH:
            raise ValueError("the keys of a dictionary are made to collide")


def set_entry(target: dict[Any, Any], key: Any, value: Any) -> None:
    """``target[key] = value`` in constant time. Raises ValueError for keys that would make it slower."""
    check_hashes(target)
    target[key if type(key) is str else dict_key(key)] = value


_TENSOR_FUNCTIONS = frozenset(
    f"torch._utils._rebuild_{name}"
    for name in ("tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state")
)
CONSTRUCTORS: dict[str, Constructor] = {
    "torch._utils._rebuild_tensor": _tensor_v2,
    "torch._utils._rebuild_tensor_v2": _tensor_v2,
    "torch._utils._rebuild_tensor_v3": _tensor_v3,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch.nn.parameter.Parameter": _parameter,
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
