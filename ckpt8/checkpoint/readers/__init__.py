"""The readers: one module per source format, recognised by content and never by name."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from ckpt8.checkpoint.readers.shards import is_named_shard, lone_shard
from ckpt8.checkpoint.tree import Checkpoint, Reader
from ckpt8.container.header import HEAD_BYTES, begins_container
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile

READERS: tuple[tuple[str, str], ...] = (
    ("torch-zip", "ckpt8.checkpoint.readers.torch_zip:TorchZipReader"),
    ("torch-legacy", "ckpt8.checkpoint.readers.torch_legacy:TorchLegacyReader"),
    ("safetensors", "ckpt8.checkpoint.readers.safetensors:SafetensorsReader"),
)
"""Every format by id and class, in the order in which they are tried. Classes are imported when needed."""

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
    """Make the reader of that id. Raises KeyError for an unknown id."""
    module, _, name = dict(READERS)[reader_id].partition(":")
    reader: Reader = getattr(import_module(module), name)()
    return reader


def match_reader(source: ByteRange) -> Reader | None:
    """Pick the reader for the content of ``source``, if there is one. Raises InputError where it cannot be read."""
    readers = (get_reader(reader_id) for reader_id, _ in READERS)
    return next((reader for reader in readers if reader.sniff(source)), None)


def find_reader(source: ByteRange) -> Reader:
    """As ``match_reader``. Raises InputError, saying what it is, if none fits."""
    reader = match_reader(source)
    if reader is None:
        raise _refusal(source)
    return reader


@contextmanager
def open_checkpoint(path: Path) -> Iterator[Checkpoint]:
    """Open a checkpoint file of any known format. Raises InputError for everything else."""
    source = _as_source(path)
    if is_named_shard(path.name):
        raise lone_shard(str(path))
    with find_reader(source).open(source) as checkpoint:
        yield checkpoint


def _as_source(path: Path) -> ByteRange:
    try:
        if path.is_dir():
            raise InputError(_about_directory(path))
        if not path.exists():
            raise InputError(f"{path}: no such file")
        if not path.is_file():
            raise InputError(f"{path}: not a regular file; give the path of a checkpoint file")
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror}") from exc
    source = ByteRange.of(path)
    if source.length == 0:
        raise InputError(f"{path}: an empty file; the save was interrupted or the disk was full")
    return source


def _about_directory(path: Path) -> str:
    if next(path.iterdir(), None) is None:
        return f"{path}: an empty directory; give a checkpoint file"
    return f"{path}: a directory; give one of the checkpoint files inside it"


def _refusal(source: ByteRange) -> InputError:
    """Say what a file of no known format is, and what to do."""
    file = SourceFile(source)
    try:
        head = file.read(0, min(HEAD_BYTES, source.length))
    finally:
        file.close()
    if head[_TAR_MAGIC_OFFSET : _TAR_MAGIC_OFFSET + 5] == b"ustar":
        return UnsupportedError(f"{source}: a tar file; unpack it, or load it and save it again with torch.save")
    if begins_container(head):
        return InputError(f"{source}: already a .ckpt8 file; give the checkpoint that it was made from")
    return InputError(f"{source}: {_describe(head)}; expected a file written by torch.save or safetensors")


def _describe(head: bytes) -> str:
    for start, what in _KNOWN_STARTS:
        if head.startswith(start):
            return what
    if not head.strip(b"\0"):
        return "starts with zero bytes only, as after an interrupted save"
    try:
        # Incremental, because a character may be cut at the end of the head.
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return "of an unknown format"
    return "of an unknown format" if b"\0" in head else "a text file"
