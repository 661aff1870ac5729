"""Opens what ``convert`` reads: one file, or a directory of a known layout, as one tree over one address space."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from ckpt8.checkpoint.meaning.quantised_state import quantised_weights
from ckpt8.checkpoint.readers.directory import open_directory
from ckpt8.checkpoint.readers.entries import walk
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.opening import check_storages, open_source
from ckpt8.checkpoint.tree import iter_nodes
from ckpt8.container.opening import is_stored
from ckpt8.container.sharded import FOLDER
from ckpt8.container.sharded.reading import find_sharded
from ckpt8.converting.choice import SINGLE_FILE, Content
from ckpt8.converting.layouts import dcp, deepspeed_partitions, deepspeed_universal, model_directory, ranks
from ckpt8.core.errors import InputError, UnsupportedError, UsageError
from ckpt8.core.text import listed, printable

_LISTED = 20

PER_RANK = "per-rank"
"""The layout of files that the ranks of a job wrote, each its own."""


class DirectoryLayout(Protocol):
    """The functions of a module that knows one layout of a directory."""

    def matches(self, members: Bundle) -> bool:
        """Whether a directory has this layout, judged by names and trees alone."""

    def assemble(self, members: Bundle) -> Content:
        """The directory as one tree. Raises InputError for damage, UsageError where a choice must be made."""


LAYOUTS: Mapping[str, DirectoryLayout] = {
    "deepspeed-universal": deepspeed_universal,
    "deepspeed-partitions": deepspeed_partitions,
    "dcp": dcp,
    "model-directory": model_directory,
    PER_RANK: ranks,
}
"""Layouts of directories by id, in the order in which ``layout_of`` tries them."""


@contextmanager
def open_content(path: Path, *, member: str | None = None, threads: int | None = None) -> Iterator[Content]:
    """Open a source; ``member`` names one file of a directory. Raises InputError, and UsageError for ``member``.

    Compares the checksums that the source states, outside a container, which checks its own: a target gets new
    checksums, and those would hide damage. The files of a trainer beside what ranks have packed are ``others``.
    """
    with ExitStack() as opened:
        members = opened.enter_context(open_source(path, threads=threads))
        chosen = members if member is None else members.only(member)
        if not is_stored(path):
            for file in chosen.opened:
                label = str(path) if members.directory is None else f"{path}: {file.path}"
                check_storages(file.checkpoint, label)
        content = content_of(chosen)
        _refuse_codes(content, path)
        if find_sharded(path) not in (None, path):
            beside = [entry for entry in walk(path) if entry.path.partition("/")[0] != FOLDER]
            content.others += opened.enter_context(open_directory(path, beside, decode=False)) if beside else ()
        yield content


def _refuse_codes(content: Content, path: Path) -> None:
    """Raise UnsupportedError for a model quantised for inference: no target format says what its codes mean."""
    for _, node in iter_nodes(content.data.tree):
        names = quantised_weights(node) if isinstance(node, Mapping) else []
        if names:
            what = f"{printable(names[0])} and {len(names) - 1} more are" if names[1:] else f"{printable(names[0])} is"
            raise UnsupportedError(
                f"{path}: {what} quantised for inference, codes with a scale; convert what they were made from"
            )


def layout_of(members: Bundle) -> str | None:
    """The id of the first layout that matches, ``file`` for a single file, None for a directory of no known layout."""
    if members.directory is None:
        return SINGLE_FILE
    return next((layout_id for layout_id, layout in LAYOUTS.items() if layout.matches(members)), None)


def content_of(members: Bundle) -> Content:
    """Open members as one tree. Raises InputError, and UsageError for a directory of no known layout."""
    if (layout := layout_of(members)) is None:
        known = listed((member.path for member in members.checkpoints), _LISTED)
        if not known:
            raise InputError(f"{members.path}: a directory without a checkpoint that can be read")
        raise UsageError(f"{members.path}: a directory of no known layout; choose a file with --member: {known}")
    content = _single_file(members) if layout == SINGLE_FILE else LAYOUTS[layout].assemble(members)
    content.layout = layout
    return content


def _single_file(members: Bundle) -> Content:
    data = Composite(str(members.path))
    if not members.checkpoints:
        raise InputError(f"{members.path}: holds no checkpoint that can be converted")
    checkpoint = members.checkpoints[0].checkpoint
    data.adopt(checkpoint)
    data.tree = checkpoint.tree
    return Content(data)
