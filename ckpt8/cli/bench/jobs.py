"""A checkpoint to measure, and a job of one operation on it. Imports no torch: ``cp`` and zstd run without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RANKS_DO = ("save", "load", "async_save")
"""What ranks measure, on each of two sides."""

OWN, PLAIN = "ckpt8", "dcp"


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint. ``nbytes`` is the size of its files.

    ``loaded`` are the members with tensors that ``torch.load(weights_only=True)`` or safetensors open, relative to the
    path; an empty one is the path itself. ``layout`` is the floating type of most of its bytes.
    """

    path: str
    nbytes: int
    directory: bool
    loaded: Sequence[str]
    layout: str

    @property
    def files(self) -> list[Path]:
        """The paths of ``loaded``."""
        return [Path(self.path) / member if member else Path(self.path) for member in self.loaded]


@dataclass(frozen=True, slots=True)
class Job:
    """``container`` holds ``source`` already; an operation writes to ``target``."""

    source: Source
    container: Path
    target: Path
    threads: int
