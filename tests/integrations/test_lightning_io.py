"""The plugin in real Lightning runs: fit, stop, resume; what ModelCheckpoint keeps; what is not loaded."""

from __future__ import annotations

import argparse
import gc
import os
import threading
import warnings

import pytest
import torch
from chain_command_kit import age
from lattice_kit import check_weights

import ckpt8
from ckpt8.container.bases import kept_name
from ckpt8.container.kept_bases import dependents
from ckpt8.container.reader import ContainerReader

L = pytest.importorskip("lightning", reason="lightning is not installed")

from lattice_kit import record  # noqa: E402

from ckpt8.compressing.background import wait_for  # noqa: E402
from ckpt8.container.header import is_container  # noqa: E402
from ckpt8.container.writer import ContainerWriter  # noqa: E402
from ckpt8.core.errors import InputError, OutputError, UnsupportedError, UsageError  # noqa: E402
from ckpt8.integrations.lightning import Ckpt8CheckpointIO  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED, LAST = 6, 12


class Net(L.LightningModule):
    def __init__(self, width=80, options=None):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(torch.nn.Linear(width, 90), torch.nn.Tanh(), torch.nn.Linear(90, width))
        self.losses = []

    def training_step(self, batch, _):
        loss = (self.layers(batch) - batch.roll(1, dims=1)).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)]


def batches():
    return torch.utils.data.DataLoader(
        torch.randn(48, 80, generator=torch.Generator().manual_seed(1)), batch_size=8, shuffle=False
    )


def trainer(folder, steps, plugins, callbacks=(), module=L):
    return module.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
        plugins=plugins,
    )


def keep(folder, every=2, **options):
    return L.pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=every, **options)


def first_half(folder, plugins, **options):
    """A run that is saved at its end, in the folder of its other files; the path of that file."""
    model = Net()
    trainer(folder, SAVED, plugins, [keep(folder, save_top_k=1, **options)]).fit(model, batches())
    return model, folder / f"step={SAVED}.ckpt"


def second_half(folder, plugins, path):
    """A new model that goes on from there, and its trainer."""
    model, resumed = Net(), trainer(folder, LAST, plugins)
    resumed.fit(model, batches(), ckpt_path=str(path))
    return model, resumed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    model = Net()
    trainer(tmp_path_factory.mktemp("whole"), LAST, []).fit(model, batches())
    return model.losses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "drift", "background"),
    [("lossless", 0, False), ("flash", 1e-4, True), ("compact", 3e-3, False), ("archive", 3e-2, True)],
)
def test_a_run_goes_on(preset, drift, background, whole, tmp_path):
    first, path = first_half(tmp_path, [Ckpt8CheckpointIO(preset=preset, background=background)])
    assert first.losses == whole[:SAVED]
    assert is_container(path)
    assert not ckpt8.verify(path).failures
    with ckpt8.open(path) as file:
        manifest = file.manifest
    assert manifest.preset == preset
    assert {record.rule["kind"] for record in manifest.parameters} == {"adam"}
    second, resumed = second_half(tmp_path, [Ckpt8CheckpointIO()], path)
    assert len(second.losses) == LAST - SAVED
    found = max(abs(a - b) for a, b in zip(second.losses, whole[SAVED:], strict=True))
    assert found <= drift
    assert (found > 0) == (drift > 0)
    assert resumed.optimizers[0].param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9 ** (LAST // 6 // 3))


def test_a_run_without_the_plugin_goes_on_with_it(whole, tmp_path):
    _, path = first_half(tmp_path, [])
    assert not is_container(path)
    model, _ = second_half(tmp_path, [Ckpt8CheckpointIO()], path)
    assert model.losses == whole[SAVED:]


def test_lightnings_own_thread_around_the_plugin(whole, tmp_path):
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    plugin = AsyncCheckpointIO(Ckpt8CheckpointIO(preset="lossless"))
    _, path = first_half(tmp_path, [plugin])
    model, _ = second_half(tmp_path, [plugin], path)
    assert model.losses == whole[SAVED:]


def test_pytorch_lightning_takes_the_plugin(whole, tmp_path):
    classic = pytest.importorskip("pytorch_lightning", reason="pytorch_lightning is not installed")

    class Classic(classic.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(80, 80)

        def training_step(self, batch, _):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    run = trainer(tmp_path, 2, [Ckpt8CheckpointIO()], module=classic)
    run.fit(Classic(), batches())
    run.save_checkpoint(tmp_path / "x.ckpt")
    assert is_container(tmp_path / "x.ckpt")
    trainer(tmp_path, 4, [Ckpt8CheckpointIO()], module=classic).fit(
        Classic(), batches(), ckpt_path=str(tmp_path / "x.ckpt")
    )


@pytest.mark.parametrize("weights_only", [None, False])
@pytest.mark.parametrize("plain", [False, True])
def test_hyperparameters_of_other_classes_are_refused_until_allowed(plain, weights_only, tmp_path):
    run = trainer(tmp_path, 2, [] if plain else [Ckpt8CheckpointIO(preset="lossless")])
    run.fit(Net(options=argparse.Namespace(seed=7)), batches())
    path = tmp_path / "x.ckpt"
    run.save_checkpoint(path)
    assert is_container(path) != plain
    io = Ckpt8CheckpointIO()
    with pytest.raises(UnsupportedError, match=r"x.ckpt: holds argparse.Namespace, .*add_safe_globals"):
        io.load_checkpoint(path, weights_only=weights_only)
    with torch.serialization.safe_globals([argparse.Namespace]):
        found = io.load_checkpoint(path, weights_only=weights_only)
    assert found["hyper_parameters"]["options"] == argparse.Namespace(seed=7)


def test_nothing_in_a_pickle_is_executed(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    io = Ckpt8CheckpointIO()
    io.save_checkpoint({"trap": Trap()}, tmp_path / "x.ckpt")
    torch.save({"trap": Trap()}, tmp_path / "y.ckpt")
    for name in ("x.ckpt", "y.ckpt"):
        with pytest.raises(UnsupportedError, match=r"holds posix.mkdir"):
            io.load_checkpoint(tmp_path / name, weights_only=False)
    assert not (tmp_path / "executed").exists()


def test_files_that_cannot_be_read_or_written(tmp_path):
    io, damaged = Ckpt8CheckpointIO(), tmp_path / "damaged.ckpt"
    for name in ("text.ckpt", "file"):
        (tmp_path / name).write_text("no checkpoint")
    io.save_checkpoint({"w": torch.ones(3)}, damaged)
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for error, said, call, *arguments in (
        (FileNotFoundError, "Checkpoint file not found", io.load_checkpoint, tmp_path / "nothing.ckpt"),
        (InputError, r"text.ckpt: cannot be loaded", io.load_checkpoint, tmp_path / "text.ckpt"),
        (InputError, "is a directory", io.load_checkpoint, tmp_path),
        (InputError, "does not match the seal", io.load_checkpoint, damaged),
        (UsageError, "is not a path of the file system", io.save_checkpoint, {}, "s3://bucket/x.ckpt"),
        (UsageError, "storage_options", io.save_checkpoint, {}, tmp_path / "x.ckpt", {}),
        (OutputError, "cannot be written", io.save_checkpoint, {}, tmp_path / "file" / "x.ckpt"),
    ):
        with pytest.raises(error, match=said):
            call(*arguments)
    for said, options in (
        ("preset 'best'", {"preset": "best"}),
        (r"base is 'auto' or None, not 'last\.ckpt'", {"base": "last.ckpt"}),
        (r"a budget is a number of steps from 0\.01 to 10, not 11", {"budget": 11}),
        ("a bound on the update error is a number from 0 on, not -1", {"max_update_error": -1}),
    ):
        with pytest.raises(UsageError, match=said):
            Ckpt8CheckpointIO(**options)


def test_what_fails_in_the_background_is_raised_later(tmp_path, monkeypatch):
    io = Ckpt8CheckpointIO(background=True)

    def full(*_):
        raise OutputError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(ContainerWriter, "finish", full)
        io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "x.ckpt")
        with pytest.raises(OutputError, match="the disk is full"):
            io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "y.ckpt")
        io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "y.ckpt")
        with pytest.raises(OutputError, match="the disk is full"):
            io.teardown()
    io.teardown()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def go_on(monkeypatch):
    """What every save waits for before it finishes its file; set at first."""
    event, finish = threading.Event(), ContainerWriter.finish
    event.set()

    def slow(self, *args):
        event.wait()
        finish(self, *args)

    monkeypatch.setattr(ContainerWriter, "finish", slow)
    return event


def test_a_save_under_way_is_waited_for(go_on, tmp_path):
    io = Ckpt8CheckpointIO(background=True)
    for name, action in (("x.ckpt", io.load_checkpoint), ("y.ckpt", io.remove_checkpoint)):
        go_on.clear()
        io.save_checkpoint({"w": torch.ones(3)}, tmp_path / name)
        was_there = (tmp_path / name).exists()
        threading.Timer(0.1, go_on.set).start()
        assert not was_there
        action(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt"]
    io.remove_checkpoint(tmp_path / "x.ckpt")
    io.remove_checkpoint(tmp_path / "x.ckpt")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    io.remove_checkpoint(tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_only_checkpoints_are_removed(tmp_path):
    """A checkpoint states which older ones Lightning removes: a path in it may lead anywhere."""
    io = Ckpt8CheckpointIO()
    documents, notes = tmp_path / "Documents", tmp_path / "notes.ckpt"
    documents.mkdir()
    (documents / "thesis.pdf").write_text("mine")
    notes.write_text("mine")
    for path in (documents, notes):
        with pytest.raises(OutputError, match="is not removed"):
            io.remove_checkpoint(path)
    assert (documents / "thesis.pdf").exists()
    assert notes.exists()
    torch.save({"w": torch.ones(3)}, tmp_path / "plain.ckpt")
    torch.save({"w": torch.ones(3)}, documents / "model.pt")
    (documents / "thesis.pdf").unlink()
    (tmp_path / "last.ckpt").symlink_to(notes)
    for name in ("plain.ckpt", "Documents", "last.ckpt"):
        io.remove_checkpoint(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.ckpt"]


def test_fabric_saves_and_loads(tmp_path):
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=[Ckpt8CheckpointIO(preset="lossless")])
    model = torch.nn.Linear(80, 80)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fabric.save(tmp_path / "x.ckpt", {"model": model, "step": 3})
    assert is_container(tmp_path / "x.ckpt")
    with torch.no_grad():
        model.weight.zero_()
    rest = fabric.load(tmp_path / "x.ckpt", {"model": model})
    assert rest == {"step": 3}
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in weights.items())


def test_a_plugin_that_is_gone_leaves_what_its_last_save_needs(go_on, tmp_path):
    """As in a function that ends with a save of Fabric: nobody waits for it."""
    plugin, state = Ckpt8CheckpointIO(preset="lossless", base="auto", background=True), torch.arange(1e5)
    checkpoint = {"model": {"w": state}}
    plugin.save_checkpoint(checkpoint, tmp_path / "1.ckpt")
    plugin.teardown()
    go_on.clear()
    plugin.save_checkpoint(checkpoint, tmp_path / "2.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        del plugin
        gc.collect()
    Ckpt8CheckpointIO().remove_checkpoint(tmp_path / "1.ckpt")
    go_on.set()
    wait_for(tmp_path / "2.ckpt")
    assert record(tmp_path / "2.ckpt").links == 1
    assert torch.equal(ckpt8.load(tmp_path / "2.ckpt")["model"]["w"], state)


@pytest.mark.parametrize("background", [False, True])
def test_what_a_named_file_holds_is_not_stored_again(background, tmp_path):
    frozen, adapter = {"layer.weight": torch.randn(300, 300)}, torch.nn.Parameter(torch.randn(4, 300))
    torch.save(frozen, tmp_path / "base.pt")
    optimizer = torch.optim.AdamW([adapter])
    adapter.square().sum().backward()
    optimizer.step()
    state = {"state_dict": {**frozen, "adapter": adapter.detach()}, "optimizer_states": [optimizer.state_dict()]}
    plugin = Ckpt8CheckpointIO(base="auto", frozen_from=tmp_path / "base.pt", background=background)
    plugin.save_checkpoint(state, tmp_path / "run" / "1.ckpt")
    plugin.teardown()
    assert (tmp_path / "run" / "1.ckpt").stat().st_size < 300 * 300
    (tmp_path / "base.pt").unlink()
    assert torch.equal(
        plugin.load_checkpoint(tmp_path / "run" / "1.ckpt")["state_dict"]["layer.weight"], frozen["layer.weight"]
    )


class Seen(Ckpt8CheckpointIO):
    """The plugin, and the weights that it was given."""

    def __init__(self, **options):
        super().__init__(preset="archive", base="auto", **options)
        self.weights = {}

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        state = checkpoint["state_dict"]
        self.weights[str(path)] = {name: x.clone() for name, x in state.items() if x.ndim == 2}
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_what_is_removed_breaks_no_chain(mode, background, tmp_path):
    """Of the greatest steps all but the last two are removed; of the least, each new one but for ``last.ckpt``."""
    folder, plugin = tmp_path / "run", Seen(background=background)
    callback = keep(folder, every=1, save_top_k=2, monitor="step", mode=mode, save_last=True)
    trainer(folder, 6, [plugin], [callback]).fit(Net(), batches())
    kept = sorted(path for path in folder.iterdir() if path.is_file())
    steps = (5, 6) if mode == "max" else (1, 2)
    assert [path.name for path in kept] == ["last.ckpt", *(f"step={step}.ckpt" for step in steps)]
    # Nothing builds on ``last.ckpt``, which counts in no chain then.
    assert 0 < record(kept[-1]).place < steps[-1]
    linked = {path.name for path in (folder / "bases").iterdir()}
    moved = folder.rename(tmp_path / "moved")
    for path in kept:
        assert not ckpt8.verify(moved / path.name).failures
        check_weights(moved / path.name, plugin.weights[str(path)])
        assert not dependents(moved / path.name)
    needed = set()
    for path in kept:
        with ContainerReader(moved / path.name) as reader:
            needed |= {kept_name(each.seal.hex()) for each in reader.links()}
    assert linked == needed
    for path in kept:
        plugin.remove_checkpoint(moved / path.name)
    assert list(moved.iterdir()) == []


def test_an_older_file_goes_once_the_newer_one_is_in_place(go_on, tmp_path):
    """Killed at any step, the run has a checkpoint; where a save fails, it has that of before."""
    plugin, present = Ckpt8CheckpointIO(preset="lossless", background=True), []

    class Look(L.Callback):
        def on_train_batch_start(self, *_):
            present.append(sorted(path.name for path in tmp_path.glob("*.ckpt")))
            go_on.set()
            wait_for(tmp_path / f"step={len(present) - 1}.ckpt")
            go_on.clear()

        def on_train_end(self, *_):
            self.on_train_batch_start()
            go_on.set()

    trainer(tmp_path, 4, [plugin], [Look(), keep(tmp_path, every=1, save_top_k=1)]).fit(Net(), batches())
    assert present == [[], [], ["step=1.ckpt"], ["step=2.ckpt"], ["step=3.ckpt"]]
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["step=4.ckpt"]
    go_on.clear()
    plugin.save_checkpoint({"w": torch.ones(3)}, tmp_path / "bad.ckpt")
    plugin.remove_checkpoint(tmp_path / "step=4.ckpt")
    (tmp_path / "bad.ckpt").mkdir()
    go_on.set()
    with pytest.raises(OutputError):
        plugin.teardown()
    plugin.teardown()
    assert ckpt8.load(tmp_path / "step=4.ckpt")["global_step"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("save_last", [True, "link"])
def test_what_model_checkpoint_keeps(save_last, background, whole, tmp_path):
    plugin = Ckpt8CheckpointIO(preset="lossless", background=background)
    callback = keep(tmp_path, save_top_k=2, monitor="step", mode="max", save_last=save_last)
    trainer(tmp_path, SAVED, [plugin], [callback]).fit(Net(), batches())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last == "link")
    model = Net()
    trainer(tmp_path, LAST, [plugin], [callback]).fit(model, batches(), ckpt_path="last")
    assert model.losses == whole[SAVED:]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["last.ckpt", "step=10.ckpt", "step=12.ckpt"]
    assert ckpt8.load(tmp_path / "last.ckpt")["global_step"] == LAST


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_a_policy_goes_on_through_a_stop(background, tmp_path):
    files = {"keep": "last:2,every:4", "background": background}

    def fitted(steps, source=None):
        saving = L.pytorch.callbacks.ModelCheckpoint(
            dirpath=tmp_path / "run", filename="{step}", every_n_train_steps=1, save_top_k=-1
        )
        run = trainer(tmp_path, steps, [Ckpt8CheckpointIO(**files)], [saving])
        run.fit(Net(), batches(), ckpt_path=source)
        return sorted(int(path.stem.partition("=")[2]) for path in (tmp_path / "run").glob("*.ckpt"))

    assert fitted(5) == [4, 5]
    assert fitted(10, str(tmp_path / "run" / "step=5.ckpt")) == [4, 8, 9, 10]
    for path in (tmp_path / "run").glob("*.ckpt"):
        assert ckpt8.verify(path).failures == ()


SCORES = dict(zip(range(1, LAST + 1), [0.1, 0.9, 0.5, 0.3, 0.7, 0.6, 0.8, 0.4, 0.2, 0.1, 0.5, 0.5], strict=True))


class Scored(Net):
    """Its accuracy says nothing of its loss."""

    def training_step(self, batch, _):
        loss = super().training_step(batch, _)
        self.log("acc", SCORES[self.global_step + 1])
        return loss


@pytest.mark.slow
@pytest.mark.parametrize("plugins", [[], [Ckpt8CheckpointIO()]])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_the_best_are_those_of_model_checkpoint_s_own_metric(mode, plugins, tmp_path):
    callback = keep(tmp_path / "run", save_top_k=-1, monitor="acc", mode=mode)
    trainer(tmp_path, LAST, plugins, [callback]).fit(Scored(), batches())
    for path in (tmp_path / "run").iterdir():
        age(path)
    plan = ckpt8.thin(tmp_path / "run", keep="best:2")
    assert (plan.metric, plan.is_highest) == ("acc", mode == "max")
    saved = range(2, LAST + 1, 2)
    assert {record.step: record.score for record in plan} == pytest.approx({step: SCORES[step] for step in saved})
    best = sorted(saved, key=SCORES.get, reverse=mode == "max")[:2]
    assert {record.step for record in plan if record.becomes != "gone"} == {*best, LAST}
    assert callback.best_model_path == str(tmp_path / "run" / f"step={best[0]}.ckpt")
