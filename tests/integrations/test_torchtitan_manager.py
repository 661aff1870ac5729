"""torchtitan's CheckpointManager with our storage: what it saves, the step that it finds, and how a run goes on."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist
from packed_kit import INDEX, names_in
from sharded_kit import LAST, PRESETS, SAVED, batch, check_resumed, keep, loss_of, network, ranks_of

import ckpt8
from ckpt8.core.errors import UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.torchtitan,
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]

CASES = {**{preset: (preset, "disabled") for preset in PRESETS}, "async": ("archive", "async")}


class Progress:
    """The state of the trainer: the step that it has reached."""

    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


def run(folder, config, *, seed=0, step=-1):
    """Train on from the newest checkpoint, or that of ``step``: losses after the first half, and where it began."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, default_adamw

    model = network(seed)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    settings = default_adamw(lr=1e-2)
    settings.implementation = "foreach"
    optimizers = OptimizersContainer(settings, model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(optimizers=optimizers, training_steps=2 * LAST)
    progress = Progress()
    manager = config.build(
        dataloader=None,
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=schedulers,
        states={"train_state": progress},
        sd_adapter=None,
        base_folder=str(folder),
    )
    found = manager.load(step)
    began = progress.step
    assert found == (began > 0)
    losses = []
    while progress.step < LAST:
        progress.step += 1
        loss = loss_of(model, batch(progress.step))
        optimizers.zero_grad()
        loss.backward()
        optimizers.step()
        schedulers.step()
        losses.append(loss.item())
        manager.save(progress.step, last_step=progress.step == LAST)
    manager.maybe_wait_for_saving()
    manager.close()
    return losses[SAVED - LAST :], began


def config_of(name, *, plain=False, **options):
    from ckpt8.integrations.torchtitan import CheckpointManager, Ckpt8CheckpointManager

    preset, mode = CASES[name]
    options |= {"enable": True, "interval": SAVED, "async_mode": mode, "last_save_model_only": False}
    return CheckpointManager.Config(**options) if plain else Ckpt8CheckpointManager.Config(preset=preset, **options)


def train_all(folder):
    keep(folder, "other", run(f"{folder}/other", config_of("flash", load_only=True), seed=1)[0])
    for name in CASES:
        keep(folder, f"{name}-expected", run(f"{folder}/{name}", config_of(name))[0])
    go_on(folder, CASES)
    run(f"{folder}/plain", config_of("lossless", plain=True))
    losses, began = run(f"{folder}/plain", config_of("lossless", load_only=True), seed=2, step=SAVED)
    keep(folder, "plain", losses)
    assert began == SAVED
    assert run(f"{folder}/lossless", config_of("lossless"), seed=2)[1] == LAST  # the newest one


def go_on(folder, cases):
    for name in cases:
        losses, began = run(f"{folder}/{name}", config_of(name, load_only=True), seed=2, step=SAVED)
        assert began == SAVED
        keep(folder, f"{name}-{dist.get_world_size()}", losses)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("torchtitan")
    ranks_of(train_all)(2, str(folder))
    ranks_of(go_on)(3, str(folder), ["lossless", "archive"])
    return folder


@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in CASES), ("lossless", 3), ("archive", 3)])
def test_the_run_goes_on(name, ranks, runs):
    folder = runs / name / "checkpoint"
    assert names_in(folder) == ["step-4", "step-8"]
    assert names_in(folder / f"step-{SAVED}") == ["__0_0.ckpt8", "__1_0.ckpt8", INDEX]
    check_resumed(CASES[name][0], runs, f"{name}-{ranks}", expected=f"{name}-expected", other="other", moved=ranks != 2)


def test_a_plain_checkpoint_loads(runs):
    assert (runs / "plain" / "checkpoint" / f"step-{SAVED}" / ".metadata").exists()
    check_resumed("lossless", runs, "plain", expected="lossless-expected", other="other", moved=False)


def test_a_preset_is_looked_at_when_it_is_configured():
    from ckpt8.integrations.torchtitan import Ckpt8CheckpointManager

    with pytest.raises(UsageError, match="preset"):
        Ckpt8CheckpointManager.Config(enable=True, preset="tiny")


def test_a_container_that_is_newer_than_all_directories_is_named(tmp_path):
    """As ``ckpt8 chain --remove`` leaves them: the run would silently go on from an older step."""
    from ckpt8.integrations.torchtitan import Ckpt8CheckpointManager

    manager = Ckpt8CheckpointManager.__new__(Ckpt8CheckpointManager)
    (tmp_path / "step-4").mkdir()
    (tmp_path / "step-4" / ".metadata").write_bytes(b"")
    ckpt8.save({"w": torch.ones(2)}, tmp_path / "step-8.ckpt8")
    with pytest.warns(RuntimeWarning, match=r"step-8\.ckpt8: is newer, and the run goes on from step 4"):
        assert manager._find_load_step(str(tmp_path)) == 4
