"""Expands second moments that are kept as row and column statistics, as CAME's, to their elements.

    v[i, j] = (R[i] / (sum(R) / height)) * C[j]             R are the rows of one matrix, C its columns

The sum is exact and then rounded to float64, quotients are rounded to float64 and the last to fp32 as well, and the
product to fp32: so these are the same numbers on every machine.
"""

import math

import numpy as np

from ckpt8.codecs.base import Factors
from ckpt8.core.arrays import Array


def expand(factors: Factors, rows: Array, columns: Array, first: int, count: int) -> Array:
    """Elements ``first`` to ``first + count`` in fp32, from the flat statistics in fp32."""
    height, width = factors.height, factors.width
    begin, end = first // width, -(-(first + count) // width)
    matrices = slice(begin // height, -(-end // height))
    with np.errstate(all="ignore"):
        averages = rows.astype(np.float64).reshape(-1, height)[matrices]
        relative = (averages / (_sums(averages) / height)[:, None]).astype(np.float32).reshape(-1)
        before, of_columns = matrices.start * height, columns.reshape(-1, width)[matrices]
        if len(averages) > 1:
            of_columns = of_columns[np.arange(begin - before, end - before) // height]
        block = relative[begin - before : end - before, None] * of_columns
    return np.ascontiguousarray(block.reshape(-1)[first - begin * width : first - begin * width + count])


def _sums(averages: Array) -> Array:
    """The sum of every row, rounded once. Most sums of few numbers in fp32 need no rounding in float64."""
    sums, rounded = np.zeros(len(averages)), np.ones(len(averages), bool)
    if len(averages) > averages.shape[1]:
        rounded[:] = False
        with np.errstate(all="ignore"):
            for x in averages.T:
                before, sums = sums, sums + x
                part = sums - before
                rounded |= (before - (sums - part)) + (x - part) != 0
    sums[rounded] = [_sum(one) for one in averages[rounded].tolist()]
    return sums


def _sum(values: list[float]) -> float:
    """The sum, rounded once; NaN where it is none."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return math.nan
