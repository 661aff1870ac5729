"""The one way to ``torch.load``: the inert reader reads a file first, and judges all that torch would do with it.

It checks sizes, counts and names, and each call by its arguments (``readers.torch_rules``). Only a file without a fault
goes to ``torch.load(..., weights_only=True)``, and any error of torch becomes one line.

torch refuses numpy's arrays and scalars, such as the state of ``np.random``. A file with them and nothing else that
torch refuses is made here (``TreeBuilder``), and torch does not see it.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

from ckpt8.checkpoint.readers import torch_legacy, torch_zip
from ckpt8.checkpoint.readers.torch_rules import TorchCalls
from ckpt8.checkpoint.readers.torch_zip import LOCAL_SIGNATURE
from ckpt8.checkpoint.sources.objects import TreeBuilder, numpy_dtype_classes
from ckpt8.checkpoint.tree import OpenCheckpoint
from ckpt8.container.member_file import MemberFile
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import Ckpt8Error, InputError, UnsupportedError, require
from ckpt8.core.files.source_file import ByteRange, SourceFile, open_range, reading
from ckpt8.core.lazy import torch
from ckpt8.core.text import listed


class _TorchReader(Protocol):
    """A reader whose ``calls`` judge a file for torch."""

    def read(self, file: SourceFile, calls: TorchCalls | None = None) -> OpenCheckpoint:
        """The structure of the file. Raises InputError."""


_SHOWN = 50
"""Names to allow that a message shows: all, unless a file is made to have many."""

TORCH_FORMATS: Mapping[str, _TorchReader] = {"torch-zip": torch_zip, "torch-legacy": torch_legacy}
"""The formats that ``torch.load`` loads, with their inert readers."""


def load_allowed(file: IO[bytes], where: str, map_location: Any = None) -> Any:
    """``torch.load(..., weights_only=True)`` of a seekable file, numpy's arrays and scalars included.

    ``where`` names the file in messages. Raises UnsupportedError that lists the classes which are not allowed,
    InputError for any other fault.
    """
    source = _Stream(file, where)
    return _load(file, where, map_location, *_judge(source, _reader(source)))


def load_member(file: MemberFile, source: SourceFile, kind: str, map_location: Any) -> tuple[Any, Any]:
    """``load_allowed`` of a member with the format ``kind``, and its inert tree. Raises InputError."""
    checkpoint, calls = _judge(source, TORCH_FORMATS[kind])
    return _load(cast("IO[bytes]", file), file.name, map_location, checkpoint, calls), checkpoint.tree


def is_loadable(path: Path) -> bool:
    """Whether ``torch.load`` may open a file and can. It maps the tensors if the format permits that."""
    with suppress(InputError), closing(open_range(ByteRange.of(path))) as source:
        checkpoint, calls = _judge(source, _reader(source))
        if calls.arrays:
            return False
        is_mapped = checkpoint.format == "torch-zip"
        _translated(lambda: torch.load(path, weights_only=True, mmap=is_mapped), str(path))
        return True
    return False


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a file will not be loaded: a ``reason``, and the ``names`` that torch does not allow."""

    reason: str
    names: frozenset[str] = frozenset()


def refusal_of(source: SourceFile) -> Refusal | None:
    """Why ``load_allowed`` and ``load_member`` would refuse a file of torch.save, judged before torch sees it."""
    calls = _calls(source)
    try:
        _judge(source, _reader(source), calls)
    except InputError as exc:
        reason = str(exc).removeprefix(f"{source.source}: ").partition(", which torch")[0]
        return Refusal(reason, frozenset((*calls.foreign, *calls.arrays)))
    return None


def refusal_of_bytes(content: bytes) -> Refusal | None:
    """Why a file in memory would be refused; None where it would not."""
    return refusal_of(_Stream(io.BytesIO(content), "bytes"))


class _Stream(SourceFile):
    """A seekable file of a caller, who opens and closes it."""

    def __init__(self, file: IO[bytes], where: str) -> None:
        self._file = file
        self.source = ByteRange(Path(where), 0, file.seek(0, os.SEEK_END))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``. Raises InputError."""
        with reading(self.source):
            self._file.seek(offset)
            while buffer:
                content = self._file.read(len(buffer))
                if not content:
                    raise InputError(f"{self.source}: ends at byte {self.source.length}, needed more")
                buffer[: len(content)] = content
                buffer = buffer[len(content) :]

    def check_unchanged(self) -> None:
        """Nothing to check: the caller has the file."""


def _reader(source: SourceFile) -> _TorchReader:
    if source.read(0, min(len(LOCAL_SIGNATURE), source.source.length)) == LOCAL_SIGNATURE:
        return torch_zip
    require(torch_legacy.sniff(source), f"{source.source}: cannot be loaded: it is no file that torch.save writes")
    return torch_legacy


def _calls(source: SourceFile) -> TorchCalls:
    trusted = torch._weights_only_unpickler._get_user_allowed_globals()  # type: ignore[no-untyped-call]
    return TorchCalls(source.source.length, torch._weights_only_unpickler._get_allowed_globals(), trusted)


def _judge(
    source: SourceFile, reader: _TorchReader, calls: TorchCalls | None = None
) -> tuple[OpenCheckpoint, TorchCalls]:
    """The structure of a file and what was judged. Raises InputError or UnsupportedError for one not to be loaded."""
    calls = calls or _calls(source)
    with without_collection():
        checkpoint = reader.read(source, calls)
    refused = {*calls.foreign}
    if calls.arrays:
        if not refused and (unmade := TreeBuilder.unmade(checkpoint.tree)) is not None:
            refused.add(unmade)
        if refused:
            refused |= {*calls.arrays, *numpy_dtype_classes(checkpoint.tree)}
    require(
        not refused,
        f"{source.source}: holds {listed(sorted(refused), _SHOWN)}, which torch does not allow and nothing "
        "here unpickles; if you trust the file, call torch.serialization.add_safe_globals with these classes first",
        UnsupportedError,
    )
    return checkpoint, calls


def _load(file: IO[bytes], where: str, map_location: Any, checkpoint: OpenCheckpoint, calls: TorchCalls) -> Any:
    if calls.arrays:
        return _translated(lambda: TreeBuilder(checkpoint, map_location).tree(), where, file)
    file.seek(0)
    loaded = _translated(lambda: torch.load(file, map_location=map_location, weights_only=True), where, file)
    # torch does not always pass on the error of a read.
    if isinstance(file, MemberFile) and file.error is not None:
        raise file.error
    return loaded


def _translated(load: Callable[[], Any], where: str, file: object = None) -> Any:
    """The result of ``load``. Raises InputError, of one line, for any error of torch."""
    try:
        return load()
    except Ckpt8Error:
        raise
    except Exception as exc:
        if isinstance(file, MemberFile) and file.error is not None:
            raise file.error from exc
        reason = (str(exc).splitlines() or [""])[0]
        raise InputError(f"{where}: cannot be loaded: torch says {type(exc).__name__}: {reason}") from exc
