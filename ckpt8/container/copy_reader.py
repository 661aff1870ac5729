"""Reads the elements of copies, which are rounded from masters that are other storages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from ckpt8.codecs import Codec
from ckpt8.codecs.copied import Run
from ckpt8.codecs.rounded_copy import fill_padding, round_to
from ckpt8.container import layout
from ckpt8.core.tensors import DType, Parts

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch


class Chunks(Protocol):
    """An open container."""

    def codec(self, storage: int) -> Codec:
        """The codec of a storage."""

    def read_parts(self, storage: int, chunk: int, only: Collection[str] | None = None) -> Parts:
        """The parts of one chunk."""

    def read_chunk(self, storage: int, chunk: int) -> torch.Tensor:
        """One decoded chunk."""


def read_copy(chunks: Chunks, runs: Iterable[Run], numel: int, dtype: DType) -> torch.Tensor:
    """The ``numel`` elements of ``runs``, rounded to ``dtype``. Raises InputError for damage of a master."""
    from ckpt8.container import frames

    out = frames.host_bytes(numel * dtype.itemsize).view(dtype.torch)
    at, last, rounded = 0, (-1, -1), out
    for storage, start, count in runs:
        begin, stop = at, at + count
        if storage is None:
            fill_padding(out[begin:stop], start)
            at = stop
            continue
        while at < stop:
            chunk, into = divmod(start + at - begin, layout.FRAME)
            if (storage, chunk) != last:
                last, rounded = (storage, chunk), _rounded_chunk(chunks, storage, chunk, dtype)
            length = min(stop - at, layout.FRAME - into)
            out[at : at + length] = rounded[into : into + length]
            at += length
    return out


def _rounded_chunk(chunks: Chunks, storage: int, chunk: int, dtype: DType) -> torch.Tensor:
    """One chunk of a master rounded to ``dtype``; to bf16 from its upper parts alone where it has them."""
    codec = chunks.codec(storage)
    if codec.upper_parts and dtype is DType.BFLOAT16:
        return codec.upper(chunks.read_parts(storage, chunk, codec.upper_parts))
    return round_to(dtype, chunks.read_chunk(storage, chunk))
