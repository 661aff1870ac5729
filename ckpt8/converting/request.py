"""What a conversion is asked for, the contract of a writer, and the report of what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.converting.sources import Content, open_content
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Progress

_WEIGHT_TYPES = {"float32": DType.FLOAT32, "bfloat16": DType.BFLOAT16, "float16": DType.FLOAT16}

_QUANTIZED_TYPES = {"float8_e4m3fn": DType.FLOAT8_E4M3FN, "int8": DType.INT8}

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}

QUANTIZED = frozenset(_QUANTIZED_TYPES.values())
"""Element types that need scales, which one writer alone can write."""


@dataclass(slots=True)
class Report:
    """What was written. ``casts`` counts tensors by ``FROM -> TO``, ``aliases`` are names left out of tied weights.

    ``quantized`` has what quantising did to the weights, see ``quantizing.report``. ``replaced`` says what had the
    target's name before, or None.
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
