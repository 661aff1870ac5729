"""Whether boxes fill a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import product
from math import prod

from ckpt8.core.errors import InputError

MAX_SHARDED = 6
"""A tensor may be cut along so many dimensions; a mesh of processes has three or four."""

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes by dimension."""


def check_cover(where: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise InputError unless every element of ``shape`` is in one box.

    Compares corners. Those of a box count 1 and -1 in turn, so that they cancel out where boxes meet. The corners of
    the whole tensor are left if, and only if, the boxes fill it without overlap.
    """
    whole = (0,) * len(shape), shape
    cut_dims = [dim for dim in range(len(shape)) if any(sizes[dim] != shape[dim] for _, sizes in boxes)]
    if len(cut_dims) > MAX_SHARDED:
        raise InputError(f"{where}: is cut along {len(cut_dims)} dimensions, more than {MAX_SHARDED}")
    corners: Counter[tuple[int, ...]] = Counter()
    for offsets, sizes in boxes:
        _add_corners(corners, (offsets, sizes), cut_dims, 1)
    _add_corners(corners, whole, cut_dims, -1)
    if any(corners.values()):
        there = sum(prod(sizes) for _, sizes in boxes)
        if there < prod(shape):
            what = f"slices are missing: {there} of {prod(shape)} elements are there; the checkpoint is not complete"
        else:
            what = "its slices overlap"
        raise InputError(f"{where}: {what}")


def _add_corners(corners: Counter[tuple[int, ...]], box: Box, dims: Sequence[int], weight: int) -> None:
    ends = [((box[0][dim], 1), (box[0][dim] + box[1][dim], -1)) for dim in dims]
    for corner in product(*ends):
        corners[tuple(place for place, _ in corner)] += weight * prod(sign for _, sign in corner)
