"""Where the bytes of a member come from: runs of the skeleton between runs of storages."""

from __future__ import annotations

from typing import NamedTuple

from ckpt8.container.manifest import Manifest, MemberRecord
from ckpt8.core.errors import InputError

CRC_BYTES = 4


class Run(NamedTuple):
    """Bytes ``start`` to ``stop`` of the member, which are those from ``origin`` on of one stored record."""

    start: int
    stop: int
    storage: int
    origin: int


def member_runs(manifest: Manifest, member: int, where: str) -> list[Run]:
    """Cut a member at the borders of its storages. Raises InputError where storages and skeleton do not fill it."""
    record = manifest.members[member]
    runs: list[Run] = []
    position = skeleton = 0
    seen = {record.skeleton}
    for offset, index in [*record.segments, [record.size, -1]]:
        if offset < position or index in seen:
            raise InputError(f"{where}: manifest is malformed: storages of {record.path!r} overlap or repeat")
        if position < offset:
            runs.append(Run(position, offset, record.skeleton, skeleton))
            skeleton += offset - position
        position = offset
        if index >= 0 and manifest.storages[index].nbytes:
            position += manifest.storages[index].nbytes
            runs.append(Run(offset, position, index, 0))
        seen.add(index)
    if position != record.size or skeleton != manifest.storages[record.skeleton].nbytes:
        raise InputError(f"{where}: manifest is malformed: {record.path!r} has another size than its parts")
    return runs


def check_members(manifest: Manifest, where: str) -> None:
    """Raise InputError unless every member is filled exactly and its checksum fields lie in its skeleton."""
    if not manifest.members:
        raise InputError(f"{where}: manifest is malformed: it has no member")
    taken: set[int] = set()
    for index, record in enumerate(manifest.members):
        runs = member_runs(manifest, index, where)
        own = {record.skeleton, *(storage for _, storage in record.segments)}
        if own & taken:
            raise InputError(f"{where}: manifest is malformed: {record.path!r} has storages of another member")
        taken |= own
        _check_crc_fields(record, [run for run in runs if run.storage == record.skeleton], where)


def _check_crc_fields(record: MemberRecord, skeleton: list[Run], where: str) -> None:
    at = 0
    free_from = 0
    for place, _ in sorted(record.crc_fields):
        while at < len(skeleton) and skeleton[at].stop < place + CRC_BYTES:
            at += 1
        if at == len(skeleton) or place < max(skeleton[at].start, free_from):
            raise InputError(f"{where}: manifest is malformed: a checksum field lies outside the skeleton")
        free_from = place + CRC_BYTES
