"""Encodes and decodes the streams of a unit together: first those that other streams need as companions.

Under a budget a chunk is encoded and measured tile by tile, in the memory of its originals. Whole, it would take three
times as much: originals, symbols, and what these decode to. Symbols take four bytes, as fp32 does, and the place of
originals that have been measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs.base import Companions
from ckpt8.codecs.vscaled.reference import expand
from ckpt8.compressing.plan import Stream, read_elements
from ckpt8.compressing.unit_errors import TiledErrors, tiles_of
from ckpt8.core.backend import Backend, on_cpu
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import DType, Parts, TensorSpec
from ckpt8.core.workers import scratch_elements


def encode(
    streams: Sequence[Stream],
    originals: Sequence[torch.Tensor],
    first: int,
    backend: Backend | None,
    source: Checkpoint,
    bases: Sequence[Parts | None] = (),
    *,
    reuse: bool = False,
) -> list[Parts]:
    """The parts of every stream; ``first`` is the index of the first element. Raises RefusedError.

    Statistics that a codec needs are read from ``source``. Each stream inherits from its parts in ``bases``, if any.
    With ``reuse`` symbols are in buffers of this thread, until it encodes again.
    """
    parts: dict[int, Parts] = {}

    def decoded(k: int) -> torch.Tensor:
        return decode_stream(streams[k], parts[k], originals[k], first, backend, {}, k)

    place = {stream.index: k for k, stream in enumerate(streams)}
    for k, needed in _with_decoded(streams, originals, first, source, decoded):
        x, codec, companions = originals[k], streams[k].codec, dict(needed)
        if codec.compares_originals:
            companions |= {f"original_{name}": needed[name] for name in codec.factored}
            for name, index in codec.companion_storages.items():
                companions[f"original_{name}"] = originals[place[index]].float()
        asked = on_cpu(backend, x.device)
        inherited = bases[k] if bases else None
        try:
            out = symbols(streams[k], len(x), k) if reuse and x.device.type == "cpu" else {}
            parts[k] = codec.encode(x, backend=asked, first=first, companions=companions, inherited=inherited, out=out)
        except RefusedError as exc:
            exc.storage = streams[k].index
            raise
    return [parts[k] for k in range(len(streams))]


def decode(
    streams: Sequence[Stream],
    parts: Sequence[Parts],
    originals: Sequence[torch.Tensor],
    first: int,
    backend: Backend | None,
    source: Checkpoint,
    *,
    reuse: bool = False,
) -> list[torch.Tensor]:
    """The decoded elements of every stream; the original itself for a lossless one.

    With ``reuse`` they are in buffers of this thread, until it decodes again.
    """
    values: dict[int, torch.Tensor] = {}
    for k, companions in _with_decoded(streams, originals, first, source, values.__getitem__):
        values[k] = decode_stream(streams[k], parts[k], originals[k], first, backend, companions, k if reuse else None)
    return [values[k] for k in range(len(streams))]


def _with_decoded(
    streams: Sequence[Stream],
    originals: Sequence[torch.Tensor],
    first: int,
    source: Checkpoint,
    decoded: Callable[[int], torch.Tensor],
) -> Iterator[tuple[int, Companions]]:
    """The place of every stream and its companions in fp32; streams without companions come first."""
    place = {stream.index: k for k, stream in enumerate(streams)}
    for k in sorted(range(len(streams)), key=lambda k: bool(streams[k].codec.companions)):
        codec, x = streams[k].codec, originals[k]
        values = {name: decoded(place[index]).float() for name, index in codec.companion_storages.items()}
        for name, factors in codec.factored.items():
            rows, columns = (_read_statistic(source, index) for index in (factors.rows, factors.columns))
            values[name] = expand(factors, rows, columns, first, len(x)).to(x.device)
        yield k, values


def _read_statistic(source: Checkpoint, index: int) -> torch.Tensor:
    storage = source.storages[index]
    return read_elements(source, storage, DType.FLOAT32, 0, storage.nbytes // DType.FLOAT32.itemsize)


def symbols(stream: Stream, numel: int, k: int) -> Parts:
    """The buffers of this thread for the symbols of ``numel`` elements of stream ``k``.

    New memory for every chunk would take as long as encoding: the system has to clear it.
    """
    layout = stream.codec.layout(TensorSpec(stream.spec.name, stream.spec.role, stream.spec.dtype, (numel,)))
    return {
        name: scratch_elements(f"{name} {k}", part.dtype.torch, numel)
        for name, part in layout.items()
        if part.is_symbols
    }


def decode_stream(
    stream: Stream,
    parts: Parts,
    x: torch.Tensor,
    first: int,
    backend: Backend | None,
    companions: Companions,
    slot: int | None,
) -> torch.Tensor:
    """The elements of a chunk as they come back, in the buffer of this thread for ``slot`` if there is one."""
    if not stream.lossy:
        return x
    out = None
    if slot is not None and x.device.type == "cpu":
        out = scratch_elements(f"decoded {slot}", stream.spec.dtype.torch, len(x))
    spec = TensorSpec(stream.spec.name, stream.spec.role, stream.spec.dtype, (len(x),))
    used = on_cpu(backend, x.device)
    return stream.codec.decode(parts, spec, out=out, backend=used, first=first, companions=companions)


def encode_by_tile(
    streams: Sequence[Stream],
    originals: Sequence[torch.Tensor],
    first: int,
    bases: Sequence[Parts | None],
    errors: TiledErrors | None,
) -> list[Parts]:
    """The parts of every stream on the CPU, tile by tile with numba; the codecs are those of a budget.

    Symbols are in buffers of this thread, until it encodes again. It overwrites ``originals``, in which parts may be
    afterwards. Adds to ``errors`` on the way. Raises RefusedError.
    """
    order = sorted(range(len(streams)), key=lambda k: bool(streams[k].codec.companions))
    done = {k: _begin(k, streams[k], originals[k], first, bases[k]) for k in order}
    for run in tiles_of(len(originals[0])):
        xs, at, there = [x[run] for x in originals], first + run.start, dict[int, torch.Tensor]()
        encoded = {}
        for k in order:
            stream, known = streams[k], _companions(streams, k, xs, there)
            if stream.codec.by_chunk:
                parts = stream.codec.tile(done[k], stream.spec.dtype, first, run)
            else:
                in_place = xs[k].element_size() == torch.int32.itemsize
                out = symbols(stream, len(xs[k]), k) if in_place else {name: x[run] for name, x in done[k].items()}
                parts = encoded[k] = _encode_tile(stream, xs[k], at, known, None, out)
            decoded = {name: x for name, x in known.items() if not name.startswith("original_")}
            there[k] = decode_stream(stream, parts, xs[k], at, "numba", decoded, k)
        if errors is not None:
            errors.add(at, xs, [there[k] for k in range(len(streams))])
        for k, parts in encoded.items():
            for name, part in parts.items():
                done[k][name][run] = part
    return [done[k] for k in range(len(streams))]


def _begin(k: int, stream: Stream, x: torch.Tensor, first: int, base: Parts | None) -> Parts:
    """The parts of a codec that takes a chunk whole; of another one where its symbols are to be."""
    if stream.codec.by_chunk:
        return _encode_tile(stream, x, first, {}, base, symbols(stream, len(x), k))
    if x.element_size() == torch.int32.itemsize:
        return {name: x.view(torch.int32) for name in stream.codec.layout(stream.spec)}
    return symbols(stream, len(x), k)


def _companions(
    streams: Sequence[Stream], k: int, originals: Sequence[torch.Tensor], decoded: dict[int, torch.Tensor]
) -> Companions:
    """The companions of stream ``k``, in fp32: as they come back, and as they were."""
    place = {stream.index: at for at, stream in enumerate(streams)}
    values = {}
    for name, index in streams[k].codec.companion_storages.items():
        values[name], values[f"original_{name}"] = decoded[place[index]].float(), originals[place[index]].float()
    return values


def _encode_tile(
    stream: Stream, x: torch.Tensor, first: int, companions: Companions, inherited: Parts | None, out: Parts
) -> Parts:
    try:
        return stream.codec.encode(x, backend="numba", first=first, companions=companions, inherited=inherited, out=out)
    except RefusedError as exc:
        exc.storage = stream.index
        raise
