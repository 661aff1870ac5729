"""An opened source: one tree over one address space, and the files that are not in it.

The address space is a Composite. It takes over the storages of members, with a prefix before their keys.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.composite import Composite, add_prefix

SINGLE_FILE = "file"
"""The layout of a source that is no directory."""


@dataclass(slots=True)
class Content:
    """An opened source.

    ``data`` is the checkpoint with its tree; ``layout`` is an id of ``sources.LAYOUTS``, or ``file``. ``others`` are
    members that the tree does not hold; a writer of directories may copy them. ``notes`` are lines for the report about
    anything else that the tree does not hold. ``ordered``: the weights have the order of the model, so that order tells
    weights of one shape apart.
    """

    data: Composite
    layout: str = SINGLE_FILE
    others: list[DirectoryMember] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ordered: bool = True


def adopt_member(data: Composite, member: DirectoryMember, node: Any) -> Any:
    """A part of a member's tree, with keys of ``data``. The first call for a member gives its storages to ``data``."""
    prefix = f"{member.path}/"
    storages = member.checkpoint.storages
    if not storages or prefix + storages[0].key not in data:
        data.adopt(member.checkpoint, prefix)
    return add_prefix(node, prefix)
