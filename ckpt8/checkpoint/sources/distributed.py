"""One checkpoint of torch.distributed.checkpoint as a tree: tensors put together from slices, nested as they were.

``gather`` puts a tensor together from boxes of it in different places, when somebody reads it.

``build_tree`` nests the values again, as the state dict was before torch flattened its names.

Models and optimizers go where a training run saved as one file has them, whether the names came from a nested state
dict, a flattened one, or torchtitan's with the weights at the top.

``ShardedFiles`` are a directory of containers of ranks, as the distributed checkpoint that torch's own writer would
have written. Every container is a file of it, whose slices are decoded when somebody reads them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial, reduce
from math import prod
from operator import getitem
from typing import Any, cast

from ckpt8.checkpoint.readers import torch_zip
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint, DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import (
    GROUPS,
    PARAMETERS,
    STATE,
    KeyPath,
    Metadata,
    Slice,
    StoredTensor,
    nest,
)
from ckpt8.checkpoint.sources.composite import Composite, add_prefix, computed
from ckpt8.checkpoint.sources.stored_member import MemberSource, tensor_of
from ckpt8.checkpoint.tree import (
    Held,
    Labelled,
    OpenCheckpoint,
    StorageInfo,
    TensorRef,
    iter_leaves,
    iter_nodes,
)
from ckpt8.checkpoint.vocabulary import model_path
from ckpt8.container.frames import bytes_of
from ckpt8.container.joined import JoinedReader
from ckpt8.container.manifest import DCP, TensorRecord
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import Place, check_cover
from ckpt8.core.errors import InputError, UnsupportedError, require
from ckpt8.core.files.source_file import ByteRange, Window
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Box, DType, Role, cut_into_boxes, overlap, view_of_box
from ckpt8.core.text import shown
from ckpt8.core.workers import Workers

_INTEGERS = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor: where it begins, and a tensor with its content."""

    offsets: tuple[int, ...]
    ref: TensorRef


def gather(data: Composite, name: str, dtype: DType, shape: tuple[int, ...], parts: Sequence[Part]) -> TensorRef:
    """The tensor made of ``parts``. Raises InputError, with its ``name``, unless they cover each element once."""
    filled = [part for part in parts if part.ref.numel]
    for part in filled:
        data.check_extent(name, part.ref)
    kind = getattr(torch, _INTEGERS[dtype.itemsize])

    def assemble(start: int, stop: int) -> torch.Tensor:
        flat = torch.empty(stop - start, dtype=kind, device="cpu")
        for at, box in cut_into_boxes(shape, start, stop):
            target = flat[at - start : at - start + prod(box[1])].view(box[1])
            for part in filled:
                if (both := overlap(box, (part.offsets, part.ref.shape))) is not None:
                    values = data.elements(_cut(part, both), 0, prod(both[1]))
                    view_of_box(target, both, box[0]).copy_(values.view(kind).view(both[1]))
        return flat

    if prod(shape):
        check_cover(f"{data.label}: {name}", shape, [(part.offsets, part.ref.shape) for part in filled])
        if len(filled) == 1:
            return filled[0].ref
    return computed(data, dtype, shape, assemble)


def gather_box(data: Composite, name: str, dtype: DType, box: Box, parts: Sequence[Part]) -> TensorRef:
    """A box of the tensor made of ``parts``. Raises InputError as ``gather``."""
    inside = []
    for part in parts:
        if (both := overlap(box, (part.offsets, part.ref.shape))) is not None:
            offsets = tuple(at - first for at, first in zip(both[0], box[0], strict=True))
            inside.append(Part(offsets, _cut(part, both)))
    return gather(data, name, dtype, box[1], inside)


def _cut(part: Part, box: Box) -> TensorRef:
    """The tensor with the content of a ``box`` in a part."""
    steps = zip(box[0], part.offsets, part.ref.stride, strict=True)
    start = part.ref.offset + sum((first - at) * stride for first, at, stride in steps)
    return replace(part.ref, offset=start, shape=box[1])


_MODEL, _NAMES = "model", "param_names"


def build_tree(home: DcpCheckpoint, values: Mapping[str, Any], data: Composite) -> dict[str, Any]:
    """The state dict of ``values``, given by name, in the order of the saved state dict.

    Its tensors are those of ``data``. Optimizers have the layout of torch: numbers for parameters, and known names in
    ``param_names``. Raises InputError for names that contradict each other.
    """
    known = home.metadata.paths
    order = [name for name in known if name in values] + [name for name in values if name not in known]
    places = _Places(home)
    top = nest(((name, places.find_path(name), values[name]) for name in order), data.label)
    for path in dict.fromkeys(places.optimizers.values()):
        _rebuild(reduce(getitem, path, cast("Any", top)), data)
    return top


class _Places:
    """Finds the path of each value. ``optimizers`` are the paths of optimizers, by the names that roles give them."""

    def __init__(self, home: DcpCheckpoint) -> None:
        self._metadata, self._roles = home.metadata, home.roles
        self.optimizers: dict[str, KeyPath] = {}
        paths = self._metadata.paths
        flat = [name for name, path in paths.items() if len(path) == 1]
        weights = [name for name in flat if name in home.metadata.tensors and self._roles.role(name) is Role.WEIGHT]
        elsewhere = any(path[0] == _MODEL for path in paths.values())
        self._model_at_top = bool(weights) and not elsewhere and len(flat) < len(paths)

    def find_path(self, name: str) -> KeyPath:
        """The keys that lead to a value."""
        state, option = self._roles.states.get(name), self._roles.options.get(name)
        path, key = self._metadata.paths.get(name, ()), state or option
        if key is not None:
            if key.optimizer not in self.optimizers:
                starts = (path[:k] for k in range(len(path)) if ".".join(map(str, path[:k])) == key.optimizer)
                named = tuple(key.optimizer.split(".")) if key.optimizer else ()
                self.optimizers[key.optimizer] = next(starts, named)
            optimizer = self.optimizers[key.optimizer]
            inside = path[len(optimizer) :]
            if len(inside) > 2 and (inside[1] == key.parameter or type(inside[1]) is int):
                # The path tells which dots separate dictionaries inside a state or a group; the name does not.
                return *optimizer, str(inside[0]), str(inside[1]), *inside[2:]
            return *optimizer, GROUPS if state is None else STATE, key.parameter, key.key
        if self._model_at_top and len(path) == 1 and name in self._metadata.tensors:
            return _MODEL, name
        return path or model_path(name.split(".")) or (name,)


def _rebuild(optimizer: Any, data: Composite) -> None:
    """Give an optimizer a list of groups that list their parameters by number, and key its states by these numbers."""
    states, given = optimizer.get(STATE, {}), optimizer.get(GROUPS, {})
    if type(states) is not dict or type(given) is not dict or not all(type(group) is dict for group in given.values()):
        return
    groups = [*_groups(given, list(states), data)]
    numbers: dict[Any, int] = {}
    for group in groups:
        listed = group[PARAMETERS]
        if listed and all(isinstance(parameter, str) for parameter in listed):
            group.setdefault(_NAMES, list(listed))
            group[PARAMETERS] = [numbers.setdefault(name, len(numbers)) for name in listed]
        elif all(type(parameter) is int for parameter in listed):
            numbers.update((str(parameter), parameter) for parameter in listed)
    optimizer[STATE] = {numbers.get(parameter, parameter): state for parameter, state in states.items()}
    optimizer[GROUPS] = groups


def _groups(
    groups: Mapping[str, Mapping[str, Any]], parameters: list[str], data: Composite
) -> Iterator[dict[str, Any]]:
    """The groups of an optimizer: numbered groups as they are; groups of one parameter, merged where settings agree."""
    numbered = {owner: group for owner, group in groups.items() if isinstance(group.get(PARAMETERS), list)}
    for owner in sorted(numbered, key=lambda owner: (len(str(owner)), str(owner))):
        yield {**numbered[owner], PARAMETERS: list(numbered[owner][PARAMETERS])}
    alike: dict[str, list[str]] = defaultdict(list)
    for owner in (owner for owner in groups if owner not in numbered):
        alike[repr({key: _plain(value, data) for key, value in groups[owner].items()})].append(owner)
    for owners in alike.values():
        yield {**groups[owners[0]], PARAMETERS: owners}
    if not groups and parameters:
        yield {PARAMETERS: parameters}


def _plain(value: Any, data: Composite) -> Any:
    """A setting to compare: its content where it is a tensor of one number, such as a learning rate."""
    if not isinstance(value, TensorRef) or value.numel != 1:
        return value
    return value.dtype, value.shape, bytes(bytes_of(data.elements(value, 0, 1)))


_DEEPEST = 64
"""The deepest nesting of a value that is no tensor."""


def adopt_parts(data: Composite, files: Iterable[DcpMember]) -> dict[str, list[Part]]:
    """The slices of tensors in ``files`` by name; ``data`` takes over the files."""
    parts: dict[str, list[Part]] = defaultdict(list)
    for member in files:
        prefix = f"{member.path}/"
        data.adopt(member.checkpoint, prefix)
        for piece, ref in member.parts:
            if piece.place is not None:
                parts[piece.name].append(Part(piece.place[0], replace(ref, key=prefix + ref.key)))
    return parts


def tree_of(data: Composite, files: Sequence[DcpMember], notes: list[str]) -> dict[str, Any]:
    """The tree of one checkpoint. Leaves out, with a note, a value that is no plain tensor and cannot be read.

    Raises InputError for missing slices, UnsupportedError for a tensor of which only some are plain.
    """
    parts = adopt_parts(data, files)
    home = files[0].home
    if torn := sorted(parts.keys() & home.objects.keys()):
        raise UnsupportedError(
            f"{data.label}: {shown(torn[0])}: only some of its parts are plain tensors; load it with "
            "torch.distributed.checkpoint"
        )
    tensors = {name: tensor for name, tensor in home.metadata.tensors.items() if name not in home.objects}
    values: dict[str, Any] = {
        name: gather(data, shown(name), tensor.dtype, tensor.shape, parts.pop(name, []))
        for name, tensor in tensors.items()
    }
    for name in home.metadata.names:
        if name not in tensors:
            try:
                values[name] = _value(data, home, name)
            except InputError as exc:
                notes.append(f"left out: {str(exc).removeprefix(f'{data.label}: ')}")
    return build_tree(home, values, data)


def _value(data: Composite, home: DcpCheckpoint, name: str) -> Any:
    """A value that is no tensor; ``data`` takes over the tensors in it. Raises InputError."""
    try:
        opened = home.open_value(name)
    except KeyError:
        why = "its file is not there, or it is in parts that only its class can join"
        raise InputError(f"{shown(name)}: {why}") from None
    if any(len(path) > _DEEPEST for path, _ in iter_nodes(opened.tree)):
        raise InputError(f"{shown(name)}: its objects are nested deeper than {_DEEPEST}")
    if not any(True for _ in iter_leaves(opened.tree)):
        return opened.tree
    prefix = f"{name}/value/"
    value = add_prefix(opened.tree, prefix)
    if any(not leaf.key.startswith(prefix) for _, leaf in iter_leaves(value)):
        raise InputError(f"{shown(name)}: an object with tensors in it")
    data.adopt(opened, prefix)
    return value


_NO_FILE = "__0_0.ckpt8"
"""The file that stands for those of a checkpoint that has none, as all of its tensors are without elements."""

OPEN_FILES = 4
"""Containers, or members of one, that are open for decoding at a time; each keeps a decoded chunk."""


class ShardedFiles:
    """Opens the files of a checkpoint."""

    def __init__(self, joined: JoinedReader, workers: Workers) -> None:
        self._joined = joined
        self._member_file = lru_cache(OPEN_FILES)(partial(MemberFile, member=0, workers=workers))
        self._sources = {reader.path.name: self._source(reader) for reader in joined.readers}
        self._offsets = {
            reader.path.name: {storage: offset for offset, storage in reader.manifest.members[0].segments}
            for reader in joined.readers
        }

    def _source(self, reader: ContainerReader) -> MemberSource:
        require(
            len(reader.manifest.members) == 1,
            f"{reader.path}: holds {len(reader.manifest.members)} files, not the state of one rank",
        )
        size = reader.manifest.members[0].size
        return MemberSource(reader, ByteRange(reader.path, 0, size), partial(self._member_file, reader))

    def members(self) -> list[DcpMember]:
        """All files, with the metadata that the plain checkpoint would have."""
        index = self._joined.index
        metadata = Metadata(None, 0, paths=dict(index.paths or {}))
        records: dict[str, list[tuple[Slice, TensorRecord]]] = defaultdict(list)
        values: dict[str, Place] = dict(index.objects)
        torn: set[str] = set()
        for name, tensor in index.tensors.items():
            boxes = tensor.boxes()
            pickled = [place for box in boxes if (place := tensor.pickled(box)) is not None]
            if pickled and len(pickled) < len(boxes):
                raise UnsupportedError(
                    f"{self._joined.path}: {shown(name)}: only some of its parts are plain tensors; load it with "
                    "Ckpt8StorageReader"
                )
            if pickled:
                values[name] = pickled[0]
                torn |= {name} if len(boxes) > 1 else set()
                continue
            metadata.tensors[name] = StoredTensor(tensor.dtype, tensor.shape)
            for box in boxes:
                record = self._joined.slices[box.file][name, box.offsets]
                at = self._offset(box.file, record)
                piece = Slice(name, box.file, at, record.nbytes, (box.offsets, box.sizes), ())
                metadata.slices.append(piece)
                records[box.file].append((piece, record))
            if not boxes:
                nothing = (0,) * len(tensor.shape), tensor.shape
                metadata.slices.append(Slice(name, next(iter(index.files), _NO_FILE), 0, 0, nothing, ()))
        windows = {name: self._window(name, place) for name, place in values.items()}
        for name, window in windows.items():
            path = values[name].file
            metadata.slices.append(Slice(name, path, window.source.offset, window.source.length, None, ()))
        # Only its class can join what torch.save has written in parts.
        home = DcpCheckpoint(metadata, {name: window for name, window in windows.items() if name not in torn})
        members = [self._member(home, reader, records[reader.path.name]) for reader in self._joined.readers]
        if metadata.tensors and not members:
            return [DcpMember(_NO_FILE, Held(b"", DCP, tree=Labelled(())), home=home, parts=[])]
        return members

    def value(self, name: str, place: Place) -> bytes:
        """What torch.save wrote for a value, or for a part of one. Raises InputError where it is damaged."""
        return self._window(name, place).read(0, place.length)

    def open_value(self, name: str, place: Place) -> OpenCheckpoint:
        """The value as a checkpoint of its own. Raises InputError where it is damaged."""
        return torch_zip.read(self._window(name, place))

    def _offset(self, file: str, record: TensorRecord) -> int:
        offset = self._offsets[file].get(record.storage)
        if offset is None:
            raise InputError(f"{self._joined.path / file}: {shown(record.name)}: is in no file of the container")
        return offset

    def _window(self, name: str, place: Place) -> Window:
        """The bytes of a value that torch.save wrote."""
        record = self._joined.objects[place.file]
        assert record is not None  # noqa: S101 - checked when the containers were joined
        start = self._offset(place.file, record) + place.start
        return Window(self._sources[place.file], start, place.length, f"value {shown(name)}")

    def _member(
        self, home: DcpCheckpoint, reader: ContainerReader, records: list[tuple[Slice, TensorRecord]]
    ) -> DcpMember:
        storages: dict[str, StorageInfo] = {}  # tied weights share one
        parts: list[tuple[Slice, TensorRef]] = []
        for piece, record in sorted(records, key=lambda record: record[0].offset):
            stored = reader.manifest.storages[record.storage]
            key = str(record.storage)
            storages[key] = StorageInfo(key, stored.dtype, piece.offset, stored.nbytes)
            ref = tensor_of(reader, record)
            parts.append((piece, ref))
        named = tuple(home.named(piece, ref) for piece, ref in parts)
        checkpoint = OpenCheckpoint(DCP, self._sources[reader.path.name], [*storages.values()], Labelled(named))
        return DcpMember(reader.path.name, checkpoint, home=home, parts=parts)
