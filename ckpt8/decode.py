"""Decoding of whole storages into memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt8.container import frames, layout
from ckpt8.container.reader import ContainerReader

if TYPE_CHECKING:
    import torch


def decode_storage(reader: ContainerReader, storage: int) -> torch.Tensor:
    """One storage as a flat CPU tensor. Raises InputError that names the tensor where it is damaged."""
    import torch

    record = reader.manifest.storages[storage]
    out = torch.empty(record.numel, dtype=record.dtype.torch, device="cpu")
    for chunk in range(layout.chunk_count(record.numel)):
        start = chunk * frames.FRAME
        reader.decode_chunk(storage, chunk, out[start : start + frames.FRAME])
    return out
