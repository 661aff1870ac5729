"""A plan: what becomes of every storage, in units that are read in lockstep.

A unit is one storage, or the moments of one parameter, whose error is measured in update space on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from ckpt8.checkpoint.meaning.coded_moments import CodedMoment
from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule
from ckpt8.checkpoint.meaning.replayed import Confidence, Order, Replayed
from ckpt8.checkpoint.tree import Checkpoint, NamedTensor, StorageInfo, TensorRef
from ckpt8.codecs import Codec
from ckpt8.compressing.coded import CodedMoments, CodedStep, Codes
from ckpt8.compressing.momentum import Momentum
from ckpt8.compressing.policy import LOSSLESS
from ckpt8.compressing.relative import RelativeStep, SecondRoots
from ckpt8.container import header
from ckpt8.container.steps import COPY, Origin
from ckpt8.core.arrays import Array, as_tensor, empty
from ckpt8.core.lazy import torch
from ckpt8.core.log import log
from ckpt8.core.tensors import DType, Role, TensorSpec

Measure = Momentum | RelativeStep | CodedStep
"""How the steps of a parameter are counted whose second moments are no stream: by ``StepSums``."""


@dataclass(frozen=True, slots=True)
class Replay:
    """How the first step of a parameter is replayed.

    ``state`` are the streams of the unit by the key of the rule, ``statistics`` what else its state has, by key, each
    with its storage; they come back as they are.
    """

    rule: Replayed
    order: Order
    state: Mapping[str, int]
    statistics: Mapping[str, tuple[StorageInfo, TensorRef]]

    @property
    def is_whole(self) -> bool:
        """Whether the step takes all elements at once."""
        return self.rule.form.reach != "element"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """What an error in steps needs to know of the step that moves one parameter.

    ``optimizer`` is the number of its optimizer among those of the source. ``lr`` is the learning rate of its group, at
    least a tenth of the initial one where that is known, and above zero; ``stated_lr`` is what the group says.
    Where a ``Measure`` counts the steps, ``stated`` is what the manifest says of it, and the betas are 0.
    ``decay`` is the weight decay, which ``is_coupled`` where it is part of the gradient. ``weight`` is the stream whose
    elements are its weights, in the order of its moments; None where that is unknown, and ``unpaired`` then says why.
    """

    optimizer: int
    lr: float
    beta1: float
    beta2: float
    weight: int | None
    unpaired: str | None = None
    stated_lr: float | None = None
    decay: float = 0.0
    is_coupled: bool = False
    stated: Mapping[str, Origin] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Parameter:
    """The moments of one parameter by slot (``moment1``, ``moment2``, ``max_moment2``), as indices of streams.

    ``rule`` is None where the update rule is unknown; ``reason`` then says why. ``confidence`` are the row and column
    statistics of CAME's confidence, ``squares`` those of its or Adafactor's second moments, or the codes of moments,
    each with its storage; ``has_some_rows``: they are those of a slice without all rows. ``replay`` is there if
    the rule is ``replayed``. ``step`` is there where anything is lossy, and rule and learning rate are known, else
    ``stepless`` says why it is not; its weight is then a stream of the same unit. ``measure`` is there for a rule
    whose second moments are no stream. ``rule_beside_master`` is the rule of a state without the master that makes
    ``rule`` unknown.
    """

    name: str
    moments: Mapping[str, int]
    rule: UpdateRule | None
    reason: str | None
    shape: tuple[int, ...]
    confidence: Sequence[tuple[StorageInfo, TensorRef]] = ()
    replay: Replay | None = None
    step: OptimizerStep | None = None
    stepless: str | None = None
    squares: Sequence[tuple[StorageInfo, TensorRef]] = ()
    rule_beside_master: UpdateRule | None = None
    has_some_rows: bool = False
    measure: Measure | None = None

    @property
    def streams(self) -> set[int]:
        """The indices of all streams that are read together; none for Adafactor where the weight is unknown."""
        storages = {*self.moments.values(), *(self.replay.state.values() if self.replay else ())}
        return storages if self.step is None or self.step.weight is None else storages | {self.step.weight}

    @property
    def denominator(self) -> str | None:
        """The slot whose square root the update is divided by, or None."""
        return next((slot for slot in ("max_moment2", "moment2") if slot in self.moments), None)


@dataclass(frozen=True, slots=True)
class Stream:
    """One storage on its way into the container. ``spec`` is flat; ``storage`` its place in the source.

    Where ``codec`` refuses its unit, ``fallback_codec`` is next; None for lossless. ``base`` is the index of the
    storage in the base of the container whose parts it is kept as a difference to; None for one that is kept whole.
    """

    index: int
    spec: TensorSpec
    storage: StorageInfo
    codec: Codec
    reason: str | None = None
    fallback_codec: Codec | None = None
    base: int | None = None

    @property
    def codecs(self) -> list[Codec]:
        """All codecs that it may come to have."""
        return list(dict.fromkeys((self.codec, self.fallback_codec or LOSSLESS, LOSSLESS)))

    def fallback(self, reason: str) -> Stream:
        """The stream with its next codec; ``reason`` is noted behind that of an earlier one."""
        # What is noted of the codec of a budget goes with it, and what is noted of a lossy copy of weights.
        earlier = None if self.fallback_codec is not None or self.reason == COPY else self.reason
        reasons = [reason] if earlier is None else [earlier, reason]
        reason = "; ".join(dict.fromkeys(reasons))
        return replace(self, codec=self.fallback_codec or LOSSLESS, reason=reason, fallback_codec=None, base=None)

    @property
    def lossy(self) -> bool:
        """Whether decoding gives other values than the source has."""
        return self.codec.is_lossy

    @property
    def lossy_moment(self) -> bool:
        """Whether the stream is a moment and lossy."""
        return self.lossy and self.spec.role in (Role.MOMENT1, Role.MOMENT2)

    def chunk_spec(self, chunk: int) -> TensorSpec:
        """The specification of one chunk."""
        return header.chunk_spec(self.spec, chunk)


class Refusal(NamedTuple):
    """Why the codecs of a unit cannot keep it. ``storage`` is the one refused; None for the moments together."""

    reason: str
    storage: int | None = None


@dataclass(frozen=True, slots=True)
class Unit:
    """Streams of one length that are read in lockstep, and their parameter if they are moments."""

    streams: tuple[Stream, ...]
    parameter: Parameter | None = None

    @property
    def numel(self) -> int:
        """Elements of each stream."""
        return self.streams[0].spec.numel

    @property
    def measured(self) -> bool:
        """Whether errors are measured: of lossy streams, and of steps, replayed or known, which sum all parameters."""
        parameter = self.parameter
        has_step = parameter is not None and (parameter.replay is not None or parameter.step is not None)
        return has_step or any(stream.codec.measured_as is not None for stream in self.streams)

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are stored as they are, and nothing is measured of them but how far a step moves them."""
        parameter = self.parameter
        if parameter is not None and (parameter.replay is not None or (parameter.step and parameter.squares)):
            return False
        return all(stream.codec == LOSSLESS for stream in self.streams)

    @property
    def weight(self) -> int | None:
        """The stream of the weight that the step of its parameter moves."""
        return self.parameter.step.weight if self.parameter and self.parameter.step else None

    def fallback(self, refusal: Refusal) -> Unit:
        """The unit with its next codecs, of the preset or lossless. The reason is noted where they are new.

        The weight of a step falls back alone, and the moments without it.
        """
        is_weight = refusal.storage is not None and refusal.storage == self.weight
        falling = [stream for stream in self.streams if (stream.index == self.weight) == is_weight]
        whose = "the state of its parameter " if len(falling) > 1 and refusal.storage is not None else ""
        falling = [stream for stream in falling if stream.fallback_codec] or [s for s in falling if s.codec != LOSSLESS]
        after = {stream.index: stream.fallback(f"{whose}{refusal.reason}") for stream in falling}
        for stream in falling:
            codec = after[stream.index].codec
            log.info("storage %s: %s in place of %s: %s", stream.storage.key, codec.id, stream.codec.id, refusal.reason)
        return replace(self, streams=tuple(after.get(stream.index, stream) for stream in self.streams))


class Share(NamedTuple):
    """What the error of a storage may move under a budget, an energy of its ``optimizer``: see ``budget``.

    Steps of size s move ``per_square`` s^2; 0 for a storage whose codec the budget does not choose.
    """

    optimizer: int
    allowed: float
    per_square: float = 0.0


class Measured(NamedTuple):
    """What a file that exceeded its budget tells of its source, where a sample tells less.

    ``energies`` are what one step moves, by optimizer, and ``per_square`` is that of ``Share``, by storage. ``files``
    counts those that exceeded it.
    """

    energies: Mapping[int, float]
    per_square: Mapping[int, float]
    files: int


@dataclass(slots=True)
class Plan:
    """What becomes of every storage, by its index, the parameters, and all tensors with the index of their storage.

    ``chosen`` are the storages whose codec the policy chose; that of the others is lossless under every policy.
    ``masters`` are those of rounded copies that are all of one master, whatever codec these copies have.
    ``stepless`` are weights whose state tells no step, with the reason.
    ``copies`` are averages and other copies of weights, each with the weight whose step it takes under a budget.
    ``shares`` are those of the storages that a budget may choose codecs for, and whose error it measures. ``energies``
    are what one step moves, by optimizer; ``measured`` counts the whole files that told it, and not a sample.
    """

    by_index: dict[int, Stream] = field(default_factory=dict)
    parameters: list[Parameter] = field(default_factory=list)
    tensors: list[tuple[NamedTensor, int]] = field(default_factory=list)
    chosen: set[int] = field(default_factory=set)
    masters: Mapping[int, int] = field(default_factory=dict)
    stepless: dict[int, str] = field(default_factory=dict)
    copies: Mapping[int, int] = field(default_factory=dict)
    shares: dict[int, Share] = field(default_factory=dict)
    energies: dict[int, float] = field(default_factory=dict)
    measured: int = 0

    @property
    def is_lossy(self) -> bool:
        """Whether decoding gives other values anywhere."""
        return any(stream.lossy for stream in self.by_index.values())

    @property
    def streams(self) -> list[Stream]:
        """All streams, by index."""
        return [self.by_index[index] for index in sorted(self.by_index)]

    @property
    def units(self) -> list[Unit]:
        """The units in the order of the source."""
        return join(self.streams, self.parameters)


def views_of(tensors: Iterable[tuple[NamedTensor, int]]) -> Mapping[int, list[NamedTensor]]:
    """The tensors of every storage, by its index."""
    views: dict[int, list[NamedTensor]] = defaultdict(list)
    for tensor, index in tensors:
        views[index].append(tensor)
    return views


def read_elements(source: Checkpoint, storage: StorageInfo, dtype: DType, start: int, count: int) -> Array:
    """``count`` elements of a storage from number ``start`` on. Raises InputError."""
    content = empty(count, dtype)
    source.read_into(storage.offset + start * dtype.itemsize, content.view(np.uint8).data)
    return content


def read_tensor(source: Checkpoint, storage: StorageInfo, ref: TensorRef) -> torch.Tensor:
    """A tensor of a storage in fp32, contiguous. Raises InputError."""
    values = as_tensor(read_elements(source, storage, ref.dtype, ref.offset, ref.numel), ref.dtype)
    return values.as_strided(ref.shape, ref.stride).float().contiguous()


def read_factors(
    source: Checkpoint, parameter: Parameter, statistics: Iterable[tuple[StorageInfo, TensorRef]]
) -> Confidence:
    """The factors that row and column ``statistics`` of a parameter of CAME give. Raises InputError."""
    rows, columns = (read_tensor(source, *where) for where in statistics)
    return Confidence(rows, columns, has_some_rows=parameter.has_some_rows)


def read_beside(source: Checkpoint, parameter: Parameter) -> SecondRoots | CodedMoments:
    """What weighs the weights of a parameter without streams of moments. Raises InputError."""
    if not isinstance(parameter.measure, CodedStep):
        rows, columns = (read_tensor(source, *where) for where in parameter.squares)
        return SecondRoots(rows.reshape(parameter.shape[:-1]), columns.reshape(*parameter.shape[:-2], -1))
    storages = {ref.key: storage for storage, ref in parameter.squares}
    return CodedMoments(*(_read_codes(source, moment, storages) for moment in parameter.measure.moments))


def _read_codes(source: Checkpoint, moment: CodedMoment, storages: Mapping[str, StorageInfo]) -> Codes:
    codes = moment.codes
    start = storages[codes.key].offset + codes.offset

    def read(ranges: Sequence[range]) -> torch.Tensor:
        buffer, at = bytearray(sum(map(len, ranges))), 0
        for own in ranges:
            source.read_into(start + own.start, memoryview(buffer)[at : at + len(own)])
            at += len(own)
        return torch.frombuffer(buffer, dtype=torch.uint8).view(codes.dtype.torch)

    scales = read_tensor(source, storages[moment.scales.key], moment.scales)
    table = None if moment.table is None else read_tensor(source, storages[moment.table.key], moment.table)
    return Codes(read, scales, table, moment.block, moment.packed)


def join(streams: Iterable[Stream], parameters: Iterable[Parameter]) -> list[Unit]:
    """Put the moments of each parameter into one unit; return the units in the order of the source."""
    rest = {stream.index: stream for stream in streams}
    units = [
        Unit(tuple(rest.pop(index) for index in sorted(parameter.streams)), parameter)
        for parameter in parameters
        if parameter.streams and parameter.streams <= rest.keys()
    ]
    units += [Unit((stream,)) for stream in rest.values()]
    return sorted(units, key=lambda unit: unit.streams[0].storage.offset)
