"""Plans a compression: turns an open checkpoint into units, in the order of the source.

A unit is one storage, or the moments of one parameter. These are read in lockstep, to measure their error in update
space on the way.

Presets choose codecs by role, rules by name, and some tensors always stay lossless.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch

from ckpt8.checkpoint.meaning.roles import Names, ParameterState, Structure, classify, unique_name
from ckpt8.checkpoint.sources.bundle import WithSkeleton
from ckpt8.checkpoint.tree import Checkpoint, NamedTensor, StorageInfo, TensorRef, is_dense
from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.codecs import Codec, parse_codec
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.split24 import Split24
from ckpt8.compressing.budget import PRESET_BUDGETS, Budget
from ckpt8.compressing.parameters import Parameter, find_parameters
from ckpt8.container import header
from ckpt8.container.manifest import SKELETON
from ckpt8.core.arguments import described
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, Role, TensorSpec, is_small

LOSSLESS = Lossless()

_FLASH: Mapping[Role, Codec] = {
    Role.WEIGHT: Split24(),
    Role.MOMENT1: Companded8(),
    Role.MOMENT2: Companded8(signed=False, Q=255),
}

PRESETS: Mapping[str, Mapping[Role, Codec]] = {"flash": _FLASH, "compact": _FLASH, "archive": _FLASH, "lossless": {}}
"""The codec of each role. Under a budget these are the codecs of what a budget cannot be given to."""


_COMPONENTS = re.compile(r"[.:]")
"""Separates the components of a path; a colon follows the name of a member."""


@dataclass(frozen=True, slots=True)
class Rule:
    """``GLOB=CODEC``: tensors whose path matches get that codec. ``text`` is what the user wrote."""

    text: str
    glob: str
    codec: type[Any]
    fields: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Read a rule. Raises UsageError."""
        match = re.fullmatch(r"(.+?)=([a-z0-9]+\s*(?:\(.*\))?)", text.strip())
        if match is None:
            raise UsageError(f"rule {text!r}: expected GLOB=CODEC, as in '*.lm_head.weight=lossless'")
        codec, fields = parse_codec(match[2])
        rule = cls(text, match[1].strip(), codec, fields)
        if rule.codec_for(Role.OTHER) is None and rule.codec_for(Role.MOMENT2) is None:
            codec(**fields)
        return rule

    def matches(self, names: Sequence[str]) -> bool:
        """Whether the glob matches one of ``names``."""
        return any(fnmatchcase(name, self.glob) for name in names)

    def codec_for(self, role: Role) -> Codec | None:
        """The codec with the fields of the rule, or None where they do not suit the role.

        Fields that the rule does not give have the defaults of the role: second moments are unsigned.
        """
        try:
            codec: Codec = self.codec(**{**self.codec.defaults_for(role), **self.fields})
        except UsageError:
            return None
        return codec


@dataclass(frozen=True, slots=True)
class Policy:
    """A preset and rules; the first rule that matches wins over the preset.

    ``budget`` is that of the preset, or the one that was asked for; None without one.
    """

    preset: str = "flash"
    rules: tuple[Rule, ...] = ()
    budget: Budget | None = None

    @classmethod
    def of(
        cls,
        preset: str | None = None,
        rules: Sequence[str] = (),
        budget: float | None = None,
        max_update_error: float | None = None,
    ) -> Policy:
        """Read a preset, flash by default, and rules. A ``budget`` in steps is a preset of its own.

        Moments under a budget keep ``max_update_error``. Raises UsageError for an unknown preset, a preset beside a
        budget, a budget out of range, and a malformed rule.
        """
        if budget is not None and preset is not None:
            raise UsageError(f"preset {preset!r} and budget {described(budget)} exclude each other; give one of them")
        if preset is None:
            preset = "flash" if budget is None else "archive"
        if preset not in PRESETS:
            raise UsageError(f"preset {preset!r}: expected one of {', '.join(PRESETS)}")
        steps = PRESET_BUDGETS.get(preset) if budget is None else Budget.of(budget)
        if steps is not None and max_update_error:
            steps = steps.bounded(max_update_error)
        return cls(preset, tuple(Rule.parse(text) for text in rules), steps)

    @property
    def keeps_compressed(self) -> bool:
        """Whether slices that a framework has compressed stay as they are, so that every file comes back exactly."""
        return self.preset == "lossless"

    def check_rules(self, names: Sequence[str]) -> None:
        """Raise UsageError for a rule that matches no tensor: with a typo, it would protect nothing."""
        for rule in self.rules:
            if not rule.matches(names):
                raise UsageError(f"rule {rule.text!r} matches no tensor; inspect --tensors lists them")

    def has_rule(self, names: Sequence[str]) -> bool:
        """Whether a rule matches any of these tensors."""
        return any(rule.matches(names) for rule in self.rules)

    def choose(
        self, spec: TensorSpec, names: Sequence[str], shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Codec, str | None]:
        """The codec of a storage, and the reason where it is lossless although its role or a rule says otherwise.

        ``spec`` is that of the storage, flat; ``names`` and ``shapes`` are those of its tensors.
        """
        for rule in self.rules:
            if rule.matches(names):
                codec = rule.codec_for(spec.role)
                if codec is not None and codec.accepts(spec):
                    return codec, None
                return LOSSLESS, f"rule {rule.text!r} does not fit {spec.dtype.label} {spec.role.value}"
        wanted = PRESETS[self.preset].get(spec.role)
        if wanted is None or not wanted.accepts(spec):
            return LOSSLESS, None
        kept = _why_kept(names, shapes)
        return (wanted, None) if kept is None else (LOSSLESS, kept)

    def is_free(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether a budget may choose the codec of a storage: no rule names it, and it is not kept as it is."""
        return _why_kept(names, shapes) is None and not self.has_rule(names)


def _why_kept(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> str | None:
    """Why a storage stays exact under every preset, or None."""
    if any(_COMPONENTS.split(name)[-1] in BUFFERS for name in names):
        return "buffer"
    return "small" if any(is_small(shape) for shape in shapes) else None


_MOST_PADDING = 4096
"""The most elements in a gap between tensors that counts as alignment."""


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
        # What is noted of the codec of a budget goes with it.
        reasons = [reason] if self.reason is None or self.fallback_codec is not None else [self.reason, reason]
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
        """Whether its bytes are stored as they are, and nothing is measured of them."""
        return not self.measured and all(stream.codec == LOSSLESS for stream in self.streams)

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

    ``energies`` are what one step moves, by optimizer, and ``per_square`` is that of ``Share``, by storage.
    """

    energies: Mapping[int, float]
    per_square: Mapping[int, float]


@dataclass(slots=True)
class Plan:
    """The units in the order of the source, and all tensors with the index of their storage.

    ``chosen`` are the storages whose codec the policy chose; that of the others is lossless under every policy.
    ``masters`` are those of rounded copies that are all of one master, whatever codec these copies have.
    ``stepless`` are weights whose state tells no step, with the reason.
    ``copies`` are averages and other copies of weights, under a budget: each with the weight whose step it takes.
    ``shares`` are those of the storages that a budget may choose codecs for, and whose error it measures. ``energies``
    are what one step moves, by optimizer; ``is_measured`` says whether a whole file told it, and not a sample.
    """

    units: list[Unit]
    tensors: list[tuple[NamedTensor, int]] = field(default_factory=list)
    chosen: set[int] = field(default_factory=set)
    masters: Mapping[int, int] = field(default_factory=dict)
    stepless: dict[int, str] = field(default_factory=dict)
    copies: Mapping[int, int] = field(default_factory=dict)
    shares: dict[int, Share] = field(default_factory=dict)
    energies: dict[int, float] = field(default_factory=dict)
    is_measured: bool = False

    @property
    def is_lossy(self) -> bool:
        """Whether decoding gives other values anywhere."""
        return any(stream.lossy for unit in self.units for stream in unit.streams)

    def map_streams(self, change: Callable[[Stream], Stream]) -> None:
        """Put what ``change`` makes of every stream in its place."""
        self.units = [replace(unit, streams=tuple(map(change, unit.streams))) for unit in self.units]

    @property
    def streams(self) -> list[Stream]:
        """All streams, by index."""
        return sorted((stream for unit in self.units for stream in unit.streams), key=lambda stream: stream.index)


def make_plan(
    checkpoint: Checkpoint | WithSkeleton,
    policy: Policy,
    names: Names | None = None,
    role: Role | None = None,
    bundle: Checkpoint | None = None,
    first: int = 0,
    beside: Callable[[], Set[int]] = frozenset,
) -> Plan:
    """Classify the tensors of a checkpoint, choose codecs, group moments into units; add the skeleton if it has one.

    With a ``role`` all tensors get it: the checkpoint is one file of several, whose tree does not tell. With a
    ``bundle`` the checkpoint is one of its members, and the plan is in terms of the bundle, in which the storages of
    the checkpoint have the indices from ``first`` on. ``beside`` is that of ``classify``.
    """
    names, source = names or Names(), bundle or checkpoint
    structure = classify(checkpoint.tree, names, role, beside)
    storages = checkpoint.source_storages if isinstance(checkpoint, WithSkeleton) else checkpoint.storages
    index_of = {storage.key: index for index, storage in enumerate(storages, first)}
    tensors = [(tensor, index_of[tensor.ref.key]) for tensor in structure.tensors]
    views = views_of(tensors)
    chosen: set[int] = set()
    streams = {}
    for key, index in index_of.items():
        streams[key], is_free = _stream(index, key, views[index], structure, names, source)
        if is_free:
            chosen.add(index)
            streams[key] = choose(streams[key], views[index], policy)
    units = join(
        [Unit((stream,)) for stream in streams.values()], find_parameters(source, structure.parameters, streams, views)
    )
    if isinstance(checkpoint, WithSkeleton):
        index = first + len(storages)
        name = unique_name(names.prefix + SKELETON, names.storages)
        spec = TensorSpec(name, Role.OTHER, DType.UINT8, (checkpoint.skeleton.nbytes,))
        units.append(Unit((Stream(index, spec, source.storages[index], LOSSLESS, checkpoint.reason),)))
    return Plan(units, tensors, chosen)


def views_of(tensors: Iterable[tuple[NamedTensor, int]]) -> Mapping[int, list[NamedTensor]]:
    """The tensors of every storage, by its index."""
    views: dict[int, list[NamedTensor]] = defaultdict(list)
    for tensor, index in tensors:
        views[index].append(tensor)
    return views


def _stream(
    index: int,
    key: str,
    views: list[NamedTensor],
    structure: Structure,
    names: Names,
    source: Checkpoint,
) -> tuple[Stream, bool]:
    """The stream of storage ``index`` of ``source``, lossless, and whether a policy may choose another codec.

    ``structure`` knows the storage as ``key``.
    """
    storage = source.storages[index]
    name = unique_name(views[0].name if views else f"{names.prefix}storage:{key}", names.storages)
    dtypes = {view.ref.dtype for view in views} or {storage.dtype}
    dtype = dtypes.pop() if len(dtypes) == 1 else DType.UINT8
    plain_bytes = not dtypes and not dtype.is_plane_float
    if not dtype.is_plane_float or storage.nbytes % dtype.itemsize:
        dtype = DType.UINT8  # kept as bytes; torch here may not even know the type
    roles = {view.role for view in views}
    role = roles.pop() if len(roles) == 1 else Role.OTHER
    spec = TensorSpec(name, role, dtype, (storage.nbytes // dtype.itemsize,))
    if plain_bytes:
        return Stream(index, spec, storage, LOSSLESS), False
    if key in structure.opaque:
        return Stream(index, spec, storage, LOSSLESS, "used by something other than a tensor"), False
    if roles:
        return Stream(index, spec, storage, LOSSLESS, "shared by tensors of several roles"), False
    refs = [view.ref for view in views]
    gaps = [] if len(refs) == 1 and refs[0].nbytes == storage.nbytes and is_dense(refs[0]) else _gaps(spec.numel, refs)
    if not all(_is_padding(source, storage, dtype, gap) for gap in gaps):
        return Stream(index, spec, storage, LOSSLESS, "not fully covered by its tensors"), False
    return Stream(index, spec, storage, LOSSLESS), True


def choose(stream: Stream, views: Sequence[NamedTensor], policy: Policy) -> Stream:
    """The stream with the codec that ``policy`` chooses; ``views`` are its tensors."""
    paths, shapes = [path for view in views for path in view.paths], [view.ref.shape for view in views]
    codec, reason = policy.choose(stream.spec, paths, shapes)
    same = (codec, reason) == (stream.codec, stream.reason)
    return stream if same else Stream(stream.index, stream.spec, stream.storage, codec, reason)


def _gaps(numel: int, refs: list[TensorRef]) -> list[range]:
    """The elements of a storage of ``numel`` elements that no dense tensor covers."""
    gaps = []
    reached = 0
    for ref in sorted(refs, key=lambda ref: ref.offset):
        if is_dense(ref):
            gaps.append(range(reached, ref.offset))
            reached = max(reached, ref.offset + ref.numel)
    gaps.append(range(reached, numel))
    return [gap for gap in gaps if gap]


def _is_padding(source: Checkpoint, storage: StorageInfo, dtype: DType, gap: range) -> bool:
    """Whether a gap holds few elements, all zero. Every codec keeps zeros exactly."""
    if len(gap) > _MOST_PADDING:
        return False
    return not read_elements(source, storage, dtype, gap.start, len(gap)).view(torch.uint8).any()


def read_elements(source: Checkpoint, storage: StorageInfo, dtype: DType, start: int, count: int) -> torch.Tensor:
    """``count`` elements of a storage from number ``start`` on, flat. Raises InputError."""
    buffer = bytearray(count * dtype.itemsize)
    source.read_into(storage.offset + start * dtype.itemsize, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype.torch)


def read_tensor(source: Checkpoint, storage: StorageInfo, ref: TensorRef) -> torch.Tensor:
    """A tensor of a storage in fp32, contiguous. Raises InputError."""
    values = read_elements(source, storage, ref.dtype, ref.offset, ref.numel)
    return values.as_strided(ref.shape, ref.stride).float().contiguous()


def join(units: list[Unit], parameters: list[Parameter]) -> list[Unit]:
    """Put the moments of each parameter into one unit; return the units in the order of the source."""
    streams = {stream.index: stream for unit in units for stream in unit.streams}
    taken: set[int] = set()
    joined = []
    for parameter in parameters:
        members = parameter.streams
        if not members & taken:
            taken |= members
            joined.append(Unit(tuple(streams[index] for index in sorted(members)), parameter))
    joined += [unit for unit in units if unit.streams[0].index not in taken]
    return sorted(joined, key=lambda unit: unit.streams[0].storage.offset)


def plan_joint(source: Checkpoint, plan: Plan, states: list[ParameterState]) -> None:
    """Join the units of ``plan`` that hold moments of one parameter; ``states`` refer to storages of ``source``."""
    streams = {stream.storage.key: stream for stream in plan.streams}
    plan.units = join(plan.units, find_parameters(source, states, streams, views_of(plan.tensors)))
