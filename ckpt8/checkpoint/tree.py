"""The content of a checkpoint as readers return it: storages with their places, and the tree of objects around them.

Nothing here imports torch, or another module of ``checkpoint``.

``iter_leaves`` and ``iter_nodes`` walk over a tree and give every tensor and storage with the path that leads there.

They are iterative, so that no nesting exhausts the interpreter's stack. They visit every container once: a structure
that refers to itself ends, and one that shares its parts a billion times takes no longer than its size.

``Share`` is the place of a tensor of one rank in a tensor that is spread over several. ``read_scalar`` reads a number
that is kept in a tensor of one element, such as a step; ``read_settings`` reads the plain settings of an optimizer.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from reprlib import recursive_repr
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import SourceFile, read_pieces
from ckpt8.core.tensors import DType, Role, Strided, contiguous_stride
from ckpt8.core.text import box_text, shortened

if TYPE_CHECKING:
    from ckpt8.core.arrays import Array

_LONGEST_REPR = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """Where the tensor of one rank begins in one of the shape ``whole``, which ``ranks`` processes hold together.

    ``copies`` of them hold the same part, None where that is not said. ``rest`` is what else the file says of it, such
    as the mesh of the processes.
    """

    offsets: tuple[int, ...]
    whole: tuple[int, ...]
    ranks: int
    copies: int | None
    rest: Any

    def suffix(self, shape: Sequence[int]) -> str:
        """What a share of that ``shape`` has behind its name, empty where it is all of the tensor."""
        return box_text(self.offsets, shape, self.whole)


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """One storage of the source.

    ``key`` is the reader's name for it, unique in the checkpoint. ``offset`` and ``nbytes`` place its bytes in the
    source. ``crc32`` is the checksum the source states for exactly these bytes, or None. ``crc_fields`` are offsets
    in the source of 4-byte little-endian fields that repeat ``crc32`` and must follow when the bytes change;
    ``zero_fields`` those of fields for a checksum that the source leaves at zero. ``dtype`` is the type it was saved
    with; UINT8 for untyped storages.
    """

    key: str
    dtype: DType
    offset: int
    nbytes: int
    crc32: int | None = None
    crc_fields: tuple[int, ...] = ()
    zero_fields: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage as the pickle refers to it: a leaf of the tree that is no tensor.

    ``offset`` and ``numel`` are in elements of ``dtype``; a legacy view storage has a non-zero offset.
    """

    key: str
    dtype: DType
    numel: int
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef(Strided):
    """A strided tensor over a storage. ``offset`` and ``stride`` are in elements of ``dtype``.

    ``conj`` and ``neg``: its values are the conjugate, or the negative, of what the storage holds. ``share`` is its
    place in a tensor that is spread over ranks, None for a tensor of its own. ``requires_grad``, ``is_parameter`` and
    ``attributes`` (a ``__dict__``, or None) are those of the object that torch makes of it.
    """

    key: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool = False
    neg: bool = False
    share: Share | None = None
    requires_grad: bool = False
    is_parameter: bool = False
    attributes: Any = None

    @classmethod
    def whole(cls, key: str, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
        """A contiguous tensor from the start of the storage ``key``."""
        return cls(key, dtype, 0, shape, contiguous_stride(shape))


@dataclass(slots=True, eq=False, repr=False)
class Inert:
    """An object whose class was not imported: the name of the class and all that the file says about the object.

    ``args`` are the arguments of the class, ``state`` is mostly the ``__dict__``, ``items`` and ``pairs`` are the
    content of a list or a dictionary. Public as ``ckpt8.Inert``: ``resume`` returns these in the rest of a checkpoint.

    >>> ckpt8.Inert("my.Config", args=(3,)).name
    'my.Config'
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)

    @recursive_repr()
    def __repr__(self) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__slots__)
        return shortened(f"Inert({values})", _LONGEST_REPR)


@dataclass(frozen=True, slots=True)
class Global:
    """A class or function by its dotted name. It was not imported. Public as ``ckpt8.Global``.

    >>> ckpt8.Global("torch.float32").name
    'torch.float32'
    """

    name: str


for _public in (Inert, Global):
    _public.__module__ = "ckpt8"  # so that the pickles of a user do not depend on this module's place
del _public


class Checkpoint(Protocol):
    """An open source. ``tree`` holds dict, list, tuple, scalars, and the types of this module; a set is an Inert."""

    @property
    def format(self) -> str:
        """The id of its reader, or another word for what it is."""

    @property
    def size(self) -> int:
        """Bytes of the source."""

    @property
    def storages(self) -> Sequence[StorageInfo]:
        """Its storages with their places."""

    @property
    def tree(self) -> Any:
        """The tree of objects around the storages."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with source bytes at ``offset``. Thread-safe. Raises InputError."""

    def read_each(self, starts: Array, length: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with pieces of ``length`` bytes of one storage, which begin at ``starts``."""

    def check_unchanged(self) -> None:
        """Raise InputError when the source changed since it was opened."""


class ReadsPieces:
    """Base of what reads pieces one by one."""

    __slots__ = ()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """As ``Checkpoint.read_into``."""
        raise NotImplementedError

    def read_each(self, starts: Array, length: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with pieces of ``length`` bytes, which begin at ``starts``."""
        read_pieces(self.read_into, starts, length, buffer)


@dataclass(slots=True)
class OpenCheckpoint:
    """A ``Checkpoint`` of one file; the caller closes the file. A file without ``storages`` is kept as it is.

    ``names`` are the dotted names of all classes and functions in its pickles.
    """

    format: str
    file: SourceFile
    storages: Sequence[StorageInfo] = ()
    tree: Any = None
    names: Collection[str] = ()

    @property
    def size(self) -> int:
        """Length of the file in bytes."""
        return self.file.source.length

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``. Thread-safe. Raises InputError."""
        self.file.read_into(offset, buffer)

    def read_each(self, starts: Array, length: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with pieces of ``length`` bytes, which begin at ``starts``."""
        self.file.read_each(starts, length, buffer)

    def check_unchanged(self) -> None:
        """Raise InputError when the file changed since it was opened."""
        self.file.check_unchanged()


@dataclass(frozen=True, slots=True)
class Held(ReadsPieces):
    """Bytes in memory, as a Checkpoint without storages or a region of one.

    ``origin`` is the file that they come from, if there is one.
    """

    content: bytes
    format: str = "bytes"
    origin: SourceFile | None = None
    storages: Sequence[StorageInfo] = ()
    tree: Any = None

    @property
    def size(self) -> int:
        """Length in bytes."""
        return len(self.content)

    nbytes = size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``."""
        buffer[:] = self.content[offset : offset + len(buffer)]

    def check_unchanged(self) -> None:
        """Raise InputError when the file that they come from changed since it was opened."""
        if self.origin is not None:
            self.origin.check_unchanged()


class Reader(Protocol):
    """A module that recognises and reads one format. The caller opens and closes the file."""

    def sniff(self, file: SourceFile) -> bool:
        """Whether the content (never the name) is of this format. Raises InputError where it cannot be read."""

    def read(self, file: SourceFile) -> OpenCheckpoint:
        """Read the structure. Raises InputError for a damaged file, UnsupportedError for one that it does not read."""


class Size(tuple[int, ...]):
    """A ``torch.Size``, where it matters that it is one; elsewhere a tree has a tuple."""

    __slots__ = ()


class StatefulDict(dict[Any, Any]):
    """An ``OrderedDict`` or ``defaultdict``. ``state``: attributes such as ``_metadata``, or None."""

    state: Any = None


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor and its name, unique in the container. A slice has the name of its tensor as ``whole``."""

    name: str
    role: Role
    ref: TensorRef
    whole: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """The names that a rule may use for it."""
        return (self.name,) if self.whole is None else (self.name, self.whole)


@dataclass(frozen=True, slots=True)
class Labelled:
    """The tree of a format that states names and roles. The names do not begin with the member.

    ``opaque`` are the keys of storages that not only tensors refer to.
    """

    tensors: tuple[NamedTensor, ...]
    opaque: frozenset[str] = frozenset()


def gaps(storages: Iterable[StorageInfo], size: int) -> Iterator[tuple[int, int]]:
    """The runs of the ``size`` bytes of a source outside all storages, in order: offset and length."""
    position = 0
    for offset, nbytes in [*sorted((storage.offset, storage.nbytes) for storage in storages), (size, 0)]:
        if position < offset:
            yield position, offset - position
        position = offset + nbytes


_Run = TypeVar("_Run", bound=tuple[Any, ...])


def cut_by_runs(runs: Sequence[_Run], offset: int, buffer: memoryview) -> Iterator[tuple[_Run, int, memoryview]]:
    """The parts of ``buffer``, which begins at ``offset``, run by run: the run, the offset in it, and the part.

    The first number of a run is the offset where it begins. The runs are in this order.
    """
    while buffer:
        after = bisect_right(runs, offset, key=lambda run: run[0])
        part = buffer if after == len(runs) else buffer[: runs[after][0] - offset]
        yield runs[after - 1], offset - runs[after - 1][0], part
        offset, buffer = offset + len(part), buffer[len(part) :]


def is_dense(ref: TensorRef) -> bool:
    """Whether a tensor's elements fill one run of its storage, each once, in some order of dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(ref.stride, ref.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True


MAX_DEPTH = 1000
MAX_COMPONENT_CHARACTERS = 1024
_LONGEST_PATH = 600
"""Components of a path that its text shows: more than any name keeps."""

Components = tuple[str, ...]
Leaf = TensorRef | StorageRef
Child = tuple[Any, Any]
"""A name, not yet text, and the value under it."""

_LEAVES = frozenset({TensorRef, StorageRef})
_PLAIN_KEYS = frozenset({str, int})
"""Types of keys that nothing lies in; looking at every key in Python would take longer than the walk."""

_CONTAINERS = frozenset({dict, StatefulDict, list, tuple, set, frozenset, Inert})


def format_path(components: Components) -> str:
    """The components joined by ``.``; cuts a very long path. Two paths can have the same text."""
    return ".".join(components[:_LONGEST_PATH])


def iter_leaves(tree: Any, label: str = "checkpoint") -> Iterator[tuple[Components, Leaf]]:
    """Every tensor and storage of ``tree`` in the order of the document, with its path.

    A tensor that several containers hold comes once for each of them; the content of a container comes once, however
    many paths lead to it. Raises InputError that begins with ``label`` for a tree nested deeper than MAX_DEPTH.
    """
    return ((path, node) for path, node in iter_nodes(tree, label) if type(node) in _LEAVES)


def iter_nodes(
    tree: Any,
    label: str = "checkpoint",
    is_leaf: Callable[[Any], bool] | None = None,
    instead: Mapping[int, Any] = MappingProxyType({}),
    leaves: Set[type] = _LEAVES,
) -> Iterator[tuple[Components, Any]]:
    """Every tensor and storage of ``tree`` with its path, and every container that is not empty, before its content.

    Values for which ``is_leaf`` is true come too, without their content. ``instead`` has values to walk by the ``id``
    of those whose place they take. With no types in ``leaves`` only containers come.
    """
    tree = instead.get(id(tree), tree)
    yield (), tree
    seen = {id(tree)}
    frames: list[tuple[Components, Iterator[Child]]] = [((), _children(tree, seen))]
    while frames:
        path, children = frames[-1]
        for name, child in children:
            value = instead.get(id(child), child) if instead else child
            kind = type(value)
            if kind in leaves or (is_leaf is not None and is_leaf(value)):
                yield (*path, _component(name)), value
            elif kind in _CONTAINERS and (value or kind is StatefulDict) and id(value) not in seen:
                if len(frames) >= MAX_DEPTH:
                    raise InputError(f"{label}: its objects are nested deeper than {MAX_DEPTH}")
                seen.add(id(value))
                below = (*path, _component(name))
                yield below, value
                frames.append((below, _children(value, seen)))
                break
        else:
            frames.pop()


def check_depth(tree: Any, label: str) -> None:
    """Raise InputError that begins with ``label`` for a tree nested deeper than MAX_DEPTH."""
    for _ in iter_nodes(tree, label, leaves=frozenset()):
        pass


def _children(node: Any, seen: set[int]) -> Iterator[Child]:
    """The children by name. The parts of an object count as containers: several objects may share them."""
    kind = type(node)
    if kind is dict:
        return iter(node.items()) if _PLAIN_KEYS.issuperset(map(type, node)) else _entries(node.items())
    if kind is StatefulDict:
        return chain(_entries(node.items()), _attributes(node.state, seen))
    if kind is Inert:
        parts = (enumerate(part) for part in (node.args, node.items) if _is_new(part, seen))
        return chain(chain.from_iterable(parts), _entries(node.pairs), _attributes(node.state, seen))
    return enumerate(node) if kind in _CONTAINERS else iter(())


def _is_new(part: Any, seen: set[int]) -> bool:
    is_known = id(part) in seen
    seen.add(id(part))
    return not is_known


def _entries(pairs: Any) -> Iterator[Child]:
    """Values by key. A key can be a tensor itself, as in ``optimizer.state``."""
    for key, value in pairs:
        if type(key) in _LEAVES or type(key) is tuple or type(key) is Inert:
            yield "key", key
        yield key, value


def _attributes(state: Any, seen: set[int]) -> Iterator[Child]:
    """Attributes by name. A state is a ``__dict__``, ``(__dict__, slots)``, or anything else."""
    for part in state if type(state) is tuple and len(state) == 2 else (state,):
        if type(part) is not dict:
            yield "state", part
        elif _is_new(part, seen):
            yield from _entries(part.items())


def _component(name: Any) -> str:
    """A short text for a key. It cuts huge keys: a path is for people, and may not outgrow the file."""
    if type(name) in (str, int, bool, float, type(None), complex):
        text = str(name)
    elif type(name) is bytes:
        text = repr(name[:MAX_COMPONENT_CHARACTERS])
    elif type(name) is tuple:
        parts = ("(...)" if type(part) is tuple else _component(part) for part in name[:8])
        text = f"({','.join(parts)})"
    else:
        text = getattr(name, "name", type(name).__name__)
    return text if len(text) <= MAX_COMPONENT_CHARACTERS else text[:MAX_COMPONENT_CHARACTERS] + "…"


_SCALARS = {
    DType.FLOAT32: "<f",
    DType.FLOAT64: "<d",
    DType.FLOAT16: "<e",
    DType.BFLOAT16: "<f",
    DType.INT32: "<i",
    DType.INT64: "<q",
}


def read_scalar(checkpoint: Checkpoint, storage: StorageInfo, ref: TensorRef) -> float | None:
    """The value of a tensor of one element in ``storage``; None for another tensor or element type."""
    position = ref.offset * ref.dtype.itemsize
    if ref.dtype not in _SCALARS or ref.numel != 1 or position + ref.dtype.itemsize > storage.nbytes:
        return None
    buffer = bytearray(ref.dtype.itemsize)
    checkpoint.read_into(storage.offset + position, memoryview(buffer))
    return number_of(ref.dtype, bytes(buffer))


def number_of(dtype: DType, content: bytes) -> float | None:
    """The value of one element; None for other element types."""
    code = _SCALARS.get(dtype)
    padding = bytes(2) if dtype is DType.BFLOAT16 else b""
    value: float | None = None if code is None else struct.unpack(code, padding + content)[0]
    return value


def read_settings(
    checkpoint: Checkpoint, storages: Mapping[str, StorageInfo], group: Mapping[Any, Any]
) -> Mapping[Any, Any]:
    """``group`` with numbers in place of tensors of one element, alone or in a short list; ``storages`` by key.

    torch keeps a learning rate or betas as tensors where the caller gave tensors.
    """

    def plain(value: Any) -> Any:
        is_known = isinstance(value, TensorRef) and value.key in storages
        number = read_scalar(checkpoint, storages[value.key], value) if is_known else None
        return value if number is None else number

    def setting(value: Any) -> Any:
        return tuple(map(plain, value)) if (isinstance(value, (list, tuple)) and len(value) <= 8) else plain(value)

    return {key: value if key == "params" else setting(value) for key, value in group.items()}


def is_setting(value: object, depth: int = 2) -> bool:
    """Whether a value is a plain setting of an optimizer: a number, a text, None, or a list or tuple of these.

    Lists may hold lists down to a ``depth``: Muon has tuples of coefficients, and a list of a file may hold itself.
    """
    return (
        all(is_setting(item, depth - 1) for item in value)
        if depth and isinstance(value, (tuple, list))
        else isinstance(value, (int, float, str, type(None)))
    )
