"""A directory of containers of ranks, which hold slices of tensors: its index, and what a manifest says of them.

``index`` is ``ckpt8-dcp.json``, and says which file holds which part of a tensor. ``reading`` reads it, and the slices
that one container states. ``collecting`` makes it of what all ranks have written, and joins the parts of ranks that
saved on their own. ``joined`` opens the containers as one; ``damaged`` puts whole tensors together where some are
damaged or missing. No torch.distributed is needed.
"""

from __future__ import annotations

import re

INDEX = "ckpt8-dcp.json"
"""The file that makes a directory a checkpoint."""

FOLDER = "ckpt8"
"""The folder for such a directory in the checkpoint of a trainer, which keeps its own files beside it."""

PART = r"ckpt8-dcp\.\d+\.json"
"""Pattern of the names of parts of an index: all of them together make a directory a checkpoint as well."""

RANK_FILE = r"__\d+_\d+\.ckpt8"
"""Pattern of the names of the containers: the number of the rank, and of its file."""


def is_part(name: str) -> bool:
    """Whether a file has the name of a part of an index."""
    return re.fullmatch(PART, name) is not None
