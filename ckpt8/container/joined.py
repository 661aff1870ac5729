"""The containers of a directory, open as one: checked against its index and each other, with one manifest.

The manifest has the names of the state dict in place of those in each file. ``open_stored`` opens such a directory, or
one container.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt8.codecs import Codec, codec_class, codec_from_config
from ckpt8.container.header import is_container
from ckpt8.container.manifest import Manifest, Pack, ParameterRecord, StorageRecord, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import (
    INDEX,
    OBJECTS,
    GlobalTensor,
    Layout,
    Place,
    ShardedIndex,
    Slice,
    SliceKey,
    explain_missing,
    find_sharded,
    is_part,
    part_names,
    read_file,
    refuse_directory,
    slices_of,
)
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import FilePool
from ckpt8.core.tensors import DType, Parts, TensorSpec
from ckpt8.core.text import box_text, shown

if TYPE_CHECKING:
    import torch


def read_index(directory: Path, rank: int | None = None) -> ShardedIndex:
    """The index of a directory, joined where every rank has written a part of it.

    Of what several ranks have stored on their own, such as their random states, ``rank`` gets its own. Raises
    InputError where the index, or a part of it, is missing or malformed, or UnsupportedError.
    """
    path = directory / INDEX
    if path.exists():
        return read_file(path)
    parts = part_names(directory)
    if not parts:
        raise InputError(explain_missing(directory))
    from ckpt8.container.collecting import join  # needs numpy, which takes its time

    return join(directory, {name: read_file(directory / name) for name in parts}, rank)


_PLACE = re.compile(r"@[\dx]*$")
"""The end of the name that a file gives to one of several slices of a parameter."""

_STATE = ".state."


def join_manifests(
    directory: str, manifests: Sequence[tuple[str, Manifest]], shapes: Mapping[str, Sequence[int]]
) -> Manifest:
    """The manifest of a directory, of files with these names; ``shapes`` are those of whole tensors by name.

    Storages have the numbers of their files, one file after the other. A slice has the name of its tensor and its
    place, such as ``weight[0:64,:]``; what belongs to a file alone has the name of the file before its own.
    """
    first = manifests[0][1] if manifests else Manifest("", "lossless", [], 0, 0)
    joined = Manifest(
        first.writer, first.preset, first.rules, first.slab, first.frame, directory=directory, budget=first.budget
    )
    optimizers: dict[str, int] = {}
    for file, manifest in manifests:
        _Joining(joined, file, manifest, shapes, optimizers).add()
    return joined


class _Joining:
    """Adds the manifest of one file. ``optimizers`` are the numbers of optimizers, by their place."""

    def __init__(
        self,
        joined: Manifest,
        file: str,
        manifest: Manifest,
        shapes: Mapping[str, Sequence[int]],
        optimizers: dict[str, int],
    ) -> None:
        self._joined, self._file, self._own = joined, file, manifest
        self._first = len(joined.storages)
        self._optimizers = optimizers
        self._names: dict[int, str] = {}
        self._places: dict[int, str] = {}
        self._tensors: dict[int, str] = {}
        for piece in manifest.slices:
            tensor = manifest.tensors[piece.tensor]
            place = box_text(piece.offsets, tensor.shape, shapes.get(piece.name, tensor.shape))
            self._tensors[piece.tensor] = self._names[tensor.storage] = piece.name + place
            self._places[tensor.storage] = place

    def add(self) -> None:
        """Add all records."""
        packs = {id(pack): self._pack(pack) for pack in self._own.packs}
        configs: dict[int, dict[str, Any]] = {}
        for index, record in enumerate(self._own.storages):
            if id(record.codec) not in configs:
                configs[id(record.codec)] = self._codec(record.codec)
            pack = None if record.pack is None else packs[id(record.pack)]
            codec = configs[id(record.codec)]
            self._joined.storages.append(replace(record, name=self._name(index, record), codec=codec, pack=pack))
        self._joined.packs += packs.values()
        first = self._first
        self._joined.tensors += [
            replace(tensor, name=self._tensors.get(at, f"{self._file}:{tensor.name}"), storage=tensor.storage + first)
            for at, tensor in enumerate(self._own.tensors)
        ]
        self._joined.members += [
            replace(
                member,
                path=self._file if len(self._own.members) == 1 else f"{self._file}/{member.path}",
                skeleton=member.skeleton + first,
                segments=[[offset, storage + first] for offset, storage in member.segments],
                crc_fields=[[offset, storage + first] for offset, storage in member.crc_fields],
            )
            for member in self._own.members
        ]
        self._joined.parameters += map(self._parameter, self._own.parameters)

    def _name(self, index: int, record: StorageRecord) -> str:
        return self._names.get(index) or f"{self._file}:{record.name}"

    def _pack(self, pack: Pack) -> Pack:
        storages = [index + self._first for index in pack.storages]
        return replace(pack, name=f"{self._file}:{pack.name}", codec=self._codec(pack.codec), storages=storages)

    def _codec(self, config: dict[str, Any]) -> dict[str, Any]:
        """A stored configuration with the numbers of storages in the joined manifest."""
        first, shifted = self._first, dict(config)
        for name in codec_class(config["id"]).companions:
            value = config.get(name)
            if isinstance(value, int):
                shifted[name] = value + first
            elif isinstance(value, (list, tuple)):  # row and column statistics, and the size of matrices
                shifted[name] = [value[0] + first, value[1] + first, *value[2:]]
        if "runs" in config:
            shifted["runs"] = [[None if run[0] is None else run[0] + first, *run[1:]] for run in config["runs"]]
        return shifted

    def _parameter(self, record: ParameterRecord) -> ParameterRecord:
        storage = min(record.moments.values(), default=-1)
        name = _PLACE.sub("", record.name) + self._places.get(storage, "")
        steps = record.steps
        if steps is not None:
            home = self._names.get(storage, "").partition(_STATE)[0]
            weight = steps.get("weight_storage")
            steps = steps | {
                "optimizer": self._optimizers.setdefault(home, len(self._optimizers)),
                "weight_storage": weight + self._first if isinstance(weight, int) else None,
            }
        moments = {slot: index + self._first for slot, index in record.moments.items()}
        return replace(record, name=name, moments=moments, steps=steps)


_MANY = 1 << 16
"""Slices that may be listed before it is known that they are there."""


class JoinedReader(Closing):
    """The containers of all ranks. ``readers`` are in the order of the index, and storages are numbered in this order.

    Opening it checks seals, and that containers and index state the same slices, which make up every tensor. Raises
    InputError that names the file and the tensor.
    """

    def __init__(self, path: Path, *, kernels: bool = False) -> None:
        self.path = path
        self.index = read_index(path)
        self.readers: list[ContainerReader] = []
        with ExitStack() as stack:
            pool = FilePool()
            stack.callback(pool.close)
            for name, seal in self.index.files.items():
                if not (path / name).is_file():
                    raise InputError(f"{path / name}: is missing, and {INDEX} names it; copy the directory again")
                reader = ContainerReader(path / name, kernels=kernels, pool=pool)
                stack.callback(reader.close)
                if reader.seal.hex() != seal:
                    raise InputError(f"{reader.path}: belongs to another save than the {INDEX} beside it")
                self.readers.append(reader)
            self.by_name = {reader.path.name: reader for reader in self.readers}
            self.slices = {name: slices_of(reader.manifest) for name, reader in self.by_name.items()}
            self._objects = {name: objects_of(reader.manifest) for name, reader in self.by_name.items()}
            self._check()
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Close all files."""
        self._resources.close()

    def _check(self) -> None:
        stated = {name: set(slices) for name, slices in self.slices.items()}
        # A few numbers of the index say very many: no list of them is made that the files do not bear out.
        named, held = (sum(map(len, layouts)) for layouts in (self._layouts(), stated.values()))
        if named > _MANY + 2 * held:
            raise InputError(f"{self.path / INDEX}: names {named} slices, and its files hold {held}")
        for name, tensor in self.index.tensors.items():
            tensor.check_cover(f"{self.path / INDEX}: {shown(name)}")
            for box in tensor.boxes():
                if (place := tensor.pickled(box)) is not None:
                    self._check_place(name, place)
                else:
                    self._check_slice(name, tensor, box)
                    stated[box.file].discard((name, box.offsets))
        for name, place in self.index.objects.items():
            self._check_place(name, place)
        for file, unknown in stated.items():
            for key in unknown:
                if not self._is_replica(file, key):
                    raise InputError(f"{self.path / file}: has a slice of {shown(key[0])} that {INDEX} does not name")

    def _layouts(self) -> Iterator[Layout]:
        return (tensor.layout for tensor in self.index.tensors.values() if tensor.is_whole)

    def _check_slice(self, name: str, tensor: GlobalTensor, box: Slice) -> None:
        record = self.slices[box.file].get((name, box.offsets))
        if (problem := slice_problem(self.by_name[box.file].manifest, record, tensor, box)) is not None:
            place = box_text(box.offsets, box.sizes, tensor.shape)
            raise InputError(f"{self.path / box.file}: {shown(name + place)}: {problem}")

    def _check_place(self, name: str, place: Place) -> None:
        record = self.objects(place.file)
        if record is None or place.start + place.length > record.numel:
            raise InputError(f"{self.path / place.file}: ends before {shown(name)}, which {INDEX} names")

    def objects(self, file: str) -> TensorRecord | None:
        """The bytes of the values of a file that are no tensors; None where it has none."""
        return self._objects[file]

    def _is_replica(self, file: str, key: SliceKey) -> bool:
        """Whether the index names the same elements in another file: ranks may keep copies of what all have.

        Ranks that saved on their own may have cut their copies otherwise.
        """
        tensor = self.index.tensors.get(key[0])
        record = self.slices[file][key]
        if tensor is None or len(record.shape) != len(tensor.shape):
            return False
        if self.index.joined:
            ends = (at + size for at, size in zip(key[1], record.shape, strict=True))
            return all(end <= size for end, size in zip(ends, tensor.shape, strict=True))
        boxes = tensor.overlapping(key[1], record.shape)
        return any((box.offsets, box.sizes) == (key[1], tuple(record.shape)) for box in boxes) or 0 in record.shape

    @property
    def size(self) -> int:
        """Bytes of all files."""
        index = sum((self.path / name).stat().st_size for name in self._names() if _is_index(name))
        return index + sum(reader.size for reader in self.readers)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifests of all files as one, with the names of the whole state dict."""
        shapes = {name: tensor.shape for name, tensor in self.index.tensors.items()}
        return join_manifests(
            self.path.resolve().name, [(reader.path.name, reader.manifest) for reader in self.readers], shapes
        )

    @cached_property
    def _firsts(self) -> list[int]:
        firsts = [0]
        for reader in self.readers:
            firsts.append(firsts[-1] + len(reader.manifest.storages))
        return firsts

    @cached_property
    def _first_of(self) -> dict[str, int]:
        return {reader.path.name: first for reader, first in zip(self.readers, self._firsts, strict=False)}

    def storage_of(self, name: str, box: Slice) -> int:
        """The number that the storage of a slice has in ``manifest``."""
        return self._first_of[box.file] + self.slices[box.file][name, box.offsets].storage

    def _own(self, storage: int) -> tuple[ContainerReader, int]:
        at = bisect_right(self._firsts, storage) - 1
        return self.readers[at], storage - self._firsts[at]

    def codec(self, storage: int) -> Codec:
        """The codec of a storage, with the numbers that its companions have here. Raises UnsupportedError."""
        return codec_from_config(self.manifest.storages[storage].codec)

    def spec(self, storage: int) -> TensorSpec:
        """The specification of a whole storage."""
        record = self.manifest.storages[storage]
        return TensorSpec(record.name, record.role, record.dtype, (record.numel,))

    def decode_chunk(self, storage: int, chunk: int, out: torch.Tensor) -> Parts:
        """Decode one chunk into ``out``, by the container that holds the storage. Returns its parts."""
        reader, own = self._own(storage)
        return reader.decode_chunk(own, chunk, out)

    def strays(self) -> Iterator[str]:
        """Names of files in the directory that are no part of the checkpoint."""
        return (name for name in self._names() if name not in self.by_name and not _is_index(name))

    def _names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir())


def slice_problem(manifest: Manifest, record: TensorRecord | None, tensor: GlobalTensor, box: Slice) -> str | None:
    """Why a tensor of a container cannot be the part of ``tensor`` that the index names, or None."""
    if record is None:
        return f"is not in this file, and {INDEX} names it"
    fills = record.nbytes == manifest.storages[record.storage].nbytes and not record.offset and not record.flags
    if (tuple(record.shape), record.dtype) != (box.sizes, tensor.dtype) or not fills:
        return f"is not of the type and shape that {INDEX} states"
    return None


def objects_of(manifest: Manifest) -> TensorRecord | None:
    """The bytes of the values of a container that are no tensors; None where it has none."""
    objects = next((tensor for tensor in manifest.tensors if tensor.name == OBJECTS), None)
    fits = objects is not None and objects.dtype is DType.UINT8 and not objects.offset and not objects.flags
    return objects if fits else None


def _is_index(name: str) -> bool:
    return name == INDEX or is_part(name)


Stored = ContainerReader | JoinedReader


def is_stored(path: Path) -> bool:
    """Whether ckpt8 wrote what is at ``path``; False where it cannot be read."""
    return is_container(path) or find_sharded(path) is not None


def open_stored(path: Path, *, kernels: bool = False) -> Stored:
    """Open a container, or a directory of those of ranks. Raises InputError."""
    if (directory := find_sharded(path)) is not None:
        return JoinedReader(directory, kernels=kernels)
    refuse_directory(path)
    return ContainerReader(path, kernels=kernels)


def containers_of(stored: Stored) -> list[ContainerReader]:
    """The containers, of one or of all ranks."""
    return stored.readers if isinstance(stored, JoinedReader) else [stored]
