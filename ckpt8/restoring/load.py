"""``ckpt8.load``: loads one member of a container, as the object that its own library would load."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.sources.stored_member import load_source, member_index
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.reading import find_sharded
from ckpt8.core.arguments import checked
from ckpt8.core.errors import UsageError
from ckpt8.core.workers import Workers
from ckpt8.restoring.unpack import unpack_tree


@checked
def load(
    path: str | os.PathLike[str],
    *,
    map_location: Any = None,
    member: str | None = None,
    unpack: bool = False,
    threads: int | None = None,
) -> Any:
    """Load what ``torch.load(..., weights_only=True)`` or safetensors' ``load_file`` would give for the original.

    A container of several files needs ``member``, the path of one of them. A file of a distributed checkpoint gives the
    slices of tensors in it by name: ``wte.weight[0:64,:]``. To load such a checkpoint as a whole, restore it and use
    ``torch.distributed.checkpoint``. A directory that ``Ckpt8StorageWriter`` wrote gives the whole state dict.

    With ``unpack``, a run of ``ckpt8.optim`` comes as the published optimizers would have saved it: see
    ``ckpt8.restoring.unpack``. It changes nothing about other optimizers.

    Raises UsageError that lists the members where one must be named, UnsupportedError that lists the classes which
    torch does not allow, and InputError for damage.

    >>> ckpt8.load("run.ckpt8")["model"]["weight"].shape
    torch.Size([128, 128])
    """
    if (directory := find_sharded(Path(path))) is not None:
        if member is not None or unpack:
            advice = "leave out member" if not unpack else "convert it to torch with dtype float32 to unpack it"
            raise UsageError(f"{path}: is a directory of containers of ranks, and loaded as a whole; {advice}")
        # Needs torch.distributed.checkpoint, which takes as long to import as torch.
        from ckpt8.restoring.sharded import load_directory

        return load_directory(directory, map_location, threads)
    with ContainerReader(Path(path)) as reader, Workers(threads) as workers:
        index = member_index(reader, member)
        obj, tree = load_source(reader, index, MemberFile(reader, index, workers), map_location)
        if unpack:
            obj = unpack_tree(obj, tree, str(path))
        return obj
