"""Encodes, decodes and measures the streams of a unit together: first those that other streams need as companions.

A chunk goes tile by tile through codecs and meter on a CPU, where a tile fits the cache, and as a whole on a GPU, where
each tile would cost a wait for its result. What kernels measure from its parts is decoded nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs.base import TILE
from ckpt8.codecs.vscaled.statistics import expand
from ckpt8.compressing.measure import ChunkErrors, ErrorMeter, UnitErrors
from ckpt8.compressing.plan import Unit, read_elements
from ckpt8.core.arrays import as_array
from ckpt8.core.backend import Backend, for_checkpoint, on_cpu, resolve
from ckpt8.core.errors import RefusedError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType, Parts, TensorSpec
from ckpt8.core.workers import scratch_elements


class Lockstep:
    """Encodes, decodes and measures units of one checkpoint. Thread-safe.

    ``backend`` is the one that codecs use for tensors on the CPU: the last digits of sums depend on it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.backend = for_checkpoint(sum(storage.nbytes for storage in checkpoint.storages))
        self.meter = ErrorMeter(checkpoint)

    def encode(
        self,
        unit: Unit,
        first: int,
        originals: Sequence[torch.Tensor],
        bases: Sequence[Parts | None] | None = None,
        *,
        measure: bool = False,
        reuse: bool = False,
    ) -> tuple[list[Parts], UnitErrors]:
        """The parts of every stream, and the errors of what is measured; none without ``measure``.

        ``first`` is the index of the first element. Each stream inherits from its parts in ``bases``, if any. With
        ``reuse`` symbols are in buffers of this thread, until it encodes again. Raises RefusedError.
        """
        chunk = _Chunk(unit, first, originals, self.backend, self._checkpoint)
        parts = [chunk.room(k, reuse=reuse) for k in range(len(unit.streams))]
        errors = self._begin(unit, chunk) if measure and unit.measured else None
        done = errors.add_packed(originals, parts, fills=True) if errors else 0
        for k in chunk.alone:
            parts[k] = chunk.encode_rest(k, done, parts[k], bases[k] if bases else None)
        if errors is None and not chunk.dependent:
            return parts, UnitErrors()
        return parts, chunk.measure(done, parts, errors, encodes=True)

    def decode(
        self, unit: Unit, first: int, originals: Sequence[torch.Tensor], parts: Sequence[Parts]
    ) -> list[torch.Tensor]:
        """The decoded elements of every stream; the original itself for a lossless one."""
        chunk = _Chunk(unit, first, originals, self.backend, self._checkpoint)
        return chunk.decode_all(slice(0, chunk.numel), parts, encodes=False, reuse=False)

    def measure(self, unit: Unit, first: int, originals: Sequence[torch.Tensor], parts: Sequence[Parts]) -> UnitErrors:
        """Measure the chunk that begins at element ``first``: one original and one set of parts for each stream.

        All must be on one device, which computes the errors.
        """
        chunk = _Chunk(unit, first, originals, self.backend, self._checkpoint)
        errors = self._begin(unit, chunk)
        return chunk.measure(errors.add_packed(originals, parts, fills=False), parts, errors, encodes=False)

    def _begin(self, unit: Unit, chunk: _Chunk) -> ChunkErrors:
        blocks = None
        if chunk.backend == "numba":
            from ckpt8.compressing.measure_numba import BlockSums

            blocks = BlockSums(unit) if BlockSums.fits(unit) else None
        return self.meter.begin(unit, blocks)


class _Chunk:
    """The elements of a unit from ``first`` on: what of its streams a tile needs, by their place in the unit."""

    def __init__(
        self, unit: Unit, first: int, originals: Sequence[torch.Tensor], backend: Backend | None, source: Checkpoint
    ) -> None:
        self.numel, self._device = len(originals[0]), originals[0].device
        self.backend = resolve(on_cpu(backend, self._device), self._device, self.numel)
        self._first, self._originals, self._streams = first, originals, unit.streams
        place = {stream.index: k for k, stream in enumerate(unit.streams)}
        self._needed = [
            {name: place[index] for name, index in stream.codec.companion_storages.items()} for stream in unit.streams
        ]
        self.dependent = [k for k, stream in enumerate(unit.streams) if stream.codec.companions]
        self.alone = [k for k in range(len(unit.streams)) if k not in self.dependent]
        self._expanded: dict[int, dict[str, torch.Tensor]] = {k: {} for k in range(len(unit.streams))}
        for k, stream in enumerate(unit.streams):
            for name, factors in stream.codec.factored.items():
                rows, columns = (
                    read_elements(source, storage, DType.FLOAT32, 0, storage.nbytes // DType.FLOAT32.itemsize)
                    for storage in (source.storages[factors.rows], source.storages[factors.columns])
                )
                elements = expand(factors, as_array(rows), as_array(columns), first, self.numel)
                self._expanded[k][name] = torch.from_numpy(elements).to(self._device)

    def measure(self, done: int, parts: Sequence[Parts], errors: ChunkErrors | None, *, encodes: bool) -> UnitErrors:
        """The errors of the chunk, if any are wanted; its first ``done`` elements are already in ``errors``.

        With ``encodes`` the parts of dependent streams are filled first. Tiles go through codecs and meter in turn.
        """
        step = TILE if self._device.type == "cpu" else self.numel
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

    def room(self, k: int, *, reuse: bool) -> Parts:
        """Memory for the parts of a stream; with ``reuse`` the buffers of this thread for symbols.

        New memory for every chunk would take as long as encoding: the system has to clear it.
        """
        layout = self._streams[k].codec.layout(self._spec(k, self.numel))
        reuse &= self._device.type == "cpu"
        return {
            name: scratch_elements(f"{name} {k}", part.dtype.torch, part.numel)
            if reuse and part.is_symbols
            else self._originals[k].new_empty(part.numel, dtype=part.dtype.torch)
            for name, part in layout.items()
        }

    def encode_rest(self, k: int, done: int, out: Parts, inherited: Parts | None) -> Parts:
        """The parts of a stream; the first ``done`` elements are already in ``out`` if it is lossy.

        Raises RefusedError.
        """
        stream = self._streams[k]
        run = slice(done if stream.lossy else 0, self.numel)
        if run.start == 0:
            return self.encode(k, run, {}, out, inherited)
        if run.start < run.stop:
            self.encode(k, run, {}, stream.codec.tile(out, stream.spec.dtype, self._first, run))
        return out

    def encode(
        self, k: int, run: slice, decoded: Mapping[int, torch.Tensor], out: Parts, inherited: Parts | None = None
    ) -> Parts:
        """Encode a tile of a stream into ``out``; ``decoded`` has its companions. Raises RefusedError."""
        stream, companions = self._streams[k], self._companions(k, run, decoded)
        codec, x = stream.codec, self._originals[k][run]
        if codec.compares_originals:
            here = {name: self._originals[place][run] for name, place in self._needed[k].items()}
            companions |= {f"original_{name}": value.float() for name, value in {**companions, **here}.items()}
        backend, first = self.backend if codec.has_kernels else None, self._first + run.start
        try:
            return codec.encode(x, backend=backend, first=first, companions=companions, inherited=inherited, out=out)
        except RefusedError as exc:
            exc.storage = stream.index
            raise

    def decode(
        self, k: int, run: slice, decoded: Mapping[int, torch.Tensor], parts: Parts, *, reuse: bool
    ) -> torch.Tensor:
        """A tile of a stream as it comes back; with ``reuse`` in a buffer of this thread, until it decodes again."""
        stream, x = self._streams[k], self._originals[k][run]
        if not stream.lossy:
            return x
        spec, codec, out = self._spec(k, run.stop - run.start), stream.codec, None
        if reuse and self._device.type == "cpu":
            out = scratch_elements(f"decoded {k}", spec.dtype.torch, spec.numel)
        backend, companions = self.backend if codec.has_kernels else None, self._companions(k, run, decoded)
        return codec.decode(parts, spec, out=out, backend=backend, first=self._first + run.start, companions=companions)

    def decode_all(self, run: slice, parts: Sequence[Parts], *, encodes: bool, reuse: bool) -> list[torch.Tensor]:
        """A tile of every stream as it comes back, from its own ``parts``.

        With ``encodes`` those of dependent streams are filled first.
        """
        decoded: dict[int, torch.Tensor] = {}
        for k in (*self.alone, *self.dependent):
            if encodes and k in self.dependent:
                self.encode(k, run, decoded, parts[k])
            decoded[k] = self.decode(k, run, decoded, parts[k], reuse=reuse)
        return [decoded[k] for k in range(len(parts))]

    def _spec(self, k: int, numel: int) -> TensorSpec:
        spec = self._streams[k].spec
        return TensorSpec(spec.name, spec.role, spec.dtype, (numel,))

    def _companions(self, k: int, run: slice, decoded: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The companions of a tile of a stream in fp32, as they come back."""
        values = {name: decoded[place].float() for name, place in self._needed[k].items()}
        return values | {name: x[run] for name, x in self._expanded[k].items()}
