"""CAME's confidence in an update, from the row and column averages of a saved state."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch


@dataclass(frozen=True)
class Confidence:
    """CAME's approx(Rr, Cr) = rsqrt(R / mean(R)) (x) rsqrt(C), computed for a range of elements at a time.

    ``rows`` has the shape of the parameter without its last dimension, ``columns`` without its second to last. They may
    be those of a slice. mean(R) is that of all rows; where ``has_some_rows``, it is the mean of the columns, since both
    average the same squares.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    has_some_rows: bool = field(default=False, kw_only=True)

    @cached_property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column factors, computed in float64 and rounded once: the same on every machine."""
        row = (self.rows.double() / self._means).rsqrt().float().reshape(-1)
        return row, self.columns.double().rsqrt().float().reshape(-1, self.columns.shape[-1])

    @property
    def _means(self) -> torch.Tensor:
        """mean(R) of every matrix."""
        return (self.columns if self.has_some_rows else self.rows).double().mean(dim=-1, keepdim=True)

    @property
    def least_share(self) -> float:
        """How large the rows are beside all rows of their matrix, on average: the least of all matrices."""
        if not self.has_some_rows:
            return 1.0
        return float((self.rows.double().mean(dim=-1, keepdim=True) / self._means).min())

    def at(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """The factors of elements ``start`` to ``stop`` of the flat parameter, on ``device`` or else the CPU."""
        row, column = (factor.to(device) for factor in self.factors)
        height, width = self.rows.shape[-1], self.columns.shape[-1]
        index = torch.arange(start // width, -(-stop // width), device=device)
        block = row[index].unsqueeze(1) * column[index // height]
        first = start // width * width
        return block.reshape(-1)[start - first : stop - first]
