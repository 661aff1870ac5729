"""A directory of torch.distributed.checkpoint as a source for several ranks, each of which reads a share of it.

Every rank reads the ``.metadata`` and comes to the same shares, so that none has to be sent. The slices stay as they
are cut. Weight and moments of one slice go to one rank, the largest first to the rank that has least so far.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ckpt8.checkpoint.gate import load_allowed
from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp.metadata import METADATA, Place, Slice
from ckpt8.checkpoint.readers.dcp.names import DcpRoles
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import StorageInfo, TensorRef
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.core.errors import Ckpt8Error, InputError, UsageError
from ckpt8.core.files.crc import crc32
from ckpt8.core.text import listed, shown
from ckpt8.integrations.dcp.families import Families

_LISTED = 5

_Place = tuple[str, Place]
"""The name of a tensor, and the offsets and sizes of a slice of it."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank packs. ``size`` are its bytes in the source; ``slices`` counts those of tensors."""

    items: Sequence[Slice]
    size: int
    slices: int


def share_of(home: DcpCheckpoint, rank: int, world: int) -> Share:
    """The share of ``rank`` among ``world`` ranks."""
    groups: dict[tuple[str, tuple[int, ...]], list[Slice]] = defaultdict(list)
    owner, moments = _Owners(home.roles), _moments_of_averages(home)
    for piece in home.metadata.slices:
        if piece.place is None:
            groups["", ()].append(piece)
        else:
            offsets = moments.get((piece.name, piece.place), piece.place[0])
            groups[owner(piece.name), offsets if any(offsets) else ()].append(piece)
    sized = sorted(((sum(piece.length for piece in group), key) for key, group in groups.items()), reverse=True)
    items: list[Slice] = []
    loads = [0] * world
    for nbytes, key in sized:
        least = loads.index(min(loads))
        items += groups[key] if least == rank else ()
        loads[least] += nbytes
    return Share(items, loads[rank], sum(piece.place is not None for piece in items))


def _moments_of_averages(home: DcpCheckpoint) -> dict[_Place, tuple[int, ...]]:
    """Where the slice of the first moment begins that a slice of an average belongs to: the first such one."""
    found: dict[_Place, tuple[int, ...]] = {}
    for piece, average in _averages_of(home, home.metadata.slices):
        assert piece.place is not None  # noqa: S101 - it has averages
        found.setdefault(average, piece.place[0])
    return found


def _averages_of(home: DcpCheckpoint, pieces: Iterable[Slice]) -> Iterator[tuple[Slice, _Place]]:
    """Slices of first moments, each with an average that it depends on."""
    families = Families(home.metadata.tensors)
    for piece in pieces if families.averages else ():
        if piece.place is not None:
            for average in families.averages_of(piece.name, piece.place):
                yield piece, average


def needed(home: DcpCheckpoint, share: Share) -> set[Slice]:
    """The slices that a rank reads: those of its share, averages that these depend on, and numbers.

    Numbers may be steps or settings of what it packs.
    """
    averages = {average for _, average in _averages_of(home, share.items)}
    others = (
        piece
        for piece in home.metadata.slices
        if piece.place is not None and (piece.place == ((), ()) or (piece.name, piece.place) in averages)
    )
    return {*share.items, *others}


@dataclass(frozen=True, slots=True)
class _Stored:
    """A slice of a tensor in an open file."""

    member: DcpMember
    ref: TensorRef
    storage: StorageInfo


class PlainDirectory:
    """A directory of torch.distributed.checkpoint, open for a ``share``. ``left_out`` are its files without slices.

    Raises InputError where the directory is not that, or a slice of the share cannot be read, UsageError for several
    in one.
    """

    def __init__(self, source: Bundle, share: Share) -> None:
        self.path, self.check_unchanged = source.path, source.check_unchanged
        members = [member for member in source.found if isinstance(member, DcpMember)]
        homes = {id(member.home): member.home for member in members}
        unread = next((member for member in source.found if member.holds_tensors), None)
        if unread is not None:
            raise InputError(f"{self.path}: {unread.path}: {unread.reason}; it cannot be shared among ranks")
        if not homes:
            raise InputError(f"{self.path}: is no directory of torch.distributed.checkpoint, which ranks can share")
        if len(homes) > 1:
            folders = listed(sorted({member.path.rpartition("/")[0] for member in members}), _LISTED)
            raise UsageError(f"{self.path}: holds several checkpoints; give one of them: {folders}")
        self.home: DcpCheckpoint = next(iter(homes.values()))
        folder = members[0].path.removesuffix(next(iter(self.home.files)))
        known = {*(member.path for member in members), f"{folder}{METADATA}"}
        self.left_out = [member.path for member in source.found if member.path not in known]
        self._slices: dict[Slice, _Stored] = {}
        for member in members:
            storages = {storage.key: storage for storage in member.checkpoint.storages}
            self._slices |= {piece: _Stored(member, ref, storages[ref.key]) for piece, ref in member.parts}
        missing = [piece for piece in share.items if piece.place and piece not in self._slices]
        if missing:
            raise InputError(f"{self.path}: {shown(missing[0].name)}: is no plain tensor; it cannot be shared")

    def slice_at(self, name: str, offsets: tuple[int, ...]) -> Slice:
        """The slice of a tensor that begins at ``offsets``: of the share, or an average that it depends on."""
        return self._places[name, offsets]

    @cached_property
    def _places(self) -> Mapping[tuple[str, tuple[int, ...]], Slice]:
        return {(piece.name, piece.place[0]): piece for piece in self._slices if piece.place is not None}

    def tensor(self, piece: Slice) -> torch.Tensor:
        """A slice, in pages of its file that the system loads and drops; in memory where the file is compressed.

        Raises InputError where its checksum does not hold.
        """
        stored = self._slices[piece]
        storage, ref, checkpoint = stored.storage, stored.ref, stored.member.checkpoint
        if piece.transforms:
            content = host_bytes(storage.nbytes)
            checkpoint.read_into(storage.offset, bytes_of(content))
            memory = content.untyped_storage()
        else:
            path = self.path / stored.member.path
            pages = torch.from_file(str(path), shared=False, size=checkpoint.size, dtype=torch.uint8)
            memory = pages.untyped_storage()[storage.offset : storage.offset + storage.nbytes]
        if storage.crc32 is not None and storage.nbytes:
            content = torch.empty(0, dtype=torch.uint8).set_(memory)
            if crc32(bytes_of(content)) != storage.crc32:
                where = f"{self.path}: {stored.member.path}: slice {shown(piece.name)}"
                raise InputError(f"{where}: is damaged: its CRC does not match; copy or download the file again")
        made = torch.empty(0, dtype=ref.dtype.torch).set_(memory, ref.offset, ref.shape, ref.stride)
        made = made.conj() if ref.conj else made
        return torch._neg_view(made) if ref.neg else made

    def value(self, name: str) -> bytes:
        """A value that is no tensor, as torch.save wrote it. Raises InputError where it is damaged."""
        return self.home.content(name)

    @cached_property
    def known(self) -> Mapping[str, Any]:
        """The values by name, as far as settings and steps of optimizers need them: tensors have one element."""
        stored = {piece.name: piece for piece in self._slices}
        found: dict[str, Any] = {}
        for name, tensor in self.home.metadata.tensors.items():
            small = tensor.shape == () and name in stored
            found[name] = self.tensor(stored[name]) if small else torch.empty(tensor.shape, device="meta")
        for name in self.home.metadata.names:
            if name not in found:
                with suppress(Ckpt8Error):
                    found[name] = load_allowed(io.BytesIO(self.value(name)), f"{self.path}: {shown(name)}")
        return found


class _Owners:
    """Finds the parameter that a tensor is or belongs to: its name, or that of the tensor itself."""

    def __init__(self, roles: DcpRoles) -> None:
        self._states = roles.states
        self._trained = {key.parameter for key in roles.states.values()}

    def __call__(self, name: str) -> str:
        if name in self._states:
            return self._states[name].parameter
        parts = name.split(".")
        ends = (".".join(parts[at:]) for at in range(len(parts)))
        return next((end for end in ends if end in self._trained), name)
