"""What can be converted: one file, or a directory in a layout of the table, as one tree over one address space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Protocol

from ckpt8.checkpoint.checksums import check_storages
from ckpt8.checkpoint.meaning.quantised_state import quantised_weights
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.members import Members, open_members
from ckpt8.checkpoint.walk import iter_nodes
from ckpt8.container.header import is_container
from ckpt8.core.errors import InputError, UnsupportedError, UsageError
from ckpt8.core.text import listed, printable

LAYOUTS: tuple[tuple[str, str], ...] = (
    ("deepspeed-universal", "ckpt8.converting.layouts.deepspeed_universal:Universal"),
    ("deepspeed-partitions", "ckpt8.converting.layouts.deepspeed_partitions:Partitions"),
    ("dcp", "ckpt8.converting.layouts.dcp:Distributed"),
    ("model-directory", "ckpt8.converting.layouts.model_directory:ModelDirectory"),
)
"""Layouts of directories by id and class, in the order in which they are tried. Classes are imported when needed."""

SINGLE_FILE = "file"
_LISTED = 20


@dataclass(slots=True)
class Content:
    """A source that was opened.

    ``data`` is the checkpoint with its tree; ``layout`` an id of LAYOUTS, or ``file``. ``others`` are members that are
    not in the tree, which only a directory can take; ``notes`` say what else of the source is not in the tree.
    ``ordered``: the weights stand in the order of the model, by which those without names can be told.
    """

    data: Composite
    layout: str = SINGLE_FILE
    others: list[DirectoryMember] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ordered: bool = True


class DirectoryLayout(Protocol):
    """One layout of a directory."""

    id: ClassVar[str]

    def matches(self, members: Members) -> bool:
        """Whether a directory has this layout, from names and trees alone."""

    def assemble(self, members: Members) -> Content:
        """The directory as one tree. Raises InputError where it is damaged, UsageError where it is not clear."""


def get_layout(layout_id: str) -> DirectoryLayout:
    """Make the layout of that id. Raises KeyError for an unknown id."""
    module, _, name = dict(LAYOUTS)[layout_id].partition(":")
    layout: DirectoryLayout = getattr(import_module(module), name)()
    return layout


@contextmanager
def open_content(path: Path, *, member: str | None = None, threads: int | None = None) -> Iterator[Content]:
    """Open a source; ``member`` names one file of a directory. Raises InputError, and UsageError for ``member``.

    What is not in a container is read once, to compare the checksums that there are: what is written from it has new
    ones, which would hide any damage.
    """
    with open_members(path, threads=threads) as members:
        chosen = members if member is None else members.only(member)
        if not is_container(path):
            for each in chosen.found:
                check_storages(each.checkpoint, f"{path}: {each.path}" if members.is_directory else str(path))
        content = content_of(chosen)
        _refuse_codes(content, path)
        yield content


def _refuse_codes(content: Content, path: Path) -> None:
    """Raise UnsupportedError for a model that was quantised for inference: no target would hold what its codes mean."""
    for _, node in iter_nodes(content.data.tree):
        names = quantised_weights(node) if isinstance(node, Mapping) else []
        if names:
            what = f"{printable(names[0])} and {len(names) - 1} more are" if names[1:] else f"{printable(names[0])} is"
            raise UnsupportedError(
                f"{path}: {what} quantised for inference, codes with a scale; convert what they were made from"
            )


def content_of(members: Members) -> Content:
    """Open members as one tree. Raises InputError, and UsageError for a directory of no known layout."""
    return _directory(members) if members.is_directory else _file(members)


def layout_of(members: Members) -> str | None:
    """The id of the first layout that fits, ``file`` for a single one, None for a directory of no known layout."""
    if not members.is_directory:
        return SINGLE_FILE
    return next((layout_id for layout_id, _ in LAYOUTS if get_layout(layout_id).matches(members)), None)


def _file(members: Members) -> Content:
    data = Composite(str(members.path))
    if not members.checkpoints:
        raise InputError(f"{members.path}: holds no checkpoint that can be converted")
    checkpoint = members.checkpoints[0].checkpoint
    data.adopt(checkpoint)
    data.tree = checkpoint.tree
    return Content(data)


def _directory(members: Members) -> Content:
    layout_id = layout_of(members)
    if layout_id is not None:
        return get_layout(layout_id).assemble(members)
    known = listed((member.path for member in members.checkpoints), _LISTED)
    if not known:
        raise InputError(f"{members.path}: a directory without a checkpoint that can be read")
    raise UsageError(f"{members.path}: a directory of no known layout; choose a file with --member: {known}")
