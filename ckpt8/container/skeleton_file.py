"""The bytes of a member outside its tensors, without torch: what ``inspect`` needs to name what a pickle would call."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from ckpt8.codecs.lossless import RAW_PART
from ckpt8.container.layout import FRAME
from ckpt8.container.manifest import Pack
from ckpt8.container.member_layout import member_runs
from ckpt8.container.plain_frames import inflate_plain
from ckpt8.container.reader import ContainerReader
from ckpt8.core.files.source_file import ByteRange, SourceFile


class SkeletonFile(SourceFile):
    """A member whose tensors are zero. Messages name the container. The caller closes that."""

    def __init__(self, reader: ContainerReader, member: int) -> None:
        record = reader.manifest.members[member]
        self.source = ByteRange(reader.path, 0, record.size, record.path)
        self._reader = reader
        self._skeleton = record.skeleton
        runs = member_runs(reader.manifest, member, str(reader.path))
        self._runs = [run for run in runs if run.storage == self._skeleton]
        self._starts = [run.start for run in self._runs]
        self._stops = [run.stop for run in self._runs]
        self._last: tuple[int, bytes] = (-1, b"")

    @property
    def stored(self) -> int:
        """Bytes of the container."""
        return self._reader.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``. Raises InputError for damage and behind the end."""
        self._check_extent(offset, len(buffer))
        buffer[:] = bytes(len(buffer))
        stop = offset + len(buffer)
        for at in range(bisect_right(self._stops, offset), bisect_left(self._starts, stop)):
            run = self._runs[at]
            start, end = max(run.start, offset), min(run.stop, stop)
            while start < end:
                chunk, into = divmod(run.origin + start - run.start, FRAME)
                part = self._chunk(chunk)[into : into + end - start]
                buffer[start - offset : start - offset + len(part)] = part
                start += len(part)

    def _chunk(self, chunk: int) -> bytes:
        if self._last[0] != chunk:
            stored = self._reader.manifest.storages[self._skeleton]
            if stored.pack is None:
                content = self._frame(self._skeleton, chunk, self._reader.chunk_spec(self._skeleton, chunk).numel)
            else:
                start, stop = stored.pack.starts[stored.place : stored.place + 2]
                content = self._frame(stored.pack, 0, stored.pack.numel)[start:stop]
            self._last = (chunk, content)
        return self._last[1]

    def _frame(self, owner: int | Pack, index: int, length: int) -> bytes:
        """The content of one frame of a storage or a pack."""
        stored = self._reader.stored_frame(owner, RAW_PART, index)
        return inflate_plain(stored, length, str(self.source))

    def check_unchanged(self) -> None:
        """Nothing to check: every frame is checked when it is read."""

    def close(self) -> None:
        """The caller closes the container."""
