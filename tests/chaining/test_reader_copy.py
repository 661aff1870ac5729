"""``--leave-reader``: one file beside a run that reads it without ckpt8, which nothing takes for a part of the run."""

from __future__ import annotations

import json
import secrets
import sys
from pathlib import Path

import pytest
import torch
from chain_command_kit import make_run
from s3_kit import BUCKET
from strict_reader import same

import ckpt8
from ckpt8.chaining.reader_copy import NAME, leave_reader
from ckpt8.checkpoint.replacing import checkpoints_in, run_in
from ckpt8.container import plain_reader
from ckpt8.core.errors import OutputError

CONTENT = Path(plain_reader.__file__).read_bytes()


@pytest.fixture
def folder(tmp_path):
    return make_run(tmp_path / "run", 3)[0].parent


def test_the_copy_reads_the_run_and_is_no_part_of_it(folder, run_command, monkeypatch):
    before = run_in(folder)
    assert run_command("chain", folder, "--leave-reader", "--dry-run")[0] == 0
    assert not (folder / NAME).exists()
    assert run_command("chain", folder, "--leave-reader")[0] == 0
    assert (folder / NAME).read_bytes() == CONTENT
    assert (folder / NAME).stat().st_mode & 0o777 == (folder / "step-5.ckpt8").stat().st_mode & 0o777
    changed = (folder / NAME).stat().st_mtime_ns
    code, out, _ = run_command("chain", folder, "--leave-reader", "--remove", "--json")
    facts = json.loads(out)
    assert (code, facts["skipped"], len(facts["checkpoints"])) == (0, [], 3)
    assert (folder / NAME).stat().st_mtime_ns == changed
    assert {path.name for path in folder.iterdir()} == {Path(name).stem + ".ckpt8" for name in before} | {NAME, "bases"}
    assert checkpoints_in(folder) == []
    assert [row.name for row in ckpt8.runs(folder).checkpoints] == ["step-5.ckpt8", "step-10.ckpt8", "step-15.ckpt8"]
    monkeypatch.syspath_prepend(folder)
    import read_ckpt8

    with ckpt8.open(folder / "step-15.ckpt8") as file:
        tensors = read_ckpt8.read(folder / "step-15.ckpt8")
        assert all(same(tensors[name], file.get_tensor(name)) for name in file.keys())  # noqa: SIM118
    del sys.modules["read_ckpt8"]


def test_it_replaces_another_version_of_itself_and_no_other_file(tmp_path):
    first, newline, _ = CONTENT.partition(b"\n")
    (tmp_path / NAME).write_bytes(first + newline + b'of an earlier version"""\n')
    assert leave_reader(tmp_path)
    assert (tmp_path / NAME).read_bytes() == CONTENT
    assert not leave_reader(tmp_path)
    for other in (b"print('mine')\n", b"", first):
        (tmp_path / NAME).write_bytes(other)
        with pytest.raises(OutputError, match=r"read_ckpt8\.py: is no copy of the reader; move it away"):
            leave_reader(tmp_path)
        assert (tmp_path / NAME).read_bytes() == other
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).symlink_to("nowhere")
    with pytest.raises(OutputError, match="link to something that does not exist"):
        leave_reader(tmp_path)
    (tmp_path / NAME).unlink()
    (tmp_path / NAME).mkdir()
    with pytest.raises(OutputError, match="not a regular file"):
        leave_reader(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_a_file_that_is_in_the_way_ends_a_chain_before_it_begins(folder):
    (folder / NAME).write_text("mine")
    with pytest.raises(OutputError, match="is no copy of the reader"):
        ckpt8.chain(folder, rest=0, leave_reader=True)
    assert not list(folder.glob("*.ckpt8"))


def test_a_folder_without_a_run_gets_none(tmp_path, run_command):
    code, _, err = run_command("chain", tmp_path, "--leave-reader")
    assert (code, "holds no checkpoints of a run" in err) == (3, True)
    assert list(tmp_path.iterdir()) == []


def test_a_bucket_gets_it_too(bucket, tmp_path):
    key = secrets.token_hex(4)
    torch.save({"model": {"w": torch.randn(100, 100)}, "step": 1}, tmp_path / "step-1.pt")
    bucket.put(f"{key}/step-1.pt", tmp_path / "step-1.pt")
    url = f"s3://{BUCKET}/{key}"
    ckpt8.chain(url, rest=0, leave_reader=True)
    body = bucket.client.get_object(Bucket=BUCKET, Key=f"{key}/{NAME}")["Body"].read()
    assert body == CONTENT
    bucket.order()
    [outcome] = ckpt8.chain(url, rest=0, leave_reader=True)
    assert outcome.present
    assert not [entry for entry in bucket.look() if entry["method"] in ("PUT", "POST")]
    bucket.put(f"{key}/{NAME}", b"mine\n")
    with pytest.raises(OutputError, match="is no copy of the reader"):
        ckpt8.chain(url, rest=0, leave_reader=True)
