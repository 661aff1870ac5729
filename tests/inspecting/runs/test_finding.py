"""Which files of a run are one checkpoint, by names alone."""

from __future__ import annotations

import pytest

from ckpt8.inspecting.run_files import find

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
    assert [each.name for each in find(tmp_path / "run").places] == ["epoch=3.ckpt", "first.ckpt"]
