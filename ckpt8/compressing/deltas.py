"""Makes differences to the base of a new container.

Storages of a plan become differences to their partners in the base. A partner has the name, type, size and role of the
storage, and tensors of the same names and places. A storage takes the fields of its partner's codec, such as the step
and the salt of a weight, where these are near enough to its own, and a sample tells whether the difference is smaller
than the whole. First moments in steps of second moments gain nothing, and stay whole.

Weights keep a lattice of their own, and are differences to the points next to the weights of the base, where the step
of the base is far from theirs, and in two cases all of them. The weights of a run that was resumed from the lattice of
the base lie at its points: rounding them to the same points again would pull the run back. And where the steps of the
base have become too large for the steps of the optimizer, a new lattice is due.
"""

from __future__ import annotations

import math
import posixpath
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.codecs import Codec
from ckpt8.codecs.lattice import DitheredLattice, Lattice, MomentLattice, step_of
from ckpt8.compressing.frozen import still_frozen
from ckpt8.compressing.plan import Plan, Stream, read_elements
from ckpt8.compressing.spending import balance, left_over
from ckpt8.container import frames, header, packing
from ckpt8.container.bases import find_base
from ckpt8.container.manifest import MOST_LINKS, BaseRecord, Manifest
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arrays import Arrays, floats
from ckpt8.core.backend import Backend
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError, RefusedError, UsageError
from ckpt8.core.files.source_file import RemotePath, resolved
from ckpt8.core.json_text import is_unicode
from ckpt8.core.tensors import DType, Role
from ckpt8.core.workers import Workers


class BrokenBaseError(InputError):
    """A part of a base cannot be read."""


class Base(Protocol):
    """What a plan is continued from: an open container, or one that is only planned."""

    @property
    def manifest(self) -> Manifest:
        """Its storages and tensors."""

    @property
    def backend(self) -> Backend:
        """What encodes its parts."""

    def codec(self, storage: int) -> Codec:
        """The codec of a storage."""

    def whole_bytes(self, storage: int) -> float:
        """What a storage takes where it is no difference."""

    def parts(self, storage: int, chunk: int, codec: Codec) -> Arrays:
        """What the parts of a chunk under ``codec`` count from, or those of its first SAMPLE elements."""


class OpenBase(Closing):
    """The base of a new container, which has the number ``place`` in its chain, by default the next one.

    Raises InputError where it cannot be read, UsageError where the chain is too long.
    """

    def __init__(self, path: Path, place: int | None = None) -> None:
        self.path = path
        self.reader = ContainerReader(path)
        self._stated = self.reader.stated
        self._place = place or self._stated.place + 1
        if self._stated.links == MOST_LINKS:
            self.close()
            raise UsageError(f"{path}: has {MOST_LINKS} containers below it; give a base with fewer")

    def close(self) -> None:
        """Close the base and the files below it."""
        self.reader.close()

    @property
    def manifest(self) -> Manifest:
        """Its own, without those of the files below it."""
        return self.reader.manifest

    @property
    def backend(self) -> Backend:
        """What its reader decodes with."""
        return self.reader.backend

    def codec(self, storage: int) -> Codec:
        """The codec of a storage."""
        return self.reader.codec(storage)

    def whole_bytes(self, storage: int) -> float:
        """What a storage takes where it is no difference: here or in a file below. Raises InputError."""
        return self.reader.whole_bytes(storage)

    def check_target(self, target: Path) -> None:
        """Raise UsageError where writing ``target`` would replace the base or a file below it, InputError for these."""
        replaced = resolved(target)
        for reader in (self.reader, *self.reader.links()):
            if resolved(reader.path) == replaced:
                raise UsageError(f"{target}: the base {self.path} needs this file; give another name")

    def parts(self, storage: int, chunk: int, codec: Codec) -> Arrays:
        """What the parts of a chunk under ``codec`` count from. Raises BrokenBaseError. Thread-safe."""
        try:
            return self.reader.parts_under(codec, storage, chunk)
        except InputError as exc:
            raise BrokenBaseError(exc.problem) from exc

    def record(self, target: Path) -> BaseRecord:
        """What the manifest of ``target`` says of this base.

        The path is from the folder of ``target``, or of what that leads to, with slashes. Raises UsageError for one
        that is no Unicode, and for a base in another store.
        """
        own, folder, base = self._stated, resolved(target).parent, resolved(self.path.parent) / self.path.name
        are_remote = isinstance(folder, RemotePath) or isinstance(base, RemotePath)
        if are_remote and base.parts[:2] != folder.parts[:2]:
            raise UsageError(f"{self.path}: is the base of {target}, which is elsewhere; both must be in one bucket")
        path = posixpath.relpath("/".join(base.parts), "/".join(folder.parts))
        if not is_unicode(path):
            raise UsageError(f"{self.path}: a file whose name is no Unicode cannot be a base; rename it")
        return BaseRecord(seal=own.seal, path=path, key=own.key, place=self._place, links=own.links + 1)


def check_base(record: BaseRecord | None, target: Path) -> None:
    """Raise BrokenBaseError where ``target``, which is about to be there, would not find its base any more."""
    if record is not None:
        try:
            find_base(target, record)
        except InputError as exc:
            raise BrokenBaseError(exc.problem) from exc


_STEP = re.compile(r"\bglobal_step\d+")
"""DeepSpeed names the folder in a checkpoint by its step."""

Partners = Mapping[int, int]
"""The index of a storage in the base, by that of a stream."""


def find_partners(plan: Plan, base: Manifest) -> Partners:
    """The partners of the streams of ``plan`` among the storages of ``base``.

    They have one name, type, size and role, and tensors of the same names and places; storages of no tensors have none.
    The number of a step in a name does not count.
    """
    own, other = defaultdict(set), defaultdict(set)
    for tensor, index in plan.tensors:
        ref = tensor.ref
        own[index].add((timeless(tensor.name), ref.dtype, ref.offset, *ref.shape, *ref.stride))
    for view in base.tensors:
        other[view.storage].add((timeless(view.name), view.dtype, view.offset, *view.shape, *view.stride))
    named = {
        (timeless(storage.name), storage.dtype, storage.numel, storage.role): index
        for index, storage in enumerate(base.storages)
    }
    partners = {}
    for stream in plan.streams:
        spec = stream.spec
        partner = named.get((timeless(spec.name), spec.dtype, spec.numel, spec.role))
        if partner is not None and stream.index in own and own[stream.index] == other[partner]:
            partners[stream.index] = partner
    return partners


def timeless(name: str) -> str:
    """The name of a tensor without the number of a step."""
    return _STEP.sub("global_step", name)


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
        """Whether weights or first moments take a lattice that is not their own."""
        return isinstance(self.codec, DitheredLattice) and self.codec != self.stream.codec


@dataclass(frozen=True, slots=True)
class _Trial:
    """The bytes that a difference is expected to take, and where a sample of weights lies on the lattice of the base.

    ``along`` is the sum of cos(2 pi e) over ``count`` weights, with e the error of a weight in steps.
    """

    candidate: _Candidate
    nbytes: float
    along: float = 0.0
    count: int = 0


_WORTH_IT = 0.95
"""A chain goes on where a difference takes less than this part of the whole."""


def continue_base(plan: Plan, source: Bundle, base: Base, threads: int | None = None) -> tuple[Plan, str | None]:
    """The plan with differences to ``base`` where they pay, and why a new chain had better begin, or None.

    Raises InputError.
    """
    continued = replace(plan, by_index=dict(plan.by_index))
    streams = continued.by_index
    frozen = still_frozen(plan, source, base, threads)
    streams.update(frozen)
    partners = find_partners(plan, base.manifest)
    with Workers(threads) as workers:

        def tried(candidates: Sequence[_Candidate]) -> list[_Trial]:
            return [trial for trial in workers.map(partial(_try, source=source, base=base), candidates) if trial]

        others = [stream for index, stream in streams.items() if index not in frozen]
        candidates = _candidates(others, partners, base)
        trials = tried(candidates)
        resumed = _resumed(trials)
        if resumed or _outgrown(plan, candidates):
            own = [
                candidate._replace(codec=candidate.stream.codec) for candidate in candidates if candidate.shares_lattice
            ]
            trials = [trial for trial in trials if not trial.candidate.shares_lattice] + tried(own)
        if resumed:
            trials = [trial for trial in trials if not trial.candidate.codec.inherited]
    # A new chain would not store them either.
    sizes = {index: _whole(stream, partners, base) for index, stream in streams.items() if index not in frozen}
    whole = sum(sizes.values())
    for trial in trials:
        stream, partner, codec = trial.candidate
        if trial.nbytes < sizes[stream.index]:
            streams[stream.index] = replace(stream, codec=codec, base=partner)
            sizes[stream.index] = trial.nbytes
    balance(continued)
    why_new = None if sum(sizes.values()) < _WORTH_IT * whole else "differences would hardly be smaller"
    return continued, "the run was resumed from a lossy container on the same lattice" if resumed else why_new


def _candidates(streams: Iterable[Stream], partners: Partners, base: Base) -> list[_Candidate]:
    """The streams that may be differences."""
    candidates = []
    for stream in streams:
        partner = partners.get(stream.index)
        if partner is None or not stream.spec.numel:
            continue
        if stream.spec.role is Role.MOMENT1 and not isinstance(stream.codec, MomentLattice):
            continue
        below = base.codec(partner)
        codec = stream.codec.continued(below) or stream.codec
        if base.manifest.storages[partner].pack is None and codec.counts_from(below):
            candidates.append(_Candidate(stream, partner, codec))
    return candidates


def _try(candidate: _Candidate, source: Bundle, base: Base) -> _Trial | None:
    """Encode a sample as a difference; None where that is refused. Thread-safe. Raises InputError."""
    stream, codec = candidate.stream, candidate.codec
    chunk = (header.chunk_count(stream.spec.numel) - 1) // 2
    first, count = chunk * header.FRAME, min(stream.chunk_spec(chunk).numel, SAMPLE)
    x = read_elements(source, stream.storage, stream.spec.dtype, first, count)
    spec = stream.spec._replace(shape=(count,))
    expected = codec.layout(spec)
    below = {name: part[: expected[name].numel] for name, part in base.parts(candidate.partner, chunk, codec).items()}
    backend = base.backend
    try:
        own = codec.encode_arrays(x, spec, backend=backend, first=first, inherited=below)
        parts = packing.difference(own, below, backend)
    except RefusedError:
        return None
    encoded = frames.encode_parts(*packing.packed(parts, backend))
    nbytes = sum(len(stored) for planes in encoded.values() for stored, _ in planes) * stream.spec.numel / count
    if not (candidate.shares_lattice and isinstance(codec, Lattice)):
        return _Trial(candidate, nbytes)
    decoded = np.empty(count, np.float32)
    codec.decode_arrays(own, spec._replace(dtype=DType.FLOAT32), decoded, backend=backend, first=first)
    w = floats(x, spec.dtype)
    errors = (w - decoded)[w != 0].astype(np.float64) / step_of(codec.k)
    return _Trial(candidate, nbytes, float(np.cos(errors * math.tau).sum()), errors.size)


def _resumed(trials: Sequence[_Trial]) -> bool:
    """Whether weights lie at the points of the lattice of the base."""
    count = sum(trial.count for trial in trials)
    # Three times what chance gives to uniform places.
    least = count * _LEAST_CORRELATION + 3 * math.sqrt(count / 2)
    return count > 0 and sum(trial.along for trial in trials) > least


def _outgrown(plan: Plan, candidates: Iterable[_Candidate]) -> bool:
    """Whether the steps of the base take more of a budget than first moments can give."""
    codecs = {candidate.stream.index: candidate.codec for candidate in candidates}
    return any(left < -_MOST_TAKEN * moments for left, moments in left_over(plan, codecs).values())


def _whole(stream: Stream, partners: Partners, base: Base) -> float:
    """The bytes that a storage is expected to take whole: what its partner takes."""
    partner = partners.get(stream.index)
    if partner is None:
        return stream.storage.nbytes
    codec, size = base.codec(partner), base.whole_bytes(partner)
    if isinstance(codec, DitheredLattice) and isinstance(stream.codec, DitheredLattice):
        # A code takes a quarter of a bit less for each quarter octave of a larger step.
        return max(size + (codec.k - stream.codec.k) / 32 * stream.spec.numel, 0.0)
    return size
