"""The base of a delta: opened when a part of it is first needed, it must fit the delta then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from ckpt8.codecs import Codec
from ckpt8.container.manifest import Manifest, StorageRecord
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError


class Linked(Protocol):
    """An open container."""

    path: Path
    manifest: Manifest

    @property
    def seal(self) -> bytes:
        """What identifies the file."""

    def codec(self, storage: int) -> Codec:
        """The codec of a storage."""

    def close(self) -> None:
        """Close the file."""


R = TypeVar("R", bound=Linked)


class Base(Closing, Generic[R]):
    """The base of the container ``delta``, which ``open_base`` opens. Thread-safe."""

    def __init__(self, delta: R, open_base: Callable[[], R]) -> None:
        self._delta = delta
        self._open = open_base
        self._reader: R | None = None
        self._problem: InputError | None = None
        self._lock = threading.Lock()

    def reader(self) -> R:
        """The open base. Raises InputError where it is missing or damaged, or does not fit."""
        with self._lock:
            if self._problem is not None:
                raise self._problem
            if self._reader is None:
                try:
                    self._reader = self._opened()
                except InputError as exc:
                    # Each chunk of a delta asks again.
                    self._problem = exc
                    raise
            return self._reader

    def _opened(self) -> R:
        found = self._open()
        try:
            _check(self._delta, found)
        except BaseException:
            found.close()
            raise
        return found

    def close(self) -> None:
        """Close the base, if it is open."""
        with self._lock:
            if self._reader is not None:
                self._reader.close()


def check_deltas(manifest: Manifest, codec_of: Callable[[int], Codec], where: str) -> None:
    """Raise InputError for a storage that cannot be a difference."""
    skeletons = {member.skeleton for member in manifest.members}
    for index, record in enumerate(manifest.storages):
        if record.base is not None:
            codec = codec_of(index)
            if manifest.base is None:
                raise InputError(f"{where}: {record.name}: is a difference, but the file names no base")
            if index in skeletons:
                raise InputError(f"{where}: {record.name}: is a difference, but no tensor")
            if codec.companions or codec.copied is not None:
                raise InputError(f"{where}: {record.name}: {codec.id} cannot be kept as a difference")


def _check(delta: Linked, base: Linked) -> None:
    """Raise InputError unless the chain of ``delta`` is that of ``base``, and each difference has its partner there."""
    record, below = delta.manifest.base, base.manifest.base
    key, place, links = (base.seal.hex(), 0, 0) if below is None else (below.key, below.place, below.links)
    if record is None or record.key != key or record.links != links + 1 or record.place <= place:
        raise InputError(f"{delta.path}: its place in its chain does not fit that of its base {base.path}")
    for index, own in enumerate(delta.manifest.storages):
        if own.base is not None and (problem := _problem(delta, index, own, base, own.base)) is not None:
            raise InputError(f"{delta.path}: {own.name}: {problem} in its base {base.path}")


def _problem(delta: Linked, index: int, own: StorageRecord, base: Linked, at: int) -> str | None:
    """Why a storage is no difference to that ``at`` the index in the base; None if it may be."""
    if at >= len(base.manifest.storages):
        return "has no partner"
    partner = base.manifest.storages[at]
    if partner.pack is not None or (partner.dtype, partner.numel) != (own.dtype, own.numel):
        return "has a partner of another type or size"
    return None if delta.codec(index).counts_from(base.codec(at)) else "has a partner with another codec"
