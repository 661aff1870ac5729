"""Numbers in tensors of one element, such as steps, and plain settings of optimizers."""

from __future__ import annotations

import struct

from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef
from ckpt8.core.tensors import DType

_SCALARS = {
    DType.FLOAT32: "<f",
    DType.FLOAT64: "<d",
    DType.INT32: "<i",
    DType.INT64: "<q",
}


def read_scalar(checkpoint: Checkpoint, storage: StorageInfo, ref: TensorRef) -> float | None:
    """The value of a tensor of one element in ``storage``; None for another tensor or element type."""
    code = _SCALARS.get(ref.dtype)
    position = ref.offset * ref.dtype.itemsize
    if code is None or ref.numel != 1 or position + ref.dtype.itemsize > storage.nbytes:
        return None
    buffer = bytearray(ref.dtype.itemsize)
    checkpoint.read_into(storage.offset + position, memoryview(buffer))
    value: float = struct.unpack(code, buffer)[0]
    return value


def is_setting(value: object) -> bool:
    """Whether a value is a plain setting of an optimizer: a number, a text, None, or a list or tuple of these."""
    if isinstance(value, (tuple, list)):
        return all(is_setting(each) for each in value)
    return isinstance(value, (bool, int, float, str, type(None)))
