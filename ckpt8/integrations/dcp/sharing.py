"""Packs a directory of torch.distributed.checkpoint in the ranks of a job, each a share of it."""

from __future__ import annotations

import io
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
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

from ckpt8.checkpoint.readers.dcp.dcp import DcpCheckpoint
from ckpt8.checkpoint.readers.dcp.metadata import Slice
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.container.sharded.reading import read_index
from ckpt8.core.errors import Ckpt8Error, UsageError
from ckpt8.core.files.atomic import as_private_as
from ckpt8.integrations.dcp.copied_statistics import with_copies
from ckpt8.integrations.dcp.plain_directory import PlainDirectory, Share, needed, share_of
from ckpt8.integrations.dcp.writer import Ckpt8StorageWriter


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
    found = failures[first][0] if first in failures else error
    kind = type(found) if isinstance(found, Ckpt8Error) else Ckpt8Error
    return kind(f"rank {first} failed: {' '.join(str(found).split())}")
