"""Names in pickles that ``torch.load`` refuses with ``weights_only``: without it, it imports and may call them.

Nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ckpt8.checkpoint.readers import READERS, get_reader
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.readers.pickle.allowed import foreign_names
from ckpt8.checkpoint.tree import OpenCheckpoint
from ckpt8.container.reader import ContainerReader
from ckpt8.container.skeleton_file import SkeletonFile
from ckpt8.core.errors import Ckpt8Error
from ckpt8.core.text import listed

FOREIGN = "foreign_globals"
"""The kind of the flag."""

_SHOWN, _LISTED, _MOST = 5, 20, 1000
"""Names in a warning, in a report, and in JSON."""


def names_of(member: DirectoryMember) -> Iterator[tuple[str, list[str]]]:
    """The path of an open member and the names in it, if there are any."""
    if isinstance(member.checkpoint, OpenCheckpoint) and (found := foreign_names(member.checkpoint.names)):
        yield member.path, found


def names_in_container(reader: ContainerReader) -> Iterator[tuple[str, list[str]]]:
    """As ``names_of``, for every member of a container; of a damaged one, ``verify`` says so."""
    for index, record in enumerate(reader.manifest.members):
        if record.format in READERS and reader.is_plain(record.skeleton):
            try:
                checkpoint = get_reader(record.format).read(SkeletonFile(reader, index))
            except Ckpt8Error:
                continue
            yield from names_of(DirectoryMember(record.path, checkpoint))


def foreign_flags(found: Iterable[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """A red flag for each member with such names, in the form of ``survey``; ``globals`` lists the names."""
    return [
        {
            "kind": FOREIGN,
            "tensor": path,
            "count": len(names),
            "of": len(names),
            "fraction": 1.0,
            "sampled": False,
            "message": listed(names, _LISTED),
            "globals": list(names[:_MOST]),
        }
        for path, names in found
    ]


def warning(target: str, found: Iterable[tuple[str, Sequence[str]]]) -> str | None:
    """What ``restore`` says of them, in a line; None where there are none."""
    names = dict.fromkeys(name for _, each in found for name in each)
    if not names:
        return None
    return (
        f"{target}: refers to {listed(names, _SHOWN)}, which torch.load refuses with weights_only=True, and without it "
        "imports and may call; load it so only if you trust where it came from"
    )
