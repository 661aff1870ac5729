"""What storages of a container may say of each other: sound references, and companions of the same length.

A reference costs nothing to store, so limits keep a small file from asking for much work: a copy is as long as its
runs, padding is no more than half of it, the chunks of masters that its runs touch are few for its length, and no
master is copied more than a few times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from ckpt8.codecs import Codec
from ckpt8.codecs.base import Copied
from ckpt8.container.layout import FRAME
from ckpt8.container.manifest import Manifest
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType

MOST_COPIES = 4
"""How often a master may be copied, by its number of elements."""

_WORK = 4
"""Elements of masters that may be decoded for every element of a copy; as many chunks come on top."""


class Codecs(Protocol):
    """What the checks need of an open container."""

    path: Path
    manifest: Manifest

    def codec(self, storage: int) -> Codec:
        """The codec of a storage."""


def reference_problem(copied: Copied, numel_of: Callable[[int], int | None]) -> str | None:
    """Why a reference is not sound, or None. ``numel_of`` gives the elements of a storage, None if it is no master."""
    padding = work = 0
    for storage, start, count in copied.runs:
        if storage is None:
            padding += count
            continue
        numel = numel_of(storage)
        if numel is None or start + count > numel:
            return "refers to something other than elements of fp32 masters"
        work += min(numel, -(-(start + count) // FRAME) * FRAME) - start // FRAME * FRAME
    if 2 * padding > copied.numel:
        return "is mostly padding"
    if work > _WORK * (copied.numel + FRAME):
        return "refers to masters in too many small pieces"
    return None


class CopyCount:
    """How much of every master has been copied."""

    def __init__(self) -> None:
        self._elements: Counter[int] = Counter()

    def add(self, copied: Copied, numel_of: Callable[[int], int | None]) -> bool:
        """Count a sound reference; False, and nothing is counted, where that would be too many copies."""
        more = Counter[int]()
        for storage, _, count in copied.runs:
            if storage is not None:
                more[storage] += count
        if any(self._elements[each] + count > MOST_COPIES * (numel_of(each) or 0) for each, count in more.items()):
            return False
        self._elements += more
        return True


def check_references(reader: Codecs) -> None:
    """Raise InputError where a reference is not sound."""
    storages = reader.manifest.storages

    def numel_of(storage: int) -> int | None:
        if storage >= len(storages) or storages[storage].dtype is not DType.FLOAT32:
            return None
        return storages[storage].numel if reader.codec(storage).keeps_masters else None

    copies = CopyCount()
    for index, record in enumerate(storages):
        copied = reader.codec(index).copied
        if copied is not None:
            problem = reference_problem(copied, numel_of)
            if copied.numel != record.numel:
                problem = f"refers to {copied.numel} elements for the {record.numel} that it has"
            if problem is None and not copies.add(copied, numel_of):
                problem = "is one copy too many of its masters"
            if problem is not None:
                raise InputError(f"{reader.path}: {record.name}: {problem}")


def check_companions(reader: Codecs) -> None:
    """Raise InputError where a storage is coded with another that is not there, or that itself needs others."""
    storages = reader.manifest.storages
    for index, record in enumerate(storages):
        for name, other in reader.codec(index).companion_storages.items():
            known = type(other) is int and 0 <= other < len(storages)
            if not known or storages[other].numel != record.numel:
                raise InputError(f"{reader.path}: {record.name}: {name} is not a storage of as many elements")
            if reader.codec(other).companions or reader.codec(other).copied is not None:
                raise InputError(f"{reader.path}: {record.name}: {name} is coded with another storage itself")
