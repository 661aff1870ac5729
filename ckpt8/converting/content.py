"""An opened source: one tree over one address space, and the files that are not in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.composite import Composite

SINGLE_FILE = "file"
"""The layout of a source that is no directory."""


@dataclass(slots=True)
class Content:
    """An opened source.

    ``data`` is the checkpoint with its tree; ``layout`` is an id of ``sources.LAYOUTS``, or ``file``. ``others`` are
    members that the tree does not hold; a writer of directories may copy them. ``notes`` are lines for the report about
    what else the tree does not hold. ``ordered``: the weights stand in the order of the model, so that their places
    tell apart those of one shape.
    """

    data: Composite
    layout: str = SINGLE_FILE
    others: list[DirectoryMember] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    ordered: bool = True
