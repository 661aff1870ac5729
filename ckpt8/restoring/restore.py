"""``restore``: writes the file or directory that a container was made from, with every checksum in place."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

from ckpt8.container.manifest import DIRECTORY, SYMLINK
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.core.files.atomic import AtomicFile
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.workers import Progress, Workers
from ckpt8.restoring.member_output import Target, about_names, link_target, new_directory, write_member
from ckpt8.restoring.salvage import Salvage
from ckpt8.restoring.salvage import salvage as run


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
    called: see ``container.target_names``. What was stored lossless is identical; the rest is within the error that
    ``inspect`` shows. With ``force`` an existing file is replaced, where no ``target`` is given only a checkpoint, and
    an existing directory if it is a checkpoint with nothing else in it: see ``checkpoint.replacing``. Raises
    InputError for damage, OutputError when the target exists (without ``force``), is not replaced or cannot be written.

    With ``salvage`` a damaged container is no error as long as anything in it is whole: see ``restoring.salvage`` for
    what is written of it, and for what it gives.
    """
    if salvage:
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
