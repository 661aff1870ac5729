"""Trainer under FSDP: every rank packs its slices, or the callback compresses; Trainer goes on by its own argument."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")

import torch.distributed as dist  # noqa: E402
import trainer_kit  # noqa: E402
from sharded_kit import LAST, SAVED, check_resumed, keep, ranks_of, shard_on_cpu  # noqa: E402
from trainer_kit import names_in  # noqa: E402

from ckpt8.integrations.transformers import (  # noqa: E402
    Ckpt8Callback,
    Ckpt8TrainerMixin,
    restored_checkpoint,
)

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
MOVED = ["1-SHAR-mixin-archive", "2-SHAR-mixin-lossless", "2-SHAR-callback-archive"]


class ShardedTrainer(Ckpt8TrainerMixin, transformers.Trainer):
    """What a user writes."""


def trainer(folder, version, kind, way, preset, **arguments):
    """A Trainer of FSDP, the same batches for any number of ranks."""
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
    made = trainer_kit.trainer(
        folder,
        callbacks,
        kind=partial(ShardedTrainer, preset=preset) if way == "mixin" else transformers.Trainer,
        **settings,
    )
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
    assert names_in(place) == [f"checkpoint-{SAVED}"]
    packed = place / f"checkpoint-{SAVED}" / "ckpt8"
    assert names_in(packed) == ["__0_0.ckpt8", "__1_0.ckpt8", "ckpt8-dcp.json"]
    assert not {"optimizer_0", "pytorch_model_fsdp_0"} & set(names_in(packed.parent))
    restored = runs / "2-SHAR-callback-archive"
    assert names_in(restored) == [f"checkpoint-{SAVED}", f"checkpoint-{SAVED}.ckpt8"]
    assert {"optimizer_0", "pytorch_model_fsdp_0"} < set(names_in(restored / f"checkpoint-{SAVED}"))
