"""FSDPStrategy and ModelParallelStrategy: every rank packs its slices, and ``fit(ckpt_path=...)`` goes on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy  # noqa: E402
from sharded_kit import LAST, PRESETS, SAVED, batch, check_resumed, keep, loss_of, network, ranks_of  # noqa: E402

from ckpt8.core.errors import UsageError  # noqa: E402
from ckpt8.integrations.lightning import Ckpt8CheckpointIO, Ckpt8StrategyMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

HALF, END = "epoch=0.ckpt", "epoch=1.ckpt"
CASES = {
    **{f"{kind}-{preset}": (kind, preset, True) for kind in ("fsdp", "parallel") for preset in PRESETS},
    **{f"parallel-{preset}-whole": ("parallel", preset, False) for preset in PRESETS},
}
BEHIND = "lossless"
"""Saved in the background."""
MOVED = ["fsdp-lossless", "fsdp-archive", "parallel-lossless", "parallel-archive", "parallel-archive-whole"]


class PackedFSDP(Ckpt8StrategyMixin, FSDPStrategy):
    """What a user writes."""


class PackedModelParallel(Ckpt8StrategyMixin, ModelParallelStrategy):
    """The same for FSDP2 and tensor parallelism."""


class Net(lightning.LightningModule):
    """A network that is sharded by the strategy's kind of FSDP."""

    def __init__(self, kind, seed):
        super().__init__()
        self.kind, self.net, self.losses = kind, network(seed), {}

    def configure_model(self):
        if self.kind == "fsdp":
            from torch.distributed.fsdp import FullyShardedDataParallel

            # FSDPStrategy itself wraps for an accelerator; it takes a module that is wrapped already as it is.
            self.net = FullyShardedDataParallel(self.net, device_id=torch.device("cpu"), use_orig_params=True)
        else:
            torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, data, number):
        loss = loss_of(self.net, data)
        self.losses[self.global_step] = loss.item()
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def train_dataloader(self):
        return torch.utils.data.DataLoader([batch(step) for step in range(SAVED)], batch_size=None)


def strategy_of(kind, preset, by_slices, plain=False):
    options = {} if plain else {"preset": preset, "background": preset == BEHIND}
    if kind == "fsdp":
        return (FSDPStrategy if plain else PackedFSDP)(**options, state_dict_type="sharded" if by_slices else "full")
    options |= {"data_parallel_size": dist.get_world_size(), "tensor_parallel_size": 1}
    return (ModelParallelStrategy if plain else PackedModelParallel)(**options, save_distributed_checkpoint=by_slices)


def fit(folder, kind, preset, by_slices, *, seed=0, ckpt_path=None, plain=False):
    """Losses of the second half of a run that saves after each of two epochs, from the start or from a checkpoint."""
    saving = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, enable_version_counter=False)
    model = Net(kind, seed)
    off = ("logger", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler")
    trainer = lightning.Trainer(
        max_epochs=LAST // SAVED,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy_of(kind, preset, by_slices, plain),
        plugins=[] if by_slices else [Ckpt8CheckpointIO(preset=preset)],
        callbacks=[saving],
        **dict.fromkeys(off, False),
    )
    trainer.fit(model, ckpt_path=ckpt_path)
    return [loss for step, loss in sorted(model.losses.items()) if step >= SAVED]


def train_all(folder):
    for kind in ("fsdp", "parallel"):
        keep(folder, f"{kind}-other", fit(f"{folder}/{kind}-other", kind, "flash", True, seed=1))
    for name, case in CASES.items():
        keep(folder, f"{name}-expected", fit(f"{folder}/{name}", *case))
    plain = fit(f"{folder}/plain", "parallel", None, True, plain=True)
    keep(folder, "plain-expected", plain)
    from_plain = fit(f"{folder}/plain", "parallel", "flash", True, seed=2, ckpt_path=f"{folder}/plain/{HALF}")
    keep(folder, "plain-2", from_plain)
    go_on(folder, CASES)


def go_on(folder, cases):
    world = dist.get_world_size()
    for name in cases:
        place = f"{folder}/{name}/{HALF}"
        keep(folder, f"{name}-{world}", fit(f"{folder}/{name}-{world}", *CASES[name], seed=2, ckpt_path=place))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lightning")
    ranks_of(train_all)(2, str(folder))
    ranks_of(go_on)(3, str(folder), MOVED)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks"), [*((name, 2) for name in CASES), *((name, 3) for name in MOVED)])
def test_the_run_goes_on(name, ranks, runs):
    kind, preset, by_slices = CASES[name]
    place = runs / name / HALF
    if by_slices:
        found = sorted(path.name for path in place.iterdir())
        assert found == ["__0_0.ckpt8", "__1_0.ckpt8", "ckpt8-dcp.json", "meta.pt"]
    else:
        assert place.is_file()
        assert not list(place.parent.glob(".*"))
    check_resumed(preset, runs, f"{name}-{ranks}", expected=f"{name}-expected", other=f"{kind}-other", moved=ranks != 2)


@pytest.mark.slow
def test_a_plain_checkpoint_loads_and_is_replaced(runs):
    check_resumed("lossless", runs, "plain-2", expected="plain-expected", other="parallel-other", moved=False)
    # What the plain run had left at the end is packed now: the strategy saved under the same name.
    assert sorted(path.name for path in (runs / "plain" / END).iterdir())[-2:] == ["ckpt8-dcp.json", "meta.pt"]


@pytest.mark.slow
def test_lightning_removes_what_was_packed(runs):
    place = runs / "parallel-flash" / END
    Ckpt8CheckpointIO().remove_checkpoint(place)
    assert not place.exists()


def test_arguments_that_it_does_not_have():
    with pytest.raises(UsageError, match="preset"):
        PackedModelParallel(preset="tiny")
    strategy = PackedFSDP(preset="archive", state_dict_type="sharded")
    with pytest.raises(UsageError, match="no storage_options"):
        strategy.save_checkpoint({}, Path("state"), storage_options={})
