"""The manifest of a ``.ckpt8``, everything but the planes: its records.

That of a delta has a record of its base, the container that it is a difference to.

Symbols are integers from 0 on, mostly small. zstd spends at least a bit on a byte, so several share one; and the lowest
bits of large ones are noise, which goes past zstd. A symbol s is

    bits plane      its lowest ``bits`` bits, 0 to 7 of them; x is the rest, s >> bits
    raw planes      the ``raw`` lowest bytes of x, 0 to 2 of them, a plane each; none where there are bits
    digits          min(x >> 8 raw, base - 1): a digit; so many of them share a byte, the first one as its lowest digit
    over planes     what x >> 8 raw has above base - 1, in ``over`` bytes; all zero where it has less

The planes are, in this order, digits, over planes, raw planes, both with the most significant byte first, and the bits
plane. There are always four; those that a mode does not use are empty. In the bits plane of n symbols, those whose
number is i modulo m = ceil(n / 8) make an integer of 8 ``bits`` bits, the first one as its lowest; its byte k is at
k m + i. The symbol ``top`` stands for -1: it is one more than the largest of the chunk, or 0, and all others are stored
as s + 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

from ckpt8.codecs import BUDGETED, RELATIONS, codec_from_config
from ckpt8.container.header import (
    BITS_VERSION,
    BUDGET_VERSION,
    CHAIN_VERSION,
    DIRECTORY_VERSION,
    FILE_VERSION,
    MOMENTUM_VERSION,
    REFERENCE_VERSION,
    SHARED_VERSION,
)
from ckpt8.container.steps import added, error_in_words, step_facts
from ckpt8.core.json_text import Fields, as_count, as_object, as_text, below, or_null
from ckpt8.core.summary import Summarised, shrunk
from ckpt8.core.tensors import DType, PartSpec, Role, Strided, TensorSpec
from ckpt8.core.text import counted, listed, size

MOST_LINKS = 255
"""The most containers below a delta."""

SEAL = re.compile(r"[0-9a-f]{64}")
"""The hexadecimal digits of a seal."""

MAX_PATH_BYTES = 4096
"""The longest path that systems take."""


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """The base of a container; the place of a container and its links count from the key, which has none.

    ``seal`` identifies the base and ``key`` the first container of the chain, both in hexadecimal digits. ``path`` is
    that of the base, relative to the folder of the container, with slashes. ``place`` is the number of the container in
    its chain, and ``links`` that of the containers below it.
    """

    seal: str
    path: str
    key: str
    place: int
    links: int


def read_base(fields: Fields) -> BaseRecord | None:
    """The record at ``base``; None without one. Raises InputError."""
    stored = fields.read("base", or_null(as_object))
    if stored is None:
        return None
    base = fields.nested(stored)
    record = base.record(
        BaseRecord,
        {"seal": as_text, "path": as_text, "key": as_text, "place": as_count, "links": below(MOST_LINKS + 1)},
    )
    for name, is_sound in (
        ("seal", SEAL.fullmatch(record.seal)),
        # One that can be looked for below or beside a folder.
        (
            "path",
            0 < len(record.path.encode()) <= MAX_PATH_BYTES and record.path[0] != "/" and "\0" not in record.path,
        ),
        ("key", SEAL.fullmatch(record.key)),
        ("links", record.links),
        ("place", record.place >= record.links),
    ):
        base.require(is_sound, name)
    return record


PLANES = 4
"""Planes of a chunk, the empty ones among them."""

DIGITS = {3: 5, 6: 3, 16: 2, 256: 1}
"""The digits in a byte, by base."""

SYMBOL_LIMIT = 1 << 20
"""Symbols are below it, and so is the one that stands for -1."""

LANES = 8
"""The symbols whose bits make one integer of the bits plane."""

NO_TOP = -1
MOST_RAW, MOST_BITS = 2, 7


class Mode(NamedTuple):
    """How the symbols of one chunk are packed. ``top`` is NO_TOP where none of them is -1."""

    raw: int
    base: int
    over: int
    top: int
    bits: int = 0

    @classmethod
    def of(cls, value: Any) -> Mode:
        """The mode that a manifest states. Raises TypeError or ValueError for anything else."""
        raw, base, over, top, *rest = value
        if any(type(number) is not int for number in value):
            raise TypeError
        if (
            (rest and (len(rest) > 1 or raw or not 0 < rest[0] <= MOST_BITS))
            or base not in DIGITS
            or not 0 <= raw <= MOST_RAW
            or not 0 <= over < PLANES - raw - len(rest)
            or not NO_TOP <= top < SYMBOL_LIMIT
        ):
            raise ValueError
        return cls(raw, base, over, top, *rest)

    @property
    def stated(self) -> tuple[int, ...]:
        """What a manifest states: no bits where there are none."""
        return self if self.bits else self[:-1]

    @property
    def largest(self) -> int:
        """The largest symbol that its planes may hold."""
        return self.top if self.top > 0 else SYMBOL_LIMIT - 1

    def plane_lengths(self, numel: int) -> list[int]:
        """The bytes of each plane of ``numel`` symbols."""
        lengths = [-(-numel // DIGITS[self.base]), *[numel] * (self.over + self.raw)]
        if self.bits:
            lengths.append(self.bits * -(-numel // LANES))
        return lengths + [0] * (PLANES - len(lengths))


class Packing(NamedTuple):
    """The mode and the number of the symbols that a row of planes holds."""

    mode: Mode
    numel: int

    @property
    def plane_lengths(self) -> list[int]:
        """The bytes of each plane."""
        return self.mode.plane_lengths(self.numel)


def planes(part: PartSpec) -> int:
    """Frames that one chunk of a part takes: one for each byte of its elements, some of them empty for symbols."""
    return PLANES if part.is_symbols else part.dtype.itemsize


FILE, SYMLINK, DIRECTORY = "file", "symlink", "directory"
"""Formats of members that are no checkpoints: plain bytes, the target of a link, an empty directory."""

DCP = "dcp"
"""Format of the files of a distributed checkpoint, which only their ``.metadata`` explains."""

SKELETON = "ckpt8.skeleton"
"""Name of the record that holds the bytes of a member outside its storages, behind its path in a directory."""

SHARED = "shared/1"
"""The codec in the record of a pack: a reader of earlier versions refuses it."""


DELTA = "delta/1"
"""The codec in the record of a difference: as ``SHARED``."""

MOST_DIMS = 64
"""The most dimensions of a slice; torch has no tensors of more."""


@dataclass(slots=True)
class FrameTable:
    """Stored length and crc32 of every frame of a part, ordered by chunk, then plane.

    ``modes`` says how the symbols of every chunk are packed; it is empty for other parts.
    """

    lengths: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)
    modes: list[Mode] = field(default_factory=list)

    @property
    def has_bits(self) -> bool:
        """Whether a chunk has bits that go past zstd, which earlier versions do not know."""
        return any(mode.bits for mode in self.modes)

    def add(self, frames: Iterable[tuple[bytes | memoryview, int]], packing: Packing | None) -> None:
        """Add a chunk: the stored bytes and the crc32 of each of its frames, and how its symbols are packed."""
        for frame, crc in frames:
            self.lengths.append(len(frame))
            self.crcs.append(crc)
        if packing is not None:
            self.modes.append(packing.mode)


@dataclass(slots=True)
class StorageRecord:
    """One stored run of elements: a storage of the source, or the skeleton of a member.

    ``codec`` is the stored configuration. ``reason`` says why it is lossless where its role would not ask for it.
    ``error`` holds the fields of ``error_stats.WeightError`` or ``error_stats.MomentError``. A storage in a ``pack``
    has no parts of its own; ``place`` is its number there. ``base`` is the index of the storage in the base that its
    parts are differences to.
    """

    name: str
    dtype: DType
    numel: int
    role: Role
    codec: dict[str, Any]
    reason: str | None = None
    parts: dict[str, FrameTable] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    pack: Pack | None = None
    place: int = 0
    base: int | None = None

    @property
    def spec(self) -> TensorSpec:
        """The specification of all its elements, flat."""
        return TensorSpec(self.name, self.role, self.dtype, (self.numel,))

    @property
    def nbytes(self) -> int:
        """Size in the source, in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def is_reference(self) -> bool:
        """Whether this is the rounded copy of masters that are storages of their own."""
        return self.codec.get("id") in dict(RELATIONS)

    @property
    def stored_bytes(self) -> int:
        """Size in the container, in bytes; in a pack its share of that by elements."""
        return self.share(self.pack.stored_bytes) if self.pack else sum(_sizes(self.parts).values())

    @property
    def part_bytes(self) -> dict[str, int]:
        """Size in the container of every part, in bytes; as ``stored_bytes``."""
        return (
            {part: self.share(nbytes) for part, nbytes in self.pack.part_bytes.items()}
            if self.pack
            else _sizes(self.parts)
        )

    def share(self, nbytes: int) -> int:
        """The share of ``nbytes`` of its pack. Those of all storages of a pack add up."""
        starts = self.pack.starts if self.pack else [0, 1]
        first, stop, numel = starts[self.place], starts[self.place + 1], starts[-1]
        return nbytes * stop // numel - nbytes * first // numel if numel else 0


@dataclass(eq=False)
class Pack:
    """Small storages that share the entries of a container: one behind the other, encoded alike.

    ``name`` is how its entries begin, ``storages`` are the indices of its storages and ``starts`` the first element of
    each, and the number of all.
    """

    name: str
    dtype: DType
    role: Role
    codec: dict[str, Any]
    storages: list[int] = field(repr=False)
    starts: list[int] = field(repr=False)
    parts: dict[str, FrameTable] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """Elements of all its storages."""
        return self.starts[-1]

    @property
    def spec(self) -> TensorSpec:
        """The specification of all its elements."""
        return TensorSpec(self.name, self.role, self.dtype, (self.numel,))

    @property
    def numels(self) -> Iterator[int]:
        """The elements of each storage."""
        return (stop - start for start, stop in pairwise(self.starts))

    @property
    def part_bytes(self) -> dict[str, int]:
        """Size in the container of every part, in bytes."""
        return _sizes(self.parts)

    @cached_property
    def stored_bytes(self) -> int:
        """Size in the container, in bytes."""
        return sum(self.part_bytes.values())


def _sizes(parts: dict[str, FrameTable]) -> dict[str, int]:
    return {part: sum(table.lengths) for part, table in parts.items()}


@dataclass(slots=True)
class TensorRecord(Strided):
    """A strided view of a storage; ``offset`` and ``stride`` in elements of ``dtype``.

    ``flags`` are ``conj`` and ``neg``: the values are the conjugate, or the negative, of what is stored.
    """

    name: str
    storage: int
    dtype: DType
    offset: int
    shape: list[int]
    stride: list[int]
    flags: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ParameterRecord:
    """The moments of one parameter, and their error in update space.

    ``rule`` is how the optimizer makes a step of its state; None where that is unknown, and ``reason`` says why.
    ``steps`` holds the number of its ``optimizer``, its ``weight_storage`` or None, and the fields of
    ``error_stats.StepError``.
    """

    name: str
    moments: dict[str, int]
    rule: dict[str, Any] | None = None
    reason: str | None = None
    error: dict[str, Any] | None = None
    steps: dict[str, Any] | None = None


@dataclass(slots=True)
class SliceRecord:
    """The part of a distributed tensor that a tensor of this container is, by its index.

    ``name`` is that of the whole tensor; the part begins at ``offsets`` and has the shape of the tensor here.
    """

    name: str
    tensor: int
    offsets: list[int]


@dataclass(slots=True)
class MemberRecord:
    """One source file. ``segments`` are [offset, storage] in order; all other bytes are its skeleton.

    ``path`` is relative to the source directory, with slashes, or the name of the source where that was one file.
    ``crc_fields`` are [offset, storage]: where the source repeats the crc32 of a storage.
    """

    path: str
    format: str
    size: int
    skeleton: int
    segments: list[list[int]]
    crc_fields: list[list[int]]


@dataclass(slots=True, repr=False)
class Manifest(Summarised):
    """The records of a container. ``slab`` and ``frame`` count elements; ``directory`` names a source directory.

    ``budget`` holds the fields of ``compressing.policy.Budget``, None without one. ``base`` is that of a delta.
    ``earlier`` is the error of what was compressed, where that came from another lossy container: its ``steps``, or
    None where they are unknown.
    ``key_reason`` says why a new file is none although a base was looked for; it is not stored. ``stored_nbytes`` are
    the bytes of the container; None for one that is not written yet.
    """

    writer: str
    preset: str
    rules: list[str]
    slab: int
    frame: int
    members: list[MemberRecord] = field(default_factory=list)
    storages: list[StorageRecord] = field(default_factory=list)
    tensors: list[TensorRecord] = field(default_factory=list)
    parameters: list[ParameterRecord] = field(default_factory=list)
    directory: str | None = None
    packs: list[Pack] = field(default_factory=list)
    budget: dict[str, float] | None = None
    earlier: dict[str, float | None] | None = None
    base: BaseRecord | None = None
    slices: list[SliceRecord] = field(default_factory=list)
    key_reason: str | None = field(default=None, compare=False)
    stored_nbytes: int | None = field(default=None, init=False, compare=False)

    def _summary(self) -> Iterator[tuple[str, str]]:
        name = self.directory or listed((member.path for member in self.members), 1)
        yield "Manifest", f"{name}, {counted(len(self.tensors), 'tensor')}"
        yield "size", size(self.nbytes) if self.stored_nbytes is None else shrunk(self.nbytes, self.stored_nbytes)
        yield "made with", f"preset {self.preset}" + (f", budget {self.budget['steps']:g}" if self.budget else "")
        yield "error", error_in_words(self._step_figures())
        yield "base", self.base.path if self.base else self.key_reason or ""

    @property
    def nbytes(self) -> int:
        """The bytes of the original."""
        return sum(member.size for member in self.members)

    @property
    def ratio(self) -> float | None:
        """How many times smaller than the original the container is; None for one that is not written yet."""
        return self.nbytes / self.stored_nbytes if self.stored_nbytes else None

    @property
    def error_in_steps(self) -> float | None:
        """The error in steps of the optimizer; None where it was not measured, 0.0 where every tensor is exact.

        Errors of earlier compressions are added: it is then an upper bound.
        """
        figures = self._step_figures()
        return added(figures["steps"] if figures else 0.0, self.earlier)

    @property
    def expected_drift(self) -> tuple[float, float] | None:
        """From where to where the loss of a resumed run is expected to drift; None where nothing is known of it.

        Some runs drift further where ``repr`` says ``or more``.
        """
        figures = self._step_figures()
        drift = figures["drift"] if figures else {"low": 0.0, "high": 0.0}
        return None if drift is None else (drift["low"], drift["high"])

    @property
    def is_lossy(self) -> bool:
        """Whether any tensor comes back with other values."""
        return any(codec_from_config(record.codec).measured_as is not None for record in self.storages)

    @property
    def stated_as_earlier(self) -> dict[str, float | None] | None:
        """What a container that is made of the decoded values states as ``earlier``; None where they are exact."""
        return {"steps": self.error_in_steps} if self.is_lossy or self.earlier is not None else None

    def _step_figures(self) -> dict[str, Any] | None:
        """The figures in steps; None where every tensor is exact."""
        facts = step_facts(self, lambda names: len(list(names)))
        return facts if facts and (facts["changed"]["of"] or self.earlier is not None) else None

    @property
    def version(self) -> str:
        """The lowest format version that covers the content."""
        owners: list[StorageRecord | Pack] = [*self.storages, *self.packs]
        ids = {record.codec.get("id") for record in self.storages}
        needs = {
            MOMENTUM_VERSION: "lattice/2" in ids,
            BITS_VERSION: self.slices or any(table.has_bits for own in owners for table in own.parts.values()),
            CHAIN_VERSION: self.base,
            BUDGET_VERSION: self.budget or ids & {*dict(BUDGETED), "reference/2"},
            SHARED_VERSION: self.packs or "reference16/1" in ids,
            REFERENCE_VERSION: any(record.is_reference for record in self.storages),
            DIRECTORY_VERSION: self.directory is not None,
        }
        return next((version for version, is_needed in needs.items() if is_needed), FILE_VERSION)


def original_name(manifest: Manifest) -> str:
    """The name of the original file or directory, as the container states it: any text."""
    return manifest.members[0].path if manifest.directory is None else manifest.directory
