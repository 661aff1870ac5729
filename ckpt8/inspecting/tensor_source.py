"""Weights and moments of any source, read in bounded memory, whole or sampled.

Slices of a distributed tensor are one tensor here. Of tensors that share their elements, as tied weights do, the list
has the first. A tensor of 8-bit elements comes with its scales, which have its name and ``_scale``: x = q * scale, with
one scale for the tensor, or one for every row.

``pair_tensors`` finds each tensor of a checkpoint in a compressed, restored or converted copy. Tensors of equal names
are pairs. But a conversion moves tensors: files of a directory become one file, a nested state dict a flat one, and
moments by number become moments by name. So two other tensors are a pair if the label of one is the end, by whole
components, of the label of the other, and of no second label. Shapes must be equal, those of slices too.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from ckpt8.checkpoint.meaning.parameter_names import SLICE, without_file
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite, Stretch
from ckpt8.checkpoint.tree import TensorRef, is_dense
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.manifest import DCP, Manifest
from ckpt8.core.tensors import DType, Role
from ckpt8.inspecting.facts import shown_names
from ckpt8.inspecting.prediction import describe, open_any
from ckpt8.inspecting.sampling import PER_TENSOR, windows

ROLES = (Role.WEIGHT, Role.MOMENT1, Role.MOMENT2)
"""The roles of the tensors in the list."""

BLOCK = 1 << 20
"""Elements of one read."""

_QUANTISED = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.INT8})
_SCALE = "_scale"


@dataclass(frozen=True, slots=True, eq=False)
class SourceTensor:
    """A tensor. ``pieces`` are its slices in the order of the checkpoint: one, unless it is distributed.

    ``shape`` is None if there are several slices. ``scale`` is set for 8-bit elements. ``label`` is the name for
    people: that of a moment begins with its parameter, if that is known.
    """

    name: str
    role: Role
    dtype: DType
    shape: tuple[int, ...] | None
    pieces: tuple[TensorRef, ...]
    label: str
    scale: TensorRef | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return sum(ref.numel for ref in self.pieces)

    @property
    def in_memory_order(self) -> SourceTensor:
        """Its elements in the order of memory, which reads faster; with scales, in their own order."""
        if self.scale is not None:
            return self
        flat = (replace(ref, shape=(prod(ref.shape),), stride=(1,)) if is_dense(ref) else ref for ref in self.pieces)
        return replace(self, pieces=tuple(flat))


class TensorSource:
    """The tensors of an open source. ``left_out`` counts the others by reason."""

    def __init__(self, bundle: Bundle) -> None:
        self.left_out: Counter[str] = Counter()
        self.bundle = bundle
        self._data = Composite(bundle.label)
        self._lock = threading.Lock()
        self.tensors = self._find()

    def _find(self) -> list[SourceTensor]:
        plan = plan_bundle(self.bundle, Policy.of("lossless"))
        parameters = _parameter_names(describe(self.bundle, plan))
        groups: dict[tuple[str, Role, DType], tuple[str, list[TensorRef]]] = {}
        spread = {
            index
            for member in self.bundle.members
            if member.checkpoint.format == DCP
            for index in range(member.first, member.skeleton)
        }
        seen = set()
        for tensor, index in plan.tensors:
            ref = replace(tensor.ref, key=str(index))
            identity = (ref.key, ref.dtype, ref.offset, ref.shape, ref.stride, ref.neg)
            if tensor.role not in ROLES or identity in seen or not ref.numel:
                continue
            seen.add(identity)
            if ref.nbytes > self.bundle.storages[index].nbytes:
                self.left_out["with more elements than are stored"] += 1
                continue
            if ref.key not in self._data:
                storage = self.bundle.storages[index]
                self._data.add(Stretch(self.bundle, storage.offset, storage.nbytes), storage.dtype, ref.key)
            name = tensor.whole or tensor.name
            parameter = parameters.get(index)
            parameter = parameter and SLICE.sub("", parameter)
            label = name if parameter is None else f"{parameter}.{name.rpartition('.')[2]}"
            if index in spread:
                name, label = without_file(name), without_file(label)
            groups.setdefault((name, tensor.role, ref.dtype), (label, []))[1].append(ref)
        tensors = [
            SourceTensor(*key, refs[0].shape if len(refs) == 1 else None, tuple(refs), label)
            for key, (label, refs) in groups.items()
        ]
        return [tensor for tensor in self._with_scales(tensors) if self._is_listed(tensor)]

    def _with_scales(self, tensors: list[SourceTensor]) -> list[SourceTensor]:
        """The tensors; those of 8 bits with their scales, which leave the list."""
        by_name = {tensor.name + _SCALE: tensor for tensor in tensors if tensor.dtype in _QUANTISED}
        owners = ((by_name.get(scale.name), scale) for scale in tensors)
        scales = {
            tensor.name: scale.pieces[0]
            for tensor, scale in owners
            if tensor is not None and _scale_fits(tensor, scale)
        }
        taken = {name + _SCALE for name in scales}
        return [replace(tensor, scale=scales.get(tensor.name)) for tensor in tensors if tensor.name not in taken]

    def _is_listed(self, tensor: SourceTensor) -> bool:
        if tensor.dtype.is_plane_float or tensor.scale is not None:
            return True
        self.left_out[f"of {tensor.dtype.label}"] += 1
        return False

    def read(self, tensor: SourceTensor, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop``, flat: float64 as they are, all others as float32. Raises InputError."""
        parts = []
        with self._lock:
            for piece in tensor.pieces:
                count = prod(piece.shape)
                if start < count and stop > 0:
                    parts.append(self._elements(tensor, piece, max(start, 0), min(stop, count)))
                start, stop = start - count, stop - count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _elements(self, tensor: SourceTensor, piece: TensorRef, start: int, stop: int) -> torch.Tensor:
        values = self._data.elements(piece, start, stop)
        if tensor.scale is None:
            return values if values.dtype is torch.float64 else values.float()
        rows = tensor.scale.numel
        row = piece.numel // rows
        first, last = start // row, (stop - 1) // row + 1
        scales = self._data.elements(tensor.scale, first, last).float().repeat_interleave(row)
        return values.float() * scales[start - first * row : stop - first * row]

    def blocks(self, tensor: SourceTensor, *, full: bool) -> Iterator[torch.Tensor]:
        """All elements, BLOCK at a time, or those of a sample at once. Raises InputError."""
        count = tensor.numel
        if full or count <= PER_TENSOR:
            for start in range(0, count, BLOCK):
                yield self.read(tensor, start, min(start + BLOCK, count))
        else:
            # Rows of one element: windows may begin anywhere.
            yield torch.cat([self.read(tensor, at, at + n) for at, n in windows(count, PER_TENSOR, row=1)])


def _parameter_names(manifest: Manifest) -> dict[int, str]:
    """The name of its parameter for every storage of a moment, if that is more than a number."""
    rows = zip(manifest.parameters, shown_names(manifest), strict=True)
    return {index: row["name"] for record, row in rows if row["named"] for index in record.moments.values()}


def _scale_fits(tensor: SourceTensor, scale: SourceTensor) -> bool:
    if tensor.shape is None or scale.shape is None or not scale.dtype.is_plane_float:
        return False
    count = scale.numel
    return count == 1 or (bool(tensor.shape) and count == tensor.shape[0])


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorSource]:
    """Open a checkpoint, a directory or a ``.ckpt8`` of either. Raises InputError for damage or no tensors."""
    with open_any(path) as bundle:
        yield TensorSource(bundle)


def pair_tensors(
    mine: Sequence[SourceTensor], theirs: Sequence[SourceTensor]
) -> list[tuple[SourceTensor, SourceTensor]]:
    """The pairs, in the order of ``mine``."""
    by_name = {(tensor.name, tensor.role): tensor for tensor in theirs}
    equal = {tensor.name: by_name[tensor.name, tensor.role] for tensor in mine if (tensor.name, tensor.role) in by_name}
    taken = {tensor.name for tensor in equal.values()}
    loose = _match_by_end(
        [tensor for tensor in mine if tensor.name not in equal],
        [tensor for tensor in theirs if tensor.name not in taken],
    )
    pairs = [(tensor, equal.get(tensor.name) or loose.get(tensor.name)) for tensor in mine]
    return [(one, other) for one, other in pairs if other is not None and _shapes(one) == _shapes(other)]


def _shapes(tensor: SourceTensor) -> list[tuple[int, ...]]:
    """The shapes of its slices: if two tensors have the same, their elements are in the same order."""
    return [ref.shape for ref in tensor.pieces]


def _match_by_end(mine: Sequence[SourceTensor], theirs: Sequence[SourceTensor]) -> dict[str, SourceTensor]:
    """By name of mine, the only one of theirs such that the label of one is the end of the label of the other."""
    forward, backward = _pairs_by_end(mine, theirs), _pairs_by_end(theirs, mine)
    others_of: dict[str, list[SourceTensor]] = defaultdict(list)
    owners: dict[str, set[str]] = defaultdict(set)
    for one, other in [*forward, *((long, short) for short, long in backward)]:
        if other not in others_of[one.name]:
            others_of[one.name].append(other)
            owners[other.name].add(one.name)
    return {
        name: others[0] for name, others in others_of.items() if len(others) == 1 and len(owners[others[0].name]) == 1
    }


def _pairs_by_end(
    short: Sequence[SourceTensor], long: Sequence[SourceTensor]
) -> list[tuple[SourceTensor, SourceTensor]]:
    """Pairs such that the label of the first is the end of the label of the second."""
    ends: dict[tuple[tuple[str, ...], Role], list[SourceTensor]] = defaultdict(list)
    for tensor in long:
        parts = _components(tensor.label)
        for start in range(len(parts)):
            ends[parts[start:], tensor.role].append(tensor)
    return [(tensor, other) for tensor in short for other in ends.get((_components(tensor.label), tensor.role), ())]


def _components(label: str) -> tuple[str, ...]:
    return tuple(label.replace(":", ".").split("."))
