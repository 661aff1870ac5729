"""A member of a container: as the checkpoint that it was, as the object that torch loads, and its encoded parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.readers import READERS, get_reader, open_checkpoint
from ckpt8.checkpoint.readers.rebuild import make_tensor
from ckpt8.checkpoint.sources.gate import TORCH_FORMATS, load_allowed, load_member
from ckpt8.checkpoint.sources.objects import read_storage, view_of
from ckpt8.checkpoint.tree import Checkpoint, OpenCheckpoint, StorageInfo, StorageRef, TensorRef
from ckpt8.codecs import Codec
from ckpt8.container import header
from ckpt8.container.frames import FRAME
from ckpt8.container.manifest import DCP, DIRECTORY, FILE, SYMLINK, Packing, TensorRecord
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arrays import as_tensor, as_tensors
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType, Parts, TensorSpec
from ckpt8.core.text import listed
from ckpt8.core.workers import Workers

_PACKABLE = (DType.FLOAT32, DType.BFLOAT16)


class MemberSource(SourceFile):
    """A member of a container in place of the file that it was; ``member`` opens it. For one thread at a time."""

    ahead = 0

    def __init__(self, reader: ContainerReader, source: ByteRange, member: Callable[[], MemberFile]) -> None:
        self.source = source
        self._reader = reader
        self._member = member

    @classmethod
    def of(cls, reader: ContainerReader, file: MemberFile) -> MemberSource:
        """The member that is open as ``file``. Messages name the container."""
        return cls(reader, ByteRange(reader.path, 0, file.size), lambda: file)

    @property
    def stored(self) -> int:
        """Bytes of the container."""
        return self._reader.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with decoded bytes. Raises InputError for damage and behind the end."""
        self._check_extent(offset, len(buffer))
        member = self._member()
        member.seek(offset)
        member.readinto(buffer)

    def check_unchanged(self) -> None:
        """Nothing to check: every frame is checked when it is read."""


def member_index(reader: ContainerReader, member: str | None) -> int:
    """The number of the ``member``, by default the only checkpoint.

    Raises UsageError, which lists the choices, if it is ambiguous or no checkpoint.
    """
    members = reader.manifest.members
    names = {record.path: index for index, record in enumerate(members)}
    checkpoints = [record.path for record in members if record.format not in (FILE, SYMLINK, DIRECTORY)]
    if member is None and len(checkpoints) == 1 and members[names[checkpoints[0]]].format != DCP:
        return names[checkpoints[0]]  # the slices of one rank depend on how many ranks there were
    choices = f"give member= one of {listed(checkpoints, limit=20)}"
    if member is None or member not in names:
        what = f"no member {member!r}" if member is not None else f"{len(names)} members"
        raise UsageError(f"{reader.path}: has {what}; {choices}")
    if member not in checkpoints:
        raise UsageError(f"{reader.path}: {member!r} is no checkpoint, it was kept as it is; {choices}, or restore it")
    return names[member]


def read_member(reader: ContainerReader, index: int, source: MemberSource) -> OpenCheckpoint:
    """The member as the checkpoint that it was. Raises InputError for damage and for an unknown format."""
    record = reader.manifest.members[index]
    if record.format not in READERS:
        raise InputError(f"{reader.path}: {record.path!r} is of the format {record.format!r}, which is not known")
    return get_reader(record.format).read(source)


def slices_of_member(reader: ContainerReader, index: int, file: SourceFile) -> OpenCheckpoint:
    """A file of a distributed checkpoint as a dict of its slices, by name without the path of the member.

    Raises InputError for a tensor that does not fit its storage.
    """
    manifest = reader.manifest
    record = manifest.members[index]
    storages = {
        storage: StorageInfo(str(storage), manifest.storages[storage].dtype, offset, manifest.storages[storage].nbytes)
        for offset, storage in record.segments
    }
    tree = {
        tensor.name.removeprefix(f"{record.path}:"): tensor_of(reader, tensor)
        for tensor in manifest.tensors
        if tensor.storage in storages
    }
    return OpenCheckpoint(DCP, file, list(storages.values()), tree)


def tensor_of(reader: ContainerReader, record: TensorRecord) -> TensorRef:
    """A tensor whose key is the number of its storage. Raises InputError where it does not fit that."""
    whole = StorageRef(str(record.storage), DType.UINT8, reader.manifest.storages[record.storage].nbytes)
    try:
        return make_tensor(whole, record.dtype, record.offset, tuple(record.shape), tuple(record.stride))
    except ValueError as exc:
        raise InputError(f"{reader.path}: {record.name}: does not fit its storage: {exc}") from exc


def load_source(reader: ContainerReader, index: int, file: MemberFile, map_location: Any) -> tuple[Any, Any]:
    """The object that the library of a member's format would load, and the inert tree. Raises InputError."""
    kind = reader.manifest.members[index].format
    source = MemberSource.of(reader, file)
    if kind in TORCH_FORMATS:
        return load_member(file, source, kind, map_location)
    checkpoint = (slices_of_member if kind == DCP else read_member)(reader, index, source)
    return _load_named(checkpoint, file.name, map_location), checkpoint.tree


def load_plain(path: Path, map_location: Any) -> tuple[Any, Any]:
    """``load_source`` of a checkpoint that is no container. Raises InputError."""
    with open_checkpoint(path) as checkpoint:
        checkpoint.file.expect([(0, checkpoint.size)])
        if checkpoint.format not in TORCH_FORMATS:
            return _load_named(checkpoint, str(path), map_location), checkpoint.tree
        with path.open("rb") as file:
            return load_allowed(file, str(path), map_location), checkpoint.tree


def _load_named(checkpoint: OpenCheckpoint, where: str, map_location: Any) -> dict[str, torch.Tensor]:
    """The tensors by name, from a ``checkpoint`` whose sizes are checked. Raises InputError, UsageError."""
    if not isinstance(map_location, (type(None), str, torch.device)):
        raise UsageError(
            f"{where}: is loaded tensor by tensor and takes a device for map_location, not {map_location!r}"
        )
    places = {storage.key: storage for storage in checkpoint.storages}
    loaded = {}
    for name, ref in checkpoint.tree.items():
        tensor = view_of(ref, read_storage(checkpoint, places[ref.key]))
        loaded[name] = tensor.to(map_location or "cpu")
    return loaded


@dataclass(frozen=True, slots=True)
class EncodedChunk:
    """The parts of a chunk whose first element has the index ``first``, symbols packed, and its companions by field.

    These are chunks, or decoded where they are ``expanded`` from statistics. ``where`` begins messages of damage.
    """

    codec: Codec
    spec: TensorSpec
    first: int
    parts: Parts
    packings: Mapping[str, Packing]
    companions: Mapping[str, EncodedChunk]
    expanded: Parts
    where: str


class StoredParts:
    """The encoded parts of one member's tensors, for training that goes on with packed state.

    Only a tensor that is the whole of its storage, in order, has parts. Raises InputError for a malformed manifest.
    """

    def __init__(self, reader: ContainerReader, member: int, checkpoint: Checkpoint, workers: Workers) -> None:
        self._reader = reader
        self._workers = workers
        storages = reader.manifest.storages
        record = reader.manifest.members[member]
        at = {(offset, storages[index].nbytes): index for offset, index in record.segments if storages[index].nbytes}
        try:
            self._index = {s.key: at[s.offset, s.nbytes] for s in checkpoint.storages if s.nbytes}
        except KeyError as exc:
            raise InputError(
                f"{reader.path}: manifest is malformed: {record.path!r} has other storages inside"
            ) from exc

    def _whole(self, ref: TensorRef) -> int | None:
        if (index := self._index.get(ref.key)) is None or ref.offset or not ref.is_contiguous:
            return None
        record = self._reader.manifest.storages[index]
        return index if (record.dtype, record.numel) == (ref.dtype, ref.numel) else None

    def codec(self, ref: TensorRef) -> Codec | None:
        """The codec of ``ref``, or None where it has no parts of its own."""
        index = self._whole(ref)
        return None if index is None else self._reader.codec(index)

    def is_exact(self, ref: TensorRef) -> bool:
        """Whether ``ref`` is exact for a reason of its own, not because of the preset or the element type."""
        index = self._index.get(ref.key)
        if index is None or self._reader.manifest.preset == "lossless" or ref.dtype not in _PACKABLE:
            return False
        return not self._reader.codec(index).is_lossy

    def chunks(self, ref: TensorRef, *names: str) -> Iterator[tuple[int, Parts]]:
        """The named parts, chunk by chunk, with the first element of each. Raises InputError for damage."""
        index = self._whole(ref)
        assert index is not None  # noqa: S101
        read = partial(self._reader.read_parts, index, only=names)
        for chunk, parts in enumerate(self._workers.map(read, range(header.chunk_count(ref.numel)))):
            yield chunk * FRAME, as_tensors(parts)

    def encoded(self, ref: TensorRef) -> Iterator[EncodedChunk]:
        """The chunks of ``ref``, each with what decodes it. Raises InputError for damage."""
        index = self._whole(ref)
        assert index is not None  # noqa: S101
        yield from self._workers.map(partial(self._read, index), range(header.chunk_count(ref.numel)))

    def _read(self, index: int, chunk: int) -> EncodedChunk:
        reader, codec = self._reader, self._reader.codec(index)
        parts, packings = reader.read_packed(index, chunk)
        return EncodedChunk(
            codec,
            reader.chunk_spec(index, chunk),
            chunk * FRAME,
            as_tensors(parts),
            packings,
            {name: self._read(other, chunk) for name, other in codec.companion_storages.items()},
            {name: as_tensor(x, DType.FLOAT32) for name, x in reader.expanded(index, chunk).items()},
            reader.where(index),
        )
