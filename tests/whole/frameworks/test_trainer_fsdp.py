"""Trainer under FSDP: every rank packs its slices, or the callback compresses; Trainer goes on by its own argument."""

from __future__ import annotations

import json
import shutil
import threading
from functools import partial
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import trainer_kit  # noqa: E402
from sharded_kit import LAST, SAVED, check_resumed, keep, kept, ranks_of, shard_on_cpu  # noqa: E402

import ckpt8  # noqa: E402
from ckpt8.core.errors import OutputError  # noqa: E402
from ckpt8.core.files.atomic import replace_directory  # noqa: E402
from ckpt8.integrations import sharded  # noqa: E402
from ckpt8.integrations.transformers import Ckpt8Callback, Ckpt8TrainerMixin, restored_checkpoint  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]

SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"
CASES = {
    f"{version}-{kind[:4]}-{way}-{preset}": (version, kind, way, preset)
    for version, kind, way, preset in [
        *((version, SHARDED, "mixin", preset) for version in (1, 2) for preset in ("lossless", "archive")),
        (2, SHARDED, "mixin", "flash"),
        (2, FULL, "mixin", "lossless"),
        # Not with FSDP1: accelerate 1.15 does not load moments into a fresh optimizer there.
        *((2, SHARDED, "callback", preset) for preset in ("lossless", "flash", "archive")),
        (2, FULL, "callback", "archive"),
    ]
}
BEHIND = "lossless"
"""Saved in the background."""

MOVED = ["1-SHAR-mixin-archive", "2-SHAR-mixin-lossless", "2-SHAR-callback-archive"]


class ShardedTrainer(Ckpt8TrainerMixin, transformers.Trainer):
    """What a user writes."""


def trainer(folder, version, kind, way, preset, **arguments):
    """A Trainer of FSDP, the same batches for any number of ranks; ``plain`` is Trainer as it is."""
    config = {
        "version": version,
        "state_dict_type": kind,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
        "cpu_ram_efficient_loading": False,
        "sync_module_states": False,
    }
    settings = {"max_steps": LAST, "save_steps": SAVED, "fsdp": True, "fsdp_config": config, **arguments}
    settings["per_device_train_batch_size"] = 8 // dist.get_world_size()
    callbacks = [Ckpt8Callback(preset=preset, keep_original=False, strict=True)] if way == "callback" else []
    options = {"preset": preset, "background": preset == BEHIND}
    trainer_class = partial(ShardedTrainer, **options) if way == "mixin" else transformers.Trainer
    made = trainer_kit.trainer(folder, callbacks, kind=trainer_class, **settings)
    assert made.accelerator.distributed_type == "FSDP"
    return made


def late_losses(made):
    return [loss for step, loss in trainer_kit.losses(made).items() if step > SAVED]


def train_all(folder):
    """Train every case, with a checkpoint half way; once more from another initialisation; go on with as many ranks."""
    shard_on_cpu()
    other = trainer(f"{folder}/other", *CASES["2-SHAR-mixin-flash"], save_strategy="no", seed=1)
    other.train()
    keep(folder, "other", late_losses(other))
    for name, case in CASES.items():
        place = Path(folder) / name
        made = trainer(place, *case)
        made.train()
        keep(folder, f"{name}-expected", late_losses(made))
        if dist.get_rank() == 0:
            for last in place.glob(f"checkpoint-{LAST}*"):
                shutil.rmtree(last) if last.is_dir() else last.unlink()
        dist.barrier()
    go_on(folder, CASES)


def go_on(folder, cases):
    """Every case from the checkpoint half way."""
    shard_on_cpu()
    for name in cases:
        made = trainer(f"{folder}/{name}", *CASES[name], save_strategy="no", seed=2)
        made.train(resume_from_checkpoint=restored_checkpoint(made.args.output_dir) if "callback" in name else True)
        keep(folder, f"{name}-{dist.get_world_size()}", late_losses(made))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    ranks_of(train_all)(2, str(folder))
    ranks_of(go_on)(4, str(folder), MOVED)
    return folder


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in CASES), *((name, 4) for name in MOVED)])
def test_the_run_goes_on(name, ranks, runs):
    preset = CASES[name][-1]
    check_resumed(preset, runs, f"{name}-{ranks}", expected=f"{name}-expected", other="other", moved=ranks != 2)


def test_what_lies_in_the_folders(runs):
    place = runs / "2-SHAR-mixin-archive"
    for name in ("2-SHAR-mixin-archive", "1-SHAR-mixin-lossless"):
        assert trainer_kit.names_in(runs / name) == [f"checkpoint-{SAVED}"]
    packed = place / f"checkpoint-{SAVED}" / "ckpt8"
    assert trainer_kit.names_in(packed) == ["__0_0.ckpt8", "__1_0.ckpt8", "ckpt8-dcp.json"]
    assert not {"optimizer_0", "pytorch_model_fsdp_0"} & set(trainer_kit.names_in(packed.parent))
    restored = runs / "2-SHAR-callback-archive"
    assert trainer_kit.names_in(restored) == [f"checkpoint-{SAVED}", f"checkpoint-{SAVED}.ckpt8"]
    assert {"optimizer_0", "pytorch_model_fsdp_0"} < set(trainer_kit.names_in(restored / f"checkpoint-{SAVED}"))


def test_a_packed_checkpoint_becomes_one_of_a_trainer_without_fsdp(runs, tmp_path):
    source, target = runs / "2-SHAR-mixin-lossless" / f"checkpoint-{SAVED}", tmp_path / f"checkpoint-{SAVED}"
    report = ckpt8.convert(source, target, to="trainer")
    assert not any("trainer_state" in note for note in report.notes)
    names = {path.name for path in source.iterdir() if path.is_file()}
    assert {path.name for path in target.iterdir()} == {*names, "model.safetensors", "optimizer.pt"}
    assert all((target / name).read_bytes() == (source / name).read_bytes() for name in names)
    plain = trainer_kit.trainer(tmp_path, max_steps=LAST, save_strategy="no", seed=2)
    plain.train(resume_from_checkpoint=str(target))
    (tmp_path / "plain.json").write_text(json.dumps(late_losses(plain)))
    shutil.copy(runs / "2-SHAR-mixin-lossless-expected.json", tmp_path / "expected.json")
    shutil.copy(runs / "other.json", tmp_path)
    check_resumed("lossless", tmp_path, "plain", expected="expected", other="other", moved=True)


class Look(transformers.TrainerCallback):
    """Notes what lies in a folder before each save, and only then lets the save before it end."""

    def __init__(self, folder):
        self.folder, self.present, self.gate = folder, {}, threading.Semaphore(0)

    def on_step_end(self, args, state, control, **_):
        if control.should_save:
            is_first, is_last = not self.present, state.global_step == args.max_steps
            self.present[state.global_step] = sorted(path.name for path in self.folder.glob("checkpoint-*"))
            if not is_first:
                self.gate.release(1 + is_last)

    def replace(self, new, final):
        self.gate.acquire()
        replace_directory(new, final)


def save_behind(folder):
    """Runs that save in the background, keep one checkpoint, and see each become whole when the next one begins."""
    shard_on_cpu()
    for name in ("last", "best", "fails"):
        place = Path(folder) / name
        (place / ".ckpt8-unfinished" / "checkpoint-2").mkdir(parents=True)  # of a run that was killed
        look = Look(place)
        options = {"max_steps": 8, "save_steps": 2, "save_total_limit": 1}
        if name == "best":
            options |= {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
        made = trainer(place, 2, SHARDED, "mixin", BEHIND, **options)
        made.add_callback(look)

        def replace(new, final, name=name, look=look):
            if name == "fails" and final.name == "checkpoint-4":
                raise OutputError("the disk is gone")
            look.replace(new, final)

        sharded.replace_directory = replace
        try:
            made.train()
        except OutputError:
            assert name == "fails"
        present = look.present | {"end": trainer_kit.names_in(place), "best": made.state.best_model_checkpoint}
        (Path(folder) / f"{name}.json").write_text(json.dumps(present))


def test_an_older_checkpoint_goes_once_a_newer_one_is_whole(tmp_path):
    ranks_of(save_behind)(1, str(tmp_path))
    last, best, fails = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("last", "best", "fails"))
    expected = {"2": [], "4": [], "6": ["checkpoint-2"], "8": ["checkpoint-4"]}
    assert last == expected | {"end": ["checkpoint-8"], "best": None}
    place = Path(best["best"])
    assert place.parent == tmp_path / "best"
    assert best["end"] == [place.name]
    assert json.loads((place / "trainer_state.json").read_text())["best_model_checkpoint"] == str(place)
    assert fails["end"] == [".ckpt8-unfinished", "checkpoint-2"]


LORA = {"1-LoRA": (1, SHARDED, "mixin", "lossless"), "2-LoRA": (2, SHARDED, "mixin", "lossless")}


def train_adapters(folder):
    """Both kinds of FSDP train adapters, save with Trainer itself and packed, and go on from what was packed."""
    import peft

    shard_on_cpu()
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "gate_proj"])

    def model(config):
        return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)

    # Not with FSDP1: accelerate 1.15 saves no adapter there.
    trainer(f"{folder}/plain", 2, SHARDED, "plain", None, model=model, max_steps=SAVED).train()
    for name, case in LORA.items():
        made = trainer(f"{folder}/{name}", *case, model=model)
        made.train()
        keep(folder, f"{name}-expected", late_losses(made))
        made = trainer(f"{folder}/{name}", *case, model=model, save_strategy="no")
        with torch.no_grad():
            for each in made.model.parameters():
                each.mul_(0.5 if each.requires_grad else 1)
        made.train(resume_from_checkpoint=f"{folder}/{name}/checkpoint-{SAVED}")
        keep(folder, f"{name}-resumed", late_losses(made))


def test_of_a_model_with_adapters_the_base_is_not_packed(tmp_path):
    pytest.importorskip("peft")
    ranks_of(train_adapters)(2, str(tmp_path))
    plain = tmp_path / "plain" / f"checkpoint-{SAVED}" / "pytorch_model_fsdp_0"
    saved = set(torch.distributed.checkpoint.FileSystemReader(plain).read_metadata().state_dict_metadata)
    assert len(saved) == 4
    for name in LORA:
        assert kept(tmp_path, f"{name}-resumed") == kept(tmp_path, f"{name}-expected")
        with ckpt8.open(tmp_path / name / f"checkpoint-{SAVED}" / "ckpt8") as file:
            packed = {key for key in file.keys() if key.startswith("model.")}  # noqa: SIM118 - it is no dict
        assert {key.replace(".default", "") for key in packed} == saved  # peft leaves out which adapter it is
