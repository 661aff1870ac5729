"""Which elements of a tensor are looked at when not all are: runs that are spread over it, always the same."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt8.codecs.companded8 import GROUP
from ckpt8.container import layout
from ckpt8.container.frames import FRAME

RUNS = 16
"""Runs of a tensor."""

RUN = 1 << 13
"""Elements of a run."""

EVERYTHING = "every element"
"""The rule where nothing is left out."""

_CHUNKS = 1024
"""Chunks of all tensors together: a container has to decode a chunk to show any of it."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """``full`` takes everything; else runs from no more than ``chunks`` chunks of a tensor."""

    full: bool
    chunks: int

    @classmethod
    def of(cls, tensors: int, *, full: bool) -> Sampling:
        """For a checkpoint of that many tensors."""
        return cls(full, max(1, min(RUNS, _CHUNKS // max(tensors, 1))))

    def __call__(self, numel: int) -> list[tuple[int, list[slice]]]:
        """Chunks of a tensor, and of each the runs, in elements from its beginning. They begin where a group begins."""
        count = layout.chunk_count(numel)
        chosen = range(count) if self.full else _spread(count - 1, min(count, self.chunks))
        found = []
        for chunk in chosen:
            length = min(FRAME, numel - chunk * FRAME)
            each = RUNS // len(chosen) if not self.full else 0
            if self.full or length <= each * RUN:
                found.append((chunk, [slice(0, length)]))
            else:
                starts = (start // GROUP * GROUP for start in _spread(length - RUN, each))
                found.append((chunk, [slice(start, start + RUN) for start in starts]))
        return found

    @property
    def text(self) -> str:
        """The rule, for people."""
        if self.full:
            return EVERYTHING
        return f"up to {RUNS} runs of {RUN:,} elements, evenly spread over each tensor"


def _spread(last: int, count: int) -> list[int]:
    """``count`` numbers from 0 to ``last``, evenly; of one, the middle."""
    return [last * k // (count - 1) for k in range(count)] if count > 1 else [last // 2] * count
