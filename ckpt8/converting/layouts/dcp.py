"""Directories of torch.distributed.checkpoint: puts tensors together from the slices that the processes wrote.

Several checkpoints in one directory are one, unless two hold a value of the same name: some programs save the model
and the optimizer into two folders of a directory.
"""

from __future__ import annotations

from collections import defaultdict

from ckpt8.checkpoint.readers.dcp import DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.distributed import tree_of
from ckpt8.converting.choice import Content
from ckpt8.converting.publishing import tie_again
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.text import listed, shown


def matches(members: Bundle) -> bool:
    """Whether there is a ``.metadata`` with its files."""
    return bool(members.distributed) or any(member.holds_tensors for member in members.opened)


def assemble(members: Bundle) -> Content:
    """``{"model": {name: tensor}, "optimizer": ..., ...}`` as it was saved, with tied weights as one.

    Raises InputError for damage, UsageError where two checkpoints hold the same name.
    """
    data = Composite(str(members.path))
    by_home: dict[int, list[DcpMember]] = defaultdict(list)
    others = []
    for member in members.opened:
        if isinstance(member, DcpMember):
            by_home[id(member.home)].append(member)
        elif member.holds_tensors:
            raise InputError(f"{data.label}: {member.path}: {member.reason}; it cannot be converted")
        elif member.path.rpartition("/")[2] != METADATA:
            others.append(member)
    content = Content(data, others=others)
    data.tree = {}
    for files in by_home.values():
        tree = tree_of(data, files, content.notes)
        both = data.tree.keys() & tree.keys()
        if both:
            folders = listed(sorted({same[0].path.rpartition("/")[0] or "." for same in by_home.values()}))
            name = shown(min(map(str, both)))
            raise UsageError(f"{data.label}: several checkpoints hold {name}; choose one with --member: {folders}")
        data.tree |= tree
    tie_again(data)
    return content
