"""A directory of torch.distributed.checkpoint as one process writes it, which any number of processes load.

Every value is a file of ``torch.save`` of its own, one behind the other in one file. torch writes them without their
content, which is streamed into its place; torch also makes the plan, and with it the metadata.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.readers.dcp.metadata import METADATA
from ckpt8.checkpoint.replacing import checkpoint_directory
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.live_object import with_crc_fields
from ckpt8.checkpoint.sources.objects import CONSUMED
from ckpt8.checkpoint.tree import Checkpoint, TensorRef
from ckpt8.checkpoint.walk import format_path, iter_leaves
from ckpt8.converting.casts import Cast
from ckpt8.converting.request import Report, Request
from ckpt8.converting.unpacked import unpack_tree
from ckpt8.converting.weights import WeightTypes
from ckpt8.converting.writers.dcp_tree import distributed_tree
from ckpt8.converting.writers.hollow import HollowBuilder
from ckpt8.converting.writers.torch_zip import fill_storage, save_hollow
from ckpt8.core.errors import InputError, UnsupportedError, UsageError
from ckpt8.core.files.atomic import Guard
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.files.temporary import temporary_directory
from ckpt8.core.files.write_at import write_at
from ckpt8.core.workers import Progress

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import MetadataIndex

_FILE = "__0_0.distcp"
_RECORDS = "archive"
"""How torch names the records of a file that has no name itself."""

_VERSION = "1.0.0"


class DcpWriter:
    """``model`` and ``optimizer`` by names of parameters, as get_state_dict gives them; the rest of the tree as it is.

    Weights keep their element type unless ``--dtype`` says otherwise; packed optimizers of ckpt8 are unpacked.
    """

    id: ClassVar[str] = "dcp"
    directory: ClassVar[bool] = True

    def write(self, request: Request) -> Report:
        """Write the directory. Raises Ckpt8Error."""
        report = Report(str(request.target), self.id)
        with request.open(report) as content:
            data = content.data
            unpack_tree(data)
            tree = distributed_tree(data, request.key, WeightTypes(data, request.dtype, report), report)
            plan = _Plan(data, tree, report)
            check = checkpoint_directory()
            with AtomicDirectory(request.target, force=request.force, keep=request.source, check=check) as output:
                progress = request.progress_to(plan.nbytes)
                with output.new_file(_FILE) as descriptor:
                    plan.write(descriptor, output.guard, progress)
                with output.new_file(METADATA) as descriptor, output.guard():
                    write_at(descriptor, memoryview(pickle.dumps(plan.metadata)), 0)
                data.check_unchanged()
                report.bytes = sum((output.path / name).stat().st_size for name in (_FILE, METADATA))
                output.publish()
                report.replaced = output.replaced
        return report


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value was written."""

    index: MetadataIndex
    offset: int
    length: int


class _Plan:
    """What is to be written of a tree, in the order of the file. Raises InputError, UsageError, UnsupportedError."""

    def __init__(self, data: Composite, tree: dict[str, Any], report: Report) -> None:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
        from torch.distributed.checkpoint.planner import WriteItemType

        for path, leaf in iter_leaves(tree, data.label):
            if isinstance(leaf, TensorRef):
                data.check_extent(format_path(path), leaf)
        builder = HollowBuilder(data, self._alone)
        self._data = data
        try:
            built = builder.build(tree)
        except (AttributeError, RuntimeError) as exc:
            raise UnsupportedError(f"{data.label}: a tensor cannot be made by this torch: {exc}") from exc
        report.dropped += builder.dropped
        report.tensors += builder.tensors
        if built is CONSUMED or not builder.keys:
            raise InputError(f"{data.label}: holds no tensors")
        self._keys = builder.keys
        planner = DefaultSavePlanner()
        try:
            planner.set_up_planner(built, is_coordinator=True)
            plans, self.metadata = planner.create_global_plan([planner.create_local_plan()])
        except RecursionError as exc:
            raise UsageError(f"{data.label}: refers to itself, or is nested too deep for this format") from exc
        except ValueError as exc:
            raise UsageError(f"{data.label}: cannot be a distributed checkpoint: {exc}") from exc
        items = sorted(plans[0].items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
        self._values = [(item.index, planner.state_dict[item.index.fqn]) for item in items]

    def _alone(self, ref: TensorRef) -> TensorRef:
        """A tensor in a storage that holds nothing else."""
        storage = self._data.storage(ref.key)
        whole = not ref.offset and storage.nbytes == ref.nbytes
        if whole and ref.is_contiguous and not (ref.conj or ref.neg):
            return ref
        return self._data.tensor(Cast(self._data, ref.key, ref, ref.dtype), ref.dtype, ref.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors that are values of their own."""
        return sum(value.nbytes for _, value in self._values if isinstance(value, torch.Tensor))

    def write(self, descriptor: int, guard: Guard, progress: Progress) -> None:
        """Write the values from the start of an empty file, and complete the metadata.

        ``progress`` is called with bytes of tensors that are values of their own. Raises InputError, OutputError, and
        UnsupportedError for what torch does not save.
        """
        from torch.distributed.checkpoint.filesystem import _StorageInfo

        with ExitStack() as stack:
            with guard():
                folder = stack.enter_context(temporary_directory("ckpt8-"))
            places = list(self._write(folder / _RECORDS, descriptor, guard, progress))
        self.metadata.storage_data = {place.index: _StorageInfo(_FILE, place.offset, place.length) for place in places}
        if hasattr(self.metadata, "version"):
            self.metadata.version = _VERSION

    def _write(self, path: Path, descriptor: int, guard: Guard, progress: Progress) -> Iterator[_Place]:
        position = 0
        for index, value in self._values:
            counted = progress if isinstance(value, torch.Tensor) else lambda _: None
            length = self._write_value(value, path, position, descriptor, guard, counted)
            yield _Place(index, position, length)
            position += length

    def _write_value(
        self, value: object, path: Path, base: int, descriptor: int, guard: Guard, progress: Progress
    ) -> int:
        """Write one value at ``base``, by way of a file at ``path`` with holes; how long it became."""
        with guard():
            path.unlink(missing_ok=True)
            storages = save_hollow(value, path, self._data.label)
            length = path.stat().st_size
        with open_checkpoint(path) as skeleton:
            # Everything outside the storages, and then these.
            places = with_crc_fields(path, skeleton)
            position = 0
            for start, stop in [*sorted((each.offset, each.offset + each.nbytes) for each in places), (length, length)]:
                _copy(skeleton, position, start, base, descriptor, guard)
                position = max(position, stop)
        for place in places:
            source = self._data.storage(self._keys[storages[place.key]._cdata])
            fields = tuple(base + field for field in place.crc_fields)
            moved = replace(place, offset=base + place.offset, crc_fields=fields)
            fill_storage(self._data, source, moved, descriptor, guard, progress)
        return length


def _copy(skeleton: Checkpoint, start: int, stop: int, base: int, descriptor: int, guard: Guard) -> None:
    """Copy a stretch outside storages, which are short."""
    content = bytearray(max(stop - start, 0))
    skeleton.read_into(start, memoryview(content))
    with guard():
        write_at(descriptor, memoryview(content), base + start)
