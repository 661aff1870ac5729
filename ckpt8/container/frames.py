"""Frames: the stored form of 2^20 elements of one byte plane, each readable alone.

A part of one byte per element is one plane; a wider part is cut into its bytes, most significant first. A frame is
an independent zstd frame with its content size, or the plane itself where zstd hardly makes it smaller; the
stored length tells which. The manifest holds the stored length and the crc32 of the stored bytes.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import zstandard

from ckpt8.codecs.lossless import RAW_PART
from ckpt8.container.checks import PartPlace, check_frame
from ckpt8.container.header import FRAME, MAX_WINDOW
from ckpt8.container.manifest import Packing, planes
from ckpt8.core.arrays import Array, Arrays, numpy_type
from ckpt8.core.errors import InputError, require
from ckpt8.core.files.source_file import SourceFile, crc32
from ckpt8.core.tensors import PartSpec
from ckpt8.core.workers import scratch, scratch_array

if TYPE_CHECKING:
    import torch

__all__ = ["FRAME", "bytes_of", "decode_part", "encode_part", "encode_parts", "host_bytes", "inflate"]

# A plane has no matches worth looking for. These settings leave zstd its Huffman stage and cost next to nothing;
# target_length must stay 0, or literals are stored raw.
_PLANE_SETTINGS = {
    "strategy": zstandard.STRATEGY_FAST,
    "window_log": 17,
    "hash_log": 6,
    "chain_log": 6,
    "search_log": 1,
    "min_match": 7,
    "target_length": 0,
}

SHORT_PLANE = 1 << 17
_SAMPLES, _SAMPLE_BYTES = 8, 1 << 12
WORTH_IT = 0.95
"""A plane that stays larger is stored as it is. Codes of first moments, 1.3 % smaller, took a tenth of all time; those
of most second moments, 4 % smaller, a twentieth."""

SYMBOLS_WORTH_IT = 0.99
"""A plane of symbols that stays larger is stored as it is: whoever asks for a budget asks for a small file."""


class _Zstd(threading.local):
    """The zstd contexts of one thread, which all its frames share."""

    def __init__(self) -> None:
        self.raw = zstandard.ZstdCompressor(level=3)
        self.plane = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(**_PLANE_SETTINGS))
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW)


_zstd = _Zstd()


def host_bytes(length: int) -> torch.Tensor:
    """Flat uint8 memory of the host, whatever torch's default device is, for ``bytes_of``."""
    import torch

    return torch.empty(length, dtype=torch.uint8, device="cpu")


@cache
def _bytes_type(length: int) -> Any:
    return ctypes.c_char * length


def bytes_of(x: Array | torch.Tensor) -> memoryview:
    """The memory of an array or a contiguous CPU tensor, which it keeps alive, without a copy."""
    if isinstance(x, np.ndarray):
        return x.view(np.uint8).data
    length = x.numel() * x.element_size()
    if not length:
        return memoryview(b"")
    # Making a type for every length would take longer than everything else here.
    memory = _bytes_type(1 << (length - 1).bit_length()).from_address(x.data_ptr())
    memory.owner = x
    return memoryview(memory).cast("B")[:length]


Frames = list[tuple[bytes | memoryview, int]]
"""The stored bytes and the crc32 of each frame."""


def encode_part(name: str, part: Array, packing: Packing | None = None, *, copy: bool = False) -> Frames:
    """(stored bytes, crc32) of the frame of every plane of one part.

    Symbols are a row of planes, and ``packing`` says how. A plane that zstd does not make smaller is a view of the
    part, or a copy with ``copy``.
    """
    size, content = part.itemsize, part.view(np.uint8)
    if packing is not None:
        planes = split_row(content, packing)
    elif size == 1:
        planes = [content]
    else:
        # Column by column: as one transposed copy it would take seven times as long.
        columns = content.reshape(-1, size)
        planes = [np.ascontiguousarray(columns[:, k]) for k in reversed(range(size))]
    compressor = _zstd.raw if name == RAW_PART else _zstd.plane
    worth = WORTH_IT if packing is None else SYMBOLS_WORTH_IT
    frames: Frames = []
    for plane in planes:
        view = plane.data
        stored: bytes | memoryview = compressor.compress(view) if _is_compressible(view, compressor, worth) else view
        if len(stored) >= len(view):
            # bytes(view) would hold the lock.
            stored = plane.copy().data if copy else view
        frames.append((stored, crc32(stored)))
    return frames


def split_row(row: Array, packing: Packing) -> list[Array]:
    """The planes in a row of them."""
    lengths, at = packing.plane_lengths, 0
    planes = []
    for length in lengths:
        planes.append(row[at : at + length])
        at += length
    return planes


def encode_parts(parts: Arrays, packings: Mapping[str, Packing], *, copy: bool = False) -> dict[str, Frames]:
    """The frames of every part by name; ``packings`` say how symbols are packed. ``copy``: see ``encode_part``."""
    return {name: encode_part(name, part, packings.get(name), copy=copy) for name, part in parts.items()}


def _is_compressible(plane: memoryview, compressor: zstandard.ZstdCompressor, worth: float) -> bool:
    """Whether zstd makes a plane smaller than ``worth`` of it. Of a long plane it tries a sample."""
    if len(plane) < SHORT_PLANE:
        return len(plane) > 0
    sample = b"".join(plane[start : start + _SAMPLE_BYTES] for start in range(0, len(plane), len(plane) // _SAMPLES))
    return len(compressor.compress(sample)) < worth * len(sample)


def inflate(stored: memoryview, plane: memoryview, where: str) -> None:
    """Fill ``plane`` from a compressed frame. Raises InputError when the frame is not of its length."""
    try:
        declared = zstandard.get_frame_parameters(stored)
        require(
            declared.content_size == len(plane) and declared.window_size <= MAX_WINDOW,
            f"{where}: frame does not declare the {len(plane)} bytes it must hold",
        )
        got = _zstd.decompressor.stream_reader(stored).readinto(plane)
    except zstandard.ZstdError as exc:
        raise InputError(f"{where}: frame cannot be decompressed: {exc}") from exc
    require(got == len(plane), f"{where}: frame holds {got} bytes, expected {len(plane)}")


def decode_part(row: Array, spec: PartSpec) -> Array:
    """The part whose inflated planes ``row`` holds one behind the other, flat; symbols as that row."""
    if spec.is_symbols:
        return row
    size = spec.dtype.itemsize
    if size > 1:
        planes, row = row.reshape(size, -1), np.empty_like(row)
        # Column by column: as one transposed copy it would take several times as long.
        for k, plane in enumerate(reversed(planes)):
            row[k::size] = plane
    return row.view(numpy_type(spec.dtype))


def read_part(
    file: SourceFile, place: PartPlace | None, spec: PartSpec, chunk: int, where: str, *, reuse: bool = False
) -> tuple[Array, Packing | None]:
    """One part of a chunk; if it holds symbols, a row of planes and how they are packed.

    With ``reuse`` this row is in a buffer of this thread, until it reads another so. Raises InputError, which begins
    with ``where``, for damage.
    """
    if place is None:
        raise InputError(f"{where}: is not to be found")
    count = planes(spec)
    packing = Packing(place.table.modes[chunk], spec.numel) if spec.is_symbols else None
    lengths = [spec.nbytes // count] * count if packing is None else packing.plane_lengths
    total, at = sum(lengths), 0
    row = scratch_array("row", np.uint8, total) if reuse and packing is not None else np.empty(total, np.uint8)
    view = row.data
    for k, length in enumerate(lengths, chunk * count):
        plane, size = view[at : at + length], place.table.lengths[k]
        # A plane that zstd did not make smaller is stored as it is.
        stored = plane if size == length else scratch("stored", size)
        file.read_into(place.offsets[k], stored)
        check_frame(stored, place.table.crcs[k], where)
        if size != length:
            inflate(stored, plane, where)
        at += length
    return decode_part(row, spec), packing
