"""Numbers in tensors of one element, such as steps, and plain settings of optimizers."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef
from ckpt8.core.tensors import DType

_SCALARS = {
    DType.FLOAT32: "<f",
    DType.FLOAT64: "<d",
    DType.FLOAT16: "<e",
    DType.BFLOAT16: "<H",
    DType.INT32: "<i",
    DType.INT64: "<q",
}

_MOST_NUMBERS = 8
"""The most numbers that one setting has."""


def read_scalar(checkpoint: Checkpoint, storage: StorageInfo, ref: TensorRef) -> float | None:
    """The value of a tensor of one element in ``storage``; None for another tensor or element type."""
    position = ref.offset * ref.dtype.itemsize
    if ref.dtype not in _SCALARS or ref.numel != 1 or position + ref.dtype.itemsize > storage.nbytes:
        return None
    buffer = bytearray(ref.dtype.itemsize)
    checkpoint.read_into(storage.offset + position, memoryview(buffer))
    return number_of(ref.dtype, bytes(buffer))


def number_of(dtype: DType, content: bytes) -> float | None:
    """The value of one element; None for other element types."""
    code = _SCALARS.get(dtype)
    if code is None:
        return None
    if dtype is DType.BFLOAT16:
        content, code = bytes(2) + content, "<f"
    value: float = struct.unpack(code, content)[0]
    return value


def read_settings(
    checkpoint: Checkpoint, storages: Mapping[str, StorageInfo], group: Mapping[Any, Any]
) -> Mapping[Any, Any]:
    """``group`` with numbers in place of tensors of one element, alone or in a short list; ``storages`` by key.

    torch keeps a learning rate or betas as tensors where the caller gave tensors.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, TensorRef) and value.numel == 1 and value.key in storages:
            number = read_scalar(checkpoint, storages[value.key], value)
            return value if number is None else number
        return value

    def setting(value: Any) -> Any:
        if isinstance(value, (list, tuple)) and len(value) <= _MOST_NUMBERS:
            return tuple(map(plain, value))
        return plain(value)

    return {key: value if key == "params" else setting(value) for key, value in group.items()}


def is_setting(value: object) -> bool:
    """Whether a value is a plain setting of an optimizer: a number, a text, None, or a list or tuple of these."""
    # Not deeper: a list of a file may hold itself.
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(each, (bool, int, float, str, type(None))) for each in values)
