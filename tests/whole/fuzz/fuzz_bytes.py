"""Mutations that know nothing of a format: of bytes, of JSON trees, and of the text of JSON."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Iterator
from typing import Any

INTERESTING = (
    0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 4096, 0x7FFF, 0x8000, 0xFFFF, 2**20, 2**31 - 1, 2**31, 2**32 - 1,
    2**32, 2**40, 2**61 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1,
)  # fmt: skip

JSON_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2, 40, 2**20, 2**31, 2**61, 2**62 - 1, 2**62, 2**63, 2**64, 10**400, 0.5, -0.0, 1e308,
    "", "x", "../x", "a/../b", "/etc/x", "[bold]", "\ud800", "\x1b[2J", "a\nb", "float32", "uint8", "F32", "U8", "BF16",
    "F4", "moment2", "lossless/1", "split24/1", "companded8/1", "torch-zip", "torch-legacy", "safetensors", "file",
    "symlink", "directory", [], {}, [[]], [0], [0, 0], [[0, 0]], [2**61, 2**61], {"id": "lossless/1"}, {"a": {"a": {}}},
)  # fmt: skip

RAW_JSON = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" * 5000, b"0." + b"1" * 5000, b"[" * 5000,
    b'{"a":' * 999,
    b'"\\ud800"', b'"\xff"', b'"\xed\xa0\x80"', b"00", b"\x00", b"//", b"'x'", b"1E400", b"tru", b'"\\u00"',
    b"\xef\xbb\xbf",
)  # fmt: skip


def mutate_bytes(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """One to four small changes anywhere in ``data``; ``other`` is what splices are taken from."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, changed, other or data)
    return bytes(changed)


def _change(rng: random.Random, data: bytearray, other: bytes) -> None:
    size = len(data)
    if not size:
        data += rng.randbytes(4)
        return
    at = rng.randrange(size)
    # Most of a file is often one long run of tensors; its ends are where the structure is.
    if rng.random() < 0.5:
        at = rng.randrange(min(size, 600)) if rng.random() < 0.5 else size - 1 - rng.randrange(min(size, 600))
    how = rng.randrange(12)
    if how <= 1:
        data[at] ^= 1 << rng.randrange(8)
    elif how == 2:
        data[at] = rng.randrange(256)
    elif how == 3:
        data[at : at + rng.randrange(1, 9)] = rng.randbytes(rng.randrange(9))
    elif how == 4:
        count = rng.choice((1, 4, 8, 64, 500))
        data[at : at + count] = bytes([rng.choice((0, 255, 65))]) * min(count, size - at)
    elif how == 5:
        del data[at : at + rng.choice((1, 2, 8, 100))]
    elif how == 6:
        count = rng.choice((1, 2, 8, 100))
        data[at:at] = data[at : at + count] * rng.choice((1, 2, 20))
    elif how == 7:
        del data[at:]
    elif how == 8:
        place = rng.randrange(len(other) or 1)
        data[at : at + rng.choice((0, 4, 64))] = other[place : place + rng.choice((4, 64, 300))]
    elif how <= 10:
        code = rng.choice(["<H", "<I", "<Q", ">I", ">Q"])
        value = rng.choice(INTERESTING) % (1 << 8 * struct.calcsize(code))
        field = struct.pack(code, value)
        data[at : at + len(field)] = field
    else:
        data[at] = rng.choice(b'0123456789"{}[]:,.-eE \n\\')


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a JSON tree but its root."""
    found = []
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in pairs:
        found.append((*path, key))
        found += nodes(value, (*path, key))
    return found


def mutate_tree(rng: random.Random, tree: Any) -> Any:
    """Make one to three changes in a JSON tree; fields are chosen evenly, however often each occurs."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        fields: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
        for path in nodes(tree):
            fields.setdefault(tuple(key for key in path if isinstance(key, str))[-3:], []).append(path)
        if not fields:
            return tree
        _change_node(rng, tree, rng.choice(fields[rng.choice(list(fields))]))
    return tree


def _change_node(rng: random.Random, tree: Any, path: tuple[Any, ...]) -> None:
    node = tree
    for key in path[:-1]:
        node = node[key]
    key = path[-1]
    how = rng.randrange(8)
    if how == 0:
        del node[key]
    elif how == 1 and isinstance(node, list):
        node[key:key] = [copy.deepcopy(node[key])] * rng.choice((1, 1, 2, 300))
    elif how == 1:
        node[str(key) + rng.choice(("", "#2", "/x"))] = copy.deepcopy(node[key])
    elif how == 2:
        other = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node[key], node[other] = node[other], node[key]
    elif how == 3 and type(node[key]) is int:
        node[key] += rng.choice((-8, -4, -1, 1, 4, 8, 32))
    elif how == 4 and type(node[key]) is int:
        node[key] = rng.choice(INTERESTING)
    elif how == 4 and isinstance(node, dict):
        node[rng.choice(("x", "", "__metadata__", "ckpt8.seal", "a" * 3000))] = node.pop(key)
    elif how == 5 and rng.random() < 0.05:
        node[key] = rng.choice(([1] * 30_000, "a/" * 30_000, "a" * 60_000, [[]] * 20_000, [2**62] * 5000))
    else:
        node[key] = copy.deepcopy(rng.choice(JSON_VALUES))


def render_json(rng: random.Random, tree: Any) -> bytes:
    """The text of a tree; now and then with something in it that no JSON writer writes."""
    text = json.dumps(tree, separators=(",", ":")).encode()
    if rng.random() < 0.12 and text:
        at = rng.randrange(len(text))
        places = [k for k in range(at, min(at + 200, len(text))) if text[k] in b":[,"] or [at]
        at = rng.choice(places) + 1
        text = text[:at] + rng.choice(RAW_JSON) + text[at + rng.randrange(3) :]
    if rng.random() < 0.05:
        text = mutate_bytes(rng, text)
    return text


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every entry of dictionaries and element of lists, as its container and its key."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, value in list(pairs):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from places(value)
