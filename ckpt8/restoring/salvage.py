"""``restore --salvage``: writes the whole parts of a damaged container and lists the others.

The state of a member says what became of it:

    whole      written as it was
damaged    written, but the listed elements are NaN (integers: zero) and the checksums of their records are wrong
tensors    the bytes around its tensors are lost; a safetensors file next to its place holds the whole tensors
lost       not written: no part of it is whole, or it is damaged and no checkpoint
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.replacing import checkpoint_file
from ckpt8.container import frames
from ckpt8.container.damaged import DamagedContainer
from ckpt8.container.decoding import all_chunks, scratch_tensor
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK, MemberRecord, TensorRecord
from ckpt8.container.member_file import MemberFile
from ckpt8.container.target_names import SAFETENSORS, default_path
from ckpt8.core.errors import InputError
from ckpt8.core.files.atomic import AtomicFile, Check, refuse_source
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.workers import Progress, Workers
from ckpt8.restoring.member_output import MemberWriter, Restored, file_check, new_directory
from ckpt8.restoring.salvaged_tensors import TensorFile

WHOLE, DAMAGED, TENSORS, LOST = "whole", "damaged", "tensors", "lost"


@dataclass(frozen=True, slots=True)
class LostTensor:
    """A tensor that is not whole, or a storage without tensors.

    ``elements`` are the lost runs [start, stop) of its storage, which has ``count`` elements. There are none where the
    tensor is whole but a safetensors file cannot hold it.
    """

    member: str
    name: str
    elements: list[list[int]]
    count: int


@dataclass(frozen=True, slots=True)
class SalvagedMember:
    """The path of a member in the source, its state, and the path that was written, or None."""

    path: str
    state: str
    written: str | None


@dataclass(kw_only=True, slots=True)
class Salvage(Restored):
    """What was recovered: ``tensors`` counts the whole ones, ``lost`` lists the others.

    ``damage`` says what is wrong with header, manifest or seal, or is None. Without the seal nothing proves the names,
    shapes and places that the manifest states.
    """

    damage: str | None = None
    tensors: int = 0
    members: list[SalvagedMember] = field(default_factory=list)
    lost: list[LostTensor] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether the container is undamaged."""
        return self.damage is None and not self.lost and all(member.state == WHOLE for member in self.members)

    def to_json(self) -> dict[str, Any]:
        """The fields as plain JSON values, and ``complete``."""
        return {**asdict(self), "path": str(self.path), "complete": self.complete}

    def lines(self) -> list[str]:
        """What to tell the user, as lines of text."""
        found = [f"{self.path}: {self.tensors} tensors are whole, {len(self.lost)} are not", *Restored.lines(self)]
        if self.damage is not None:
            found.append(f"{self.damage}; names, shapes and places are as its manifest has them")
        found += [
            f"{member.path}: {member.state}" + (f", see {member.written}" if member.state == TENSORS else "")
            for member in self.members
            if member.state != WHOLE
        ]
        for tensor in self.lost:
            runs = ", ".join(f"{start} to {stop}" for start, stop in tensor.elements)
            lost = f"elements {runs} of {tensor.count} are lost"
            found.append(f"  {tensor.name}: {lost if runs else 'whole, but no safetensors file can hold it'}")
        return found


def salvage(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    *,
    force: bool,
    threads: int | None,
    progress: Progress,
) -> Salvage:
    """Write the whole parts, as ``restore`` does. Raises InputError where there are none."""
    source = Path(source)
    try:
        reader = DamagedContainer(source)
    except InputError as exc:
        raise type(exc)(f"{exc}; nothing can be recovered") from exc
    with reader, Workers(threads) as workers:
        _find_lost(reader, workers)
        result = Salvage.at(source, target, reader)
        result.damage = reader.damage
        work = _Salvaging(reader, workers, progress)
        if reader.manifest.directory is not None:
            with new_directory(result.path, reader, force=force) as directory:
                work.write_directory(directory, result)
                directory.publish()
            result.replaced = directory.replaced
        else:
            work.write_file(result, file_check(target), force=force)
        work.list_tensors(result)
        return result


def _find_lost(reader: DamagedContainer, workers: Workers) -> None:
    """Decode every chunk once and mark those that cannot be decoded."""

    def check(work: tuple[int, int]) -> tuple[int, int] | None:
        return None if reader.is_whole(*work, scratch_tensor(reader, *work)) else work

    chunks = all_chunks(reader, range(len(reader.manifest.storages)))
    # All are checked before the first is marked: a copy reads the chunks of its master.
    for lost in list(filter(None, workers.map(check, chunks))):
        reader.mark_lost(*lost)


class _Member(MemberFile):
    """A member as a file in which lost storages have wrong checksums."""

    def __init__(self, reader: DamagedContainer, member: int) -> None:
        super().__init__(reader, member)
        self._lost = reader.lost

    def patch_crc(self, storage: int, crc32: int) -> list[tuple[int, bytes]]:
        """As MemberFile, but the complement for a lost storage: zero would mean that there is no checksum."""
        return super().patch_crc(storage, crc32 ^ 0xFFFFFFFF if storage in self._lost else crc32)


class _Salvaging:
    """Writes the members of one damaged container by their states."""

    def __init__(self, reader: DamagedContainer, workers: Workers, progress: Progress) -> None:
        self._reader = reader
        self._manifest = reader.manifest
        self._writer = MemberWriter(reader, workers, progress, partial(_Member, reader))
        self._states = [self._state(member) for member in self._manifest.members]
        self._unwritten: set[str] = set()

    def _state(self, member: MemberRecord) -> str:
        lost = self._reader.lost
        if member.skeleton in lost:
            return LOST if member.format in (FILE, SYMLINK, DIRECTORY) else TENSORS
        return DAMAGED if any(storage in lost for _, storage in member.segments) else WHOLE

    def write_file(self, result: Salvage, check: Check, *, force: bool) -> None:
        """Write the only member."""
        (member,) = self._manifest.members
        if self._states[0] in (TENSORS, LOST):
            tensors = self._tensor_file(0, "")
            if self._states[0] == LOST or not tensors.names:
                raise InputError(f"{self._reader.path}: no tensor is whole; nothing can be recovered")
            # The user did not give this name, so it replaces checkpoints only.
            result.path = default_path(result.path.with_name(result.path.name + SAFETENSORS))
            check = checkpoint_file
            refuse_source(result.path, self._reader.path)
        with AtomicFile(result.path, force=force, check=check) as output:
            if self._states[0] == TENSORS:
                tensors.write(output.file.fileno(), output.guard)
            else:
                self._writer.write(0, output.file.fileno(), output.guard)
            output.publish()
        result.replaced = output.replaced
        result.members.append(SalvagedMember(member.path, self._states[0], str(result.path)))

    def write_directory(self, output: AtomicDirectory, result: Salvage) -> None:
        """Write every member that is whole, or whole in part."""
        taken = {member.path for member in self._manifest.members}
        for index, member in enumerate(self._manifest.members):
            state, written = self._states[index], member.path
            if state == TENSORS:
                tensors = self._tensor_file(index, f"{member.path}:")
                while (written := f"{written}.safetensors") in taken:
                    pass
                if tensors.names:
                    with output.new_file(written) as descriptor:
                        tensors.write(descriptor, output.guard)
                else:
                    state = LOST
            elif state != LOST:
                self._writer.add(index, output)
            result.members.append(SalvagedMember(member.path, state, None if state == LOST else written))

    def _tensor_file(self, index: int, prefix: str) -> TensorFile:
        """The file for the whole tensors of a member. Adds the names of those that it cannot hold to ``_unwritten``."""
        own = {storage for _, storage in self._manifest.members[index].segments}
        whole = [t for t in self._manifest.tensors if t.storage in own and not self._lost_elements(t)]
        file = TensorFile(self._reader, [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in whole])
        self._unwritten |= {tensor.name for tensor in whole if tensor.name.removeprefix(prefix) not in file.names}
        return file

    def _lost_elements(self, tensor: TensorRecord) -> list[list[int]]:
        """The lost runs of its storage that a tensor overlaps, in elements of the tensor's type."""
        if not tensor.span:
            return []
        end = tensor.offset + tensor.span
        record = self._manifest.storages[tensor.storage]
        size, item = record.dtype.itemsize, tensor.dtype.itemsize
        runs = [(start * size // item, -(-stop * size // item)) for start, stop in self._lost_runs(tensor.storage)]
        return [[start, stop] for start, stop in runs if start < end and stop > tensor.offset]

    def _lost_runs(self, storage: int) -> list[tuple[int, int]]:
        """The lost runs [start, stop) of a storage, in elements."""
        numel, lost = self._manifest.storages[storage].numel, self._reader.lost.get(storage, set())
        starts = sorted(chunk * frames.FRAME for chunk in lost if chunk - 1 not in lost)
        stops = sorted(min((chunk + 1) * frames.FRAME, numel) for chunk in lost if chunk + 1 not in lost)
        return list(zip(starts, stops, strict=True))

    def list_tensors(self, result: Salvage) -> None:
        """Count whole tensors; list the others, and damaged storages that have no tensors."""
        owner = {storage: each.path for each in self._manifest.members for _, storage in each.segments}
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
            runs = [list(run) for run in self._lost_runs(storage)]
            result.lost.append(LostTensor(path, record.name, runs, record.numel))
