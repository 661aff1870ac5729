"""A directory with checkpoints of several programs: each is listed, and none gives the whole its name."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

import ckpt8

pytestmark = pytest.mark.usefixtures("without_predictions")


@pytest.fixture
def look(run_command):
    def call(path):
        code, out, err = run_command("inspect", path, "--json")
        assert (code, err) == (0, "")
        facts = json.loads(out)
        return facts["framework"], {row["path"]: row["framework"] for row in facts["origins"]}, facts

    return call


def test_every_checkpoint_of_a_mixed_directory_is_listed(look, run_command, inputs, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(inputs / "trainer-adamw", mixed / "hf")
    shutil.copytree(inputs / "accelerate", mixed / "acc")
    for name in ("lightning.ckpt", "gpt_adamw.pt", "views.pt"):
        shutil.copyfile(inputs / name, mixed / name)
    framework, origins, facts = look(mixed)
    expected = {
        "acc": "accelerate",
        "gpt_adamw.pt": "nanoGPT",
        "hf": "Hugging Face Trainer",
        "lightning.ckpt": "Lightning",
        "views.pt": None,
    }
    assert (framework, origins) == (None, expected)
    assert (facts["step"], facts["epoch"], facts["version"]) == (None, None, None)
    steps = {row["path"]: row["step"] for row in facts["origins"]}
    alone = {"gpt_adamw.pt": inputs / "gpt_adamw.pt", "hf": inputs / "trainer-adamw"}
    assert {path: steps[path] for path in alone} == {path: look(each)[2]["step"] for path, each in alone.items()}
    out = run_command("inspect", mixed)[1]
    assert f"  gpt_adamw.pt: nanoGPT, step {steps['gpt_adamw.pt']}\n" in out
    assert "  views.pt: of unknown origin\n" in out
    # A container says what the names of the files tell.
    ckpt8.compress(mixed, tmp_path / "mixed.ckpt8")
    assert look(tmp_path / "mixed.ckpt8")[:2] == (None, {"acc": "accelerate", "hf": "Hugging Face Trainer"})
    assert "  hf: Hugging Face Trainer\n" in run_command("inspect", tmp_path / "mixed.ckpt8")[1]


def test_programs_below_another_do_not_count(look, inputs, tmp_path):
    """DeepSpeed's and torch's own files in a directory of Trainer, and Lightning's keys in such a file."""
    folder = tmp_path / "run"
    shutil.copytree(inputs / "trainer-adamw", folder)
    (folder / "global_step3").mkdir()
    states = folder / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save({"ds_version": "0.19", "module": {"w": torch.randn(80, 80)}}, states)
    torch.save({"w": torch.randn(80, 80)}, folder / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert look(folder)[:2] == ("Hugging Face Trainer", {})
    torch.save({"ds_version": "0.19", "pytorch-lightning_version": "2.6", "w": torch.randn(80, 80)}, states)
    assert look(folder / "global_step3")[:2] == ("DeepSpeed", {})


def test_several_checkpoints_of_one_program_have_its_name(look, inputs, tmp_path):
    folder = tmp_path / "runs"
    for name in ("a", "b"):
        shutil.copytree(inputs / "trainer-adamw", folder / name)
    assert look(folder)[:2] == ("Hugging Face Trainer", {})
