"""What every reader in the table must do, and one more that exists in the tests alone, registered as a new one is.

Recognition is by content; everything that is no checkpoint gives one clear line.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import zipfile
from contextlib import closing
from pathlib import Path

import pytest
import safetensors.torch
import tiny_reader
import torch

import ckpt8
from ckpt8.checkpoint.readers import READERS, get_reader, open_checkpoint
from ckpt8.checkpoint.tree import TensorRef, iter_leaves
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile

IDS = (*READERS, "tiny")
OPTIONS = {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The line that adds a reader to the table."""
    monkeypatch.setitem(READERS, "tiny", "tiny_reader")


@pytest.fixture(scope="module")
def trained():
    """A model and its AdamW after three steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(96, 64), torch.nn.Linear(64, 80))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _write_tiny(path, model, optimizer):
    states = optimizer.state_dict()["state"]
    named = enumerate(model.state_dict().items())
    runs = {name: (weight, states[k]["exp_avg"], states[k]["exp_avg_sq"]) for k, (name, weight) in named}
    tiny_reader.write(path, runs, 3, OPTIONS)


def _write_torch(path, model, optimizer, *, new):
    objects = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(objects, path, _use_new_zipfile_serialization=new)


WRITERS = {
    "torch-zip": lambda *args: _write_torch(*args, new=True),
    "torch-legacy": lambda *args: _write_torch(*args, new=False),
    "safetensors": lambda path, model, _: safetensors.torch.save_file(model.state_dict(), path),
    "tiny": _write_tiny,
}


@pytest.fixture(params=IDS)
def reader_id(request):
    return request.param


@pytest.fixture
def sample(reader_id, trained, tmp_path):
    """A file of the format under a name that says nothing. A reader without a writer here fails."""
    path = tmp_path / "run.bin"
    WRITERS[reader_id](path, *trained)
    return path


def _sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_content_alone_tells_the_format(reader_id, sample):
    with closing(SourceFile(ByteRange.of(sample))) as file:
        assert [each for each in READERS if get_reader(each).sniff(file)] == [reader_id]
    for length in (0, 1, 4, 12):
        with closing(SourceFile(ByteRange(sample, 0, length))) as file:
            assert isinstance(get_reader(reader_id).sniff(file), bool)


def _check_bounds(checkpoint):
    end = 0
    for storage in sorted(checkpoint.storages, key=lambda storage: (storage.offset, storage.nbytes)):
        assert storage.offset >= end
        end = storage.offset + storage.nbytes
    assert end <= checkpoint.size
    places = {storage.key: storage for storage in checkpoint.storages}
    assert len(places) == len(checkpoint.storages)
    for _, leaf in iter_leaves(checkpoint.tree):
        if isinstance(leaf, TensorRef) and 0 not in leaf.shape:
            reach = leaf.offset + sum((n - 1) * step for n, step in zip(leaf.shape, leaf.stride, strict=True)) + 1
            assert reach * leaf.dtype.itemsize <= places[leaf.key].nbytes


def test_storages_and_tensors_lie_in_the_file(reader_id, sample, trained):
    model, optimizer = trained
    with open_checkpoint(sample) as checkpoint:
        assert (checkpoint.format, checkpoint.size) == (reader_id, sample.stat().st_size)
        _check_bounds(checkpoint)
        places = {storage.key: storage for storage in checkpoint.storages}
        wanted = [*model.state_dict().values()]
        if reader_id != "safetensors":
            states = optimizer.state_dict()["state"].values()
            wanted += [value for state in states for key, value in state.items() if key != "step"]
        found = []
        for _, ref in iter_leaves(checkpoint.tree):
            content = bytearray(places[ref.key].nbytes)
            checkpoint.read_into(places[ref.key].offset, memoryview(content))
            flat = torch.frombuffer(content, dtype=ref.dtype.torch)
            found.append(flat.as_strided(ref.shape, ref.stride, ref.offset))
        assert all(any(torch.equal(tensor, each) for each in found) for tensor in wanted)


def test_reads_beyond_the_end_are_errors(sample):
    with open_checkpoint(sample) as checkpoint:
        whole = bytearray(checkpoint.size)
        checkpoint.read_into(0, memoryview(whole))
        assert whole == sample.read_bytes()
        for offset, length in ((checkpoint.size, 1), (checkpoint.size - 1, 2), (-1, 1)):
            with pytest.raises(InputError, match=sample.name):
                checkpoint.read_into(offset, memoryview(bytearray(length)))


def test_a_file_that_changes_is_noticed(sample):
    before = _sha256(sample)
    with open_checkpoint(sample) as checkpoint:
        checkpoint.check_unchanged()
        assert _sha256(sample) == before
        os.utime(sample, ns=(1, 1))
        with pytest.raises(InputError, match="changed while it was read"):
            checkpoint.check_unchanged()


def test_every_cut_is_an_error_that_names_the_file(sample):
    data = sample.read_bytes()
    for length in {*range(0, 200, 7), *range(0, len(data), len(data) // 60), len(data) - 1}:
        sample.write_bytes(data[:length])
        with pytest.raises(InputError, match=f"^{sample}: "), open_checkpoint(sample):
            pass


def test_a_flipped_byte_is_an_error_or_leaves_everything_in_bounds(sample):
    data = sample.read_bytes()
    for place in {*range(0, 400, 5), *range(0, len(data), len(data) // 60), *range(len(data) - 200, len(data), 9)}:
        sample.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        try:
            with open_checkpoint(sample) as checkpoint:
                _check_bounds(checkpoint)
        except InputError as exc:
            assert str(exc).startswith(f"{sample}: ")  # noqa: PT017


CODECS = {"flash": {"split24/1", "companded8/1"}, "archive": {"lattice/1", "vscaled/1", "rclog/1"}}


def test_inspect_compress_restore_verify(sample, reader_id, run_command, tmp_path):
    before = _sha256(sample)
    code, shown, _ = run_command("inspect", sample, "--json")
    facts = json.loads(shown)
    assert (code, facts["format"]) == (0, reader_id)
    for preset in ("lossless", "flash", "archive"):
        packed, restored = tmp_path / f"{preset}.ckpt8", tmp_path / preset
        manifest = ckpt8.compress(sample, packed, preset=preset)
        assert [member.format for member in manifest.members] == [reader_id]
        ckpt8.restore(packed, restored)
        assert (_sha256(restored) == before) == (preset == "lossless")
        assert run_command("verify", packed, "--against", sample)[0] == 0
        if reader_id != "safetensors" and preset != "lossless":
            codecs = {storage.codec["id"] for storage in manifest.storages} - {"lossless/1"}
            assert codecs == CODECS[preset]
            assert [parameter.rule["kind"] for parameter in manifest.parameters] == ["adam"] * 4
    assert _sha256(sample) == before


# What is no checkpoint: one clear line


def safetensors_bytes(header):
    return len(header).to_bytes(8, "little") + header


def zip_bytes():
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr("word/document.xml", "x")
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", InputError, "an empty file"),
        (b"hello, world\n" * 50, InputError, "a text file"),
        ("αβγ".encode() * 200, InputError, "a text file"),
        (b"version https://git-lfs.github.com/spec/v1\n", InputError, "a Git LFS pointer"),
        (bytes(range(256)) * 3, InputError, "of an unknown format"),
        (b"\xff\xfe\xfd\xfc" * 3, InputError, "of an unknown format"),
        (bytes(1000), InputError, "zero bytes"),
        (pickle.dumps({"a": 1}), InputError, "a plain pickle"),
        (bytes(257) + b"ustar" + bytes(250), UnsupportedError, "a tar file"),
        (zip_bytes(), InputError, "a zip file without a data.pkl"),
        (b"PK\5\6" + bytes(18), InputError, "a zip file without a data.pkl"),
        (b"PK\3\4" + bytes(200), InputError, "damaged zip file"),
        (safetensors_bytes(b'{"w":{"dtype":"F32"}}'), InputError, "tensor 'w': its header entry is malformed"),
        (safetensors_bytes(b'{"__metadata__":{"ckpt8":"1.0"}}'), InputError, r"already a \.ckpt8 file"),
    ],
)
def test_other_content_is_named(tmp_path, content, error, message):
    path = tmp_path / "model.pt"  # the name says nothing
    path.write_bytes(content)
    with pytest.raises(error, match=message) as caught, open_checkpoint(path):
        pass
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_what_is_not_a_file_is_named(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    empty = tmp_path / "empty"
    empty.mkdir()
    for path, message in [
        (tmp_path / "missing.pt", "cannot be read: No such file"),
        (empty, "an empty directory"),
        (tmp_path, "a directory; give"),
        (pipe, "is not a regular file"),
    ]:
        with pytest.raises(InputError, match=f"^{path}: {message}"), open_checkpoint(path):
            pass


def test_reader_table():
    with closing(SourceFile(ByteRange(Path(os.devnull), 0, 0))) as empty:
        for reader_id, module in READERS.items():
            assert get_reader(reader_id).__name__ == module
            assert not get_reader(reader_id).sniff(empty)
