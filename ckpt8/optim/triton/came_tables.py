"""The tables of matrices of one plan: shapes, buffers for sums and factors, and the programs over tiles and lines."""

from __future__ import annotations

import math
from typing import Any

import torch

from ckpt8.optim.triton.launches import Plan
from ckpt8.optim.triton.matrices import LINE, TILE


class Matrices:
    """What ``matrices`` describes, on the device of a plan."""

    def __init__(self, plan: Plan) -> None:
        numbers, factors, sums = [], 0, 0
        tiles, row_lines, column_lines = [], [], []
        for index, row in enumerate(plan.rows):
            height, width = row.shape[-2:]
            batches = math.prod(row.shape[:-2])
            across, down, blocks = -(-width // TILE), -(-height // TILE), -(-height // LINE)
            offsets = [factors]
            for size in (height, width, height, width):
                offsets.append(offsets[-1] + batches * size)
            factors = offsets.pop()
            partials = [sums]
            for size in (height * across, down * width, blocks):
                partials.append(partials[-1] + batches * size)
            sums = partials.pop()
            numbers.append([*row.factored, *offsets, height, width, across, down, blocks, *partials])
            tiles.append(_grid(index, batches, down, across))
            row_lines.append(_grid(index, batches, blocks, 1))
            column_lines.append(_grid(index, batches, -(-width // LINE), 1, last=1))
        device: Any = plan.device
        self.table = torch.tensor(numbers, dtype=torch.int64, device=device)
        self.factors = torch.zeros(factors, dtype=torch.float32, device=device)
        self.sums = torch.zeros(sums, dtype=torch.float64, device=device)
        self.tiles = torch.cat(tiles).to(device)
        self.rows = torch.cat(row_lines).to(device)
        self.lines = torch.cat([*row_lines, *column_lines]).to(device)


def _grid(index: int, batches: int, down: int, across: int, last: int = 0) -> torch.Tensor:
    """(row of the table, batch, block, block across or ``last``) of every program, int32."""
    ranges = [torch.arange(size, dtype=torch.int32) for size in (batches, down, across)]
    grid = torch.cartesian_prod(*ranges)
    return torch.cat((torch.full((len(grid), 1), index, dtype=torch.int32), grid[:, :2], grid[:, 2:] + last), 1)
