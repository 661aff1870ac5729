"""Chooses the storages that share entries: small ones of one role and codec, where the header would be long otherwise.

Lossless storages form groups one by one. The lossy moments of a parameter stay together: the codec of all of them
changes where one is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ckpt8.compressing.plan import Unit
from ckpt8.container import header
from ckpt8.container.layout import PACK, entry_names, pack_entry
from ckpt8.core.collection import without_collection

_ROOM, _ROOM_SHARE, _BUDGET_ROOM_SHARE = 12 << 10, 256, 4096
"""The header may take as many bytes, or this part of the source, before storages share entries. A container under a
budget is so much smaller that its header counts for more."""

_EMPTY_RECORD = 40
"""What a storage without elements counts, which has no entries but a record in the manifest."""

PACK_NAME = "ckpt8.shared"
_WIDEST = f"{PACK_NAME}{10**8}"


@dataclass(frozen=True, slots=True)
class Group:
    """Small units whose streams, place by place, have one role, element type and codec. All are kept whole."""

    units: Sequence[Unit]

    def names(self) -> Iterator[str]:
        """Names as long as those of its entries: a lossy group may need as many for the units that are refused."""
        for stream in self.units[0].streams:
            for codec in stream.codecs:
                yield from (pack_entry(_WIDEST, part) for part in codec.layout(stream.spec))


@without_collection()
def share(units: Sequence[Unit], size: int, slab: int) -> tuple[list[Unit], list[Group]]:
    """The units with entries of their own, and groups of the others.

    ``size`` are the bytes of the source; with 0 small units are grouped where the header would have 12 KiB.
    """
    is_under_budget = any(stream.second is not None for unit in units for stream in unit.streams)
    part = _BUDGET_ROOM_SHARE if is_under_budget else _ROOM_SHARE
    if not _is_header_long(units, max(_ROOM, size // part), slab):
        return list(units), []
    own: list[Unit] = []
    alike: dict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        for each in _parts_of(unit):
            if _is_small(each):
                alike[tuple((s.spec.role, s.spec.dtype, s.codec, s.second) for s in each.streams)].append(each)
            else:
                own.append(each)
    groups = []
    for found in alike.values():
        for run in _cut(found):
            if len(run) > 1:
                groups.append(Group([_whole(unit) for unit in run]))
            else:
                own += run
    return own, groups


def _is_header_long(units: Iterable[Unit], room: int, slab: int) -> bool:
    taken = 0
    for stream in (stream for unit in units for stream in unit.streams):
        entries = entry_names(stream.codec, stream.spec, slab)
        taken += sum(map(header.reserved_entry, entries)) if entries else _EMPTY_RECORD
        if taken > room:
            return True
    return False


def _parts_of(unit: Unit) -> list[Unit]:
    """The streams of a lossless unit one by one, if nothing is measured of them together."""
    if len(unit.streams) == 1 or not unit.is_plain:
        return [unit]
    return [Unit((stream,)) for stream in unit.streams]


def _is_small(unit: Unit) -> bool:
    depends = any(stream.codec.companions or stream.codec.copied is not None for stream in unit.streams)
    return unit.numel <= PACK and not depends


def _whole(unit: Unit) -> Unit:
    """The unit with all its streams kept whole."""
    if all(stream.base is None for stream in unit.streams):
        return unit
    return replace(unit, streams=tuple(replace(stream, base=None) for stream in unit.streams))


def _cut(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Runs of units that have at most PACK elements."""
    run: list[Unit] = []
    numel = 0
    for unit in units:
        if run and numel + unit.numel > PACK:
            yield run
            run, numel = [], 0
        run.append(unit)
        numel += unit.numel
    yield run
