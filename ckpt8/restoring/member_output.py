"""Where a restored member goes, and its bytes on the way there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from ckpt8.checkpoint.replacing import checkpoint_directory, checkpoint_file
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.member_file import MemberFile, Piece
from ckpt8.container.member_paths import link_stays_inside
from ckpt8.container.reader import ContainerReader
from ckpt8.container.target_names import original_name, restored_path
from ckpt8.core.errors import InputError
from ckpt8.core.files.atomic import Check, Guard, any_file, refuse_same_file
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.files.crc import combine, crc32
from ckpt8.core.files.write_at import write_at
from ckpt8.core.workers import Progress, Workers


def link_target(reader: ContainerReader, member: int) -> str:
    """What a link leads to. Raises InputError for one that leads out of the directory."""
    path = reader.manifest.members[member].path
    target = os.fsdecode(MemberFile(reader, member).read())
    if not link_stays_inside(path, target):
        raise InputError(
            f"{reader.path}: holds a link {path[:80]!r} that leads out of its directory; nothing is written"
        )
    return target


def write_member(member: MemberFile, descriptor: int, guard: Guard, workers: Workers, progress: Progress) -> None:
    """Write a member to an empty file, with its checksums in place. Raises InputError, OutputError."""
    with guard():
        os.ftruncate(descriptor, member.size)
    crcs = _copy(member, descriptor, guard, workers, progress)
    with guard():
        for storage, crc in crcs.items():
            for place, field in member.patch_crc(storage, crc):
                os.pwrite(descriptor, field, place)


def _copy(member: MemberFile, descriptor: int, guard: Guard, workers: Workers, progress: Progress) -> dict[int, int]:
    """Decode and write every piece; the crc32 of every storage that changed."""

    def decode(piece: Piece) -> tuple[Piece, torch.Tensor, int]:
        content = host_bytes(piece.stop - piece.start)
        view = bytes_of(content)
        member.fill(piece, view)
        return piece, content, crc32(view) if member.needs_crc(piece.storage) else 0

    crcs: dict[int, int] = {}
    # One thread writes: several would only wait for each other at the file.
    for piece, content, crc in workers.map(decode, member.pieces(0, member.size)):
        with guard():
            write_at(descriptor, bytes_of(content), piece.start)
        if member.needs_crc(piece.storage):
            crcs[piece.storage] = combine(crcs.get(piece.storage, 0), crc, content.numel())
        progress(content.numel())
    return crcs


@dataclass(frozen=True, slots=True)
class Target:
    """Where something is restored. ``named``: the user gave the path. ``original`` is what the container calls it."""

    path: Path
    named: bool
    original: str

    @classmethod
    def choose(cls, source: Path, given: str | os.PathLike[str] | None, reader: ContainerReader) -> Target:
        """The path that was given, or the default. Raises OutputError for the source itself."""
        path = restored_path(source, reader.manifest) if given is None else Path(given)
        refuse_same_file(path, source)
        return cls(path, given is not None, original_name(reader.manifest))

    @property
    def check_file(self) -> Check:
        """What ``force`` may replace: any file that the user named, else checkpoints."""
        return any_file if self.named else checkpoint_file

    @property
    def other_name(self) -> str | None:
        """What the original was called, if the default name is another one."""
        return None if self.named or self.path.name == self.original else self.original


def about_names(other_name: str | None, replaced: str | None) -> list[str]:
    """Lines of text: what the original was called, and what was replaced."""
    lines = [] if other_name is None else [f"the original was called {other_name[:80]!r}"]
    return lines if replaced is None else [*lines, f"replaced {replaced}"]


def new_directory(target: Target, reader: ContainerReader, *, force: bool) -> AtomicDirectory:
    """The directory for all members. With ``force`` it replaces a checkpoint, and files that are written again."""
    check = checkpoint_directory([member.path for member in reader.manifest.members])
    return AtomicDirectory(target.path, force=force, keep=reader.path, check=check)
