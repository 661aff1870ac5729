"""How a rule sees a tensor: as blocks of fp32 values, with sums that do not depend on where the blocks end.

A rule is a pure function ``rule(blocks, whole, *, step, lr, ...)``. It reads fp32 values from the blocks of one
parameter, as often as it likes, and yields the new values of every block in order; then it yields the new state of the
whole tensor, if it has any (``whole``). The caller stores each result before it asks for the next. A rule that needs a
sum over the tensor (StableAdamW, CAME) computes it in a pass of its own over the blocks. So nobody makes a full-size
fp32 copy of anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from ckpt8.codecs.companded8 import GROUP
from ckpt8.codecs.companded8.reference import square_root
from ckpt8.codecs.cutting import TILE

Values = Mapping[str, torch.Tensor]
"""fp32 tensors by name: ``param``, ``grad`` and the tensors of the state."""

SUM_BLOCK = 4096
"""Elements summed at once, in float64. Tiles are multiples of it, and these sums are then added exactly."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of one parameter.

    ``load(*names)`` returns new fp32 tensors, which the rule may overwrite. For rules that work row by row they have
    the shape (batches, rows, width), and ``batches`` and ``rows`` locate them in the whole tensor.
    """

    load: Callable[..., list[torch.Tensor]]
    batches: slice = field(default_factory=lambda: slice(None))
    rows: slice = field(default_factory=lambda: slice(None))


Load = Callable[[int, int, tuple[int, ...], tuple[str, ...]], list[torch.Tensor]]
"""Reads values: (first element, last element + 1, shape, names) -> new fp32 tensors."""


def flat_blocks(numel: int, load: Load, size: int = TILE) -> list[tuple[int, int, Block]]:
    """The blocks of a flat tensor: first element, last element + 1, block."""
    runs = [(start, min(start + size, numel)) for start in range(0, numel, size)]
    return [(a, b, Block(lambda *names, a=a, b=b: load(a, b, (b - a,), names))) for a, b in runs]


def block_sums(x: torch.Tensor) -> list[float]:
    """Sums of 4096 elements each, in float64."""
    flat = x.reshape(-1).double()
    short = -flat.numel() % SUM_BLOCK
    if short:
        flat = torch.nn.functional.pad(flat, (0, short))
    sums: list[float] = flat.view(-1, SUM_BLOCK).sum(1).tolist()
    return sums


_ROW_BLOCK = 1 << 18
"""About how many elements a block of rows has."""


def inverse_root(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x)."""
    return square_root(x).reciprocal_()


class Factored:
    """Row and column averages of a tensor of the shape (batches, rows, width), which it collects block by block."""

    def __init__(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        batches, width = columns.numel() // columns.shape[-1], columns.shape[-1]
        self._shapes = rows.shape, columns.shape
        self.rows, self.columns = rows.reshape(batches, -1), columns.reshape(batches, width)
        self._row_means = torch.empty_like(self.rows)
        self._column_sums = torch.zeros_like(self.columns, dtype=torch.float64)

    def add(self, block: Block, x: torch.Tensor) -> None:
        """Add the values of one block."""
        wide = x.double()
        self._row_means[block.batches, block.rows] = wide.mean(-1).float()
        self._column_sums[block.batches] += wide.sum(-2)

    def averaged(self, beta: float) -> dict[str, torch.Tensor]:
        """Move the averages towards the means of the added values. Returns ``row`` and ``col`` in their own shapes."""
        means = self._column_sums.div_(self.rows.shape[-1]).float()
        self.rows = self.rows * beta + self._row_means * (1 - beta)
        self.columns = self.columns * beta + means * (1 - beta)
        self._row_factor = inverse_root(self.rows / self.rows.double().mean(-1, keepdim=True).float())
        self._column_factor = inverse_root(self.columns)
        return {"row": self.rows.reshape(self._shapes[0]), "col": self.columns.reshape(self._shapes[1])}

    def factor(self, block: Block) -> torch.Tensor:
        """approx(R, C) of one block."""
        rows = self._row_factor[block.batches, block.rows].unsqueeze(-1)
        return rows * self._column_factor[block.batches].unsqueeze(-2)


def root_mean(blocks: Sequence[Block], squares: Callable[[Block], torch.Tensor]) -> float:
    """The square root of the mean of ``squares(block)`` over all elements of a tensor."""
    sums, count = [], 0
    for block in blocks:
        x = squares(block)
        count += x.numel()
        sums += block_sums(x)
    # fsum rounds once, whatever the order; it raises where Inf meets NaN.
    total = math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)
    return math.sqrt(total / count)


def clipping(blocks: Sequence[Block], direction: Callable[[Block], torch.Tensor], threshold: float) -> float:
    """The divisor max(1, RMS(u)/d) of a direction u."""
    return max(1.0, root_mean(blocks, lambda block: direction(block).square_()) / threshold)


def row_blocks(shape: tuple[int, ...], load: Load) -> list[tuple[int, int, Block]]:
    """The blocks of a tensor of two dimensions or more: first element, last element + 1, block of rows.

    A block is a run of rows of one matrix, or of whole matrices where a matrix is small or of uneven size. It starts at
    a multiple of 32 elements.
    """
    height, width = shape[-2:]
    batches, size = math.prod(shape[:-2]), height * width
    found = []

    def add(start: int, view: tuple[int, int, int], batch: slice, rows: slice) -> None:
        stop = start + math.prod(view)
        found.append((start, stop, Block(lambda *names: load(start, stop, view, names), batch, rows)))

    if batches == 1 or (size > _ROW_BLOCK and size % GROUP == 0):
        step = _multiple(width)
        for batch, row in product(range(batches), range(0, height, step)):
            count = min(step, height - row)
            add(batch * size + row * width, (1, count, width), slice(batch, batch + 1), slice(row, row + count))
    else:
        step = _multiple(size)
        for batch in range(0, batches, step):
            count = min(step, batches - batch)
            add(batch * size, (count, height, width), slice(batch, batch + count), slice(None))
    return found


def _multiple(size: int) -> int:
    """How many pieces of ``size`` elements make a block of whole groups, of about ``_ROW_BLOCK`` elements."""
    unit = GROUP // math.gcd(GROUP, size)
    return max(unit, _ROW_BLOCK // size // unit * unit)
