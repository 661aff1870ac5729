"""Writes what is intact of the members of a damaged container.

``salvage_container`` writes what is intact in a damaged container and lists what is lost.

A container stores every file of a checkpoint, a member, as its tensors and its skeleton: the bytes around the tensors.
A member is in one of four states:

    whole      written as it was
    damaged    written, with NaN for lost elements (zero for integers). The checksums in the file are those of what was
               written, so that every program reads it
    tensors    the skeleton is lost. A safetensors file, beside the place of the member, holds the intact tensors
    lost       not written: the skeleton is lost and no tensor is intact, or it is damaged and no checkpoint
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from ckpt8.checkpoint.readers.safetensors import DTYPES
from ckpt8.checkpoint.replacing import checkpoint_file
from ckpt8.checkpoint.sources.opening import open_source, storage_crc
from ckpt8.container import frames, header
from ckpt8.container.checks import CRC_BYTES
from ckpt8.container.chunks import Chunk, all_chunks, scratch_chunk
from ckpt8.container.damaged import DamagedContainer
from ckpt8.container.decoding import decode_storage
from ckpt8.container.frames import bytes_of
from ckpt8.container.header import SAFETENSORS
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK, MemberRecord, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import Ckpt8Error, InputError, require
from ckpt8.core.files.atomic import AtomicFile, Check, Guard, default_path, refuse_source, write_at
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.tensors import DType
from ckpt8.core.text import counted
from ckpt8.core.workers import Progress, Workers
from ckpt8.restoring.members import MemberWriter, Restored, file_check, new_directory

_LABELS: dict[DType, str] = {dtype: label for label, dtype in DTYPES.items() if dtype is not DType.FLOAT4_E2M1FN_X2}


class TensorFile:
    """A safetensors file of those ``tensors`` that the format can hold and that lie inside their storage.

    ``names`` are the names of these tensors.
    """

    def __init__(self, reader: ContainerReader, tensors: Sequence[TensorRecord]) -> None:
        self._reader = reader
        self._tensors = [tensor for tensor in tensors if self._is_writable(tensor)]
        self.names = {tensor.name for tensor in self._tensors}

    def _is_writable(self, tensor: TensorRecord) -> bool:
        if tensor.flags or tensor.dtype not in _LABELS or tensor.name == header.METADATA:
            return False
        nbytes = self._reader.manifest.storages[tensor.storage].nbytes
        fits = not tensor.span or (tensor.offset + tensor.span) * tensor.dtype.itemsize <= nbytes
        return fits and tensor.nbytes <= nbytes

    def write(self, descriptor: int, guard: Guard) -> None:
        """Write the file from its start. Raises OutputError."""
        entries: dict[str, Any] = {}
        position = 0
        for tensor in self._tensors:
            stop = position + tensor.nbytes
            entries[tensor.name] = header.tensor_entry(_LABELS[tensor.dtype], tensor.shape, position, stop)
            position = stop
        contents = (content for tensor in self._tensors for content in self._content(tensor))
        position = 0
        for view in chain([memoryview(header.render_safetensors(entries))], contents):
            with guard():
                write_at(descriptor, view, position)
            position += len(view)

    def _content(self, tensor: TensorRecord) -> Iterator[memoryview]:
        """The elements in the order of the dimensions: chunk by chunk if stored in this order, else at once."""
        if not tensor.nbytes:
            return
        if not tensor.is_contiguous:
            flat = decode_storage(self._reader, tensor.storage).view(tensor.dtype.torch)
            yield bytes_of(flat.as_strided(tensor.shape, tensor.stride, tensor.offset).contiguous())
            return
        start = tensor.offset * tensor.dtype.itemsize
        stop = start + tensor.nbytes
        step = frames.FRAME * self._reader.manifest.storages[tensor.storage].dtype.itemsize
        for chunk in range(start // step, -(-stop // step)):
            content = self._reader.read_chunk(tensor.storage, chunk).view(np.uint8).data
            yield content[max(start - chunk * step, 0) : stop - chunk * step]


def find_lost(reader: DamagedContainer, workers: Workers) -> None:
    """Decode every chunk once and mark those that cannot be decoded."""

    def lost_of(batch: list[Chunk]) -> list[Chunk]:
        lost = []
        for chunk in batch:
            try:
                reader.fill_chunk(*chunk, scratch_chunk(reader, *chunk))
            except InputError:
                lost.append(chunk)
        return lost

    batches = all_chunks(reader, range(len(reader.manifest.storages)))
    # A copy is decoded from its master's chunks. Once marked these decode, to NaN, and the copy would seem intact:
    # check all chunks before marking the first.
    for batch in list(workers.map(lost_of, batches)):
        for storage, chunk in batch:
            reader.lost[storage].add(chunk)


def lost_elements(reader: DamagedContainer, tensor: TensorRecord) -> list[list[int]]:
    """The lost runs [start, stop) of its storage that a tensor overlaps, in elements of the tensor's type."""
    if not tensor.span:
        return []
    end = tensor.offset + tensor.span
    size, item = reader.manifest.storages[tensor.storage].dtype.itemsize, tensor.dtype.itemsize
    # The storage may count elements of another size, such as bytes. Round outwards: one lost byte loses an element.
    runs = [(start * size // item, -(-stop * size // item)) for start, stop in reader.lost_runs(tensor.storage)]
    return [[start, stop] for start, stop in runs if start < end and stop > tensor.offset]


WHOLE, DAMAGED, TENSORS, LOST = "whole", "damaged", "tensors", "lost"


@dataclass(frozen=True, slots=True)
class LostTensor:
    """A tensor that is damaged or was not written, or a damaged storage that no such tensor lies in.

    ``elements`` are the lost runs [start, stop) of its storage, which holds ``count`` elements. Both count elements of
    the tensor's type (without a tensor, of the storage's) from the start of the storage. ``elements`` is empty for an
    intact tensor that a safetensors file cannot hold.
    """

    member: str
    name: str
    elements: list[list[int]]
    count: int


@dataclass(frozen=True, slots=True)
class SalvagedMember:
    """The path of a member in the source, its state, and the path that was written; None if nothing was.

    ``written`` is relative to the directory of the checkpoint, as ``path`` is. For a checkpoint of one file it is the
    path of the result.
    """

    path: str
    state: str
    written: str | None


@dataclass(kw_only=True, slots=True, repr=False)
class Salvage(Restored):
    """What was recovered: ``tensors`` counts tensors that were written intact, ``lost`` lists what was not.

    ``damage`` says what is wrong with the header, the manifest, or the seal, which is the checksum of both; None if
    nothing is. Without the seal nothing proves the names, shapes and offsets that the manifest states. ``base`` says
    the same of the files that a delta needs, or that one is missing.
    """

    damage: str | None = None
    base: str | None = None
    tensors: int = 0
    members: list[SalvagedMember] = field(default_factory=list)
    lost: list[LostTensor] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the container is undamaged."""
        return not (self.lost or self.damage or self.base) and all(member.state == WHOLE for member in self.members)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, and ``complete``."""
        return {**asdict(self), "path": str(self.path), "complete": self.complete}

    def lines(self) -> list[str]:
        """What to tell the user, as lines of text."""
        summary = f"{counted(self.tensors, 'tensor')} intact, {len(self.lost):,} not recovered in full"
        lines = [f"{self.path}: {summary}", *Restored.lines(self)]
        if self.damage is not None:
            lines.append(f"{self.damage}; nothing proves the names, shapes and offsets that its manifest states")
        lines += [] if self.base is None else [self.base]
        lines += [
            f"{member.path}: {member.state}" + (f", see {member.written}" if member.state == TENSORS else "")
            for member in self.members
            if member.state != WHOLE
        ]
        for tensor in self.lost:
            # In words the last element is one of them, as in "0 to 4".
            runs = ", ".join(f"{start} to {stop - 1}" for start, stop in tensor.elements)
            lost = f"lost elements {runs} of {tensor.count} in its storage"
            lines.append(f"  {tensor.name}: {lost if runs else 'intact, but a safetensors file cannot hold it'}")
        return lines


def salvage_container(
    sources: Sequence[Path],
    target: str | os.PathLike[str] | None,
    *,
    force: bool,
    threads: int | None,
    progress: Progress,
) -> Salvage:
    """Write what is intact of the first source; the others are the files below it. Raises InputError, OutputError."""
    try:
        reader = DamagedContainer(sources[0])
    except InputError as exc:
        # Of the same class: the container may be of a later version (UnsupportedError) and not damaged.
        raise exc.told(f"{exc.problem}; nothing can be recovered") from exc
    with reader, Workers(threads) as workers:
        # First of all: the states of the members follow from the lost chunks.
        find_lost(reader, workers)
        result = Salvage.at(sources, target, reader)
        result.damage, result.base = reader.damage, reader.damage_below()
        salvaging = _Salvaging(reader, MemberWriter(reader, workers, progress), result)
        if reader.manifest.directory is not None:
            # All files wait: their checksums are mended in the end.
            with new_directory(result.path, reader, force=force, waits=True) as directory:
                salvaging.write_directory(directory)
                directory.publish()
            result.replaced = directory.replaced
        else:
            salvaging.write_file(file_check(target), force=force)
        salvaging.list_tensors()
        return result


class _Salvaging:
    """Writes the members of one damaged container by their states."""

    def __init__(self, reader: DamagedContainer, writer: MemberWriter, result: Salvage) -> None:
        self._reader, self._manifest, self._writer, self._result = reader, reader.manifest, writer, result
        self._states = [self._state(member) for member in self._manifest.members]
        # Names of intact tensors that a safetensors file cannot hold; _open_tensor_file adds them.
        self._unwritten: set[str] = set()

    def _state(self, member: MemberRecord) -> str:
        lost = self._reader.lost
        if member.skeleton in lost:
            return LOST if member.format in (FILE, SYMLINK, DIRECTORY) else TENSORS
        return DAMAGED if any(storage in lost for _, storage in member.segments) else WHOLE

    def write_file(self, check: Check, *, force: bool) -> None:
        """Write the only member. Raises InputError if nothing of it is intact."""
        (member,) = self._manifest.members
        require(
            self._states[0] != LOST,
            f"{self._reader.path}: its file is damaged and no checkpoint; nothing can be recovered",
        )
        if self._states[0] == TENSORS:
            tensors = self._open_tensor_file(0, "")
            require(tensors.names, f"{self._reader.path}: no tensor is intact; nothing can be recovered")
            # The user did not give this name, so it replaces checkpoints only.
            self._result.path = default_path(self._result.path.with_name(self._result.path.name + SAFETENSORS))
            check = checkpoint_file
            refuse_source(self._result.path, self._reader.path)
        with AtomicFile(self._result.path, force=force, check=check) as output:
            if self._states[0] == TENSORS:
                tensors.write(output.file.fileno(), output.guard)
            else:
                self._writer.write(0, output.file.fileno(), output.guard)
                self._mend_checksums(output.path, output.guard)
            output.publish()
        self._result.replaced = output.replaced
        self._result.members.append(SalvagedMember(member.path, self._states[0], str(self._result.path)))

    def write_directory(self, output: AtomicDirectory) -> None:
        """Write every member, or its tensors, unless it is lost."""
        paths = [PurePosixPath(member.path) for member in self._manifest.members]
        taken = {str(path) for file in paths for path in (file, *file.parents)}
        for index, member in enumerate(self._manifest.members):
            state, written = self._states[index], member.path
            if state == TENSORS:
                tensors = self._open_tensor_file(index, f"{member.path}:")
                while written in taken:
                    written += SAFETENSORS
                taken.add(written)
                if tensors.names:
                    with output.new_file(written) as descriptor:
                        tensors.write(descriptor, output.guard)
                else:
                    state = LOST
            elif state != LOST:
                self._writer.add(index, output)
            self._result.members.append(SalvagedMember(member.path, state, None if state == LOST else written))
        self._mend_checksums(output.path, output.guard)

    def _mend_checksums(self, path: Path, guard: Guard) -> None:
        """Give damaged storages the checksums of what was written. Raises OutputError.

        ``restore`` does so for storages that come back changed. The others kept those of the source in the skeleton.
        """
        lost = {
            (member.path if self._manifest.directory else "", offset)
            for member in self._manifest.members
            for offset, storage in member.segments
            if storage in self._reader.lost
        }
        if not lost:
            return
        # What cannot be opened as a checkpoint, as its structure is lost, has no checksums that anybody compares.
        with suppress(Ckpt8Error), open_source(path, containers=False, decode=False) as bundle:
            for member in bundle.opened:
                name = member.path if self._manifest.directory else ""
                for storage in member.checkpoint.storages:
                    if (name, storage.offset) in lost and storage.crc_fields:
                        crc = storage_crc(member.checkpoint, storage).to_bytes(CRC_BYTES, "little")
                        with guard(), (path / name).open("r+b") as file:
                            for place in storage.crc_fields:
                                os.pwrite(file.fileno(), crc, place)

    def _open_tensor_file(self, index: int, prefix: str) -> TensorFile:
        """The safetensors file for the intact tensors of a member, whose names lose ``prefix``."""
        own = {storage for _, storage in self._manifest.members[index].segments}
        intact = [t for t in self._manifest.tensors if t.storage in own and not lost_elements(self._reader, t)]
        file = TensorFile(self._reader, [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in intact])
        self._unwritten |= {tensor.name for tensor in intact if tensor.name.removeprefix(prefix) not in file.names}
        return file

    def list_tensors(self) -> None:
        """Count the tensors written intact; list the others, and damaged storages that no damaged tensor lies in."""
        owner = {storage: member.path for member in self._manifest.members for _, storage in member.segments}
        named = set()
        for tensor in self._manifest.tensors:
            elements = lost_elements(self._reader, tensor)
            named |= {tensor.storage} if elements else set()
            if elements or tensor.name in self._unwritten:
                count = self._manifest.storages[tensor.storage].nbytes // tensor.dtype.itemsize
                path = owner.get(tensor.storage, "")
                self._result.lost.append(LostTensor(path, tensor.name, elements, count))
            else:
                self._result.tensors += 1
        for storage in sorted(self._reader.lost.keys() - named):
            record = self._manifest.storages[storage]
            path = owner.get(storage) or next(m.path for m in self._manifest.members if m.skeleton == storage)
            runs = [list(run) for run in self._reader.lost_runs(storage)]
            self._result.lost.append(LostTensor(path, record.name, runs, record.numel))
