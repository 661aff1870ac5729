"""Distributions for the report: histograms of values before and after compression, usage of codes, errors and sizes.

Of a raw checkpoint, before are its values, after those that preset ``flash`` would give back. Both, and the errors
between them, come from one sample of every tensor.

Of a ``.ckpt8``, after are its decoded values, before those of the original, if given. Errors come from the manifest:
they cover every element, also where the histograms cover a sample.

Counts add up in any order, so that every machine finds the same ones. A histogram has one bin for every factor of two
of the magnitude, which is exact and needs no range in advance.

``Gathered`` adds up a checkpoint: distributions, also of the worst tensors; sizes and errors by layer.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule, read_rule
from ckpt8.checkpoint.meaning.parameter_names import count_whole, in_model_order, layer_of, plain_path
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import StorageInfo
from ckpt8.codecs import Codec, config_of
from ckpt8.codecs.companded8.reference import root_of_tile
from ckpt8.codecs.error_stats import ErrorStats, LatticeError, UpdateError, WeightError, read_error
from ckpt8.compressing.lockstep import Lockstep
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.plan import Parameter, Stream, Unit, join, read_elements
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import LOSSLESS, Policy
from ckpt8.container.facts import codec_kind, error_facts, figure_of, unknown_updates
from ckpt8.container.frames import FRAME
from ckpt8.container.joined import JoinedReader, Stored
from ckpt8.container.manifest import Manifest, ParameterRecord
from ckpt8.container.steps import NO_PARAMETER, NOT_MEASURED
from ckpt8.core.arrays import as_array, as_tensor, as_tensors
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.tensors import DType, Parts, Role, TensorSpec
from ckpt8.core.workers import Workers
from ckpt8.inspecting.facts import shown_names, skeleton_roles
from ckpt8.inspecting.tensors import EVERY_ELEMENT, ROLES, ChunkSampling, describe
from ckpt8.inspecting.verify import Originals
from ckpt8.optim.known_optimizers import MOMENT_SLOTS

LOWEST = -149
"""The exponent of the first bin: the smallest subnormal of fp32. Smaller fp64 values count here, too."""

HIGHEST = 127
"""The exponent of the last bin. Larger fp64 values count here, too."""

MOST_CODES = 512
"""The codes that a chart of symbols shows."""

CHARTED = ("weight", "moment1", "moment2", "update")
"""What has histograms, in the order in which the report shows them."""

_NOT_DRAWN = ("came", "replayed")
"""Kinds of updates that do not follow from the moments of the same elements alone."""

_SIDES = ("before", "after")


@dataclass(slots=True)
class Histogram(ErrorStats):
    """Magnitudes by octave: ``counts[e]`` values lie in [2^e, 2^(e+1)); ``negative`` of all values are below zero."""

    zero: int = 0
    not_finite: int = 0
    negative: int = 0
    counts: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, x: torch.Tensor) -> Histogram:
        """Count a flat tensor of floats."""
        wide = x if x.dtype is torch.float64 else x.float()
        finite = wide[wide.isfinite()]
        values = finite[finite != 0]
        counts = _count(torch.frexp(values).exponent.sub_(1).clamp_(LOWEST, HIGHEST), LOWEST)
        return cls(len(finite) - len(values), len(wide) - len(finite), int((values < 0).sum()), counts)

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``counts`` begins with the octave ``first`` and ends with the last one in use."""
        octaves = range(min(self.counts), max(self.counts) + 1) if self.counts else range(0)
        return {
            "total": self.counts.total() + self.zero + self.not_finite,
            "zero": self.zero,
            "negative": self.negative,
            "not_finite": self.not_finite,
            "first": octaves.start if octaves else None,
            "counts": [self.counts[octave] for octave in octaves],
        }


@dataclass(slots=True)
class Codes:
    """How often each code is used. ``levels`` is the range that the codec has, None for one without limits.

    ``reserved`` counts exact zeros that have a code of their own, which has no number.
    """

    levels: range | None
    counts: Counter[int] = field(default_factory=Counter)
    reserved: int = 0

    @classmethod
    def of(cls, codes: torch.Tensor, levels: range) -> Codes:
        """Count a flat tensor of codes, all of them in ``levels``."""
        return cls(levels, _count(codes.to(torch.int32).clamp(levels.start, levels.stop - 1), levels.start))

    @classmethod
    def of_symbols(cls, symbols: torch.Tensor) -> Codes:
        """Count a flat tensor of symbols: zigzag codes of no fixed range, and -1 for a reserved value."""
        given = symbols[symbols >= 0]
        values, counts = torch.unique(given, return_counts=True)
        pairs = zip(values.tolist(), counts.tolist(), strict=True)
        return cls(None, Counter({(k >> 1) ^ -(k & 1): n for k, n in pairs}), symbols.numel() - given.numel())

    def merge(self, other: Codes) -> None:
        """Add codes of the same codec."""
        self.counts.update(other.counts)
        self.reserved += other.reserved

    @property
    def entropy(self) -> float:
        """Bits of information in a code, if codes are independent of each other."""
        counts = [*self.counts.values(), self.reserved]
        total = sum(counts)
        return max(0.0, -math.fsum(n / total * math.log2(n / total) for n in counts if n)) if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values: ``counts`` of the codes from ``first`` on.

        Without a range they are those in use, at most MOST_CODES about zero, and ``outside`` counts all others.
        """
        total, levels = self.counts.total(), self.levels
        if levels is None:
            used = [code for code in self.counts if -MOST_CODES // 2 <= code < MOST_CODES // 2]
            levels = range(min(used, default=0), max(used, default=0) + 1)
        counts = [self.counts[code] for code in levels]
        return {
            "total": total + self.reserved,
            "levels": None if self.levels is None else len(levels),
            "used": len(self.counts),
            "entropy_bits": self.entropy,
            "first": levels.start,
            "counts": counts,
            "outside": total - sum(counts),
            "reserved": self.reserved,
        }


def _count(numbers: torch.Tensor, first: int) -> Counter[int]:
    """How often each number occurs; none is less than ``first``."""
    return Counter({first + k: count for k, count in enumerate(torch.bincount(numbers - first).tolist()) if count})


@dataclass(slots=True)
class Drawn:
    """Counts of ``elements`` elements: histograms by name in CHARTED and side, codes by role, codec and part."""

    elements: int = 0
    histograms: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    codes: dict[tuple[str, str, str], Codes] = field(default_factory=dict)

    def merge(self, other: Drawn) -> None:
        """Add the counts of ``other``, which stays as it is."""
        self.elements += other.elements
        for what, histogram in other.histograms.items():
            self.histograms.setdefault(what, Histogram()).merge(histogram)
        for key, codes in other.codes.items():
            self.codes.setdefault(key, Codes(codes.levels)).merge(codes)

    def add(self, what: str, before: torch.Tensor | None, after: torch.Tensor) -> None:
        """Count values of ``what``, a name in CHARTED: the original ones, if known, and the decoded ones."""
        sides = zip(_SIDES, (before, after), strict=True)
        self.merge(Drawn(0, {(what, side): Histogram.of(values) for side, values in sides if values is not None}))

    def pairs_json(self) -> dict[str, Any]:
        """By name {before, after} as plain values, in the order of CHARTED; ``before`` is None if unknown."""
        by_side = {key: histogram.to_json() for key, histogram in self.histograms.items()}
        return {
            what: {side: by_side.get((what, side)) for side in _SIDES} for what in CHARTED if (what, "after") in by_side
        }


@dataclass(frozen=True, slots=True)
class DecodedPiece:
    """Elements of one storage: the original ones, if known, the decoded ones, and the parts that hold them."""

    index: int
    role: Role
    codec: Codec
    before: torch.Tensor | None
    after: torch.Tensor
    parts: Parts


def is_counted(spec: TensorSpec, codec: Codec) -> bool:
    """Whether the report counts a storage: floating weights and moments, without rounded copies."""
    return spec.role in ROLES and spec.dtype.is_plane_float and spec.numel > 0 and codec.copied is None


def draw(pieces: Sequence[DecodedPiece], parameter: Parameter | None) -> Drawn:
    """Count one unit: a weight, or the moments of ``parameter`` together with the update that they make."""
    drawn = Drawn(sum(piece.after.numel() for piece in pieces))
    for piece in pieces:
        drawn.add(piece.role.value, piece.before, piece.after)
        codes = {name: Codes.of_symbols(part) for name, part in piece.parts.items() if part.dtype == DType.INT32.torch}
        if levels := piece.codec.codes:
            codes[levels.part] = Codes.of(piece.parts[levels.part], range(levels.lowest, levels.highest + 1))
        kind = codec_kind(config_of(piece.codec))
        drawn.merge(Drawn(codes={(piece.role.value, kind, part): counted for part, counted in codes.items()}))
    # The update of an element follows from its own moments alone, but for CAME's factored statistics.
    if parameter is not None and parameter.rule is not None and parameter.rule.kind not in _NOT_DRAWN:
        originals = {piece.index: piece.before for piece in pieces if piece.before is not None}
        before = _update(parameter, parameter.rule, originals) if len(originals) == len(pieces) else None
        drawn.add("update", before, _update(parameter, parameter.rule, {piece.index: piece.after for piece in pieces}))
    return drawn


def _update(parameter: Parameter, rule: UpdateRule, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
    moment = values[parameter.moments["moment1"]].float()
    slot = parameter.denominator
    divisor = None if slot is None else root_of_tile(values[parameter.moments[slot]].float())
    return rule.apply(moment, divisor, None) * rule.factor


WORST = 5
"""How many of the worst tensors have histograms of their own; as many as ``inspect`` lists."""

OUTSIDE_LAYERS = "everything else"
"""Steps, random states and the structure of files: these bytes belong to no layer."""

_REFUSED = 20

Work = tuple[Unit, int, list[slice]]
"""A unit, the number of one of its chunks, and the windows of that chunk to look at."""


@dataclass(slots=True)
class Seen:
    """Counts and errors of some elements of a unit; ``refused`` is the reason why a codec does not take them."""

    errors: UnitErrors
    drawn: Drawn = field(default_factory=Drawn)
    refused: str | None = None

    def merge(self, later: Seen) -> None:
        """Add the elements that follow."""
        self.errors.merge(later.errors)
        self.drawn.merge(later.drawn)
        self.refused = self.refused or later.refused


def look_at(
    units: Sequence[Unit], sampling: ChunkSampling, look: Callable[[Work], Seen], workers: Workers
) -> Iterator[tuple[Unit, Seen]]:
    """Every unit with what ``look`` finds in its sample."""
    places = [(unit, sampling(unit.numel)) for unit in units]
    results = workers.map(look, ((unit, *place) for unit, chosen in places for place in chosen))
    for unit, chosen in places:
        seen = next(results)
        for _ in chosen[1:]:
            seen.merge(next(results))
        yield unit, seen


@dataclass(slots=True)
class _Layer:
    weights: int = 0
    bytes: Counter[str] = field(default_factory=Counter)
    stored_bytes: Counter[str] = field(default_factory=Counter)
    parameters: list[str] = field(default_factory=list)
    update: UpdateError = field(default_factory=UpdateError)
    figures: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Gathered:
    """Sums over all units, which ``add`` adds. ``counted`` are the storages whose values are counted.

    ``before`` and ``after`` name the two sides of a histogram in words; ``stored`` says whether the manifest
    knows sizes in a container.
    """

    manifest: Manifest
    counted: Collection[int]
    sampling: ChunkSampling
    stored: bool
    before: str | None
    after: str
    errors_from: str
    total: int = 0
    drawn: Drawn = field(default_factory=Drawn)
    worst: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: {"update": [], "weight": [], "lattice": []})
    refused: dict[str, str] = field(default_factory=dict)
    totals: dict[str, ErrorStats] = field(default_factory=dict)
    measured: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    unknown: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _shown: dict[str, dict[str, Any]] = field(init=False)
    _layers: dict[str, _Layer] = field(default_factory=lambda: defaultdict(_Layer))

    def __post_init__(self) -> None:
        manifest, owners = self.manifest, dict[int, str]()
        shown = list(zip(manifest.parameters, shown_names(manifest), strict=True))
        self._shown = {parameter.name: {**row, "figure": figure_of(parameter)} for parameter, row in shown}
        for parameter, row in shown:
            owners.update(dict.fromkeys(parameter.moments.values(), row["name"]))
        skeletons = skeleton_roles(manifest)
        for index, record in enumerate(manifest.storages):
            has_layer = index not in skeletons and record.role is not Role.OTHER
            name = owners.get(index, record.name if has_layer else None)
            layer = self._layers[OUTSIDE_LAYERS if name is None else layer_of(plain_path(name))]
            role = skeletons.get(index, record.role.value)
            layer.weights += record.numel if index in self.counted and record.role is Role.WEIGHT else 0
            layer.bytes[role] += record.nbytes
            layer.stored_bytes[role] += record.stored_bytes

    def figure(self, unit: Unit) -> str:
        """What the error of the update of a unit is, see ``figure_of``."""
        return self._shown[unit.parameter.name]["figure"] if unit.parameter else "update"

    def add(self, unit: Unit, seen: Seen) -> None:
        """Add the sample of a unit; ``seen.errors`` decide whether it is among the worst."""
        self.drawn.merge(seen.drawn)
        stream, update = unit.streams[0], seen.errors.update
        error = seen.errors.streams.get(stream.index)
        if unit.parameter is None and isinstance(error, (WeightError, LatticeError)):
            kind = ("weight", "mean_relative") if isinstance(error, WeightError) else ("lattice", "nmse")
            self._keep_worst(*kind, {"name": stream.spec.name}, error, seen.drawn)
        if unit.parameter is not None and update is not None:
            shown = self._shown[unit.parameter.name]
            layer = self._layers[layer_of(plain_path(shown["name"]))]
            layer.parameters.append(unit.parameter.name)
            layer.update.merge(update)
            layer.figures.add(shown["figure"])
            self._keep_worst("update", "max_error", shown, update, seen.drawn)

    def _keep_worst(self, kind: str, figure: str, name: Mapping[str, Any], error: ErrorStats, drawn: Drawn) -> None:
        """Keep the tensors of the largest figure, largest first; of equal ones the earlier."""
        rows, facts = self.worst[kind], error_facts(error.to_json())
        if facts is not None:
            rows.append({**name, **facts, "elements": drawn.elements, "histograms": drawn.pairs_json()})
            rows.sort(key=lambda row: -math.inf if row[figure] is None else -row[figure])
            del rows[WORST:]

    def to_json(self) -> dict[str, Any]:
        """The ``distributions`` of the report: plain values. ``errors`` has the keys that ``inspect`` gives it."""
        kinds = (*CHARTED, "replayed", "lattice")
        errors = {what: error_facts(self.totals[what].to_json()) if what in self.totals else None for what in kinds}
        for kind in ("update", "replayed"):
            if (facts := errors[kind]) is not None:
                facts["parameters"] = count_whole(self.measured[kind])
        refused = [{"name": name, "reason": reason} for name, reason in self.refused.items()]
        full = self.drawn.elements == self.total
        return {
            "sample": {
                "elements": self.drawn.elements,
                "of": self.total,
                "full": full,
                "rule": EVERY_ELEMENT if full else self.sampling.text,
            },
            "before": self.before,
            "after": self.after,
            "errors_from": self.errors_from,
            "errors": {**errors, **unknown_updates(self.unknown, count_whole)},
            "histograms": self.drawn.pairs_json(),
            "codes": [
                {"role": role, "codec": codec, "part": part, **codes.to_json()}
                for (role, codec, part), codes in sorted(self.drawn.codes.items())
            ],
            "layers": [
                self._layer_json(name)
                for name in sorted(in_model_order(self._layers), key=lambda name: name == OUTSIDE_LAYERS)
            ],
            "worst": self.worst,
            "refused": {"count": len(refused), "first": refused[:_REFUSED]},
        }

    def _layer_json(self, name: str) -> dict[str, Any]:
        layer = self._layers[name]
        update = error_facts(layer.update.to_json()) if layer.parameters else None
        return {
            "layer": name,
            "weights": layer.weights,
            "bytes": dict(sorted(layer.bytes.items())),
            "stored_bytes": dict(sorted(layer.stored_bytes.items())) if self.stored else None,
            "update": None if update is None else {**update, "parameters": count_whole(layer.parameters)},
            "figures": sorted(layer.figures),
        }


PRESET = "flash"


def checkpoint_distributions(path: Path, *, full: bool = False) -> dict[str, Any]:
    """The ``distributions`` of a checkpoint file or directory, see ``Gathered``. Raises InputError.

    ``full`` reads every element, else a sample of every tensor.
    """
    with open_source(path, containers=False) as source, Workers() as workers:
        source.keep_all()
        plan = plan_bundle(source, Policy.of(PRESET))
        counted = {stream.index for stream in plan.streams if is_counted(stream.spec, stream.codec)}
        # Weights apart from the moments, as reports list them.
        apart = join(plan.streams, (replace(parameter, step=None) for parameter in plan.parameters))
        units = [unit for unit in apart if any(stream.index in counted for stream in unit.streams)]
        gathered = Gathered(
            describe(source, plan),
            counted,
            sampling=ChunkSampling.of(sum(len(unit.streams) for unit in units), full=full),
            stored=False,
            before="the checkpoint",
            after=f"as preset {PRESET} would give it back",
            errors_from=f"preset {PRESET} on the sample",
            total=sum(unit.numel * len(unit.streams) for unit in units),
        )
        lockstep = Lockstep(source)
        for unit, seen in look_at(units, gathered.sampling, partial(_look_in_checkpoint, source, lockstep), workers):
            lockstep.meter.finish(unit, seen.errors)
            _add(gathered, unit, seen)
        source.check_unchanged()
        return gathered.to_json()


def _add(gathered: Gathered, unit: Unit, seen: Seen) -> None:
    if seen.refused is not None:
        gathered.refused[unit.parameter.name if unit.parameter else unit.streams[0].spec.name] = seen.refused
        # A refused unit is stored lossless: it comes back as it was, and has no codes.
        drawn = seen.drawn.histograms
        drawn |= {(what, "after"): before for (what, side), before in drawn.items() if side == "before"}
        seen.drawn.codes.clear()
        seen.errors = UnitErrors()
    errors = [(stream.spec.role.value, seen.errors.streams.get(stream.index)) for stream in unit.streams]
    for what, error in (*errors, (gathered.figure(unit), seen.errors.update)):
        if error is not None:
            gathered.totals.setdefault(what, type(error)()).merge(error)
    if seen.errors.update is not None:
        gathered.measured[gathered.figure(unit)] += [unit.parameter.name] if unit.parameter else []
    elif seen.refused is None and any(stream.lossy_moment for stream in unit.streams):
        parameter, name = unit.parameter, unit.streams[0].spec.name.rpartition(".")[0]
        reason = (parameter.reason or NOT_MEASURED) if parameter else NO_PARAMETER
        gathered.unknown[reason].append(parameter.name if parameter else name)
    gathered.add(unit, seen)


def _look_in_checkpoint(source: Bundle, lockstep: Lockstep, work: Work) -> Seen:
    """Read windows of one chunk of a unit, encode, decode, count and measure them. Thread-safe."""
    unit, chunk, windows = work
    seen = Seen(UnitErrors.for_unit(unit))
    for window in windows:
        start, count = chunk * FRAME + window.start, window.stop - window.start
        originals = [read_elements(source, s.storage, s.spec.dtype, start, count) for s in unit.streams]
        codecs: list[Codec] = [stream.codec for stream in unit.streams]
        try:
            parts = lockstep.encode(unit, start, originals)[0]
            decoded = lockstep.decode(unit, start, originals, parts)
        except RefusedError as exc:
            seen.refused = seen.refused or str(exc)
            codecs, parts, decoded = [LOSSLESS] * len(codecs), [{} for _ in codecs], originals
        else:
            if unit.measured:
                seen.errors.merge(lockstep.measure(unit, start, originals, parts))
        sides = zip(unit.streams, codecs, originals, decoded, parts, strict=True)
        pieces = [
            DecodedPiece(
                stream.index,
                stream.spec.role,
                codec,
                as_tensor(x, stream.spec.dtype),
                as_tensor(after, stream.spec.dtype),
                as_tensors(part),
            )
            for stream, codec, x, after, part in sides
        ]
        seen.drawn.merge(draw(pieces, unit.parameter))
    return seen


def container_distributions(reader: Stored, original: Path | None = None, *, full: bool = False) -> dict[str, Any]:
    """The ``distributions`` of an open container, see ``Gathered``. Raises InputError for damage.

    ``original`` is the checkpoint that it was made from; the caller compared their structures. ``full`` decodes every
    element, else a sample of every tensor.
    """
    manifest = reader.manifest
    counted = {index for index, record in enumerate(manifest.storages) if is_counted(record.spec, reader.codec(index))}
    made = "when it was made" if original is None else "against the original"
    gathered = Gathered(
        manifest,
        counted,
        sampling=ChunkSampling.of(len(counted), full=full),
        stored=True,
        before=None if original is None else "the original",
        after="as decoded from the container",
        errors_from=f"every element, {made}",
        total=sum(manifest.storages[index].numel for index in counted),
    )
    updates = {parameter.name: read_error(parameter.error) for parameter in manifest.parameters}
    with ExitStack() as stack:
        workers = stack.enter_context(Workers())
        source = None if original is None else _open_original(reader, original, workers, stack)
        look = partial(_look_in_container, reader, source)
        for unit, seen in look_at(_units(reader, counted), gathered.sampling, look, workers):
            weight = read_error(manifest.storages[unit.streams[0].index].error)
            update = updates[unit.parameter.name] if unit.parameter else None
            seen.errors = UnitErrors(
                {} if weight is None else {unit.streams[0].index: weight},
                update if isinstance(update, UpdateError) else None,
            )
            gathered.add(unit, seen)
        if source is not None:
            source.check_unchanged()
    return gathered.to_json()


def _open_original(reader: Stored, original: Path, workers: Workers, stack: ExitStack) -> Bundle:
    """The original, with storages of the same numbers."""
    is_joined = isinstance(reader, JoinedReader)
    decode = is_joined or not Policy(reader.manifest.preset).keeps_compressed
    source = stack.enter_context(open_source(original, containers=False, decode=decode))
    return Originals(reader, source, workers).together if isinstance(reader, JoinedReader) else source


def _units(reader: Stored, counted: set[int]) -> list[Unit]:
    storages = reader.manifest.storages
    streams = [
        Stream(index, storage.spec, StorageInfo(storage.name, storage.dtype, 0, storage.nbytes), reader.codec(index))
        for index, storage in enumerate(storages)
        if index in counted
    ]
    parameters = [
        _parameter(record)
        for record in reader.manifest.parameters
        if counted.issuperset(record.moments.values())
        and len({storages[index].numel for index in record.moments.values()}) == 1
    ]
    return join(streams, parameters)


def _parameter(record: ParameterRecord) -> Parameter:
    """The parameter, with its rule if its moments determine an update."""
    stored = read_rule(record.rule)
    known = "moment1" in record.moments and record.moments.keys() <= set(MOMENT_SLOTS.values())
    rule = UpdateRule(**stored) if stored is not None and known else None
    if rule and rule.kind == "adam" and not (rule.step >= 1 and 0 <= rule.beta1 < 1 and 0 <= rule.beta2 < 1):
        rule = None
    return Parameter(record.name, record.moments, rule, record.reason, ())


def _look_in_container(reader: Stored, source: Bundle | None, work: Work) -> Seen:
    """Decode one chunk of a unit, read the same elements of the original, count windows of both. Thread-safe."""
    unit, chunk, windows = work
    pieces = [_piece(reader, source, stream, chunk, windows) for stream in unit.streams]
    return Seen(UnitErrors(), draw(pieces, unit.parameter))


def _piece(reader: Stored, source: Bundle | None, stream: Stream, chunk: int, windows: list[slice]) -> DecodedPiece:
    spec = stream.chunk_spec(chunk)
    decoded = torch.empty(spec.numel, dtype=spec.dtype.torch, device="cpu")
    parts = as_tensors(reader.decode_chunk(stream.index, chunk, as_array(decoded)))
    before = None
    if source is not None:
        before = torch.cat([_original(source, stream, chunk, window) for window in windows])
    by_element = {name: part for name, part in parts.items() if len(part) == spec.numel}
    after, *seen = (torch.cat([part[window] for window in windows]) for part in (decoded, *by_element.values()))
    return DecodedPiece(stream.index, spec.role, stream.codec, before, after, dict(zip(by_element, seen, strict=True)))


def _original(source: Bundle, stream: Stream, chunk: int, window: slice) -> torch.Tensor:
    storage = source.storages[stream.index]
    if storage.nbytes != stream.storage.nbytes:
        raise InputError(f"{source.label}: changed while it was read; nothing was written")
    start, count = chunk * FRAME + window.start, window.stop - window.start
    return as_tensor(read_elements(source, storage, stream.spec.dtype, start, count), stream.spec.dtype)
