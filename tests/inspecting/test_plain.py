"""``verify`` of what is no container: each CRC, every byte, and what nobody can know. zipfile is the oracle."""

from __future__ import annotations

import json
import pickle
import struct
import warnings
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from run_kit import SmallRun
from safetensors.torch import save_file

import ckpt8


@pytest.fixture
def plain(tmp_path):
    """A folder with a checkpoint of each kind, and a file that is none."""
    state = SmallRun(1, (96, 96)).advance(2)
    torch.save(state, tmp_path / "zip.pt")
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    save_file({"weight": torch.ones(40), "bias": torch.zeros(3)}, tmp_path / "it.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_what_holds_is_counted_and_what_cannot_be_known_is_said(plain, run_command):
    with zipfile.ZipFile(plain / "zip.pt") as archive:
        records = len(archive.infolist())
    code, out, _ = run_command("verify", plain / "zip.pt", columns=500)
    assert (code, out.count("\n")) == (0, 1)
    assert f"{records} records of the zip match their CRC" in out
    assert "no checksum" not in out
    for name in ("old.pt", "it.safetensors"):
        out = run_command.shown("verify", plain / name)
        assert out.count("\n") == 1
        assert "have no checksum" in out
        assert "CRC" not in out
    checks = ckpt8.verify(plain).plain
    assert (checks.files, checks.records, checks.others) == (3, records, ("config.json",))
    assert checks.unknown == ckpt8.verify(plain / "old.pt").plain.storages + 2
    assert json.loads(run_command.shown("verify", plain, "--json"))["plain"]["files"] == 3


def test_every_flipped_record_of_a_zip_is_found_and_its_tensor_named(plain, run_command):
    path = plain / "zip.pt"
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    names = set()
    for entry in entries:
        name_length, extra_length = struct.unpack_from("<2H", content, entry.header_offset + 26)
        at = entry.header_offset + 30 + name_length + extra_length + entry.file_size // 2
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        err = run_command.refused(3, "verify", path)
        assert err.count("\n") == 1
        if "/data/" in entry.filename:
            assert repr(entry.filename) in err
            names.add(err.partition(", '")[2].partition("'")[0])
    assert len(names) == sum("/data/" in entry.filename for entry in entries)
    assert any(name.endswith("exp_avg") for name in names)
    assert run_command.refused(3, "verify", plain).startswith(f"ckpt8: {path}: ")


@pytest.mark.parametrize("name", ["zip.pt", "old.pt", "it.safetensors"])
def test_a_file_cut_off_is_damaged(name, plain, run_command):
    path = plain / name
    path.write_bytes(path.read_bytes()[:-9])
    assert "cut off" in run_command.refused(3, "verify", path)


def test_a_container_is_never_taken_for_safetensors(plain, run_command):
    ckpt8.compress(plain / "zip.pt")
    content = (plain / "zip.ckpt8").read_bytes().replace(b'"ckpt8":', b'"ckpt9":', 1)
    for name in ("zip.ckpt8", "renamed.safetensors"):
        (plain / name).write_bytes(content)
        run_command.refused(3, "verify", plain / name)


def test_an_original_and_restoring_are_refused_with_what_to_do(plain, run_command):
    path = plain / "zip.pt"
    assert f"ckpt8 diff {path} {path}" in run_command.refused(2, "verify", path, "--against", path)
    read = []
    with pytest.raises(ckpt8.UsageError, match="states no errors to measure"):
        ckpt8.verify(path, path, progress=read.append)
    assert not read
    for name in ("zip.pt", "old.pt", "it.safetensors"):
        assert "needs no restoring" in run_command.refused(3, "restore", plain / name)
        with pytest.raises(ckpt8.InputError, match="needs no restoring"):
            ckpt8.restore(plain / name)


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path, run_command):
    state = {"a": torch.ones(30), "b": torch.arange(5000.0)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path, single_file_per_rank=False), no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    first, second = metadata.storage_data.values()
    (tmp_path / "sub").mkdir()
    (tmp_path / second.relative_path).rename(tmp_path / "sub" / first.relative_path)
    second.relative_path = f"sub/{first.relative_path}"
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with (
        zipfile.ZipFile(tmp_path / first.relative_path) as one,
        zipfile.ZipFile(tmp_path / second.relative_path) as two,
    ):
        records = len(one.infolist()) + len(two.infolist())
    checks = ckpt8.verify(tmp_path).plain
    assert (checks.files, checks.records, checks.unknown) == (2, records, 0)
    path = tmp_path / second.relative_path
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert f"{path}: record 'archive/data/0' is damaged" in run_command.refused(3, "verify", tmp_path)
