"""Parameters whose second moments are row and column statistics, as CAME's: what a budget needs to know of them.

CAME divides its first moment m by sqrt(f), f from ``exp_avg_res_row`` and ``exp_avg_res_col``; c is 1 / sqrt(f). The
mean square gradient v comes from ``exp_avg_sq_row`` and ``exp_avg_sq_col``. So one step moves (m c)^2, weighted by v,
and steps of m that go by f^(1/4) err by a sum of v / sqrt(f).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ckpt8.checkpoint.meaning.confidence import Confidence
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef
from ckpt8.codecs.base import Factors
from ckpt8.compressing.parameters import Parameter, is_plain
from ckpt8.compressing.plan import Stream, read_elements
from ckpt8.compressing.step_statistics import Sampler, Spread, StepSums, sampled
from ckpt8.container.frames import FRAME

Statistics = Sequence[tuple[StorageInfo, TensorRef]]


def factors_of(statistics: Statistics, shape: Sequence[int], stream_of: Callable[[str], Stream]) -> Factors | None:
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


def read_factored(source: Checkpoint, statistics: Statistics) -> Confidence:
    """The factored term 1 / sqrt(v) of row and column statistics. Raises InputError."""
    values = (read_elements(source, storage, ref.dtype, ref.offset, ref.numel) for storage, ref in statistics)
    return Confidence(
        *(x.as_strided(ref.shape, ref.stride).float() for x, (_, ref) in zip(values, statistics, strict=True))
    )


def factored_sums(source: Checkpoint, sampler: Sampler, parameter: Parameter, stream: Stream) -> StepSums:
    """The sums of a parameter, whose first moments are ``stream``. Raises InputError."""
    numel = stream.spec.numel
    confidence, inverse_root = (
        sampled(numel, read_factored(source, statistics).at).double()
        for statistics in (parameter.confidence, parameter.squares)
    )
    moved = Spread.of(numel, sampler.read(stream).double() * confidence / inverse_root)
    spread = Spread.of(numel, confidence / inverse_root.square())
    second = Spread.of(numel, inverse_root.square().reciprocal())
    is_finite = moved.is_finite and spread.is_finite and second.is_finite
    return StepSums(numel, moved.total("square"), spread.total("value"), second.mean("value"), is_finite=is_finite)
