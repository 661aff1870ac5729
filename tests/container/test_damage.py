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
import zstandard
from flips_kit import make_sample
from fuzz_mutations import edit_tree, json_value
from hostile_kit import INFINITE, both, drop, edited, fields, pack, put, stored_manifest, unpack, with_header
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import ckpt8
from ckpt8.cli.show.inspect import show
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError, InputError, UnsupportedError
from ckpt8.inspecting.container import inspect_container


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A container of a few kB with every codec, and its source."""
    return make_sample(tmp_path_factory.mktemp("small"), "file")


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


W = "model.w"
RHO = ("storages", W, "parts", "rho")
MALFORMED = {
    "no storages": put("storages", {}),
    "storages missing": drop("storages"),
    "a storage that is a list": put("storages", 0, []),
    "a storage twice": put("storages", lambda old: [*old, copy.deepcopy(old[0])]),
    "a name of another type": fields("storages", W, name=1),
    "another name": fields("storages", W, name="model.v"),
    "an unknown dtype": fields("storages", W, dtype="float3"),
    "a dtype of the wrong type": fields("storages", W, dtype=[]),
    "an unknown role": fields("storages", W, role="moment3"),
    "a negative count": fields("storages", W, numel=-1),
    "a huge count": fields("storages", W, numel=2**61),
    "a count beyond 64 bits": fields("storages", W, numel=2**70),
    "a boolean count": fields("storages", W, numel=True),
    "a count one too large": fields("storages", W, numel=41),
    "a count of zero": fields("storages", W, numel=0),
    "a chunk more": fields("storages", W, numel=2**20 + 40),
    "a length too large": fields(*RHO, lengths=lambda old: [old[0] + 1]),
    "a length too small": fields(*RHO, lengths=lambda old: [old[0] - 1]),
    "a negative length": fields(*RHO, lengths=[-1]),
    "a length beyond 64 bits": fields(*RHO, lengths=[2**64]),
    "lengths that only add up": fields(*RHO, lengths=lambda old: [old[0], 0], crcs=lambda old: [old[0], 0]),
    "no lengths": fields(*RHO, lengths=[], crcs=[]),
    "more checksums than lengths": fields(*RHO, crcs=lambda old: [old[0], 0]),
    "a wrong checksum": fields(*RHO, crcs=lambda old: [old[0] ^ 1]),
    "a checksum beyond 32 bits": fields(*RHO, crcs=[2**32]),
    "a part missing": drop(*RHO),
    "another part": both(put(*RHO[:-1], lambda old: old | {"rho2": old["rho"]}), drop(*RHO)),
    "the codec of another type": fields("storages", W, dtype="int32"),
    "a slab of zero": put("slab", 0),
    "a slab of half a frame": put("slab", 2**19),
    "a negative slab": put("slab", -(2**20)),
    "a frame of another size": put("frame", 2**19),
    "a segment of no storage": put("members", 0, "segments", 0, 1, 99),
    "a negative segment": put("members", 0, "segments", 0, 1, -1),
    "a segment at a negative offset": put("members", 0, "segments", 0, 0, -1),
    "a segment of three": put("members", 0, "segments", 0, [1, 0, 0]),
    "segments missing": put("members", 0, "segments", None),
    "segments that overlap": put("members", 0, "segments", lambda old: [old[0], [old[0][0] + 1, old[1][1]], *old[2:]]),
    "segments out of order": put("members", 0, "segments", lambda old: old[::-1]),
    "a segment twice": put("members", 0, "segments", lambda old: [old[0], *old]),
    "a segment left out": put("members", 0, "segments", lambda old: old[1:]),
    "a segment behind the end": put("members", 0, "segments", lambda old: [*old[:-1], [2**61, old[-1][1]]]),
    "a larger member": put("members", 0, "size", lambda old: old + 1),
    "a smaller member": put("members", 0, "size", lambda old: old - 1),
    "a huge member": put("members", 0, "size", 2**61),
    "another skeleton": put("members", 0, "skeleton", 0),
    "no such skeleton": put("members", 0, "skeleton", 99),
    "a checksum field of no storage": put("members", 0, "crc_fields", [[0, 99]]),
    "a checksum field at a negative offset": put("members", 0, "crc_fields", [[-1, 0]]),
    "a checksum field behind the end": put("members", 0, "crc_fields", [[2**40, 0]]),
    "a checksum field that crosses the end": put("members", 0, lambda m: m | {"crc_fields": [[m["size"] - 2, 0]]}),
    "a checksum field inside a storage": put("members", 0, lambda m: m | {"crc_fields": [[m["segments"][0][0], 0]]}),
    "a tensor of no storage": put("tensors", 0, "storage", 99),
    "a tensor of a negative storage": put("tensors", 0, "storage", -1),
    "a negative shape": put("tensors", 0, "shape", [-1]),
    "a stride of another length": put("tensors", 0, "stride", [1, 1, 1]),
    "a parameter of no storage": put("parameters", 0, "moments", {"moment1": 99}),
    "a parameter of something else": put("parameters", 0, "moments", {"moment1": "0"}),
    "rules that are no list": put("rules", "x"),
    "a preset that is no text": put("preset", 1),
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
    path = written(fields("tensors", W, **TENSORS[name]))
    if name != "many dimensions":
        with pytest.raises(InputError), ckpt8.open(path) as file:
            file.get_tensor(W)
    exercise(path, small.with_suffix(".pt"), tmp_path)


@pytest.mark.parametrize(
    "codec",
    [
        {"id": "split24/2", "R": 127}, {"id": "split25/1"}, {"id": ""}, {"id": None}, {"id": ["split24/1"]}, {"R": 127},
        {}, {"id": "lossless/1", "R": 1}, *({"id": "split24/1", "R": levels} for levels in (128, 0, 2, "127", 127.0)),
        {"id": "split24/1", "Q": 127},
    ],
)  # fmt: skip
def test_unknown_codecs_are_unsupported(codec, written):
    with pytest.raises(UnsupportedError, match=r"codec"):
        ContainerReader(written(fields("storages", W, codec=codec)))


@pytest.mark.parametrize(
    ("signed", "levels", "power"),
    [
        ([], 127, 1), (0, 127, 1), ("x", 127, 1), (None, 127, 1), (True, None, 1), (True, 127, "1"), (True, 127, [1]),
        (True, 127, 0.5), (True, 255, 1),
    ],
)  # fmt: skip
def test_parameters_of_companded8_that_it_does_not_have(signed, levels, power, written, small, tmp_path):
    codec = {"id": "companded8/1", "signed": signed, "Q": levels, "p": power}
    path = written(fields("storages", "optimizer.state.0.exp_avg", codec=codec))
    assert is_detected(path)
    exercise(path, small.with_suffix(".pt"), tmp_path)


@pytest.mark.parametrize("name", [W, "optimizer.state.0.exp_avg"])
@pytest.mark.parametrize("dtype", ["int32", "float64", "float16", "uint8", "complex64", "qint8", "float8_e4m3fn"])
def test_a_codec_on_a_type_that_it_is_not_for(name, dtype, written, small, tmp_path):
    path = written(fields("storages", name, dtype=dtype))
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


@pytest.mark.parametrize("count", [0, 2])
def test_members_that_are_none_or_several(count, written, small, tmp_path):
    path = written(put("members", lambda members: members * count))
    exercise(path, small.with_suffix(".pt"), tmp_path)
    with pytest.raises(InputError):
        ckpt8.restore(path, tmp_path / "restored")


# Hostile frames: a checksum that is right of bytes that are wrong


def _with_frame(parts, frame):
    metadata, entries, manifest = parts
    changed = copy.deepcopy(manifest)
    put(*RHO, {"lengths": [len(frame)], "crcs": [zlib.crc32(frame)]})(changed)
    return pack(changed, {**entries, f"{W}/rho": frame}, metadata)


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
    path.write_bytes(_with_frame(parts, FRAMES[name]))
    started = time.process_time()
    assert is_detected(path)
    assert "restore" in exercise(path, small.with_suffix(".pt"), tmp_path)
    assert time.process_time() - started < 2


def test_a_frame_built_the_same_way_is_read_and_one_with_a_window_of_more_than_8_mib_refused(parts, tmp_path):
    path, frame = tmp_path / "x.ckpt8", _declared(bytes(40), 40)
    wide = frame[:5] + bytes([21 << 3]) + frame[6:]
    assert zstandard.get_frame_parameters(wide).window_size == 1 << 31
    for content in (frame, wide):
        path.write_bytes(_with_frame(parts, content))
        assert is_detected(path) == (content is wide)


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


def mutated(parts, seed, small, folder):
    """Whatever the manifest says, there is a result or an InputError, soon, and nothing is left of a failure."""
    rng, (metadata, entries, manifest) = random.Random(seed), copy.deepcopy(parts)
    value = json_value(rng)
    edit_tree(rng, manifest, lambda *place: INFINITE if rng.random() < 0.03 else value(*place), counts=(1, 2))
    path = folder / "x.ckpt8"
    path.write_bytes(pack(manifest, entries, metadata))
    started = time.process_time()
    exercise(path, small.with_suffix(".pt"), folder)
    assert time.process_time() - started < 10


@given(seed=st.integers(0, 1 << 32))
def test_a_mutated_manifest_is_read_or_refused(seed, parts, small, tmp_path):
    mutated(parts, seed, small, tmp_path)
