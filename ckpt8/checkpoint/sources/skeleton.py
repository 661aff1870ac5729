"""The skeleton of a source: all its bytes outside the storages, seen as one more storage behind the end of the file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, gaps
from ckpt8.core.tensors import DType

SKELETON = "ckpt8.skeleton"
"""Name of the record that holds the skeleton."""


class WithSkeleton:
    """A checkpoint whose last storage is the skeleton. Its offset is the size of the source.

    ``reason`` says why the skeleton is all there is, where the source might have been read as a checkpoint.
    """

    def __init__(self, checkpoint: Checkpoint, reason: str | None = None) -> None:
        self._checkpoint = checkpoint
        self.reason = reason
        self.format = checkpoint.format
        self.size = checkpoint.size
        self.tree: Any = checkpoint.tree
        # Where each run outside the storages begins: in the skeleton, with the end of that, and in the source.
        self._in_skeleton = [0]
        self._in_source: list[int] = []
        for position, length in gaps(checkpoint.storages, self.size):
            self._in_source.append(position)
            self._in_skeleton.append(self._in_skeleton[-1] + length)
        self.skeleton = StorageInfo(SKELETON, DType.UINT8, self.size, self._in_skeleton[-1])
        self.source_storages = checkpoint.storages
        self.storages: Sequence[StorageInfo] = (*checkpoint.storages, self.skeleton)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the source or, behind its end, from the skeleton."""
        if offset < self.size:
            self._checkpoint.read_into(offset, buffer)
            return
        offset -= self.size
        while buffer:
            run = bisect_right(self._in_skeleton, offset) - 1
            length = min(len(buffer), self._in_skeleton[run + 1] - offset)
            start = self._in_source[run] + offset - self._in_skeleton[run]
            self._checkpoint.read_into(start, buffer[:length])
            offset, buffer = offset + length, buffer[length:]

    def check_unchanged(self) -> None:
        """Raise InputError when the source changed since it was opened."""
        self._checkpoint.check_unchanged()
