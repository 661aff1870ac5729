"""What the containers of ranks were made from, put together again from a plain directory of the same checkpoint.

A rank saves an object of its own, with slices of tensors. Its file is in the container; the bytes of the slices come
from the directory, however that cuts the tensors.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite, cut, put
from ckpt8.checkpoint.sources.distributed import adopt_parts
from ckpt8.checkpoint.sources.opening import check_storages, open_source
from ckpt8.checkpoint.sources.slices import Part, gather_box
from ckpt8.checkpoint.sources.stored_member import MemberSource, read_member
from ckpt8.checkpoint.tree import StorageInfo, TensorRef
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.joined import JoinedReader
from ckpt8.container.sharded.slices import SliceKey
from ckpt8.core.errors import CheckFailedError
from ckpt8.core.files.source_file import ByteRange
from ckpt8.core.text import shown
from ckpt8.core.workers import Workers

_OPEN_FILES = 4
"""Containers that are open for decoding at a time; each keeps a decoded chunk."""


class Originals:
    """The plain directory ``path``. ``data`` and ``parts`` are its slices; ``bundles`` are the originals of ranks."""

    def __init__(self, joined: JoinedReader, source: Bundle, workers: Workers) -> None:
        members = [member for member in source.found if isinstance(member, DcpMember)]
        homes = {id(member.home): member.home for member in members}
        if len(homes) != 1:
            raise CheckFailedError(
                f"{joined.path}: was not made from {source.path}, which holds {len(homes)} checkpoints of "
                "torch.distributed.checkpoint; give the directory that the same state was saved to"
            )
        self.path, self.source = source.path, source
        self.home: DcpCheckpoint = next(iter(homes.values()))
        self._member_file = lru_cache(_OPEN_FILES)(partial(MemberFile, member=0, workers=workers))
        self._check_same(joined)
        for member in members:
            check_storages(member.checkpoint, f"{source.path}: {member.path}")
        self.data = Composite(str(source.path))
        parts = adopt_parts(self.data, members)
        self.bundles = [self._bundle(reader, joined.slices[reader.path.name], parts) for reader in joined.readers]
        self.together = Bundle(source.path, [bundle.found[0] for bundle in self.bundles], source.directory)

    def _check_same(self, joined: JoinedReader) -> None:
        """Raise CheckFailedError unless both hold the same values, of the same types and shapes."""
        stated, index = self.home.metadata.tensors, joined.index
        known = {*index.tensors, *index.objects}
        names = set(self.home.metadata.names) | stated.keys()
        where = f"{joined.path}: was not made from {self.path}"
        for name in sorted(names ^ known):
            raise CheckFailedError(f"{where}: only one of them has {shown(name)}; give the same checkpoint")
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in stated.items()}
        for name in known:
            tensor = index.tensors.get(name)
            if kinds.get(name) != (None if tensor is None else (tensor.dtype, tensor.shape)):
                raise CheckFailedError(f"{where}: {shown(name)} is of another type or shape; give the same checkpoint")

    def _bundle(
        self, reader: ContainerReader, slices: Mapping[SliceKey, Any], parts: Mapping[str, list[Part]]
    ) -> Bundle:
        """The original of one rank."""
        tensors = self.home.metadata.tensors
        refs: dict[int, TensorRef] = {}
        for (name, offsets), record in slices.items():
            box, dtype = (offsets, tuple(record.shape)), tensors[name].dtype
            refs[record.storage] = gather_box(self.data, shown(name), dtype, box, parts.get(name, []))
        member = reader.manifest.members[0]
        source = MemberSource(reader, ByteRange(reader.path, 0, member.size), partial(self._member_file, reader))
        stored = read_member(reader, 0, source)
        places = {(offset, reader.manifest.storages[index].nbytes): index for offset, index in member.segments}
        original = _Original(self.data, stored, places, refs)
        return Bundle(self.path, [DirectoryMember(member.path, original)])


class _Original:
    """The object that a rank saved, as a Checkpoint. ``refs`` are its slices in ``data``, by number of a storage."""

    def __init__(
        self, data: Composite, stored: Any, places: Mapping[tuple[int, int], int], refs: Mapping[int, TensorRef]
    ) -> None:
        self._data, self._stored = data, stored
        self.format: str = stored.format
        self.size: int = stored.size
        self.tree: Any = stored.tree
        # The checksums in the file are those of the values that the container gives back.
        self.storages: Sequence[StorageInfo] = [
            replace(storage, crc32=None, crc_fields=()) for storage in stored.storages
        ]
        runs = []
        for storage in self.storages:
            index = places.get((storage.offset, storage.nbytes))
            if storage.nbytes and index is not None and index in refs:
                runs.append((storage.offset, storage.offset + storage.nbytes, refs[index]))
        self._runs = sorted(runs, key=lambda run: run[0])
        self._lock = threading.Lock()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the directory where ``offset`` lies in a slice, else from the container."""
        at = bisect_right(self._runs, offset, key=lambda run: run[0]) - 1
        with self._lock:
            if at < 0 or offset >= self._runs[at][1]:
                self._stored.read_into(offset, buffer)
                return
            start, _, ref = self._runs[at]
            for first, end, place in cut(offset - start, buffer, ref.dtype.itemsize):
                put(self._data.elements(ref, first, end), place)

    def check_unchanged(self) -> None:
        """Raise InputError when a file of the directory changed since it was opened."""
        self._data.check_unchanged()


@contextmanager
def open_originals(joined: JoinedReader, original: Path, workers: Workers) -> Iterator[Originals]:
    """Open the plain directory that the same checkpoint was saved to. Raises CheckFailedError, InputError."""
    with open_source(original, containers=False) as source:
        yield Originals(joined, source, workers)
