"""Reads storages that share entries. A thread keeps the packs that it used last: their storages are read in turn."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt8.codecs import Codec
from ckpt8.container import layout
from ckpt8.container.manifest import Pack, StorageRecord
from ckpt8.core.backend import Backend
from ckpt8.core.tensors import Parts, PartSpec

if TYPE_CHECKING:
    import torch

_KEPT = 16
"""Packs that a thread keeps: more than a checkpoint has roles and element types."""

ReadPart = Callable[[Pack, str, PartSpec, str], "torch.Tensor"]
"""Reads one part of a pack for the storage of a name. Raises InputError for damage."""


@dataclass(slots=True)
class _Open:
    """A pack in memory: its parts, where each storage begins in them, and its elements if these were asked for."""

    record: Pack
    codec: Codec
    specs: dict[str, tuple[PartSpec, list[int]]]
    parts: Parts
    elements: torch.Tensor | None = None


class PackReader:
    """Gives the parts and the elements of storages in packs. Thread-safe."""

    def __init__(self, codec_of: Callable[[Pack], Codec], read: ReadPart) -> None:
        self._codec_of = codec_of
        self._read = read
        self._local = threading.local()

    def parts(self, record: StorageRecord, only: Collection[str] | None = None) -> Parts:
        """The parts of one storage, all or ``only`` some."""
        pack, at = self._open(record), record.place
        parts = self._read_parts(pack, record, only)
        return {part: parts[part][pack.specs[part][1][at] : pack.specs[part][1][at + 1]] for part in parts}

    def elements(self, record: StorageRecord, backend: Backend | None) -> torch.Tensor | None:
        """The decoded elements of one storage; None where its codec decodes it only on its own."""
        pack = self._open(record)
        if not pack.codec.by_element:
            return None
        if pack.elements is None:
            parts = self._read_parts(pack, record, None)
            pack.elements = pack.codec.decode(parts, pack.record.spec, backend=backend)
        starts = pack.record.starts
        return pack.elements[starts[record.place] : starts[record.place + 1]]

    def _read_parts(self, pack: _Open, record: StorageRecord, only: Collection[str] | None) -> Parts:
        """The parts of the whole pack, all or ``only`` some."""
        wanted = [part for part in pack.specs if only is None or part in only]
        for part in wanted:
            if part not in pack.parts:
                pack.parts[part] = self._read(pack.record, part, pack.specs[part][0], record.name)
        return {part: pack.parts[part] for part in wanted}

    def _open(self, record: StorageRecord) -> _Open:
        owner = record.pack
        assert owner is not None  # noqa: S101
        kept: OrderedDict[Pack, _Open] = self._local.__dict__.setdefault("kept", OrderedDict())
        found = kept.get(owner)
        if found is None:
            codec = self._codec_of(owner)
            found = kept[owner] = _Open(owner, codec, layout.pack_layout(codec, owner.spec, owner.numels), {})
            if len(kept) > _KEPT:
                kept.popitem(last=False)
        else:
            kept.move_to_end(owner)
        return found
