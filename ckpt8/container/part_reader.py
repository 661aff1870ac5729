"""Reads one part of a chunk: every frame of it, checked, and inflated to its place in a row of planes."""

from __future__ import annotations

import torch

from ckpt8.container import frames, layout
from ckpt8.container.places import PartPlace
from ckpt8.container.symbol_modes import Packing
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import SourceFile
from ckpt8.core.tensors import PartSpec
from ckpt8.core.workers import scratch, scratch_elements


def read_part(
    file: SourceFile, place: PartPlace | None, spec: PartSpec, chunk: int, where: str, *, reuse: bool = False
) -> tuple[torch.Tensor, Packing | None]:
    """One part of a chunk; if it holds symbols, a row of planes and how they are packed.

    With ``reuse`` this row is in a buffer of this thread, until it reads another so. Raises InputError, which begins
    with ``where``, for damage.
    """
    if place is None:
        raise InputError(f"{where}: is not to be found")
    count = layout.planes(spec)
    packing = Packing(place.table.modes[chunk], spec.numel) if spec.is_symbols else None
    lengths = [spec.nbytes // count] * count if packing is None else packing.plane_lengths
    total, at = sum(lengths), 0
    row = scratch_elements("row", torch.uint8, total) if reuse and packing is not None else frames.host_bytes(total)
    view = frames.bytes_of(row)
    for k, length in enumerate(lengths, chunk * count):
        plane, size = view[at : at + length], place.table.lengths[k]
        # A plane that zstd did not make smaller is stored as it is.
        stored = plane if size == length else scratch("stored", size)
        file.read_into(place.offsets[k], stored)
        frames.check(stored, place.table.crcs[k], where)
        if size != length:
            frames.inflate(stored, plane, where)
        at += length
    return frames.decode_part(row, spec), packing
