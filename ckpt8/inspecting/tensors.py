"""Weights and moments of any source, read in bounded memory, whole or sampled.

Slices of a distributed tensor are one tensor here. Of tensors that share their elements, as tied weights do, the list
has the first. A tensor of 8-bit elements comes with its scales, which have its name and ``_scale``: x = q * scale, with
one scale for the tensor, or one for every row.

Any source opens in one form: a bundle to read from, and a manifest that describes it. A ``.ckpt8`` opens as the members
that it was made from, with the values that it gives back. The manifest of a raw checkpoint is the one that its
container would have.

Samples are windows spread over a tensor, always the same.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ckpt8 import __version__
from ckpt8.checkpoint.meaning.parameter_names import SLICE, without_file
from ckpt8.checkpoint.readers import WITHOUT_TENSORS
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import TensorRef, is_dense
from ckpt8.codecs.companded8 import GROUP
from ckpt8.compressing.compressor import Results, UnitResult, fill_manifest
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.plan import Plan
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container import frames, header
from ckpt8.container.frames import FRAME
from ckpt8.container.manifest import DCP, Manifest
from ckpt8.core.errors import InputError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType, Role
from ckpt8.inspecting.facts import shown_names


@contextmanager
def open_any(path: Path, *, containers: bool = True) -> Iterator[Bundle]:
    """Open a checkpoint file, a directory or, if ``containers``, a ``.ckpt8`` of either.

    Raises InputError for damage, and for a directory that holds no tensors.
    """
    with open_source(path, containers=containers) as bundle:
        bundle.keep_all()
        # A distributed checkpoint is one even where no tensor in it has elements.
        if bundle.directory is not None and not (bundle.holds_tensors or bundle.distributed):
            raise InputError(f"{bundle.path}: {WITHOUT_TENSORS}")
        yield bundle


def describe(source: Bundle, plan: Plan) -> Manifest:
    """The manifest that a container of ``source`` would have, without sizes of parts and without errors."""
    manifest = Manifest(f"ckpt8 {__version__}", "", [], header.SLAB, frames.FRAME)
    results = Results()
    for unit in plan.units:
        results.add(UnitResult(unit, UnitErrors(), [], [{} for _ in unit.streams]))
    fill_manifest(manifest, source, plan, results)
    return manifest


PER_TENSOR = 1 << 15
"""Elements in the sample of a long tensor."""

PER_CHART = 1 << 17
"""Elements in the sample of a histogram, whose tails need more."""

WINDOWS = 8
"""Windows of a sample, at least."""

CHUNK = 1 << 18
"""Elements that a survey reads at once: it needs memory for their temporaries."""

EVERY_ELEMENT = "every element"
"""The sample that leaves nothing out, in words."""

_WINDOW = 4096
_IN_ALL = 1 << 25
_FEWEST = 256
_MOST_CHUNKS = 16
_CHUNKS_IN_ALL = 1024


def budget(tensors: int) -> int:
    """Elements in the sample of each of ``tensors`` tensors: PER_TENSOR, or fewer to stay within 2^25 in all."""
    return max(_FEWEST, min(PER_TENSOR, _IN_ALL // max(tensors, 1)))


def windows(numel: int, most: int | None, row: int = 0) -> Iterator[tuple[int, int]]:
    """Start and length of the windows of ``numel`` elements, in order and without overlap.

    ``most`` bounds a sample; None takes all. The first and the last element belong to every sample. Windows begin where
    a group of 32 moments begins. With ``row``, and if two rows fit into the sample, they begin where a row of ``row``
    elements begins, and hold whole rows.
    """
    if most is None or numel <= most:
        yield from ((start, min(CHUNK, numel - start)) for start in range(0, numel, CHUNK))
        return
    length = min(_WINDOW, most // WINDOWS // GROUP * GROUP)
    step = GROUP
    if 0 < row <= most // 2:
        length, step = max(length // row, 1) * row, row
    *starts, last = _spread(numel - length, most // length)
    yield from ((start // step * step, length) for start in starts)
    # Round up: rounding down would make the last window longer.
    start = -(-last // step) * step
    yield start, numel - start


@dataclass(frozen=True, slots=True)
class ChunkSampling:
    """Samples of ``most`` elements of each tensor, None for all, from at most ``chunks`` of its stored chunks."""

    most: int | None
    chunks: int

    @classmethod
    def of(cls, tensors: int, *, full: bool) -> ChunkSampling:
        """For a checkpoint of ``tensors`` tensors: a container decodes a chunk to show any of it."""
        return cls(None if full else PER_CHART, max(1, min(_MOST_CHUNKS, _CHUNKS_IN_ALL // max(tensors, 1))))

    def __call__(self, numel: int) -> list[tuple[int, list[slice]]]:
        """Chunks of a tensor of ``numel`` elements, and the windows of each, in elements from its beginning."""
        count = header.chunk_count(numel)
        chosen = range(count) if self.most is None else _spread(count - 1, min(count, self.chunks))
        most = self.most and self.most // max(len(chosen), 1)
        return [
            (chunk, [slice(start, start + n) for start, n in windows(min(FRAME, numel - chunk * FRAME), most)])
            for chunk in chosen
        ]

    @property
    def text(self) -> str:
        """The sample in words."""
        return EVERY_ELEMENT if self.most is None else f"up to {self.most:,} elements of each tensor, evenly spread"


def _spread(last: int, count: int) -> list[int]:
    """``count`` numbers from 0 to ``last``, evenly; of one, the middle."""
    return [last * k // (count - 1) for k in range(count)] if count > 1 else [last // 2] * count


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
        manifest = describe(self.bundle, plan)
        # The name of its parameter for every storage of a moment, if that is more than a number.
        parameters = {
            index: SLICE.sub("", shown["name"])
            for record, shown in zip(manifest.parameters, shown_names(manifest), strict=True)
            for index in (record.moments.values() if shown["named"] else ())
        }
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
            if ref.key not in self._data.places:
                self._data.add_storage(self.bundle, self.bundle.storages[index], ref.key)
            name = tensor.whole or tensor.name
            label = f"{parameters[index]}.{name.rpartition('.')[2]}" if index in parameters else name
            if index in spread:
                name, label = without_file(name), without_file(label)
            groups.setdefault((name, tensor.role, ref.dtype), (label, []))[1].append(ref)
        tensors = [
            SourceTensor(*key, refs[0].shape if len(refs) == 1 else None, tuple(refs), label)
            for key, (label, refs) in groups.items()
        ]
        listed = []
        for item in self._with_scales(tensors):
            if item.dtype.is_plane_float or item.scale is not None:
                listed.append(item)
            else:
                self.left_out[f"of {item.dtype.label}"] += 1
        return listed

    def _with_scales(self, tensors: list[SourceTensor]) -> list[SourceTensor]:
        """The tensors; those of 8 bits with their scales, which leave the list."""
        by_name = {
            tensor.name + _SCALE: tensor
            for tensor in tensors
            if tensor.dtype in _QUANTISED and tensor.shape is not None
        }
        scales = {
            tensor.name: scale.pieces[0]
            for scale in tensors
            if (tensor := by_name.get(scale.name))
            and scale.shape is not None
            and scale.dtype.is_plane_float
            # One for the tensor, or one for every row.
            and scale.numel in (1, *(tensor.shape or ())[:1])
        }
        taken = {name + _SCALE for name in scales}
        return [replace(tensor, scale=scales.get(tensor.name)) for tensor in tensors if tensor.name not in taken]

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
        row = piece.numel // tensor.scale.numel
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


@contextmanager
def open_tensors(path: Path) -> Iterator[TensorSource]:
    """Open a checkpoint, a directory or a ``.ckpt8`` of either. Raises InputError for damage or no tensors."""
    with open_any(path) as bundle:
        yield TensorSource(bundle)


TILE = 1 << 16
"""Elements that are looked at together: their temporaries fit the L2 cache."""

_BITS = {1: DType.UINT8, 2: DType.INT16, 4: DType.INT32, 8: DType.INT64}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The bits of flat elements, as integers of their size, or as pairs of int64."""
    return x.view(_BITS[min(x.element_size(), 8)].torch)


def tiles(blocks: Iterable[tuple[torch.Tensor, ...]]) -> Iterator[tuple[torch.Tensor, ...]]:
    """Blocks cut into tiles; the flat tensors of a block are as long as each other, and are cut side by side."""
    for block in blocks:
        yield from zip(*(torch.split(side, TILE) for side in block), strict=True)
