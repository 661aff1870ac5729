"""Which entries in the folder of a run are checkpoints, their steps, and which are complete."""

from __future__ import annotations

import os

import pytest
import torch
from safetensors.torch import save_file

from ckpt8.checkpoint.replacing import asked_for, checkpoints_in, incomplete, step_in_name
from ckpt8.core.errors import InputError

TREE = {"weight": torch.zeros(4, 4)}


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("checkpoint-500", 500),
        ("step-100.pt", 100),
        ("epoch=3-step=1200.ckpt", 1200),
        ("epoch=3-step=1200-v1.ckpt", 1200),
        ("epoch_7.pt", None),
        ("checkpoint_epoch_3.pt", None),
        ("checkpoint_3_5000.pt", 5000),
        ("ep1-ba500-rank0.pt", 500),
        ("iter-001000-ckpt.pth", 1000),
        ("rl_model_1000_steps", 1000),
        ("ema_0.9999_100000.pt", 100000),
        ("megatron--val_loss=2.34-step=1000-consumed_samples=64.0.ckpt", 1000),
        ("checkpoint-10.pth.tar", 10),
        ("model-00001-of-00002.safetensors", None),
        ("llama-7b_lr3e-4", None),
        ("model-7b.pt", None),
        ("model_0.5.pt", None),
        ("run.ckpt8", None),
        ("run.pt.ckpt8", None),
        ("run-ckpt8", None),
        ("step-8.ckpt8", 8),
        ("global_step1000", 1000),
        ("iter_0000300", 300),
        ("gpt2_124m_step_42.pt", 42),
        ("ckpt.0017.pth", 17),
        ("model_2500.pt", 2500),
        ("2000", 2000),
        ("run-0100.safetensors", 100),
        ("step500-unsharded", 500),
        ("checkpoint-500.ckpt8", 500),
        ("best.pt", None),
        ("gpt2.pt", None),
        ("llama3.safetensors", None),
        ("fp16", None),
    ],
)
def test_the_step_in_a_name(name, step):
    assert step_in_name(name) == step


def trainer(root, *, done=True):
    root.mkdir()
    save_file(TREE, root / "model.safetensors")
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"x": torch.ones(2)}, root / name)
    if done:
        (root / "trainer_state.json").write_text("{}")


def shards(root, *, done=True):
    root.mkdir(parents=True)
    torch.save(TREE, root / "__0_0.distcp")
    if done:
        (root / ".metadata").write_bytes(b"\x80")


def names(folder):
    return [entry.path.name for entry in checkpoints_in(folder) if not (entry.is_doubtful or entry.skipped)]


def test_checkpoints_of_frameworks_and_nothing_else(tmp_path):
    trainer(tmp_path / "checkpoint-500")
    shards(tmp_path / "step-100")
    (tmp_path / "iter_0000100" / "mp_rank_00").mkdir(parents=True)
    torch.save(TREE, tmp_path / "iter_0000100" / "mp_rank_00" / "weights.pt")
    (tmp_path / "best").mkdir()
    save_file(TREE, tmp_path / "best" / "model.safetensors")
    for name in ("step_7.pt", "model_2500.pt", "epoch=1-step=9.ckpt", "last.ckpt", "best_model.pth", "weights.pt"):
        torch.save(TREE, tmp_path / name)
    save_file(TREE, tmp_path / "run-3.safetensors")
    (tmp_path / "step_8.pt").write_bytes(b"")
    # These are no checkpoints of the run, or only if an optimizer is in them.
    torch.save(TREE, tmp_path / "optimizer.pt")
    save_file(TREE, tmp_path / "model.safetensors")
    save_file(TREE, tmp_path / "model-00001-of-00002.safetensors")
    torch.save(TREE, tmp_path / "training_args.bin")
    torch.save(TREE, tmp_path / ".hidden.pt")
    (tmp_path / "tokens.bin").write_bytes(b"\1\2\3\4" * 9)
    (tmp_path / "log.txt").write_text("loss 3")
    (tmp_path / "latest").symlink_to("checkpoint-500")
    (tmp_path / "newest.pt").symlink_to("step_7.pt")
    (tmp_path / "circle.pt").symlink_to("circle.pt")
    (tmp_path / "checkpoint-500" / "circle").symlink_to("circle")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "events.7").write_text("x")
    (tmp_path / "data").mkdir()
    torch.save(TREE, tmp_path / "data" / "cached.pt")
    directories = {"checkpoint-500", "step-100", "iter_0000100", "best"}
    files = {"step_7.pt", "step_8.pt", "model_2500.pt", "epoch=1-step=9.ckpt", "last.ckpt", "best_model.pth"}
    assert set(names(tmp_path)) == {*directories, *files, "run-3.safetensors"}
    others = {entry.path.name: entry.skipped or entry.is_doubtful for entry in checkpoints_in(tmp_path)}
    models = ("model-00001-of-00002.safetensors", "model.safetensors")
    assert {name: why for name, why in others.items() if why} == {
        **dict.fromkeys(("optimizer.pt", "training_args.bin"), "it is a part of a checkpoint of several files"),
        **dict.fromkeys((*models, "weights.pt"), True),
        **dict.fromkeys(("latest", "newest.pt"), "it is a link"),
    }


def test_a_folder_that_is_a_checkpoint_holds_none(tmp_path):
    trainer(tmp_path / "checkpoint-500")
    assert names(tmp_path / "checkpoint-500") == []
    shards(tmp_path / "step-100")
    assert names(tmp_path / "step-100") == []
    (tmp_path / "accelerate").mkdir()
    for name in ("model.safetensors", "model_1.safetensors", "optimizer.bin", "optimizer_1.bin", "random_states_0.pkl"):
        torch.save(TREE, tmp_path / "accelerate" / name)
    assert names(tmp_path / "accelerate") == []


def test_models_and_optimizers_with_numbers_of_a_run(tmp_path):
    for name in ("model_100.pt", "optimizer_100.pt", "model_200.pt", "optimizer_200.pt"):
        torch.save(TREE, tmp_path / name)
    assert names(tmp_path) == ["model_100.pt", "model_200.pt", "optimizer_100.pt", "optimizer_200.pt"]


def test_what_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for name in ("file", "nothing"):
        with pytest.raises(InputError, match=name):
            checkpoints_in(tmp_path / name)


def test_the_last_file_of_a_framework(tmp_path):
    trainer(tmp_path / "checkpoint-1", done=False)
    assert "trainer_state.json" in incomplete(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "trainer_state.json").write_text("{}")
    assert incomplete(tmp_path / "checkpoint-1") is None
    shards(tmp_path / "step-1" / "model", done=False)
    assert ".metadata" in incomplete(tmp_path / "step-1")
    (tmp_path / "step-1" / "model" / ".metadata").write_bytes(b"\x80")
    assert incomplete(tmp_path / "step-1") is None


@pytest.mark.parametrize(
    ("folder", "pointer", "older", "named"),
    [
        ("global_step20", "latest", "global_step10", "global_step20"),
        ("iter_0000020", "latest_checkpointed_iteration.txt", "10", "20\n"),
    ],
)
@pytest.mark.parametrize("above", ["", "checkpoint-20"])
def test_the_pointer_of_deepspeed_and_megatron(folder, pointer, older, named, above, tmp_path):
    home = tmp_path / above
    (home / folder).mkdir(parents=True)
    torch.save(TREE, home / folder / "mp_rank_00_model_states.pt")
    whole = home / folder if not above else home
    assert incomplete(whole) is None, "it may have been saved without one"
    (home / pointer).write_text(older)
    os.utime(home / pointer, (1, 1))
    assert pointer in incomplete(whole)
    (home / pointer).write_text(named)
    os.utime(home / pointer, (1, 1))
    assert incomplete(whole) is None
    # A run that went back and saved an older step again does not touch the later one.
    (home / pointer).write_text(older)
    assert incomplete(whole) is None


def test_what_a_resume_asks_for_by_its_name(tmp_path):
    """A link, the pointers of DeepSpeed and Megatron, and the file of Lightning; nothing else, whatever they hold."""
    run = tmp_path / "run"
    for name in ("global_step5", "global_step10", "iter_0000700"):
        (run / name).mkdir(parents=True)
        (run / name / "model.pt").write_bytes(b"")
    for name in ("a.pt", "b.pt", "last.ckpt", "last-v1.ckpt", "last.pt", "epoch=1-last.ckpt"):
        (run / name).write_bytes(b"")
    (run / "best.pt").symlink_to("a.pt")
    (run / "inside").symlink_to("global_step5/model.pt")
    (run / "latest").write_text("global_step10\n")
    (run / "latest_checkpointed_iteration.txt").write_text("700")
    why = asked_for(run)
    names = [*sorted(path.name for path in run.iterdir()), "global_step10.ckpt8", "iter_0000700.ckpt8", "a.ckpt8"]
    assert {name: reason for name in names if (reason := why(run / name)) and name not in ("best.pt", "inside")} == {
        "a.pt": "best.pt leads to it",
        "global_step5": "inside leads to it",
        "global_step10": "latest names it",
        "global_step10.ckpt8": "latest names it",
        "iter_0000700": "latest_checkpointed_iteration.txt names it",
        "iter_0000700.ckpt8": "latest_checkpointed_iteration.txt names it",
        "last-v1.ckpt": "Lightning resumes from this name",
        "last.ckpt": "Lightning resumes from this name",
    }
    assert why(run / "global_step5" / "model.pt") == "inside leads to it"
    for odd in ("", ".", "..", "../run/b.pt", "release", "b.pt\0", "9" * 199, "\u0661"):
        (run / "latest").write_text(odd)
        assert asked_for(run)(run / "b.pt") is None
