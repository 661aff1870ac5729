"""``ckpt8.runs`` against what ``inspect`` says of the same files, which opens them whole."""

from __future__ import annotations

import json
import os
import shutil
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from runs_kit import train

import ckpt8
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.source_file import SourceFile
from ckpt8.inspecting.container import inspect_container
from ckpt8.inspecting.runs import find


def by_name(folder):
    return {record.name: record for record in ckpt8.runs(folder)}


def raw_and_packed(path):
    """The records of a checkpoint alone in its folder, and of the container that takes its place."""
    (raw,) = ckpt8.runs(path.parent)
    ckpt8.compress(path)
    path.unlink()
    (packed,) = ckpt8.runs(path.parent)
    return raw, packed


def test_a_run_half_of_which_is_compressed(tmp_path):
    losses = train(tmp_path, (1, 3, 12), compressed=(3, 12), epoch=2.5)
    os.utime(tmp_path / "step-10.pt", (86400, 86400))
    run = ckpt8.runs(str(tmp_path))
    assert [(record.name, record.kind, record.step) for record in run] == [
        ("step-10.pt", "raw", 10),
        ("step-30.ckpt8", "key", 30),
        ("step-120.ckpt8", "key", 120),
    ]
    assert {record.step: record.loss for record in run} == losses
    assert {(record.epoch, record.step_from, record.damage) for record in run} == {(2.5, "file", None)}
    raw, key, _ = run
    assert raw.time == datetime(1970, 1, 2, tzinfo=timezone.utc)
    assert (raw.bytes, raw.stored_bytes, raw.ratio) == ((tmp_path / "step-10.pt").stat().st_size,) * 2 + (None,)
    facts = inspect_container(tmp_path / "step-30.ckpt8")
    assert (key.bytes, key.stored_bytes, key.ratio) == (facts["bytes"], facts["stored_bytes"], facts["ratio"])
    assert key.steps == facts["steps"]["steps"] > 0
    totals = run.totals()
    assert (totals["key"], totals["raw"], totals["stored_bytes"]) == (2, 1, sum(r.stored_bytes for r in run))
    assert totals["ratio"] == sum(r.bytes for r in run if r.ratio) / sum(r.stored_bytes for r in run if r.ratio)
    assert json.loads(json.dumps(run.to_json()))["checkpoints"][1]["loss"] == losses[30]


@pytest.fixture
def chain(inputs, tmp_path):
    for k in range(3):
        shutil.copy(inputs.parent / f"golden/chain_{k}.archive.ckpt8", tmp_path / f"step-{k}.ckpt8")
    return tmp_path


def test_a_base_under_another_name_is_known_by_its_seal_and_a_missing_one_is_a_fault(chain, monkeypatch):
    """Readers do not find one in the folder of another run, unless that is named."""
    assert [record.base for record in ckpt8.runs(chain)] == [None, "step-0.ckpt8", "step-1.ckpt8"]
    other = chain / "other"
    other.mkdir()
    (chain / "step-0.ckpt8").rename(other / "step-0.ckpt8")
    assert by_name(chain)["step-1.ckpt8"].base == "missing"
    with pytest.raises(InputError, match="is missing"):
        ckpt8.verify(chain / "step-1.ckpt8")
    monkeypatch.setenv("CKPT8_BASE_DIR", str(other))
    assert by_name(chain)["step-1.ckpt8"].base == "other/step-0.ckpt8"
    (other / "step-0.ckpt8").unlink()
    run = ckpt8.runs(chain)
    assert [record.base for record in run] == ["missing", "step-1.ckpt8"]
    assert run.problems == ["step-1.ckpt8: its base is missing"]


def test_bases_that_are_kept_for_a_checkpoint_that_is_gone(chain):
    first, second, third = ckpt8.runs(chain)
    for folder, name in (("checkpoint-1", "step-1.ckpt8"), ("checkpoint-2", "step-2.ckpt8")):
        (chain / folder / "bases").mkdir(parents=True)
        (chain / name).rename(chain / folder / "optimizer.ckpt8")
    os.link(chain / "step-0.ckpt8", chain / "checkpoint-1" / "bases" / f"{first.seal[:16]}.ckpt8")
    below = {first.seal: chain / "step-0.ckpt8", second.seal: chain / "checkpoint-1" / "optimizer.ckpt8"}
    for seal, path in below.items():
        os.link(path, chain / "checkpoint-2" / "bases" / f"{seal[:16]}.ckpt8")
    run = ckpt8.runs(chain)
    assert [record.base for record in run] == [None, "step-0.ckpt8", "checkpoint-1/optimizer.ckpt8"]
    assert run.bases_bytes == 0
    shutil.rmtree(chain / "checkpoint-1")
    (chain / "step-0.ckpt8").unlink()
    run = ckpt8.runs(chain)
    assert len(run) == 1
    # Its path is gone, and the file is beside no longer: it is in the folder of bases under the digits of its seal.
    assert run.bases_bytes == first.stored_bytes + second.stored_bytes
    assert run.totals()["stored_bytes"] == first.stored_bytes + second.stored_bytes + third.stored_bytes


CALLBACK = "ModelCheckpoint{'monitor': 'val_loss'}"


def lightning(score, monitor="val_loss"):
    state = {"monitor": monitor, "best_model_score": score, "current_score": score, "best_model_path": "x"}
    progress = {"pytorch-lightning_version": "2.6.6", "global_step": 70, "epoch": 3}
    return {**progress, "state_dict": {"w": torch.randn(80, 80)}, "callbacks": {CALLBACK: state}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("apart", [False, True])
def test_the_score_of_lightning_is_a_tensor(dtype, apart, tmp_path):
    tree = lightning(torch.tensor(-0.40625, dtype=dtype))
    if apart:
        tree["callbacks"][CALLBACK]["best_model_score"] = torch.tensor(0.25)
    torch.save(tree, tmp_path / "epoch=3.ckpt")
    for record in raw_and_packed(tmp_path / "epoch=3.ckpt"):
        assert (record.step, record.epoch, record.val_loss, record.loss) == (70, 3, -0.40625, None)


def test_a_score_that_is_no_loss_is_not_shown_as_one(tmp_path):
    torch.save(lightning(torch.tensor(0.9), "val_acc"), tmp_path / "a.ckpt")
    torch.save(lightning(torch.tensor(0.9), "train_loss"), tmp_path / "b.ckpt")
    losses = [(record.loss, record.val_loss) for record in ckpt8.runs(tmp_path)]
    assert losses == [(None, None), (pytest.approx(0.9), None)]


@pytest.mark.parametrize(
    ("names", "step", "score"),
    [
        (["step=60.ckpt", "step=70.ckpt"], 70, 0.75),  # not the stale current_score
        (["step=60.ckpt", "step=80.ckpt"], 70, None),  # none of the best, and their steps say so
        (["a.ckpt", "b.ckpt"], 70, 0.5),
    ],
)
def test_the_score_of_a_checkpoint_is_its_own(names, step, score, tmp_path):
    key = "ModelCheckpoint{'monitor': 'val_acc', 'mode': 'max', 'every_n_train_steps': 2}"
    values = [torch.tensor(0.5), torch.tensor(0.75)]
    tree = lightning(values[0], "val_acc") | {"global_step": step}
    (state,) = tree["callbacks"].values()
    state |= {"best_k_models": dict(zip(names, values, strict=True)), "best_model_path": f"/elsewhere/{names[1]}"}
    tree["callbacks"] = {key: state}
    torch.save(tree, tmp_path / "last.ckpt")
    for record in raw_and_packed(tmp_path / "last.ckpt"):
        assert (record.metric, record.mode, record.score, record.val_loss) == ("val_acc", "max", score, None)
        assert record.best == (names[1],)


def test_legacy_files_and_their_containers_say_the_same(inputs, tmp_path):
    raw, packed = raw_and_packed(Path(shutil.copy(inputs / "legacy.pt", tmp_path)))
    assert (raw.format, raw.step, raw.step_from) == ("torch-legacy", 300, "file")
    assert (packed.step, packed.loss, packed.step_from) == (raw.step, raw.loss, "file")


def test_directories_of_trainer(inputs, tmp_path):
    whole = tmp_path / "checkpoint-200"
    shutil.copytree(inputs / "trainer-adamw", whole)
    ckpt8.compress(whole)
    mixed = tmp_path / "checkpoint-300"
    shutil.copytree(whole, mixed)
    ckpt8.compress(mixed / "optimizer.pt")
    (mixed / "optimizer.pt").unlink()
    found = by_name(tmp_path)
    state = json.loads((whole / "trainer_state.json").read_text())
    loss = [entry["loss"] for entry in state["log_history"] if "loss" in entry][-1]
    assert {name: (each.kind, each.step, each.loss, each.epoch) for name, each in found.items()} == {
        "checkpoint-200.ckpt8": ("key", 200, loss, state["epoch"]),
        "checkpoint-300": ("key", 200, loss, state["epoch"]),
    }
    size = sum(path.stat().st_size for path in whole.iterdir())
    assert {each.bytes for each in found.values()} == {size}
    assert (found["checkpoint-200.ckpt8"].raw, found["checkpoint-200.ckpt8"].raw_bytes) == ("checkpoint-200", size)
    assert found["checkpoint-300"].stored_bytes == sum(path.stat().st_size for path in mixed.iterdir()) < size


@pytest.mark.slow
def test_the_step_in_the_file_then_in_the_name_then_that_of_the_optimizer(tmp_path):
    """An optimizer counts its own steps: with gradients that are accumulated, or a second network, fewer or more."""
    train(tmp_path, (3,), every=1)
    tree = torch.load(tmp_path / "step-3.pt")
    (tmp_path / "step-3.pt").unlink()
    torch.save({**tree, "global_step": torch.tensor(12), "step": 2}, tmp_path / "checkpoint-9.pt")
    del tree["step"], tree["loss"]
    for name in ("epoch_9.pt", "model-7.pt", "llama-7b_lr3e-4.pt", "model.pt"):
        torch.save(tree, tmp_path / name)
    torch.save({"model": tree["model"]}, tmp_path / "weights-40.pth")
    for name in ("model-7.pt", "model.pt"):
        ckpt8.compress(tmp_path / name)
    (tmp_path / "model.pt").unlink()
    (tmp_path / "checkpoint-60").mkdir()
    torch.save({"module": tree["model"], "global_steps": 55}, tmp_path / "checkpoint-60" / "model.pt")
    torch.save(tree["optimizer"], tmp_path / "checkpoint-60" / "optimizer.pt")
    ckpt8.convert(tmp_path / "model-7.pt", tmp_path / "step_80", to="dcp")
    expected = dict.fromkeys(("epoch_9.pt", "model.ckpt8", "llama-7b_lr3e-4.pt"), (3, "optimizer"))
    expected |= {"model-7.ckpt8": (7, "name"), "weights-40.pth": (40, "name"), "step_80": (80, "name")}
    expected |= {"checkpoint-9.pt": (12, "file"), "checkpoint-60": (55, "file")}
    assert {name: (record.step, record.step_from) for name, record in by_name(tmp_path).items()} == expected
    assert by_name(tmp_path)["epoch_9.pt"].epoch == 9
    ckpt8.compress(tmp_path / "checkpoint-60")
    shutil.rmtree(tmp_path / "checkpoint-60")
    assert by_name(tmp_path)["checkpoint-60.ckpt8"].step == 55


def test_one_row_for_a_checkpoint_that_is_there_raw_and_packed(tmp_path):
    train(tmp_path, (1, 2, 3), every=1)
    for path in sorted(tmp_path.iterdir()):
        ckpt8.compress(path)
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert [(each.name, each.raw, each.raw_bytes, each.stored_bytes) for each in ckpt8.runs(tmp_path)] == [
        (f"step-{k}.ckpt8", f"step-{k}.pt", sizes[f"step-{k}.pt"], sizes[f"step-{k}.ckpt8"]) for k in (1, 2, 3)
    ]
    totals = ckpt8.runs(tmp_path).totals()
    assert (totals["checkpoints"], totals["packed_and_raw"], totals["raw"]) == (3, 3, 0)
    assert totals["raw_bytes"] == totals["bytes"] == sum(sizes[f"step-{k}.pt"] for k in (1, 2, 3))
    assert totals["stored_bytes"] + totals["raw_bytes"] == sum(sizes.values())
    # One of an earlier run of this name, and one that was made from a file of another name, are others.
    torch.save({**torch.load(tmp_path / "step-1.pt"), "step": 4}, tmp_path / "step-1.pt")
    (tmp_path / "step-2.ckpt8").rename(tmp_path / "step-3.ckpt8")
    # A container that is damaged says of what it was made by its name.
    ckpt8.compress(tmp_path / "step-2.pt")
    os.truncate(tmp_path / "step-2.ckpt8", 1000)
    found = by_name(tmp_path)
    assert {name: (each.raw, each.step) for name, each in found.items()} == {
        "step-1.pt": (None, 4),
        "step-1.ckpt8": (None, 1),
        "step-2.ckpt8": ("step-2.pt", 2),
        "step-3.pt": (None, 3),
        "step-3.ckpt8": (None, 2),
    }
    assert found["step-2.ckpt8"].damage is not None


def test_a_part_that_is_there_raw_and_packed_counts_once(inputs, tmp_path):
    folder = tmp_path / "checkpoint-300"
    shutil.copytree(inputs / "trainer-adamw", folder)
    (raw,) = ckpt8.runs(tmp_path)
    ckpt8.compress(folder / "optimizer.pt")
    (both,) = ckpt8.runs(tmp_path)
    size = (folder / "optimizer.pt").stat().st_size
    assert (both.raw, both.raw_bytes, both.bytes) == ("optimizer.pt", size, raw.bytes)
    assert both.stored_bytes == raw.bytes - size + (folder / "optimizer.ckpt8").stat().st_size


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -40, -1])
def test_a_file_that_is_cut_off_is_a_row(keep, tmp_path):
    train(tmp_path, (1, 2, 3), compressed=(1, 3))
    for name in ("step-20.pt", "step-30.ckpt8"):
        content = (tmp_path / name).read_bytes()
        stop = int(len(content) * keep) if 0 < keep < 1 else keep
        (tmp_path / name).write_bytes(content[:stop])
    found = by_name(tmp_path)
    assert [record.step for record in found.values()] == [10, 20, 30]
    assert found["step-10.ckpt8"].damage is None
    for name in ("step-20.pt", "step-30.ckpt8"):
        assert found[name].damage.startswith(f"{tmp_path / name}: ")
        assert found[name].bytes is None
    assert found["step-30.ckpt8"].seal is None


def test_every_flipped_bit_of_a_head_and_of_a_skeleton_is_damage(tmp_path):
    train(tmp_path, (1,), compressed=(1,))
    path = tmp_path / "step-10.ckpt8"
    content = path.read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    # A flip in a skeleton is seen where it is read.
    skeleton = head + json.loads(content[8:head])["ckpt8.skeleton/bytes"]["data_offsets"][0]
    for at in [*range(0, head, max(1, head // 25)), *range(len(content) - 60, len(content), 7), skeleton + 20]:
        flipped = bytearray(content)
        flipped[at] ^= 1 << at % 8
        path.write_bytes(flipped)
        (record,) = ckpt8.runs(tmp_path)
        assert record.damage is not None, at
        assert at < skeleton or at > len(content) - 61 or "checksum" in record.damage


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="No such file or directory"):
        ckpt8.runs(tmp_path / "none")
    (tmp_path / "notes.txt").write_text("no checkpoint")
    (tmp_path / "LICENSE").write_text("a text")
    with pytest.raises(InputError, match="holds no checkpoint"):
        ckpt8.runs(tmp_path)
    with pytest.raises(InputError, match="is a file"):
        ckpt8.runs(tmp_path / "notes.txt")
    with pytest.raises(UsageError, match="a path"):
        ckpt8.runs(3)


def test_only_heads_are_read(tmp_path, monkeypatch):
    torch.save({"model": {"w": torch.randn(1 << 19)}, "step": 5, "loss": torch.tensor(0.5)}, tmp_path / "step-5.pt")
    ckpt8.compress(tmp_path / "step-5.pt", preset="lossless")
    done = []
    read_into = SourceFile.read_into
    monkeypatch.setattr(
        SourceFile, "read_into", lambda self, at, buffer: (done.append(len(buffer)), read_into(self, at, buffer))
    )
    assert [(record.step, record.loss, record.raw) for record in ckpt8.runs(tmp_path)] == [(5, 0.5, "step-5.pt")]
    assert 1000 < sum(done) < (1 << 21) / 10  # of two files of 2 MB; a zip file is looked for from its end


# Which files of a run are one checkpoint, by names alone

KEPT = "0123456789abcdef.ckpt8"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("step-1.pt step-2.ckpt8 notes.txt log.jsonl", "step-1.pt step-2.ckpt8"),
        ("model_100.pt model_200.pt optimizer_100.pt", "model_100.pt model_200.pt optimizer_100.pt"),
        ("model.pt", "model.pt"),
        ("model.pt model_b.pt model_b.ckpt8 best_model.pt", "best_model.pt model.pt model_b.ckpt8 model_b.pt"),
        ("model.safetensors optimizer.pt", ".[model.safetensors optimizer.pt]"),
        ("s/model.safetensors s/optimizer.ckpt8 s/config.json", "s[model.safetensors optimizer.ckpt8]"),
        ("s/model-00001-of-00002.safetensors s/model-00002-of-00002.safetensors s/optim.pt", "s[3]"),
        ("checkpoint-5/trainer_state.json checkpoint-5/a/b.pt", "checkpoint-5[a/b.pt trainer_state.json]"),
        (
            "trainer_state.json model.safetensors training_args.bin checkpoint-5/trainer_state.json checkpoint-5.ckpt8",
            ".[model.safetensors training_args.bin] checkpoint-5.ckpt8 checkpoint-5[trainer_state.json]",
        ),
        ("c/.metadata c/__0_0.distcp c/x/y.pt", "c[.metadata __0_0.distcp x/y.pt]"),
        (".metadata __0_0.distcp", ".[.metadata __0_0.distcp]"),
        ("c/ckpt8-dcp.json c/__0_0.ckpt8", "c[__0_0.ckpt8 ckpt8-dcp.json]"),
        ("g/mp_rank_00_model_states.pt g/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "g[2]"),
        ("a/step-1.pt b/step-1.pt a/b/c/step-2.pt a/b/c/d/step-3.pt", "a/step-1.pt a/b/c/step-2.pt b/step-1.pt"),
        (".step-1.pt.ckpt8-partial .cache/step-1.pt step-1.pt", "step-1.pt"),
        (f"bases/{KEPT} bases/step-1.pt step-2.ckpt8", "step-2.ckpt8 bases/step-1.pt"),
        (f"c/trainer_state.json c/optimizer.ckpt8 c/bases/{KEPT}", "c[optimizer.ckpt8 trainer_state.json]"),
        ("run.500 events.out.tfevents.17.host checkpoint", "checkpoint run.500"),
    ],
)
def test_files_that_belong_together(files, expected, tmp_path):
    for name in files.split():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    found = find(tmp_path)
    shown = [each.name + (f"[{' '.join(each.files)}]" if each.files else "") for each in found.places]
    counted = [each.name + (f"[{len(each.files)}]" if each.files else "") for each in found.places]
    assert " ".join(counted if "[2]" in expected or "[3]" in expected else shown) == expected
    assert [path.name for path in found.bases] == ([KEPT] if KEPT in files else [])


def test_a_link_to_a_checkpoint_beside_it_is_no_other(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "epoch=3.ckpt").write_bytes(b"")
    (tmp_path / "elsewhere.ckpt").write_bytes(b"")
    (tmp_path / "run" / "last.ckpt").symlink_to("epoch=3.ckpt")
    (tmp_path / "run" / "first.ckpt").symlink_to("../elsewhere.ckpt")
    (tmp_path / "run" / "again").symlink_to(".")
    (tmp_path / "run" / "circle.ckpt").symlink_to("circle.ckpt")
    assert [each.name for each in find(tmp_path / "run").places] == ["epoch=3.ckpt", "first.ckpt"]
