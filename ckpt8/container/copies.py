"""Checks what storages of a container say of each other: references to masters, and companions.

A reference costs nothing to store, so limits keep a small file from asking for much work: a copy is as long as its
runs, padding is no more than half of it, its runs touch few chunks of masters for its length, and no master is copied
more than a few times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ckpt8.codecs import Codec
from ckpt8.codecs.base import Factors
from ckpt8.codecs.copied import Copied
from ckpt8.container.layout import FRAME
from ckpt8.container.manifest import Manifest
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType

MOST_COPIES = 4
"""The most copies of a master, counted by its elements."""

_WORK = 4
"""The most elements of masters to decode for every element of a copy, on top of as many chunks."""


class ReferenceCheck:
    """Checks references one after the other and counts the copies of every master.

    ``numel_of`` gives the elements of a storage, None if it is no master of the copy.
    """

    def __init__(self, numel_of: Callable[[int, Copied], int | None]) -> None:
        self._numel_of = numel_of
        self._elements: Counter[int] = Counter()

    def problem(self, copied: Copied) -> str | None:
        """Why a reference is not sound; None for a sound one, whose copies then count."""
        padding = work = 0
        more = Counter[int]()
        for storage, start, count in copied.runs:
            if storage is None:
                padding += count
                continue
            numel = self._numel_of(storage, copied)
            if numel is None or start + count > numel:
                return "refers to something other than elements of fp32 masters"
            work += min(numel, -(-(start + count) // FRAME) * FRAME) - start // FRAME * FRAME
            more[storage] += count
        if 2 * padding > copied.numel:
            return "is mostly padding"
        if work > _WORK * (copied.numel + FRAME):
            return "refers to masters in too many small pieces"
        if any(
            self._elements[each] + count > MOST_COPIES * (self._numel_of(each, copied) or 0)
            for each, count in more.items()
        ):
            return "is one copy too many of its masters"
        self._elements += more
        return None


def check_references(manifest: Manifest, codec_of: Callable[[int], Codec], where: str) -> None:
    """Raise InputError for a reference that is not sound."""
    storages = manifest.storages

    def numel_of(storage: int, copied: Copied) -> int | None:
        if storage >= len(storages) or storages[storage].dtype is not DType.FLOAT32:
            return None
        codec = codec_of(storage)
        return storages[storage].numel if codec.keeps_masters or (codec.may_be_copied and not copied.is_exact) else None

    check = ReferenceCheck(numel_of)
    for index, record in enumerate(storages):
        copied = codec_of(index).copied
        if copied is not None:
            problem = check.problem(copied)
            if copied.numel != record.numel:
                problem = f"refers to {copied.numel} elements for the {record.numel} that it has"
            if problem is not None:
                raise InputError(f"{where}: {record.name}: {problem}")


def check_companions(manifest: Manifest, codec_of: Callable[[int], Codec], where: str) -> None:
    """Raise InputError for a storage whose companion is missing, has another length or needs companions itself."""
    storages = manifest.storages
    for index, record in enumerate(storages):
        for name, other in codec_of(index).companion_storages.items():
            known = type(other) is int and 0 <= other < len(storages)
            if not known or storages[other].numel != record.numel:
                raise InputError(f"{where}: {record.name}: {name} is not a storage of as many elements")
            if codec_of(other).companions or codec_of(other).copied is not None:
                raise InputError(f"{where}: {record.name}: {name} is coded with another storage itself")
        for name, factors in codec_of(index).factored.items():
            if problem := _factors_problem(factors, manifest, codec_of, record.numel):
                raise InputError(f"{where}: {record.name}: {name} {problem}")


def _factors_problem(factors: Factors, manifest: Manifest, codec_of: Callable[[int], Codec], numel: int) -> str | None:
    """Why statistics do not give ``numel`` elements; None if they do."""
    storages = manifest.storages
    if max(factors.rows, factors.columns) >= len(storages):
        return "is not a pair of storages"
    for index, size in ((factors.rows, factors.width), (factors.columns, factors.height)):
        record, codec = storages[index], codec_of(index)
        if record.dtype is not DType.FLOAT32 or codec.is_lossy or codec.companions or codec.copied is not None:
            return "has statistics that are not kept exactly in fp32"
        # A chunk of elements takes no more than a chunk of each.
        if record.numel * size != numel or record.numel > FRAME:
            return "has statistics of another shape"
    return None if numel % (factors.height * factors.width) == 0 else "has statistics of another shape"
