"""Gives the storages of a plan the codecs of a budget, with steps that together make an error of so many steps.

They are for parameters whose optimizer's step is known and divides by second moments. All other storages keep the
codecs of the preset, which those under the budget fall back to, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.checkpoint.tree import Checkpoint, TensorRef
from ckpt8.codecs import Codec
from ckpt8.codecs.lattice import Lattice
from ckpt8.codecs.rclog import FLAT_ROW, MOST_COLUMNS, RowColumnLog
from ckpt8.codecs.rounded_copy import LatticeReference
from ckpt8.codecs.vscaled import LARGEST, VScaled
from ckpt8.compressing.budget import Budget
from ckpt8.compressing.factored_moments import Factored, factors_of
from ckpt8.compressing.parameters import OptimizerStep, Parameter
from ckpt8.compressing.plan import Plan, Stream, Unit, WeightCost, views_of
from ckpt8.compressing.policy import Policy
from ckpt8.compressing.step_statistics import SAMPLE, Sample, Sampler, Spread
from ckpt8.container.facts import CAPPED, NO_BUDGET, NO_PARAMETER
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Role

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

    ``large`` are the parameters with free streams, each with how its second moments and its weights are spread.
    """

    energy: float = 0.0
    numel: int = 0
    roots: float = 0.0
    large: list[tuple[_Stepped, Spread, Spread]] = field(default_factory=list)

    def add(self, one: _Stepped, first: Spread, second: Spread) -> None:
        """Add a parameter, or several of one rate and bias."""
        self.energy += (one.step.lr / one.rule.bias1) ** 2 * first.total("square")
        self.numel += first.numel
        self.roots += one.factored.roots if one.factored else second.total("root")


def spend(plan: Plan, source: Checkpoint, policy: Policy, budget: Budget) -> None:
    """Choose codecs under a budget; ``policy`` has chosen the others. Raises InputError."""
    _Spending(plan, source, policy, budget).run()


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
        for optimizer in self._optimizers(stepped):
            for one, second, weight in optimizer.large:
                if optimizer.energy and optimizer.roots:
                    self._spend(optimizer, one, second, weight)
                else:
                    self._note(one.free, "its optimizer has not moved anything yet")
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
                reason = f"the state of its shape: {reason}" if reason else "no known step of an optimizer moves it"
                self._note([stream], reason, Role.WEIGHT)
            self._note(free, NO_PARAMETER, Role.MOMENT1, Role.MOMENT2)
            return None
        rule = parameter.rule
        if parameter.step is None or rule is None:
            self._note(free, parameter.reason or parameter.stepless or "the step of its optimizer is unknown")
            return None
        factored = Factored.of(self._source, parameter)
        divides = rule.divisor_eps is not None and parameter.denominator is not None
        if "moment1" not in parameter.moments or not (divides or factored):
            self._note(free, "its optimizer does not divide by second moments")
            return None
        return _Stepped(parameter, rule, parameter.step, free, unit.numel, factored)

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

    def _optimizers(self, stepped: Iterable[_Stepped]) -> Iterable[_Optimizer]:
        """The optimizers with their sums, without parameters that hold NaN or Inf."""
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
                optimizer.large.append((group[0], second, weight))
            else:
                self._note(group[0].free, "its moments hold NaN or Inf")
        return found.values()

    def _spend(self, optimizer: _Optimizer, one: _Stepped, second: Spread, weight: Spread) -> None:
        """Choose the codecs of a parameter."""
        for stream in one.free:
            if stream.index == one.step.weight:
                self._take(stream, *self._weight(optimizer, one, second, stream, weight))
            elif stream.spec.role is Role.MOMENT1:
                self._take(stream, self._first(optimizer, one, stream))
            elif stream.spec.role is Role.MOMENT2:
                self._take(stream, self._second(one, stream))

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
        try:
            return VScaled(
                second=factors,
                k=min(max(k * share**0.25, 1 / LARGEST), LARGEST),
                u_max=self._budget.u_max * share**0.5,
                bias1=rule.bias1,
                root_bias2=rule.root_bias2,
                eps=rule.eps,
                salt=self._sampler.salt(stream.index),
            )
        except UsageError as exc:
            return str(exc)

    def _second(self, one: _Stepped, stream: Stream) -> Codec:
        row, has_columns = row_length([view.ref for view in self._views[stream.index]])
        return RowColumnLog(self._budget.log_step(one.step.beta1, one.step.beta2), row, has_columns)

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
        self._plan.costs[stream.index] = WeightCost(
            one.step.optimizer, self._budget.weight_cost(optimizer.energy, stream.spec.numel, *betas, mean_square)
        )
        k, capped = self._budget.weight_step(optimizer.energy, optimizer.numel, *betas, mean_square, rms)
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
