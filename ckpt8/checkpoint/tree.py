"""What every reader gives: storages with their place in the source, and the tree of objects around them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType, Role, Strided


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
    """A storage as the pickle refers to it: a leaf that is not (yet) seen as a tensor.

    ``offset`` and ``numel`` are in elements of ``dtype``; a legacy view storage has a non-zero offset.
    """

    key: str
    dtype: DType
    numel: int
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef(Strided):
    """A strided tensor over a storage. ``offset`` and ``stride`` are in elements of ``dtype``.

    ``conj`` and ``neg``: its values are the conjugate, or the negative, of what the storage holds.
    """

    key: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool = False
    neg: bool = False


@dataclass(slots=True, eq=False)
class Inert:
    """An object whose class was not imported: the name of the class and everything that the file says about it.

    ``args`` is what the class was called with, ``state`` mostly the ``__dict__``, ``items`` and ``pairs`` what a list
    or a dictionary of the class holds. Public as ``ckpt8.Inert``: ``resume`` gives these in the rest of a checkpoint.

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
    _public.__module__ = "ckpt8"  # so that what a user pickles does not depend on where they live
del _public


class Checkpoint(Protocol):
    """An open source. ``tree`` holds dict, list, tuple, scalars, and the types of this module; a set is an Inert."""

    format: str
    size: int
    storages: Sequence[StorageInfo]
    tree: Any

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with source bytes at ``offset``. Thread-safe. Raises InputError."""

    def check_unchanged(self) -> None:
        """Raise InputError when the source changed since it was opened."""


class Reader(Protocol):
    """Recognises and opens one format."""

    id: ClassVar[str]

    def sniff(self, source: ByteRange) -> bool:
        """Whether the content (never the name) is of this format."""

    def open(self, source: ByteRange) -> AbstractContextManager[Checkpoint]:
        """Open it. Raises InputError when it is damaged."""

    def read(self, file: SourceFile) -> Checkpoint:
        """As ``open``, from a file that the caller has opened and closes, and that may only look like one."""


class StatefulDict(dict[Any, Any]):
    """An ``OrderedDict`` or ``defaultdict``. ``state``: attributes such as ``_metadata``, or None."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = None


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor and where it sits. ``name`` is unique in the container; ``whole`` that of what it is a slice of."""

    name: str
    role: Role
    ref: TensorRef
    whole: str | None = None

    @property
    def paths(self) -> tuple[str, ...]:
        """What a rule may call it by."""
        return (self.name,) if self.whole is None else (self.name, self.whole)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A tree of a format that itself tells names and roles, without the prefix of a member.

    ``opaque`` are the keys of storages that something other than a tensor refers to.
    """

    tensors: tuple[NamedTensor, ...]
    opaque: frozenset[str] = frozenset()


def is_dense(ref: TensorRef) -> bool:
    """Whether a tensor's elements fill one run of its storage, each once, in some order of dimensions."""
    expected = 1
    for stride, size in sorted((st, sz) for st, sz in zip(ref.stride, ref.shape, strict=True) if sz != 1):
        if stride != expected:
            return False
        expected *= size
    return True
