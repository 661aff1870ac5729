"""Values are counted before they are built: of the manifest, of other JSON, and of the pickle in a small container."""

from __future__ import annotations

import json
import random
import tracemalloc
import zlib
from pathlib import Path

import pytest
import torch
import zstandard
from gate_kit import archive, attempt, call_name
from hostile_kit import container_of, outcome, sealed

import ckpt8
from ckpt8.container import header as manifests
from ckpt8.core.errors import InputError
from ckpt8.core.json_text import FREE, HEADER_COST, MANIFEST_COST, MAX_DEPTH, check_json, cost, parse_json

KINDS = {
    "lists": lambda n: ["[]"] * n,
    "lists in lists": lambda n: ["[[[[[[[[]]]]]]]]"] * (n // 8),
    "objects": lambda n: ["{}"] * n,
    "numbers": lambda n: [str(300 + k) for k in range(n)],
    "fractions": lambda n: ["1.5"] * n,
    "texts": lambda n: ['"ab"'] * n,
    "texts in other scripts": lambda n: ['"é☃🙂"'] * n,
    "texts with escapes": lambda n: ['"\\ud83d\\ude42"'] * n,
    "a long text": lambda n: ['"' + "a" * (10 * n) + '🙂"'],
    "a long text with an escape": lambda n: ['"' + "a" * (10 * n) + '\\ud83d\\ude42"'],
    "keys": lambda n: [f'"{k:x}":0' for k in range(n)],
    "keys in other scripts": lambda n: [f'"{k:x}🙂":0' for k in range(n)],
    "keys with lists": lambda n: [f'{{"{k:x}":[]}}' for k in range(n)],
    "the same key": lambda n: ['{"a":0}'] * n,
}


def text_of(kind, n):
    """A list of ``n`` of a kind, or a dictionary of so many keys."""
    joined = ",".join(KINDS[kind](n))
    return f"{{{joined}}}" if kind in ("keys", "keys in other scripts") else f"[{joined}]"


@pytest.mark.by_default(most=7)
@pytest.mark.parametrize("kind", KINDS)
def test_no_text_takes_more_than_its_cost(kind):
    text = text_of(kind, 10_000).encode()
    parse_json(text[:1] + text[-1:], "x")
    tracemalloc.start()
    parse_json(text, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak <= cost(text), (peak / 10_000, cost(text) / 10_000)


def counted(text):
    """The sum of FORMAT.md, character by character."""
    total, inside, escaped = 10 * len(text.encode()), False, False
    for character in text:
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == '"':
            inside = not inside
            total += 8
        elif not inside:
            total += {"[": 68, "{": 68, ":": 160, ",": 8}.get(character, 0)
    return total


@pytest.mark.parametrize(
    "tree",
    [
        {"w[0:64,:]": ["a,b", 'c"d', "e\\", "\\", '"', '\\"', "{[", ""]},
        ['"', '""', "\\\\", ',",', {"": {"[]": [[]]}}],
        {"é🙂": "\ud83d", "tab\t": [None, True, 1.5]},
        [],
    ],
)
@pytest.mark.parametrize("ensure_ascii", [True, False])
def test_the_cost_is_the_sum_of_the_format(tree, ensure_ascii):
    text = json.dumps(tree, ensure_ascii=ensure_ascii)
    text = text if ensure_ascii else text.replace("\ud83d", "é")
    assert cost(text.encode()) == counted(text)


def test_the_format_states_the_bounds():
    text = (Path(ckpt8.__file__).parent / "container" / "FORMAT.md").read_text()
    assert f"2^27 + {MANIFEST_COST} × (bytes of the container)" in text
    assert f"2^27 + {HEADER_COST} × H" in text
    assert f"nested deeper than {MAX_DEPTH}" in text
    assert FREE == 1 << 27


@pytest.mark.parametrize("pair", [("[", "]"), ('{"[a":', "}"), ('[{"]":', "}]")])
def test_depth(pair):
    levels = 2 if pair[0].startswith("[{") else 1
    for count in (MAX_DEPTH // levels, MAX_DEPTH // levels + 1):
        text = pair[0] * count + "1" * (pair[0] != "[") + pair[1] * count
        json.loads(text)
        message = outcome(lambda text=text: parse_json(text.encode(), "x"))
        assert message is None if count * levels <= MAX_DEPTH else "nested deeper than 128" in message


def with_values(text):
    """A container whose manifest also holds ``text``, and the size of its manifest."""
    found = []
    container_of(b"abc", "file", change=lambda manifest: found.append(json.dumps(manifest)))
    stored = zstandard.ZstdCompressor(level=1).compress(found[0][:-1].encode() + b',"x":' + text.encode() + b"}")
    return sealed({"s/bytes": b"abc"}, stored)


def lists_and_numbers():
    digits = random.Random(0).choices(range(1000), k=3_000_000)
    return "[" + ",".join(f"[],[],[],[],{each}" for each in digits) + "]"


LARGE = {
    "keys": lambda: text_of("keys", 4_500_000),
    "keys with lists": lambda: text_of("keys with lists", 1_800_000),
    "lists": lists_and_numbers,
    "a long text": lambda: (
        '["' + "".join(f"{k * 2654435761 % 1_000_003}" + "x" * 120 for k in range(1_200_000)) + '🙂"]'
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_a_manifest_has_no_more_values_than_its_container_has_room_for(name, tmp_path):
    """Each of a few MB that grew beyond a gigabyte."""
    path = tmp_path / "x.ckpt8"
    path.write_bytes(with_values(LARGE[name]()))
    kind, message = attempt("load", path)
    assert kind == "InputError", message
    assert "has more values than" in message or "implausible size" in message


def test_a_nested_manifest_is_refused(tmp_path):
    path = tmp_path / "x.ckpt8"
    path.write_bytes(with_values("[" * 200 + "]" * 200))
    assert "nested deeper than 128" in outcome(lambda: ckpt8.open(path))


def many(kind, count):
    """Checkpoints of very many very small tensors."""
    base = torch.arange(count, dtype=torch.float32)
    return {
        "scalars": lambda: {f"layers.{k}.scale": torch.tensor(k / 7) for k in range(count)},
        "steps": lambda: {f"layers.{k}.step": torch.tensor(k) for k in range(count)},
        "zeros": lambda: {str(k): torch.zeros(1) for k in range(count)},
        "views": lambda: {f"layers.{k}.bias": base[k : k + 1] for k in range(count)},
        "one view": lambda: {"v": [base[:1] for _ in range(count)]},
        "none": lambda: {f"layers.{k}.bias": torch.empty(0) for k in range(count)} | {"w": base},
    }[kind]()


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("kind", ["scalars", "steps", "zeros", "views", "one view", "none"])
def test_a_checkpoint_of_any_number_of_small_tensors_can_be_read(kind, tmp_path, monkeypatch):
    """What is free for a small file would hide what each tensor costs, and so nothing is free here."""
    monkeypatch.setattr(manifests, "FREE", 0)
    monkeypatch.setattr(manifests, "_FLOOR", 0)
    tree = many(kind, 400)
    ckpt8.save(tree, tmp_path / "x.ckpt8", stats=False)
    with ckpt8.open(tmp_path / "x.ckpt8") as file:
        assert len(file.keys()) == 400 + (kind == "none")


@pytest.mark.slow
def test_records_that_are_all_the_same_do_not_compress_beyond_what_is_read():
    view = {"storage": 0, "dtype": "float32", "offset": 0, "shape": [1], "stride": [1], "flags": []}
    tree = {"tensors": [{"name": f"v.{k}", **view} for k in range(60_000)]}
    stored = manifests.pack_manifest(tree, 1 << 20)
    length = zstandard.frame_content_size(stored)
    assert length <= (1 << 20) + 64 * len(stored)
    assert manifests.parse_manifest(manifests.manifest_text(stored, "x"), len(stored) + (1 << 20), "x") == tree
    best = zstandard.ZstdCompressor(level=9).compress(json.dumps(tree, separators=(",", ":")).encode())
    assert length > (1 << 20) + 64 * len(best)


def test_tables_of_frames_of_a_large_model_are_far_below(tmp_path):
    """405 billion parameters with two moments: one frame of each plane for every 2^20 elements."""
    chunks, frames = -(-405_000_000_000 // (1 << 20)), 12
    lengths, crcs = [1_000_000] * 1000, [zlib.crc32(bytes([k % 256, k >> 8])) for k in range(1000)]
    each = cost(json.dumps({"lengths": lengths, "crcs": crcs}, separators=(",", ":")).encode()) / 1000
    whole = chunks * frames * each
    assert 0.5e9 < whole < 2e9
    assert whole < 0.01 * MANIFEST_COST * 405_000_000_000 * 5


def test_the_shortest_entries_of_a_header_are_within_its_cost():
    """So that no header of theirs is refused, however long."""
    ours = ",".join(f'"{k:x}/b":{{"dtype":"U8","shape":[1],"data_offsets":[{k},{k + 1}]}}' for k in range(5000))
    theirs = ",".join(f'"{k:x}":{{"dtype":"F32","shape":[],"data_offsets":[{4 * k},{4 * k + 4}]}}' for k in range(5000))
    for text in (ours, theirs):
        assert cost(text.encode()) <= HEADER_COST * len(text)
    lists = b"[" + b"[]," * 5000 + b"[]]"
    with pytest.raises(InputError, match="more values than"):
        check_json(lists, "x", HEADER_COST * len(lists))


def compressed_member(content, path):
    """``container_of`` with frames that are compressed."""
    pieces = [content[at : at + (1 << 20)] for at in range(0, len(content), 1 << 20)]
    stored = [zstandard.compress(piece) for piece in pieces]
    manifest = []

    def change(tree):
        tree["slab"] = 1 << 30
        tree["storages"][0]["parts"]["bytes"] = {
            "lengths": list(map(len, stored)),
            "crcs": list(map(zlib.crc32, stored)),
        }
        manifest.append(zstandard.compress(json.dumps(tree).encode()))

    container_of(content, "torch-zip", change=change)
    path.write_bytes(sealed({"s/bytes": b"".join(stored)}, manifest[0]))
    return path


BODIES = {
    "calls": lambda: b"](" + call_name("collections.OrderedDict") + b"q\x11)R" + b"h\x11)R" * 3_000_000 + b"e",
    "dictionaries": lambda: b"](" + b"}" * 6_000_000 + b"e",
    "numbers": lambda: b"](" + b"\x8a\x02\x00\x01" * 15_000_000 + b"e",
}


@pytest.mark.by_default("dictionaries")
@pytest.mark.parametrize("name", BODIES)
def test_a_pickle_has_no_more_objects_than_its_container_has_room_for(name, tmp_path):
    path = compressed_member(archive(BODIES[name]()), tmp_path / "x.ckpt8")
    assert path.stat().st_size < 1 << 20
    kind, message = attempt("load", path)
    assert kind == "InputError", message
    assert "builds more objects" in message or "bytes, more than" in message
