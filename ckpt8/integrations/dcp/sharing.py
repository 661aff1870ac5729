"""Packs a directory of torch.distributed.checkpoint in the ranks of a job, each a share of it.

Every rank reads the ``.metadata`` and comes to the same shares, so that none has to be sent. The slices stay as they
are cut. Weight and moments of one slice go to one rank, the largest first to the rank that has least so far.
"""

import io
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
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

from ckpt8.checkpoint.readers.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import METADATA, Place, Slice
from ckpt8.checkpoint.sources.gate import load_allowed
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import StorageInfo, TensorRef
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.joined import read_index
from ckpt8.core.errors import Ckpt8Error, InputError, UsageError, require
from ckpt8.core.files.atomic import as_private_as
from ckpt8.core.files.source_file import crc32
from ckpt8.core.text import listed, shown
from ckpt8.integrations.dcp.planner import Families, find_owner, with_copies
from ckpt8.integrations.dcp.storage import Ckpt8StorageWriter

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
    # Where the slice of the first moment begins that a slice of an average belongs to: the first such one.
    moments: dict[_Place, tuple[int, ...]] = {}
    for offsets, average in _averages_of(home, home.metadata.slices):
        moments.setdefault(average, offsets)
    states = home.roles.states
    trained = {key.parameter for key in states.values()}
    groups: dict[tuple[str, tuple[int, ...]], list[Slice]] = defaultdict(list)
    for piece in home.metadata.slices:
        if piece.place is None:
            groups["", ()].append(piece)
        else:
            name, state = piece.name, states.get(piece.name)
            owner = (find_owner(name, trained) or name) if state is None else state.parameter
            offsets = moments.get((name, piece.place), piece.place[0])
            groups[owner, offsets if any(offsets) else ()].append(piece)
    sized = sorted(((sum(piece.length for piece in group), key) for key, group in groups.items()), reverse=True)
    items: list[Slice] = []
    loads = [0] * world
    for nbytes, key in sized:
        least = loads.index(min(loads))
        items += groups[key] if least == rank else ()
        loads[least] += nbytes
    return Share(items, loads[rank], sum(piece.place is not None for piece in items))


def _averages_of(home: DcpCheckpoint, pieces: Iterable[Slice]) -> Iterator[tuple[tuple[int, ...], _Place]]:
    """Where slices of first moments begin, each with an average that it depends on."""
    families = Families(home.metadata.tensors)
    for piece in pieces if families.averages else ():
        if piece.place is not None:
            for average in families.averages_of(piece.name, piece.place):
                yield piece.place[0], average


class SharingPlanner(SavePlanner):
    """Plans the share of a ``rank`` of a directory of torch.distributed.checkpoint, which it opens. Close it.

    ``left_out`` are the files of the directory without slices.
    """

    def __init__(self, source: Path, rank: int, world: int) -> None:
        self._source, self._rank, self._world = source, rank, world
        self._files = ExitStack()
        self.close = self._files.close
        self._stored: dict[tuple[str, tuple[int, ...]], tuple[Slice, DcpMember, TensorRef, StorageInfo]] = {}
        self.share = Share((), 0, 0)
        self.left_out: list[str] = []
        self.state_dict: Mapping[str, Any] = {}

    def set_up_planner(
        self,
        state_dict: object,  # noqa: ARG002
        storage_meta: StorageMeta | None = None,  # noqa: ARG002
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        """Open the directory: an error reaches the other ranks from here.

        Raises InputError where it is no such directory, or a slice of the share cannot be read, UsageError for several
        in one.
        """
        self.bundle = self._files.enter_context(open_source(self._source, containers=False, choice=self._choose))
        self.check_unchanged = self.bundle.check_unchanged
        members, where = self.bundle.distributed, self.bundle.path
        homes = {id(member.home): member.home for member in members}
        unread = next((member for member in self.bundle.opened if member.holds_tensors), None)
        if unread is not None:
            raise InputError(f"{where}: {unread.path}: {unread.reason}; it cannot be shared among ranks")
        require(homes, f"{where}: is no directory of torch.distributed.checkpoint, which ranks can share")
        if len(homes) > 1:
            folders = listed(sorted({member.path.rpartition("/")[0] for member in members}), 5)
            raise UsageError(f"{where}: holds several checkpoints; give one of them: {folders}")
        self._home = members[0].home
        folder = members[0].path.removesuffix(next(iter(self._home.files)))
        known = {*(member.path for member in members), f"{folder}{METADATA}"}
        self.left_out = [member.path for member in self.bundle.opened if member.path not in known]
        for member in members:
            storages = {storage.key: storage for storage in member.checkpoint.storages}
            for piece, ref in member.parts:
                if piece.place is not None:
                    self._stored[piece.name, piece.place[0]] = piece, member, ref, storages[ref.key]
        for piece in self.share.items:
            if piece.place and (piece.name, piece.place[0]) not in self._stored:
                raise InputError(f"{where}: {shown(piece.name)}: is no plain tensor; it cannot be shared")
        self.state_dict = self._known()

    def _choose(self, home: DcpCheckpoint) -> set[Slice]:
        """Keep the share. Returns the slices to read: its own, averages that these depend on, and numbers.

        Numbers may be steps or settings of what it packs.
        """
        self.share = share_of(home, self._rank, self._world)
        averages = {average for _, average in _averages_of(home, self.share.items)}
        others = (
            piece
            for piece in home.metadata.slices
            if piece.place is not None and (piece.place == ((), ()) or (piece.name, piece.place) in averages)
        )
        return {*self.share.items, *others}

    def _tensor(self, name: str, offsets: tuple[int, ...]) -> torch.Tensor:
        """A slice, in pages of its file that the system loads and drops; in memory where the file is compressed.

        Raises InputError where its checksum does not hold.
        """
        piece, member, ref, storage = self._stored[name, offsets]
        if piece.transforms:
            content = host_bytes(storage.nbytes)
            member.checkpoint.read_into(storage.offset, bytes_of(content))
            memory = content.untyped_storage()
        else:
            path = str(self.bundle.path / member.path)
            pages = torch.from_file(path, shared=False, size=member.checkpoint.size, dtype=torch.uint8)
            memory = pages.untyped_storage()[storage.offset : storage.offset + storage.nbytes]
        if storage.crc32 is not None and storage.nbytes:
            content = torch.empty(0, dtype=torch.uint8).set_(memory)
            if crc32(bytes_of(content)) != storage.crc32:
                where = f"{self.bundle.path}: {member.path}: slice {shown(name)}"
                raise InputError(f"{where}: is damaged: its CRC does not match; copy or download the file again")
        made = torch.empty(0, dtype=ref.dtype.torch).set_(memory, ref.offset, ref.shape, ref.stride)
        made = made.conj() if ref.conj else made
        return torch._neg_view(made) if ref.neg else made

    def _known(self) -> dict[str, Any]:
        """The values by name, as far as settings and steps of optimizers need them: tensors have one element."""
        values: dict[str, Any] = {
            name: self._tensor(name, ())
            if tensor.shape == () and (name, ()) in self._stored
            else torch.empty(tensor.shape, device="meta")
            for name, tensor in self._home.metadata.tensors.items()
        }
        for name in self._home.metadata.names:
            if name not in values:
                with suppress(Ckpt8Error):
                    content = io.BytesIO(self._home.content(name))
                    values[name] = load_allowed(content, f"{self.bundle.path}: {shown(name)}")
        return values

    def create_local_plan(self) -> SavePlan:
        """The items of the share."""
        return SavePlan([self._item(piece) for piece in self.share.items])

    def _item(self, piece: Slice) -> WriteItem:
        if piece.place is None:
            return WriteItem(MetadataIndex(piece.name), WriteItemType.BYTE_IO)
        tensor, chunk = self._home.metadata.tensors[piece.name], ChunkStorageMetadata(*map(torch.Size, piece.place))
        data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype.torch), torch.Size(tensor.shape))
        return WriteItem(MetadataIndex(piece.name, chunk.offsets), WriteItemType.SHARD, tensor_data=data)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans with copies of averages, and what all of them hold."""
        plans, metadata = create_default_global_save_plan(all_plans)
        every = SavePlan([item for plan in plans for item in plan.items])  # each rank can read all
        plans = with_copies(plans, [every] * len(plans), metadata.state_dict_metadata)
        metadata.planner_data = dict(self._home.metadata.paths) or None
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The content of an item. Raises InputError for damage."""
        name, offset = write_item.index.fqn, write_item.index.offset
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(self._home.content(name))
        return self._tensor(name, tuple(offset or ()))


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


def compress_share(
    source: Path, target: Path, options: Mapping[str, Any], rank: int, world: int, *, overwrite: bool
) -> SharingPlanner:
    """Pack the share of this ``rank``; the last step of rank 0 makes the target a checkpoint. Returns what was planned.

    ``options`` are those of Ckpt8StorageWriter. Raises Ckpt8Error on all ranks where one fails. What this rank has
    written is removed then: the target is no checkpoint, or the one that it was. Only what fails after the last step
    leaves the new one.
    """
    writer = Ckpt8StorageWriter(target, **options, overwrite=overwrite)
    try:
        with as_private_as(source), closing(SharingPlanner(source, rank, world)) as planner:
            save({}, storage_writer=writer, no_dist=world == 1, planner=planner)
            return planner
    except BaseException as exc:
        named: Container[str] = ()
        with suppress(Ckpt8Error):
            named = read_index(target).files
        for path in writer.written:
            if path.name not in named:
                path.unlink(missing_ok=True)
        with suppress(OSError):
            target.rmdir()
        if isinstance(exc, CheckpointException):
            raise _plain(exc, rank) from exc
        raise


def _plain(error: CheckpointException, rank: int) -> BaseException:
    """The error of this rank, else that of the first rank that failed, by its number."""
    failures: Mapping[int, tuple[BaseException, object]] = error.failures
    first = min(failures, default=rank)
    if rank in failures:
        return failures[rank][0]
    cause = failures[first][0] if first in failures else error
    kind = type(cause) if isinstance(cause, Ckpt8Error) else Ckpt8Error
    return kind(f"rank {first} failed: {' '.join(str(cause).split())}")
