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
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt8.codecs import Codec, codec_class, codec_from_config
from ckpt8.container.damaged import DamagedContainer
from ckpt8.container.header import is_container
from ckpt8.container.manifest import Manifest, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import (
    INDEX,
    OBJECTS,
    GlobalTensor,
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
from ckpt8.core.errors import InputError, require
from ckpt8.core.files.source_file import FilePool
from ckpt8.core.tensors import DType
from ckpt8.core.text import box_text, shown

if TYPE_CHECKING:
    from ckpt8.core.arrays import Array, Arrays


def read_index(directory: Path, rank: int | None = None, damage: dict[str, str] | None = None) -> ShardedIndex:
    """The index of a directory, joined where every rank has written a part of it.

    Of what several ranks have stored on their own, such as their random states, ``rank`` gets its own. Raises
    InputError where the index, or a part of it, is missing or malformed, or UnsupportedError. ``damage`` is that of
    ``read_file``.
    """
    path = directory / INDEX
    if path.exists():
        return read_file(path, damage)
    parts = part_names(directory)
    if not parts:
        raise InputError(explain_missing(directory))
    from ckpt8.container.collecting import join  # needs numpy, which takes its time

    return join(directory, {name: read_file(directory / name, damage) for name in parts}, rank)


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
    optimizers: dict[tuple[str, bool], int] = {}
    for file, manifest in manifests:
        _add(joined, file, manifest, shapes, optimizers)
    return joined


def _add(
    joined: Manifest,
    file: str,
    own: Manifest,
    shapes: Mapping[str, Sequence[int]],
    optimizers: dict[tuple[str, bool], int],
) -> None:
    """Add the manifest of one file.

    ``optimizers`` are the numbers of optimizers, by their place and by whether momentum counts them.
    """
    first = len(joined.storages)
    names, places, tensors = dict[int, str](), dict[int, str](), dict[int, str]()
    for piece in own.slices:
        tensor = own.tensors[piece.tensor]
        place = places[tensor.storage] = box_text(piece.offsets, tensor.shape, shapes.get(piece.name, tensor.shape))
        tensors[piece.tensor] = names[tensor.storage] = piece.name + place
    # Many records share one configuration.
    configs = {id(record.codec): record.codec for record in own.storages}
    configs |= {id(pack.codec): pack.codec for pack in own.packs}
    codecs = {key: _shifted(config, first) for key, config in configs.items()}
    packs = {
        pack: replace(
            pack,
            name=f"{file}:{pack.name}",
            codec=codecs[id(pack.codec)],
            storages=[index + first for index in pack.storages],
        )
        for pack in own.packs
    }
    joined.packs += packs.values()
    joined.storages += [
        replace(
            record,
            name=names.get(index) or f"{file}:{record.name}",
            codec=codecs[id(record.codec)],
            pack=None if record.pack is None else packs[record.pack],
        )
        for index, record in enumerate(own.storages)
    ]
    joined.tensors += [
        replace(tensor, name=tensors.get(at, f"{file}:{tensor.name}"), storage=tensor.storage + first)
        for at, tensor in enumerate(own.tensors)
    ]
    joined.members += [
        replace(
            member,
            path=file if len(own.members) == 1 else f"{file}/{member.path}",
            skeleton=member.skeleton + first,
            segments=[[offset, storage + first] for offset, storage in member.segments],
            crc_fields=[[offset, storage + first] for offset, storage in member.crc_fields],
        )
        for member in own.members
    ]
    for record in own.parameters:
        storage, steps = min(record.moments.values(), default=-1), record.steps
        if steps is not None:
            # Groups of one optimizer that are counted by momentum have a number of their own.
            home = names.get(storage, "").partition(_STATE)[0], "momentum" in steps
            weight = steps.get("weight_storage")
            steps = steps | {
                "optimizer": optimizers.setdefault(home, len(optimizers)),
                "weight_storage": weight + first if isinstance(weight, int) else None,
            }
        name = _PLACE.sub("", record.name) + places.get(storage, "")
        moments = {slot: index + first for slot, index in record.moments.items()}
        joined.parameters.append(replace(record, name=name, moments=moments, steps=steps))


def _shifted(config: dict[str, Any], first: int) -> dict[str, Any]:
    """A stored configuration with the numbers of storages in the joined manifest."""
    shifted = dict(config)
    for name in codec_class(config["id"]).companions:
        value = config.get(name)
        if isinstance(value, int):
            shifted[name] = value + first
        elif isinstance(value, (list, tuple)):  # row and column statistics, and the size of matrices
            shifted[name] = [value[0] + first, value[1] + first, *value[2:]]
    if "runs" in config:
        shifted["runs"] = [[None if run[0] is None else run[0] + first, *run[1:]] for run in config["runs"]]
    return shifted


_MANY = 1 << 16
"""Slices that may be named before it is known that files hold as many."""


class JoinedReader(Closing):
    """The containers of all ranks, in the order of the index, in which storages are numbered.

    Opening it checks seals, and that containers and index state the same slices, which make up every tensor. Raises
    InputError that names the file and the tensor.

    Without ``strict`` the containers may be damaged; ``unread`` says why some cannot be read, by their names, and
    ``damage`` which files of the index do not match their checksums. Which slices and chunks are lost the caller finds
    out. InputError then means that the index cannot be read, or names slices that do not make up their tensor.
    """

    def __init__(self, path: Path, *, strict: bool = True) -> None:
        self.damage: dict[str, str] = {}
        self.path, self.index = path, read_index(path, damage=None if strict else self.damage)
        self.by_name: dict[str, ContainerReader] = {}
        self.unread: dict[str, str] = {}
        with ExitStack() as stack:
            pool = FilePool()
            stack.callback(pool.close)
            for name, seal in self.index.files.items():
                try:
                    self.by_name[name] = reader = self._open(path / name, seal, pool, strict=strict)
                    stack.callback(reader.close)
                except InputError as exc:
                    if strict:
                        raise
                    self.unread[name] = exc.problem.removeprefix(f"{path / name}: ")
            self.readers = list(self.by_name.values())
            self.slices = {name: slices_of(reader.manifest) for name, reader in self.by_name.items()}
            self.objects = {name: objects_of(reader.manifest) for name, reader in self.by_name.items()}
            self._check_tensors()
            if strict:
                self._check_files()
            self._resources = stack.pop_all()

    @staticmethod
    def _open(path: Path, seal: str, pool: FilePool, *, strict: bool) -> ContainerReader:
        if not path.exists():
            advice = f", and {INDEX} names it; copy the directory again" if strict else ""
            raise InputError(f"{path}: is missing{advice}")
        reader = ContainerReader(path, pool=pool) if strict else DamagedContainer(path, pool=pool)
        if reader.seal.hex() != seal:
            # Values of two saves would make a checkpoint that never was.
            reason = "" if strict else ", or its end is damaged"
            raise InputError(f"{path}: belongs to another save than the {INDEX} beside it{reason}")
        return reader

    def close(self) -> None:
        """Close all files."""
        self._resources.close()

    def _check_tensors(self) -> None:
        """Raise InputError where the index names more slices than files can hold, or tensors that are not covered."""
        # A few numbers of the index say very many: no list of them is made that the files do not bear out.
        named = sum(len(tensor.layout) for tensor in self.index.tensors.values() if tensor.is_whole)
        held = sum(map(len, self.slices.values()))
        if named > _MANY + 2 * held * (1 + len(self.unread)):
            files = "the files that are left" if self.unread else "its files"
            raise InputError(f"{self.path / INDEX}: names {named} slices, and {files} hold {held}")
        for name, tensor in self.index.tensors.items():
            tensor.check_cover(f"{self.path / INDEX}: {shown(name)}")

    def _check_files(self) -> None:
        """Raise InputError unless the index and the files name the same slices and values."""
        stated = {name: set(slices) for name, slices in self.slices.items()}
        values = list(self.index.objects.items())
        for name, tensor in self.index.tensors.items():
            for box in tensor.boxes():
                if (value := tensor.pickled(box)) is not None:
                    values.append((name, value))
                    continue
                record = self.slices[box.file].get((name, box.offsets))
                if problem := slice_problem(self.by_name[box.file].manifest, record, tensor, box):
                    part = shown(name + box_text(box.offsets, box.sizes, tensor.shape))
                    raise InputError(f"{self.path / box.file}: {part}: {problem}")
                stated[box.file].discard((name, box.offsets))
        for name, value in values:
            record = self.objects[value.file]
            if record is None or value.start + value.length > record.numel:
                raise InputError(f"{self.path / value.file}: ends before {shown(name)}, which {INDEX} names")
        for file, unknown in stated.items():
            for key in unknown:
                require(
                    self._is_replica(file, key),
                    f"{self.path / file}: has a slice of {shown(key[0])} that {INDEX} does not name",
                )

    def _is_replica(self, file: str, key: SliceKey) -> bool:
        """Whether the index names the same elements in another file: ranks may keep copies of what all have.

        Ranks that saved on their own may have cut their copies otherwise.
        """
        tensor = self.index.tensors.get(key[0])
        record = self.slices[file][key]
        if tensor is None or len(record.shape) != len(tensor.shape):
            return False
        if self.index.joined:
            return all(at + size <= whole for at, size, whole in zip(key[1], record.shape, tensor.shape, strict=True))
        return 0 in record.shape or any(
            (box.offsets, box.sizes) == (key[1], tuple(record.shape))
            for box in tensor.overlapping(key[1], record.shape)
        )

    @property
    def size(self) -> int:
        """Bytes of all files."""
        index = sum((self.path / name).stat().st_size for name in self._names() if _is_index(name))
        return index + sum(reader.size for reader in self.readers)

    @cached_property
    def manifest(self) -> Manifest:
        """The manifests of all files as one, with the names of the whole state dict."""
        joined = join_manifests(
            self.path.resolve().name,
            [(name, reader.manifest) for name, reader in self.by_name.items()],
            {name: tensor.shape for name, tensor in self.index.tensors.items()},
        )
        joined.stored_nbytes = self.size
        return joined

    @cached_property
    def _firsts(self) -> list[int]:
        """The number of the first storage of each file, and that of all storages."""
        return list(accumulate((len(reader.manifest.storages) for reader in self.readers), initial=0))

    @cached_property
    def _first_of(self) -> dict[str, int]:
        return dict(zip(self.by_name, self._firsts, strict=False))

    def storage_of(self, name: str, box: Slice) -> int:
        """The number that the storage of a slice has in ``manifest``."""
        return self._first_of[box.file] + self.slices[box.file][name, box.offsets].storage

    def codec(self, storage: int) -> Codec:
        """The codec of a storage, with the numbers that its companions have here. Raises UnsupportedError."""
        return codec_from_config(self.manifest.storages[storage].codec)

    def decode_chunk(self, storage: int, chunk: int, out: Array) -> Arrays:
        """Decode one chunk into ``out``, by the container that holds the storage. Returns its parts."""
        at = bisect_right(self._firsts, storage) - 1
        return self.readers[at].decode_chunk(storage - self._firsts[at], chunk, out)

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
    tensor = next((tensor for tensor in manifest.tensors if tensor.name == OBJECTS), None)
    is_sound = tensor and tensor.dtype is DType.UINT8 and not tensor.offset and not tensor.flags
    return tensor if is_sound else None


def _is_index(name: str) -> bool:
    return name == INDEX or is_part(name)


Stored = ContainerReader | JoinedReader


def is_stored(path: Path) -> bool:
    """Whether ckpt8 wrote what is at ``path``; False where it cannot be read."""
    return is_container(path) or find_sharded(path) is not None


def open_stored(path: Path) -> Stored:
    """Open a container, or a directory of those of ranks. Raises InputError."""
    if (directory := find_sharded(path)) is not None:
        return JoinedReader(directory)
    refuse_directory(path)
    return ContainerReader(path)


def containers_of(stored: Stored) -> list[ContainerReader]:
    """The containers, of one or of all ranks."""
    return stored.readers if isinstance(stored, JoinedReader) else [stored]
