"""The companions of chunks that row and column statistics in a container give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ckpt8.codecs import Codec
from ckpt8.container.layout import FRAME
from ckpt8.core.tensors import Parts, TensorSpec

if TYPE_CHECKING:
    import torch


class _Reader(Protocol):
    def codec(self, storage: int) -> Codec: ...

    def chunk_spec(self, storage: int, chunk: int) -> TensorSpec: ...

    def read_chunk(self, storage: int, chunk: int) -> torch.Tensor: ...


def expanded(reader: _Reader, storage: int, chunk: int) -> Parts:
    """The companions of a chunk that row and column statistics give, in fp32. Raises InputError for damage."""
    factored = reader.codec(storage).factored
    if not factored:
        return {}
    from ckpt8.codecs.factored import expand

    first, numel = chunk * FRAME, reader.chunk_spec(storage, chunk).numel
    return {
        name: expand(each, reader.read_chunk(each.rows, 0), reader.read_chunk(each.columns, 0), first, numel)
        for name, each in factored.items()
    }
