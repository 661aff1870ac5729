"""The contract of a writer, and what writers share: the request, the report, and the weights that are written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.checkpoint.vocabulary import BUFFERS
from ckpt8.converting.choice import tensors_of
from ckpt8.converting.regions import Caster
from ckpt8.converting.sources import Content, open_content
from ckpt8.converting.ties import HEADS, module_of
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Progress

FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
_WEIGHT_TYPES = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}
_QUANTIZED_TYPES = {"float8_e4m3fn": DType.FLOAT8_E4M3FN, "int8": DType.INT8}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}
QUANTIZED = frozenset(_QUANTIZED_TYPES.values())
"""Element types that need scales, which one writer alone can write."""


@dataclass(slots=True)
class Report:
    """What was written. ``casts`` counts tensors by ``FROM -> TO``, ``aliases`` are names left out of tied weights.

    ``quantized`` has what quantising did to the weights, see ``ckpt8.quantizing.report``. ``replaced`` says what had
    the target's name before, or None.
    """

    target: str
    format: str
    layout: str = ""
    tensors: int = 0
    bytes: int = 0
    casts: Counter[str] = field(default_factory=Counter)
    aliases: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    quantized: dict[str, Any] | None = None
    replaced: str | None = None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"casts": dict(self.casts)}


@dataclass(frozen=True, slots=True)
class Quantization:
    """Settings of a target with quantised weights. See ``ckpt8.convert``."""

    scale: str | None = None
    per: str | None = None
    keep: tuple[str, ...] = ()
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class Request:
    """What is to be converted into what. See ``ckpt8.convert``."""

    source: Path
    target: Path
    dtype: DType | None
    key: str | None
    member: str | None
    force: bool
    threads: int | None
    progress: Progress
    quantization: Quantization = Quantization()

    def progress_to(self, target_bytes: int) -> Progress:
        """To be called with numbers of bytes that add up to ``target_bytes``, whatever size the source has."""
        return _Scaled(self.progress, size_of(self.source), target_bytes)

    @contextmanager
    def open(self, report: Report) -> Iterator[Content]:
        """The source as one tree. Raises InputError, UsageError."""
        with open_content(self.source, member=self.member, threads=self.threads) as content:
            report.layout = content.layout
            report.notes += content.notes
            yield content


class Writer(Protocol):
    """Writes one format. ``directory``: its output is a directory."""

    id: ClassVar[str]
    directory: ClassVar[bool]

    def write(self, request: Request) -> Report:
        """Write the target, whole or not at all. Raises Ckpt8Error."""


def parse_dtype(text: str | None) -> DType | None:
    """The element type of weights by name. Raises UsageError."""
    if text is None:
        return None
    name = text.removeprefix("torch.")
    known = {**_WEIGHT_TYPES, **_QUANTIZED_TYPES}
    found = known.get(_SHORT.get(name, name))
    if found is None:
        raise UsageError(f"--dtype {text}: expected one of {', '.join(known)}")
    return found


class _Scaled:
    def __init__(self, progress: Progress, source_bytes: int, target_bytes: int) -> None:
        self._progress = progress
        self._scale = source_bytes / max(target_bytes, 1)
        self._done = 0.0

    def __call__(self, count: int) -> None:
        """``count`` more bytes were written."""
        before, self._done = int(self._done), self._done + count * self._scale
        self._progress(int(self._done) - before)


class WeightTypes:
    """The element type of every weight in the target. ``dtype`` None leaves all as they are.

    ``only`` are the types that change, by default all floats of 16 to 64 bits. Buffers stay as well.
    """

    def __init__(self, data: Composite, dtype: DType | None, report: Report, only: frozenset[DType] = FLOATS) -> None:
        self._caster = Caster(data)
        self._dtype = dtype
        self._report = report
        self._only = only

    def __call__(self, name: str, ref: TensorRef) -> TensorRef:
        """The tensor as it is to be written."""
        stays = self._dtype in (None, ref.dtype) or ref.dtype not in self._only
        if self._dtype is None or stays or name.rpartition(".")[2] in BUFFERS:
            return ref
        self._report.casts[f"{ref.dtype.label} -> {self._dtype.label}"] += 1
        return self._caster.cast(name, ref, self._dtype)


def model_weights(data: Composite, model: Candidate, types: WeightTypes, report: Report) -> dict[str, TensorRef]:
    """The weights of a model as transformers loads them: names without wrappers, each tied weight once.

    Raises UsageError for a state dict without tensors.
    """
    tensors, others = tensors_of(model)
    report.dropped += [f"{name}: not a tensor" for name in others]
    if not tensors:
        raise UsageError(f"{data.label}: {model.path} holds no tensors")
    plain = plain_names(tensors)
    if any(name != short for name, short in plain.items()):
        example = next(f"{name} -> {short}" for name, short in plain.items() if name != short)
        report.notes.append(f"names without wrappers, as in {example}")
    named = {plain[name]: ref for name, ref in tensors.items()}
    names: dict[tuple[object, ...], list[str]] = {}
    for name, ref in named.items():
        # An empty tensor has no place that it could share.
        identity = (ref.key, ref.offset, ref.shape, ref.stride, ref.dtype) if prod(ref.shape) else (name,)
        names.setdefault(identity, []).append(name)
    kept = {_kept(tied) for tied in names.values()}
    report.aliases += [name for name in named if name not in kept]
    found = {name: types(name, ref) for name, ref in named.items() if name in kept}
    for name, ref in found.items():
        data.check_extent(name, ref)
    return found


def _kept(names: list[str]) -> str:
    """The name that stays of a tied weight: the first one that is not of an output layer."""
    return next((name for name in names if module_of(name) not in HEADS), names[0])
