"""Gives the storages of a plan the codecs of a budget, with steps that together make an error of so many steps.

They are for parameters whose optimizer's step is known and divides by second moments. All other storages keep the
codecs of the preset, which those under the budget fall back to, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.checkpoint.tree import Checkpoint, TensorRef
from ckpt8.codecs import Codec
from ckpt8.codecs.lattice import LOWEST_K, Lattice, step_of
from ckpt8.codecs.rclog import FLAT_ROW, MOST_COLUMNS, RowColumnLog
from ckpt8.codecs.rounded_copy import LatticeReference
from ckpt8.codecs.vscaled import LARGEST, VScaled
from ckpt8.compressing.budget import Budget
from ckpt8.compressing.factored_moments import Factored, factors_of
from ckpt8.compressing.parameters import OptimizerStep, Parameter
from ckpt8.compressing.plan import Measured, Plan, Share, Stream, Unit, views_of
from ckpt8.compressing.policy import LOSSLESS, Policy
from ckpt8.compressing.step_statistics import SAMPLE, Sample, Sampler, Spread
from ckpt8.container.facts import CAPPED, NO_BUDGET, NO_PARAMETER
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Role

_AIM = 0.99
"""The part of a budget that is spent as far as a sample tells: the whole of most files then keeps to it."""

_LEAST_LEFT = 0.25
"""The least part of their share that first moments keep."""

_LEAST_ROWS = 16
"""Matrices of fewer rows get no column factors: these would cost more than they save."""


@dataclass(frozen=True, slots=True)
class _Stepped:
    """A parameter with the step that moves it.

    ``free`` are the streams of its unit whose codecs the budget may choose. ``factored`` are the second moments of a
    parameter that has only their row and column statistics.
    """

    parameter: Parameter
    rule: UpdateRule
    step: OptimizerStep
    free: Sequence[Stream]
    numel: int
    factored: Factored | None

    def energy(self, first: Spread) -> float:
        """What one step moves, from how the first moments are spread."""
        return (self.step.lr / self.rule.bias1) ** 2 * first.total("square")

    def roots(self, second: Spread) -> float:
        """The sum of sqrt(v), from how the second moments are spread."""
        return self.factored.roots if self.factored else second.total("root")

    def sample(self, streams: Mapping[int, Stream]) -> tuple[Sample, Sample, Sample]:
        """What is sampled: first moments as steps of the weight, second moments, and weights that are free."""
        moments, denominator = self.parameter.moments, self.parameter.denominator
        first = [streams[moments["moment1"]]]
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
        """Add a parameter, or several of one rate and bias."""
        self.energy += one.energy(first)
        self.numel += first.numel
        self.roots += one.roots(second)


def spend(plan: Plan, source: Checkpoint, policy: Policy, budget: Budget, measured: Measured | None = None) -> None:
    """Choose codecs under a budget; ``policy`` has chosen the others. Raises InputError.

    A sample tells what they will err, or else what was ``measured``.
    """
    aim = budget.steps * (_AIM if measured is None else _AIM**2)
    _Spending(plan, source, policy, replace(budget, steps=aim)).run()
    if measured is not None:
        _correct(plan, measured)
    balance(plan)


def _correct(plan: Plan, measured: Measured) -> None:
    """Choose the steps of weights anew, from what was measured. No last digits show in them."""
    plan.is_measured = True
    for index, share in plan.shares.items():
        planned, per_square = plan.energies.get(share.optimizer, 0.0), measured.per_square.get(index, share.per_square)
        allowed = share.allowed * measured.energies.get(share.optimizer, 0.0) / planned if planned else 0.0
        plan.shares[index] = Share(share.optimizer, _rounded(allowed, math.floor), _rounded(per_square, math.ceil))

    def corrected(stream: Stream) -> Stream:
        share, codec = plan.shares.get(stream.index), stream.codec
        if share is None or not isinstance(codec, Lattice) or not (share.allowed and share.per_square):
            return stream
        k = min(math.floor(2 * math.log2(share.allowed / share.per_square)), codec.k)
        return replace(stream, codec=replace(codec, k=max(k, LOWEST_K)))

    plan.units = [replace(unit, streams=tuple(map(corrected, unit.streams))) for unit in plan.units]


def _rounded(x: float, to: Callable[[float], int]) -> float:
    """A power of 2^(1/64) near to x; 0 for 0."""
    return 2.0 ** (to(64 * math.log2(x)) / 64) if x > 0 else 0.0


def balance(plan: Plan) -> None:
    """Give first moments what the others leave of their shares, or take from them what these exceed them by.

    Steps of weights are rounded down, or are those of a base; only those of first moments are any number.
    """
    found = left_over(plan, {})

    def balanced(stream: Stream) -> Stream:
        share = plan.shares.get(stream.index)
        if share is None or not isinstance(stream.codec, VScaled) or not (share.allowed and share.per_square):
            return stream
        left, moments = found[share.optimizer]
        k = math.sqrt(share.allowed * max(1 + left / moments, _LEAST_LEFT) / share.per_square)
        return replace(stream, codec=replace(stream.codec, k=min(max(k, 1 / LARGEST), LARGEST)))

    plan.units = [replace(unit, streams=tuple(map(balanced, unit.streams))) for unit in plan.units]


def left_over(plan: Plan, codecs: Mapping[int, Codec]) -> dict[int, tuple[float, float]]:
    """What weights and second moments of each optimizer leave of their shares, and the share of its first moments.

    ``codecs`` are those of some storages in place of their own. What is left is below zero where steps are too large.
    """
    found: dict[int, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for stream in plan.streams:
        share, codec = plan.shares.get(stream.index), codecs.get(stream.index, stream.codec)
        if share is not None:
            left, moments = found[share.optimizer]
            if isinstance(codec, Lattice):
                left += share.allowed - share.per_square * step_of(codec.k) ** 2
            elif isinstance(codec, RowColumnLog):
                left += share.allowed - share.per_square * codec.S**2
            elif isinstance(codec, VScaled):
                moments += share.allowed
            found[share.optimizer] = left, moments
    return found


class _Spending:
    def __init__(self, plan: Plan, source: Checkpoint, policy: Policy, budget: Budget) -> None:
        self._source = source
        self._plan, self._policy, self._budget = plan, policy, budget
        self._views = views_of(plan.tensors)
        self._sampler = Sampler(source)
        self._streams = {stream.index: stream for unit in plan.units for stream in unit.streams}
        self._by_key = {stream.storage.key: stream for stream in self._streams.values()}
        stepped = ((each.shape, each.step) for unit in plan.units if (each := unit.parameter) is not None)
        # Why no state is known to belong to a weight, by its shape.
        self._unpaired = {shape: step.unpaired for shape, step in stepped if step and step.unpaired}

    def run(self) -> None:
        """Replace the streams of the plan."""
        stepped = [each for unit in self._plan.units if (each := self._stepped(unit)) is not None]
        for number, optimizer in self._optimizers(stepped).items():
            self._plan.energies[number] = optimizer.energy
            for one, first, second, weight in optimizer.large:
                if optimizer.energy and optimizer.roots:
                    self._allow(optimizer, one, first, second)
                    self._spend(optimizer, one, second, weight)
                else:
                    self._keep(one, "its optimizer has not moved anything yet")
        self._follow_weights()
        self._follow_masters()
        self._plan.units = [
            replace(unit, streams=tuple(self._streams[stream.index] for stream in unit.streams))
            for unit in self._plan.units
        ]

    def _stepped(self, unit: Unit) -> _Stepped | None:
        """The parameter of a unit if its step is known; else a note why its streams keep the codecs of the preset."""
        free = [stream for stream in unit.streams if self._is_free(stream)]
        parameter = unit.parameter
        if parameter is None:
            others = [stream for stream in free if stream.index not in self._plan.copies]
            for stream in others:
                shapes = (view.ref.shape for view in self._views[stream.index])
                reason = next((self._unpaired[shape] for shape in shapes if shape in self._unpaired), None)
                unknown = "no optimizer in the file is known to update it"
                reason = f"the state of its shape: {reason}" if reason else unknown
                reason = self._plan.stepless.get(stream.index, reason)
                self._note([stream], reason, Role.WEIGHT)
            self._note(free, NO_PARAMETER, Role.MOMENT1, Role.MOMENT2)
            return None
        rule = parameter.rule
        if parameter.step is None or rule is None:
            self._note(free, parameter.reason or parameter.stepless or "the step of its optimizer is unknown")
            return None
        factored = Factored.of(self._source, parameter)
        divides = rule.divisor_eps is not None and parameter.denominator is not None
        found = _Stepped(parameter, rule, parameter.step, free, unit.numel, factored)
        if "moment1" not in parameter.moments or not (divides or factored):
            self._keep(found, "its optimizer does not divide by second moments")
            return None
        return found

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
        small: dict[tuple[int, float, float], list[_Stepped]] = defaultdict(list)
        groups: list[list[_Stepped]] = []
        for one in stepped:
            if one.free or one.factored or one.numel > SAMPLE:
                groups.append([one])
            else:
                small[one.step.optimizer, one.step.lr, one.rule.bias1].append(one)
        groups += small.values()
        samples = [_together([one.sample(self._streams) for one in group]) for group in groups]
        spreads = iter(self._sampler.spreads([sample for each in samples for sample in each]))
        found: dict[int, _Optimizer] = defaultdict(_Optimizer)
        for group, first, second, weight in zip(groups, spreads, spreads, spreads, strict=True):
            optimizer = found[group[0].step.optimizer]
            if (first.is_finite and second.is_finite) or len(group) > 1:
                optimizer.add(group[0], first, second)
                optimizer.large.append((group[0], first, second, weight))
            else:
                self._keep(group[0], "its moments hold NaN or Inf")
        return found

    def _allow(self, optimizer: _Optimizer, one: _Stepped, first: Spread, second: Spread) -> None:
        """Share the budget out to the streams of a parameter."""
        betas = one.step.beta1, one.step.beta2
        each = self._budget.rest(*betas) ** 2 * optimizer.energy
        for stream in one.free:
            if stream.index == one.step.weight:
                allowed = each * one.numel / optimizer.numel
            elif stream.spec.role is Role.MOMENT1:
                allowed = each * one.roots(second) / optimizer.roots
            else:
                allowed = self._budget.second(*betas) ** 2 * one.energy(first)
            self._plan.shares[stream.index] = Share(one.step.optimizer, allowed)

    def _spend(self, optimizer: _Optimizer, one: _Stepped, second: Spread, weight: Spread) -> None:
        """Choose the codecs of a parameter."""
        for stream in one.free:
            if stream.index == one.step.weight:
                self._take(stream, *self._weight(optimizer, one, second, stream, weight))
            elif stream.spec.role is Role.MOMENT1:
                self._take(stream, self._first(optimizer, one, stream))
            elif stream.spec.role is Role.MOMENT2:
                self._take_second(one, stream)

    def _take(self, stream: Stream, codec: Codec | str, reason: str | None = None) -> None:
        """Give a stream a codec that takes its type, and note the ``reason``, or why where there is none."""
        if isinstance(codec, str):
            self._note([stream], codec)
        elif codec.accepts(stream.spec):
            self._streams[stream.index] = replace(stream, codec=codec, second=stream.codec, reason=reason)

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
        self, optimizer: _Optimizer, one: _Stepped, second: Spread, stream: Stream, weight: Spread
    ) -> tuple[Codec | str, str | None]:
        """The codec, and a reason where it is finer than the budget allows; or why there is none."""
        if not weight.is_finite:
            return "its weights hold NaN or Inf", None
        rms = weight.mean("square") ** 0.5
        if not rms:
            return "its weights are zero", None
        mean_square = one.factored.mean if one.factored else second.mean("value") / one.rule.root_bias2**2
        betas = one.step.beta1, one.step.beta2
        k, capped = self._budget.weight_step(optimizer.energy, optimizer.numel, *betas, mean_square, rms)
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
        Sample([stream for each in place for stream in each.streams], place[0].factors)
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
