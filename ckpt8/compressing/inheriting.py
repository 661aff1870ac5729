"""Makes differences of the storages of a plan that have partners in an earlier container.

A partner has the name, type, size and role of the storage, and tensors of the same names and shapes. A storage takes
the fields of its partner's codec, such as the step and the salt of a weight, where these are near enough to its own,
and a sample tells whether the difference is smaller than the whole. First moments gain nothing, and stay whole.

Two findings keep all lossy storages whole. The weights of a run that was resumed from the lattice of the base lie at
its points; rounding them to the same points again would pull the run back. And where the steps of the base have become
too large for the steps of the optimizer, a new lattice is due.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ckpt8.checkpoint.tree import Checkpoint, NamedTensor
from ckpt8.codecs import Codec
from ckpt8.codecs.lattice import Lattice, step_of
from ckpt8.codecs.lattice.reference import phases
from ckpt8.compressing.open_base import OpenBase
from ckpt8.compressing.plan import Plan, Stream, read_elements, views_of
from ckpt8.container import frames, layout, symbols
from ckpt8.container.differences import difference
from ckpt8.container.manifest import Manifest, StorageRecord, TensorRecord
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts, Role, TensorSpec
from ckpt8.core.workers import Workers

SAMPLE = 1 << 16
"""Elements of a storage that tell how large its difference is."""

_MOST_SHARE = 1.25
"""The most that steps of the base may take of what the weights of an optimizer may err."""

_LEAST_CORRELATION = 0.05
"""Above this, weights are taken to lie at the points of the lattice of the base."""

RESUMED = "the run was resumed from a lossy file on the lattice of the base"
OUTGROWN = "the steps of the base are too large for the budget by now"


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A stream that may become a difference to the storage ``partner``, with the codec of that."""

    stream: Stream
    partner: int
    codec: Codec


@dataclass(frozen=True, slots=True)
class _Trial:
    """The bytes that a difference is expected to take, and, of weights on a lattice, where a sample of them lies.

    ``along`` is the sum of -cos(2 pi u) over ``count`` weights, with u between the points of the lattice.
    """

    nbytes: float
    along: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a plan continues a base: ``plan`` has differences where they pay.

    ``obstacle`` says why no lossy storage is one. ``nbytes`` is the expected size of the parts, and ``whole`` that with
    no differences. ``far`` is the part of the weights on a lattice whose own steps are too far from those of the base.
    """

    plan: Plan
    obstacle: str | None
    nbytes: float
    whole: float
    far: float


def continue_base(plan: Plan, source: Checkpoint, base: OpenBase, threads: int | None = None) -> Continuation:
    """Make differences to ``base`` of storages of ``plan``. Raises InputError."""
    streams, views = {stream.index: stream for stream in plan.streams}, views_of(plan.tensors)
    partners = find_partners(streams.values(), views, base.manifest)
    candidates = list(_candidates(streams, partners, base))
    with Workers(threads) as workers:
        trials = dict(
            zip(
                (each.stream.index for each in candidates),
                workers.map(lambda each: _try(each, source, base), candidates),
                strict=True,
            )
        )
    obstacle = _obstacle(plan, candidates, trials)
    sizes = {index: _whole(stream, partners, base) for index, stream in streams.items()}
    whole = sum(sizes.values())
    for each in candidates:
        stream, trial = each.stream, trials[each.stream.index]
        kept = obstacle is not None and stream.lossy
        if trial is not None and not kept and trial.nbytes < sizes[stream.index]:
            streams[stream.index] = replace(stream, codec=each.codec, base=each.partner)
            sizes[stream.index] = trial.nbytes
    units = [replace(unit, streams=tuple(streams[s.index] for s in unit.streams)) for unit in plan.units]
    return Continuation(replace(plan, units=units), obstacle, sum(sizes.values()), whole, _far(streams, partners, base))
