"""The containers of a directory of which some are damaged or missing, and why each slice is lost or not.

Tensors are put together from their slices one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ckpt8.codecs.error_stats import ErrorStats, read_error
from ckpt8.container.damaged import DamagedContainer
from ckpt8.container.decoding import decode_tensor, fill_tensor
from ckpt8.container.facts import figures, tensor_facts
from ckpt8.container.frames import bytes_of
from ckpt8.container.header import FRAME
from ckpt8.container.manifest import Manifest, TensorRecord
from ckpt8.container.sharded import INDEX
from ckpt8.container.sharded.index import GlobalTensor, Place, Slice
from ckpt8.container.sharded.joined import JoinedReader, objects_of, slice_problem
from ckpt8.container.sharded.reading import read_index, slices_of
from ckpt8.core.arguments import checked
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError, UnsupportedError, UsageError
from ckpt8.core.files.source_file import FilePool
from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import shown

_MANY = 1 << 16
"""Slices that may be named before it is known that files hold as many."""


class DamagedDirectory(Closing):
    """The containers that can be read, by name, in ``readers``, and in ``unread`` why the others cannot.

    Which of their chunks are lost the caller finds out, and marks. Raises InputError where the index is damaged, or
    names slices that do not make up their tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = read_index(path)
        self.readers: dict[str, DamagedContainer] = {}
        self.unread: dict[str, str] = {}
        with ExitStack() as stack:
            pool = FilePool()
            stack.callback(pool.close)
            for name, seal in self.index.files.items():
                try:
                    reader = self._open(path / name, seal, pool)
                except InputError as exc:
                    self.unread[name] = str(exc).removeprefix(f"{path / name}: ")
                else:
                    stack.callback(reader.close)
                    self.readers[name] = reader
            self._slices = {name: slices_of(reader.manifest) for name, reader in self.readers.items()}
            self._check()
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Close all files."""
        self._resources.close()

    @staticmethod
    def _open(path: Path, seal: str, pool: FilePool) -> DamagedContainer:
        if not path.exists():
            raise InputError(f"{path}: is missing")
        reader = DamagedContainer(path, pool=pool)
        if reader.seal.hex() == seal:
            return reader
        reader.close()
        # Values of two saves would make a checkpoint that never was.
        raise InputError(f"{path}: belongs to another save than the {INDEX} beside it, or its end is damaged")

    def _check(self) -> None:
        """Raise InputError where the index names more slices than files can hold, or tensors that are not covered."""
        named = sum(len(tensor.layout) for tensor in self.index.tensors.values() if tensor.is_whole)
        held = sum(map(len, self._slices.values()))
        if named > _MANY + 2 * held * (1 + len(self.unread)):
            raise InputError(f"{self.path / INDEX}: names {named} slices, and the files that are left hold {held}")
        for name, tensor in self.index.tensors.items():
            tensor.check_cover(f"{self.path / INDEX}: {shown(name)}")

    def record(self, name: str, box: Slice) -> TensorRecord:
        """The tensor of a slice that is not lost, in its container."""
        return self._slices[box.file][name, box.offsets]

    def why_lost(self, name: str, tensor: GlobalTensor, box: Slice) -> str | None:
        """Why a slice is lost, or None. Damage inside it is told by runs of its elements."""
        if box.file in self.unread:
            return self.unread[box.file]
        if (place := tensor.pickled(box)) is not None:
            return self.why_lost_value(place)
        reader = self.readers[box.file]
        record = self._slices[box.file].get((name, box.offsets))
        problem = slice_problem(reader.manifest, record, tensor, box)
        if problem is not None or record is None:
            return problem
        if not record.is_contiguous:  # no writer makes such slices
            return f"is not of the type and shape that {INDEX} states"
        # A storage may count elements of another size. Round outwards: one lost byte loses an element.
        size, item = reader.manifest.storages[record.storage].dtype.itemsize, record.dtype.itemsize
        runs = [(at * size // item, -(-stop * size // item) - 1) for at, stop in reader.lost_runs(record.storage)]
        lost = ", ".join(f"{first} to {last}" for first, last in runs)
        return f"elements {lost} of its {record.numel} are damaged" if runs else None

    def why_lost_value(self, place: Place) -> str | None:
        """Why a value that torch.save wrote is lost, or None."""
        if place.file in self.unread:
            return self.unread[place.file]
        reader = self.readers[place.file]
        record = objects_of(reader.manifest)
        if record is None or reader.manifest.storages[record.storage].dtype is not DType.UINT8:
            return f"is not in this file, and {INDEX} names it"
        if place.start + place.length > record.numel:
            return "its file ends before it"
        lost = reader.lost.get(record.storage, set())
        return "is damaged" if lost.intersection(_chunks(place)) else None

    def value(self, place: Place) -> bytes:
        """The bytes of a value that is not lost."""
        reader = self.readers[place.file]
        record = objects_of(reader.manifest)
        assert record is not None  # noqa: S101 - it would be lost
        content = b"".join(bytes_of(reader.read_chunk(record.storage, chunk)) for chunk in _chunks(place))
        start = place.start % FRAME
        return content[start : start + place.length]


def _chunks(place: Place) -> range:
    return range(place.start // FRAME, -(-(place.start + place.length) // FRAME))


class CheckpointDirectory(Closing):
    """A directory that ``Ckpt8StorageWriter`` wrote, opened as ``CheckpointFile`` opens one file; a context manager.

    Its tensors are those of the whole state dict, under the names of torch.distributed.checkpoint:
    ``optimizer.state.wte.weight.exp_avg``. See ``open``.
    """

    def __init__(self, path: Path) -> None:
        self._joined = JoinedReader(path)
        index = self._joined.index
        first = [name for name in index.paths or {} if name in index.tensors]
        order = dict.fromkeys([*first, *index.tensors])
        self._tensors = {name: index.tensors[name] for name in order if not _is_pickled(index.tensors[name])}

    def close(self) -> None:
        """Close all files."""
        self._joined.close()

    @property
    def manifest(self) -> Manifest:
        """Everything that the containers state about themselves, as one."""
        return self._joined.manifest

    def keys(self) -> list[str]:
        """Names of all tensors, in the order of the state dict. Values that are no plain tensors are not listed."""
        return list(self._tensors)

    def _tensor(self, name: str) -> GlobalTensor:
        if name in self._tensors:
            return self._tensors[name]
        index = self._joined.index
        if name in index.tensors or name in index.objects:
            raise UnsupportedError(
                f"{self._joined.path}: {name!r} is kept as torch.save writes it, not as a plain tensor; load it with "
                "ckpt8.load"
            )
        raise UsageError(f"{self._joined.path}: has no tensor {name!r}")

    @checked
    def get_tensor(self, name: str) -> torch.Tensor:
        """Put one tensor together on the CPU. Only its own slices are read, chunk by chunk.

        Raises UsageError for an unknown name, UnsupportedError for a value that is no plain tensor, and InputError for
        damage.
        """
        tensor = self._tensor(name)
        out = torch.empty(tensor.shape, dtype=tensor.dtype.torch, device="cpu")
        for box in tensor.boxes():
            target = out
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                target = target.narrow(dim, offset, size)
            reader, record = self._joined.by_name[box.file], self._record(name, box)
            if record.is_contiguous:
                fill_tensor(reader, record, target)
            else:
                target.copy_(decode_tensor(reader, record))
        return out

    def _record(self, name: str, box: Slice) -> TensorRecord:
        return self._joined.slices[box.file][name, box.offsets]

    @checked
    def stats(self, name: str) -> dict[str, Any]:
        """Role, codec, sizes in bytes and error of one tensor, over all of its ``slices``. Raises as ``get_tensor``."""
        tensor, joined = self._tensor(name), self._joined
        boxes = tensor.boxes()
        records = [replace(self._record(name, box), storage=joined.storage_of(name, box)) for box in boxes]
        own = [tensor_facts(joined.manifest, record) for record in records]
        if not own:
            return _facts_of_nothing(tensor)
        total = {**own[0], "slices": len(own)}
        for key in ("codec", "reason"):
            total[key] = ", ".join(dict.fromkeys(record[key] for record in own if record[key] is not None)) or None
        for key in ("elements", "bytes", "stored_bytes"):
            total[key] = sum(record[key] for record in own)
        parts = dict.fromkeys(part for record in own for part in record["parts"])
        total["parts"] = {part: sum(record["parts"].get(part, 0) for record in own) for part in parts}
        total["masters"] = list(dict.fromkeys(master for record in own for master in record["masters"]))
        total["error"] = _error(joined.manifest, records)
        return total


def _is_pickled(tensor: GlobalTensor) -> bool:
    return not tensor.is_whole and any(tensor.pickled(box) is not None for box in tensor.boxes())


def _facts_of_nothing(tensor: GlobalTensor) -> dict[str, Any]:
    """Those of a tensor without elements, which no container holds."""
    known: dict[str, Any] = {"role": Role.OTHER.value, "dtype": tensor.dtype.label, "codec": None, "reason": None}
    sizes = dict.fromkeys(("elements", "bytes", "stored_bytes", "slices"), 0)
    return {**known, **sizes, "parts": {}, "masters": [], "error": None}


def _error(manifest: Manifest, records: Sequence[TensorRecord]) -> dict[str, Any] | None:
    """The figures of the error of all slices together; None unless that of each was measured, and alike."""
    errors: list[Any] = [read_error(manifest.storages[record.storage].error) for record in records]
    total = errors[0]
    for error in errors[1:]:
        if not isinstance(total, ErrorStats) or type(error) is not type(total):
            return None
        total.merge(error)
    return figures(total) if total else None
