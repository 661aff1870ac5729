"""Copies of masters in a container: which references are sound, and how a chunk of a copy is put together.

A reference costs nothing to store, so limits keep a small file from asking for much work: a copy is as long as its
runs, padding is no more than half of it, the chunks of masters that its runs touch are few for its length, and no
master is copied more than a few times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ckpt8.codecs import Codec
from ckpt8.codecs.rounded_copy import Reference, Run, round_masters
from ckpt8.container.frames import FRAME
from ckpt8.container.manifest import Manifest
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType, Parts

if TYPE_CHECKING:
    import torch


MASTER_CODECS = frozenset({"lossless/1", "split24/1", "split32/1"})
"""What keeps fp32 so that its rounding to bf16 is exact."""

MOST_COPIES = 4
"""How often a master may be copied, by its number of elements."""

_WORK = 4
"""Elements of masters that may be decoded for every element of a copy; as many chunks come on top."""


class Chunks(Protocol):
    """The stored chunks of an open container."""

    path: Path
    manifest: Manifest

    def codec(self, storage: int) -> Codec:
        """The codec of a storage."""

    def read_parts(self, storage: int, chunk: int, only: Collection[str] | None = None) -> Parts:
        """The parts of one chunk, or those named."""

    def decode_chunk(self, storage: int, chunk: int, out: torch.Tensor) -> Parts:
        """Decode one chunk into ``out``."""


def reference_problem(codec: Reference, numel_of: Callable[[int], int | None]) -> str | None:
    """Why a reference is not sound, or None. ``numel_of`` gives the elements of a storage, None if it is no master."""
    padding = work = 0
    for storage, start, count in codec.runs:
        if storage is None:
            padding += count
            continue
        numel = numel_of(storage)
        if numel is None or start + count > numel:
            return "refers to something other than elements of fp32 masters"
        work += min(numel, -(-(start + count) // FRAME) * FRAME) - start // FRAME * FRAME
    if 2 * padding > codec.numel:
        return "is mostly padding"
    if work > _WORK * (codec.numel + FRAME):
        return "refers to masters in too many small pieces"
    return None


class CopyCount:
    """How much of every master has been copied."""

    def __init__(self) -> None:
        self._elements: Counter[int] = Counter()

    def add(self, codec: Reference, numel_of: Callable[[int], int | None]) -> bool:
        """Count a sound reference; False, and nothing is counted, where that would be too many copies."""
        more = Counter[int]()
        for storage, _, count in codec.runs:
            if storage is not None:
                more[storage] += count
        if any(self._elements[each] + count > MOST_COPIES * (numel_of(each) or 0) for each, count in more.items()):
            return False
        self._elements += more
        return True


def check_references(reader: Chunks) -> None:
    """Raise InputError where a reference is not sound."""
    storages = reader.manifest.storages

    def numel_of(storage: int) -> int | None:
        if storage >= len(storages) or storages[storage].dtype is not DType.FLOAT32:
            return None
        return storages[storage].numel if reader.codec(storage).id in MASTER_CODECS else None

    copied = CopyCount()
    for index, record in enumerate(storages):
        codec = reader.codec(index)
        if isinstance(codec, Reference):
            problem = reference_problem(codec, numel_of)
            if codec.numel != record.numel:
                problem = f"refers to {codec.numel} elements for the {record.numel} that it has"
            if problem is None and not copied.add(codec, numel_of):
                problem = "is one copy too many of its masters"
            if problem is not None:
                raise InputError(f"{reader.path}: {record.name}: {problem}")


def read_copy(reader: Chunks, runs: Iterable[Run], numel: int) -> torch.Tensor:
    """The ``numel`` elements of ``runs``, bf16. Raises InputError for damage of a master."""
    import torch

    out = torch.empty(numel, dtype=torch.bfloat16, device="cpu")
    at, last, rounded = 0, (-1, -1), out
    for storage, start, count in runs:
        begin, stop = at, at + count
        if storage is None:
            fill_padding(out[begin:stop], start)
            at = stop
            continue
        while at < stop:
            chunk, into = divmod(start + at - begin, FRAME)
            if (storage, chunk) != last:
                last, rounded = (storage, chunk), _rounded_chunk(reader, storage, chunk)
            length = min(stop - at, FRAME - into)
            out[at : at + length] = rounded[into : into + length]
            at += length
    return out


def fill_padding(out: torch.Tensor, bits: int) -> None:
    """Give every element of a bf16 tensor the 16 ``bits``."""
    import torch

    out.view(torch.int16).fill_(bits - (bits >> 15 << 16))


def _rounded_chunk(reader: Chunks, storage: int, chunk: int) -> torch.Tensor:
    """One chunk of a master rounded to bf16; of split24 only two of three planes are read."""
    import torch

    from ckpt8.codecs.split24.reference import joined_planes

    if reader.codec(storage).id == "split24/1":
        return joined_planes(reader.read_parts(storage, chunk, ("exponent", "mantissa"))).view(torch.bfloat16)
    record = reader.manifest.storages[storage]
    x = torch.empty(min(FRAME, record.numel - chunk * FRAME), dtype=torch.float32, device="cpu")
    reader.decode_chunk(storage, chunk, x)
    return round_masters(x)
