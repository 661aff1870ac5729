"""The arguments of a conversion, the target that a writer fills, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ckpt8.checkpoint.readers.entries import size_of
from ckpt8.checkpoint.replacing import checkpoint_directory, turn_in_store
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.container.kept_bases import unneeded_file
from ckpt8.converting.choice import Content
from ckpt8.converting.quantizing import LARGEST
from ckpt8.converting.sources import open_content
from ckpt8.core.errors import UsageError
from ckpt8.core.files.atomic import AtomicFile, Guard, write_at
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.summary import Summarised
from ckpt8.core.tensors import DType
from ckpt8.core.text import counted, listed, size
from ckpt8.core.workers import Progress

_TYPES = {dtype.label: dtype for dtype in (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, *LARGEST)}
_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn"}


@dataclass(slots=True, repr=False)
class Report(Summarised):
    """What was written. ``casts`` counts tensors by ``FROM -> TO``, ``aliases`` are names left out of tied weights.

    ``quantized`` is that of ``quantizing.summary``, or None. ``replaced`` says what the target replaced, or None.
    ``weights_snr`` and ``warning`` are those of ``convert.weights_snr``.
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
    weights_snr: float | None = None
    warning: str | None = None

    def _summary(self) -> Iterator[tuple[str, str]]:
        yield "Report", f"{self.target}: {self.format} of {counted(self.tensors, 'tensor')}, {size(self.bytes)}"
        yield "casts", ", ".join(f"{count:,} {cast}" for cast, count in self.casts.items())
        yield "tied", listed(self.aliases)
        yield "left out", listed(self.dropped)
        yield "notes", listed(self.notes, 1)
        yield "warning", self.warning or ""

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__} | {"casts": dict(self.casts)}


class OpenFile(NamedTuple):
    """A new file, at ``path`` until the target takes its name. ``progress`` takes the number of bytes of tensors."""

    path: Path
    descriptor: int
    guard: Guard
    progress: Progress

    def write(self, content: bytes | bytearray | memoryview, position: int) -> None:
        """Write bytes at a position. Raises OutputError."""
        with self.guard():
            write_at(self.descriptor, memoryview(content), position)


@contextmanager
def new_file(output: AtomicDirectory, path: str, progress: Progress = lambda _: None) -> Iterator[OpenFile]:
    """A new file in the directory of the target. Raises OutputError."""
    with output.new_file(path) as descriptor:
        yield OpenFile(output.path / path, descriptor, output.guard, progress)


@dataclass(frozen=True, slots=True)
class Request:
    """What to convert, and into what: the arguments of ``ckpt8.convert``. The last four are for quantised weights."""

    source: Path
    target: Path
    dtype: DType | None
    key: str | None
    member: str | None
    force: bool
    threads: int | None
    progress: Progress
    scale: str | None
    per: str | None
    keep: tuple[str, ...]
    config: Path | None

    @contextmanager
    def open(self, report: Report) -> Iterator[Content]:
        """The source as one tree. Raises InputError, UsageError."""
        with open_content(self.source, member=self.member, threads=self.threads) as content:
            report.layout = content.layout
            report.notes += content.notes
            yield content

    @contextmanager
    def new_file(self, data: Composite, report: Report, tensor_bytes: int) -> Iterator[OpenFile]:
        """The target as a new file. It appears when the block ends without an error and ``data`` has not changed.

        Notes in ``report`` its size and what it replaced. Raises InputError, OutputError.
        """
        with AtomicFile(self.target, force=self.force, check=unneeded_file) as output:
            output.expect(tensor_bytes)
            yield OpenFile(output.path, output.file.fileno(), output.guard, self.progress_to(tensor_bytes))
            data.check_unchanged()
            report.bytes = output.file.seek(0, 2)
            output.publish()
        report.replaced = output.replaced

    @contextmanager
    def new_directory(self, data: Composite, report: Report, written: Iterable[str] = ()) -> Iterator[AtomicDirectory]:
        """The target as a new directory. ``written`` are files of the source that it may hold.

        Notes in ``report`` its size and what it replaced. Raises InputError, OutputError.
        """
        with AtomicDirectory(
            self.target,
            force=self.force,
            keep=self.source,
            check=checkpoint_directory([*written]),
            turn=turn_in_store,
        ) as output:
            yield output
            data.check_unchanged()
            report.bytes = output.nbytes
            output.publish()
        report.replaced = output.replaced

    def progress_to(self, target_bytes: int) -> Progress:
        """A function that turns numbers of bytes that add up to ``target_bytes`` into progress through the source."""
        scale = size_of(self.source) / max(target_bytes, 1)
        done = 0.0

        def advance(count: int) -> None:
            nonlocal done
            before, done = int(done), done + count * scale
            self.progress(int(done) - before)

        return advance


def parse_dtype(text: str | None) -> DType | None:
    """The element type of weights by name, None for None. Raises UsageError for an unknown name."""
    if text is None:
        return None
    name = text.removeprefix("torch.")
    if (dtype := _TYPES.get(_SHORT.get(name, name))) is None:
        raise UsageError(f"--dtype {text}: expected one of {', '.join(_TYPES)}")
    return dtype
