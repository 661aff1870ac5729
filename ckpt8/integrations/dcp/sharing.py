"""Packs a directory of torch.distributed.checkpoint in the ranks of a job, each a share of it.

Every rank reads the ``.metadata`` and comes to the same shares, so that none has to be sent. The slices stay as they
are cut. Weight and moments of one slice go to one rank, the largest first to the rank that has least so far.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ckpt8.checkpoint.gate import load_allowed
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import METADATA, DcpRoles, Place, Slice
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import StorageInfo, TensorRef
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.joined import read_index
from ckpt8.core.errors import Ckpt8Error, InputError, UsageError
from ckpt8.core.files.atomic import as_private_as
from ckpt8.core.files.source_file import crc32
from ckpt8.core.text import listed, shown
from ckpt8.integrations.dcp.planner import Families, with_copies
from ckpt8.integrations.dcp.writer import Ckpt8StorageWriter

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
    places: dict[_Place, tuple[int, ...]] = {}
    for piece, average in _averages_of(home, home.metadata.slices):
        assert piece.place is not None  # noqa: S101 - it has averages
        places.setdefault(average, piece.place[0])
    return places


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
        members = source.distributed
        homes = {id(member.home): member.home for member in members}
        unread = next((member for member in source.opened if member.holds_tensors), None)
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
        self.left_out = [member.path for member in source.opened if member.path not in known]
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
        values: dict[str, Any] = {}
        for name, tensor in self.home.metadata.tensors.items():
            small = tensor.shape == () and name in stored
            values[name] = self.tensor(stored[name]) if small else torch.empty(tensor.shape, device="meta")
        for name in self.home.metadata.names:
            if name not in values:
                with suppress(Ckpt8Error):
                    values[name] = load_allowed(io.BytesIO(self.value(name)), f"{self.path}: {shown(name)}")
        return values


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


class SharingPlanner(SavePlanner):
    """Plans the share of a ``rank`` of a directory, which it opens. Close it."""

    directory: PlainDirectory

    def __init__(self, source: Path, rank: int, world: int) -> None:
        self._source, self._rank, self._world = source, rank, world
        self._files = ExitStack()
        self._items: dict[tuple[str, tuple[int, ...] | None], Slice] = {}
        self.share = Share((), 0, 0)
        self.state_dict: Mapping[str, Any] = {}

    def close(self) -> None:
        """Close the directory."""
        self._files.close()

    def set_up_planner(
        self,
        state_dict: object,  # noqa: ARG002
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        """Open the directory: an error reaches the other ranks from here. Raises Ckpt8Error."""
        bundle = self._files.enter_context(open_source(self._source, containers=False, choice=self._choose))
        self.directory = PlainDirectory(bundle, self.share)
        self._items = {(piece.name, piece.place[0] if piece.place else None): piece for piece in self.share.items}
        self.state_dict = self.directory.known

    def _choose(self, home: DcpCheckpoint) -> set[Slice]:
        """The slices to read; keeps the share."""
        self.share = share_of(home, self._rank, self._world)
        return needed(home, self.share)

    def create_local_plan(self) -> SavePlan:
        """The items of the share."""
        return SavePlan([self._item(piece) for piece in self._items.values()])

    def _item(self, piece: Slice) -> WriteItem:
        if piece.place is None:
            return WriteItem(MetadataIndex(piece.name), WriteItemType.BYTE_IO)
        tensor = self.directory.home.metadata.tensors[piece.name]
        offsets, sizes = map(torch.Size, piece.place)
        return WriteItem(
            MetadataIndex(piece.name, offsets),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(offsets, sizes),
                TensorProperties(dtype=tensor.dtype.torch),
                torch.Size(tensor.shape),
            ),
        )

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans with copies of averages, and what all of them hold."""
        plans, metadata = create_default_global_save_plan(all_plans)
        every = SavePlan([item for plan in plans for item in plan.items])  # each rank can read all
        plans = with_copies(plans, [every] * len(plans), metadata.state_dict_metadata)
        metadata.planner_data = dict(self.directory.home.metadata.paths) or None
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The content of an item. Raises InputError for damage."""
        name, offset = write_item.index.fqn, write_item.index.offset
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self.directory.value(name))
        place = name, tuple(offset or ())
        return self.directory.tensor(self._items[place] if place in self._items else self.directory.slice_at(*place))


@contextmanager
def connected(world: int) -> Iterator[None]:
    """Connect the ranks that torchrun started, by gloo. A single rank needs no connection. Raises UsageError."""
    if world == 1:
        yield
        return
    try:
        dist.init_process_group("gloo")
    except (RuntimeError, ValueError) as exc:
        raise UsageError(f"the ranks cannot connect: {str(exc).splitlines()[0]}; start them with torchrun") from exc
    try:
        yield
    finally:
        dist.destroy_process_group()


class _Writer(Ckpt8StorageWriter):
    """Checks after the last read that the source has not changed."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the share of this rank. Raises InputError, OutputError."""
        written = super().write_data(plan, planner)
        assert isinstance(planner, SharingPlanner)  # noqa: S101
        planner.directory.check_unchanged()
        return written


def compress_share(
    source: Path, target: Path, options: Mapping[str, Any], rank: int, world: int, *, overwrite: bool
) -> SharingPlanner:
    """Pack the share of this ``rank``; the last step of rank 0 makes the target a checkpoint. Returns what was planned.

    ``options`` are those of Ckpt8StorageWriter. Raises Ckpt8Error on all ranks where one fails. What this rank has
    written is removed then: the target is no checkpoint, or the one that it was. Only what fails after the last step
    leaves the new one.
    """
    writer = _Writer(target, **options, overwrite=overwrite)
    before = _files(target)
    try:
        with as_private_as(source), closing(SharingPlanner(source, rank, world)) as planner:
            save({}, storage_writer=writer, no_dist=world == 1, planner=planner)
            return planner
    except BaseException as exc:
        named = _named(target)
        for path in _files(target) - before:
            if path.name.startswith(f"__{rank}_") and path.name not in named:
                path.unlink(missing_ok=True)
        with suppress(OSError):
            target.rmdir()
        if isinstance(exc, CheckpointException):
            raise _plain(exc, rank) from exc
        raise


def _files(directory: Path) -> set[Path]:
    return set(directory.iterdir()) if directory.is_dir() else set()


def _named(directory: Path) -> Container[str]:
    """The files of the checkpoint in a directory, if it is one."""
    try:
        return read_index(directory).files
    except Ckpt8Error:
        return ()


def _plain(error: CheckpointException, rank: int) -> BaseException:
    """The error of this rank, else that of the first rank that failed, by its number."""
    failures: Mapping[int, tuple[BaseException, object]] = error.failures
    first = min(failures, default=rank)
    if rank in failures:
        return failures[rank][0]
    cause = failures[first][0] if first in failures else error
    kind = type(cause) if isinstance(cause, Ckpt8Error) else Ckpt8Error
    return kind(f"rank {first} failed: {' '.join(str(cause).split())}")
