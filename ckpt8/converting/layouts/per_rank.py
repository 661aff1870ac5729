"""Directories of per-rank files: puts tensors together from the parts in the files of all ranks.

Files whose names differ in the number of the rank alone belong together; their trees become one. Model and optimizer
mostly are in files of their own.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from ckpt8.checkpoint.meaning.nodes import is_bare_state_dict, is_optimizer
from ckpt8.checkpoint.meaning.rank_files import named_rank, rank_file
from ckpt8.checkpoint.readers import READERS
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.converting.content import Content
from ckpt8.converting.layouts.joined_ranks import ApartError, Files, joined
from ckpt8.converting.ties import tie_again
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.text import listed, shown

_MODEL, _OPTIMIZER = "model", "optimizer"
_NUMBERED = re.compile(r"[_-]?(?:world[_-]?size[_-]?\d+|rank[_-]?\*|\*)|\.[^.]*$")
"""What the name of a file has beside a key: the number of ranks, that of its rank, a suffix."""


def matches(members: Bundle) -> bool:
    """Whether some file holds parts of tensors."""
    return any(rank_file(member.path, member.checkpoint.tree) for member in members.checkpoints)


def assemble(members: Bundle) -> Content:
    """``{"model": {name: tensor}, "optimizer": ..., ...}``, with tied weights as one.

    Raises InputError for damage and for missing ranks, UsageError where files of two folders hold the same. Leaves out,
    with a note, an optimizer that only the ranks themselves can put together.
    """
    data = Composite(str(members.path))
    found = _files_of_ranks(members)
    used = {member.path for files in found.values() for member in files.values()}
    content = Content(data, others=[member for member in members.found if member.path not in used])
    content.notes += _left_out(content.others)
    kinds = {pattern: _kind(next(iter(files.values())).checkpoint.tree) for pattern, files in found.items()}
    alike = Counter((_folder(pattern), kind) for pattern, kind in kinds.items())
    data.tree = {}
    folders: dict[str, str] = {}
    for pattern, files in found.items():
        kind, folder = kinds[pattern], _folder(pattern)
        try:
            tree = joined(data, pattern, files, content.notes)
        except ApartError as exc:
            if kind != _OPTIMIZER:
                raise
            content.notes.append(f"left out: {str(exc).removeprefix(f'{data.label}: ')}")
            continue
        if kind is not None or not isinstance(tree, dict):
            several = kind is None or alike[folder, kind] > 1
            tree = {_NUMBERED.sub("", pattern.rpartition("/")[2]) if several else kind: tree}
        both = min(map(str, data.tree.keys() & tree.keys()), default=None)
        if both is not None:
            choices = listed(sorted({folders[both], folder or "."}))
            raise UsageError(
                f"{data.label}: several files hold {shown(both)}; choose a folder with --member: {choices}"
            )
        folders |= dict.fromkeys(map(str, tree), folder or ".")
        data.tree |= tree
    tie_again(data)
    return content


def _files_of_ranks(members: Bundle) -> dict[str, Files]:
    """The files that belong together, by their pattern. Raises InputError where one of them could not be read."""
    found: dict[str, dict[int, DirectoryMember]] = defaultdict(dict)
    for member in members.checkpoints:
        if file := rank_file(member.path, member.checkpoint.tree):
            found[file.pattern][file.rank] = member
    for member in members.found:
        file = named_rank(member.path)
        if file is None or file.pattern not in found:
            continue
        if member.reason is not None:
            raise InputError(f"{members.path}: {member.path}: {member.reason}; it cannot be converted")
        if member.checkpoint.format in READERS:
            found[file.pattern].setdefault(file.rank, member)  # a rank may have no part of any tensor
    return {pattern: dict(sorted(files.items())) for pattern, files in found.items()}


def _left_out(others: Iterable[DirectoryMember]) -> Iterator[str]:
    """A note on the optimizers of ranks whose tensors do not say what they are part of, such as those of FSDP1."""
    own = (named_rank(member.path) for member in others if is_optimizer(member.checkpoint.tree))
    for pattern in dict.fromkeys(file.pattern for file in own if file is not None):
        yield f"left out: {pattern}: its tensors do not say which parts of the parameters they belong to"


def _folder(pattern: str) -> str:
    return pattern.rpartition("/")[0]


def _kind(tree: Any) -> str | None:
    return _OPTIMIZER if is_optimizer(tree) else _MODEL if is_bare_state_dict(tree) else None
