"""Edits of what a member is outside of its storages: its pickle, its header, the target of a link.

The edit may change the length. Segments and checksum fields move along, so that the member still is filled exactly.
"""

from __future__ import annotations

import io
import itertools
import json
import random
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import zstandard
from fuzz_bytes import mutate_bytes, mutate_tree, render_json
from fuzz_container import put_frame, put_skeleton, read_skeleton, same_length
from fuzz_manifest import PATHS, Entries, Manifest
from fuzz_pickle import cut_pickles, mutate_pickle, mutate_values
from fuzz_zip import Record, write_zip

_LOCAL_CRC, _CENTRAL_CRC = 14, 16


def edit_skeleton(rng: random.Random, manifest: Manifest, entries: Entries) -> None:
    """Edit one member of a valid container, by the grammar of its format."""
    if not manifest["members"]:  # they are a table
        _edit_in_place(rng, manifest, entries)
        return
    member = rng.choice(manifest["members"])
    skeleton = read_skeleton(manifest, entries, member)
    if skeleton is None:
        return
    edit = _EDITS.get(member["format"], _edit_file)
    edit(rng, manifest, entries, member, skeleton)


def _edit_in_place(rng: random.Random, manifest: Manifest, entries: Entries) -> None:
    """Other values of one length in what no tensor is made of."""
    record = next(each for each in manifest["storages"] if "bytes" in each["parts"] and "shared" not in each)
    put_frame(entries, record, same_length(rng, zstandard.decompress(entries[f"{record['name']}/bytes"])))


def edit_pickle(rng: random.Random, content: bytes) -> bytes:
    """Other values in a pickle, now and then other opcodes."""
    try:
        return mutate_values(rng, content) if rng.random() < 0.8 else mutate_pickle(rng, content)
    except ValueError:
        return mutate_bytes(rng, content)


def edit_header(rng: random.Random, text: bytes) -> bytes:
    """Another header of safetensors, with its length."""
    changed = render_json(rng, mutate_tree(rng, json.loads(text[8:])))
    return struct.pack("<Q", len(changed)) + changed


def _edit_head(
    rng: random.Random, manifest: Manifest, entries: Entries, member: dict[str, Any], skeleton: bytes
) -> None:
    """What lies before the first storage of a file whose storages come last."""
    first = min((place for place, _ in member["segments"]), default=len(skeleton))
    head, rest = skeleton[:first], skeleton[first:]
    if member["format"] == "safetensors":
        new = edit_header(rng, head)
    else:
        pickles, end = cut_pickles(head)
        at = rng.choice((0, 1, 2, 3, 3, 3, 3, 4))
        pickles[at] = edit_pickle(rng, pickles[at])
        new = b"".join(pickles) + end
    for key in ("segments", "crc_fields"):
        member[key] = [[place + len(new) - first, index] for place, index in member[key]]
    put_skeleton(manifest, entries, member, new + rest)


def _edit_zip(
    rng: random.Random, manifest: Manifest, entries: Entries, member: dict[str, Any], skeleton: bytes
) -> None:
    """The pickle of a zip file: its records are laid out anew around the storages."""
    sizes = {index: _size(manifest["storages"][index]) for _, index in member["segments"]}
    source, records, inside = _with_holes(skeleton, member, sizes), [], {}
    with zipfile.ZipFile(io.BytesIO(source)) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<HH", source, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            record = Record(info.filename.encode(), source[start : start + info.file_size])
            inside[len(records)] = [
                (place - start, index)
                for place, index in member["segments"]
                if start <= place < start + max(info.file_size, 1)
            ]
            if inside[len(records)]:
                record.local["crc"] = record.central["crc"] = info.CRC
            records.append(record)
    for record in records:
        if record.name.endswith(b"data.pkl"):
            record.content = edit_pickle(rng, record.content)
    new, with_crc = write_zip(records), {index for _, index in member["crc_fields"]}
    member["segments"], member["crc_fields"], holes = [], [], []
    (central,) = struct.unpack_from("<I", new, len(new) - 6)
    local = 0
    for number, record in enumerate(records):
        start = local + 30 + len(record.name)
        for place, index in inside[number]:
            member["segments"].append([start + place, index])
            holes.append((start + place, sizes[index]))
            if index in with_crc:
                member["crc_fields"] += [[local + _LOCAL_CRC, index], [central + _CENTRAL_CRC, index]]
        local, central = start + len(record.content), central + 46 + len(record.name)
    put_skeleton(manifest, entries, member, _without(new, sorted(holes)))


def _size(record: dict[str, Any]) -> int:
    from ckpt8.core.tensors import DType

    return record["numel"] * DType.from_label(record["dtype"]).itemsize


def _with_holes(skeleton: bytes, member: dict[str, Any], sizes: dict[int, int]) -> bytes:
    """The file with zeros for its storages."""
    source = bytearray(skeleton)
    for place, index in sorted(member["segments"]):
        source[place:place] = bytes(sizes[index])
    return bytes(source)


def _without(source: bytes, holes: list[tuple[int, int]]) -> bytes:
    """The file without the runs (start, length)."""
    edges = [0, *itertools.chain.from_iterable((start, start + length) for start, length in holes), len(source)]
    return b"".join(source[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True))


def _edit_file(
    rng: random.Random, manifest: Manifest, entries: Entries, member: dict[str, Any], skeleton: bytes
) -> None:
    """A link leads elsewhere; a pickle among the plain files gets other values; all else other bytes."""
    if member["format"] == "symlink":
        new = rng.choice((*PATHS, "old/../..", "../" * 20 + "x", "../trainer_state.json/", "./x", "old/./x"))
        content = new.encode("utf-8", "surrogatepass")
    elif member["format"] == "dcp":
        content = mutate_bytes(rng, skeleton)[: len(skeleton)].ljust(len(skeleton), b"\0")
    elif skeleton[:1] == b"\x80":
        content = edit_pickle(rng, skeleton)
    else:
        content = rng.choice((b"", b"x", mutate_bytes(rng, skeleton), skeleton * 2))
    put_skeleton(manifest, entries, member, content)


_EDITS: dict[str, Callable[..., None]] = {
    "torch-zip": _edit_zip,
    "torch-legacy": _edit_head,
    "safetensors": _edit_head,
}
