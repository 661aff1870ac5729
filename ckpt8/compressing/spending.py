"""Gives the storages of a plan the codecs of a budget, with steps that together make an error of so many steps.

They are for parameters whose optimizer's step is known and divides by second moments. All other storages keep the
codecs of the preset, which those under the budget fall back to, too.

A ``Sampler`` tells what a budget needs to know of weights and moments, from a fixed sample: sums, and a salt.

A sample is some windows of a tensor, or all of a small one. Histograms count the upper bits of its magnitudes, and sums
follow from these, exactly rounded: neither threads nor devices show in them.

``Factored`` tells it of parameters whose second moments are row and column statistics, as CAME's.

CAME divides its first moment m by sqrt(f), f from ``exp_avg_res_row`` and ``exp_avg_res_col``; c is 1 / sqrt(f). The
mean square gradient v comes from ``exp_avg_sq_row`` and ``exp_avg_sq_col``. So one step moves (m c)^2, weighted by v,
and steps of m that go by f^(1/4) err by a sum of v / sqrt(f).

A slice with some of the rows has the f of its codec relative to the mean of these rows, and the true f relative to that
of all rows: ``share`` is what the one mean is of the other, so that f is ``share`` times the f of the codec.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from typing import Literal, NamedTuple

import numpy as np

from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule
from ckpt8.checkpoint.meaning.replayed import Confidence
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef
from ckpt8.codecs import Codec
from ckpt8.codecs.base import Factors
from ckpt8.codecs.lattice import LOWEST_K, DitheredLattice, Lattice, MomentLattice, step_of
from ckpt8.codecs.rclog import FLAT_ROW, MOST_COLUMNS, RowColumnLog
from ckpt8.codecs.rounded_copy import LatticeReference
from ckpt8.codecs.vscaled import LARGEST, VScaled
from ckpt8.compressing.lockstep import backend_of
from ckpt8.compressing.momentum import Momentum, StepSums
from ckpt8.compressing.parameters import is_plain
from ckpt8.compressing.plan import (
    Measure,
    Measured,
    OptimizerStep,
    Parameter,
    Plan,
    Share,
    Stream,
    Unit,
    read_beside,
    read_factors,
    views_of,
)
from ckpt8.compressing.policy import LOSSLESS, Budget, Policy
from ckpt8.container.frames import FRAME
from ckpt8.container.steps import CAPPED, NO_BUDGET, NO_PARAMETER, UNMOVED
from ckpt8.core.arrays import Array, as_array, empty, floats
from ckpt8.core.errors import UsageError
from ckpt8.core.files.source_file import crc32
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Role
from ckpt8.core.workers import Workers

SAMPLE = 1 << 16
"""The most elements of a tensor that are read."""

_LEAST_WINDOWS, _MOST_WINDOWS = 16, 1 << 14
_PER_WINDOW = 1 << 10
"""Elements of a tensor for each window: few, since a few rows may carry the step, and so that each page of a file is
looked at, in turn, which the system reads ahead."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 times the golden ratio: windows begin at places that no row length divides."""

_SHIFT, _BINS, _INFINITE = 19, 1 << 12, 255 << 4
"""Exponent and four bits of the mantissa of an fp32 number choose its bin; that of Inf is the first with no number."""

Power = Literal["value", "square", "root"]


class Spread:
    """How the magnitudes of one or more tensors of ``numel`` elements are spread: ``counts`` of a sample by bin.

    NaN and Inf count for nothing; ``is_finite`` says whether the sample holds neither.
    """

    def __init__(self, numel: int, counts: Array) -> None:
        self.numel = numel
        self._bins = counts[:_INFINITE].nonzero()[0]
        self.is_finite = not counts[_INFINITE:].any()
        self._counts = counts[self._bins]
        self._sampled = int(self._counts.sum())

    def total(self, power: Power) -> float:
        """The sum of a power of the magnitudes over all elements, as the sample tells it."""
        total = math.fsum((_powers(power)[self._bins] * self._counts).tolist())
        return total if self._sampled in (0, self.numel) else total * self.numel / self._sampled

    def mean(self, power: Power) -> float:
        """The mean of a power of the magnitudes; 0 without elements."""
        return self.total(power) / self.numel if self.numel else 0.0


@cache
def _powers(power: Power) -> Array:
    """The power of the middle of every bin, float64; that of numbers below 2^-130 counts as zero."""
    function = {"value": float, "square": lambda x: x * x, "root": math.sqrt}[power]
    middles = (math.ldexp(16 * (e > 0) + f + 0.5, max(e, 1) - 131) for e in range(256) for f in range(16))
    return np.array([function(x) if bin_ else 0.0 for bin_, x in enumerate(middles)])


class Sample(NamedTuple):
    """What is sampled together: one stream, or several small ones; none gives an empty spread.

    ``factors`` gives what the elements of a range are multiplied by.
    """

    streams: Sequence[Stream]
    factors: Callable[[range], torch.Tensor] | None = None


class Sampler:
    """Reads samples of one source, and keeps a checksum of all that it read."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._crc = 0
        self._backend = backend_of(source)

    def spreads(self, samples: Sequence[Sample]) -> list[Spread]:
        """How the elements of every sample are spread. Raises InputError."""
        spreads = []
        with Workers() as workers:
            for spread, crc in workers.map(self._spread, samples):
                self._crc = crc32(crc.to_bytes(4, "little"), self._crc)
                spreads.append(spread)
        return spreads

    def salt(self, storage: int) -> int:
        """A uint32 that depends on everything read so far and on the number of a storage."""
        return int.from_bytes(blake2b(b"%d %d" % (self._crc, storage), digest_size=4).digest(), "little")

    def _spread(self, sample: Sample) -> tuple[Spread, int]:
        """The spread of a sample, and the crc32 of what was read. Thread-safe."""
        counts, crc = np.zeros(_BINS, np.int64), 0
        for stream in sample.streams:
            starts, length = _places(stream.spec.numel)
            size = stream.spec.dtype.itemsize
            elements = empty(len(starts) * length, stream.spec.dtype)
            content = elements.view(np.uint8).data
            if len(starts):
                self._source.read_each(stream.storage.offset + starts * size, length * size, content)
                crc = crc32(content, crc)
                x = floats(elements, stream.spec.dtype)
                if sample.factors is not None:
                    with np.errstate(over="ignore", invalid="ignore"):
                        windows = _windows(stream.spec.numel)
                        x = x * np.concatenate([as_array(sample.factors(window)) for window in windows])
                counts += self._count((x.view(np.int32) >> _SHIFT) & (_BINS - 1))
        return Spread(sum(stream.spec.numel for stream in sample.streams), counts), crc

    def _count(self, bins: Array) -> Array:
        """How often each bin occurs. ``bincount`` would keep Python's lock."""
        if self._backend == "numba":
            from ckpt8.container.kernels import histogram

            return histogram(bins, _BINS - 1)[1:]
        return np.bincount(bins, minlength=_BINS)


def _places(numel: int) -> tuple[Array, int]:
    """Where the windows of the sample begin, int64, and their length: one in each of equal parts, at other places."""
    if numel <= SAMPLE:
        return np.arange(min(numel, 1)), numel
    count = min(max(1 << (numel // _PER_WINDOW).bit_length() - 1, _LEAST_WINDOWS), _MOST_WINDOWS)
    length, part = SAMPLE // count, numel // count
    k, half = np.arange(count, dtype=np.uint64), np.uint64(32)
    places = k * np.uint64(part) + ((k * np.uint64(_GOLDEN) >> half) * np.uint64(part - length) >> half)
    return places.astype(np.int64), length


def _windows(numel: int) -> list[range]:
    """The elements of the sample."""
    starts, length = _places(numel)
    return [range(start, start + length) for start in starts.tolist()]


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
        squares = read_factors(source, parameter, parameter.squares)
        confidence = read_factors(source, parameter, parameter.confidence)
        averages = (squares.rows if parameter.has_some_rows else squares.columns).flatten().tolist()
        mean, roots = math.fsum(averages) / len(averages), _sum_of_roots(squares, confidence)
        return cls(mean, roots, confidence.least_share, squares, confidence)

    def weigh(self, elements: range) -> torch.Tensor:
        """What the first moments of these elements count for, as weights that move: sqrt(v) times the confidence."""
        confidence, inverse_roots = (x.at(elements.start, elements.stop) for x in (self.confidence, self.squares))
        return confidence / inverse_roots


def _sum_of_roots(squares: Confidence, confidence: Confidence) -> float:
    """The sum of v / sqrt(f) over all elements: rows and columns are independent, matrix by matrix."""
    height = squares.rows.shape[-1]
    (rows, columns), (confident_rows, confident_columns) = squares.factors, confidence.factors
    by_row = (confident_rows.double() / rows.double().square()).reshape(-1, height)
    by_column = confident_columns.double() / columns.double().square()
    pairs = zip(by_row.tolist(), by_column.tolist(), strict=True)
    return math.fsum(math.fsum(of_rows) * math.fsum(of_columns) for of_rows, of_columns in pairs)


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


_AIM = 0.99
"""The part of a budget that is spent as far as a sample tells: the whole of most files then keeps to it."""

_LEAST_LEFT = 0.25
"""The least part of their share that first moments keep."""

_LEAST_ROWS = 16
"""Matrices of fewer rows get no column factors: these would cost more than they save."""


_UNRULED = UpdateRule("momentum")
"""The rule of a parameter with a ``Measure``, where no step is replayed."""


@dataclass(frozen=True, slots=True)
class _Stepped:
    """A parameter with the step that moves it.

    ``free`` are the streams of its unit whose codecs the budget may choose. ``factored`` are the second moments of a
    parameter of CAME, which has only their row and column statistics; ``known`` are sums where there are no moments.
    """

    parameter: Parameter
    rule: UpdateRule
    step: OptimizerStep
    free: Sequence[Stream]
    numel: int
    factored: Factored | None
    known: StepSums

    @property
    def is_alone(self) -> bool:
        """Whether what one step moves is no sum over its elements."""
        return self.parameter.measure is not None and self.parameter.measure.by_value

    def energy(self, first: Spread) -> float:
        """What one step moves, from how the first moments are spread; or the weights in their place."""
        if self.parameter.measure is not None:
            return self.parameter.measure.energies(self.step.lr, self.sums(first)).step
        return (self.step.lr / self.rule.bias1) ** 2 * first.total("square")

    def sums(self, first: Spread) -> StepSums:
        """What a measure counts by."""
        measure = self.parameter.measure
        square = first.total("square") if measure is None or measure.is_of_stream else self.known.square
        return StepSums(square, self.known.second, count=first.numel)

    def roots(self, second: Spread) -> float:
        """The sum of sqrt(v), from how the second moments are spread."""
        return self.factored.roots if self.factored else second.total("root")

    def sample(self, streams: Mapping[int, Stream]) -> tuple[Sample, Sample, Sample]:
        """What is sampled: first moments as steps of the weight, second moments, and weights that are free.

        In place of first moments that are no stream it is weights.
        """
        moments, denominator = self.parameter.moments, self.parameter.denominator
        first = [streams[index] for index in (moments.get("moment1", self.step.weight),) if index is not None]
        second = [] if denominator is None or self.factored else [streams[moments[denominator]]]
        weight = [stream for stream in self.free if stream.index == self.step.weight]
        return Sample(first, self.factored.weigh if self.factored else None), Sample(second), Sample(weight)


@dataclass(slots=True)
class _Optimizer:
    """Sums over the parameters of an optimizer: M1, N, and that of sqrt(v).

    ``large`` are the parameters with free streams, each with how its moments and its weights are spread.
    """

    energy: float = 0.0
    numel: int = 0
    roots: float = 0.0
    large: list[tuple[_Stepped, Spread, Spread, Spread]] = field(default_factory=list)

    def add(self, one: _Stepped, first: Spread, second: Spread) -> None:
        """Add a parameter, or several of one rate and bias. Where a second moment is NaN or Inf none of them moves."""
        self.energy += one.energy(first) if second.is_finite else 0.0
        self.numel += first.numel
        self.roots += one.roots(second)


def spend(plan: Plan, source: Checkpoint, policy: Policy, budget: Budget, measured: Measured | None = None) -> None:
    """Choose codecs under a budget; ``policy`` has chosen the others. Raises InputError.

    A sample tells what they will err, or else what was ``measured``.
    """
    aim = budget.steps * _AIM ** (1 if measured is None else 1 + measured.files)
    _Spending(plan, source, policy, replace(budget, steps=aim)).run()
    if measured is not None:
        _correct(plan, measured)
    balance(plan)


def _correct(plan: Plan, measured: Measured) -> None:
    """Choose the steps of lattices anew, from what was measured. No last digits show in them."""
    plan.measured = measured.files
    for index, share in plan.shares.items():
        planned, per_square = plan.energies.get(share.optimizer, 0.0), measured.per_square.get(index, share.per_square)
        allowed = share.allowed * measured.energies.get(share.optimizer, 0.0) / planned if planned else 0.0
        allowed, per_square = _rounded(allowed, math.floor), _rounded(per_square, math.ceil)
        plan.shares[index] = Share(share.optimizer, allowed, per_square)
        stream = plan.by_index[index]
        if isinstance(stream.codec, DitheredLattice) and allowed and per_square:
            change = allowed / (per_square * step_of(stream.codec.k) ** 2)
            # What an error of a momentum moves may go with the error itself, and not with its square.
            octaves = min(math.log2(change), 0.0) if isinstance(stream.codec, MomentLattice) else math.log2(change) / 2
            k = max(min(stream.codec.k + math.floor(4 * octaves), stream.codec.k), LOWEST_K)
            codec, reason = replace(stream.codec, k=k), stream.reason if k == stream.codec.k else None
            plan.by_index[index] = replace(stream, codec=codec, reason=reason)


def _rounded(x: float, to: Callable[[float], int]) -> float:
    """A power of 2^(1/64) near to x; 0 for 0."""
    return 2.0 ** (to(64 * math.log2(x)) / 64) if x > 0 else 0.0


def balance(plan: Plan) -> None:
    """Give first moments what the others leave of their shares, or take from them what these exceed them by.

    Steps of weights are rounded down, or are those of a base; only those of first moments are any number.
    """
    shares = left_over(plan, {})
    for index, share in plan.shares.items():
        stream = plan.by_index[index]
        if isinstance(stream.codec, VScaled) and share.allowed and share.per_square:
            left, moments = shares[share.optimizer]
            k = math.sqrt(share.allowed * max(1 + left / moments, _LEAST_LEFT) / share.per_square)
            codec = replace(stream.codec, k=min(max(k, 1 / LARGEST), LARGEST))
            plan.by_index[index] = replace(stream, codec=codec)


def left_over(plan: Plan, codecs: Mapping[int, Codec]) -> dict[int, tuple[float, float]]:
    """What lattices and second moments of each optimizer leave of their shares, and the share that gives way.

    That is the share of first moments whose steps are any number: they can take less.

    ``codecs`` are those of some storages in place of their own. What is left is below zero where steps are too large.
    """
    shares: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for stream in plan.streams:
        share, codec = plan.shares.get(stream.index), codecs.get(stream.index, stream.codec)
        if share is not None:
            left, moments = shares[share.optimizer]
            if isinstance(codec, DitheredLattice):
                left += share.allowed - share.per_square * step_of(codec.k) ** 2
            elif isinstance(codec, RowColumnLog):
                left += share.allowed - share.per_square * codec.S**2
            elif isinstance(codec, VScaled):
                moments += share.allowed
            shares[share.optimizer] = left, moments
    return shares


class _Spending:
    def __init__(self, plan: Plan, source: Checkpoint, policy: Policy, budget: Budget) -> None:
        self._source = source
        self._sampler = Sampler(source)
        self._plan, self._policy, self._budget = plan, policy, budget
        self._streams = plan.by_index
        self._views = views_of(plan.tensors)
        self._by_key = {stream.storage.key: stream for stream in self._streams.values()}
        self._units = plan.units
        # Why no state is known to belong to a weight, by its shape. One without moments has no step then.
        self._unpaired = {
            each.shape: reason
            for each in plan.parameters
            if (each.step or not each.moments) and (reason := each.step.unpaired if each.step else each.stepless)
        }

    def run(self) -> None:
        """Replace the streams of the plan."""
        stepped = [parameter for unit in self._units if (parameter := self._stepped(unit)) is not None]
        for number, optimizer in self._optimizers(stepped).items():
            self._plan.energies[number] = optimizer.energy
            for one, first, second, weight in optimizer.large:
                if optimizer.energy and one.parameter.measure is not None:
                    self._spend_by_measure(optimizer, one, one.parameter.measure, one.sums(first), weight)
                elif optimizer.energy and optimizer.roots:
                    self._spend(optimizer, one, first, second, weight)
                else:
                    self._keep(one, "its optimizer has not moved anything yet")
        self._follow_weights()
        self._follow_masters()

    def _stepped(self, unit: Unit) -> _Stepped | None:
        """The parameter of a unit if its step is known; else a note why its streams keep the codecs of the preset."""
        free = [stream for stream in unit.streams if self._is_free(stream)]
        parameter = unit.parameter
        if parameter is None:
            for stream in [stream for stream in free if stream.index not in self._plan.copies]:
                shapes = (view.ref.shape for view in self._views[stream.index])
                reason = next((self._unpaired[shape] for shape in shapes if shape in self._unpaired), None)
                reason = f"the state of its shape: {reason}" if reason else UNMOVED
                reason = self._plan.stepless.get(stream.index, reason)
                self._note([stream], reason, Role.WEIGHT)
            self._note(free, NO_PARAMETER, Role.MOMENT1, Role.MOMENT2)
            return None
        rule = parameter.rule
        if parameter.step is None or (rule is None and parameter.measure is None):
            self._note(free, parameter.reason or parameter.stepless or "the step of its optimizer is unknown")
            return None
        factored = Factored.of(self._source, parameter)
        divides = rule is not None and rule.divisor_eps is not None and parameter.denominator is not None
        known = StepSums()
        if not parameter.moments:
            known = read_beside(self._source, parameter).totals(_windows(unit.numel), unit.numel)
        stepped = _Stepped(parameter, rule or _UNRULED, parameter.step, free, unit.numel, factored, known)
        if not parameter.moments:
            if known.finite:
                return stepped
            self._keep(stepped, "its second moments hold NaN or Inf")
            return None
        if "moment1" not in parameter.moments or not (divides or factored or parameter.measure):
            self._keep(stepped, "its optimizer does not divide by second moments")
            return None
        return stepped

    def _is_free(self, stream: Stream) -> bool:
        """Whether neither a rule nor its name or size decides how a storage is kept."""
        if stream.index not in self._plan.chosen or stream.reason is not None:
            return False
        views = self._views[stream.index]
        return self._policy.is_free([path for view in views for path in view.paths], [view.ref.shape for view in views])

    def _note(self, streams: Iterable[Stream], reason: str, *roles: Role) -> None:
        """Note why streams, or those of some roles, keep the codecs of the preset."""
        for stream in streams:
            if stream.lossy and (not roles or stream.spec.role in roles):
                self._streams[stream.index] = replace(stream, reason=f"{NO_BUDGET}{reason}")

    def _keep(self, one: _Stepped, reason: str) -> None:
        """Note why the streams of a parameter have no part in the budget: they may not err."""
        self._note(one.free, reason)
        self._plan.shares |= {stream.index: Share(one.step.optimizer, 0.0) for stream in one.free}

    def _optimizers(self, stepped: Iterable[_Stepped]) -> Mapping[int, _Optimizer]:
        """The optimizers by number, with their sums, without parameters that hold NaN or Inf."""
        small: dict[tuple[int, float, float, Measure | None], list[_Stepped]] = defaultdict(list)
        groups: list[list[_Stepped]] = []
        for one in stepped:
            if one.free or one.factored or one.numel > SAMPLE or one.is_alone:
                groups.append([one])
            else:
                small[one.step.optimizer, one.step.lr, one.rule.bias1, one.parameter.measure].append(one)
        groups += small.values()
        samples = [_together([one.sample(self._streams) for one in group]) for group in groups]
        spreads = iter(self._sampler.spreads([sample for triple in samples for sample in triple]))
        optimizers: dict[int, _Optimizer] = defaultdict(_Optimizer)
        for group, first, second, weight in zip(groups, spreads, spreads, spreads, strict=True):
            optimizer = optimizers[group[0].step.optimizer]
            if (first.is_finite and second.is_finite) or len(group) > 1:
                optimizer.add(group[0], first, second)
                optimizer.large.append((group[0], first, second, weight))
            else:
                of = "moments" if group[0].parameter.moments else "weights"
                self._keep(group[0], f"its {of} hold NaN or Inf")
        return optimizers

    def _spend(self, optimizer: _Optimizer, one: _Stepped, first: Spread, second: Spread, weight: Spread) -> None:
        """Share the budget out to the streams of a parameter, and choose their codecs."""
        betas = one.step.beta1, one.step.beta2
        shares = self._plan.shares
        energy = self._budget.rest(*betas) ** 2 * optimizer.energy
        for stream in one.free:
            if stream.index == one.step.weight:
                shares[stream.index] = Share(one.step.optimizer, energy * one.numel / optimizer.numel)
                mean_square = one.factored.mean if one.factored else second.mean("value") / one.rule.root_bias2**2
                part = self._budget.rest(*betas)
                self._take(stream, *self._weight(optimizer, part, mean_square, stream, weight))
            elif stream.spec.role is Role.MOMENT1:
                shares[stream.index] = Share(one.step.optimizer, energy * one.roots(second) / optimizer.roots)
                self._take(stream, self._first(optimizer, one, stream))
            else:
                allowed = self._budget.second(*betas) ** 2 * one.energy(first)
                shares[stream.index] = Share(one.step.optimizer, allowed)
                if stream.spec.role is Role.MOMENT2:
                    self._take_second(one, stream)

    def _spend_by_measure(
        self, optimizer: _Optimizer, one: _Stepped, measure: Measure, sums: StepSums, weight: Spread
    ) -> None:
        """Share the budget out to the streams of a parameter whose second moments are none, and choose their codecs."""
        mean_square = measure.weighs(sums) if sums.count else 0.0
        part = self._budget.half if isinstance(measure, Momentum) else self._budget.steps
        allowed = part**2 * optimizer.energy * one.numel / optimizer.numel
        for stream in one.free:
            self._plan.shares[stream.index] = Share(one.step.optimizer, allowed)
            if not mean_square:
                self._note([stream], f"its {'momentum is' if one.parameter.moments else 'second moments are'} zero")
            elif stream.index == one.step.weight:
                self._take(stream, *self._weight(optimizer, part, mean_square, stream, weight))
            elif isinstance(measure, Momentum):
                self._take_momentum(one, measure, sums, stream)

    def _take_momentum(self, one: _Stepped, measure: Momentum, sums: StepSums, stream: Stream) -> None:
        share = self._plan.shares[stream.index]
        error = measure.error(one.step.lr, sums, share.allowed)
        k = self._budget.momentum_step(error, math.sqrt(sums.square / sums.count))
        if k is None:
            self._note([stream], "its momentum is smaller than the smallest step of a lattice")
            return
        square = step_of(k) ** 2
        moved = measure.energies(one.step.lr, replace(sums, moment1=sums.count * square / 12)).moment1
        self._plan.shares[stream.index] = share._replace(per_square=moved / square)
        self._take(stream, MomentLattice(k, self._sampler.salt(stream.index)))

    def _take(self, stream: Stream, codec: Codec | str, reason: str | None = None) -> None:
        """Give a stream a codec that takes its type, and note the ``reason``, or why where there is none."""
        if isinstance(codec, str):
            self._note([stream], codec)
        elif codec.accepts(stream.spec):
            self._streams[stream.index] = replace(stream, codec=codec, fallback_codec=stream.codec, reason=reason)

    def _first(self, optimizer: _Optimizer, one: _Stepped, stream: Stream) -> Codec | str:
        rule, step, factors, share = one.rule, one.step, None, 1.0
        if one.factored is not None:
            factors = factors_of(one.parameter.confidence, one.parameter.shape, self._by_key.__getitem__)
            if factors is None:
                return "its row and column statistics are not kept exactly in storages of their own"
            share = one.factored.share
        k = self._budget.moment_scale(optimizer.energy, optimizer.roots, step.lr, step.beta1, step.beta2, rule.bias1)
        k = min(max(k * share**0.25, 1 / LARGEST), LARGEST)
        allowed = self._plan.shares[stream.index].allowed
        self._plan.shares[stream.index] = Share(step.optimizer, allowed, allowed / k**2)
        try:
            return VScaled(
                second=factors,
                k=k,
                u_max=self._budget.u_max * share**0.5,
                bias1=rule.bias1,
                root_bias2=rule.root_bias2,
                eps=rule.eps,
                salt=self._sampler.salt(stream.index),
            )
        except UsageError as exc:
            return str(exc)

    def _take_second(self, one: _Stepped, stream: Stream) -> None:
        row, has_columns = row_length([view.ref for view in self._views[stream.index]])
        step = self._budget.log_step(one.step.beta1, one.step.beta2)
        if step is not None:
            share = self._plan.shares[stream.index]
            self._plan.shares[stream.index] = share._replace(per_square=share.allowed / step**2)
            self._take(stream, RowColumnLog(step, row, has_columns))
        else:
            reason = "the smallest step of second moments errs by more than the budget"
            self._streams[stream.index] = replace(stream, codec=LOSSLESS, reason=reason)

    def _weight(
        self, optimizer: _Optimizer, part: float, mean_square: float, stream: Stream, weight: Spread
    ) -> tuple[Codec | str, str | None]:
        """The codec, and a reason where it is finer than the budget allows; or why there is none.

        ``part`` are the steps that weights may take, ``mean_square`` is what an element of the tensor counts.
        """
        if not weight.is_finite:
            return "its weights hold NaN or Inf", None
        rms = weight.mean("square") ** 0.5
        if not rms:
            return "its weights are zero", None
        k, capped = self._budget.weight_step(part, optimizer.energy, optimizer.numel, mean_square, rms)
        share, per_square = self._plan.shares[stream.index], mean_square * stream.spec.numel / 12
        allowed = per_square * step_of(k) ** 2 if capped else share.allowed
        self._plan.shares[stream.index] = Share(share.optimizer, allowed, per_square)
        return Lattice(k, self._sampler.salt(stream.index)), CAPPED if capped else None

    def _follow_weights(self) -> None:
        """Give copies of weights on a lattice the same step, and a dither of their own."""
        for index, weight in self._plan.copies.items():
            copy, followed = self._streams[index], self._streams[weight]
            if not self._is_free(copy):
                continue
            if isinstance(followed.codec, Lattice):
                self._take(copy, replace(followed.codec, salt=self._sampler.salt(index)), followed.reason)
            else:
                self._note([copy], "the weight that it is a copy of has none")

    def _follow_masters(self) -> None:
        """Make copies of masters on a lattice what they are after decoding: copies of the decoded masters."""
        on_lattice = {index for index, stream in self._streams.items() if stream.codec.id == Lattice.id}
        for index, stream in self._streams.items():
            copied = stream.codec.copied
            if copied is not None and any(run.storage in on_lattice for run in copied.runs):
                self._streams[index] = replace(stream, codec=LatticeReference(copied.runs))


def _together(samples: Sequence[tuple[Sample, Sample, Sample]]) -> list[Sample]:
    """The samples of several parameters as one, place by place."""
    return [
        Sample([stream for sample in place for stream in sample.streams], place[0].factors)
        for place in zip(*samples, strict=True)
    ]


def row_length(views: Sequence[TensorRef]) -> tuple[int, bool]:
    """The length of the rows of ``rclog`` for the tensors of a storage, and whether their columns get factors.

    A row has all dimensions but the first in the order of the storage, or fewer that make it long enough.
    """
    if len(views) != 1:
        return FLAT_ROW, False
    (ref,) = views
    sizes = [size for _, size in sorted(zip(ref.stride, ref.shape, strict=True), reverse=True) if size > 1]
    length = 1
    while len(sizes) > 1 and length < FLAT_ROW:
        length *= sizes.pop()
    if not FLAT_ROW <= length <= MOST_COLUMNS:
        return FLAT_ROW, False
    return length, ref.numel // length >= _LEAST_ROWS
