"""Encodes, decodes and measures the streams of a unit together: first those that other streams need as companions.

Elements are arrays in memory of the host, or tensors on a device. A chunk goes through codecs and meter as a whole: on
a GPU each tile would cost a wait for its result, and kernels of numba take as long for four tiles as for all at once,
but Python does not. For torch on a CPU it is cut into tiles, whose temporaries fit the cache. What kernels measure from
its parts is decoded nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, cast

import numpy as np

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs.base import TILE, Codec, X
from ckpt8.codecs.vscaled.statistics import expand
from ckpt8.compressing.measure import ChunkErrors, UnitErrors
from ckpt8.compressing.measure_torch import ErrorMeter
from ckpt8.compressing.plan import Unit, read_elements
from ckpt8.container import header
from ckpt8.core.arrays import Array, empty, floats, numpy_type
from ckpt8.core.backend import Backend, for_arrays
from ckpt8.core.errors import RefusedError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType, PartSpec, TensorSpec
from ckpt8.core.workers import scratch_array


class _Place(Protocol[X]):
    """Where the elements of a chunk are, and what works on them there."""

    torch_tile: int
    """The elements that torch takes at once."""
    is_torch: bool
    """Whether codecs are torch's."""

    def empty(self, spec: PartSpec, slot: str | None) -> X:
        """New memory, or that of this thread for a ``slot``, until it asks again."""

    def encode(self, codec: Codec, x: X, spec: TensorSpec, **how: Any) -> dict[str, X]:
        """``Codec.encode``."""

    def decode(self, codec: Codec, parts: Mapping[str, X], spec: TensorSpec, out: X, **how: Any) -> None:
        """``Codec.decode``."""

    def floats(self, x: X, dtype: DType) -> X:
        """The elements in fp32."""

    def given(self, x: Array) -> X:
        """Elements in fp32 that are computed on the host."""


class _Host:
    """Arrays: by the kernels of numba, or by torch."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.torch_tile, self.is_torch = backend, TILE, backend == "torch"

    def empty(self, spec: PartSpec, slot: str | None) -> Array:
        if slot is None:
            return empty(spec.numel, spec.dtype)
        return scratch_array(slot, numpy_type(spec.dtype), spec.numel)

    def encode(self, codec: Codec, x: Array, spec: TensorSpec, **how: Any) -> dict[str, Array]:
        return codec.encode_arrays(x, spec, backend=self._backend, **how)

    def decode(self, codec: Codec, parts: Mapping[str, Array], spec: TensorSpec, out: Array, **how: Any) -> None:
        codec.decode_arrays(parts, spec, out, backend=self._backend, **how)

    def floats(self, x: Array, dtype: DType) -> Array:
        return floats(x, dtype)

    def given(self, x: Array) -> Array:
        return x


class _Device:
    """Tensors: by Triton, or by torch."""

    torch_tile, is_torch = header.FRAME, True

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def empty(self, spec: PartSpec, slot: str | None) -> torch.Tensor:  # noqa: ARG002 - the allocator keeps memory
        return torch.empty(spec.numel, dtype=spec.dtype.torch, device=self._device)

    def encode(self, codec: Codec, x: torch.Tensor, spec: TensorSpec, **how: Any) -> dict[str, torch.Tensor]:  # noqa: ARG002
        return codec.encode(x, **how)

    def decode(
        self, codec: Codec, parts: Mapping[str, torch.Tensor], spec: TensorSpec, out: torch.Tensor, **how: Any
    ) -> None:
        codec.decode(dict(parts), spec, out=out, **how)

    def floats(self, x: torch.Tensor, dtype: DType) -> torch.Tensor:  # noqa: ARG002 - it has its own
        return x.float()

    def given(self, x: Array) -> torch.Tensor:
        return torch.from_numpy(x).to(self._device)


def backend_of(source: Checkpoint) -> Backend:
    """The backend that compresses the arrays of a source; if it is numba, kernels can be called from now on."""
    return for_arrays(sum(storage.nbytes for storage in source.storages), writes=True)


class Lockstep:
    """Encodes, decodes and measures units of one checkpoint. Thread-safe.

    ``backend`` is the one that works on arrays: the last digits of sums depend on it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.backend = backend_of(checkpoint)
        self.meter = ErrorMeter(checkpoint)

    def prepare(self, units: Iterable[Unit]) -> None:
        """Import torch where it has to measure any of ``units``, before the threads of ``Workers`` do."""
        if self.backend == "numba":
            from ckpt8.compressing.measure_numba import BlockSums

            if not all(BlockSums.fits(unit) for unit in units if unit.measured):
                import torch  # noqa: F401

    def encode(
        self,
        unit: Unit,
        first: int,
        originals: Sequence[X],
        bases: Sequence[Mapping[str, X] | None] | None = None,
        *,
        measure: bool = False,
        reuse: bool = False,
    ) -> tuple[list[dict[str, X]], UnitErrors]:
        """The parts of every stream, and the errors of what is measured; none without ``measure``.

        ``first`` is the index of the first element. Each stream inherits from its parts in ``bases``, if any. With
        ``reuse`` symbols are in buffers of this thread, until it encodes again. Raises RefusedError.
        """
        chunk = self._chunk(unit, first, originals)
        parts = [chunk.room(k, reuse=reuse) for k in range(len(unit.streams))]
        errors = self._begin(unit, originals) if measure and unit.measured else None
        done = errors.add_packed(originals, parts, fills=True) if errors else 0
        for k in chunk.alone:
            if not (done and unit.streams[k].lossy):
                parts[k] = chunk.encode(k, slice(0, chunk.numel), {}, parts[k], bases[k] if bases else None)
        if errors is None and not chunk.dependent:
            return parts, UnitErrors()
        return parts, chunk.measure(done, parts, errors, encodes=True)

    def decode(self, unit: Unit, first: int, originals: Sequence[X], parts: Sequence[Mapping[str, X]]) -> list[X]:
        """The decoded elements of every stream; the original itself for a lossless one."""
        chunk = self._chunk(unit, first, originals)
        return chunk.decode_all(slice(0, chunk.numel), parts, encodes=False, reuse=False)

    def measure(self, unit: Unit, first: int, originals: Sequence[X], parts: Sequence[Mapping[str, X]]) -> UnitErrors:
        """Measure the chunk that begins at element ``first``: one original and one set of parts for each stream.

        All must be on one device, which computes the errors.
        """
        errors = self._begin(unit, originals)
        done = errors.add_packed(originals, parts, fills=False)
        return self._chunk(unit, first, originals).measure(done, parts, errors, encodes=False)

    def _chunk(self, unit: Unit, first: int, originals: Sequence[X]) -> _Chunk[X]:
        x = originals[0]
        place = _Host(self.backend) if isinstance(x, np.ndarray) else _Device(x.device)
        return _Chunk(unit, first, originals, cast("_Place[X]", place), self._checkpoint)

    def _begin(self, unit: Unit, originals: Sequence[Any]) -> ChunkErrors:
        if self.backend == "numba" and isinstance(originals[0], np.ndarray):
            from ckpt8.compressing.measure_numba import BlockSums

            if BlockSums.fits(unit):
                return BlockSums(unit)
        return self.meter.begin(unit)


class _Chunk(Generic[X]):
    """The elements of a unit from ``first`` on: what of its streams a tile needs, by their place in the unit."""

    def __init__(self, unit: Unit, first: int, originals: Sequence[X], place: _Place[X], source: Checkpoint) -> None:
        self._at: _Place[X] = place
        self._originals: Sequence[X] = originals
        self.numel, self._first, self._streams = len(originals[0]), first, unit.streams
        number = {stream.index: k for k, stream in enumerate(unit.streams)}
        self._needed = [
            {name: number[index] for name, index in stream.codec.companion_storages.items()} for stream in unit.streams
        ]
        self.dependent = [k for k, stream in enumerate(unit.streams) if stream.codec.companions]
        self.alone = [k for k in range(len(unit.streams)) if k not in self.dependent]
        self._expanded: dict[int, dict[str, X]] = {k: {} for k in range(len(unit.streams))}
        for k, stream in enumerate(unit.streams):
            for name, factors in stream.codec.factored.items():
                rows, columns = (
                    read_elements(source, storage, DType.FLOAT32, 0, storage.nbytes // DType.FLOAT32.itemsize)
                    for storage in (source.storages[factors.rows], source.storages[factors.columns])
                )
                self._expanded[k][name] = place.given(expand(factors, rows, columns, first, self.numel))

    def measure(
        self, done: int, parts: Sequence[Mapping[str, X]], errors: ChunkErrors | None, *, encodes: bool
    ) -> UnitErrors:
        """The errors of the chunk, if any are wanted; its first ``done`` elements are already in ``errors``.

        With ``encodes`` the parts of dependent streams are filled first. Tiles go through codecs and meter in turn.
        """
        by_torch = self._at.is_torch or (errors is not None and errors.by_torch)
        step = self._at.torch_tile if by_torch else max(self.numel, 1)
        for start in range(done, self.numel, step):
            run = slice(start, min(start + step, self.numel))
            tile = [
                stream.codec.tile(part, stream.spec.dtype, self._first, run)
                for stream, part in zip(self._streams, parts, strict=True)
            ]
            decoded = self.decode_all(run, tile, encodes=encodes, reuse=True)
            if errors:
                errors.add(self._first + start, [x[run] for x in self._originals], decoded, tile)
        return errors.result() if errors else UnitErrors()

    def room(self, k: int, *, reuse: bool) -> dict[str, X]:
        """Memory for the parts of a stream; with ``reuse`` the buffers of this thread for symbols.

        New memory for every chunk would take as long as encoding: the system has to clear it.
        """
        layout = self._streams[k].codec.layout(self._spec(k, self.numel))
        return {
            name: self._at.empty(part, f"{name} {k}" if reuse and part.is_symbols else None)
            for name, part in layout.items()
        }

    def encode(
        self,
        k: int,
        run: slice,
        decoded: Mapping[int, X],
        out: Mapping[str, X],
        inherited: Mapping[str, X] | None = None,
    ) -> dict[str, X]:
        """Encode a tile of a stream into ``out``; ``decoded`` has its companions. Raises RefusedError."""
        stream, companions = self._streams[k], self._companions(k, run, decoded)
        codec, x, spec = stream.codec, self._originals[k][run], self._spec(k, run.stop - run.start)
        if codec.compares_originals:
            for name, other in self._needed[k].items():
                companions[f"original_{name}"] = self._at.floats(
                    self._originals[other][run], self._streams[other].spec.dtype
                )
            for name in self._expanded[k]:
                companions[f"original_{name}"] = companions[name]
        how = {"first": self._first + run.start, "companions": companions, "inherited": inherited, "out": out}
        try:
            return self._at.encode(codec, x, spec, **how)
        except RefusedError as exc:
            exc.storage = stream.index
            raise

    def decode(self, k: int, run: slice, decoded: Mapping[int, X], parts: Mapping[str, X], *, reuse: bool) -> X:
        """A tile of a stream as it comes back; with ``reuse`` in a buffer of this thread, until it decodes again."""
        stream, x = self._streams[k], self._originals[k][run]
        if not stream.lossy:
            return x
        spec = self._spec(k, run.stop - run.start)
        out = self._at.empty(PartSpec(spec.dtype, spec.numel), f"decoded {k}" if reuse else None)
        how = {"first": self._first + run.start, "companions": self._companions(k, run, decoded)}
        self._at.decode(stream.codec, parts, spec, out, **how)
        return out

    def decode_all(self, run: slice, parts: Sequence[Mapping[str, X]], *, encodes: bool, reuse: bool) -> list[X]:
        """A tile of every stream as it comes back, from its own ``parts``.

        With ``encodes`` those of dependent streams are filled first.
        """
        decoded: dict[int, X] = {}
        for k in (*self.alone, *self.dependent):
            if encodes and k in self.dependent:
                self.encode(k, run, decoded, parts[k])
            decoded[k] = self.decode(k, run, decoded, parts[k], reuse=reuse)
        return [decoded[k] for k in range(len(parts))]

    def _spec(self, k: int, numel: int) -> TensorSpec:
        spec = self._streams[k].spec
        return TensorSpec(spec.name, spec.role, spec.dtype, (numel,))

    def _companions(self, k: int, run: slice, decoded: Mapping[int, X]) -> dict[str, X]:
        """The companions of a tile of a stream in fp32, as they come back."""
        values = {
            name: self._at.floats(decoded[other], self._streams[other].spec.dtype)
            for name, other in self._needed[k].items()
        }
        return values | {name: x[run] for name, x in self._expanded[k].items()}
