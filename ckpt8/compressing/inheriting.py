"""Makes differences of the storages of a plan that have partners in an earlier container.

A partner has the name, type, size and role of the storage, and tensors of the same names and places. A storage takes
the fields of its partner's codec, such as the step and the salt of a weight, where these are near enough to its own,
and a sample tells whether the difference is smaller than the whole. First moments gain nothing, and stay whole.

Weights keep a lattice of their own, and are differences to the points next to the weights of the base, where the step
of the base is far from theirs, and in two cases all of them. The weights of a run that was resumed from the lattice of
the base lie at its points: rounding them to the same points again would pull the run back. And where the steps of the
base have become too large for the steps of the optimizer, a new lattice is due.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs import Codec
from ckpt8.codecs.lattice import Lattice
from ckpt8.codecs.lattice.reference import phases
from ckpt8.compressing.open_base import OpenBase
from ckpt8.compressing.partners import Partners, find_partners
from ckpt8.compressing.plan import Plan, Stream, read_elements
from ckpt8.compressing.spending import balance, left_over
from ckpt8.container import frames, layout, symbols
from ckpt8.container.differences import difference
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts, Role
from ckpt8.core.workers import Workers

SAMPLE = 1 << 16
"""Elements of a storage that tell how large its difference is."""

_MOST_TAKEN = 0.25
"""The most that weights on the steps of the base may take of what the first moments of their optimizer may err."""

_LEAST_CORRELATION = 0.02
"""Above this, weights are taken to lie at the points of the lattice of the base. If they move as normal numbers, twice
this part of what they have moved since they were decoded would be lost."""


class _Candidate(NamedTuple):
    """A stream that may become a difference to the storage ``partner``, and the codec that it then has."""

    stream: Stream
    partner: int
    codec: Codec

    @property
    def shares_lattice(self) -> bool:
        """Whether weights take a lattice that is not their own."""
        return isinstance(self.codec, Lattice) and self.codec != self.stream.codec


@dataclass(frozen=True, slots=True)
class _Trial:
    """The bytes that a difference is expected to take, and where a sample of weights lies on the lattice of the base.

    ``along`` is the sum of -cos(2 pi u) over ``count`` weights, with u between the points of the lattice.
    """

    candidate: _Candidate
    nbytes: float
    along: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Continuation:
    """How a plan continues a base: ``plan`` has differences where they pay.

    ``resumed`` says that the run was resumed from the lattice of the base. ``nbytes`` is the expected size of the
    parts, and ``whole`` that with no differences.
    """

    plan: Plan
    resumed: bool
    nbytes: float
    whole: float


def continue_base(plan: Plan, source: Checkpoint, base: OpenBase, threads: int | None = None) -> Continuation:
    """Make differences to ``base`` of storages of ``plan``. Raises InputError."""
    streams = {stream.index: stream for stream in plan.streams}
    partners = find_partners(plan, base.manifest)
    with Workers(threads) as workers:

        def tried(candidates: Sequence[_Candidate]) -> list[_Trial]:
            return [trial for trial in workers.map(lambda each: _try(each, source, base), candidates) if trial]

        candidates = _candidates(streams.values(), partners, base)
        trials = tried(candidates)
        resumed = _resumed(trials)
        if resumed or _outgrown(plan, candidates):
            own = [each._replace(codec=each.stream.codec) for each in candidates if each.shares_lattice]
            trials = [each for each in trials if not each.candidate.shares_lattice] + tried(own)
        if resumed:
            trials = [each for each in trials if not each.candidate.codec.inherited]
    sizes = {index: _whole(stream, partners, base) for index, stream in streams.items()}
    whole = sum(sizes.values())
    for trial in trials:
        stream, partner, codec = trial.candidate
        if trial.nbytes < sizes[stream.index]:
            streams[stream.index] = replace(stream, codec=codec, base=partner)
            sizes[stream.index] = trial.nbytes
    units = [replace(unit, streams=tuple(streams[stream.index] for stream in unit.streams)) for unit in plan.units]
    continued = replace(plan, units=units)
    balance(continued)
    return Continuation(continued, resumed, sum(sizes.values()), whole)


def _candidates(streams: Iterable[Stream], partners: Partners, base: OpenBase) -> list[_Candidate]:
    """The streams that may be differences."""
    found = []
    for stream in streams:
        partner = partners.get(stream.index)
        if partner is None or stream.spec.role is Role.MOMENT1 or not stream.spec.numel:
            continue
        below = base.reader.codec(partner)
        codec = stream.codec.continued(below) or stream.codec
        if base.manifest.storages[partner].pack is None and codec.counts_from(below):
            found.append(_Candidate(stream, partner, codec))
    return found


def _try(each: _Candidate, source: Checkpoint, base: OpenBase) -> _Trial | None:
    """Encode a sample as a difference; None where that is refused. Thread-safe. Raises InputError."""
    stream, codec = each.stream, each.codec
    chunk = (layout.chunk_count(stream.spec.numel) - 1) // 2
    first, count = chunk * layout.FRAME, min(stream.chunk_spec(chunk).numel, SAMPLE)
    x = read_elements(source, stream.storage, stream.spec.dtype, first, count)
    expected = codec.layout(replace(stream.spec, shape=(count,)))
    below = {name: part[: expected[name].numel] for name, part in base.parts(each.partner, chunk, codec).items()}
    try:
        parts = difference(codec.encode(x, first=first, inherited=below), below)
    except RefusedError:
        return None
    nbytes = _stored_bytes(parts) * stream.spec.numel / count
    if not (each.shares_lattice and isinstance(codec, Lattice)):
        return _Trial(each, nbytes)
    places = phases(x, k=codec.k, salt=codec.salt, first=first)
    return _Trial(each, nbytes, -float((places.double() * math.tau).cos().sum()), len(places))


def _stored_bytes(parts: Parts) -> int:
    packed, packings = symbols.pack_parts(parts)
    found = (frames.encode_part(name, part, packings.get(name)) for name, part in packed.items())
    return sum(len(stored) for planes in found for stored, _ in planes)


def _resumed(trials: Sequence[_Trial]) -> bool:
    """Whether weights lie at the points of the lattice of the base."""
    count = sum(trial.count for trial in trials)
    # Three times what chance gives to uniform places.
    least = count * _LEAST_CORRELATION + 3 * math.sqrt(count / 2)
    return count > 0 and sum(trial.along for trial in trials) > least


def _outgrown(plan: Plan, candidates: Iterable[_Candidate]) -> bool:
    """Whether the steps of the base take more of a budget than first moments can give."""
    codecs = {each.stream.index: each.codec for each in candidates}
    found = left_over(plan, codecs)
    return any(left < -_MOST_TAKEN * moments for left, moments in found.values())


def _whole(stream: Stream, partners: Partners, base: OpenBase) -> float:
    """The bytes that a storage is expected to take whole: what its partner takes."""
    partner = partners.get(stream.index)
    if partner is None:
        return stream.storage.nbytes
    codec, size = base.reader.codec(partner), base.whole_bytes(partner)
    if isinstance(codec, Lattice) and isinstance(stream.codec, Lattice):
        # A code takes a quarter of a bit less for each quarter octave of a larger step.
        return max(size + (codec.k - stream.codec.k) / 32 * stream.spec.numel, 0.0)
    return size
