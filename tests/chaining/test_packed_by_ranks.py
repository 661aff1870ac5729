"""Chains and deltas beside directories that ranks have packed: these are compressed, and stay as they are."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from packed_kit import pack, save_sliced

import ckpt8
from ckpt8 import InputError, OutputError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    save_sliced({"model": {"w": torch.randn(96, 96), "b": torch.randn(96)}, "step": 3}, folder / "plain")
    return pack(folder / "plain", folder / "step-3", preset="flash")


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def make_run(packed, folder):
    """A run with a packed step, Trainer's folder around another one, and a raw checkpoint."""
    shutil.copytree(packed, folder / "step-3")
    shutil.copytree(packed, folder / "checkpoint-4" / "ckpt8")
    (folder / "checkpoint-4" / "trainer_state.json").write_text("{}")
    for name in ("optimizer.pt", "scheduler.pt"):
        torch.save({"last_epoch": 4}, folder / "checkpoint-4" / name)
    torch.save({"model": {"w": torch.randn(96, 96)}, "step": 5}, folder / "step-5.pt")
    return folder


def test_a_chain_leaves_packed_directories_as_they_are(packed, tmp_path, run_command):
    run = make_run(packed, tmp_path / "run")
    before = {path: content(path) for path in (run / "step-3", run / "checkpoint-4", run / "checkpoint-4" / "ckpt8")}
    out = run_command.shown("chain", run, "--rest", "0", "--remove")
    assert "left as they are, ranks have packed them: checkpoint-4, step-3\n" in out
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-4", "step-3", "step-5.ckpt8"]
    assert {path: content(path) for path in before} == before
    (run / "step-5.ckpt8").unlink()
    code, out, _ = run_command("chain", run, "--json")
    facts = json.loads(out)
    assert (code, facts["checkpoints"], facts["packed"]) == (0, [], ["checkpoint-4", "step-3"])


def test_a_packed_directory_itself_is_no_run(packed):
    with pytest.raises(InputError, match="is one checkpoint, which ranks have packed; give the folder of a whole run"):
        ckpt8.chain(packed, rest=0)


def test_it_needs_no_base_and_is_none(packed, tmp_path, run_command):
    before = content(packed)
    assert ckpt8.rebase(packed) == packed
    code, out, _ = run_command("rebase", packed)
    assert code == 0
    assert "step-3: needed no base" in out
    with pytest.raises(UsageError, match="need no base; copy it as it is"):
        ckpt8.rebase(packed, tmp_path / "x")
    torch.save({"model": {"w": torch.randn(96, 96)}}, tmp_path / "run.pt")
    for write in (
        lambda: ckpt8.compress(tmp_path / "run.pt", tmp_path / "run.ckpt8", base=packed),
        lambda: ckpt8.save({"w": torch.zeros(3)}, tmp_path / "run.ckpt8", base=packed),
        lambda: ckpt8.save({"w": torch.zeros(3)}, tmp_path / "run.ckpt8", base=packed, background=True),
    ):
        with pytest.raises(UsageError, match=r"no base of a delta; give a \.ckpt8 of an earlier step"):
            write()
    with pytest.raises(InputError, match=r"compressed already.*restore DIR -o PLAIN"):
        ckpt8.compress(packed, tmp_path / "run.ckpt8")
    with pytest.raises(OutputError, match="exists and is not a regular file; give another name"):
        ckpt8.save({"w": torch.zeros(3)}, packed)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    assert content(packed) == before
