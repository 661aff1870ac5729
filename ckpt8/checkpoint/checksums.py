"""The checksums that some formats state of their storages, compared with all bytes."""

from __future__ import annotations

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.core.errors import InputError
from ckpt8.core.files.crc import crc32

_BLOCK = 1 << 22


def check_storages(checkpoint: Checkpoint, where: str) -> None:
    """Read every storage that has a checksum. Raises InputError for the first that does not fit."""
    buffer = bytearray(min(_BLOCK, max((s.nbytes for s in checkpoint.storages if s.crc32 is not None), default=0)))
    for storage in checkpoint.storages:
        if storage.crc32 is None:
            continue
        crc = 0
        for start in range(0, storage.nbytes, _BLOCK):
            view = memoryview(buffer)[: min(_BLOCK, storage.nbytes - start)]
            checkpoint.read_into(storage.offset + start, view)
            crc = crc32(view, crc)
        if crc != storage.crc32:
            raise InputError(f"{where}: storage {storage.key!r} is damaged: its CRC does not match")
