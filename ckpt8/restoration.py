"""``restore``: writes the file that a container was made from, decoded, with every checksum in place."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ckpt8.container.frames import bytes_of
from ckpt8.container.member_file import MemberFile, Piece
from ckpt8.container.reader import ContainerReader
from ckpt8.container.writer import AtomicFile, refuse_same_file, start_writeback
from ckpt8.crc import combine, crc32
from ckpt8.errors import InputError
from ckpt8.pipeline import Progress
from ckpt8.workers import Workers


def default_target(source: Path, reader: ContainerReader) -> Path:
    """The name of the original, beside the container. Raises InputError for a name that leaves the directory."""
    name = reader.manifest.members[0].path if reader.manifest.members else ""
    if not name or name in (".", "..") or Path(name).name != name or "\0" in name:
        raise InputError(f"{source}: holds a file name that cannot be used ({name[:80]!r}); give one with -o")
    return source.with_name(name)


def restore(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Path:
    """Write the original back, to ``target`` or under its own name beside the container; the path written.

    What was stored lossless is identical; the rest is within the error that ``inspect`` shows. Raises InputError for
    damage, OutputError when the target exists (without ``force``) or cannot be written.
    """
    source = Path(source)
    with ContainerReader(source) as reader:
        if len(reader.manifest.members) != 1:
            raise InputError(f"{source}: holds {len(reader.manifest.members)} members, expected one file")
        target = default_target(source, reader) if target is None else Path(target)
        refuse_same_file(target, source)
        member = MemberFile(reader, 0)
        with AtomicFile(target, force=force) as output, Workers(threads) as workers:
            with output.guard():
                os.ftruncate(output.file.fileno(), member.size)
            crcs = _copy(member, output, workers, progress)
            with output.guard():
                for storage, crc in crcs.items():
                    for place, field in member.patch_crc(storage, crc):
                        os.pwrite(output.file.fileno(), field, place)
            output.publish()
    return target


def _copy(member: MemberFile, output: AtomicFile, workers: Workers, progress: Progress) -> dict[int, int]:
    """Decode and write every piece; the crc32 of every storage that changed."""
    import torch

    def decode(piece: Piece) -> tuple[Piece, torch.Tensor, int]:
        content = torch.empty(piece.stop - piece.start, dtype=torch.uint8)
        view = bytes_of(content)
        member.fill(piece, view)
        return piece, content, crc32(view) if member.needs_crc(piece.storage) else 0

    crcs: dict[int, int] = {}
    # One thread writes: several would only wait for each other at the file.
    for piece, content, crc in workers.map(decode, _pieces(member)):
        with output.guard():
            _write_at(output.file.fileno(), bytes_of(content), piece.start)
        if member.needs_crc(piece.storage):
            crcs[piece.storage] = combine(crcs.get(piece.storage, 0), crc, content.numel())
        progress(content.numel())
    return crcs


def _pieces(member: MemberFile) -> Iterator[Piece]:
    return member.pieces(0, member.size)


def _write_at(descriptor: int, view: memoryview, offset: int) -> None:
    start, length = offset, len(view)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
    start_writeback(descriptor, start, length)
