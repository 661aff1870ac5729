"""Reader of the files of ``torch.save`` before 1.6: five pickles, then each storage as element count and bytes."""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from typing import Any

from ckpt8.checkpoint.readers.entries import check_shares
from ckpt8.checkpoint.readers.inert_pickle import StorageTable, load_pickle, longest_pickle
from ckpt8.checkpoint.readers.torch_rules import TorchCalls
from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, check_depth
from ckpt8.core.errors import InputError, UnsupportedError, require
from ckpt8.core.files.source_file import SourceFile
from ckpt8.core.text import shown

MAGIC = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001
_MAGIC_BYTES = b"\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_MAGIC_TEXT = b"L119547037146038801333356L\n."  # how pickle protocol 1 writes it
_COUNT = struct.Struct("<q")


def sniff(file: SourceFile) -> bool:
    """Whether it starts with the pickled magic number."""
    head = file.read(0, min(32, file.source.length))
    return head.startswith(_MAGIC_TEXT) or (head.startswith(b"\x80") and _MAGIC_BYTES in head)


class _RawStream(io.RawIOBase):
    """The first ``limit`` bytes of a SourceFile as a stream."""

    def __init__(self, file: SourceFile, limit: int) -> None:
        super().__init__()
        self._file, self._limit, self._position = file, limit, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = min(len(view), self._limit - self._position)
        self._file.read_into(self._position, view[:count])
        self._position += count
        return count

    def tell(self) -> int:
        return self._position


def read(file: SourceFile, calls: TorchCalls | None = None) -> OpenCheckpoint:
    """The structure of the file. ``calls`` judge what ``torch.load`` would do with it.

    Raises InputError when it is damaged or cut off, UnsupportedError for big-endian files.
    """
    source = file.source
    limit = min(source.length, longest_pickle(file))
    names: set[str] = set()
    stream = io.BufferedReader(_RawStream(file, limit), 2**16)

    def load(what: str, table: StorageTable | None = None) -> Any:
        label, persistent_load = f"{source}: {what}", table.load if table else None
        return load_pickle(stream, limit, label, persistent_load, names=names, stored=file.stored, calls=calls)

    require(
        load("magic number") == MAGIC and load("format version") == PROTOCOL_VERSION,
        f"{source}: not a checkpoint of torch before 1.6: its magic number or version is another",
    )
    system = load("system record")
    require(
        type(system) is dict and system.get("little_endian") is True,
        f"{source}: saved on a big-endian machine; load and save it again with torch",
        UnsupportedError,
    )
    table = StorageTable(f"{source}: pickle")
    tree = load("pickle", table)
    check_depth(tree, table.label)
    if calls is None:
        check_shares(tree, names, str(source))
    storages = _storages(file, table, load("list of storages"), stream.tell())
    return OpenCheckpoint("torch-legacy", file, storages, tree, names)


def _storages(file: SourceFile, table: StorageTable, keys: Any, offset: int) -> Sequence[StorageInfo]:
    """The storages, which lie one behind the other from ``offset`` to the end of the file. Raises InputError."""
    source = file.source
    require(
        type(keys) is list and all(type(key) is str for key in keys),
        f"{source}: damaged: its list of storages is malformed",
    )
    require(
        sorted(keys) == sorted(table.declared),
        f"{source}: damaged: its list of storages is not the one that its pickle uses",
    )
    storages = []
    for key in keys:
        if offset + _COUNT.size > source.length:
            raise InputError(f"{source}: cut off before storage {shown(key)}; copy or download it again")
        (numel,) = _COUNT.unpack(file.read(offset, _COUNT.size))
        offset += _COUNT.size
        # The count is in elements of the type under which the pickle names the storage first.
        first, declared = next(iter(table.declared[key]))
        if numel != declared:
            raise InputError(f"{source}: storage {shown(key)} has {numel} elements, its pickle says {declared}")
        nbytes = numel * first.itemsize
        if nbytes > source.length - offset:
            raise InputError(f"{source}: cut off inside storage {shown(key)}; copy or download it again")
        storages.append(StorageInfo(key, table.dtype_for(key, nbytes), offset, nbytes))
        offset += nbytes
    require(
        offset == source.length,
        f"{source}: {source.length - offset} bytes follow the last storage; the file is damaged",
    )
    return storages
