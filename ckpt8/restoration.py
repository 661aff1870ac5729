"""``restore``: writes the file or directory that a container was made from, with every checksum in place."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from ckpt8.container.atomic_directory import AtomicDirectory
from ckpt8.container.disk import write_at
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.manifest import DIRECTORY, SYMLINK
from ckpt8.container.member_file import MemberFile, Piece
from ckpt8.container.member_paths import is_plain_name, link_stays_inside
from ckpt8.container.reader import ContainerReader
from ckpt8.container.writer import AtomicFile, refuse_same_file
from ckpt8.crc import combine, crc32
from ckpt8.errors import InputError
from ckpt8.pipeline import Progress
from ckpt8.workers import Workers

if TYPE_CHECKING:
    from ckpt8.salvage import Salvage

Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes a context that turns an OSError into an OutputError."""


def default_target(source: Path, reader: ContainerReader) -> Path:
    """The name of the original, beside the container. Raises InputError for a name that leaves the directory."""
    manifest = reader.manifest
    name = manifest.directory if manifest.directory is not None else manifest.members[0].path
    if not is_plain_name(name):
        raise InputError(f"{source}: holds a file name that cannot be used ({name[:80]!r}); give one with -o")
    return source.with_name(name)


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
    """Write the original back, to ``target`` or under its own name beside the container; the path written.

    What was stored lossless is identical; the rest is within the error that ``inspect`` shows. With ``force`` an
    existing file, or for a directory an existing directory with all in it, is replaced. Raises InputError for damage,
    OutputError when the target exists (without ``force``) or cannot be written.

    With ``salvage`` a damaged container is no error as long as anything in it is whole: see ``ckpt8.salvage`` for what
    is written of it, and for what it gives.
    """
    if salvage:
        from ckpt8.salvage import salvage as run

        return run(source, target, force=force, threads=threads, progress=progress)
    source = Path(source)
    with ContainerReader(source, kernels=True) as reader:
        target = default_target(source, reader) if target is None else Path(target)
        refuse_same_file(target, source)
        if reader.manifest.directory is not None:
            members = enumerate(reader.manifest.members)
            links = {index: link_target(reader, index) for index, each in members if each.format == SYMLINK}
            with AtomicDirectory(target, force=force, keep=source) as directory, Workers(threads) as workers:
                _restore_members(reader, links, directory, workers, progress)
                directory.publish()
            return target
        with AtomicFile(target, force=force) as output, Workers(threads) as workers:
            write_member(MemberFile(reader, 0), output.file.fileno(), output.guard, workers, progress)
            output.publish()
    return target


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
