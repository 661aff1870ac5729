"""Copies: storages whose elements are those of other storages, maybe rounded."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, NamedTuple

from ckpt8.core.tensors import DType


class Run(NamedTuple):
    """``length`` elements of a copy, rounded from ``storage`` from element ``start`` on.

    Without a storage they all have the bits ``start``, of the type that masters are rounded to: padding.
    """

    storage: int | None
    start: int
    length: int


class Copied:
    """Elements copied from other storages: ``runs`` in the order of the copy."""

    runs: tuple[Run, ...]

    is_exact: ClassVar[bool] = True
    """Whether the copy comes back bit for bit, which takes masters that ``keeps_masters``."""

    def rounded_type(self, copy: DType) -> DType:  # noqa: ARG002
        """What the fp32 elements of masters are rounded to for a copy of element type ``copy``."""
        return DType.BFLOAT16

    @cached_property
    def _starts(self) -> list[int]:
        """The first element of every run, then the number of all elements."""
        return list(accumulate((run.length for run in self.runs), initial=0))

    @property
    def numel(self) -> int:
        """Elements of the copy."""
        return self._starts[-1]

    def cut(self, first: int, count: int) -> Iterator[Run]:
        """The runs of ``count`` elements from ``first`` on."""
        at = bisect_right(self._starts, first) - 1
        while count:
            run, skipped = self.runs[at], first - self._starts[at]
            length = min(count, run.length - skipped)
            yield Run(run.storage, run.start if run.storage is None else run.start + skipped, length)
            at, first, count = at + 1, first + length, count - length
