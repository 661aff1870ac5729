"""The safetensors header of a ``.ckpt8``: reserved before the first byte of data, filled in and padded at the end.

    u64 little-endian length of the header | JSON padded with spaces | data

safetensors demands that the entries cover the data without holes or overlaps, in any order of keys; ckpt8 writes and
reads them in the order of their offsets. Every entry has dtype U8.

A storage lies in chunks of 2^20 elements, slabs of whole chunks, and one entry for each part and slab. The manifest is
JSON in one frame of zstd, and the seal a SHA-256 of header and manifest. All of it is read without torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from operator import eq, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import zstandard

from ckpt8.codecs import Codec
from ckpt8.core.errors import DamagedError, InputError, UnsupportedError, require
from ckpt8.core.files.source_file import ByteRange, SourceFile, open_range
from ckpt8.core.json_text import FREE, MANIFEST_COST, cost, parse_json
from ckpt8.core.tensors import PartSpec, TensorSpec

if TYPE_CHECKING:
    from ckpt8.container.manifest import StorageRecord

MAX_HEADER = 100_000_000
"""safetensors' own limit in bytes."""

LENGTH_BYTES = 8
FORMAT_KEY = "ckpt8"
MAJOR = 1
"""A reader refuses another major version. A higher minor version adds codecs, modes of symbols and fields; a reader
may ignore the fields."""

FILE_VERSION, DIRECTORY_VERSION, REFERENCE_VERSION, SHARED_VERSION = (f"{MAJOR}.{minor}" for minor in range(4))
BUDGET_VERSION, CHAIN_VERSION, BITS_VERSION, MOMENTUM_VERSION = (f"{MAJOR}.{minor}" for minor in range(4, 8))
"""A writer states the lowest version that covers the content of the container."""

MANIFEST = "ckpt8.manifest"
SEAL = "ckpt8.seal"
SEAL_BYTES = 32
METADATA = "__metadata__"
"""The key of a safetensors header that is no tensor."""
HEAD_BYTES = 4096
"""Bytes at the start of a file that show whether it is a container."""

CONTAINER = ".ckpt8"
TORCH = (".pt", ".pth", ".bin", ".ckpt")
SAFETENSORS = ".safetensors"
SUFFIXES = (*TORCH, SAFETENSORS)
"""The suffixes of checkpoint files."""

_BEGINNING = b'{"__metadata__":{"format":"ckpt8","ckpt8":"'
"""What a header begins with."""
_MOST_DAMAGED = 4
"""So many bytes of it may be damaged. The header of another safetensors file differs in more."""

_WIDEST_OFFSET = 10**16 - 1


class Entry(NamedTuple):
    """One named run of bytes; ``start`` and ``stop`` count from the end of the header."""

    name: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


def is_container(path: Path) -> bool:
    """Whether a file begins as a ``.ckpt8`` does; False where it cannot be read."""
    with suppress(OSError):
        if path.is_file():
            with path.open("rb") as file:
                return begins_container(file.read(HEAD_BYTES))
    return False


def is_meant_as_container(path: Path) -> bool:
    """Whether a file is a container, or by its suffix should be one: what is damaged is named as such."""
    return path.suffix == CONTAINER or is_container(path)


def container_names(name: str) -> tuple[str, str]:
    """The names that the container of a file or directory may have without being told: short and long."""
    return Path(name).with_suffix(CONTAINER).name, name + CONTAINER


def begins_container(head: bytes) -> bool:
    """Whether the first HEAD_BYTES of a file are those of a ``.ckpt8``, of which a few may be damaged."""
    begins = head[LENGTH_BYTES : LENGTH_BYTES + len(_BEGINNING)]
    if sum(map(eq, begins, _BEGINNING)) >= len(_BEGINNING) - _MOST_DAMAGED:
        return True
    return begins[:1] == b"{" and f'"{FORMAT_KEY}":'.encode() in head


def render_safetensors(header: Mapping[str, object], size: int | None = None, *, ascii_only: bool = True) -> bytes:
    """The length field and a safetensors header, padded with spaces to ``size`` bytes, or to a multiple of 8.

    Raises ValueError where it does not fit, UnicodeEncodeError for a name that is not valid.
    """
    text = json.dumps(header, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    size = -(-len(text) // 8) * 8 if size is None else size
    if len(text) > size:
        raise ValueError("the header does not fit the room reserved for it")
    return size.to_bytes(LENGTH_BYTES, "little") + text.ljust(size)


def tensor_entry(dtype: str, shape: Iterable[int], start: int, stop: int) -> dict[str, object]:
    """The header entry of a tensor; ``start`` and ``stop`` count from the end of the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


_WIDEST_ENTRY = len(
    json.dumps(tensor_entry("U8", [_WIDEST_OFFSET], _WIDEST_OFFSET, 2 * _WIDEST_OFFSET), separators=(",", ":"))
) + len(",:")
"""Bytes of the longest entry besides its name."""


def render(entries: Iterable[Entry], size: int | None, version: str) -> bytes:
    """The length field and the header of a ``.ckpt8``, padded to the reserved ``size``."""
    tensors = {entry.name: tensor_entry("U8", [entry.nbytes], entry.start, entry.stop) for entry in entries}
    return render_safetensors({METADATA: {"format": FORMAT_KEY, FORMAT_KEY: version}, **tensors}, size)


def reserved_size(names: Iterable[str]) -> int:
    """Bytes that a header for entries of these names needs at most, a multiple of 8."""
    empty = len(json.dumps({METADATA: {"format": FORMAT_KEY, FORMAT_KEY: FILE_VERSION}}, separators=(",", ":")))
    return -(-(empty + sum(map(reserved_entry, (*names, MANIFEST, SEAL)))) // 8) * 8


def reserved_entry(name: str) -> int:
    """Bytes that the entry of this name takes in a header at most."""
    return _WIDEST_ENTRY + len(json.dumps(name))


def parse_safetensors(text: bytes, where: str) -> tuple[object, dict[str, Any]]:
    """The metadata of a safetensors header, empty without any, and its entries by name. Raises InputError."""
    header = parse_json(text, where)
    if not isinstance(header, dict):
        raise InputError(f"{where}: its header is not an object; it is damaged")
    return header.pop(METADATA, {}), header


def check_version(text: object, where: str) -> None:
    """Raise UnsupportedError for a format version that this reader does not know."""
    require(
        str(text).partition(".")[0] == str(MAJOR),
        f"{where}: is ckpt8 format {text}; this version reads format {MAJOR}",
        UnsupportedError,
    )


def _entries(header: Mapping[str, Any], where: str) -> Iterator[Entry]:
    """The entries in the order of the header. Some thousands: a match of patterns takes five times as long."""
    for name, value in header.items():
        try:
            start, stop = value["data_offsets"]
            is_sound = type(start) is type(stop) is int and 0 <= start <= stop
            is_sound = is_sound and value == tensor_entry("U8", [stop - start], start, stop)
        except (TypeError, KeyError, ValueError):
            is_sound = False
        if not is_sound:
            raise InputError(f"{where}: header entry {name[:80]!r} is malformed")
        yield Entry(name, start, stop)


def parse(text: bytes, data_bytes: int, where: str, unreadable: str) -> list[Entry]:
    """The entries in the order of their offsets. Raises InputError unless they tile ``data_bytes`` exactly.

    Its text is ``unreadable`` where the header is none of ckpt8.
    """
    try:
        metadata, header = parse_safetensors(text, where)
    except InputError as exc:
        raise InputError(unreadable) from exc
    if not isinstance(metadata, Mapping) or FORMAT_KEY not in metadata:
        raise InputError(unreadable)
    check_version(metadata[FORMAT_KEY], where)
    entries = sorted(_entries(header, where), key=itemgetter(1, 2))
    position = 0
    for entry in entries:
        if entry.start != position:
            raise InputError(f"{where}: header entry {entry.name[:80]!r} leaves a hole or overlaps another")
        position = entry.stop
    require(
        position == data_bytes,
        f"{where}: holds {data_bytes} bytes of data, the header describes {position}; copy or download it again",
    )
    return entries


class Head(NamedTuple):
    """The entries but manifest and seal, the stored manifest, and the offset that entries count from."""

    entries: list[Entry]
    manifest: bytes
    data_start: int


def read_head(file: SourceFile, where: str) -> Head:
    """The head of a container, once header and manifest match the seal.

    Raises InputError, DamagedError where only the manifest is readable.
    """
    try:
        return _read_head(file, where)
    except UnsupportedError:
        raise
    except InputError as exc:
        if any(_is_manifest(stored, file.source.length) for _, stored in frames_at_end(file)):
            raise DamagedError(*exc.args) from exc
        raise


def _read_head(file: SourceFile, where: str) -> Head:
    size = file.source.length
    first = file.read(0, min(HEAD_BYTES, size))
    unreadable = f"{where}: {'' if begins_container(first) else 'is not a ckpt8 file, or '}its first bytes are damaged"
    length = int.from_bytes(first[:LENGTH_BYTES], "little")
    require(2 <= length <= min(MAX_HEADER, size - LENGTH_BYTES), f"{unreadable}, or it is cut off")
    head = file.read(0, LENGTH_BYTES + length)
    start = len(head)
    entries = parse(head[LENGTH_BYTES:], size - start, where, unreadable)
    require(
        [entry.name for entry in entries[-2:]] == [MANIFEST, SEAL], f"{where}: does not end in a manifest and a seal"
    )
    manifest, seal = entries[-2:]
    stored = file.read(start + manifest.start, manifest.nbytes)
    require(
        file.read(start + seal.start, seal.nbytes) == hashlib.sha256(head + stored).digest(),
        f"{where}: header or manifest does not match the seal; the file is damaged",
    )
    return Head(entries[:-2], stored, start)


def holds_seal(path: Path, seal: str) -> bool:
    """Whether a file states this seal, in hexadecimal digits, and its header and manifest match it.

    Most files are told by their last bytes, and no more of them is read.
    """
    if stated_seal(path) == seal:
        with suppress(InputError), closing(open_range(ByteRange.of(path))) as file:
            read_head(file, str(path))
            return True
    return False


def stated_seal(path: Path) -> str | None:
    """The last bytes of a container, which should be its seal, in hexadecimal digits; None for any other file."""
    if is_container(path):
        with suppress(OSError), path.open("rb") as file:
            file.seek(-SEAL_BYTES, 2)
            return file.read().hex()
    return None


FRAME = 1 << 20
"""Elements of a storage that one frame covers."""

MAX_WINDOW = 1 << 24
"""The most bytes that the decoder of a zstd frame keeps."""

SLAB = 1 << 24
"""Elements in a slab unless the header would grow past the limit of safetensors."""

PACK = 1 << 16
"""The most elements of all storages that share entries: what one damaged frame can lose of them."""


def chunk_count(numel: int) -> int:
    """Number of chunks of a storage."""
    return -(-numel // FRAME)


def chunk_spec(spec: TensorSpec | StorageRecord, chunk: int) -> TensorSpec:
    """The specification of one chunk of a storage: FRAME elements, the last one fewer."""
    return TensorSpec(spec.name, spec.role, spec.dtype, (min(FRAME, spec.numel - chunk * FRAME),))


def slab_chunks(numel: int, slab: int) -> list[range]:
    """The chunks of every slab, in order."""
    total, step = chunk_count(numel), slab // FRAME
    return [range(first, min(first + step, total)) for first in range(0, total, step)]


def entry_name(storage: str, part: str, slab: int, slabs: int) -> str:
    """Name of the entry of one part of one slab; the number is left out where there is only one slab."""
    return f"{storage}/{part}" if slabs == 1 else f"{storage}/{part}@{slab}"


def pack_entry(pack: str, part: str) -> str:
    """Name of the entry of one part of a pack. Names of other entries have a slash behind that of their storage."""
    return f"{pack}:{part}"


def pack_layout(codec: Codec, spec: TensorSpec, numels: Iterable[int]) -> dict[str, tuple[PartSpec, list[int]]]:
    """For each part of a pack its specification, and the first element of every storage in it and the number of all.

    ``spec`` gives role and element type. A storage is encoded on its own; the parts follow each other.
    """
    parts = codec.layout(spec._replace(shape=(0,)))
    sizes: dict[int, list[int]] = {}
    starts: list[list[int]] = [[0] for _ in parts]
    for numel in numels:
        if numel not in sizes:
            sizes[numel] = [part.numel for part in codec.layout(spec._replace(shape=(numel,))).values()]
        for bounds, size in zip(starts, sizes[numel], strict=True):
            bounds.append(bounds[-1] + size)
    return {
        name: (part._replace(numel=bounds[-1]), bounds)
        for (name, part), bounds in zip(parts.items(), starts, strict=True)
    }


def entry_names(codec: Codec, spec: TensorSpec, slab: int) -> list[str]:
    """Names of all entries of a storage in the order in which they are written."""
    slabs = len(slab_chunks(spec.numel, slab))
    return [entry_name(spec.name, part, k, slabs) for k in range(slabs) for part in codec.layout(spec)]


def inflate_plain(stored: bytes, length: int, where: str) -> bytes:
    """The ``length`` bytes of one plane. Raises InputError when the frame does not hold as many."""
    if len(stored) == length:
        return stored
    try:
        declared = zstandard.get_frame_parameters(stored)
        if declared.content_size == length and declared.window_size <= MAX_WINDOW:
            return zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW).decompress(stored)
    except zstandard.ZstdError as exc:
        raise InputError(f"{where}: frame cannot be decompressed: {exc}") from exc
    raise InputError(f"{where}: frame does not declare the {length} bytes it must hold")


_FLOOR = 1 << 20
_RATIO = 64
"""A manifest may inflate to 1 MiB plus 64 times its stored size: most stay below 12."""

_LEVELS = (9, -1, -10, -100, -1000, -10_000, -100_000)
"""Levels of zstd, the best one first. Nearly equal records compress better than a reader accepts."""


def pack_manifest(tree: dict[str, Any], rest: int) -> bytes:
    """The stored manifest of a container of ``rest`` more bytes, as small as a reader accepts it."""
    text = json.dumps(tree, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    costs = cost(text)
    for level in _LEVELS:
        stored = zstandard.ZstdCompressor(level=level).compress(text)
        if len(text) <= _FLOOR + _RATIO * len(stored) and costs <= _allowed(rest + len(stored)):
            break
    return stored


def manifest_text(stored: bytes, where: str) -> bytes:
    """The JSON of a stored manifest. Raises InputError."""
    try:
        declared = zstandard.frame_content_size(stored)
        require(0 <= declared <= _FLOOR + _RATIO * len(stored), f"{where}: manifest declares an implausible size")
        return zstandard.ZstdDecompressor().decompress(stored, max_output_size=declared)
    except zstandard.ZstdError as exc:
        raise InputError(f"{where}: manifest cannot be decompressed: {exc}") from exc


def parse_manifest(text: bytes, size: int, where: str) -> Any:
    """The tree of the JSON of a manifest in a container of ``size`` bytes. Raises InputError."""
    return parse_json(text, f"{where}: manifest", _allowed(size))


def _allowed(size: int) -> int:
    return FREE + MANIFEST_COST * size


def _is_manifest(stored: bytes, size: int) -> bool:
    """Whether a frame holds the JSON of a manifest in a container of ``size`` bytes."""
    with suppress(InputError):
        tree = parse_manifest(manifest_text(stored, ""), size, "")
        return isinstance(tree, dict) and "storages" in tree
    return False


_SEARCHED = 1 << 27
"""Bytes at the end of a file in which to search for the manifest."""
_FRAMES_TRIED = 16


def frames_at_end(file: SourceFile) -> Iterator[tuple[int, bytes]]:
    """Places and bytes of frames of zstd that nothing but a seal follows: the manifest, if that is intact."""
    size = file.source.length
    first = max(0, size - _SEARCHED)
    tail = file.read(first, size - first)
    place = len(tail)
    for _ in range(_FRAMES_TRIED):
        place = tail.rfind(zstandard.FRAME_HEADER, 0, place)
        if place < 0:
            break
        if (stored := frame_at(file, first + place, SEAL_BYTES)) is not None:
            yield first + place, stored


def frame_at(file: SourceFile, place: int, after: int) -> bytes | None:
    """The frame of zstd at ``place``; None if there is none, or more than ``after`` bytes follow."""
    content = file.read(place, min(file.source.length - place, _SEARCHED))
    try:
        stored = content[: _frame_length(content)]
    except zstandard.ZstdError:
        return None
    return stored if len(content) - len(stored) <= after else None


def _frame_length(content: bytes) -> int:
    """Bytes of the zstd frame that ``content`` begins with, without decompressing it. Raises ZstdError."""
    parameters = zstandard.get_frame_parameters(content)
    place, last = zstandard.frame_header_size(content), False
    while not last and place + 3 <= len(content):
        block = int.from_bytes(content[place : place + 3], "little")
        last, is_run, size = bool(block & 1), (block >> 1) & 3 == 1, block >> 3
        place += 3 + (1 if is_run else size)
    return place + 4 * int(parameters.has_checksum)
