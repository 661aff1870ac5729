"""Edits of a ``.ckpt8`` whose seal is valid again: blind ones, and by the grammar of its manifest.

A manifest that is edited at random is mostly refused at its first field. By the grammar a field gets what a field of
its kind may hold, so that most edits get past the types and reach what the reader concludes from them.
"""

from __future__ import annotations

import copy
import json
import math
import re
import struct
import zlib

import zstandard
from fuzz_mutations import (
    edit_tree,
    encoded,
    json_value,
    length_of_pickle,
    mutate_bytes,
    mutate_header,
    mutate_pickle,
    mutate_values,
    render_json,
)
from hostile_kit import lay_out, pack, unpack, with_header

from ckpt8.core.tensors import DType

HUGE = 10**400
NUMBERS = (
    -1, 0, 1, 2, 3, 7, 31, 32, 33, 63, 64, 255, 256, 2**20 - 1, 2**20, 2**20 + 1, 2**24, 2**31 - 1, 2**31, 2**32,
    2**53, 2**53 + 1, 2**62 - 1, 2**62, 2**63 - 1, 2**63, 2**64, HUGE, -HUGE, 0.0, -0.0, 0.5, 1.0, 2.0, 1e308, 5e-324,
    math.nan, math.inf, -math.inf,
)  # fmt: skip
OTHERS = (None, True, False, "", "1", "x", [], [1], [[]], {}, {"id": 1}, [None], "\ud800", {"all": 1}, {"from": 1})
PATHS = (
    "", ".", "..", "../x", "a/../b", "/x", "x/", "//x", "a//b", "a\0b", "x" * 255, "x" * 256, "x" * 4097,
    "a/" * 255 + "x", "a/" * 300 + "x", "é", "e\u0301", "a\nb", "a\\b", "-o", "~", "[bold]x", "\x1b[2J", "\ud800",
    "model.safetensors", "model.safetensors/x", "optimizer.pt", ".metadata", "x:y", "con", "\u202ex", ".ckpt8", "%s{}",
    "old/../..", "../" * 20 + "x", "../trainer_state.json/", "./x", "old/./x",
)  # fmt: skip
CHOICES = {
    "role": ("weight", "moment1", "moment2", "other", "Weight", ""),
    "format": ("torch-zip", "torch-legacy", "safetensors", "dcp", "file", "symlink", "directory", "tar", ""),
    "dtype": (*(dtype.label for dtype in DType), "torch.float32", "FloatStorage", "int3", ""),
    "version": (*(f"1.{minor}" for minor in range(8)), "1.99", "2.0", "0.9", "1", "", "1.0.0", "1.\u0664"),
    "preset": ("flash", "compact", "archive", "lossless", "x", "", "[red]", "x" * 5000),
    "flags": ([], ["conj"], ["neg"], ["conj", "neg"], ["neg"] * 9, ["x"], [[]], [1]),
    "rules": ([], ["*=lossless"], ["x"], [1], [["a"]], ["[red]" * 99]),
    "kind": ("adam", "stable_adamw", "came", "momentum", "lion", "", None, 1),
    "id": (
        "lossless/1", "split24/1", "split32/1", "companded8/1", "reference/1", "reference/2", "lattice/1", "lattice/2",
        "rclog/1", "vscaled/1", "delta/1", "shared/1", "lossless/2", "x", "", None, 1, [],
    ),
    "seal": ("", "0" * 64, "f" * 63, "A" * 64, None, 1, []),
    "key": ("", "0" * 64, "f" * 63, None, 1),
    "columns": (True, False, 0, 1, None, "x"),
    # How symbols are packed, or nearly so.
    "modes": (
        [0, 3, 0, -1], [0, 6, 0, -1], [0, 16, 1, 0], [0, 256, 0, 0], [0, 256, 3, -1], [1, 3, 2, 7],
        [2, 256, 1, 2**20 - 1], [2, 16, 0, 2**20], [3, 3, 0, -1], [0, 3, 4, -1], [0, 243, 0, -1], [0, 3, 0], [], None,
        "x", [0, 256, 0, -1, 1], [0, 16, 1, 0, 7], [0, 256, 2, -1, 3], [0, 256, 3, -1, 3], [1, 256, 0, -1, 3],
        [0, 6, 0, -1, 0], [0, 6, 0, -1, 8],
    ),
    **dict.fromkeys(("name", "path", "directory", "writer", "reason"), PATHS),
}  # fmt: skip
REFERENCES = {"storage", "skeleton", "moment1", "moment2", "max_moment2", "second", "weight_storage", "base"}
REFERENCES |= {"segments", "crc_fields", "runs"}
ROOM = "x" * 2000
"""A text in checkpoints that are packed: what is edited there may take as much of its place, or leave it as much."""


def edit_blindly(rng, data, other=b""):
    """A file with changed bytes, or a changed and sealed one."""
    if rng.random() < 0.1:
        return mutate_bytes(rng, data, other)
    metadata, entries, manifest = unpack(data)
    kind = rng.randrange(10)
    if kind <= 2:
        _edit_frames(rng, manifest, entries)
    elif kind <= 4:
        edit_skeleton(rng, manifest, entries)
    if kind <= 1 or 5 <= kind <= 7:
        edit_tree(rng, manifest, json_value(rng))
    stored = zstandard.compress(render_json(rng, manifest) if kind >= 5 else json.dumps(manifest).encode(), 1)
    if kind == 8 or rng.random() < 0.03:
        stored = mutate_bytes(rng, stored)
    text = json.dumps(lay_out(entries, stored, metadata)).encode()
    return with_header(mutate_header(rng, text) if kind == 9 else text, entries, stored)


def edit_by_grammar(rng, data):
    """A sealed file with edits of its manifest, of its entries and of its skeletons."""
    metadata, entries, manifest = unpack(data)
    if rng.random() < 0.25:
        edit_skeleton(rng, manifest, entries)
        if rng.random() < 0.7:
            return pack(manifest, entries, metadata)
    if rng.random() < 0.1 and "tensor_table" not in manifest:
        renumber(rng, manifest)
    if rng.random() < 0.15:
        _edit_entries(rng, manifest, entries)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        edit = rng.choice((_edit_fields, _edit_fields, _edit_fields, _edit_storages, _swap_segments, _edit_view))
        edit(rng, manifest)
    return pack(manifest, entries, metadata)


def _records(manifest, name):
    """The records of a list. The manifest may be edited already."""
    records = manifest.get(name)
    return [record for record in records if isinstance(record, dict)] if isinstance(records, list) else []


def _edit_fields(rng, manifest):
    """Another value for a field, of its kind or of any; records and elements of lists elsewhere, twice, or gone."""
    edit_tree(rng, manifest, lambda names, old: _value(rng, manifest, names[-1], old), counts=(1,))


def _value(rng, manifest, kind, old):
    dice = rng.random()
    if dice < 0.15:
        return copy.deepcopy(rng.choice(OTHERS))
    if kind in REFERENCES and type(old) is int and dice < 0.7:
        count = len(_records(manifest, "storages"))
        return rng.randrange(count) if count and rng.random() < 0.8 else rng.choice((count, -1, *NUMBERS))
    if kind == "name" and dice < 0.4:
        names = [record.get("name", "") for record in _records(manifest, "storages")]
        return rng.choice(names or PATHS)
    if kind in CHOICES and not isinstance(old, dict):
        return copy.deepcopy(rng.choice(CHOICES[kind]))
    return rng.choice(NUMBERS)


def _edit_storages(rng, manifest):
    """Storages that are copies of others, of themselves and of copies, differences, or have fields of others."""
    storages = _records(manifest, "storages")
    if len(storages) < 2:
        return
    a, b = rng.sample(range(len(storages)), 2)
    one, other, how = storages[a], storages[b], rng.randrange(4)
    codec = one.get("codec")
    if how == 0:
        run = [rng.choice((a, b, None)), rng.choice((0, 0, 1, 2**15)), one.get("numel")]
        runs = [run] * rng.choice((1, 1, 1, 2, 3000))
        one |= {"codec": {"id": rng.choice(("reference/1", "reference/2")), "runs": runs}, "parts": {}}
        one["dtype"] = rng.choice(("bfloat16", "float16", one.get("dtype")))
    elif how == 1:
        for key in rng.sample(("codec", "parts", "dtype", "numel", "role", "error", "name", "reason"), 2):
            one[key], other[key] = other.get(key), one.get(key)
    elif how == 2:
        keys = "codec", "parts", "dtype", "role", "error"
        one[rng.choice(keys)] = copy.deepcopy(other.get(rng.choice(keys)))
    else:
        is_delta = isinstance(codec, dict) and codec.get("id") == "delta/1"
        one["codec"] = codec.get("codec") if is_delta else {"id": "delta/1", "base": b, "codec": codec}


def _swap_segments(rng, manifest):
    """Two storages, mostly of one size, lie in each other's place."""
    storages, alike = _records(manifest, "storages"), {}
    for record in _records(manifest, "members"):
        for segment in record["segments"] if isinstance(record.get("segments"), list) else ():
            match segment:
                case [_, int(at)] if 0 <= at < len(storages):
                    alike.setdefault(f"{storages[at].get('numel')} {storages[at].get('dtype')}", []).append(segment)
    groups = [segments for segments in alike.values() if len(segments) > 1] or list(alike.values())
    if groups:
        group = rng.choice(groups)
        a, b = rng.choice(group), rng.choice(group)
        a[1], b[1] = b[1], a[1]


def _edit_view(rng, manifest):
    """A tensor gets a shape, strides, an offset and a type that belong together, or nearly so."""
    tensors = _records(manifest, "tensors")
    if not tensors:
        return
    record, number = rng.choice(tensors), rng.choice((0, 1, 2, 8, 2**20, 2**31, 2**40, 2**61, HUGE))
    shape = rng.choice(([number], [number, 0], [0, number], [number] * 2, [1] * 65, [1] * 3000, [number, 1, 2], []))
    stride = rng.choice(([0] * len(shape), [1] * len(shape), [number] * len(shape), [number][: len(shape)]))
    record |= {"shape": shape, "stride": stride}
    if rng.random() < 0.3:
        record["offset"] = rng.choice((0, 1, number))
    if rng.random() < 0.3:
        record["dtype"] = rng.choice(CHOICES["dtype"])


def renumber(rng, manifest):
    """Put the storages in another order and every reference with them: the container says the same as before."""
    order = list(range(len(manifest["storages"])))
    rng.shuffle(order)
    new = {old: at for at, old in enumerate(order)}
    manifest["storages"] = [manifest["storages"][old] for old in order]
    for record in manifest["storages"]:
        codec = record["codec"]
        if codec.get("runs"):
            codec["runs"] = [[new.get(run[0]), *run[1:]] for run in codec["runs"]]
        match codec.get("second"):
            case int(other):
                codec["second"] = new[other]
            case [rows, columns, *sizes]:
                codec["second"] = [new[rows], new[columns], *sizes]
    for tensor in manifest["tensors"]:
        tensor["storage"] = new[tensor["storage"]]
    for parameter in manifest["parameters"]:
        parameter["moments"] = {slot: new[index] for slot, index in parameter["moments"].items()}
        steps = parameter.get("steps") or {}
        if steps.get("weight_storage") is not None:
            steps["weight_storage"] = new[steps["weight_storage"]]
    for member in manifest["members"]:
        member["skeleton"] = new[member["skeleton"]]
        for key in ("segments", "crc_fields"):
            member[key] = [[place, new[index]] for place, index in member[key]]


def _edit_entries(rng, manifest, entries):
    """Entries dropped, doubled, renamed, swapped; frames cut anew, emptied, or many of them."""
    name, other, how = rng.choice(list(entries)), rng.choice(list(entries)), rng.randrange(7)
    if how == 0:
        del entries[name]
    elif how == 1:
        entries[rng.choice((name + "@1", name + "x", "x/bytes", "", "\ud800", "a" * 3000, "../x"))] = entries[name]
    elif how == 2:
        entries[rng.choice((name + "@0", other + "x", "ckpt8.x", "__metadata__x"))] = entries.pop(name)
    elif how == 3:
        entries[name], entries[other] = entries[other], entries[name]
    else:
        _edit_frames(rng, manifest, entries)


def _edit_frames(rng, manifest, entries):
    """One frame of a part becomes another, or all of its frames some frame again and again; checksums are right."""
    record = rng.choice(manifest["storages"])
    parts = {f"{record['name']}{':' if 'shared' in record else '/'}{part}": t for part, t in record["parts"].items()}
    parts = {name: table for name, table in parts.items() if name in entries and table["lengths"]}
    if not parts:
        return
    name = rng.choice(list(parts))
    table, content = parts[name], entries[name]
    k, times = rng.randrange(len(table["lengths"])), rng.choice((0, 1, 2, 3))
    start = sum(table["lengths"][:k])
    stop = start + table["lengths"][k]
    frame = _other_frame(rng, content[start:stop])
    if rng.random() < 0.7:
        entries[name] = content[:start] + frame + content[stop:]
        table["lengths"][k], table["crcs"][k] = len(frame), zlib.crc32(frame)
    else:
        entries[name] = frame * times
        table |= {"lengths": [len(frame)] * times, "crcs": [zlib.crc32(frame)] * times}
        if rng.random() < 0.5:
            record["numel"] = rng.choice((0, 1, 2**20 * times, record["numel"]))


def _other_frame(rng, frame):
    made = (
        frame, frame[:-1], frame + b"x", frame[::-1], bytes(len(frame)), b"", b"\x28\xb5\x2f\xfd",
        b"\x28\xb5\x2f\xfd\xa0\xff\xff\xff\xff\x01\0\0", b"\x28\xb5\x2f\xfd\x20\x00\x01\0\0",
    )  # fmt: skip
    how = rng.randrange(6)
    if how <= 2:
        return mutate_bytes(rng, frame)
    if how == 3:
        return zstandard.ZstdCompressor(write_content_size=rng.random() < 0.7).compress(frame)
    return zstandard.compress(bytes(rng.choice((0, 1, 1000, 1 << 20, 1 << 24)))) if how == 4 else rng.choice(made)


# What a member is outside of its storages: its pickle, its header, the target of a link


def edit_skeleton(rng, manifest, entries):
    """Edit one member by the grammar of its format. One with storages keeps its length, so that all else still fits."""
    member = rng.choice(manifest["members"]) if manifest["members"] else None  # else they are a table
    skeletons = [each for each in manifest["storages"] if "bytes" in each["parts"] and "shared" not in each]
    record = manifest["storages"][member["skeleton"]] if member else skeletons[0]
    name = f"{record['name']}/bytes"
    if name not in entries or len(record["parts"]["bytes"]["lengths"]) != 1:
        return
    content = entries[name]
    content = content if len(content) == record["numel"] else zstandard.decompress(content)
    if member is None or member["segments"] or member["format"] == "dcp":
        content = _same_length(rng, content)
    elif member["format"] == "symlink":
        content = rng.choice(PATHS).encode("utf-8", "surrogatepass")
    elif content[:1] == b"\x80":
        content = _edit_pickle(rng, content)
    else:
        content = rng.choice((b"", b"x", mutate_bytes(rng, content), content * 2))
    if member:
        member["size"] += len(content) - record["numel"]
    frame = min(zstandard.compress(content, 1), content, key=len)
    record |= {"numel": len(content), "parts": {"bytes": {"lengths": [len(frame)], "crcs": [zlib.crc32(frame)]}}}
    entries[name] = frame
    if not content:
        del entries[name]
        record["parts"]["bytes"] = {"lengths": [], "crcs": []}


def _edit_pickle(rng, content):
    return mutate_values(rng, content) if rng.random() < 0.8 else mutate_pickle(rng, content)


def _same_length(rng, content):
    """Other bytes in the same place: of a pickle or a header in it, with the checksums of it, or anywhere."""
    starts = [match.start() for match in re.finditer(rb"\x80\x02", content)]
    try:
        if content[8:9] == b"{" and rng.random() < 0.8:
            stop = 8 + int.from_bytes(content[:8], "little")
            return content[:8] + _fill(mutate_header(rng, content[8:stop]), stop - 8, b" ") + content[stop:]
        if starts and rng.random() < 0.8:
            start = rng.choice(starts)
            old = content[start : start + length_of_pickle(content[start:])]
            new = _fill(_edit_pickle(rng, old), len(old), b"N")[:-1] + b"."
            changed = content[:start] + new + content[start + len(old) :]
            return changed.replace(struct.pack("<I", zlib.crc32(old)), struct.pack("<I", zlib.crc32(new)))
    except ValueError:  # what begins like a pickle is none
        pass
    return mutate_bytes(rng, content)[: len(content)].ljust(len(content), b"\0")


def _fill(new, length, padding):
    """The text with as much room in it as makes it fit, or cut."""
    spare = "x" * max(len(ROOM) + length - len(new), 0)
    if encoded(ROOM) in new:
        new = new.replace(encoded(ROOM), encoded(spare), 1)
    else:
        new = new.replace(ROOM.encode(), spare.encode(), 1)
    return new[:length].ljust(length, padding)
