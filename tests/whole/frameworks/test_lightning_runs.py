"""Checkpoints of Lightning: ``Trainer.fit(ckpt_path=...)`` and ``Fabric.load`` go on from what was restored."""

from __future__ import annotations

from argparse import Namespace
from pathlib import PurePosixPath

import pytest
import torch
from frameworks_kit import PRESETS, check_goes_on, quiet, through

import ckpt8

lightning = pytest.importorskip("lightning", reason="lightning is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

EPOCHS, STEPS = 2, 4


class Game(lightning.LightningModule):
    """Two networks, each with an optimizer and a scheduler of its own, that work against each other."""

    def __init__(self, args, out):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.maker, self.judge = (
            torch.nn.Sequential(torch.nn.Linear(64, args.width), torch.nn.Tanh(), torch.nn.Linear(args.width, size))
            for size in (64, 1)
        )
        self.losses = []

    def configure_optimizers(self):
        maker = torch.optim.AdamW(self.maker.parameters(), lr=self.hparams.args.lr)
        judge = torch.optim.SGD(self.judge.parameters(), lr=self.hparams.args.lr, momentum=0.9)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in (maker, judge)]
        return [maker, judge], schedulers

    def training_step(self, batch):
        maker, judge = self.optimizers()
        made = self.maker(batch)
        believed = (made - batch.roll(1, 1)).square().mean() - self.judge(made).mean() / 10
        self.step(maker, believed)
        doubted = torch.nn.functional.softplus(self.judge(made.detach()) - self.judge(batch)).mean()
        self.step(judge, doubted)
        self.losses.append((believed + doubted).item())

    def step(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()


def fit(folder, *, seed=0, resume_from=None):
    """Losses of the last epoch, and the module."""
    lightning.seed_everything(seed, verbose=False)
    module = Game(Namespace(width=96, lr=1e-2, tags=["a", "b"]), PurePosixPath("runs") / "one")
    data = torch.randn(16 * STEPS, 64, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, "{epoch}", save_top_k=-1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    # The hyperparameters hold a Namespace, which torch.load(weights_only=True) refuses.
    trainer.fit(
        module, torch.utils.data.DataLoader(data, 16), ckpt_path=resume_from and str(resume_from), weights_only=False
    )
    return module.losses[-STEPS:], module


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Losses of the last epoch, those of another initialisation, the final module, and the checkpoint before."""
    folder = tmp_path_factory.mktemp("lightning")
    with quiet():
        expected, module = fit(folder)
        return expected, fit(folder / "other", seed=1)[0], module, folder / "epoch=0.ckpt"


@pytest.mark.by_default("flash")
@pytest.mark.parametrize("preset", PRESETS)
def test_the_run_goes_on(preset, trained, tmp_path):
    expected, other, module, checkpoint = trained
    _, restored = through(checkpoint, tmp_path / "there", preset)
    found, again = fit(tmp_path / "again", resume_from=restored)
    check_goes_on(preset, found, expected, other)
    assert (again.current_epoch, again.global_step) == (module.current_epoch, module.global_step)
    for mine, theirs in zip(again.lr_schedulers(), module.lr_schedulers(), strict=True):
        assert mine.state_dict() == theirs.state_dict()


@pytest.mark.by_default("flash")
@pytest.mark.parametrize("preset", PRESETS)
def test_fabric_goes_on(preset, tmp_path):
    fabric = lightning.Fabric(accelerator="cpu", devices=1)

    def build(seed):
        torch.manual_seed(seed)
        model, optimizer = fabric.setup(
            model := torch.nn.Linear(96, 96), torch.optim.AdamW(model.parameters(), lr=1e-2)
        )
        return {"model": model, "optimizer": optimizer, "step": 0, "args": Namespace(lr=1e-2)}

    def steps(state, count):
        data = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
        found = []
        for _ in range(count):
            state["optimizer"].zero_grad()
            loss = (state["model"](data) - data.roll(1, 1)).square().mean()
            fabric.backward(loss)
            state["optimizer"].step()
            state["step"] += 1
            found.append(loss.item())
        return found

    state = build(0)
    steps(state, 4)
    fabric.save(tmp_path / "state.ckpt", state)
    expected = steps(state, 4)
    other = steps(build(1), 8)[4:]
    manifest, restored = through(tmp_path / "state.ckpt", tmp_path / "there", preset)
    resumed = build(2)
    fabric.load(restored, resumed, weights_only=False)
    assert resumed["step"] == 4
    check_goes_on(preset, steps(resumed, 4), expected, other)
    assert [parameter.rule["kind"] for parameter in manifest.parameters] == ["adam", "adam"]


def test_a_container_gives_the_model_without_lightning_s_own_classes(trained, tmp_path):
    _, _, module, checkpoint = trained
    ckpt8.compress(checkpoint, tmp_path / "x.ckpt8", preset="lossless")
    saved = torch.load(checkpoint, weights_only=False)["state_dict"]
    live = Game(**module.hparams)
    ckpt8.resume(tmp_path / "x.ckpt8", model=live)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in live.state_dict().items())
