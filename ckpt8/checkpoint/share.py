"""The place of a tensor of one rank in a tensor that is spread over several. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckpt8.core.text import box_text


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
        """What a share of that ``shape`` has behind its name, empty where it is all of the tensor."""
        return box_text(self.offsets, shape, self.whole)
