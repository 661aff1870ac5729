"""Encodes and measures a chunk of a unit under a budget tile by tile, in the memory of its originals.

Whole, a chunk would take three times as much: originals, symbols, and what these decode to. Symbols take four bytes, as
fp32 does, and the place of originals that have been measured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ckpt8.codecs.base import Companions
from ckpt8.compressing.lockstep import decode_stream, symbols
from ckpt8.compressing.one_pass import tiles_of
from ckpt8.compressing.plan import Stream
from ckpt8.compressing.unit_errors import TiledErrors
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts


def encode(
    streams: Sequence[Stream],
    originals: Sequence[torch.Tensor],
    first: int,
    bases: Sequence[Parts | None],
    errors: TiledErrors | None,
) -> list[Parts]:
    """As ``lockstep.encode`` with ``reuse``, for streams on the CPU whose codecs are those of a budget, with numba.

    It overwrites ``originals``, in which parts may be afterwards. Adds to ``errors`` on the way. Raises RefusedError.
    """
    order = sorted(range(len(streams)), key=lambda k: bool(streams[k].codec.companions))
    found = {k: _begin(k, streams[k], originals[k], first, bases[k]) for k in order}
    for run in tiles_of(len(originals[0])):
        xs, at, there = [x[run] for x in originals], first + run.start, dict[int, torch.Tensor]()
        encoded = {}
        for k in order:
            stream, known = streams[k], _companions(streams, k, xs, there)
            if stream.codec.by_chunk:
                parts = stream.codec.tile(found[k], stream.spec.dtype, first, run)
            else:
                in_place = xs[k].element_size() == torch.int32.itemsize
                out = symbols(stream, len(xs[k]), k) if in_place else {name: x[run] for name, x in found[k].items()}
                parts = encoded[k] = _encode(stream, xs[k], at, known, None, out)
            decoded = {name: x for name, x in known.items() if not name.startswith("original_")}
            there[k] = decode_stream(stream, parts, xs[k], at, "numba", decoded, k)
        if errors is not None:
            errors.add(at, xs, [there[k] for k in range(len(streams))])
        for k, parts in encoded.items():
            for name, part in parts.items():
                found[k][name][run] = part
    return [found[k] for k in range(len(streams))]


def _begin(k: int, stream: Stream, x: torch.Tensor, first: int, base: Parts | None) -> Parts:
    """The parts of a codec that takes a chunk whole; of another one where its symbols are to be."""
    if stream.codec.by_chunk:
        return _encode(stream, x, first, {}, base, symbols(stream, len(x), k))
    if x.element_size() == torch.int32.itemsize:
        return {name: x.view(torch.int32) for name in stream.codec.layout(stream.spec)}
    return symbols(stream, len(x), k)


def _companions(
    streams: Sequence[Stream], k: int, originals: Sequence[torch.Tensor], decoded: dict[int, torch.Tensor]
) -> Companions:
    """The companions of stream ``k``, in fp32: as they come back, and as they were."""
    place = {stream.index: at for at, stream in enumerate(streams)}
    found = {}
    for name, index in streams[k].codec.companion_storages.items():
        found[name], found[f"original_{name}"] = decoded[place[index]].float(), originals[place[index]].float()
    return found


def _encode(
    stream: Stream, x: torch.Tensor, first: int, companions: Companions, inherited: Parts | None, out: Parts
) -> Parts:
    try:
        return stream.codec.encode(x, backend="numba", first=first, companions=companions, inherited=inherited, out=out)
    except RefusedError as exc:
        exc.storage = stream.index
        raise
