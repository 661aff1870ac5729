"""The skeleton of a source: all its bytes outside the storages, seen as one more storage behind the end of the file."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from ckpt8.checkpoint.tree import Checkpoint, StorageInfo
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
        # Where each run outside the storages begins: in the skeleton, and in the source.
        self._in_skeleton: list[int] = []
        self._in_source: list[int] = []
        length = position = 0
        for offset, nbytes in [*sorted((s.offset, s.nbytes) for s in checkpoint.storages), (self.size, 0)]:
            if position < offset:
                self._in_skeleton.append(length)
                self._in_source.append(position)
                length += offset - position
            position = offset + nbytes
        self.skeleton = StorageInfo(SKELETON, DType.UINT8, self.size, length)
        self.source_storages = checkpoint.storages
        self.storages: Sequence[StorageInfo] = (*checkpoint.storages, self.skeleton)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the source or, behind its end, from the skeleton."""
        if offset < self.size:
            self._checkpoint.read_into(offset, buffer)
            return
        start, done = offset - self.size, 0
        while done < len(buffer):
            at = bisect_right(self._in_skeleton, start + done) - 1
            into_run = start + done - self._in_skeleton[at]
            last = at + 1 == len(self._in_skeleton)
            left = len(buffer) - done if last else self._in_skeleton[at + 1] - start - done
            length = min(left, len(buffer) - done)
            self._checkpoint.read_into(self._in_source[at] + into_run, buffer[done : done + length])
            done += length

    def check_unchanged(self) -> None:
        """Raise InputError when the source changed since it was opened."""
        self._checkpoint.check_unchanged()
