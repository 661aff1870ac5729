"""Writes whole members of a container to files and directories, for ``restore`` and ``restore --salvage``."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from ckpt8.checkpoint.replacing import checkpoint_directory, checkpoint_file, turn_in_store
from ckpt8.container.bases import refuse_any
from ckpt8.container.checks import is_plain_name, link_stays_inside
from ckpt8.container.header import CONTAINER, SAFETENSORS, SUFFIXES, TORCH
from ckpt8.container.kept_bases import unneeded_file
from ckpt8.container.manifest import DIRECTORY, SYMLINK, Manifest, original_name
from ckpt8.container.member_file import MemberFile, Piece
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, OutputError, require
from ckpt8.core.files.atomic import Check, Guard, allocate, default_path, write_at
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import combine, crc32
from ckpt8.core.summary import Summarised
from ckpt8.core.text import listed, size
from ckpt8.core.workers import Buffers, Progress, Workers

_AHEAD = 1
"""Batches per thread that may wait to be written: writing one takes less time than decoding it."""


def _memory(length: int) -> memoryview:
    return np.empty(length, np.uint8).data


@dataclass(frozen=True, slots=True)
class MemberWriter:
    """Writes members of ``reader``."""

    reader: ContainerReader
    workers: Workers
    progress: Progress

    def add(self, index: int, directory: AtomicDirectory) -> None:
        """Write a link, a directory or a file to its path in ``directory``. Raises InputError, OutputError.

        A link that leads out of the directory is an InputError.
        """
        member = self.reader.manifest.members[index]
        if member.format == SYMLINK:
            target = os.fsdecode(MemberFile(self.reader, index).read())
            if not link_stays_inside(member.path, target):
                leads_out = f"holds a link {member.path[:80]!r} that leads out of its directory"
                raise InputError(f"{self.reader.path}: {leads_out}; nothing is written")
            directory.add_link(member.path, target)
        elif member.format == DIRECTORY:
            directory.make_directory(member.path)
        else:
            directory.expect(member.size)
            with directory.new_file(member.path) as descriptor:
                self.write(index, descriptor, directory.guard)

    def write(self, index: int, descriptor: int, guard: Guard) -> None:
        """Write a member to an empty file, with its checksums in place. Raises InputError, OutputError."""
        member, buffers = MemberFile(self.reader, index), Buffers(_memory)

        def decode(batch: list[list[Piece]]) -> list[tuple[list[Piece], memoryview, list[int]]]:
            return [decode_run(run, needed=run is not batch[-1]) for run in batch]

        def decode_run(run: list[Piece], *, needed: bool) -> tuple[list[Piece], memoryview, list[int]]:
            start, length = run[0].start, run[-1].stop - run[0].start
            buffer = buffers.take(length)
            view = buffer[:length]
            changed = []
            for piece in run:
                part = view[piece.start - start : piece.stop - start]
                member.fill(piece, part)
                changed.append(crc32(part) if member.needs_crc(piece.storage) else 0)
            if needed:
                member.lend(run[0], buffer[:length])
            return run, buffer, changed

        with guard():
            allocate(descriptor, member.size)
        crcs: dict[int, int] = {}
        # One thread writes: several would only wait for each other at the file.
        for batch in self.workers.map(decode, member.batches(), _AHEAD):
            while batch:
                run, buffer, changed = batch.pop(0)
                start, length = run[0].start, run[-1].stop - run[0].start
                with guard():
                    write_at(descriptor, buffer[:length], start)
                buffers.give(buffer)
                for piece, crc in zip(run, changed, strict=True):
                    if member.needs_crc(piece.storage):
                        crcs[piece.storage] = combine(crcs.get(piece.storage, 0), crc, piece.stop - piece.start)
                self.progress(length)
        with guard():
            for storage, crc in crcs.items():
                for place, field_ in member.patch_crc(storage, crc):
                    os.pwrite(descriptor, field_, place)


R = TypeVar("R", bound="Restored")


@dataclass(kw_only=True, slots=True, repr=False)
class Restored(Summarised):
    """``path`` was written. ``original`` is the name of the original that the container states.

    ``other_name`` is ``original`` where the default path has another name. ``replaced`` says what was there before.
    ``left`` are the names of plain files of a trainer beside what was restored.
    """

    path: Path
    original: str
    other_name: str | None
    replaced: str | None = None
    left: Sequence[str] = ()

    def _summary(self) -> Iterator[tuple[str, str]]:
        for number, line in enumerate(self.lines() or [str(self.path)]):
            yield "" if number else type(self).__name__, line

    @classmethod
    def at(cls: type[R], sources: Sequence[Path], given: str | os.PathLike[str] | None, reader: ContainerReader) -> R:
        """A new result at the path that was given, or the default for the first source. Raises OutputError for any."""
        path = restored_path(sources[0], reader.manifest) if given is None else as_path(given)
        original = original_name(reader.manifest)
        refuse_any(path, sources)
        return cls(
            path=path, original=original, other_name=original if given is None and path.name != original else None
        )

    def lines(self) -> list[str]:
        """What to tell the user about these names, as lines of text."""
        lines = [] if self.other_name is None else [f"the original was called {self.other_name[:80]!r}"]
        return [*lines, f"not written, as it is plain: {listed(self.left, 10)}"] if self.left else lines


def new_directory(path: Path, reader: ContainerReader, *, force: bool, waits: bool = False) -> AtomicDirectory:
    """The directory for all members. With ``force`` it replaces a checkpoint, and files of the same names."""
    return AtomicDirectory(
        path,
        force=force,
        keep=reader.path,
        check=checkpoint_directory([member.path for member in reader.manifest.members]),
        turn=turn_in_store,
        waits=waits,
        room=partial(room_of, reader),
    )


def room_of(reader: ContainerReader) -> str:
    """What the members of a container take."""
    return size(sum(member.size for member in reader.manifest.members))


def file_check(given: str | os.PathLike[str] | None) -> Check:
    """Raises unless ``force`` may replace a file: one that the user named, else a checkpoint; no base of a delta."""
    return checkpoint_file if given is None else unneeded_file


_OF_FORMAT = {"torch-zip": ".pt", "torch-legacy": ".pt", "safetensors": SAFETENSORS}


def restored_path(source: Path, manifest: Manifest) -> Path:
    """Where ``restore`` writes by default: next to the container ``source``, under its name.

    ``best.ckpt8`` gives the directory ``best``, or a file ``best.pt``, ``best.safetensors``, ... The suffix is that of
    the original if it is one of SUFFIXES; else, as for ``weights.model`` or ``weights``, the member's format decides:
    ``.pt`` for what torch.save wrote, ``.safetensors`` for safetensors. So a container that keeps its name gives the
    original its name back. A name that has such a suffix already gets no other one: ``run.pt.ckpt8`` gives ``run.pt``.
    A container with another suffix, or none, keeps it: ``run.v2`` gives ``run.v2.pt``.

    Raises OutputError where that name cannot be used.
    """
    name = source.stem if source.suffix.lower() in (CONTAINER, *SUFFIXES) else source.name
    suffix = Path(original_name(manifest)).suffix
    if suffix.lower() not in SUFFIXES:
        suffix = _OF_FORMAT.get(manifest.members[0].format, ".bin")
    alike = TORCH if suffix.lower() in TORCH else (SAFETENSORS,)
    if manifest.directory is None and Path(name).suffix.lower() not in alike:
        name += suffix
    require(
        is_plain_name(name), f"{source}: its name leaves none for the directory in it; give one with -o", OutputError
    )
    return default_path(source.with_name(name))
