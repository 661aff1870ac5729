"""Containers of any bytes, and limits on the time and memory that reading something may take."""

from __future__ import annotations

import contextlib
import hashlib
import json
import struct
import time
import zlib
from pathlib import Path

import zstandard

from ckpt8.core.errors import Ckpt8Error

SECONDS = 1.0
MEMORY = 512 << 20


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
    stored = zstandard.compress(json.dumps(manifest, separators=(",", ":")).encode())
    return sealed({"s/bytes": content} if content else {}, stored)


def sealed(entries, stored):
    """A file of these entries and this manifest, which is compressed already."""
    header, position = {"__metadata__": {"ckpt8": "1.1"}}, 0
    for name, content in {**entries, "ckpt8.manifest": stored, "ckpt8.seal": bytes(32)}.items():
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [position, position + len(content)]}
        position += len(content)
    text = json.dumps(header).encode()
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
