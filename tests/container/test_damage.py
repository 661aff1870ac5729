"""Damaged and hostile containers: every bit is protected, and whatever a manifest says is read or refused.

Hostile files are built here byte by byte, with a valid seal: the seal keeps damage out, not malice.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import struct
import time
import zlib

import pytest
import torch
import zstandard
from hostile_kit import INFINITE, edited, pack, stored_manifest, unpack, with_header
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import ckpt8
from ckpt8.cli.show.inspect import show
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError, InputError, UnsupportedError
from ckpt8.inspecting.container import inspect_container

RULES = ("model.w=split24", "*.exp_avg=companded8", "*.exp_avg_sq=companded8(signed=False, Q=63, p=0.5)")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A container of a few kB with every codec, and its source."""
    folder = tmp_path_factory.mktemp("small")
    generator = torch.Generator().manual_seed(1)
    m, w = torch.randn(5, 8, generator=generator), torch.randn(5, 8, generator=generator)
    state = {0: {"step": torch.tensor(7.0), "exp_avg": m, "exp_avg_sq": m * m}}
    group = {"params": [0], "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
    tree = {"model": {"w": w, "n": torch.arange(3)}, "optimizer": {"state": state, "param_groups": [group]}}
    torch.save(tree, folder / "a.pt")
    ckpt8.compress(folder / "a.pt", rules=RULES, threads=1)
    return folder / "a.ckpt8"


@pytest.fixture(scope="module")
def parts(small):
    return unpack(small.read_bytes())


@pytest.fixture
def written(parts, tmp_path):
    """A function that writes the container with its manifest changed, under a valid seal."""
    return lambda change: edited(parts, change, tmp_path / "x.ckpt8")


def is_detected(path):
    """Whether opening or verifying raises InputError. Any other exception goes on."""
    try:
        ckpt8.verify(path, threads=1)
    except InputError:
        return True
    return False


def test_the_sample_holds_every_codec_and_its_parts_make_a_valid_file_again(small, parts, tmp_path):
    metadata, entries, manifest = parts
    assert {storage["codec"]["id"] for storage in manifest["storages"]} == {"lossless/1", "split24/1", "companded8/1"}
    assert any(parameter["error"] for parameter in manifest["parameters"])
    path = tmp_path / "again.ckpt8"
    path.write_bytes(pack(manifest, entries, metadata))
    assert not ckpt8.verify(path, small.with_suffix(".pt")).failures
    assert list(tmp_path.iterdir()) == [path]


# Damage


def test_a_file_cut_off_anywhere_or_with_bytes_added_is_detected(small, tmp_path):
    data, rng, path = small.read_bytes(), random.Random(2), tmp_path / "x.ckpt8"
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__")
    borders = {8 + length + place for entry in header.values() for place in entry["data_offsets"]}
    places = borders | {place - 1 for place in borders} | {rng.randrange(len(data)) for _ in range(200)} | {0, 1, 7, 8}
    for place in sorted(places - {len(data)}):
        path.write_bytes(data[:place])
        assert is_detected(path), place
    for more in (b"\0", b" ", data):
        path.write_bytes(data + more)
        assert is_detected(path)


def test_swapped_entries_of_equal_length_are_detected(parts, tmp_path):
    """The seal is valid, the lengths are, and only the crc32 of the frames tells."""
    metadata, entries, manifest = parts
    names = [name for name in entries if name.startswith("model.w/")]
    assert len({len(entries[name]) for name in names}) == 1
    swapped = {**entries, names[0]: entries[names[1]], names[1]: entries[names[0]]}
    (tmp_path / "x.ckpt8").write_bytes(pack(manifest, swapped, metadata))
    assert is_detected(tmp_path / "x.ckpt8")


# Hostile headers


def _header(parts, change):
    metadata, entries, manifest = parts
    data = pack(manifest, entries, metadata)
    (length,) = struct.unpack_from("<Q", data)
    frames = b"".join(entries.values())
    return with_header(change(data[8 : 8 + length]), {"": frames}, stored_manifest(manifest))


def _edit(name, **fields):
    def change(text):
        header = json.loads(text)
        header[name] |= fields
        return json.dumps(header).encode()

    return change


def _replace(old, new):
    def change(text):
        assert old in text
        return text.replace(old, new, 1)

    return change


def _shift(by):
    """Move every entry from the second on."""

    def change(text):
        header = json.loads(text)
        names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
        for name in names[1:]:
            start, stop = header[name]["data_offsets"]
            header[name]["data_offsets"] = [start + by, stop + by]
        return json.dumps(header).encode()

    return change


HEADERS = {
    "not JSON": lambda text: text[:-1],
    "not UTF-8": _replace(b"model.w/rho", b"model.\xff/rho"),
    "UTF-16": lambda text: text.decode().encode("utf-16"),
    "a list": lambda text: b"[]",
    "a number": lambda text: b"1",
    "empty": lambda text: b"",
    "deeply nested": lambda text: b"[" * 100_000 + b"]" * 100_000,
    "a huge number": lambda text: b'{"__metadata__":{"ckpt8":"1.0"},"a":' + b"9" * 10_000 + b"}",
    "a duplicate key": _replace(b'"model.w/rho":', b'"model.w/mantissa":'),
    "a duplicate of the metadata": _replace(b'{"__metadata__"', b'{"__metadata__":{"ckpt8":"1.0"},"__metadata__"'),
    "no metadata": _replace(b"__metadata__", b"__metameta__"),
    "metadata of another kind": _replace(b'"__metadata__":{"', b'"__metadata__":["a"],"x":{"'),
    "NaN": _replace(b'"dtype":"U8"', b'"dtype":NaN'),
    "an infinite offset": _replace(b'"data_offsets":[0,', b'"data_offsets":[-Infinity,'),
    "another dtype": _edit("model.w/rho", dtype="I8"),
    "a missing shape": lambda text: _edit("model.w/rho")(text).replace(b'"shape": [40], ', b"", 1),
    "a shape of two dimensions": _edit("model.w/rho", shape=[5, 8]),
    "a huge shape": _edit("model.w/rho", shape=[2**63]),
    "huge offsets": _edit("model.w/rho", data_offsets=[2**63, 2**63 + 40]),
    "negative offsets": _edit("model.w/rho", data_offsets=[-40, 0]),
    "reversed offsets": _edit("model.w/rho", shape=[-40], data_offsets=[120, 80]),
    "offsets that are no integers": _edit("model.w/rho", data_offsets=["80", "120"]),
    "floating offsets": _edit("model.w/rho", data_offsets=[80.0, 120.0], shape=[40.0]),
    "an unknown field": _edit("model.w/rho", extra=1),
    "a hole": _shift(1),
    "an overlap": _shift(-1),
    "the manifest is not next to last": _replace(b'"ckpt8.manifest"', b'"ckpt9.manifest"'),
    "an entry that nothing names": _replace(b'"model.w/rho"', b'"model.w/rhp"'),
}


@pytest.mark.parametrize("name", HEADERS)
def test_hostile_headers(name, parts, tmp_path):
    path = tmp_path / "x.ckpt8"
    path.write_bytes(_header(parts, HEADERS[name]))
    with pytest.raises(InputError):
        ContainerReader(path)


def test_the_hostile_headers_are_refused_for_what_was_changed(parts, tmp_path):
    """The same construction without a change opens."""
    path = tmp_path / "x.ckpt8"
    path.write_bytes(_header(parts, lambda text: text))
    ContainerReader(path).close()


def _laid_out(parts, place):
    """A file whose data is laid out by ``place(name, content, data so far)``, which gives the offset of an entry."""
    metadata, entries, manifest = parts
    stored, data = stored_manifest(manifest), b""
    header = {"__metadata__": metadata}
    for name, content in {**entries, "ckpt8.manifest": stored}.items():
        start = place(name, content, data)
        data = data.ljust(start, b"\0")[:start] + content + data[start + len(content) :]
        header[name] = {"dtype": "U8", "shape": [len(content)], "data_offsets": [start, start + len(content)]}
    header["ckpt8.seal"] = {"dtype": "U8", "shape": [32], "data_offsets": [len(data), len(data) + 32]}
    text = json.dumps(header).encode()
    return with_header(text, {"": data[: len(data) - len(stored)]}, stored)


def test_holes_and_shared_bytes_are_refused_even_where_everything_else_fits(parts, tmp_path):
    places = {
        "as it should be": lambda name, content, data: len(data),
        "a hole": lambda name, content, data: len(data) + (name == "model.w/rho"),
        "a hole at the start": lambda name, content, data: len(data) + (not data),
        # Two planes of zeros in one byte.
        "shared": lambda name, content, data: len(data) - name.endswith("step/plane3"),
    }
    assert parts[1]["optimizer.state.0.step/plane2"] == parts[1]["optimizer.state.0.step/plane3"] == b"\0"
    found = {}
    for what, place in places.items():
        path = tmp_path / "x.ckpt8"
        path.write_bytes(_laid_out(parts, place))
        found[what] = is_detected(path)
    assert found == {what: what != "as it should be" for what in places}


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 100_000_001, 99_999_999, 0, 1])
def test_hostile_header_lengths(length, small, tmp_path):
    path = tmp_path / "x.ckpt8"
    path.write_bytes(struct.pack("<Q", length) + small.read_bytes()[8:])
    started = time.process_time()
    with pytest.raises(InputError):
        ContainerReader(path)
    assert time.process_time() - started < 2


@pytest.mark.parametrize("content", [b"", b"{", b"\0" * 10, b"\2\0\0\0\0\0\0\0{}", b"PK\3\4" + bytes(100)])
def test_short_files(content, tmp_path):
    path = tmp_path / "x.ckpt8"
    path.write_bytes(content)
    with pytest.raises(InputError):
        ContainerReader(path)


def test_versions(parts, tmp_path):
    metadata, entries, manifest = parts
    path = tmp_path / "x.ckpt8"
    for header, inner in [("2.0", "2.0"), ("0.9", "0.9"), ("10.0", "10.0"), ("1.0", "2.0"), ("x", "x"), ("", "")]:
        path.write_bytes(pack(manifest | {"version": inner}, entries, metadata | {"ckpt8": header}))
        with pytest.raises(UnsupportedError, match=r"format"):
            ContainerReader(path)
    path.write_bytes(pack(manifest | {"version": "1.9", "later": 1}, entries, metadata | {"ckpt8": "1.9", "x": "y"}))
    assert not is_detected(path)


# Hostile manifests


def exercise(path, original, folder, *, threads=1):
    """Everything that reads a container, in turn. Which of it was refused; an unexpected exception goes on.

    A refused restore leaves nothing, and a restore that goes through has the size that the manifest states.
    """
    refused = set()

    def attempt(what, action):
        try:
            return action()
        except (InputError, CheckFailedError):
            refused.add(what)
            return None

    def read_all():
        with ckpt8.open(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                attempt("tensor", lambda name=name: file.get_tensor(name))
                file.stats(name)

    def look():
        facts = inspect_container(path, tensors=True)
        json.dumps(facts, allow_nan=False)
        show(Console(file=io.StringIO(), width=80), facts)

    attempt("verify", lambda: ckpt8.verify(path, threads=threads))
    attempt("against", lambda: ckpt8.verify(path, original, threads=threads))
    attempt("read", read_all)
    attempt("inspect", look)
    target = folder / "restored"
    attempt("restore", lambda: ckpt8.restore(path, target, threads=threads))
    written = {entry.name for entry in folder.iterdir()} - {path.name}
    assert written == (set() if "restore" in refused else {"restored"})
    if "restore" not in refused:
        with ContainerReader(path) as reader:
            assert target.stat().st_size == reader.manifest.members[0].size
        target.unlink()
    return refused


def _set(*keys_and_value):
    *keys, last, value = keys_and_value

    def change(manifest):
        node = manifest
        for key in keys:
            node = node[key]
        node[last] = value(node[last]) if callable(value) else value

    return change


def _index(manifest, name):
    return next(k for k, storage in enumerate(manifest["storages"]) if storage["name"] == name)


def _storage(name, /, **fields):
    def change(manifest):
        manifest["storages"][_index(manifest, name)] |= fields

    return change


def _table(name, part, /, **fields):
    def change(manifest):
        table = manifest["storages"][_index(manifest, name)]["parts"][part]
        table |= {key: value(table[key]) if callable(value) else value for key, value in fields.items()}

    return change


def _twice(manifest):
    manifest["storages"].append(copy.deepcopy(manifest["storages"][0]))


def _rename_part(manifest):
    parts = manifest["storages"][_index(manifest, "model.w")]["parts"]
    parts["rho2"] = parts.pop("rho")


W = "model.w"
MALFORMED = {
    "no storages": _set("storages", {}),
    "storages missing": lambda manifest: manifest.pop("storages"),
    "a storage that is a list": _set("storages", 0, []),
    "a storage twice": _twice,
    "a name of another type": _storage(W, name=1),
    "another name": _storage(W, name="model.v"),
    "an unknown dtype": _storage(W, dtype="float3"),
    "a dtype of the wrong type": _storage(W, dtype=[]),
    "an unknown role": _storage(W, role="moment3"),
    "a negative count": _storage(W, numel=-1),
    "a huge count": _storage(W, numel=2**61),
    "a count beyond 64 bits": _storage(W, numel=2**70),
    "a boolean count": _storage(W, numel=True),
    "a count one too large": _storage(W, numel=41),
    "a count of zero": _storage(W, numel=0),
    "a chunk more": _storage(W, numel=2**20 + 40),
    "a length too large": _table(W, "rho", lengths=lambda old: [old[0] + 1]),
    "a length too small": _table(W, "rho", lengths=lambda old: [old[0] - 1]),
    "a negative length": _table(W, "rho", lengths=[-1]),
    "a length beyond 64 bits": _table(W, "rho", lengths=[2**64]),
    "lengths that only add up": _table(W, "rho", lengths=lambda old: [old[0], 0], crcs=lambda old: [old[0], 0]),
    "no lengths": _table(W, "rho", lengths=[], crcs=[]),
    "more checksums than lengths": _table(W, "rho", crcs=lambda old: [old[0], 0]),
    "a wrong checksum": _table(W, "rho", crcs=lambda old: [old[0] ^ 1]),
    "a checksum beyond 32 bits": _table(W, "rho", crcs=[2**32]),
    "a part missing": lambda manifest: manifest["storages"][_index(manifest, W)]["parts"].pop("rho"),
    "another part": _rename_part,
    "the codec of another type": _storage(W, dtype="int32"),
    "a slab of zero": _set("slab", 0),
    "a slab of half a frame": _set("slab", 2**19),
    "a negative slab": _set("slab", -(2**20)),
    "a frame of another size": _set("frame", 2**19),
    "a segment of no storage": _set("members", 0, "segments", 0, 1, 99),
    "a negative segment": _set("members", 0, "segments", 0, 1, -1),
    "a segment at a negative offset": _set("members", 0, "segments", 0, 0, -1),
    "a segment of three": _set("members", 0, "segments", 0, [1, 0, 0]),
    "segments missing": _set("members", 0, "segments", None),
    "segments that overlap": _set("members", 0, "segments", lambda old: [old[0], [old[0][0] + 1, old[1][1]], *old[2:]]),
    "segments out of order": _set("members", 0, "segments", lambda old: old[::-1]),
    "a segment twice": _set("members", 0, "segments", lambda old: [old[0], *old]),
    "a segment left out": _set("members", 0, "segments", lambda old: old[1:]),
    "a segment behind the end": _set("members", 0, "segments", lambda old: [*old[:-1], [2**61, old[-1][1]]]),
    "a larger member": _set("members", 0, "size", lambda old: old + 1),
    "a smaller member": _set("members", 0, "size", lambda old: old - 1),
    "a huge member": _set("members", 0, "size", 2**61),
    "another skeleton": _set("members", 0, "skeleton", 0),
    "no such skeleton": _set("members", 0, "skeleton", 99),
    "a checksum field of no storage": _set("members", 0, "crc_fields", [[0, 99]]),
    "a checksum field at a negative offset": _set("members", 0, "crc_fields", [[-1, 0]]),
    "a checksum field behind the end": _set("members", 0, "crc_fields", [[2**40, 0]]),
    "a checksum field that crosses the end": _set(
        "members", lambda old: [old[0] | {"crc_fields": [[old[0]["size"] - 2, 0]]}]
    ),
    "a checksum field inside a storage": _set(
        "members", lambda old: [old[0] | {"crc_fields": [[old[0]["segments"][0][0], 0]]}]
    ),
    "a tensor of no storage": _set("tensors", 0, "storage", 99),
    "a tensor of a negative storage": _set("tensors", 0, "storage", -1),
    "a negative shape": _set("tensors", 0, "shape", [-1]),
    "a stride of another length": _set("tensors", 0, "stride", [1, 1, 1]),
    "a parameter of no storage": _set("parameters", 0, "moments", {"moment1": 99}),
    "a parameter of something else": _set("parameters", 0, "moments", {"moment1": "0"}),
    "rules that are no list": _set("rules", "x"),
    "a preset that is no text": _set("preset", 1),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_manifests(name, written, small, tmp_path):
    path = written(MALFORMED[name])
    started = time.process_time()
    assert is_detected(path)
    assert "restore" in exercise(path, small.with_suffix(".pt"), tmp_path)
    assert time.process_time() - started < 5


TENSORS = {
    "behind the end": {"offset": 2**61},
    "one element too far": {"shape": [41], "stride": [1]},
    "a huge shape": {"shape": [2**61], "stride": [1]},
    "a shape whose product overflows": {"shape": [2**40, 2**40], "stride": [0, 0]},
    "a huge stride": {"shape": [2], "stride": [2**61]},
    "a huge stride of many": {"shape": [5, 5], "stride": [2**61, 2**61]},
    "many dimensions": {"shape": [1] * 5000, "stride": [1] * 5000},
    "a dtype that does not divide the storage": {"dtype": "complex128", "shape": [11], "stride": [1]},
    "a larger dtype": {"dtype": "float64", "shape": [40], "stride": [1]},
    "a shape that is too large for memory": {"shape": [2**45], "stride": [1]},
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_that_do_not_fit_their_storage(name, written, small, tmp_path):
    def change(manifest):
        (record,) = (tensor for tensor in manifest["tensors"] if tensor["name"] == W)
        record |= TENSORS[name]

    path = written(change)
    if name != "many dimensions":
        with pytest.raises(InputError), ckpt8.open(path) as file:
            file.get_tensor(W)
    exercise(path, small.with_suffix(".pt"), tmp_path)


@pytest.mark.parametrize(
    "codec",
    [
        {"id": "split24/2", "R": 127},
        {"id": "split25/1"},
        {"id": ""},
        {"id": None},
        {"id": ["split24/1"]},
        {"R": 127},
        {},
        {"id": "split24/1", "R": 128},
        {"id": "split24/1", "R": 0},
        {"id": "split24/1", "R": 2},
        {"id": "split24/1", "R": "127"},
        {"id": "split24/1", "R": 127.0},
        {"id": "split24/1", "Q": 127},
        {"id": "lossless/1", "R": 1},
    ],
)
def test_unknown_codecs_are_unsupported(codec, written):
    with pytest.raises(UnsupportedError, match=r"codec"):
        ContainerReader(written(_storage(W, codec=codec)))


@pytest.mark.parametrize(
    "codec",
    [
        {"id": "companded8/1", "signed": [], "Q": 127, "p": 1},
        {"id": "companded8/1", "signed": 0, "Q": 127, "p": 1},
        {"id": "companded8/1", "signed": "x", "Q": 127, "p": 1},
        {"id": "companded8/1", "signed": None, "Q": 127, "p": 1},
        {"id": "companded8/1", "signed": True, "Q": None, "p": 1},
        {"id": "companded8/1", "signed": True, "Q": 127, "p": "1"},
        {"id": "companded8/1", "signed": True, "Q": 127, "p": [1]},
        {"id": "companded8/1", "signed": True, "Q": 127, "p": 0.5},
        {"id": "companded8/1", "signed": True, "Q": 255, "p": 1},
    ],
)
def test_parameters_of_companded8_that_it_does_not_have(codec, written, small, tmp_path):
    path = written(_storage("optimizer.state.0.exp_avg", codec=codec))
    assert is_detected(path)
    exercise(path, small.with_suffix(".pt"), tmp_path)


@pytest.mark.parametrize("name", [W, "optimizer.state.0.exp_avg"])
@pytest.mark.parametrize("dtype", ["int32", "float64", "float16", "uint8", "complex64", "qint8", "float8_e4m3fn"])
def test_a_codec_on_a_type_that_it_is_not_for(name, dtype, written, small, tmp_path):
    path = written(_storage(name, dtype=dtype))
    assert {"verify", "restore"} <= exercise(path, small.with_suffix(".pt"), tmp_path)


ERRORS = [
    {"count": 40, "max_relative": INFINITE, "sum_relative": 0.1, "max_steps": 1},
    {"count": 10**400, "max_relative": 10**400, "sum_relative": 10**400, "max_steps": 10**400},
    {"count": 0, "max_relative": -1.0, "sum_relative": 0.1, "max_steps": -1},
    {"count": -1, "max_relative": True, "sum_relative": False, "max_steps": 0.5},
    {"count": None, "max_relative": "x", "sum_relative": [], "max_steps": {}},
    {"sum_square_error": 1.0, "sum_square": 1e-320, "max_scaled": 1.0},
    {"sum_square_error": -1.0, "sum_square": 1.0, "max_scaled": 1.0},
    {"sum_square_error": 1e308, "sum_square": 1e-308, "max_error": 1.0, "max_update": 10**5},
    {"sum_square_error": 1, "sum_square": 10**400, "max_error": 10**400, "max_update": 1},
    {"anything": "else"},
    {},
]


@pytest.mark.parametrize("error", ERRORS, ids=range(len(ERRORS)))
def test_hostile_figures(error, written, small, tmp_path):
    def change(manifest):
        for record in [*manifest["storages"], *manifest["parameters"]]:
            record["error"] = error

    path = written(change)
    exercise(path, small.with_suffix(".pt"), tmp_path)
    with contextlib.suppress(InputError):
        assert ckpt8.verify(path, small.with_suffix(".pt")).failures


NAMES = ["../x", "/etc/x", "a/b", "", ".", "..", "a\0b", "x/", "./x", "\ud800"]


@pytest.mark.parametrize("name", NAMES)
def test_a_member_cannot_name_a_file_elsewhere(name, parts, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    path = edited(parts, _set("members", 0, "path", name), folder / "x.ckpt8")
    if name == "\ud800":
        with pytest.raises(InputError):
            ckpt8.restore(path)
    else:
        assert ckpt8.restore(path) == folder / "x.pt"
        (folder / "x.pt").unlink()
    assert list(tmp_path.rglob("*")) == [folder, path]


@pytest.mark.parametrize("count", [0, 2])
def test_members_that_are_none_or_several(count, written, small, tmp_path):
    path = written(_set("members", lambda members: members * count))
    exercise(path, small.with_suffix(".pt"), tmp_path)
    with pytest.raises(InputError):
        ckpt8.restore(path, tmp_path / "restored")


# Hostile frames: a checksum that is right of bytes that are wrong


def _with_frame(parts, name, part, frame):
    metadata, entries, manifest = parts
    changed = copy.deepcopy(manifest)
    record = changed["storages"][_index(changed, name)]
    record["parts"][part] = {"lengths": [len(frame)], "crcs": [zlib.crc32(frame)]}
    return pack(changed, {**entries, f"{name}/{part}": frame}, metadata)


def _declared(content, size):
    """A zstd frame of ``content`` whose header declares another size, in 8 bytes."""
    frame = zstandard.ZstdCompressor(compression_params=zstandard.ZstdCompressionParameters(write_content_size=0))
    body = frame.compress(content)
    parameters = zstandard.get_frame_parameters(body)
    assert parameters.content_size == zstandard.CONTENTSIZE_UNKNOWN
    # magic, descriptor with an 8-byte content size and a window byte, window of 1 KiB
    return body[:4] + bytes([0b1100_0000]) + b"\x50" + struct.pack("<Q", size) + body[6:]


FRAMES = {
    "another content size": zstandard.compress(bytes(41)),
    "a bomb": zstandard.compress(bytes(10_000_000)),
    "a bomb that declares the right size": _declared(bytes(10_000_000), 40),
    "less than it declares": _declared(bytes(39), 40),
    "no content size": zstandard.ZstdCompressor(write_content_size=False).compress(bytes(40)),
    "an enormous content size": _declared(bytes(40), 2**62),
    "no frame": b"x" * 39,
    "nothing": b"",
    "a skippable frame": b"\x50\x2a\x4d\x18\x04\0\0\0abcd",
    "half a frame": zstandard.compress(random.Random(3).randbytes(20) * 2)[:-3],
}


@pytest.mark.parametrize("name", FRAMES)
def test_hostile_frames(name, parts, small, tmp_path):
    path = tmp_path / "x.ckpt8"
    path.write_bytes(_with_frame(parts, W, "rho", FRAMES[name]))
    started = time.process_time()
    assert is_detected(path)
    assert "restore" in exercise(path, small.with_suffix(".pt"), tmp_path)
    assert time.process_time() - started < 2


def test_a_frame_built_the_same_way_with_the_right_size_is_read(parts, tmp_path):
    path = tmp_path / "x.ckpt8"
    path.write_bytes(_with_frame(parts, W, "rho", _declared(bytes(40), 40)))
    assert not is_detected(path)


def test_a_window_larger_than_8_mib_is_refused(parts, tmp_path):
    frame = _declared(bytes(40), 40)
    frame = frame[:5] + bytes([21 << 3]) + frame[6:]
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 31
    path = tmp_path / "x.ckpt8"
    path.write_bytes(_with_frame(parts, W, "rho", frame))
    assert is_detected(path)


def test_hostile_manifests_as_frames(parts, tmp_path):
    metadata, entries, manifest = parts
    text = json.dumps(manifest).encode()
    hostile = {
        "not zstd": text,
        "nothing": b"",
        "a bomb": zstandard.compress(text + b" " * 300_000_000),
        "a declared bomb": _declared(text, 2**61),
        "no size": zstandard.ZstdCompressor(write_content_size=False).compress(text),
        "another size": _declared(text, len(text) - 1),
        "a larger size": _declared(text, len(text) + 1),
        "cut off": zstandard.compress(text)[:-5],
        "not JSON": zstandard.compress(text[:-1]),
        "not UTF-8": zstandard.compress(text + b"\xff"),
        "NaN": zstandard.compress(text.replace(b'"slab": 16777216', b'"slab": NaN')),
        "a key twice": zstandard.compress(text.replace(b'"slab":', b'"slab": 1, "slab":')),
        "deep": zstandard.compress(b"[" * 500_000 + b"]" * 500_000),
        "a list": zstandard.compress(b"[]"),
        "null": zstandard.compress(b"null"),
    }
    for name, stored in hostile.items():
        path = tmp_path / "x.ckpt8"
        path.write_bytes(pack(None, entries, metadata, stored=stored))
        started = time.process_time()
        with pytest.raises(InputError):
            ContainerReader(path)
        assert time.process_time() - started < 2, name
    path.write_bytes(pack(None, entries, metadata, stored=_declared(text, len(text))))
    assert not is_detected(path)


# Mutations of the whole manifest

VALUES = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    40,
    2**20,
    2**31,
    2**62 - 1,
    2**62,
    2**63,
    2**64,
    10**400,
    0.5,
    -0.0,
    1e308,
    INFINITE,
    "",
    "x",
    "../x",
    "[bold]",
    "\ud800",
    "\x1b[2J",
    "float32",
    "uint8",
    "moment2",
    "lossless/1",
    [],
    {},
    [[]],
    [0],
    [[0, 0]],
    [2**61, 2**61],
    {"id": "lossless/1"},
]


def _nodes(tree, path=()):
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _nodes(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _nodes(value, (*path, index))


def _mutate(manifest, where, how, other):
    *path, last = where
    node = manifest
    for key in path:
        node = node[key]
    if how == "delete":
        del node[last]
    elif how == "repeat" and isinstance(node, list):
        node.insert(last, copy.deepcopy(node[last]))
    elif how == "swap" and isinstance(node, list):
        node[last], node[other % len(node)] = node[other % len(node)], node[last]
    elif how == "add" and type(node[last]) is int:
        node[last] += other % 9 - 4
    else:
        node[last] = copy.deepcopy(VALUES[other % len(VALUES)])


def _mutations(parts, data, small, folder):
    metadata, entries, manifest = parts
    changed = copy.deepcopy(manifest)
    for _ in range(data.draw(st.integers(1, 2))):
        # By field first: otherwise nearly all mutations would hit one of the many numbers.
        fields = {}
        for path in _nodes(changed):
            if path:
                fields.setdefault(tuple(key for key in path if isinstance(key, str)), []).append(path)
        nodes = fields[data.draw(st.sampled_from(sorted(fields)))]
        where = nodes[data.draw(st.integers(0, len(nodes) - 1))]
        how = data.draw(st.sampled_from(["delete", "repeat", "swap", "add", "replace", "replace"]))
        _mutate(changed, where, how, data.draw(st.integers(0, 10_000)))
    path = folder / "x.ckpt8"
    path.write_bytes(pack(changed, entries, metadata))
    started = time.process_time()
    exercise(path, small.with_suffix(".pt"), folder)
    assert time.process_time() - started < 10


@given(data=st.data())
def test_a_mutated_manifest_is_read_or_refused(data, parts, small, tmp_path):
    """Whatever the manifest says, there is a result or an InputError, soon, and nothing is left of a failure."""
    _mutations(parts, data, small, tmp_path)
