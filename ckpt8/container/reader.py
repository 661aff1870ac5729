"""Reads a ``.ckpt8``: the seal first, then the manifest, then any chunk of any storage on its own."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.base import Companions
from ckpt8.codecs.lossless import RAW_PART
from ckpt8.codecs.rounded_copy import ROUNDED
from ckpt8.container import bases, header, layout
from ckpt8.container.base_record import BaseRecord
from ckpt8.container.copies import check_companions, check_references
from ckpt8.container.copy_reader import read_copy
from ckpt8.container.factored_companions import expanded
from ckpt8.container.head import read_head
from ckpt8.container.header import Entry
from ckpt8.container.links import Base, check_deltas
from ckpt8.container.manifest import Manifest, Pack
from ckpt8.container.manifest_reading import read_manifest
from ckpt8.container.member_layout import check_members
from ckpt8.container.member_paths import check_paths
from ckpt8.container.pack_reader import PackReader
from ckpt8.container.places import Locator, Places
from ckpt8.container.stored_manifest import unpack_manifest
from ckpt8.container.symbol_modes import Packing
from ckpt8.core.backend import for_checkpoint
from ckpt8.core.closing import Closing
from ckpt8.core.collection import without_collection
from ckpt8.core.errors import InputError
from ckpt8.core.files.crc import crc32
from ckpt8.core.files.source_file import ByteRange, FilePool, PooledFile, SourceFile
from ckpt8.core.tensors import DType, Parts, PartSpec, TensorSpec

if TYPE_CHECKING:
    import torch


class ContainerReader(Closing):
    """An open ``.ckpt8``. Opening verifies the seal and that every frame is where the header says.

    With ``kernels`` numba decodes a large container. That is faster, but takes 100 MB and half a second to start: right
    for a command that reads a checkpoint and ends, wrong for a load before training.

    The base of a delta is opened when a part of it is first needed. It is looked for beside the delta, then in
    ``base_dirs``, by default those of ``bases.looked_for_in``. A ``pool`` bounds how many files are open at a time.
    """

    def __init__(
        self,
        path: Path,
        *,
        kernels: bool = False,
        base_dirs: Sequence[Path] | None = None,
        pool: FilePool | None = None,
    ) -> None:
        self.path = path
        self.base_dirs = bases.directories() if base_dirs is None else tuple(base_dirs)
        self._kernels = kernels
        self._base: Base[ContainerReader] | None = None
        self._file = SourceFile(ByteRange.of(path)) if pool is None else PooledFile(ByteRange.of(path), pool)
        self._codecs: dict[int | Pack, Codec] = {}
        self._packs = PackReader(self.pack_codec, self._read_pack_part)
        self._local = threading.local()
        try:
            with without_collection():
                self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        entries, stored = self._open_header()
        self.manifest = self._open_manifest(stored)
        self.backend = for_checkpoint(self.manifest.storages) if self._kernels else "torch"
        self.places = self._locate({entry.name: entry for entry in entries})
        check_references(self.manifest, self.codec, str(self.path))
        check_companions(self.manifest, self.codec, str(self.path))
        check_deltas(self.manifest, self.codec, str(self.path))
        check_members(self.manifest, str(self.path))
        check_paths(self.manifest, str(self.path))
        if (record := self.manifest.base) is not None:
            self._base = Base(self, lambda: self._open_base(self._find_base(record)))

    def close(self) -> None:
        """Close the file, and the files below it."""
        self._file.close()
        if self._base is not None:
            self._base.close()

    def base(self) -> ContainerReader | None:
        """The base of a delta, open; None for other containers. Raises InputError where it is missing or damaged."""
        return None if self._base is None else self._base.reader()

    def _find_base(self, record: BaseRecord) -> Path:
        return bases.find_base(self.path, record, self.base_dirs)

    def _open_base(self, path: Path) -> ContainerReader:
        return ContainerReader(path, kernels=self._kernels, base_dirs=self.base_dirs)

    def links(self) -> list[ContainerReader]:
        """The containers below a delta, open, its base first. Raises InputError where one is missing or damaged."""
        base = self.base()
        return [] if base is None else [base, *base.links()]

    def check_in_place(self) -> None:
        """Raise InputError where its path leads to another file than the open one, or that has changed."""
        self._file.check_in_place()

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
        entries, stored, self._data_start = read_head(self._file, str(self.path))
        return entries, stored

    def _open_manifest(self, stored: bytes) -> Manifest:
        where = str(self.path)
        manifest = read_manifest(unpack_manifest(stored, self.size, where), where)
        if manifest.frame != layout.FRAME or manifest.slab % layout.FRAME or not manifest.slab:
            raise InputError(f"{where}: manifest is malformed at 'slab'")
        return manifest

    def codec(self, storage: int) -> Codec:
        """The codec of a storage. Raises UnsupportedError."""
        record = self.manifest.storages[storage]
        if record.pack is not None:
            return self.pack_codec(record.pack)
        found = self._codecs.get(storage)
        if found is None:
            found = self._codecs[storage] = codec_from_config(record.codec)
        return found

    def pack_codec(self, pack: Pack) -> Codec:
        """The codec of all storages of a pack. Raises UnsupportedError."""
        found = self._codecs.get(pack)
        if found is None:
            found = self._codecs[pack] = codec_from_config(pack.codec)
        return found

    def spec(self, storage: int) -> TensorSpec:
        """The specification of a whole storage."""
        record = self.manifest.storages[storage]
        return TensorSpec(record.name, record.role, record.dtype, (record.numel,))

    def chunk_spec(self, storage: int, chunk: int) -> TensorSpec:
        """The specification of one chunk of a storage."""
        return layout.chunk_spec(self.spec(storage), chunk)

    def _locate(self, entries: dict[str, Entry]) -> dict[int | Pack, Places]:
        """Where all frames lie: by storage, or by pack. Raises InputError."""
        locator = Locator(str(self.path), self._data_start, self.manifest.slab, entries)
        located: dict[int | Pack, Places] = {
            index: locator.storage(record, self.codec(index))
            for index, record in enumerate(self.manifest.storages)
            if record.pack is None
        }
        located.update((pack, locator.pack(pack, self.pack_codec(pack))) for pack in self.manifest.packs)
        if entries:
            raise InputError(f"{self.path}: holds {next(iter(entries))[:80]!r}, which the manifest does not know")
        return located

    def read_parts(
        self, storage: int, chunk: int, only: Collection[str] | None = None, *, reuse: bool = False
    ) -> Parts:
        """The parts of one chunk, all or ``only`` some, checked against checksums and declared sizes.

        A reference has one part more, its elements, which are rounded from its masters. With ``reuse`` symbols are in a
        buffer of this thread, until it reads others so. Raises InputError that names the tensor.
        """
        from ckpt8.container.symbols import unpack_parts

        packed = self.read_packed(storage, chunk, only, reuse=reuse)
        return unpack_parts(*packed, self.where(storage), self.backend, reuse=reuse)

    def read_packed(
        self, storage: int, chunk: int, only: Collection[str] | None = None, *, reuse: bool = False
    ) -> tuple[Parts, dict[str, Packing]]:
        """As ``read_parts``, but for symbols: rows of planes, and how they are packed by name.

        Symbols that a base completes are in no planes.
        """
        record, base = self.manifest.storages[storage], self.base_of(storage)
        if record.pack is not None:
            return self._packs.parts(record, only), {}
        if base is None:
            return self._read_own(storage, chunk, only, reuse=reuse)
        from ckpt8.container.differences import total
        from ckpt8.container.predicted import predicted_parts
        from ckpt8.container.symbols import unpack_parts

        # The parts of all bases first: a chunk then takes the memory of two, however long the chain is.
        below, where = predicted_parts(self.codec(storage), *base, chunk, only), self.where(storage)
        own = unpack_parts(*self._read_own(storage, chunk, only, reuse=True), where, self.backend)
        return total(own, below, where, self.backend), {}

    def base_of(self, storage: int) -> tuple[ContainerReader, int] | None:
        """The base of a storage that is kept as a difference, open, and its index there. Raises InputError."""
        index = self.manifest.storages[storage].base
        return None if index is None or self._base is None else (self._base.reader(), index)

    def _read_own(
        self, storage: int, chunk: int, only: Collection[str] | None, *, reuse: bool
    ) -> tuple[Parts, dict[str, Packing]]:
        """As ``read_packed`` of a storage in no pack, but differences as they are."""
        from ckpt8.container.part_reader import read_part

        spec, codec = self.chunk_spec(storage, chunk), self.codec(storage)
        copied: Parts = {}
        if codec.copied is not None:
            runs = codec.copied.cut(chunk * layout.FRAME, spec.numel)
            copied[ROUNDED] = read_copy(self, runs, spec.numel, codec.copied.rounded_type(spec.dtype))
        expected = codec.layout(spec)
        wanted = expected if only is None else [part for part in expected if part in only]
        places, where = self.places[storage], self.where(storage)
        found = {
            part: read_part(self._file, places.get(part), expected[part], chunk, where, reuse=reuse) for part in wanted
        }
        packings = {part: packing for part, (_, packing) in found.items() if packing is not None}
        return copied | {part: x for part, (x, _) in found.items()}, packings

    def where(self, storage: int) -> str:
        """How messages name a storage."""
        return f"{self.path}: {self.manifest.storages[storage].name}"

    def _read_pack_part(self, pack: Pack, part: str, spec: PartSpec, name: str) -> torch.Tensor:
        """One part of a pack. Raises InputError that names the tensor ``name``, for which it is read."""
        from ckpt8.container import frames
        from ckpt8.container.part_reader import read_part
        from ckpt8.container.symbols import unpack_parts

        if not pack.numel:
            return frames.host_bytes(0).view(spec.dtype.torch)
        where = f"{self.path}: {name}"
        found, packing = read_part(self._file, self.places[pack].get(part), spec, 0, where, reuse=True)
        return unpack_parts({part: found}, {} if packing is None else {part: packing}, where, self.backend)[part]

    def fill_chunk(self, storage: int, chunk: int, out: torch.Tensor) -> None:
        """As ``decode_chunk``, without the parts."""
        record = self.manifest.storages[storage]
        elements = None if record.pack is None else self._packs.elements(record, self.backend)
        if elements is None:
            self.decode_chunk(storage, chunk, out)
        else:
            out.copy_(elements)

    def is_plain(self, storage: int) -> bool:
        """Whether a storage is kept as plain bytes, as skeletons are."""
        record = self.manifest.storages[storage]
        return set(self.places[record.pack or storage]) == {RAW_PART} and record.dtype is DType.UINT8

    def stored_frame(self, owner: int | Pack, part: str, index: int) -> bytes:
        """The stored bytes of one frame of a storage or a pack, checked. Raises InputError. This needs no torch."""
        located = self.places[owner][part]
        stored = self._file.read(located.offsets[index], located.table.lengths[index])
        if crc32(stored) != located.table.crcs[index]:
            name = owner.name if isinstance(owner, Pack) else self.manifest.storages[owner].name
            raise InputError(f"{self.path}: {name}: checksum does not match; the file is damaged")
        return stored

    def check_stored(self) -> None:
        """Read all stored frames. Raises InputError where one does not match its checksum. This needs no torch."""
        for owner, parts in self.places.items():
            for part, place in parts.items():
                for index in range(len(place.offsets)):
                    self.stored_frame(owner, part, index)

    def decode_chunk(self, storage: int, chunk: int, out: torch.Tensor) -> Parts:
        """Decode one chunk into ``out``, a flat contiguous CPU tensor of its elements. Returns its parts.

        Symbols are in a buffer of this thread, until it decodes another chunk.
        """
        spec, first = self.chunk_spec(storage, chunk), chunk * layout.FRAME
        # Companions first: while they are decoded, there are no other parts in memory.
        companions = self.companions(storage, chunk)
        parts = self.read_parts(storage, chunk, reuse=True)
        self.codec(storage).decode(parts, spec, out=out, backend=self.backend, first=first, companions=companions)
        return parts

    def companions(self, storage: int, chunk: int) -> Companions:
        """The decoded chunks of other storages that the codec of a chunk needs. Raises InputError for damage there."""
        found = expanded(self, storage, chunk)
        place, lent = vars(self._local).pop("lent", (None, None))
        for name, other in self.codec(storage).companion_storages.items():
            elements = lent if place == (other, chunk) else self.read_chunk(other, chunk)
            found[name] = elements.float()
        return found

    def lend(self, storage: int, chunk: int, elements: torch.Tensor) -> None:
        """Give this thread the decoded ``elements`` of a chunk: the next one that it decodes may need them."""
        self._local.lent = (storage, chunk), elements

    def read_chunk(self, storage: int, chunk: int) -> torch.Tensor:
        """One decoded chunk as a new flat CPU tensor. Raises InputError for damage."""
        from ckpt8.container import frames

        spec = self.chunk_spec(storage, chunk)
        out = frames.host_bytes(spec.numel * spec.dtype.itemsize).view(spec.dtype.torch)
        self.fill_chunk(storage, chunk, out)
        return out
