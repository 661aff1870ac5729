"""The containers of a directory of which some are damaged or missing, and why each slice is lost or not."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from ckpt8.container.damaged import DamagedContainer
from ckpt8.container.frames import bytes_of
from ckpt8.container.layout import FRAME
from ckpt8.container.manifest import TensorRecord
from ckpt8.container.sharded import INDEX
from ckpt8.container.sharded.index import GlobalTensor, Place
from ckpt8.container.sharded.joined import objects_of, slice_problem
from ckpt8.container.sharded.layouts import Slice
from ckpt8.container.sharded.reading import read_index
from ckpt8.container.sharded.slices import slices_of
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import FilePool
from ckpt8.core.tensors import DType
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
        found = b"".join(bytes_of(reader.read_chunk(record.storage, chunk)) for chunk in _chunks(place))
        start = place.start % FRAME
        return found[start : start + place.length]


def _chunks(place: Place) -> range:
    return range(place.start // FRAME, -(-(place.start + place.length) // FRAME))
