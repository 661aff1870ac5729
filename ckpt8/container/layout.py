"""Where everything of a storage lies: chunks of 2^20 elements, slabs of whole chunks, one entry per part and slab."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ckpt8.codecs import Codec
from ckpt8.container.symbol_modes import PLANES
from ckpt8.core.tensors import PartSpec, TensorSpec

FRAME = 1 << 20
"""Elements of a storage that one frame covers."""

MAX_WINDOW = 1 << 24
"""The most bytes that the decoder of a zstd frame keeps."""

SLAB = 1 << 24
"""Elements in a slab unless the header would grow past the limit of safetensors."""

PACK = 1 << 16
"""The most elements of all storages that share entries: what one damaged frame can lose of them."""


def chunk_count(numel: int) -> int:
    """Number of chunks of a storage."""
    return -(-numel // FRAME)


def chunk_spec(spec: TensorSpec, chunk: int) -> TensorSpec:
    """The specification of one chunk of a storage: FRAME elements, the last one fewer."""
    return replace(spec, shape=(min(FRAME, spec.numel - chunk * FRAME),))


def slab_chunks(numel: int, slab: int) -> list[range]:
    """The chunks of every slab, in order."""
    total, step = chunk_count(numel), slab // FRAME
    return [range(first, min(first + step, total)) for first in range(0, total, step)]


def entry_name(storage: str, part: str, slab: int, slabs: int) -> str:
    """Name of the entry of one part of one slab; the number is left out where there is only one slab."""
    return f"{storage}/{part}" if slabs == 1 else f"{storage}/{part}@{slab}"


def pack_entry(pack: str, part: str) -> str:
    """Name of the entry of one part of a pack. Names of other entries have a slash behind that of their storage."""
    return f"{pack}:{part}"


def pack_layout(codec: Codec, spec: TensorSpec, numels: Iterable[int]) -> dict[str, tuple[PartSpec, list[int]]]:
    """For each part of a pack its specification, and the first element of every storage in it and the number of all.

    ``spec`` gives role and element type. A storage is encoded on its own; the parts follow each other.
    """
    parts = codec.layout(replace(spec, shape=(0,)))
    sizes: dict[int, list[int]] = {}
    starts: list[list[int]] = [[0] for _ in parts]
    for numel in numels:
        if numel not in sizes:
            sizes[numel] = [part.numel for part in codec.layout(replace(spec, shape=(numel,))).values()]
        for found, size in zip(starts, sizes[numel], strict=True):
            found.append(found[-1] + size)
    return {
        name: (replace(part, numel=found[-1]), found) for (name, part), found in zip(parts.items(), starts, strict=True)
    }


def entry_names(codec: Codec, spec: TensorSpec, slab: int) -> list[str]:
    """Names of all entries of a storage in the order in which they are written."""
    slabs = len(slab_chunks(spec.numel, slab))
    return [entry_name(spec.name, part, k, slabs) for k in range(slabs) for part in codec.layout(spec)]


def planes(part: PartSpec) -> int:
    """Frames that one chunk of a part takes: one for each byte of its elements, some of them empty for symbols."""
    return PLANES if part.is_symbols else part.dtype.itemsize
