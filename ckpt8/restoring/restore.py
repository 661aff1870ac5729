"""``ckpt8.restore``: writes the file or directory that a container was made from, with every checksum in place.

Without torch, where the kernels of numba do the work.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from ckpt8.checkpoint.readers import is_plain_file
from ckpt8.container.bases import sources_of
from ckpt8.container.header import is_container
from ckpt8.container.manifest import SYMLINK
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import find_sharded, refuse_directory
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import require
from ckpt8.core.files.atomic import AtomicFile, as_private_as
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import sent_ahead
from ckpt8.core.public import checked
from ckpt8.core.workers import Progress, Workers
from ckpt8.restoring.members import MemberWriter, Restored, file_check, new_directory, room_of

if TYPE_CHECKING:
    from ckpt8.restoring.salvage import Salvage
    from ckpt8.restoring.sharded_salvage import SalvagedDirectory


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
) -> Salvage | SalvagedDirectory: ...


@checked
def restore(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    salvage: bool = False,
    force: bool = False,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Path | Salvage | SalvagedDirectory:
    """Write the original back to ``target``; return the path that was written.

    Without ``target``, ``best.ckpt8`` gives ``best.pt``, ``best.safetensors``, ... or the directory ``best`` beside it,
    whatever the original was called: see ``restored_path``. What was stored lossless is identical; the rest is
    within the error that ``inspect`` shows. With ``force`` an existing file is replaced (without ``target`` only a
    checkpoint), and a directory that is a checkpoint and holds nothing else: see ``checkpoint.replacing``. Raises
    InputError for damage, OutputError when the target exists and is not replaced, or cannot be written.

    A directory that ``Ckpt8StorageWriter`` wrote becomes a plain one, which ``target`` must name, with the same slices.
    Of a trainer's checkpoint that holds such a directory in its folder ``ckpt8`` only this one is written.

    With ``salvage`` a damaged container is an error only if nothing in it is whole. Returns a ``Salvage``: see
    ``restoring.salvage``. A directory that ranks have packed, in which files are damaged or missing, gives a plain one
    with the tensors that are whole, and a ``SalvagedDirectory``: see ``restoring.sharded_salvage``.

    >>> ckpt8.restore("run.ckpt8", "back.pt").name
    'back.pt'
    """
    if salvage:
        source = as_path(source)
        with sources_of(source, damaged_too=True) as sources:
            if (directory := find_sharded(source)) is not None:
                # Needs torch.distributed.checkpoint, which takes as long to import as torch.
                from ckpt8.restoring.sharded_salvage import salvage_directory

                return salvage_directory(directory, target, force=force, threads=threads, progress=progress)
            # Opens what it wrote, as tensors.
            from ckpt8.restoring.salvage import salvage_container

            return salvage_container(sources, target, force=force, threads=threads, progress=progress)
    return restore_original(source, target, force=force, threads=threads, progress=progress).path


def refuse_plain(source: Path) -> None:
    """Raise InputError for a checkpoint of torch or safetensors."""
    require(not is_plain_file(source), f"{source}: is a plain checkpoint already, and needs no restoring")


@without_collection()
def restore_original(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None,
    *,
    force: bool,
    threads: int | None,
    progress: Progress,
) -> Restored:
    """Restore an undamaged source; also says which names the container states and what was replaced."""
    source = as_path(source)
    refuse_plain(source)
    if (packed := find_sharded(source)) is not None:
        from ckpt8.restoring.sharded import restore_directory

        with as_private_as(source, packed):
            result = restore_directory(packed, target, force=force, threads=threads, progress=progress)
        if packed != source:
            result.left = sorted(path.name for path in source.iterdir() if path.name != packed.name)
        return result
    refuse_directory(source)
    ahead = sent_ahead(source) if is_container(source) else nullcontext()
    with ahead, sources_of(source) as sources, ContainerReader(source) as reader:
        result = Restored.at(sources, target, reader)
        reader.expect_all()
        _ = reader.backend  # If that is torch, it is imported before the threads begin, which restrict it to one each.
        with Workers(threads) as workers:
            writer = MemberWriter(reader, workers, progress)
            if reader.manifest.directory is None:
                with AtomicFile(
                    result.path, force=force, check=file_check(target), room=partial(room_of, reader)
                ) as output:
                    output.expect(reader.manifest.members[0].size)
                    writer.write(0, output.file.fileno(), output.guard)
                    output.publish()
                result.replaced = output.replaced
            else:
                with new_directory(result.path, reader, force=force) as directory:
                    # Links first: one that leads out of the directory is refused before gigabytes are written.
                    members = enumerate(reader.manifest.members)
                    for index, _ in sorted(members, key=lambda pair: pair[1].format != SYMLINK):
                        writer.add(index, directory)
                    directory.publish()
                result.replaced = directory.replaced
        return result
