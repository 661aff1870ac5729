"""Parameters whose second moments are row and column statistics, as CAME's: what a budget needs to know of them.

CAME divides its first moment m by sqrt(f), f from ``exp_avg_res_row`` and ``exp_avg_res_col``; c is 1 / sqrt(f). The
mean square gradient v comes from ``exp_avg_sq_row`` and ``exp_avg_sq_col``. So one step moves (m c)^2, weighted by v,
and steps of m that go by f^(1/4) err by a sum of v / sqrt(f).

A slice with some of the rows has the f of its codec relative to the mean of these rows, and the true f relative to that
of all rows: ``share`` is what the one mean is of the other, so that f is ``share`` times the f of the codec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ckpt8.checkpoint.meaning.confidence import Confidence
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef
from ckpt8.codecs.base import Factors
from ckpt8.compressing.parameters import Parameter, is_plain
from ckpt8.compressing.plan import Stream, read_tensor
from ckpt8.container.frames import FRAME


@dataclass(frozen=True)
class Factored:
    """v = rows / mean(rows) (x) columns of a parameter. ``mean`` is that of v, ``roots`` the sum of v / sqrt(f)."""

    mean: float
    roots: float
    share: float
    squares: Confidence
    confidence: Confidence

    @classmethod
    def of(cls, source: Checkpoint, parameter: Parameter) -> Factored | None:
        """Those of a parameter of CAME; None for other rules. Raises InputError."""
        if not (parameter.squares and parameter.confidence):
            return None
        squares, confidence = (
            Confidence(*(read_tensor(source, *each) for each in pair), has_some_rows=parameter.has_some_rows)
            for pair in (parameter.squares, parameter.confidence)
        )
        averages = (squares.rows if parameter.has_some_rows else squares.columns).flatten().tolist()
        mean, roots = math.fsum(averages) / len(averages), _sum_of_roots(squares, confidence)
        return cls(mean, roots, confidence.least_share, squares, confidence)

    def weigh(self, elements: range) -> torch.Tensor:
        """What the first moments of these elements count for, as weights that move: sqrt(v) times the confidence."""
        confidence, inverse_roots = (each.at(elements.start, elements.stop) for each in (self.confidence, self.squares))
        return confidence / inverse_roots


def _sum_of_roots(squares: Confidence, confidence: Confidence) -> float:
    """The sum of v / sqrt(f) over all elements: rows and columns are independent, matrix by matrix."""
    height = squares.rows.shape[-1]
    (rows, columns), (confident_rows, confident_columns) = squares.factors, confidence.factors
    by_row = (confident_rows.double() / rows.double().square()).reshape(-1, height)
    by_column = confident_columns.double() / columns.double().square()
    pairs = zip(by_row.tolist(), by_column.tolist(), strict=True)
    return math.fsum(math.fsum(each) * math.fsum(other) for each, other in pairs)


def factors_of(
    statistics: Sequence[tuple[StorageInfo, TensorRef]], shape: Sequence[int], stream_of: Callable[[str], Stream]
) -> Factors | None:
    """The factors of a parameter of ``shape``; None where a container does not keep these statistics as they are.

    ``stream_of`` gives the stream of a storage by its key.
    """
    streams = [stream_of(ref.key) for _, ref in statistics]
    for stream, (_, ref) in zip(streams, statistics, strict=True):
        whole = (ref.offset, ref.numel) == (0, stream.spec.numel) and stream.spec.dtype is ref.dtype and is_plain(ref)
        if stream.lossy or stream.codec.copied is not None or not whole or ref.numel > FRAME:
            return None
    rows, columns = (stream.index for stream in streams)
    return Factors(rows, columns, *shape[-2:])
