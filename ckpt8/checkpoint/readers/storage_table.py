"""The storages that the pickle of a torch file names, in the zip format and in the legacy one."""

from __future__ import annotations

from typing import Any

from ckpt8.checkpoint.readers.pickle.rebuild import is_count
from ckpt8.checkpoint.tree import Global, StorageRef
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import SourceFile
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown

MAX_PICKLE_BYTES = 512 * 2**20
_FREE_PICKLE_BYTES = 16 * 2**20
_PICKLE_RATIO = 64
"""A pickle in a container may be 64 times as long as the container, plus 16 MiB. Real ones stay below 20 times."""


def longest_pickle(file: SourceFile) -> int:
    """The most bytes that the pickle of a checkpoint may have, by the bytes that the file takes on the disk."""
    return min(MAX_PICKLE_BYTES, _FREE_PICKLE_BYTES + _PICKLE_RATIO * file.stored)


class StorageTable:
    """Collects the storages that a pickle names. ``load`` is the ``persistent_load`` of the pickle machine.

    ``declared`` maps each key to the forms under which the pickle names it, (dtype, element count), in their order.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.declared: dict[str, dict[tuple[DType, int], None]] = {}

    def load(self, pid: Any) -> StorageRef | Global:
        """Resolve a persistent id. Raises InputError for anything but a storage or an old module class."""
        is_id = type(pid) is tuple and len(pid) in (4, 5, 6)
        if is_id and pid[0] == "module" and len(pid) == 4 and type(pid[1]) is Global:
            # Before 1.6 a pickled module carried its source text with its class.
            return pid[1]
        if not is_id or pid[0] != "storage" or len(pid) == 4:
            raise InputError(f"{self.label}: damaged pickle: a persistent id is not that of a storage")
        _, kind, key, location, numel = pid[:5]
        if type(kind) is not Global or type(key) is not str or type(location) is not str:
            raise InputError(f"{self.label}: damaged pickle: a storage has no type, key or location")
        if not is_count(numel):
            raise InputError(f"{self.label}: damaged pickle: storage {shown(key)} has no valid element count")
        dtype = self._dtype(kind.name)
        self.declared.setdefault(key, {})[dtype, numel] = None
        if len(pid) == 5 or pid[5] is None:
            return StorageRef(key, dtype, numel)
        # Old files have views of a storage: (key of the view, offset, length), in elements of the storage.
        if type(pid[5]) is not tuple or len(pid[5]) != 3:
            raise InputError(f"{self.label}: damaged pickle: storage {shown(key)} has malformed view metadata")
        name, offset, length = pid[5]
        counts = type(name) is str and type(offset) is int and type(length) is int and offset >= 0 and length >= 0
        if not counts or offset + length > numel:
            raise InputError(f"{self.label}: damaged pickle: a view reaches outside storage {shown(key)}")
        return StorageRef(key, dtype, length, offset)

    def _dtype(self, kind: str) -> DType:
        """The element type of a storage class of any module (``torch.cuda.FloatStorage``). Raises UnsupportedError."""
        name = kind.rpartition(".")[2]
        if name == "UntypedStorage":
            return DType.UINT8
        try:
            return DType.from_storage_class(name)
        except KeyError:
            raise UnsupportedError(
                f"{self.label}: storage type {shown(kind)} is not known to this version of ckpt8"
            ) from None

    def dtype_for(self, key: str, nbytes: int) -> DType:
        """The element type of a storage of ``nbytes`` bytes; UINT8 where the pickle names it under several.

        Raises InputError when the pickle states another size.
        """
        forms = self.declared[key]
        for dtype, numel in forms:
            if numel * dtype.itemsize != nbytes:
                raise InputError(
                    f"{self.label}: storage {shown(key)} has {nbytes} bytes, "
                    f"but the pickle names it with {numel} elements of {dtype.label}"
                )
        dtypes = {dtype for dtype, _ in forms}
        return dtypes.pop() if len(dtypes) == 1 else DType.UINT8
