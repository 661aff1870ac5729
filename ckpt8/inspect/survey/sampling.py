"""Which elements of a tensor are looked at: all, or windows spread evenly over it. The same at every call."""

from __future__ import annotations

from collections.abc import Iterator

GROUP = 32
"""Windows begin at whole groups of moments, or at whole rows."""

CHUNK = 1 << 18
"""Elements that are looked at together: their temporaries are what a survey needs of memory."""

PER_TENSOR = 1 << 15
_IN_ALL = 1 << 25
_FEWEST = 256
_WINDOW = 4096


def budget(tensors: int) -> int:
    """Elements of each of so many tensors that a sample takes: 2^15, and fewer where they would be over 2^25 in all."""
    return max(_FEWEST, min(PER_TENSOR, _IN_ALL // max(tensors, 1)))


def windows(numel: int, most: int | None, row: int = 0) -> Iterator[tuple[int, int]]:
    """Start and length of what is looked at of ``numel`` elements, in order and without overlap.

    ``most`` elements are a sample; None takes all. The first and the last element belong to every sample, and rows of
    ``row`` elements come whole where a few of them fit into it.
    """
    if most is None or numel <= most:
        yield from ((start, min(CHUNK, numel - start)) for start in range(0, numel, CHUNK))
        return
    length = min(_WINDOW, most // 8 // GROUP * GROUP)
    step = GROUP
    if 0 < row <= most // 2:
        length, step = max(length // row, 1) * row, row
    count = most // length
    for k in range(count):
        start = (numel - length) * k // (count - 1) // step * step
        yield start, length if k + 1 < count else numel - start
