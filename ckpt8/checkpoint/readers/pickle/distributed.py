"""Tensors of torch.distributed in a pickle: what one rank has of them, and its place in the whole.

    DTensor         a local tensor, with placements on a mesh of ranks and the coordinate of this one
    ShardedTensor   a list of local shards, each with its offsets

Nothing here is imported or called. A form that torch does not write is not interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from math import prod
from typing import Any, TypeGuard

from ckpt8.checkpoint.share import Share
from ckpt8.checkpoint.tree import Global, Inert, TensorRef

WRAPPED = "torch._utils._rebuild_wrapper_subclass"
"""The function that makes a tensor of tensors, and gets the class first."""

EMPTY = "torch.distributed._shard.sharded_tensor.api.ShardedTensor without local shards"
"""The name of the node for a tensor of which this rank has nothing."""

_MODULE = "torch.distributed."
_MOST_DIMS = 64
_LARGEST = 2**63 - 1
_REBUILD_ARGUMENTS = 8
_SHARDED_FIELDS = 5
_COPIED = "Replicate"

Run = tuple[int, int]
"""Start and stop."""


def is_distributed(name: str) -> bool:
    """Whether a class is one of those."""
    return name.startswith(_MODULE) and name.rpartition(".")[2] in _KINDS


def local_tensor(kind: Global, arguments: tuple[Any, ...], state: Any, spend: Callable[[int], None]) -> Any:
    """The tensor that this rank has, with its share; None where that is not interpreted."""
    read = _KINDS.get(kind.name.rpartition(".")[2]) if kind.name.startswith(_MODULE) else None
    if read is None or len(arguments) != _REBUILD_ARGUMENTS or type(arguments[1]) is not Global:
        return None
    whole = arguments[2]
    found = read(tuple(whole), state, spend) if _is_counts(whole) else None
    if type(found) is TensorRef and (found.conj or found.neg or arguments[1].name != f"torch.{found.dtype.label}"):
        return None
    return found


def _dtensor(whole: tuple[int, ...], state: Any, spend: Callable[[int], None]) -> TensorRef | None:
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
    if type(axes) is int:
        axes = (axes,)
    if type(axes) is not tuple or len(axes) > _MOST_DIMS:
        return None
    sizes = tuple(_size_of_axis(_fields(axis.state).get("shape") if type(axis) is Inert else axis) for axis in axes)
    return sizes if _is_counts(sizes) else None


def _size_of_axis(shape: Any) -> int:
    """The size of an axis that may be made of several; -1 for what is none."""
    if type(shape) is int:
        return shape
    return prod(shape) if _is_counts(shape) else -1


def _is_in_order(order: Any) -> bool:
    """Whether meshes are applied from their first dimension to the last, as placements say without an order."""
    entries = order if type(order) is tuple else ()
    if len(entries) > _MOST_DIMS:  # many tensors may share one order
        return False
    dims = [entry.args[1] if type(entry) is Inert and len(entry.args) == 2 else None for entry in entries]
    return all(_is_counts(each) and all(a < b for a, b in pairwise(each)) for each in dims)


def _runs(
    whole: tuple[int, ...], placed: Sequence[tuple[int, int, Any]], spend: Callable[[int], None]
) -> list[Run] | None:
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
            each = -(-(stop - start) // size)
            first = min(start + at * each, stop)
            own.append((first, min(first + each, stop)))
        runs[dim] = _cut(runs[dim], own)
    joined = [_joined(each) or [(size, size)] for each, size in zip(runs, whole, strict=True)]
    return [each[0] for each in joined] if all(len(each) == 1 for each in joined) else None


def _kind(placement: Any) -> str | None:
    return placement.name.rpartition(".")[2] if type(placement) is Inert else None


def _chunks(size: int, count: int) -> list[Run]:
    """``size`` elements in so many chunks, or fewer: all but the last are of one size."""
    each = max(-(-size // count), 1)
    return [(start, min(start + each, size)) for start in range(0, size, each)]


def _cut(runs: Sequence[Run], own: Sequence[Run]) -> list[Run]:
    """The parts ``own`` of elements that lie in ``runs``; both are in order."""
    found: list[Run] = []
    waiting, before = list(reversed(own)), 0
    for start, stop in runs:
        after = before + stop - start
        while waiting and waiting[-1][0] < after:
            first, last = waiting[-1]
            found.append((start + max(first, before) - before, start + min(last, after) - before))
            if last > after:
                break
            waiting.pop()
        before = after
    return found


def _joined(runs: Sequence[Run]) -> list[Run]:
    """The runs that are not empty, in order; those that touch are one."""
    found: list[Run] = []
    for start, stop in runs:
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], stop
        elif start < stop:
            found.append((start, stop))
    return found


def _sharded_tensor(whole: tuple[int, ...], state: Any, _spend: Callable[[int], None]) -> TensorRef | Inert | None:
    is_known = type(state) is tuple and len(state) == _SHARDED_FIELDS and type(state[1]) is Inert
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
    is_inside = len(offsets) == len(whole) and all(
        at + size <= most for at, size, most in zip(offsets, sizes, whole, strict=False)
    )
    if not is_inside or ref.shape != tuple(sizes) or len(sizes) != len(whole):
        return None
    return replace(ref, share=Share(tuple(offsets), whole, len(everywhere), None, (place, *state[1:])))


_KINDS = {"DTensor": _dtensor, "ShardedTensor": _sharded_tensor}


def _fields(state: Any) -> dict[str, Any]:
    """The attributes of an object, in its ``__dict__`` or in slots; none where it has both."""
    if type(state) is tuple and len(state) == 2:
        state = (state[1] if not state[0] else None) if type(state[0]) in (dict, type(None)) else None
    return state if type(state) is dict else {}


def _is_counts(value: Any) -> TypeGuard[Sequence[int]]:
    is_few = type(value) in (tuple, list) and len(value) <= _MOST_DIMS
    return is_few and all(type(each) is int and 0 <= each <= _LARGEST for each in value)
