"""Slices that torch compressed with zstd: decoded one at a time, and written back without."""

from __future__ import annotations

import io
import pickle
import pickletools
from types import SimpleNamespace

import pytest
import torch
import zstandard
from dcp_kit import adam_state, change_metadata, load_all, read_metadata, save_small
from members_kit import tree
from torch.distributed.checkpoint._extension import ZStandard

import ckpt8
from ckpt8.checkpoint.readers import dcp as dcp_zstd
from ckpt8.checkpoint.readers.dcp import DecodedFile
from ckpt8.checkpoint.readers.dcp_metadata import read_metadata as parse
from ckpt8.checkpoint.readers.dcp_metadata import rewritten
from ckpt8.core.errors import OutputError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.inspecting.container import inspect_container

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def root(tmp_path):
    generator = torch.Generator().manual_seed(1)
    weights = {f"layers.{k}.weight": torch.randn(80, 80, generator=generator) for k in range(9)}
    saved = {"model": weights, "optimizer": adam_state(weights), "notes": "a" * 5000, "epoch": 3}
    return save_small(saved, tmp_path / "run", _extensions=[ZStandard()])


@pytest.mark.slow
def test_it_comes_back_uncompressed_and_says_so(root, tmp_path):
    before = tree(root)
    manifest = ckpt8.compress(root)
    facts = inspect_container(tmp_path / "run.ckpt8")
    reasons = {name: row["reason"] for row in facts["lossless"] for name in row["names"]}
    assert "without it" in reasons[".metadata:ckpt8.skeleton"]
    assert "compressed with zstd" in reasons["__0_0.distcp:ckpt8.skeleton"]
    assert sum(record.error is not None for record in manifest.parameters) == 9
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    old, new = read_metadata(root), read_metadata(back)
    assert all(place.transform_descriptors == ["stream.zstd/1"] for place in old.storage_data.values())
    assert all(place.transform_descriptors is None for place in new.storage_data.values())
    assert list(old.storage_data) == list(new.storage_data)
    assert (old.state_dict_metadata, old.planner_data) == (new.state_dict_metadata, new.planner_data)
    assert (old.storage_meta.save_id, old.version) == (new.storage_meta.save_id, new.version)
    assert all(type(index.offset) in (torch.Size, type(None)) for index in new.storage_data)
    x, y = load_all(root), load_all(back)
    assert (y["notes"], y["epoch"]) == ("a" * 5000, 3)
    for name, value in x.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(y[name], value, rtol=2e-5, atol=2e-4 if "exp_avg" in name else 0)
    assert tree(root) == before
    assert not ckpt8.verify(tmp_path / "run.ckpt8", root).failures


def test_what_comes_back_is_what_torch_would_have_saved_without(root, tmp_path):
    """Decoded by hand from the same file: the same bytes but for those of lossy slices."""
    ckpt8.compress(root, rules=["*=lossless"])
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    old, new = (
        sorted(read_metadata(each).storage_data.items(), key=lambda item: item[1].offset) for each in (root, back)
    )
    before, after = ((each / "__0_0.distcp").read_bytes() for each in (root, back))
    end = 0
    for (index, place), (again, moved) in zip(old, new, strict=True):
        content = zstandard.ZstdDecompressor().stream_reader(before[place.offset : place.offset + place.length]).read()
        assert (index, moved.offset) == (again, end)
        assert after[end : end + moved.length] == content
        end += moved.length
    assert end == len(after)


def test_few_slices_are_there_decoded_at_a_time(root, monkeypatch):
    alive, most = [], []
    make, drop = dcp_zstd._Spool.__init__, dcp_zstd._Spool.__del__
    monkeypatch.setattr(dcp_zstd._Spool, "__init__", lambda self: (make(self), alive.append(1))[0])
    monkeypatch.setattr(dcp_zstd._Spool, "__del__", lambda self: (drop(self), alive.pop())[0])
    ckpt8.compress(root, progress=lambda _: most.append(len(alive)), threads=2)
    # One is kept for what lies outside storages; chunks in flight may hold on to some that were dropped.
    assert 1 < max(most) <= dcp_zstd.MAX_DECODED + 1 + 6
    assert not alive


def test_slices_that_are_not_compressed_and_bytes_between(root, tmp_path):
    """Two slices of one file decoded in place, and some bytes that belong to nothing."""
    path = root / "__0_0.distcp"
    data = bytearray(b"head")
    places = {}
    for number, (index, place) in enumerate(read_metadata(root).storage_data.items()):
        content = path.read_bytes()[place.offset : place.offset + place.length]
        raw = number % 2 == 0
        content = zstandard.ZstdDecompressor().stream_reader(content).read() if raw else content
        places[index] = len(data), len(content), None if raw else ["stream.zstd/1"]
        data += content + b"." * number

    def change(metadata):
        for index, place in metadata.storage_data.items():
            place.offset, place.length, place.transform_descriptors = places[index]

    change_metadata(root, change)
    path.write_bytes(data)
    expected = load_all(root)
    ckpt8.compress(root, rules=["*=lossless"])
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    found = load_all(back)
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
    assert (back / "__0_0.distcp").read_bytes().startswith(b"head")


def test_reading_across_pieces(tmp_path):
    parts = [b"abc" * 5, bytes(3000), b"xyz"]
    frames = [zstandard.ZstdCompressor().compress(part) for part in parts]
    data = b"--" + frames[0] + parts[1] + frames[2] + b"=="
    (tmp_path / "f").write_bytes(data)
    starts = [2, 2 + len(frames[0]), 2 + len(frames[0]) + len(parts[1])]
    pieces = [(starts[0], len(frames[0]), True), (starts[1], 3000, False), (starts[2], len(frames[2]), True)]
    file = SourceFile(ByteRange.of(tmp_path / "f"))
    decoded = DecodedFile(file, pieces, dict.fromkeys(starts, 4000))
    decoded.keep(0, [])
    decoded.keep(2, [SimpleNamespace(offset=1, nbytes=1)])
    expected = b"--" + b"".join(parts) + b"=="
    assert decoded.source.length == len(expected)
    assert decoded.places == [(2, 15), (17, 3000), (3017, 3)]
    for start in [*range(20), *range(3010, len(expected))]:
        for stop in [*range(start, start + 9), 3018, len(expected)]:
            if start <= stop <= len(expected):
                assert decoded.read(start, stop - start) == expected[start:stop]
    file.close()


def test_a_full_disk_is_an_error_of_the_output(root, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp_zstd.os, "pwritev", full)
    with pytest.raises(OutputError, match="a temporary file cannot be written: No space left"):
        ckpt8.compress(root)
    assert [path.name for path in root.parent.iterdir()] == ["run"]


def test_metadata_written_back_as_it_was_is_equal(root):
    """Every kind of value, read by Python's pickle; opcodes of a protocol that torch of any age reads."""
    metadata = read_metadata(root)
    metadata.planner_data = {
        "a": ("a", 1, -1, 1 << 40, -(1 << 40)),
        "b": [1.5, None, True, b"\0", "\u00e9", ()],
        "c": {},
    }
    (root / ".metadata").write_bytes(pickle.dumps(metadata))
    data = (root / ".metadata").read_bytes()
    again = rewritten(parse(data, "m"), {}, "m")
    assert pickle.loads(again) == pickle.loads(data)
    assert {opcode.proto for opcode, _, _ in pickletools.genops(io.BytesIO(again))} <= {0, 1, 2, 3}


def test_a_temporary_file_that_is_too_short_ends_the_read():
    spool = dcp_zstd._Spool()
    spool.append(b"abc")
    with pytest.raises(OutputError, match="shorter than what was written"):
        spool.read_into(1, memoryview(bytearray(3)))
