"""Reader of the files of ``torch.save`` since 1.6: a zip file of a pickle and one uncompressed record per storage."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence

from ckpt8.checkpoint.readers.entries import check_shares, refuse_buckets
from ckpt8.checkpoint.readers.pickle.inert_pickle import load_pickle
from ckpt8.checkpoint.readers.pickle.torch_rules import TorchCalls
from ckpt8.checkpoint.readers.zip_directory import (
    END_BYTES,
    END_SIGNATURE,
    LOCAL_SIGNATURE,
    NO_COMMENT,
    STORED,
    StorageTable,
    ZipEntry,
    find_prefix,
    longest_pickle,
    read_directory,
    read_end_records,
)
from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, check_depth
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import SourceFile, crc32
from ckpt8.core.text import shown

MAX_SMALL_RECORD_BYTES = 64 * 2**20
"""The longest record besides storages whose CRC the reader checks."""
_PICKLE_MARK = b"/data.pkl"


def sniff(file: SourceFile) -> bool:
    """Whether this is a zip file with a ``data.pkl``, or one too damaged to tell: ``read`` says why."""
    if file.source.length < len(LOCAL_SIGNATURE) or file.read(0, len(LOCAL_SIGNATURE)) != LOCAL_SIGNATURE:
        return False
    try:
        end = read_end_records(file)
    except InputError:
        return True
    return _PICKLE_MARK in file.read(end.offset, end.size)


def read(file: SourceFile, calls: TorchCalls | None = None) -> OpenCheckpoint:
    """The structure of the file. ``calls`` judge what ``torch.load`` would do with it.

    Raises InputError when it is damaged, UnsupportedError for TorchScript or compression.
    """
    entries = read_directory(file)
    prefix = find_prefix(file, entries)
    if calls is not None:
        _check_for_torch(file, entries)
    records = {entry.name.removeprefix(prefix): entry for entry in entries if entry.name.startswith(prefix)}
    if "constants.pkl" in records or any(name.startswith("code/") for name in records):
        raise UnsupportedError(
            f"{file.source}: a TorchScript archive; save the state dict of the model with torch.save instead"
        )
    _check_byte_order(file, records)
    table = StorageTable(f"{file.source}: data.pkl")
    pickle = _read_stored(file, records["data.pkl"], longest_pickle(file))
    names: set[str] = set()
    tree = load_pickle(
        io.BytesIO(pickle), len(pickle), table.label, table.load, names=names, stored=file.stored, calls=calls
    )
    check_depth(tree, table.label)
    if table.declared and calls is None:
        check_shares(tree, names, str(file.source))
        refuse_buckets(tree, str(file.source))
    known = {"data.pkl", *(f"data/{key}" for key in table.declared)}
    for name, entry in records.items():
        if name not in known and entry.method == STORED and entry.size <= MAX_SMALL_RECORD_BYTES:
            _read_stored(file, entry, MAX_SMALL_RECORD_BYTES)
    return OpenCheckpoint("torch-zip", file, _storages(file, table, records), tree, names)


def _check_for_torch(file: SourceFile, entries: Sequence[ZipEntry]) -> None:
    """Raise InputError where torch's own zip library could read another pickle than this reader, or inflate a record.

    That library ignores the case of names, and takes the last signature of an end record, even one in a comment.
    """
    end = file.read(file.source.length - END_BYTES, END_BYTES)
    if not (end.startswith(END_SIGNATURE) and end.endswith(NO_COMMENT)):
        raise InputError(f"{file.source}: a zip file with a comment, which torch.save never writes")
    if len({entry.name.lower() for entry in entries}) < len(entries):
        raise InputError(f"{file.source}: a zip file with records that only differ in case, which torch takes for one")
    for entry in entries:
        _require_stored(file, entry)


def _check_byte_order(file: SourceFile, records: Mapping[str, ZipEntry]) -> None:
    order = _read_stored(file, records["byteorder"], len("little")) if "byteorder" in records else b"little"
    if order == b"big":
        raise UnsupportedError(f"{file.source}: saved on a big-endian machine; load and save it again with torch")
    if order != b"little":
        raise InputError(f"{file.source}: record byteorder holds {shown(order)}, expected 'little'")


def _read_stored(file: SourceFile, entry: ZipEntry, limit: int) -> bytes:
    """The content of a small record, with its CRC checked. Raises InputError."""
    _require_stored(file, entry)
    if entry.size > limit:
        raise InputError(f"{file.source}: record {shown(entry.name)} has {entry.size} bytes, more than {limit}")
    content = file.read(entry.data_offset, entry.size)
    # 0 is what torch writes when set_crc32_options switched CRCs off.
    if entry.crc32 and crc32(content) != entry.crc32:
        raise InputError(f"{file.source}: record {shown(entry.name)} is damaged: its CRC does not match")
    return content


def _require_stored(file: SourceFile, entry: ZipEntry) -> None:
    if entry.method != STORED:
        raise UnsupportedError(
            f"{file.source}: zip record {shown(entry.name)} is compressed; "
            f"load the file with torch.load and write it again with torch.save"
        )


def _storages(file: SourceFile, table: StorageTable, records: Mapping[str, ZipEntry]) -> Sequence[StorageInfo]:
    """The storages that the pickle names, in the order of the file. Raises InputError where one is missing."""
    storages = []
    for key in table.declared:
        entry = records.get(f"data/{key}")
        if entry is None:
            raise InputError(f"{file.source}: storage {shown(key)} is named in data.pkl but missing from the file")
        _require_stored(file, entry)
        stated = entry.crc32 != 0 or entry.size == 0
        storages.append(
            StorageInfo(
                key=key,
                dtype=table.dtype_for(key, entry.size),
                offset=entry.data_offset,
                nbytes=entry.size,
                crc32=entry.crc32 if stated else None,
                crc_fields=entry.crc_fields if stated else (),
            )
        )
    return sorted(storages, key=lambda storage: (storage.offset, storage.key))
