"""Second moments that are kept as row and column statistics, as CAME's, expanded to their elements in fp32.

    v[i, j] = (R[i] / (sum(R) / height)) * C[j]             R are the rows of one matrix, C its columns

The sum is exact and then rounded to float64, quotients are rounded to float64 and the last to fp32 as well, and the
product to fp32: so these are the same numbers on every machine.
"""

from __future__ import annotations

import math

import torch

from ckpt8.codecs.base import Factors


def expand(factors: Factors, rows: torch.Tensor, columns: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """Elements ``first`` to ``first + count`` in fp32, from the flat statistics in fp32; all are on the CPU."""
    height, width = factors.height, factors.width
    begin, end = first // width, -(-(first + count) // width)
    matrices = slice(begin // height, -(-end // height))
    averages = rows.double().view(-1, height)[matrices]
    relative = (averages / (_sums(averages) / height).unsqueeze(1)).float().view(-1)
    before, of_columns = matrices.start * height, columns.view(-1, width)[matrices]
    if len(averages) > 1:
        matrix = torch.arange(begin - before, end - before, device="cpu").div_(height, rounding_mode="floor")
        of_columns = of_columns[matrix]
    block = relative[begin - before : end - before].unsqueeze(1) * of_columns
    return block.view(-1)[first - begin * width : first - begin * width + count]


def _sums(averages: torch.Tensor) -> torch.Tensor:
    """The sum of every row, rounded once. Most sums of few numbers in fp32 need no rounding in float64."""
    sums = torch.zeros(len(averages), dtype=torch.float64, device="cpu")
    rounded = torch.ones(len(averages), dtype=torch.bool, device="cpu")
    if len(averages) > averages.shape[1]:
        rounded = ~rounded
        for x in averages.unbind(1):
            before, sums = sums, sums + x
            part = sums - before
            rounded |= (before - (sums - part)) + (x - part) != 0
    sums[rounded] = torch.tensor([_sum(one) for one in averages[rounded].tolist()], dtype=torch.float64, device="cpu")
    return sums


def _sum(values: list[float]) -> float:
    """The sum, rounded once; NaN where it is none."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
