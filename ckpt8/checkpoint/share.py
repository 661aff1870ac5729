"""The place of a tensor of one rank in a tensor that is spread over several. Imports nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Where the tensor of one rank begins in one of the shape ``whole``, which ``ranks`` processes hold together.

    ``copies`` of them hold the same part, None where that is not said. ``rest`` is what else the file says of it, such
    as the mesh of the processes.
    """

    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    ranks: int
    copies: int | None
    rest: Any

    def suffix(self, shape: Sequence[int]) -> str:
        """What a share of that ``shape`` has behind its name, empty where one process holds all."""
        return slice_suffix(self.offsets, shape, self.whole) if self.ranks > 1 and shape else ""


def slice_suffix(offsets: Sequence[int], sizes: Sequence[int], whole: Sequence[int]) -> str:
    """The place of a slice in its tensor, ``[0:64,:]``."""
    parts = zip(offsets, sizes, whole, strict=True)
    return f"[{','.join(':' if size == all_ else f'{at}:{at + size}' for at, size, all_ in parts)}]"
