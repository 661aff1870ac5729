"""``restore --salvage``: whatever is whole in a damaged container, and a list of what is not.

What becomes of a member is its state:

    whole      a member as it was
damaged    written, but the listed elements are NaN, or zeros in what is no float, and the checksums of their
           records in the file do not hold
tensors    the bytes around the tensors are lost: its whole tensors are in a safetensors file beside its place
lost       not written: a file that is no checkpoint with any damage, or nothing of it is whole
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.replacing import checkpoint_file
from ckpt8.container import frames
from ckpt8.container.checking import all_chunks, scratch_tensor
from ckpt8.container.damaged import DamagedContainer
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK, MemberRecord, TensorRecord
from ckpt8.container.member_file import MemberFile
from ckpt8.container.target_names import SAFETENSORS, default_path
from ckpt8.core.errors import InputError
from ckpt8.core.files.atomic import AtomicFile, Guard, refuse_same_file
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.workers import Progress, Workers
from ckpt8.restoring.member_output import Target, about_names, link_target, new_directory, write_member
from ckpt8.restoring.salvaged_tensors import TensorFile

WHOLE, DAMAGED, TENSORS, LOST = "whole", "damaged", "tensors", "lost"


@dataclass(frozen=True, slots=True)
class LostTensor:
    """A tensor that is not whole, or a storage that no tensor views.

    ``elements`` are runs [start, stop) of its storage that are lost, of ``count`` elements; none where it is whole but
    could not be written.
    """

    member: str
    name: str
    elements: list[list[int]]
    count: int


@dataclass(frozen=True, slots=True)
class SalvagedMember:
    """What became of a member: its path in the source, its state, and the path that was written, or None."""

    path: str
    state: str
    written: str | None


@dataclass(slots=True)
class Salvage:
    """``path`` was written, ``tensors`` are whole.

    ``damage`` is what does not hold of header, manifest and seal, or None. Without the seal nothing proves the names,
    shapes and places that the manifest states. ``original`` is what the manifest calls the original; ``other_name`` is
    that as well, if the default name is another. ``replaced`` says what had the path before.
    """

    path: Path
    damage: str | None
    original: str
    tensors: int = 0
    members: list[SalvagedMember] = field(default_factory=list)
    lost: list[LostTensor] = field(default_factory=list)
    replaced: str | None = None
    other_name: str | None = None

    @property
    def complete(self) -> bool:
        """Whether nothing was damaged."""
        return self.damage is None and not self.lost and all(member.state == WHOLE for member in self.members)

    def to_json(self) -> dict[str, Any]:
        """A tree of plain JSON values: what the dataclasses say, by their names."""
        return {**asdict(self), "path": str(self.path), "complete": self.complete}

    def lines(self) -> list[str]:
        """What there is to say, as lines of text."""
        found = [f"{self.path}: {self.tensors} tensors are whole, {len(self.lost)} are not"]
        found += about_names(self.other_name, self.replaced)
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
    """Write what is whole. Raises InputError where nothing is, else as ``restore``."""
    source = Path(source)
    try:
        reader = DamagedContainer(source)
    except InputError as exc:
        raise type(exc)(f"{exc}; nothing can be recovered") from exc
    with reader, Workers(threads) as workers:
        _find_lost(reader, workers)
        chosen = Target.choose(source, target, reader)
        work = _Salvaging(reader, workers, progress)
        result = Salvage(chosen.path, reader.damage, chosen.original, other_name=chosen.other_name)
        if reader.manifest.directory is not None:
            with new_directory(chosen, reader, force=force) as directory:
                work.write_directory(directory, result)
                directory.publish()
            result.replaced = directory.replaced
        else:
            work.write_file(chosen, result, force=force)
        work.list_tensors(result)
        return result


def _find_lost(reader: DamagedContainer, workers: Workers) -> None:
    """Decode everything once."""

    def check(work: tuple[int, int]) -> tuple[int, int] | None:
        return None if reader.is_whole(*work, scratch_tensor(reader, *work)) else work

    chunks = all_chunks(reader, range(len(reader.manifest.storages)))
    for lost in list(filter(None, workers.map(check, chunks))):
        reader.mark_lost(*lost)


class _Member(MemberFile):
    """A member whose lost storages keep checksums that do not hold."""

    def __init__(self, reader: DamagedContainer, member: int) -> None:
        super().__init__(reader, member)
        self._lost = reader.lost

    def patch_crc(self, storage: int, crc32: int) -> list[tuple[int, bytes]]:
        """As MemberFile, but for a lost storage the complement: one of zero would say that there is none."""
        return super().patch_crc(storage, crc32 ^ 0xFFFFFFFF if storage in self._lost else crc32)


class _Salvaging:
    def __init__(self, reader: DamagedContainer, workers: Workers, progress: Progress) -> None:
        self._reader = reader
        self._manifest = reader.manifest
        self._workers = workers
        self._progress = progress
        self._states = [self._state(member) for member in self._manifest.members]
        self._unwritten: set[str] = set()

    def _state(self, member: MemberRecord) -> str:
        lost = self._reader.lost
        if member.skeleton in lost:
            return LOST if member.format in (FILE, SYMLINK, DIRECTORY) else TENSORS
        return DAMAGED if any(storage in lost for _, storage in member.segments) else WHOLE

    def write_file(self, target: Target, result: Salvage, *, force: bool) -> None:
        """Write the only member."""
        (member,) = self._manifest.members
        path, check = target.path, target.check_file
        if self._states[0] in (TENSORS, LOST):
            tensors = self._tensor_file(0, "")
            if self._states[0] == LOST or not tensors.names:
                raise InputError(f"{self._reader.path}: no tensor is whole; nothing can be recovered")
            # Nobody gave this name.
            result.path = path = default_path(path.with_name(path.name + SAFETENSORS))
            check = checkpoint_file
            refuse_same_file(path, self._reader.path)
        with AtomicFile(path, force=force, check=check) as output:
            if self._states[0] == TENSORS:
                tensors.write(output.file.fileno(), output.guard)
            else:
                self._write(0, output.file.fileno(), output.guard)
            output.publish()
        result.replaced = output.replaced
        result.members.append(SalvagedMember(member.path, self._states[0], str(path)))

    def _write(self, index: int, descriptor: int, guard: Guard) -> None:
        write_member(_Member(self._reader, index), descriptor, guard, self._workers, self._progress)

    def write_directory(self, output: AtomicDirectory, result: Salvage) -> None:
        """Write every member of which something is whole."""
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
                self._write_whole(index, member, output)
            result.members.append(SalvagedMember(member.path, state, None if state == LOST else written))

    def _write_whole(self, index: int, member: MemberRecord, output: AtomicDirectory) -> None:
        if member.format == SYMLINK:
            output.add_link(member.path, link_target(self._reader, index))
        elif member.format == DIRECTORY:
            output.make_directory(member.path)
        else:
            with output.new_file(member.path) as descriptor:
                self._write(index, descriptor, output.guard)

    def _tensor_file(self, index: int, prefix: str) -> TensorFile:
        """The whole tensors of a member as they can be written; the others are remembered."""
        own = {storage for _, storage in self._manifest.members[index].segments}
        whole = [t for t in self._manifest.tensors if t.storage in own and not self._lost_elements(t)]
        file = TensorFile(self._reader, [replace(tensor, name=tensor.name.removeprefix(prefix)) for tensor in whole])
        self._unwritten |= {tensor.name for tensor in whole if tensor.name.removeprefix(prefix) not in file.names}
        return file

    def _lost_elements(self, tensor: TensorRecord) -> list[list[int]]:
        """Runs of lost elements of its storage that a tensor has a part in, in elements of its type."""
        if not tensor.span:
            return []
        end = tensor.offset + tensor.span
        record = self._manifest.storages[tensor.storage]
        size, item = record.dtype.itemsize, tensor.dtype.itemsize
        runs = [(start * size // item, -(-stop * size // item)) for start, stop in self._lost_runs(tensor.storage)]
        return [[start, stop] for start, stop in runs if start < end and stop > tensor.offset]

    def _lost_runs(self, storage: int) -> Iterator[tuple[int, int]]:
        """Runs of elements of a storage."""
        numel = self._manifest.storages[storage].numel
        chunks = sorted(self._reader.lost.get(storage, ()))
        for first in (chunk for chunk in chunks if chunk - 1 not in self._reader.lost[storage]):
            last = first
            while last + 1 in self._reader.lost[storage]:
                last += 1
            yield first * frames.FRAME, min((last + 1) * frames.FRAME, numel)

    def list_tensors(self, result: Salvage) -> None:
        """Count what is whole, list what is not: tensors, and storages that are lost but of no tensor."""
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
