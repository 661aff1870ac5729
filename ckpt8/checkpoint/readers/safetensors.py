"""Reader of safetensors: the length of a header, a header of JSON, and the tensors one behind the other.

Every tensor is a storage of its own. The reader is as strict as the safetensors library: entries cover the data without
holes and overlaps, no name occurs twice, sizes follow from type and shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from ckpt8.checkpoint.readers.rebuild import MAX_DIMS, is_count
from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, TensorRef
from ckpt8.container.header import HEAD_BYTES, LENGTH_BYTES, MAX_HEADER, METADATA, begins_container, parse_safetensors
from ckpt8.core.errors import InputError, UnsupportedError, require
from ckpt8.core.files.source_file import SourceFile
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown

DTYPES: Mapping[str, DType] = {
    "F64": DType.FLOAT64,
    "F32": DType.FLOAT32,
    "F16": DType.FLOAT16,
    "BF16": DType.BFLOAT16,
    "I64": DType.INT64,
    "I32": DType.INT32,
    "I16": DType.INT16,
    "I8": DType.INT8,
    "U64": DType.UINT64,
    "U32": DType.UINT32,
    "U16": DType.UINT16,
    "U8": DType.UINT8,
    "BOOL": DType.BOOL,
    "C64": DType.COMPLEX64,
    "F8_E4M3": DType.FLOAT8_E4M3FN,
    "F8_E5M2": DType.FLOAT8_E5M2,
    "F8_E4M3FNUZ": DType.FLOAT8_E4M3FNUZ,
    "F8_E5M2FNUZ": DType.FLOAT8_E5M2FNUZ,
    "F8_E8M0": DType.FLOAT8_E8M0FNU,
    "F4": DType.FLOAT4_E2M1FN_X2,
}
"""Element types by their names in the format. F4 packs two elements of a row into a byte."""


def sniff(file: SourceFile) -> bool:
    """Whether the file starts with the length of a header and ``{``, and is no container of ckpt8."""
    head = file.read(0, min(HEAD_BYTES, file.source.length))
    fits = len(head) >= LENGTH_BYTES + 2 and int.from_bytes(head[:LENGTH_BYTES], "little") <= MAX_HEADER
    return fits and head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and not begins_container(head)


def read(file: SourceFile) -> OpenCheckpoint:
    """The structure of the file. Raises InputError for damage, UnsupportedError for an unknown element type."""
    where, size = str(file.source), file.source.length
    require(size >= LENGTH_BYTES, f"{where}: damaged safetensors file: it has {size} bytes")
    length = int.from_bytes(file.read(0, LENGTH_BYTES), "little")
    require(
        length <= MAX_HEADER, f"{where}: damaged safetensors file: its header of {length} bytes is over {MAX_HEADER}"
    )
    start = LENGTH_BYTES + length
    require(start <= size, f"{where}: cut off inside the header of a safetensors file; copy or download it again")
    metadata, header = parse_safetensors(file.read(LENGTH_BYTES, length), f"{where}: safetensors header")
    require(
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values()),
        f"{where}: damaged safetensors file: {METADATA} does not map names to texts",
    )
    tensors = {name: _tensor(name, entry, start, where) for name, entry in header.items()}
    storages = sorted((storage for _, storage in tensors.values()), key=lambda own: (own.offset, own.nbytes))
    _check_layout(storages, start, size, where)
    return OpenCheckpoint("safetensors", file, storages, {name: ref for name, (ref, _) in tensors.items()})


def _tensor(name: str, entry: object, start: int, where: str) -> tuple[TensorRef, StorageInfo]:
    match entry:
        case {"dtype": str(label), "shape": list(counts), "data_offsets": [first, last]}:
            if not all(map(is_count, (*counts, first, last))):
                raise InputError(f"{where}: tensor {shown(name)}: its shape or offsets are not counts")
        case _:
            raise InputError(f"{where}: tensor {shown(name)}: its header entry is malformed")
    if len(counts) > MAX_DIMS:
        raise InputError(f"{where}: tensor {shown(name)}: it has {len(counts)} dimensions, more than {MAX_DIMS}")
    dtype, shape = _dtype(label, counts, where, name)
    if first > last or prod(shape) * dtype.itemsize != last - first:
        raise InputError(
            f"{where}: tensor {shown(name)}: {label} of shape {shown(list(shape))} does not have the "
            f"{last - first} bytes that its offsets give it"
        )
    return TensorRef.whole(name, dtype, shape), StorageInfo(name, dtype, start + first, last - first)


def _dtype(label: str, shape: list[int], where: str, name: str) -> tuple[DType, tuple[int, ...]]:
    """The element type, and the shape as torch has it."""
    dtype = DTYPES.get(label)
    if dtype is None:
        raise UnsupportedError(
            f"{where}: tensor {shown(name)}: element type {shown(label)} is not known to this version of ckpt8"
        )
    packed = 2 if dtype is DType.FLOAT4_E2M1FN_X2 else 1
    if packed > 1 and (not shape or shape[-1] % packed):
        raise UnsupportedError(
            f"{where}: tensor {shown(name)}: {label} with rows of an odd length cannot be read by torch"
        )
    return dtype, (*shape[:-1], *(size // packed for size in shape[-1:]))


def _check_layout(storages: list[StorageInfo], start: int, size: int, where: str) -> None:
    """Raise InputError unless the tensors follow each other from the end of the header to the end of the file."""
    position = start
    for storage in storages:
        if storage.offset != position:
            what = "overlaps the one before it" if storage.offset < position else "leaves a hole before it"
            raise InputError(f"{where}: damaged safetensors file: tensor {shown(storage.key)} {what}")
        position += storage.nbytes
    require(position <= size, f"{where}: cut off, {size} of {position} bytes are there; copy or download it again")
    require(position == size, f"{where}: damaged safetensors file: {size - position} bytes follow the last tensor")
