"""Small files that ask for much: each is read or refused within a second and half a gigabyte."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import zstandard
from hostile_kit import bounded, container_of, outcome, sealed
from safetensors.torch import save_file
from test_no_code import TENSOR, zipped

import ckpt8
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.container.checks import MAX_COMPONENTS
from ckpt8.container.frames import FRAME
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

LARGEST = 1 << 17
"""Bytes that count as small."""


def read(path):
    """Inspect, compress, verify: the message where one of them is refused."""
    assert path.stat().st_size <= LARGEST
    with bounded():
        return outcome(lambda: inspect_checkpoint(path, tensors=True))


def pickled(path, body):
    """A checkpoint of which ``body`` is the pickle behind a tensor that is memo entry 1."""
    path.write_bytes(zipped(b"\x80\x02(" + TENSOR + b"q\x01" + body + b"t."))
    return path


LONG_KEY = b"X\0\x04\0\0" + b"k" * 1024 + b"q\x02"
DEEP = {
    "lists": b"]" * 900 + b"](" + b"h\x01" * 5000 + b"e" + b"a" * 900,
    "long keys": LONG_KEY + b"0" + b"}h\x02" * 900 + b"](" + b"h\x01" * 5000 + b"e" + b"s" * 900,
    "containers": b"]" * 900 + b"](" + b"]h\x01a" * 2000 + b"e" + b"a" * 900,
    "optimizers": b"X\x05\0\0\0stateq\x05X\x0c\0\0\0param_groupsq\x0600"
    + (b"}h\x06]sh\x05}K\x00" * 300 + b"](" + b"h\x01" * 5000 + b"e" + b"ss" * 300),
}


@pytest.mark.by_default("lists")
@pytest.mark.parametrize("kind", DEEP)
def test_many_tensors_under_a_long_path(kind, tmp_path):
    path = pickled(tmp_path / "x.pt", DEEP[kind])
    with bounded(4):  # most of two is five thousand names in five plans; what was quadratic took ten
        assert outcome(lambda: inspect_checkpoint(path)) is None


PRIME = (1 << 61) - 1
"""Two numbers have the same hash where they differ by a multiple of this."""


def colliding(count, value):
    numbers = (k * PRIME for k in range(1, count + 1))
    return b"".join(b"\x8a\x0a" + number.to_bytes(10, "little") + value for number in numbers)


def test_keys_that_collide(tmp_path):
    numbers = [k * PRIME for k in range(1, 4)]
    assert len({hash(number) for number in numbers}) == 1
    for name, body in {
        "dict": b"}(" + colliding(8000, b"N") + b"u",
        "one by one": b"}" + colliding(7000, b"Ns"),
        "ordered": b"ccollections\nOrderedDict\n](" + colliding(7000, b"N\x86") + b"e\x85R",
    }.items():
        assert "made to collide" in read(pickled(tmp_path / "x.pt", body)), name
    # As many keys that do not collide, and some that do, are what a checkpoint may have.
    fair = b"".join(b"\x8a\x09" + (k << 40).to_bytes(9, "little") + b"N" for k in range(8000))
    assert read(pickled(tmp_path / "x.pt", b"}(" + fair + b"u")) is None
    assert read(pickled(tmp_path / "x.pt", b"}(" + colliding(60, b"N") + b"u")) is None


def raw_safetensors(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


SAFETENSORS = {
    "dimensions": ({"w": {"dtype": "U8", "shape": [1] * 30_000, "data_offsets": [0, 1]}}, "30000 dimensions"),
    "large dimensions": ({"w": {"dtype": "U8", "shape": [2**62] * 5000, "data_offsets": [0, 1]}}, "5000 dimensions"),
    "a billion elements": ({"w": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}, "cut off"),
    "many names": ({f"w{k}": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for k in range(1800)}, None),
    "digits": (b'{"w":' + b"9" * 100_000 + b"}", "not valid JSON"),
    "a long fraction": (b'{"w":1.' + b"9" * 100_000 + b"}", "malformed"),
    "a long exponent": (b'{"w":1' + b"0" * 100_000 + b".0}", "not valid JSON"),
    "depth": (b'{"w":' + b'{"a":' * 20_000, "not valid JSON"),
}


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_safetensors_headers(kind, tmp_path):
    header, expected = SAFETENSORS[kind]
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw_safetensors(header, b"\0" if "dimensions" in kind else b""))
    message = read(path)
    assert expected in message if expected else message is None


def test_dimensions_as_many_as_there_may_be(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones([1] * 64)}, path)
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tree["w"].shape == (1,) * 64


NUMBERS = {
    "a huge step": b"\x8b\0\x40\0\0" + b"\x7f" * 0x4000,
    "an infinite step": b"G\x7f\xf0\0\0\0\0\0\0",
    "no number": b"G\x7f\xf8\0\0\0\0\0\0",
    "a negative step": b"J\xff\xff\xff\xff",
}


@pytest.mark.parametrize("name", NUMBERS)
def test_settings_of_an_optimizer(name, tmp_path):
    """Numbers that no optimizer has: its update is unknown, and everything else goes on."""
    value = NUMBERS[name]
    group = b"}(X\x06\0\0\0params](K\x00eX\x05\0\0\0betas" + value + value + b"\x86X\x03\0\0\0eps" + value + b"u"
    state = b"}K\x00}(X\x04\0\0\0step" + value + b"X\x07\0\0\0exp_avgh\x01X\x0a\0\0\0exp_avg_sqh\x01us"
    body = b"}(X\x05\0\0\0state" + state + b"X\x0c\0\0\0param_groups](" + group + b"eu"
    path = pickled(tmp_path / "x.pt", body)
    assert read(path) is None
    ckpt8.compress(path)
    assert not ckpt8.verify(path.with_suffix(".ckpt8"), path).failures


def test_names_of_more_digits_than_python_reads(tmp_path):
    """Layers are put in order by the numbers in their names."""
    root = tmp_path / "run"
    root.mkdir()
    names = [f"layers.{'9' * 5000}{k}.w" for k in (1, 2, 10)]
    save_file({name: torch.ones(70, 70) for name in names}, root / "model.safetensors")
    state = {k: {"exp_avg": torch.ones(70, 70), "exp_avg_sq": torch.ones(70, 70)} for k in range(3)}
    torch.save({"state": state, "param_groups": [{"params": [0, 1, 2]}]}, root / "optimizer.pt")
    with bounded(3):
        assert outcome(lambda: ckpt8.compress(root)) is None


@pytest.mark.parametrize(
    "step", ids=range(9), argvalues=[float("inf"), float("nan"), 10**400, 10**5000, 2**60, -1, "x", None, True]
)
def test_steps_that_are_none(step, tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for state in saved["optimizer"]["state"].values():
        state["step"] = step
    torch.save(saved, tmp_path / "a.pt")
    message = outcome(lambda: ckpt8.resume(tmp_path / "a.pt", model=model, optimizer=optimizer))
    assert message is None if step == -1 else "step" in message


def refused_everywhere(path, match):
    with bounded(3):
        for action in (ckpt8.verify, ckpt8.restore, ckpt8.load, inspect_container):
            assert match in outcome(lambda action=action: action(path))


@pytest.mark.slow
def test_storages_of_a_terabyte_that_are_not_there(tmp_path):
    """A table of frames of no length costs a byte each, and compresses to nothing."""

    def change(manifest):
        chunks = 200_000
        manifest["storages"][0] |= {"numel": chunks * FRAME}
        manifest["storages"][0]["parts"]["bytes"] = {"lengths": [0] * chunks, "crcs": [0] * chunks}
        manifest["members"][0]["size"] = chunks * FRAME

    path = tmp_path / "x.ckpt8"
    path.write_bytes(container_of(b"", "file", change=change))
    assert path.stat().st_size < LARGEST
    refused_everywhere(path, "cannot hold")


@pytest.mark.slow
def test_a_bomb_is_as_large_as_it_says_and_takes_no_memory(tmp_path):
    """256 MiB of zeros in a few kB are what zstd can do: read chunk by chunk, whatever the size."""
    chunks = 256
    frame = zstandard.ZstdCompressor().compress(bytes(FRAME))
    stored = []

    def change(manifest):
        from zlib import crc32

        manifest["slab"] = chunks * FRAME
        manifest["storages"][0]["numel"] = manifest["members"][0]["size"] = chunks * FRAME
        table = {"lengths": [len(frame)] * chunks, "crcs": [crc32(frame)] * chunks}
        manifest["storages"][0]["parts"]["bytes"] = table
        stored.append(zstandard.compress(json.dumps(manifest).encode()))

    container_of(b"x", "file", change=change)
    path = tmp_path / "x.ckpt8"
    path.write_bytes(sealed({"s/bytes": frame * chunks}, stored[0]))
    assert path.stat().st_size < LARGEST
    with bounded(10, 100 << 20):
        assert ckpt8.verify(path, threads=1).failures == ()
        ckpt8.restore(path, tmp_path / "back", threads=1)
    assert (tmp_path / "back").stat().st_size == chunks * FRAME


def as_directory(*paths):
    def change(manifest):
        manifest["directory"] = "run"
        member, record = manifest["members"][0], manifest["storages"][0]
        manifest["members"] = [{**member, "path": path, "size": 0, "skeleton": k} for k, path in enumerate(paths)]
        empty = {"numel": 0, "parts": {"bytes": {"lengths": [], "crcs": []}}}
        manifest["storages"] = [{**record, **empty, "name": f"s{k}"} for k in range(len(paths))]

    return change


def test_paths_of_members(tmp_path):
    path = tmp_path / "x.ckpt8"
    for paths, match in {
        ("a/" * 500_000 + "a",): "longer than 4096 bytes",
        ("é" * 4000,): "longer than 4096 bytes",
        (*tuple("a/" * 250 + f"{k}" for k in range(200)), "a"): "lies below another member",
        ("a/b", "a/b/c"): "lies below another member",
        ("a/b-c", "a/b/c", "a/b"): "lies below another member",
    }.items():
        path.write_bytes(container_of(b"", "file", change=as_directory(*paths)))
        assert path.stat().st_size < LARGEST
        with bounded():
            message = outcome(lambda: ckpt8.restore(path, tmp_path / "out"))
        assert match in message
        assert not (tmp_path / "out").exists()


def test_directories_as_deep_as_they_may_be(tmp_path):
    """What can be compressed can be restored, and removed again."""
    deepest = MAX_COMPONENTS - 1
    for depth in (deepest, deepest + 1, 1500):
        path = tmp_path / f"{depth}.ckpt8"
        path.write_bytes(container_of(b"", "file", change=as_directory("a/" * depth + "a")))
        with bounded(3):
            message = outcome(lambda path=path: ckpt8.restore(path, tmp_path / "out"))
        assert message is None if depth == deepest else "more than 256 components" in message
    ckpt8.compress(make(tmp_path / "run", deepest))
    assert "nested deeper" in outcome(lambda: ckpt8.compress(make(tmp_path / "more", deepest + 1)))


def make(root, depth):
    (root / ("a/" * depth)).mkdir(parents=True)
    save_file({"w": torch.ones(2)}, root / ("a/" * depth) / "model.safetensors")
    return root


def test_a_member_that_is_not_what_its_pickle_says(tmp_path):
    """A storage larger than its record, a tensor larger than its storage, no zip file at all."""
    good = b"\x80\x02}X\x01\0\0\0w" + TENSOR + b"s."
    path = tmp_path / "x.ckpt8"
    path.write_bytes(container_of(zipped(good), "torch-zip"))
    assert torch.equal(ckpt8.load(path)["w"], torch.zeros(2))
    for content, match in {
        zipped(good.replace(b"K\x02tQ", b"J\0\0\0\x10tQ")): "has 8 bytes",
        zipped(good.replace(b"K\x02\x85K\x01", b"J\0\0\0\x10\x85K\x01")): "reaches element",
        b"PK\3\4" + bytes(100): "damaged zip file",
        b"": "damaged zip file",
    }.items():
        path.write_bytes(container_of(content, "torch-zip"))
        with bounded(3):
            assert match in outcome(lambda: ckpt8.load(path))
