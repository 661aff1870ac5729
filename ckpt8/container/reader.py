"""Reads a ``.ckpt8``: the seal first, then the manifest, then any chunk of any storage on its own."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.base import Companions, Run
from ckpt8.codecs.rounded_copy import ROUNDED, fill_padding
from ckpt8.container import header, layout
from ckpt8.container.copies import check_companions, check_references
from ckpt8.container.header import Entry
from ckpt8.container.manifest import FrameTable, Manifest, StorageRecord, read_manifest, unpack_manifest
from ckpt8.container.member_layout import check_members
from ckpt8.container.member_paths import check_paths
from ckpt8.core.backend import for_checkpoint
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType, Parts, PartSpec, TensorSpec

if TYPE_CHECKING:
    import torch

_FRAME_RATIO = 1 << 15
"""The most bytes that a zstd frame holds for each stored one: a block of at most 128 KiB takes at least four bytes."""


class _Part(NamedTuple):
    """Where the frames of one part lie: offset in the file, stored length and crc32 of each."""

    offsets: list[int]
    table: FrameTable


class ContainerReader(Closing):
    """An open ``.ckpt8``. Opening verifies the seal and that every frame is where the header says.

    With ``kernels`` numba decodes a large container. That is faster, but takes 100 MB and half a second to start: right
    for a command that reads a checkpoint and ends, wrong for a load before training.
    """

    def __init__(self, path: Path, *, kernels: bool = False) -> None:
        self.path = path
        self._file = SourceFile(ByteRange.of(path))
        self._codecs: dict[int, Codec] = {}
        try:
            entries, stored = self._open_header()
            self.manifest = self._open_manifest(stored)
            self._backend = for_checkpoint(self.manifest.storages) if kernels else "torch"
            self._parts = self._locate({entry.name: entry for entry in entries})
            check_references(self.manifest, self.codec, str(path))
            check_companions(self.manifest, self.codec, str(path))
            check_members(self.manifest, str(path))
            check_paths(self.manifest, str(path))
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._file.source.length

    @property
    def seal(self) -> bytes:
        """The stored SHA-256, which identifies this file."""
        return self._file.read(self.size - header.SEAL_BYTES, header.SEAL_BYTES)

    def _open_header(self) -> tuple[list[Entry], bytes]:
        """The entries, and the stored manifest, once header and manifest match the seal."""
        where, size = str(self.path), self._file.source.length
        if size < header.LENGTH_BYTES + 2:
            raise InputError(f"{where}: is not a ckpt8 file ({size} bytes)")
        length = int.from_bytes(self._file.read(0, header.LENGTH_BYTES), "little")
        if length > min(header.MAX_HEADER, size - header.LENGTH_BYTES):
            raise InputError(f"{where}: is not a ckpt8 file, or is cut off")
        head = self._file.read(0, header.LENGTH_BYTES + length)
        self._data_start = len(head)
        entries = header.parse(head[header.LENGTH_BYTES :], size - len(head), where)
        if [entry.name for entry in entries[-2:]] != [header.MANIFEST, header.SEAL]:
            raise InputError(f"{where}: does not end in a manifest and a seal")
        manifest, seal = entries[-2:]
        stored = self._file.read(self._data_start + manifest.start, manifest.nbytes)
        if self._file.read(self._data_start + seal.start, seal.nbytes) != hashlib.sha256(head + stored).digest():
            raise InputError(f"{where}: header or manifest does not match the seal; the file is damaged")
        return entries[:-2], stored

    def _open_manifest(self, stored: bytes) -> Manifest:
        where = str(self.path)
        manifest = read_manifest(unpack_manifest(stored, self.size, where), where)
        if manifest.frame != layout.FRAME or manifest.slab % layout.FRAME or not manifest.slab:
            raise InputError(f"{where}: manifest is malformed at 'slab'")
        return manifest

    def codec(self, storage: int) -> Codec:
        """The codec of a storage. Raises UnsupportedError."""
        found = self._codecs.get(storage)
        if found is None:
            found = self._codecs[storage] = codec_from_config(self.manifest.storages[storage].codec)
        return found

    def spec(self, storage: int) -> TensorSpec:
        """The specification of a whole storage."""
        record = self.manifest.storages[storage]
        return TensorSpec(record.name, record.role, record.dtype, (record.numel,))

    def chunk_spec(self, storage: int, chunk: int) -> TensorSpec:
        """The specification of one chunk of a storage."""
        return layout.chunk_spec(self.spec(storage), chunk)

    def _locate(self, entries: dict[str, Entry]) -> list[dict[str, _Part]]:
        located = [self._locate_storage(index, entries) for index in range(len(self.manifest.storages))]
        if entries:
            raise InputError(f"{self.path}: holds {next(iter(entries))[:80]!r}, which the manifest does not know")
        return located

    def _locate_storage(self, storage: int, entries: dict[str, Entry]) -> dict[str, _Part]:
        record = self.manifest.storages[storage]
        codec, whole = self.codec(storage), self.spec(storage)
        if not codec.accepts(whole):
            raise InputError(f"{self.path}: {record.name}: {codec.id} does not hold {whole.dtype.label}")
        expected = codec.layout(whole)
        if set(record.parts) != set(expected):
            raise InputError(f"{self.path}: {record.name}: parts do not fit its codec")
        if not expected:
            return {}
        self._check_frame_count(record)
        slabs = layout.slab_chunks(record.numel, self.manifest.slab)
        return {part: self._locate_part(record, part, spec, slabs, entries) for part, spec in expected.items()}

    def _check_frame_count(self, record: StorageRecord) -> None:
        """Bound the work that a declared element count can cause by the frames that are really there."""
        chunks = layout.chunk_count(record.numel)
        if any(len(table.lengths) < chunks for table in record.parts.values()):
            raise InputError(f"{self.path}: {record.name}: has fewer frames than its {record.numel} elements need")

    def _locate_part(
        self, record: StorageRecord, part: str, spec: PartSpec, slabs: list[range], entries: dict[str, Entry]
    ) -> _Part:
        table = record.parts[part]
        # Bound the memory that a declared size can cause by the bytes that are really there.
        if sum(table.lengths) * _FRAME_RATIO < spec.nbytes:
            raise InputError(f"{self.path}: {record.name}: {part!r} cannot hold the {spec.nbytes} bytes it must hold")
        offsets: list[int] = []
        position = 0
        for k, chunks in enumerate(slabs):
            entry = entries.pop(layout.entry_name(record.name, part, k, len(slabs)), None)
            lengths = table.lengths[position : position + len(chunks) * layout.planes(spec)]
            if entry is None or sum(lengths) != entry.nbytes:
                raise InputError(f"{self.path}: {record.name}: frames of {part!r} do not fill their entry")
            start = self._data_start + entry.start
            offsets += [start + before for before in accumulate(lengths[:-1], initial=0)]
            position += len(lengths)
        if position != len(table.lengths):
            raise InputError(f"{self.path}: {record.name}: {part!r} has more frames than elements")
        return _Part(offsets, table)

    def read_parts(self, storage: int, chunk: int, only: Collection[str] | None = None) -> Parts:
        """The parts of one chunk, all or ``only`` some, checked against checksums and declared sizes.

        A reference has one part, its elements, which are rounded from its masters. Raises InputError that names the
        tensor.
        """
        spec, codec = self.chunk_spec(storage, chunk), self.codec(storage)
        if codec.copied is not None:
            return {ROUNDED: self._read_copy(codec.copied.cut(chunk * layout.FRAME, spec.numel), spec.numel)}
        expected = codec.layout(spec)
        wanted = expected if only is None else [part for part in expected if part in only]
        return {part: self._read_part(storage, part, expected[part], chunk) for part in wanted}

    def _read_part(self, storage: int, part: str, spec: PartSpec, chunk: int) -> torch.Tensor:
        from ckpt8.container import frames

        located = self._parts[storage][part]
        count = layout.planes(spec)
        where = f"{self.path}: {self.manifest.storages[storage].name}"
        planes = []
        for k in range(chunk * count, (chunk + 1) * count):
            stored = frames.host_bytes(located.table.lengths[k])
            self._file.read_into(located.offsets[k], frames.bytes_of(stored))
            frames.check(frames.bytes_of(stored), located.table.crcs[k], where)
            planes.append(frames.inflate(stored, spec.nbytes // count, where))
        return frames.decode_part(planes, spec)

    def decode_chunk(self, storage: int, chunk: int, out: torch.Tensor) -> Parts:
        """Decode one chunk into ``out``, a flat contiguous CPU tensor of its elements. Returns its parts."""
        spec = self.chunk_spec(storage, chunk)
        parts, first = self.read_parts(storage, chunk), chunk * layout.FRAME
        companions = self.companions(storage, chunk)
        self.codec(storage).decode(parts, spec, out=out, backend=self._backend, first=first, companions=companions)
        return parts

    def companions(self, storage: int, chunk: int) -> Companions:
        """The decoded chunks of other storages that the codec of a chunk needs. Raises InputError for damage there."""
        needed = self.codec(storage).companion_storages
        return {name: self.read_chunk(other, chunk).float() for name, other in needed.items()}

    def read_chunk(self, storage: int, chunk: int) -> torch.Tensor:
        """One decoded chunk as a new flat CPU tensor. Raises InputError for damage."""
        from ckpt8.container import frames

        spec = self.chunk_spec(storage, chunk)
        out = frames.host_bytes(spec.numel * spec.dtype.itemsize).view(spec.dtype.torch)
        self.decode_chunk(storage, chunk, out)
        return out

    def _read_copy(self, runs: Iterable[Run], numel: int) -> torch.Tensor:
        """The ``numel`` elements of ``runs``, bf16. Raises InputError for damage of a master."""
        from ckpt8.container import frames

        out = frames.host_bytes(numel * DType.BFLOAT16.itemsize).view(DType.BFLOAT16.torch)
        at, last, rounded = 0, (-1, -1), out
        for storage, start, count in runs:
            begin, stop = at, at + count
            if storage is None:
                fill_padding(out[begin:stop], start)
                at = stop
                continue
            while at < stop:
                chunk, into = divmod(start + at - begin, layout.FRAME)
                if (storage, chunk) != last:
                    last, rounded = (storage, chunk), self._rounded_chunk(storage, chunk)
                length = min(stop - at, layout.FRAME - into)
                out[at : at + length] = rounded[into : into + length]
                at += length
        return out

    def _rounded_chunk(self, storage: int, chunk: int) -> torch.Tensor:
        """One chunk of a master rounded to bf16, from its upper parts alone where it has them."""
        from ckpt8.codecs.split24.reference import round_masters

        codec = self.codec(storage)
        if codec.upper_parts:
            return codec.upper(self.read_parts(storage, chunk, codec.upper_parts))
        return round_masters(self.read_chunk(storage, chunk))
