"""The ``.metadata`` of torch.distributed.checkpoint: the file, offset and length of every part of every tensor.

It is a plain pickle, which torch loads with the power to run any code. This reader runs none: every class in it must be
on a short list, and every value is checked before use.

``rewritten`` writes the ``.metadata`` anew, with its values and other places for the slices. It turns the inert pickle
that was read into opcodes again. It imports no class, so this torch need not know them.

``nest`` nests values again as they were before torch flattened the names of a state dict.

``DcpRoles`` finds the roles of the values by their names:

    <optimizer>.state.<parameter>.<key>             state of a parameter: get_state_dict, nested or flat; torchtitan
    <optimizer>.state.<key>.<parameter>             the same as Megatron writes it
    <optimizer>.param_groups.<number>.<option>      with the parameters under ``params``
    <optimizer>.param_groups.<parameter>.<option>   flattened: a group for every parameter

Another value is a weight if it lies under a key that names a model, or at the top of the state dict under the dotted
name of a parameter (torchtitan), or if an optimizer has state for it: under its name, or the end of its name.
"""

from __future__ import annotations

import io
import re
import struct
from collections import ChainMap, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ckpt8.checkpoint.readers.entries import DTYPE_NAMES
from ckpt8.checkpoint.readers.inert_pickle import Machine, load_pickle
from ckpt8.checkpoint.readers.rebuild import MAX_DIMS, is_count
from ckpt8.checkpoint.readers.torch_rules import TorchCalls
from ckpt8.checkpoint.tree import Components, Global, Inert, Size, check_depth
from ckpt8.checkpoint.vocabulary import MODEL_KEYS
from ckpt8.container.checks import path_problem
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import box_text, shown
from ckpt8.optim.known_optimizers import MEGATRON_MASTER, STATE_ROLES, state_roles

METADATA = ".metadata"
"""The name of the file."""

MAX_METADATA_BYTES = 256 * 2**20
"""Room for about a million slices."""

ZSTD = "stream.zstd/1"
"""The one transformation of slices that torch itself can apply."""

_MODULE = "torch.distributed.checkpoint.metadata"
_INFO = "torch.distributed.checkpoint.filesystem._StorageInfo"
_PATHS = ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath", "Path")
_MEMORY_FORMAT = f"{_MODULE}._MEM_FORMAT_ENCODING"
_GETATTR = "builtins.getattr"
"""Python 3.11.0 to 3.11.3, such as that of Debian 12, looks up the members of an enumeration by their names."""

ALLOWED = DTYPE_NAMES | frozenset(
    {
        *(
            f"{_MODULE}.{name}"
            for name in (
                "Metadata",
                "TensorStorageMetadata",
                "TensorProperties",
                "ChunkStorageMetadata",
                "BytesStorageMetadata",
                "MetadataIndex",
                "StorageMeta",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        _INFO,
        "torch.Size",
        "torch.serialization._get_layout",
        _GETATTR,
        *(f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in _PATHS),
    }
)
"""The classes and functions that a ``.metadata`` may refer to."""

_LARGEST = 1 << 62
_MEGATRON_BUCKET = re.compile(r"(?:.*\.)?dp_group_idx_\d+(?:\..*)?", re.DOTALL)

Place = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor, in elements by dimension."""


@dataclass(frozen=True, slots=True, eq=False)
class Slice:
    """``length`` bytes of the file ``path`` from ``offset`` on: a part of the tensor ``name``, or a value of that name.

    ``place`` is None where it is no tensor. ``transforms`` are applied to the bytes, the last one first.
    """

    name: str
    path: str
    offset: int
    length: int
    place: Place | None
    transforms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Element type and shape of a whole tensor."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass(slots=True)
class Metadata:
    """The content of a ``.metadata``; ``tree`` is its inert pickle, of ``nbytes`` bytes.

    ``paths`` lead to a value in the state dict that was saved, where the file has them; numbers are places in lists.
    """

    tree: Any
    nbytes: int
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of all values."""
        return list(dict.fromkeys(piece.name for piece in self.slices))

    def suffix(self, piece: Slice) -> str:
        """The place of a part in its tensor, ``[0:64,:]``, to append to the name; empty for a whole tensor."""
        return "" if piece.place is None else box_text(*piece.place, self.tensors[piece.name].shape)

    def is_whole(self, piece: Slice) -> bool:
        """Whether a slice is all of its tensor."""
        return piece.place is not None and piece.place[1] == self.tensors[piece.name].shape


class _Lookups(TorchCalls):
    """Refuses to look up anything but the members of that enumeration."""

    def __init__(self) -> None:
        super().__init__(0, (), ())

    def call(self, function: Any, args: tuple[Any, ...], made: Any, budget: Machine) -> Any:  # noqa: ARG002
        """Raise ValueError for any other lookup; ``made`` as it is."""
        if type(function) is Global and function.name == _GETATTR:
            owner, name = args if len(args) == 2 else (None, None)
            is_format = type(owner) is Global and owner.name == _MEMORY_FORMAT
            if not (is_format and type(name) is str and re.fullmatch("TORCH_[A-Z_]+", name)):
                raise ValueError("it looks up an attribute, which no distributed checkpoint needs; do not load it")
        return made

    def name(self, name: str) -> None:
        """Names are judged when all are known."""

    def build(self, target: Any, state: Any, budget: Machine) -> None:
        """Any state will do."""

    def fill(self, target: Inert) -> None:
        """Any items will do."""


def read_metadata(data: bytes, where: str, stored: int | None = None) -> Metadata:
    """The content of a ``.metadata``. ``stored`` are its bytes on the disk, if they are fewer.

    Raises InputError for damage and for a class that is not allowed, and UnsupportedError for the buckets of Megatron,
    which hide where a parameter begins.
    """
    names: set[str] = set()
    tree = load_pickle(io.BytesIO(data), len(data), where, names=names, stored=stored, calls=_Lookups())
    if foreign := names - ALLOWED:
        raise InputError(
            f"{where}: refers to {shown(min(foreign))}, which no distributed checkpoint needs; do not load it"
        )
    check_depth(tree, where)
    return _Parser(where, Metadata(tree, len(data))).parse()


class _Parser:
    """Fills ``metadata`` with the values of its tree. Raises InputError for damage."""

    def __init__(self, where: str, metadata: Metadata) -> None:
        self._where, self._metadata = where, metadata
        self._chunks: dict[str, dict[tuple[int, ...], tuple[int, ...]]] = {}
        self._seen: set[tuple[str, tuple[int, ...] | None]] = set()

    def _fail(self, what: str) -> InputError:
        return InputError(f"{self._where}: damaged metadata of a distributed checkpoint: {what}")

    def parse(self) -> Metadata:
        """The metadata with all its values."""
        top = self._fields(self._metadata.tree, f"{_MODULE}.Metadata")
        tensors, slices = top.get("state_dict_metadata"), top.get("storage_data")
        if type(tensors) is not dict or type(slices) is not dict:
            raise self._fail("it has no table of values and slices")
        for name, value in tensors.items():
            self._value(name, value)
        self._metadata.slices = [self._slice(index, info) for index, info in slices.items()]
        # The paths that the default planner keeps; other planners have none.
        data = top.get("planner_data")
        self._metadata.paths = {
            name: path
            for name, path in (data.items() if type(data) is dict else ())
            if type(name) is str and type(path) is tuple
            if all(type(part) is str or is_count(part) for part in path) and ".".join(map(str, path)) == name
        }
        return self._metadata

    def _fields(self, node: Any, kind: str) -> Mapping[Any, Any]:
        if type(node) is not Inert or node.name != kind or type(node.state) is not dict:
            raise self._fail(f"something else in place of a {kind.rpartition('.')[2]}")
        return node.state

    def _counts(self, value: Any, what: str) -> tuple[int, ...]:
        if type(value) is not tuple or len(value) > MAX_DIMS or not all(map(is_count, value)):
            raise self._fail(f"{what}: offsets or sizes that are no counts")
        if prod(value) >= _LARGEST:
            raise self._fail(f"{what}: more elements than can be counted")
        return value

    def _value(self, name: Any, value: Any) -> None:
        """Note a tensor with its chunks. Other values say nothing but their class."""
        if type(name) is not str:
            raise self._fail("a name that is no text")
        if _MEGATRON_BUCKET.fullmatch(name):
            raise UnsupportedError(
                f"{self._where}: a torch_dist checkpoint of Megatron with a bucketed optimizer ({shown(name)}); "
                "save it with an optimizer that is sharded by parameter"
            )
        if type(value) is Inert and value.name == f"{_MODULE}.BytesStorageMetadata":
            return
        fields = self._fields(value, f"{_MODULE}.TensorStorageMetadata")
        shape = self._counts(fields.get("size"), shown(name))
        chunks = fields.get("chunks")
        if type(chunks) is not list:
            raise self._fail(f"{shown(name)}: it has no chunks")
        properties = fields.get("properties")
        kind = f"{_MODULE}.TensorProperties"
        state = properties.state if type(properties) is Inert and properties.name == kind else None
        dtype = state[0] if type(state) is tuple and state else None
        if type(dtype) is not Global or dtype.name not in DTYPE_NAMES:
            raise self._fail(f"{shown(name)}: it has no element type")
        self._metadata.tensors[name] = StoredTensor(DType.from_label(dtype.name), shape)
        places = self._chunks[name] = {}
        for chunk in chunks:
            box = self._fields(chunk, f"{_MODULE}.ChunkStorageMetadata")
            start, sizes = (self._counts(box.get(key), shown(name)) for key in ("offsets", "sizes"))
            if not len(start) == len(sizes) == len(shape) or any(
                at + size > whole for at, size, whole in zip(start, sizes, shape, strict=True)
            ):
                raise self._fail(f"{shown(name)}: a chunk reaches out of the tensor")
            if prod(sizes) and prod(known := places.get(start, sizes)) and known != sizes:
                raise self._fail(f"{shown(name)}: two chunks of different sizes at {start}")
            if prod(sizes) or start not in places:
                places[start] = sizes

    def _slice(self, index: Any, info: Any) -> Slice:
        key, entry = self._fields(index, f"{_MODULE}.MetadataIndex"), self._fields(info, _INFO)
        name, start = key.get("fqn"), key.get("offset")
        if type(name) is not str:
            raise self._fail("a slice without a name")
        place = None
        if start is not None:
            start = self._counts(start, shown(name))
            if start not in self._chunks.get(name, {}):
                raise self._fail(f"{shown(name)}: a slice at {start}, where it has no chunk")
            place = start, self._chunks[name][start]
        elif name in self._metadata.tensors:
            raise self._fail(f"{shown(name)}: a slice of a tensor that has no place in it")
        if (name, start) in self._seen:
            raise self._fail(f"{shown(name)}: a slice that is listed twice")
        self._seen.add((name, start))
        path, offset, length = (entry.get(field) for field in ("relative_path", "offset", "length"))
        if type(path) is not str or path_problem(path) is not None or path.rpartition("/")[2] == METADATA:
            raise self._fail(f"{shown(name)}: it lies in {shown(path)}, which is no file of the checkpoint")
        if not is_count(offset) or not is_count(length):
            raise self._fail(f"{shown(name)}: its place in {shown(path)} is no count of bytes")
        transforms = entry.get("transform_descriptors") or []
        if type(transforms) is not list or not all(type(transform) is str for transform in transforms):
            raise self._fail(f"{shown(name)}: its transformations have no names")
        return Slice(name, path, offset, length, place, tuple(transforms))


_GROWTH, _ALLOWANCE = 16, 1 << 16
"""The writer repeats every text in full: a real pickle grows about threefold."""


@dataclass(frozen=True, slots=True)
class _Code:
    """Opcodes, among values that wait to be written."""

    bytes: bytes


def rewritten(metadata: Metadata, places: Mapping[Slice, tuple[int, int]], where: str) -> bytes:
    """The pickle with slices at other ``places`` (offset, length) and without their transformations.

    Raises InputError for a value that torch does not put there.
    """
    state = dict(metadata.tree.state)
    storage_data = {}
    for piece, (index, info) in zip(metadata.slices, state["storage_data"].items(), strict=True):
        offset, length = places.get(piece, (0, 0))
        moved = replace(info, state={"relative_path": piece.path, "offset": offset, "length": length})
        storage_data[_sized(index, "offset")] = moved if piece in places else info
    state["storage_data"] = storage_data
    state["state_dict_metadata"] = {
        name: _sized_tensor(value) if name in metadata.tensors else value
        for name, value in state["state_dict_metadata"].items()
    }
    return _Writer().write(replace(metadata.tree, state=state), where, _GROWTH * metadata.nbytes + _ALLOWANCE)


def _sized(node: Inert, *keys: str) -> Inert:
    """``node`` with every tuple under ``keys`` as the ``torch.Size`` that it was in the file."""
    sizes = {key: Size(node.state[key]) for key in keys if node.state.get(key) is not None}
    return replace(node, state=node.state | sizes)


def _sized_tensor(node: Inert) -> Inert:
    chunks = [_sized(chunk, "offsets", "sizes") for chunk in node.state["chunks"]]
    return _sized(replace(node, state=node.state | {"chunks": chunks}), "size")


class _Writer:
    """Writes one pickle, without recursion: ``_pending`` are the values to come, the next one last."""

    def __init__(self) -> None:
        self._out = bytearray(b"\x80\x04")
        self._memo: dict[str, int] = {}
        self._pending: list[Any] = []
        self._kinds: Mapping[type, Callable[[Any], None]] = {
            type(None): lambda _: self._put(b"N"),
            bool: lambda value: self._put(b"\x88" if value else b"\x89"),
            int: self._int,
            float: lambda value: self._put(b"G" + struct.pack(">d", value)),
            str: lambda value: self._put(_counted(b"X", value.encode("utf-8", "surrogatepass"))),
            bytes: lambda value: self._put(_counted(b"B", value)),
            tuple: lambda value: self._later(_Code(b"("), *value, _Code(b"t")),
            list: lambda value: self._later(_Code(b"]("), *value, _Code(b"e")),
            dict: lambda value: self._later(
                _Code(b"}("), *(part for pair in value.items() for part in pair), _Code(b"u")
            ),
            Size: lambda value: self._later(Global("torch.Size"), tuple(value), _Code(b"\x85R")),
            _Code: lambda value: self._put(value.bytes),
            Global: self._global,
            Inert: self._object,
        }

    def write(self, value: Any, where: str, limit: int) -> bytes:
        """The pickle of one value, of at most about ``limit`` bytes. Raises InputError that begins with ``where``."""
        self._pending.append(value)
        while self._pending:
            item = self._pending.pop()
            if len(self._out) > limit:
                raise InputError(f"{where}: repeats the same values over and over")
            if type(item) not in self._kinds:
                raise InputError(f"{where}: holds a {type(item).__name__}, which cannot be written back")
            self._kinds[type(item)](item)
        return bytes(self._out + b".")

    def _put(self, code: bytes) -> None:
        self._out += code

    def _later(self, *items: Any) -> None:
        self._pending += reversed(items)

    def _int(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self._put(b"J" + struct.pack("<i", value))
        else:
            self._put(_counted(b"\x8b", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)))

    def _global(self, value: Global) -> None:
        module, _, name = value.name.rpartition(".")
        code = b"j" if value.name in self._memo else f"c{module}\n{name}\n".encode() + b"r"
        self._put(code + struct.pack("<I", self._memo.setdefault(value.name, len(self._memo))))

    def _object(self, value: Inert) -> None:
        """An object without a state comes from a call, one with a state from ``__new__`` and BUILD."""
        made = (_Code(b"R"),) if value.state is None else (_Code(b"\x81"), value.state, _Code(b"b"))
        self._later(Global(value.name), value.args, *made)


def _counted(code: bytes, content: bytes) -> bytes:
    return code + struct.pack("<I", len(content)) + content


KeyPath = tuple[str | int, ...]


class _Branch(dict[Any, Any]):
    """A dictionary of the growing tree. No value has this type."""


def nest(values: Iterable[tuple[str, KeyPath, Any]], where: str) -> dict[Any, Any]:
    """The tree of values, given with their names and paths. Numbers are places in lists.

    Raises InputError, opened by ``where``, for a value in another one.
    """
    top = _Branch()
    branches: list[tuple[_Branch, str | int, _Branch]] = []
    for name, path, value in values:
        node = top
        *above, last = path
        for part in above:
            if part not in node:
                node[part] = _Branch()
                branches.append((node, part, node[part]))
            if type(node[part]) is not _Branch:
                raise InputError(f"{where}: {shown(name)} lies inside another value")
            node = node[part]
        if last in node:
            raise InputError(f"{where}: {shown(name)} lies where another value does")
        node[last] = value
    for node, part, branch in reversed(branches):  # from the inside out
        places = range(len(branch))
        node[part] = [branch[k] for k in places] if set(branch) == set(places) else dict(branch)
    return dict(top)


STATE, GROUPS, PARAMETERS = "state", "param_groups", "params"
"""Parts of the names of an optimizer's values; ``params`` is an option of a group."""

_KEY_ROLES: Mapping[str, Role] = ChainMap(STATE_ROLES, {MEGATRON_MASTER: Role.WEIGHT})
_NO_NAMES: Mapping[str, str] = {}
_MAX_COMPONENTS = 64
"""Names of modules have a few components; all behind the 64th count as one."""


@dataclass(frozen=True, slots=True)
class StateKey:
    """A value in the state of a parameter. ``optimizer`` is the path of its optimizer, empty at the top."""

    optimizer: str
    parameter: str
    key: str


class DcpRoles:
    """Roles of all values of one checkpoint.

    ``states`` are the values that are state of a parameter, by name; ``values`` are their names by optimizer and
    parameter, then by key. ``options`` are the options of groups by name, with the number of the group for a parameter,
    or the parameter that has a group of its own.
    """

    def __init__(self, metadata: Metadata) -> None:
        self._metadata = metadata
        self._groups: dict[tuple[str, str], Mapping[str, str]] | None = None
        self._read: dict[int, Mapping[str, Any]] = {}
        self._names = {name: tuple(name.split(".", _MAX_COMPONENTS)) for name in metadata.names}
        self._inside: dict[str, tuple[Components, Components]] = {}
        self._find_optimizers()
        # The parameters that an optimizer has moments of, or a group for, by the path of the optimizer.
        self._owners: dict[Components, set[Components]] = defaultdict(set)
        for optimizer, path in self._inside.values():
            if len(path) > 2 and (path[0] == GROUPS or path[-1] in STATE_ROLES):
                self._owners[optimizer].add(path[1:-1])
        self.states = {name: key for name in self._inside if (key := self._state_key(name)) is not None}
        # Every parameter with the shapes that tensors of its state have.
        self._trained: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self.values: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        for name, key in self.states.items():
            self._trained[key.parameter].update({metadata.tensors[name].shape} if name in metadata.tensors else ())
            self.values[key.optimizer, key.parameter][key.key] = name
        # A state dict of a model: nothing but tensors in one dict, extra states aside.
        self._is_bare = (
            not self._inside
            and all(name in metadata.tensors or "_extra_state" in name for name in self._names)
            and all(len(path) == 1 for path in metadata.paths.values())
        )
        self.options = {
            name: StateKey(".".join(optimizer), ".".join(path[1:-1]), path[-1])
            for name, (optimizer, path) in self._inside.items()
            if path[0] == GROUPS and len(path) > 2
        }

    def _find_optimizers(self) -> None:
        """Split the name of every value inside an optimizer before ``state`` or ``param_groups``."""
        prefixes: set[Components] = set()
        for parts in self._names.values():
            at = next((parts.index(part) for part in (GROUPS, STATE) if part in parts), None)
            if at is not None and (
                parts[at] == GROUPS or parts[-1] in STATE_ROLES or set(parts[at + 1 : at + 2]) & _KEY_ROLES.keys()
            ):
                prefixes.add(parts[:at])
        for name, parts in self._names.items():
            splits = (at for at, part in enumerate(parts[:-1]) if part in (STATE, GROUPS) and parts[:at] in prefixes)
            if (at := next(splits, None)) is not None:
                self._inside[name] = parts[:at], parts[at:]

    def _state_key(self, name: str) -> StateKey | None:
        """The place of a value in an optimizer's state; None for an option of a group, and for other values."""
        optimizer, (kind, *path) = self._inside[name]
        if kind != STATE:
            return None
        ends = (end for end in range(len(path) - 1, 0, -1) if tuple(path[:end]) in self._owners[optimizer])
        if (end := next(ends, None)) is not None:
            return StateKey(".".join(optimizer), ".".join(path[:end]), ".".join(path[end:]))
        is_megatron = len(path) > 1 and path[0] in _KEY_ROLES
        return StateKey(".".join(optimizer), ".".join(path[1:]), path[0]) if is_megatron else None

    def is_inside(self, name: str) -> bool:
        """Whether a value is in an optimizer."""
        return name in self._inside

    def role(self, name: str) -> Role:
        """The role of a tensor."""
        stored = self._metadata.tensors
        if name in self._inside:
            key = self.states.get(name)
            if key is None or key.key in _KEY_ROLES:
                return Role.OTHER if key is None else _KEY_ROLES[key.key]
            # The state of an optimizer without a card.
            values = self.values[key.optimizer, key.parameter].items()
            tensors = [value for value, other in values if other in stored and stored[other].shape]
            return state_roles(tensors).get(key.key, Role.OTHER)
        path = self._metadata.paths.get(name)
        in_model = any(component in MODEL_KEYS for component in (path or self._names[name])[:-1])
        at_top = path is not None and len(path) == 1 and "." in name
        return Role.WEIGHT if in_model or at_top or self._is_trained(name) or self._is_bare else Role.OTHER

    def _is_trained(self, name: str) -> bool:
        """Whether an optimizer has state for it: under its name, or under the end of it and with its shape."""
        parts, stored = self._names[name], self._metadata.tensors.get(name)
        ends = (".".join(parts[at:]) for at in range(1, len(parts)))
        return name in self._trained or any(stored and stored.shape in self._trained.get(end, ()) for end in ends)

    def group(self, key: StateKey, value: Callable[[str], Any]) -> Mapping[str, Any]:
        """The options of the group of a parameter; ``value`` reads one by name."""
        names = self.option_names(key, value)
        if id(names) not in self._read:
            self._read[id(names)] = {option: value(name) for option, name in names.items() if option != PARAMETERS}
        return self._read[id(names)]

    def option_names(self, key: StateKey, value: Callable[[str], Any]) -> Mapping[str, str]:
        """The names of the options of the group of a parameter, by option; empty for a parameter of no group."""
        if self._groups is None:
            self._groups = self._read_groups(value)
        return self._groups.get((key.optimizer, key.parameter), _NO_NAMES)

    def numbers(self, optimizer: str, value: Callable[[str], Any]) -> list[list[int]]:
        """The parameters of every group of an optimizer that numbers them; empty for one that names them."""
        wanted = optimizer, PARAMETERS
        listed = [value(name) for name, key in self.options.items() if (key.optimizer, key.key) == wanted]
        if not all(isinstance(group, list) and all(type(number) is int for number in group) for group in listed):
            return []
        numbers = [number for group in listed for number in group]
        return listed if len(set(numbers)) == len(numbers) else []

    def _read_groups(self, value: Callable[[str], Any]) -> dict[tuple[str, str], Mapping[str, str]]:
        """The names of the options of its group, by optimizer and parameter."""
        options: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
        for name, key in self.options.items():
            options[key.optimizer, key.parameter][key.key] = name
        groups: dict[tuple[str, str], Mapping[str, str]] = {}
        for (optimizer, owner), names in options.items():
            listed = value(names[PARAMETERS]) if PARAMETERS in names else None
            members = listed if isinstance(listed, list) else [owner]
            known = (member for member in members if type(member) is str or is_count(member))
            groups |= {(optimizer, str(member)): names for member in known}
        return groups
