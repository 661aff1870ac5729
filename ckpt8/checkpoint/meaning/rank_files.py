"""The files that the ranks of one job wrote, each with its parts of the tensors.

The content of a file shows that it is one of them, its name shows of which rank: the number behind ``rank``, or the
last one. The name without this number says which files belong together.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.walk import iter_leaves

_RANK = re.compile(r"(?:.*rank[_-]?|.*?(?=\d+\D*$))(\d+)", re.DOTALL)
_WORLD = re.compile(r"world[_-]?size[_-]?(\d+)")
_MOST_DIGITS = 9


class RankFile(NamedTuple):
    """The number of a rank, and the path of its file with ``*`` in place of that number."""

    rank: int
    pattern: str


def rank_file(path: str, tree: Any) -> RankFile | None:
    """What the file at ``path`` is of several; None if it holds no part of a tensor."""
    if not any(type(leaf) is TensorRef and leaf.share is not None for _, leaf in iter_leaves(tree)):
        return None
    return named_rank(path) or RankFile(0, path)


def named_rank(path: str) -> RankFile | None:
    """The same by the name of the file alone; None if it has no number."""
    folder, slash, name = path.rpartition("/")
    found = _RANK.match(name)
    if found is None or len(found[1]) > _MOST_DIGITS:
        return None
    return RankFile(int(found[1]), f"{folder}{slash}{name[: found.start(1)]}*{name[found.end(1) :]}")


def home_of(path: str, tree: Any) -> tuple[str, int | None]:
    """What a file shares with those whose tensors belong to its own: the folder, and the rank of a file of one rank."""
    found = rank_file(path, tree)
    return path.rpartition("/")[0], None if found is None else found.rank


def stated_world(path: str) -> int:
    """The number of ranks in the name of a file; 0 if it does not say."""
    found = _WORLD.search(path.rpartition("/")[2])
    return int(found[1]) if found is not None and len(found[1]) <= _MOST_DIGITS else 0
