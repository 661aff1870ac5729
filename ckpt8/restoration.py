"""``restore``: writes the file or directory that a container was made from, with every checksum in place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from ckpt8.checkpoint.replacing import checkpoint_directory, checkpoint_file
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.manifest import DIRECTORY, SYMLINK
from ckpt8.container.member_file import MemberFile, Piece
from ckpt8.container.member_paths import link_stays_inside
from ckpt8.container.reader import ContainerReader
from ckpt8.container.target_names import original_name, restored_path
from ckpt8.core.errors import InputError
from ckpt8.core.files.atomic import AtomicFile, Check, Guard, any_file, refuse_same_file
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.files.crc import combine, crc32
from ckpt8.core.files.write_at import write_at
from ckpt8.core.workers import Progress, Workers

if TYPE_CHECKING:
    from ckpt8.salvage import Salvage


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


@dataclass(frozen=True, slots=True)
class Restored:
    """``path`` was written; ``original`` is what the container calls it, ``replaced`` says what had the path before."""

    path: Path
    original: str
    replaced: str | None
    other_name: str | None

    def lines(self) -> list[str]:
        """What there is to say of the names, as lines of text."""
        return about_names(self.other_name, self.replaced)


def about_names(other_name: str | None, replaced: str | None) -> list[str]:
    """Lines of text: what the original was called, and what was replaced."""
    lines = [] if other_name is None else [f"the original was called {other_name[:80]!r}"]
    return lines if replaced is None else [*lines, f"replaced {replaced}"]


@overload
def restore(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = ...,
    *,
    salvage: Literal[False] = ...,
    force: bool = ...,
    threads: int | None = ...,
    progress: Progress = ...,
) -> Path: ...


@overload
def restore(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = ...,
    *,
    salvage: Literal[True],
    force: bool = ...,
    threads: int | None = ...,
    progress: Progress = ...,
) -> Salvage: ...


def restore(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    salvage: bool = False,
    force: bool = False,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Path | Salvage:
    """Write the original back, to ``target`` or beside the container under the container's name; the path written.

    ``best.ckpt8`` gives ``best.pt``, ``best.safetensors``, ... or the directory ``best``, whatever the original was
    called: see ``ckpt8.container.target_names``. What was stored lossless is identical; the rest is within the error that
    ``inspect`` shows. With ``force`` an existing file is replaced, where no ``target`` is given only a checkpoint, and
    an existing directory if it is a checkpoint with nothing else in it: see ``ckpt8.checkpoint.replacing``. Raises InputError for
    damage, OutputError when the target exists (without ``force``), is not replaced or cannot be written.

    With ``salvage`` a damaged container is no error as long as anything in it is whole: see ``ckpt8.salvage`` for what
    is written of it, and for what it gives.
    """
    if salvage:
        from ckpt8.salvage import salvage as run

        return run(source, target, force=force, threads=threads, progress=progress)
    return restore_original(source, target, force=force, threads=threads, progress=progress).path


def restore_original(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    *,
    force: bool,
    threads: int | None,
    progress: Progress,
) -> Restored:
    """As ``restore`` without ``salvage``, and what there is to say of it."""
    source = Path(source)
    with ContainerReader(source, kernels=True) as reader:
        chosen = Target.choose(source, target, reader)
        if reader.manifest.directory is not None:
            members = enumerate(reader.manifest.members)
            links = {index: link_target(reader, index) for index, each in members if each.format == SYMLINK}
            with new_directory(chosen, reader, force=force) as directory, Workers(threads) as workers:
                _restore_members(reader, links, directory, workers, progress)
                directory.publish()
            return Restored(chosen.path, chosen.original, directory.replaced, chosen.other_name)
        with AtomicFile(chosen.path, force=force, check=chosen.check_file) as output, Workers(threads) as workers:
            write_member(MemberFile(reader, 0), output.file.fileno(), output.guard, workers, progress)
            output.publish()
        return Restored(chosen.path, chosen.original, output.replaced, chosen.other_name)


def new_directory(target: Target, reader: ContainerReader, *, force: bool) -> AtomicDirectory:
    """The directory for all members. With ``force`` it replaces a checkpoint, and files that are written again."""
    check = checkpoint_directory([member.path for member in reader.manifest.members])
    return AtomicDirectory(target.path, force=force, keep=reader.path, check=check)


def link_target(reader: ContainerReader, member: int) -> str:
    """What a link leads to. Raises InputError for one that leads out of the directory."""
    path = reader.manifest.members[member].path
    target = os.fsdecode(MemberFile(reader, member).read())
    if not link_stays_inside(path, target):
        raise InputError(
            f"{reader.path}: holds a link {path[:80]!r} that leads out of its directory; nothing is written"
        )
    return target


def _restore_members(
    reader: ContainerReader, links: dict[int, str], output: AtomicDirectory, workers: Workers, progress: Progress
) -> None:
    for index, member in enumerate(reader.manifest.members):
        if index in links:
            output.add_link(member.path, links[index])
        elif member.format == DIRECTORY:
            output.make_directory(member.path)
        else:
            with output.new_file(member.path) as descriptor:
                write_member(MemberFile(reader, index), descriptor, output.guard, workers, progress)


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
    import torch

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
