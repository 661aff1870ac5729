"""Checks a plain checkpoint, one that is no ``.ckpt8``: every checksum that there is, and that every byte can be read.

A reader has checked the structure when it opened the file: all storages lie inside it, none overlap. A zip file of
torch states a CRC-32 of each record. Old files of torch, safetensors and slices of other writers state none.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ckpt8.checkpoint.readers import READERS, WITHOUT_TENSORS, is_plain_file, torch_zip
from ckpt8.checkpoint.readers.dcp import DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.readers.entries import DirectoryMember, is_directory
from ckpt8.checkpoint.readers.torch_zip import STORED, read_directory
from ckpt8.checkpoint.sources.opening import open_source, storage_crc
from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, format_path, iter_leaves
from ckpt8.container.header import is_meant_as_container
from ckpt8.container.manifest import DIRECTORY, SYMLINK
from ckpt8.container.sharded import find_sharded, is_part
from ckpt8.core.errors import InputError, UsageError, require
from ckpt8.core.files.source_file import SourceFile, Window, refuse_url
from ckpt8.core.tensors import DType
from ckpt8.core.text import counted, listed, shown, size
from ckpt8.core.workers import Progress


@dataclass(frozen=True, slots=True)
class PlainChecks:
    """What ``verify`` has checked of a plain checkpoint, of which every check holds.

    ``files`` are the checkpoint files, ``formats`` the readers of them. ``records`` of their zip files match a CRC;
    ``unknown`` are the storages that no checksum covers: they were read, and their values may have changed unnoticed.
    ``others`` are files that are no checkpoint or that no reader knows; nothing in them was checked.
    """

    files: int
    formats: tuple[str, ...]
    storages: int
    records: int
    unknown: int
    nbytes: int
    others: tuple[str, ...]

    def line(self) -> str:
        """All of it in a sentence."""
        whose = "a plain checkpoint" if self.files == 1 else f"{self.files} plain checkpoint files"
        text = f"{whose} ({', '.join(self.formats)}, {size(self.nbytes)}): structure intact, "
        text += f"{counted(self.storages, 'storage')} inside the file and readable"
        if self.records:
            text += f"; {counted(self.records, 'record')} of the zip match their CRC"
        if self.unknown:
            text += f"; {self.unknown} of {self.storages} storages have no checksum, so changed values would not show"
        if self.others:
            text += f"; not checked: {listed(self.others)}"
        return text


def is_plain(path: Path) -> bool:
    """Whether ``verify`` takes ``path`` for a plain checkpoint, and not for a container or what is left of one."""
    refuse_url(path)
    if is_directory(path):
        return find_sharded(path) is None and not any(is_part(entry.name) for entry in path.iterdir())
    return is_plain_file(path) or not is_meant_as_container(path)


def check_plain(path: Path, original: Path | None, progress: Progress) -> PlainChecks:
    """Read and check a file or directory.

    Raises InputError that names the first tensor that is damaged, UsageError where there is an ``original``.
    """
    with open_source(path, containers=False) as source:
        known = [
            member for member in source.opened if isinstance(member, DcpMember) or member.checkpoint.format in READERS
        ]
        if not known:
            raise InputError(f"{path}: {WITHOUT_TENSORS}")
        require(
            original is None,
            f"{path}: is a plain checkpoint, which states no errors to measure; compare the two with "
            f"ckpt8 diff {path} {original}",
            UsageError,
        )
        checks = _Checks(progress)
        for member in known:
            checks.add(member, str(path) if source.directory is None else f"{path}/{member.path}")
        source.check_unchanged()
        if checks.damage:
            more = f" (and {len(checks.damage) - 1} more)" if len(checks.damage) > 1 else ""
            raise InputError(checks.damage[0] + more)
        paths = {member.path for member in known}
        return PlainChecks(
            len(known),
            tuple(dict.fromkeys(member.checkpoint.format for member in known)),
            sum(len(member.checkpoint.storages) for member in known),
            checks.records,
            checks.unknown,
            sum(member.checkpoint.size for member in known),
            tuple(
                member.path
                for member in source.opened
                if member.path not in paths
                and member.checkpoint.format not in (SYMLINK, DIRECTORY)
                and member.path.rpartition("/")[2] != METADATA
            ),
        )


class _Checks:
    """The checks of several files, counted."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.damage: list[str] = []
        self.records = self.unknown = 0

    def add(self, member: DirectoryMember, where: str) -> None:
        """Read a file, called ``where`` in messages. Raises InputError where it cannot be read."""
        checkpoint, names, zips = member.checkpoint, _names(member.checkpoint.tree), _zips(member)
        for file in zips:
            place = where if len(zips) == 1 else f"{where}: {file.source.name}"
            inside = OpenCheckpoint("torch-zip", file)
            entries = read_directory(file)
            file.expect([(0, file.source.length)])
            for entry in entries:
                if entry.method == STORED and (entry.crc32 or not entry.size):
                    key = entry.name.rpartition("/data/")[2]
                    what = f"record {shown(entry.name)}" + (f", {shown(names[key])}," if key in names else "")
                    record = StorageInfo(key, DType.UINT8, entry.data_offset, entry.size)
                    self._compare(storage_crc(inside, record) == entry.crc32, f"{place}: {what}")
                    self._progress(entry.size)
        if isinstance(checkpoint, OpenCheckpoint) and not zips:
            checkpoint.file.expect([(0, checkpoint.size)])
        for storage in checkpoint.storages:
            if storage.crc32 is None or not zips:
                crc = storage_crc(checkpoint, storage)
                self._progress(storage.nbytes)
                if storage.crc32 is None:
                    self.unknown += storage.nbytes > 0
                else:
                    self._compare(crc == storage.crc32, f"{where}: storage {shown(storage.key)}")

    def _compare(self, is_right: bool, what: str) -> None:
        self.records += 1
        if not is_right:
            self.damage.append(f"{what} is damaged: its CRC does not match")


def _zips(member: DirectoryMember) -> list[SourceFile]:
    """The zip files in a file: itself, or the slices of a distributed checkpoint that are not compressed."""
    checkpoint = member.checkpoint
    if not isinstance(checkpoint, OpenCheckpoint):
        return []
    file = checkpoint.file
    if checkpoint.format == "torch-zip":
        return [file]
    if not isinstance(member, DcpMember) or member.reason is not None:
        return []
    windows = [Window(file, piece.offset, piece.length, f"slice {shown(piece.name)}") for piece in member.slices]
    return [window for window in windows if torch_zip.sniff(window)]


def _names(tree: object) -> dict[str, str]:
    """The path of the first tensor of each storage, by the key of the storage."""
    names: dict[str, str] = {}
    for path, leaf in iter_leaves(tree):
        names.setdefault(leaf.key, format_path(path))
    return names
