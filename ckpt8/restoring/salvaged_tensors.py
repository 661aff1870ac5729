"""Writes tensors of a container to a safetensors file, where their own file cannot be written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch

from ckpt8.checkpoint.readers.safetensors import DTYPES
from ckpt8.container import frames, header
from ckpt8.container.decoding import decode_storage
from ckpt8.container.frames import bytes_of
from ckpt8.container.manifest import TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.files.atomic import Guard
from ckpt8.core.files.write_at import write_at
from ckpt8.core.tensors import DType

_LABELS: dict[DType, str] = {dtype: label for label, dtype in DTYPES.items() if dtype is not DType.FLOAT4_E2M1FN_X2}


class TensorFile:
    """A safetensors file of those ``tensors`` that the format can hold and that lie inside their storage.

    ``names`` are the names of these tensors.
    """

    def __init__(self, reader: ContainerReader, tensors: Sequence[TensorRecord]) -> None:
        self._reader = reader
        self._tensors = [tensor for tensor in tensors if self._is_writable(tensor)]
        self.names = {tensor.name for tensor in self._tensors}

    def _is_writable(self, tensor: TensorRecord) -> bool:
        if tensor.flags or tensor.dtype not in _LABELS or tensor.name == header.METADATA:
            return False
        nbytes = self._reader.manifest.storages[tensor.storage].nbytes
        fits = not tensor.span or (tensor.offset + tensor.span) * tensor.dtype.itemsize <= nbytes
        return fits and tensor.nbytes <= nbytes

    def write(self, descriptor: int, guard: Guard) -> None:
        """Write the file from its start. Raises OutputError."""
        entries: dict[str, Any] = {}
        position = 0
        for tensor in self._tensors:
            stop = position + tensor.nbytes
            entries[tensor.name] = header.tensor_entry(_LABELS[tensor.dtype], tensor.shape, position, stop)
            position = stop
        contents = (bytes_of(content) for tensor in self._tensors for content in self._content(tensor))
        position = 0
        for view in chain([memoryview(header.render_safetensors(entries))], contents):
            with guard():
                write_at(descriptor, view, position)
            position += len(view)

    def _content(self, tensor: TensorRecord) -> Iterator[torch.Tensor]:
        """The elements in the order of the dimensions: chunk by chunk if stored in this order, else at once."""
        if not tensor.nbytes:
            return
        if not tensor.is_contiguous:
            flat = decode_storage(self._reader, tensor.storage).view(tensor.dtype.torch)
            yield flat.as_strided(tensor.shape, tensor.stride, tensor.offset).contiguous()
            return
        record = self._reader.manifest.storages[tensor.storage]
        start = tensor.offset * tensor.dtype.itemsize
        stop = start + tensor.nbytes
        step = frames.FRAME * record.dtype.itemsize
        for chunk in range(start // step, -(-stop // step)):
            content = self._reader.read_chunk(tensor.storage, chunk).view(torch.uint8)
            yield content[max(start - chunk * step, 0) : stop - chunk * step]
