"""The two sides of a comparison: each source as trees of objects, and as files without tensors.

``diff`` compares two sources of one layout member by member, so that nothing is left out. If the layouts differ, or are
files of ranks, each source becomes one tree, as ``convert`` makes it of the slices of a distributed checkpoint or the
shards of a model.
"""

from __future__ import annotations

from collections import ChainMap, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.quantised_state import quantised_weights
from ckpt8.checkpoint.readers import READERS
from ckpt8.checkpoint.readers.dcp.dcp import DcpMember
from ckpt8.checkpoint.readers.dcp.metadata import METADATA
from ckpt8.checkpoint.readers.entries import DirectoryMember, size_of
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.checkpoint.walk import iter_nodes
from ckpt8.container.manifest import DIRECTORY, SYMLINK
from ckpt8.container.opening import is_stored
from ckpt8.converting.layouts import dcp
from ckpt8.converting.sources import PER_RANK, content_of, layout_of
from ckpt8.core.errors import InputError

_OF_SEVERAL = "directory"


@dataclass(frozen=True, slots=True)
class Part:
    """One tree. ``path`` is its place in a directory, empty for the whole source; ``data`` holds its tensors.

    ``checkpoint`` is its file, or ``data`` if several files make it up. ``crcs`` are the checksums that the source
    states, by the keys of ``data``.
    """

    path: str
    checkpoint: Checkpoint
    data: Composite
    crcs: dict[str, int] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        """What the names of its tensors begin with."""
        return f"{self.path}:" if self.path else ""


@dataclass(slots=True)
class Side:
    """One source. ``files`` are members without tensors, by path; ``notes`` say what ``diff`` does not compare."""

    path: Path
    layout: str
    is_container: bool
    size: int
    parts: list[Part] = field(default_factory=list)
    files: dict[str, Checkpoint] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def check_unchanged(self) -> None:
        """Raise InputError if a file changed since it was opened."""
        for each in (*(part.data for part in self.parts), *self.files.values()):
            each.check_unchanged()

    def facts(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"path": str(self.path), "layout": self.layout, "ckpt8": self.is_container, "bytes": self.size}


def make_sides(a: Bundle, b: Bundle) -> tuple[Side, Side]:
    """Both sides of two open sources. Raises InputError for damage, and for slices by rank that only one side has."""
    layouts = layout_of(a), layout_of(b)
    together = None not in layouts and (layouts[0] != layouts[1] or layouts[0] == PER_RANK)
    return _make(a, layouts[0], together=together), _make(b, layouts[1], together=together)


def _make(members: Bundle, layout: str | None, *, together: bool) -> Side:
    found = [each for each in members.found if each.checkpoint.format not in (SYMLINK, DIRECTORY)]
    formats = [each.checkpoint.format for each in found]
    name = (layout or _OF_SEVERAL) if members.directory is not None or not formats else formats[0]
    side = Side(members.path, name, is_stored(members.path), size_of(members.path))
    if together and members.directory is not None:
        content = content_of(members)
        side.parts.append(Part("", content.data, content.data))
        side.notes += content.notes
        _add_each(side, content.others, in_directory=True)
    else:
        _add_members(side, found, members)
    if not side.parts:
        raise InputError(f"{members.path}: holds no checkpoint that can be read; give one that does")
    trees = (
        node
        for part in side.parts
        for _, node in iter_nodes(part.data.tree, leaves=frozenset())
        if isinstance(node, Mapping)
    )
    codes = next((names for names in map(quantised_weights, trees) if names), None)
    if codes:
        side.notes.append(
            f"{codes[0]}: quantised for inference; its codes are compared as integers or floats, without their scales"
        )
    return side


def _add_members(side: Side, found: list[DirectoryMember], members: Bundle) -> None:
    distributed: dict[int, list[DcpMember]] = defaultdict(list)
    for member in found:
        if isinstance(member, DcpMember):
            distributed[id(member.home)].append(member)
    folders = set()
    for files in distributed.values():
        content = dcp.assemble(Bundle(members.path, files, ""))
        folder = files[0].path.rpartition("/")[0]
        folders.add(f"{folder}/{METADATA}" if folder else METADATA)
        crcs = [_crcs(side, file.checkpoint, f"{file.path}/") for file in files]
        side.parts.append(Part(folder, content.data, content.data, dict(ChainMap(*crcs))))
        side.notes += content.notes
    others = (each for each in found if not isinstance(each, DcpMember) and each.path not in folders)
    _add_each(side, others, in_directory=members.directory is not None)


def _add_each(side: Side, members: Iterable[DirectoryMember], *, in_directory: bool) -> None:
    for member in members:
        checkpoint = member.checkpoint
        if checkpoint.format not in READERS:
            side.files[member.path] = checkpoint
            continue
        data = Composite(f"{side.path}: {member.path}" if in_directory else str(side.path))
        data.adopt(checkpoint)
        data.tree = checkpoint.tree
        side.parts.append(Part(member.path if in_directory else "", checkpoint, data, _crcs(side, checkpoint)))


def _crcs(side: Side, checkpoint: Checkpoint, prefix: str = "") -> dict[str, int]:
    """Stated checksums by key; none of a ``.ckpt8``, which may give back other bytes than those of its original."""
    storages = () if side.is_container else checkpoint.storages
    return {prefix + storage.key: storage.crc32 for storage in storages if storage.crc32 is not None}
