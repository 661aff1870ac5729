"""The readers: one module for each source format. A reader recognises its format by content, never by name.

Imports container, codecs and core, and of checkpoint the tree and the walk over it.

A new reader is a module in this package and a line in ``READERS``. The module has two functions, those of
``tree.Reader``:

    sniff(file)     whether the content is of this format; it reads as little as possible
    read(file)      an ``OpenCheckpoint``: the id of the reader, the file, its storages and its tree

``storages`` place every run of tensor bytes in the file; no two overlap. All other bytes are kept as they are, so that
the file comes back byte for byte. ``tree`` holds dict, list, tuple, scalars, and a ``TensorRef`` for each tensor. A
dict ``{"state": ..., "param_groups": ...}`` is an optimizer. ``read`` checks every number that it takes from the file:
it raises an InputError that names a damaged file, and never allocates an announced size.
``tests/checkpoint/readers/test_reader_conformance.py`` tests every reader for this.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import cast

from ckpt8.checkpoint.readers.entries import refuse_lone_shard, refuse_share
from ckpt8.checkpoint.tree import OpenCheckpoint, Reader
from ckpt8.container.header import CONTAINER, HEAD_BYTES, begins_container
from ckpt8.container.reader import ContainerReader
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import InputError, UnsupportedError, require
from ckpt8.core.files.source_file import ByteRange, SourceFile, open_range, reading, refuse_url

READERS: dict[str, str] = {
    "torch-zip": "ckpt8.checkpoint.readers.torch_zip",
    "torch-legacy": "ckpt8.checkpoint.readers.torch_legacy",
    "safetensors": "ckpt8.checkpoint.readers.safetensors",
}
"""The module of every format by its id, in the order of trying. ``get_reader`` imports a module when it is needed."""

PACKED = "already a .ckpt8 file; give the checkpoint that it was made from"
"""The problem of a container where a plain checkpoint is asked for."""

WITHOUT_TENSORS = "a directory without tensors; give a checkpoint, or list a run with ckpt8 runs"
"""The problem of a directory that is no checkpoint."""

_TAR_MAGIC_OFFSET = 257
_KNOWN_STARTS = (
    (b"PK", "a zip file without a data.pkl"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself (git lfs pull fetches it)"),
    (b"\x80", "a plain pickle (of a distributed checkpoint give the folder, not its .metadata)"),
    (b"\x1f\x8b", "a gzip file (unpack it first)"),
    (b"\x28\xb5\x2f\xfd", "a zstandard file (unpack it first)"),
    (b"\x89HDF", "an HDF5 file"),
)


def get_reader(reader_id: str) -> Reader:
    """The reader with an id. Raises KeyError for an unknown id."""
    return cast("Reader", import_module(READERS[reader_id]))


def match_reader(file: SourceFile) -> Reader | None:
    """The reader for the content of ``file``, or None. Raises InputError where the file cannot be read."""
    return next((reader for reader in map(get_reader, READERS) if reader.sniff(file)), None)


@contextmanager
def open_checkpoint(path: Path) -> Iterator[OpenCheckpoint]:
    """Open a checkpoint file of any known format. Raises InputError for everything else, UsageError for a URL."""
    with closing(open_range(_as_source(path))) as file:
        refuse_lone_shard(path.name, str(path))
        reader = match_reader(file)
        if reader is None:
            raise _refusal(file)
        with without_collection():
            opened = reader.read(file)
            refuse_share(opened.tree, str(path))
        yield opened


def is_plain_file(path: Path) -> bool:
    """Whether a file begins as a checkpoint of torch or safetensors does; False where nothing is there.

    Raises InputError, or UsageError for a URL.
    """
    refuse_url(path)
    with reading(path):
        if not path.is_file() or not path.stat().st_size:
            return False
    with closing(open_range(ByteRange.of(path))) as file:
        reader = match_reader(file)
    # A container with a damaged head can look like safetensors.
    return reader is not None and (path.suffix != CONTAINER or reader is not get_reader("safetensors"))


def _as_source(path: Path) -> ByteRange:
    refuse_url(path)
    with reading(path):
        if path.is_dir():
            what = "a directory; give one of the checkpoint files inside it"
            raise InputError(f"{path}: {what if any(path.iterdir()) else 'an empty directory; give a checkpoint file'}")
    source = ByteRange.of(path)
    require(source.length != 0, f"{path}: an empty file; the save was interrupted or the disk was full")
    return source


def _refusal(file: SourceFile) -> InputError:
    """The error for a file of no known format. It says what the file is, and what to do."""
    head = file.read(0, min(HEAD_BYTES, file.source.length))
    if head[_TAR_MAGIC_OFFSET : _TAR_MAGIC_OFFSET + 5] == b"ustar":
        return UnsupportedError(f"{file.source}: a tar file; unpack it, or load it and save it again with torch.save")
    if begins_container(head):
        return InputError(f"{file.source}: {PACKED}")
    if file.source.path.suffix == CONTAINER:
        ContainerReader(file.source.path).close()  # says what is damaged, and what helps
    what = next((what for start, what in _KNOWN_STARTS if head.startswith(start)), None)
    if what is None:
        what = "a text file" if is_text(head) else "of an unknown format"
        what = what if head.strip(b"\0") else "starts with zero bytes only, as after an interrupted save"
    return InputError(f"{file.source}: {what}; expected a file written by torch.save or safetensors")


def is_text(head: bytes) -> bool:
    """Whether these first bytes of a file are text, of which the last character may be cut."""
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return b"\0" not in head
