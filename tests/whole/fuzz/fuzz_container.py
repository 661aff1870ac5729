"""Mutations of a ``.ckpt8``: manifest, header, frames and members, sealed again so that they are read."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import struct
import zlib
from functools import lru_cache
from typing import Any

import zstandard
from fuzz_bytes import mutate_bytes, mutate_tree, render_json
from fuzz_pickle import mutate_pickle, opcodes


@lru_cache(maxsize=32)
def unpack(data: bytes) -> tuple[dict[str, Any], dict[str, bytes], dict[str, Any]]:
    """The metadata, the stored bytes of every entry in order, the manifest."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    body = data[8 + length :]
    places = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    entries = {name: body[slice(*entry["data_offsets"])] for name, entry in places}
    entries.pop("ckpt8.seal")
    manifest = json.loads(zstandard.decompress(entries.pop("ckpt8.manifest")))
    return metadata, entries, manifest


def lay_out(metadata: Any, entries: dict[str, bytes], stored: bytes) -> dict[str, Any]:
    """The header for these entries."""
    header, position = {"__metadata__": copy.deepcopy(metadata)}, 0
    for name, content in {**entries, "ckpt8.manifest": stored, "ckpt8.seal": bytes(32)}.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [position, position + len(content)]}
        position += len(content)
    return header


def seal(text: bytes, entries: dict[str, bytes], stored: bytes) -> bytes:
    """A file whose seal is valid."""
    head = struct.pack("<Q", len(text)) + text
    return head + b"".join(entries.values()) + stored + hashlib.sha256(head + stored).digest()


def pack(metadata: Any, entries: dict[str, bytes], manifest: Any) -> bytes:
    """A container of a manifest that is written as it is."""
    stored = zstandard.compress(json.dumps(manifest).encode(), 1)
    return seal(json.dumps(lay_out(metadata, entries, stored)).encode(), entries, stored)


def mutate_container(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """A file with changed bytes, or a changed and sealed one."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data, other)
    metadata, entries, manifest = unpack(data)
    entries = dict(entries)
    kind = rng.randrange(10)
    if kind <= 2:
        manifest, entries = _change_frames(rng, manifest, entries)
    elif kind <= 4:
        manifest, entries = change_skeleton(rng, manifest, entries)
    if kind <= 1 or 5 <= kind <= 7:
        manifest = mutate_tree(rng, copy.deepcopy(manifest))
    stored = zstandard.compress(render_json(rng, manifest) if kind >= 5 else json.dumps(manifest).encode(), 1)
    if kind == 8 or rng.random() < 0.03:
        stored = mutate_bytes(rng, stored)
    header = lay_out(metadata, entries, stored)
    if kind == 9:
        header = mutate_tree(rng, header)
        return seal(render_json(rng, header), entries, stored)
    return seal(json.dumps(header).encode(), entries, stored)


def _change_frames(
    rng: random.Random, manifest: dict[str, Any], entries: dict[str, bytes]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Change the bytes of a frame, with its checksum; now and then it becomes another frame of zstd."""
    manifest = copy.deepcopy(manifest)
    record = rng.choice(manifest["storages"])
    part = rng.choice(list(record["parts"]))
    table, name = record["parts"][part], f"{record['name']}/{part}"
    if not table["lengths"] or name not in entries:
        return manifest, entries
    k = rng.randrange(len(table["lengths"]))
    start = sum(table["lengths"][:k])
    stop = start + table["lengths"][k]
    frame = _other_frame(rng, entries[name][start:stop])
    entries[name] = entries[name][:start] + frame + entries[name][stop:]
    table["lengths"][k], table["crcs"][k] = len(frame), zlib.crc32(frame)
    return manifest, entries


def _other_frame(rng: random.Random, frame: bytes) -> bytes:
    how = rng.randrange(6)
    if how <= 2:
        return mutate_bytes(rng, frame)
    if how == 3:
        return zstandard.ZstdCompressor(write_content_size=rng.random() < 0.7).compress(frame)
    if how == 4:
        return zstandard.compress(bytes(rng.choice((0, 1, 1000, 1 << 20, 1 << 24))))
    return rng.choice(
        (b"", b"\x28\xb5\x2f\xfd", b"\x28\xb5\x2f\xfd\xa0\xff\xff\xff\xff\x01\0\0", b"\x28\xb5\x2f\xfd\x20\x00\x01\0\0")
    )


def change_skeleton(
    rng: random.Random, manifest: dict[str, Any], entries: dict[str, bytes]
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Change the bytes of a member outside its storages without changing their number: all else still fits."""
    manifest = copy.deepcopy(manifest)
    member = rng.choice(manifest["members"])
    content = read_skeleton(manifest, entries, member)
    if content is not None:
        put_skeleton(manifest, entries, member, same_length(rng, content))
    return manifest, entries


def read_skeleton(manifest: dict[str, Any], entries: dict[str, bytes], member: dict[str, Any]) -> bytes | None:
    """The bytes outside the storages; None where they are no single frame."""
    record = manifest["storages"][member["skeleton"]]
    name = f"{record['name']}/bytes"
    if name not in entries or len(record["parts"]["bytes"]["lengths"]) != 1:
        return None
    content = entries[name]
    return content if len(content) == record["numel"] else zstandard.decompress(content)


def put_skeleton(manifest: dict[str, Any], entries: dict[str, bytes], member: dict[str, Any], content: bytes) -> None:
    """Store other bytes as the skeleton of a member, and state their number."""
    record = manifest["storages"][member["skeleton"]]
    member["size"] += len(content) - record["numel"]
    record["numel"] = len(content)
    put_frame(entries, record, content)


def put_frame(entries: dict[str, bytes], record: dict[str, Any], content: bytes) -> None:
    """Store the bytes of a storage as one frame, or as none."""
    frame = zstandard.compress(content, 1)
    frame = frame if len(frame) < len(content) else content
    entries[f"{record['name']}/bytes"] = frame
    record["parts"]["bytes"] = {"lengths": [len(frame)], "crcs": [zlib.crc32(frame)]}
    if not content:
        del entries[f"{record['name']}/bytes"]
        record["parts"]["bytes"] = {"lengths": [], "crcs": []}


def same_length(rng: random.Random, content: bytes) -> bytes:
    """Other bytes in the same place: of the pickle in it, with the checksums that are stated of it, or anywhere."""
    start = content.find(b"\x80\x02")
    if start < 0 or rng.random() < 0.3:
        return mutate_bytes(rng, content)[: len(content)].ljust(len(content), b"\0")
    try:
        old = content[start : len(content) - len(opcodes(content[start:])[-1])]
        new = mutate_pickle(rng, old)[: len(old)]
    except ValueError:  # what begins like a pickle is none
        return mutate_bytes(rng, content)[: len(content)].ljust(len(content), b"\0")
    new = new[:-1].ljust(len(old) - 1, b"N") + b"."
    changed = content[:start] + new + content[start + len(old) :]
    return changed.replace(struct.pack("<I", zlib.crc32(old)), struct.pack("<I", zlib.crc32(new)))
