"""The content of a checkpoint as readers return it: storages with their places, and the tree of objects around them.

Imports core, and of checkpoint only ``share``.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from ckpt8.checkpoint.share import Share
from ckpt8.core.files.source_file import SourceFile
from ckpt8.core.tensors import DType, Role, Strided, contiguous_stride


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """One storage of the source.

    ``key`` is the reader's name for it, unique in the checkpoint. ``offset`` and ``nbytes`` place its bytes in the
    source. ``crc32`` is the checksum the source states for exactly these bytes, or None. ``crc_fields`` are offsets
    in the source of 4-byte little-endian fields that repeat ``crc32`` and must follow when the bytes change.
    ``dtype`` is the type it was saved with; UINT8 for untyped storages.
    """

    key: str
    dtype: DType
    offset: int
    nbytes: int
    crc32: int | None = None
    crc_fields: tuple[int, ...] = ()


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
    place in a tensor that is spread over ranks, None for a tensor of its own.
    """

    key: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool = False
    neg: bool = False
    share: Share | None = None

    @classmethod
    def whole(cls, key: str, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
        """A contiguous tensor from the start of the storage ``key``."""
        return cls(key, dtype, 0, shape, contiguous_stride(shape))


@dataclass(slots=True, eq=False)
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

    def check_unchanged(self) -> None:
        """Raise InputError when the source changed since it was opened."""


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

    def check_unchanged(self) -> None:
        """Raise InputError when the file changed since it was opened."""
        self.file.check_unchanged()


@dataclass(frozen=True, slots=True)
class Held:
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
    for offset, nbytes in [*sorted((each.offset, each.nbytes) for each in storages), (size, 0)]:
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
