"""Containers of any bytes, and limits on the time and memory that reading something may take."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import struct
import time
import zlib
from pathlib import Path

import zstandard

from ckpt8.core.errors import Ckpt8Error

INFINITE = "@infinite@"
"""Stands in a manifest for the JSON number 1e999, which Python reads as infinity."""
SECONDS = 1.0
MEMORY = 512 << 20


class Pickled:
    """Pickles as a call of ``function``, which runs where the pickle is loaded."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def container_of(content, member_format, *, name="a.pt", change=lambda manifest: None):
    """A container with a valid seal of one member, all of whose bytes are its skeleton."""
    lengths = [min(1 << 20, len(content) - k) for k in range(0, len(content), 1 << 20)]
    crcs = [zlib.crc32(content[k << 20 : (k + 1) << 20]) for k in range(len(lengths))]
    record = {
        "name": "s", "dtype": "uint8", "numel": len(content), "role": "other", "codec": {"id": "lossless/1"},
        "parts": {"bytes": {"lengths": lengths, "crcs": crcs}},
    }  # fmt: skip
    member = {"path": name, "format": member_format, "size": len(content), "skeleton": 0}
    member |= {"segments": [], "crc_fields": []}
    manifest = {
        "version": "1.0", "writer": "x", "preset": "x", "rules": [], "slab": 1 << 24, "frame": 1 << 20,
        "storages": [record], "tensors": [], "parameters": [], "members": [member],
    }  # fmt: skip
    change(manifest)
    return pack(manifest, {"s/bytes": content} if content else {}, {"ckpt8": "1.1"})


def unpack(data):
    """The metadata, the stored bytes of every entry in order, the manifest."""
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    metadata, body = header.pop("__metadata__"), data[8 + length :]
    places = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    entries = {name: body[slice(*entry["data_offsets"])] for name, entry in places}
    entries.pop("ckpt8.seal")
    return metadata, entries, json.loads(zstandard.decompress(entries.pop("ckpt8.manifest")))


def stored_manifest(manifest):
    text = json.dumps(manifest, separators=(",", ":")).replace(f'"{INFINITE}"', "1e999")
    return zstandard.ZstdCompressor().compress(text.encode())


def pack(manifest, entries, metadata=None, *, stored=None):
    """A container with a valid seal, whatever the manifest says."""
    return sealed(entries, stored_manifest(manifest) if stored is None else stored, metadata or {"ckpt8": "1.0"})


def found_at(tree, path):
    """What is at a path of keys and indices, where a name stands for the record of a list that has it."""
    for key in path:
        by_name = isinstance(tree, list) and isinstance(key, str)
        tree = next(record for record in tree if record["name"] == key) if by_name else tree[key]
    return tree


def put(*path_and_value):
    """A change of a manifest: another value at a path; a function makes it of the one that is there."""
    *path, last, value = path_and_value

    def change(manifest):
        node = found_at(manifest, path)
        node[last] = value(node[last]) if callable(value) else value

    return change


def fields(*path, **given):
    """A change of a manifest: other values of fields of what is at a path, as ``put``."""
    return lambda manifest: [put(*path, key, value)(manifest) for key, value in given.items()]


def drop(*path):
    """A change of a manifest: a field less."""
    return lambda manifest: found_at(manifest, path[:-1]).pop(path[-1])


def both(*changes):
    return lambda manifest: [change(manifest) for change in changes]


def index_of(manifest, name):
    return next(k for k, storage in enumerate(manifest["storages"]) if storage["name"] == name)


def edited(parts, change, path):
    """The path of a container whose manifest ``change`` has changed, under a valid seal."""
    metadata, entries, manifest = copy.deepcopy(parts)
    change(manifest)
    assert json.dumps(manifest) != json.dumps(parts[2])
    path.write_bytes(pack(manifest, entries, metadata))
    return path


def sealed(entries, stored, metadata=None):
    """A file of these entries and this manifest, which is compressed already."""
    text = json.dumps(lay_out(entries, stored, metadata or {"ckpt8": "1.1"}), separators=(",", ":")).encode()
    return with_header(text, entries, stored)


def lay_out(entries, stored, metadata):
    """The header for these entries."""
    header, position = {"__metadata__": metadata}, 0
    for name, content in {**entries, "ckpt8.manifest": stored, "ckpt8.seal": bytes(32)}.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [position, position + len(content)]}
        position += len(content)
    return header


def with_header(text, entries, stored):
    """A file whose seal is valid, whatever its header says."""
    head = struct.pack("<Q", len(text)) + text
    return head + b"".join(entries.values()) + stored + hashlib.sha256(head + stored).digest()


def peak_memory():
    """Peak resident memory in bytes since ``forget_peak``; 0 where the system does not tell."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


def forget_peak():
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


_LOOP, _USUAL = 300_000, 0.034
"""The length of a loop, and the seconds that it took on two cores with nothing else to do."""


def slowness():
    """How many times as long as usual a loop takes here and now; at least 1."""
    start = time.process_time()
    sum(k * k for k in range(_LOOP))
    return max((time.process_time() - start) / _USUAL, 1)


@contextlib.contextmanager
def bounded(seconds=SECONDS, memory=MEMORY):
    """Fail when the body takes longer, on a usual machine, or takes more memory than was in use before it."""
    forget_peak()
    before, start = peak_memory(), time.process_time()
    yield
    took, grown = time.process_time() - start, peak_memory() - before
    assert took < seconds or took < seconds * slowness(), f"took {took:.1f} s"
    assert grown < memory, f"took {grown >> 20} MiB"


def one_line(error):
    text = str(error)
    assert text
    assert text.isprintable()
    assert len(text) < 2000
    return text


def outcome(action):
    """The message of a refusal, which is one line, or None where there was none. Other exceptions go on."""
    try:
        action()
    except Ckpt8Error as exc:
        return one_line(exc)
    return None
