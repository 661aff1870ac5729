"""Decodes chunks into new tensors, and puts copies together from the chunks of their masters."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

import torch

from ckpt8.codecs import Codec
from ckpt8.codecs.base import Run
from ckpt8.codecs.split24.reference import round_masters
from ckpt8.container.frames import FRAME
from ckpt8.container.manifest import Manifest
from ckpt8.core.tensors import Parts


class Chunks(Protocol):
    """The stored chunks of an open container."""

    manifest: Manifest

    def codec(self, storage: int) -> Codec:
        """The codec of a storage."""

    def read_parts(self, storage: int, chunk: int, only: Collection[str] | None = None) -> Parts:
        """The parts of one chunk, or those named."""

    def decode_chunk(self, storage: int, chunk: int, out: torch.Tensor) -> Parts:
        """Decode one chunk into ``out``."""


def decode_chunk(reader: Chunks, storage: int, chunk: int) -> torch.Tensor:
    """One chunk as a flat CPU tensor. Raises InputError for damage."""
    record = reader.manifest.storages[storage]
    out = torch.empty(min(FRAME, record.numel - chunk * FRAME), dtype=record.dtype.torch, device="cpu")
    reader.decode_chunk(storage, chunk, out)
    return out


def decode_storage(reader: Chunks, storage: int) -> torch.Tensor:
    """One storage as a flat CPU tensor. Raises InputError that names the tensor where it is damaged."""
    record = reader.manifest.storages[storage]
    out = torch.empty(record.numel, dtype=record.dtype.torch, device="cpu")
    for chunk, start in enumerate(range(0, record.numel, FRAME)):
        reader.decode_chunk(storage, chunk, out[start : start + FRAME])
    return out


def read_copy(reader: Chunks, runs: Iterable[Run], numel: int) -> torch.Tensor:
    """The ``numel`` elements of ``runs``, bf16. Raises InputError for damage of a master."""
    out = torch.empty(numel, dtype=torch.bfloat16, device="cpu")
    at, last, rounded = 0, (-1, -1), out
    for storage, start, count in runs:
        begin, stop = at, at + count
        if storage is None:
            fill_padding(out[begin:stop], start)
            at = stop
            continue
        while at < stop:
            chunk, into = divmod(start + at - begin, FRAME)
            if (storage, chunk) != last:
                last, rounded = (storage, chunk), _rounded_chunk(reader, storage, chunk)
            length = min(stop - at, FRAME - into)
            out[at : at + length] = rounded[into : into + length]
            at += length
    return out


def fill_padding(out: torch.Tensor, bits: int) -> None:
    """Give every element of a bf16 tensor the 16 ``bits``."""
    out.view(torch.int16).fill_(bits - (bits >> 15 << 16))


def _rounded_chunk(reader: Chunks, storage: int, chunk: int) -> torch.Tensor:
    """One chunk of a master rounded to bf16, from its upper parts alone where it has them."""
    codec = reader.codec(storage)
    if codec.upper_parts:
        return codec.upper(reader.read_parts(storage, chunk, codec.upper_parts))
    return round_masters(decode_chunk(reader, storage, chunk))
