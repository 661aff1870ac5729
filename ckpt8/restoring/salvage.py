"""``restore --salvage``: writes what is intact in a damaged container and lists what is lost.

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
from functools import partial
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ckpt8.checkpoint.readers.safetensors import DTYPES
from ckpt8.checkpoint.replacing import checkpoint_file
from ckpt8.checkpoint.sources.opening import open_source, storage_crc
from ckpt8.container import frames, header
from ckpt8.container.checks import CRC_BYTES
from ckpt8.container.damaged import DamagedContainer
from ckpt8.container.decoding import Chunk, all_chunks, decode_storage, scratch_tensor
from ckpt8.container.frames import bytes_of
from ckpt8.container.header import SAFETENSORS
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK, MemberRecord, TensorRecord
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import Ckpt8Error, InputError
from ckpt8.core.files.atomic import AtomicDirectory, AtomicFile, Check, Guard, default_path, refuse_source, write_at
from ckpt8.core.tensors import DType
from ckpt8.core.text import counted
from ckpt8.core.workers import Progress, Workers
from ckpt8.restoring.member_output import MemberWriter, Restored, file_check, new_directory

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
        contents = (bytes_of(content) for tensor in self._tensors for content in self._content(tensor))
        position = 0
        for view in chain([memoryview(header.render_safetensors(entries))], contents):
            with guard():
                write_at(descriptor, view, position)
            position += len(view)

    def _content(self, tensor: TensorRecord) -> Iterator[torch.Tensor]:
        """The elements in the order of the dimensions: chunk by chunk if stored in this order, else at once."""
        if not tensor.nbytes:
            return
        if not tensor.is_contiguous:
            flat = decode_storage(self._reader, tensor.storage).view(tensor.dtype.torch)
            yield flat.as_strided(tensor.shape, tensor.stride, tensor.offset).contiguous()
            return
        record = self._reader.manifest.storages[tensor.storage]
        start = tensor.offset * tensor.dtype.itemsize
        stop = start + tensor.nbytes
        step = frames.FRAME * record.dtype.itemsize
        for chunk in range(start // step, -(-stop // step)):
            content = self._reader.read_chunk(tensor.storage, chunk).view(torch.uint8)
            yield content[max(start - chunk * step, 0) : stop - chunk * step]


def find_lost(reader: DamagedContainer, workers: Workers) -> None:
    """Decode every chunk once and mark those that cannot be decoded."""

    def lost_of(batch: list[Chunk]) -> list[Chunk]:
        return [chunk for chunk in batch if not reader.is_whole(*chunk, scratch_tensor(reader, *chunk))]

    batches = all_chunks(reader, range(len(reader.manifest.storages)))
    # A copy is decoded from its master's chunks. Once marked these decode, to NaN, and the copy would seem intact:
    # check all chunks before marking the first.
    for batch in list(workers.map(lost_of, batches)):
        for lost in batch:
            reader.mark_lost(*lost)


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


@dataclass(kw_only=True, slots=True)
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
        is_damaged = self.lost or self.damage is not None or self.base is not None
        return not is_damaged and all(member.state == WHOLE for member in self.members)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, and ``complete``."""
        return {**asdict(self), "path": str(self.path), "complete": self.complete}

    def lines(self) -> list[str]:
        """What to tell the user, as lines of text."""
        summary = f"{counted(self.tensors, 'tensor')} intact, {len(self.lost):,} not recovered in full"
        lines = [f"{self.path}: {summary}", *Restored.lines(self)]
        if self.damage is not None:
            lines.append(f"{self.damage}; nothing proves the names, shapes and offsets that its manifest states")
        if self.base is not None:
            lines.append(self.base)
        lines += [
            f"{member.path}: {member.state}" + (f", see {member.written}" if member.state == TENSORS else "")
            for member in self.members
            if member.state != WHOLE
        ]
        for tensor in self.lost:
            # In words the last element is one of them, as in "0 to 4".
            runs = ", ".join(f"{start} to {stop - 1}" for start, stop in tensor.elements)
            lost = f"elements {runs} of the {tensor.count} in its storage are lost"
            lines.append(f"  {tensor.name}: {lost if runs else 'intact, but a safetensors file cannot hold it'}")
        return lines


def salvage(
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
        raise type(exc)(f"{exc}; nothing can be recovered") from exc
    with reader, Workers(threads) as workers:
        # First of all: the states of the members follow from the lost chunks.
        find_lost(reader, workers)
        result = Salvage.at(sources, target, reader)
        result.damage, result.base = reader.damage, reader.damage_below()
        salvaging = _Salvaging(reader, workers, progress)
        if reader.manifest.directory is not None:
            with new_directory(result.path, reader, force=force) as directory:
                salvaging.write_directory(directory, result)
                directory.publish()
            result.replaced = directory.replaced
        else:
            salvaging.write_file(result, file_check(target), force=force)
        salvaging.list_tensors(result)
        return result


class _Salvaging:
    """Writes the members of one damaged container by their states."""

    def __init__(self, reader: DamagedContainer, workers: Workers, progress: Progress) -> None:
        self._reader = reader
        self._manifest = reader.manifest
        self._writer = MemberWriter(reader, workers, progress, partial(MemberFile, reader))
        self._states = [self._state(member) for member in self._manifest.members]
        # Names of intact tensors that a safetensors file cannot hold; _open_tensor_file adds them.
        self._unwritten: set[str] = set()

    def _state(self, member: MemberRecord) -> str:
        lost = self._reader.lost
        if member.skeleton in lost:
            return LOST if member.format in (FILE, SYMLINK, DIRECTORY) else TENSORS
        return DAMAGED if any(storage in lost for _, storage in member.segments) else WHOLE

    def write_file(self, result: Salvage, check: Check, *, force: bool) -> None:
        """Write the only member. Raises InputError if nothing of it is intact."""
        (member,) = self._manifest.members
        if self._states[0] == LOST:
            raise InputError(f"{self._reader.path}: its file is damaged and no checkpoint; nothing can be recovered")
        if self._states[0] == TENSORS:
            tensors = self._open_tensor_file(0, "")
            if not tensors.names:
                raise InputError(f"{self._reader.path}: no tensor is intact; nothing can be recovered")
            # The user did not give this name, so it replaces checkpoints only.
            result.path = default_path(result.path.with_name(result.path.name + SAFETENSORS))
            check = checkpoint_file
            refuse_source(result.path, self._reader.path)
        with AtomicFile(result.path, force=force, check=check) as output:
            if self._states[0] == TENSORS:
                tensors.write(output.file.fileno(), output.guard)
            else:
                self._writer.write(0, output.file.fileno(), output.guard)
                self._mend_checksums(output.path, output.guard)
            output.publish()
        result.replaced = output.replaced
        result.members.append(SalvagedMember(member.path, self._states[0], str(result.path)))

    def write_directory(self, output: AtomicDirectory, result: Salvage) -> None:
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
            result.members.append(SalvagedMember(member.path, state, None if state == LOST else written))
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
        intact = [t for t in self._manifest.tensors if t.storage in own and not self._lost_elements(t)]
        file = TensorFile(self._reader, [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in intact])
        self._unwritten |= {tensor.name for tensor in intact if tensor.name.removeprefix(prefix) not in file.names}
        return file

    def _lost_elements(self, tensor: TensorRecord) -> list[list[int]]:
        """The lost runs [start, stop) of its storage that a tensor overlaps, in elements of the tensor's type."""
        if not tensor.span:
            return []
        end = tensor.offset + tensor.span
        record = self._manifest.storages[tensor.storage]
        size, item = record.dtype.itemsize, tensor.dtype.itemsize
        # The storage may count elements of another size, such as bytes. Round outwards: one lost byte loses an element.
        runs = [
            (start * size // item, -(-stop * size // item)) for start, stop in self._reader.lost_runs(tensor.storage)
        ]
        return [[start, stop] for start, stop in runs if start < end and stop > tensor.offset]

    def list_tensors(self, result: Salvage) -> None:
        """Count the tensors written intact; list the others, and damaged storages that no damaged tensor lies in."""
        owner = {storage: member.path for member in self._manifest.members for _, storage in member.segments}
        named = set()
        for tensor in self._manifest.tensors:
            record = self._manifest.storages[tensor.storage]
            elements = self._lost_elements(tensor)
            named |= {tensor.storage} if elements else set()
            if elements or tensor.name in self._unwritten:
                count = record.nbytes // tensor.dtype.itemsize
                result.lost.append(LostTensor(owner.get(tensor.storage, ""), tensor.name, elements, count))
            else:
                result.tensors += 1
        for storage in sorted(self._reader.lost.keys() - named):
            record = self._manifest.storages[storage]
            path = owner.get(storage) or next(m.path for m in self._manifest.members if m.skeleton == storage)
            runs = [list(run) for run in self._reader.lost_runs(storage)]
            result.lost.append(LostTensor(path, record.name, runs, record.numel))
