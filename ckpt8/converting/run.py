"""``convert``: opens the source, chooses the writer, and lets it write."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt8.container.writer import refuse_inside, refuse_same_file
from ckpt8.pipeline import Progress
from ckpt8.readers.directory import is_directory
from ckpt8.writers import writer_for
from ckpt8.writers.base import Report, Request, parse_dtype


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str | None = None,
    dtype: str | None = None,
    key: str | None = None,
    member: str | None = None,
    force: bool = False,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Write a checkpoint in another format; what was written, cast and left out.

    ``source`` is anything that ``compress`` takes, or a ``.ckpt8`` of it, which is decoded on the way; slices of a
    distributed checkpoint are put together. ``to`` is torch, safetensors, trainer, dcp, flashoptim or ckpt8; without it
    the name of ``target`` decides. ``dtype`` is the element type of the weights: float32, bfloat16 or float16. Without
    it they keep theirs, but fp32 becomes bf16 in safetensors and in flashoptim's layout. ``key`` is the path of the
    model in the tree where there are several, with dots; ``member`` one file of a directory, or a folder of it with a
    distributed checkpoint. ``progress`` is called with numbers of bytes that add up to the source's.

    Memory is bounded by blocks, nothing of a pickle is executed, and the target appears whole or not at all. Raises
    InputError for a source that is damaged or in pieces by rank, UsageError for what it does not hold and for the
    arguments, OutputError for the target.
    """
    path, wanted = Path(source), Path(target)
    ends_in_slash = os.fspath(target).endswith((os.sep, "/"))
    writer = writer_for(wanted, to, is_directory=ends_in_slash or is_directory(wanted))
    refuse_same_file(wanted, path)
    refuse_inside(wanted, path)
    request = Request(path, wanted, parse_dtype(dtype), key, member, force, threads, progress)
    return writer.write(request)
