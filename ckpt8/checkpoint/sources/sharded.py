"""A directory of containers of ranks as a distributed checkpoint: the one that torch's own writer would have written.

Every container is a file of it, whose slices are decoded when somebody reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path

from ckpt8.checkpoint.readers import torch_zip
from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp.metadata import Metadata, Slice, StoredTensor
from ckpt8.checkpoint.readers.entries import directory_name
from ckpt8.checkpoint.readers.pickle.rebuild import make_tensor
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.stored_member import MemberSource
from ckpt8.checkpoint.tree import Held, Labelled, OpenCheckpoint, StorageInfo, StorageRef, TensorRef
from ckpt8.container.manifest import DCP, TensorRecord
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.index import Place
from ckpt8.container.sharded.joined import JoinedReader
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, Window
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown
from ckpt8.core.workers import Workers

_NO_FILE = "__0_0.ckpt8"
"""The file that stands for those of a checkpoint that has none, as all of its tensors are without elements."""

_OPEN_FILES = 4
"""Containers that are open for decoding at a time; each keeps a decoded chunk."""


@contextmanager
def open_sharded(path: Path, *, threads: int | None = None) -> Iterator[Bundle]:
    """Open a directory of containers as a distributed checkpoint. Raises InputError."""
    with JoinedReader(path, kernels=True) as joined, Workers(threads) as workers:
        yield sharded_bundle(joined, workers)


def sharded_bundle(joined: JoinedReader, workers: Workers) -> Bundle:
    """Open containers as a distributed checkpoint. Raises InputError."""
    return Bundle(joined.path, ShardedFiles(joined, workers).members(), directory_name(joined.path))


class ShardedFiles:
    """Opens the files of a checkpoint."""

    def __init__(self, joined: JoinedReader, workers: Workers) -> None:
        self._joined = joined
        self._member_file = lru_cache(_OPEN_FILES)(partial(_member_file, workers=workers))
        self._sources = {reader.path.name: self._source(reader) for reader in joined.readers}
        self._offsets = {
            reader.path.name: {storage: offset for offset, storage in reader.manifest.members[0].segments}
            for reader in joined.readers
        }

    def _source(self, reader: ContainerReader) -> MemberSource:
        if len(reader.manifest.members) != 1:
            raise InputError(f"{reader.path}: holds {len(reader.manifest.members)} files, not the state of one rank")
        size = reader.manifest.members[0].size
        return MemberSource(reader, ByteRange(reader.path, 0, size), partial(self._member_file, reader))

    def members(self) -> list[DcpMember]:
        """All files, with the metadata that the plain checkpoint would have."""
        index = self._joined.index
        metadata = Metadata(None, 0, paths=dict(index.paths or {}))
        records: dict[str, list[tuple[Slice, TensorRecord]]] = defaultdict(list)
        values: dict[str, Place] = dict(index.objects)
        torn: set[str] = set()
        for name, tensor in index.tensors.items():
            boxes = tensor.boxes()
            pickled = [place for box in boxes if (place := tensor.pickled(box)) is not None]
            if pickled and len(pickled) < len(boxes):
                raise UnsupportedError(
                    f"{self._joined.path}: {shown(name)}: only some of its parts are plain tensors; load it with "
                    "Ckpt8StorageReader"
                )
            if pickled:
                values[name] = pickled[0]
                torn |= {name} if len(boxes) > 1 else set()
                continue
            metadata.tensors[name] = StoredTensor(tensor.dtype, tensor.shape)
            for box in boxes:
                record = self._joined.slices[box.file][name, box.offsets]
                at = self._offset(box.file, record)
                piece = Slice(name, box.file, at, record.nbytes, (box.offsets, box.sizes), ())
                metadata.slices.append(piece)
                records[box.file].append((piece, record))
            if not boxes:
                nothing = (0,) * len(tensor.shape), tensor.shape
                metadata.slices.append(Slice(name, next(iter(index.files), _NO_FILE), 0, 0, nothing, ()))
        windows = {name: self._window(name, place) for name, place in values.items()}
        for name, window in windows.items():
            path = values[name].file
            metadata.slices.append(Slice(name, path, window.source.offset, window.source.length, None, ()))
        home = DcpCheckpoint(metadata)
        # Only its class can join what torch.save has written in parts.
        home.add_values({name: window for name, window in windows.items() if name not in torn})
        members = [self._member(home, reader, records[reader.path.name]) for reader in self._joined.readers]
        if metadata.tensors and not members:
            return [DcpMember(_NO_FILE, Held(b"", DCP, tree=Labelled(())), home=home, parts=[])]
        return members

    def value(self, name: str, place: Place) -> bytes:
        """What torch.save wrote for a value, or for a part of one. Raises InputError where it is damaged."""
        return self._window(name, place).read(0, place.length)

    def open_value(self, name: str, place: Place) -> OpenCheckpoint:
        """As ``value``, as a checkpoint of its own."""
        return torch_zip.read(self._window(name, place))

    def _offset(self, file: str, record: TensorRecord) -> int:
        offset = self._offsets[file].get(record.storage)
        if offset is None:
            raise InputError(f"{self._joined.path / file}: {shown(record.name)}: is in no file of the container")
        return offset

    def _window(self, name: str, place: Place) -> Window:
        """The bytes of a value that torch.save wrote."""
        record = self._joined.objects(place.file)
        assert record is not None  # noqa: S101 - checked when the containers were joined
        start = self._offset(place.file, record) + place.start
        return Window(self._sources[place.file], start, place.length, f"value {shown(name)}")

    def _member(
        self, home: DcpCheckpoint, reader: ContainerReader, records: list[tuple[Slice, TensorRecord]]
    ) -> DcpMember:
        storages: dict[str, StorageInfo] = {}  # tied weights share one
        parts: list[tuple[Slice, TensorRef]] = []
        for piece, record in sorted(records, key=lambda each: each[0].offset):
            stored = reader.manifest.storages[record.storage]
            key = str(record.storage)
            storages[key] = StorageInfo(key, stored.dtype, piece.offset, stored.nbytes)
            whole = StorageRef(key, DType.UINT8, stored.nbytes)
            try:
                ref = make_tensor(whole, record.dtype, record.offset, tuple(record.shape), tuple(record.stride))
            except ValueError as exc:
                raise InputError(f"{reader.path}: {record.name}: does not fit its storage: {exc}") from exc
            parts.append((piece, ref))
        named = tuple(home.named(piece, ref) for piece, ref in parts)
        checkpoint = OpenCheckpoint(DCP, self._sources[reader.path.name], [*storages.values()], Labelled(named))
        return DcpMember(reader.path.name, checkpoint, home=home, parts=parts)


def _member_file(reader: ContainerReader, workers: Workers) -> MemberFile:
    return MemberFile(reader, 0, workers)
