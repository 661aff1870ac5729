"""Directories of ``accelerator.save_state``: ``load_state`` takes what was restored, and the loss goes on."""

from __future__ import annotations

import threading
import time
import warnings
from concurrent.futures import Future

import pytest
import torch
from frameworks_kit import PRESETS, check_goes_on, quiet, through
from torch.distributed.checkpoint.api import CheckpointException

from ckpt8.container.sharded import INDEX
from ckpt8.core.errors import InputError, OutputError

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

from ckpt8.checkpoint.sources import snapshot  # noqa: E402
from ckpt8.integrations import sharded  # noqa: E402
from ckpt8.integrations.accelerate import finish, load_state, save_state  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED, LAST = 5, 10


class Counter:
    """An object of the user's own, saved along."""

    def __init__(self):
        self.seen = 0

    def state_dict(self):
        return {"seen": self.seen}

    def load_state_dict(self, state):
        self.seen = state["seen"]


def losses(*, save_to=None, load_from=None, seed=0, packed=False, **options):
    """Train a network on noisy data, from the start or from a directory; losses after ``SAVED``, steps that it saw."""
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(80, 96), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(96, 80)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    torch.manual_seed(100)
    if load_from is not None:
        load_state(accelerator, load_from) if packed else accelerator.load_state(str(load_from))
    data = torch.randn(256, 80, generator=torch.Generator().manual_seed(1))
    found = []
    for step in range(0 if load_from is None else SAVED, LAST):
        if save_to is not None and step == SAVED:
            save_state(accelerator, save_to, **options) if packed else accelerator.save_state(str(save_to), **options)
        noisy = data + torch.randn(data.shape) / 10
        loss = (model(noisy) - data.roll(1, 1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.seen += 1
        found.append(loss.item())
    finish(accelerator)
    return found[SAVED - LAST :], counter.seen


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Losses after the checkpoint, those of another initialisation, and the checkpoint."""
    checkpoint = tmp_path_factory.mktemp("accelerate") / "state.5"
    with quiet():
        return losses(save_to=checkpoint)[0], losses(seed=1)[0], checkpoint


@pytest.mark.by_default("flash")
@pytest.mark.parametrize("preset", PRESETS)
def test_the_run_goes_on(preset, trained, tmp_path):
    expected, other, checkpoint = trained
    manifest, restored = through(checkpoint, tmp_path, preset)
    formats = {member.path: member.format for member in manifest.members}
    assert formats.pop("model.safetensors") == "safetensors"
    assert set(formats) == {"optimizer.bin", "scheduler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl"}
    assert set(formats.values()) == {"torch-zip"}
    for name in formats.keys() - {"optimizer.bin"}:
        assert (restored / name).read_bytes() == (checkpoint / name).read_bytes(), name
    found, seen = losses(load_from=restored)
    assert seen == LAST
    check_goes_on(preset, found, expected, other)


@pytest.mark.parametrize(("preset", "background"), [("lossless", True), ("flash", False)])
def test_one_process_packs_without_fsdp(preset, background, trained, tmp_path):
    expected, other, _ = trained
    found, _ = losses(save_to=tmp_path / "state", packed=True, preset=preset, background=background)
    assert found == expected
    assert sorted(path.name for path in (tmp_path / "state" / "ckpt8").iterdir()) == ["__0_0.ckpt8", "ckpt8-dcp.json"]
    found, seen = losses(load_from=tmp_path / "state", packed=True)
    assert seen == LAST
    check_goes_on(preset, found, expected, other)


def begun(**project):
    accelerator = accelerate.Accelerator(cpu=True, project_config=accelerate.utils.ProjectConfiguration(**project))
    model = torch.nn.Linear(300, 300)
    return accelerator, accelerator.prepare(model, torch.optim.AdamW(model.parameters()))[0]


@pytest.fixture
def gate(monkeypatch):
    """Holds back the threads that write."""
    opened, write = threading.Event(), sharded.Ckpt8StorageWriter.write_data
    monkeypatch.setattr(sharded.Ckpt8StorageWriter, "write_data", lambda *a: opened.wait(30) and write(*a))
    yield opened
    opened.set()


def test_a_save_in_the_background_takes_copies_and_the_next_call_waits_for_it(gate, tmp_path):
    accelerator, model = begun()
    before = model.weight.detach().clone()
    save_state(accelerator, tmp_path / "state", preset="lossless", background=True)
    assert not (tmp_path / "state" / "ckpt8" / INDEX).exists()
    with torch.no_grad():
        model.weight.zero_()
    threading.Timer(0.2, gate.set).start()
    load_state(accelerator, tmp_path / "state")
    assert torch.equal(model.weight, before)
    assert len(snapshot._kept) == 1
    finish(accelerator)
    assert snapshot._kept == []


def test_an_interrupt_of_the_wait_does_not_end_it(gate, tmp_path, monkeypatch):
    accelerator, _ = begun()
    save_state(accelerator, tmp_path / "state", background=True)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(Future, "result", strike)
        interrupted.setattr(sharded, "wait", strike)
        with pytest.raises(KeyboardInterrupt):
            finish(accelerator)
    threading.Timer(0.2, gate.set).start()
    finish(accelerator)
    assert (tmp_path / "state" / "ckpt8" / INDEX).exists()


def strike(*_):
    raise KeyboardInterrupt


def test_nobody_waits_for_a_thread_that_did_not_start(tmp_path, monkeypatch):
    accelerator, _ = begun()
    monkeypatch.setattr(sharded, "in_thread", strike)
    with pytest.raises(KeyboardInterrupt):
        save_state(accelerator, tmp_path / "state", background=True)
    monkeypatch.setattr(Future, "result", lambda *_: pytest.fail("waits"))
    finish(accelerator)


def save_and_finish(accelerator, **options):
    save_state(accelerator, **options)
    finish(accelerator)


@pytest.mark.parametrize("background", [False, True])
def test_older_checkpoints_go_once_the_new_one_is_whole(background, tmp_path, monkeypatch):
    def full(*_):
        raise OutputError("the disk is full")

    accelerator, _ = begun(project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    folder = tmp_path / "checkpoints"
    save_and_finish(accelerator, background=background)
    with monkeypatch.context() as disk:
        disk.setattr(sharded.Ckpt8StorageWriter, "write_data", full)
        with pytest.raises(CheckpointException, match="the disk is full"):
            save_and_finish(accelerator, background=background)
    assert [path.name for path in folder.iterdir()] == ["checkpoint_0"]
    load_state(accelerator)
    save_and_finish(accelerator, background=background)
    (path,) = folder.iterdir()
    assert path.name != "checkpoint_0"
    load_state(accelerator)
    (path / "ckpt8" / INDEX).unlink()  # as a kill leaves it
    for place in (None, path):
        with pytest.raises(InputError, match="is not complete, its save did not end; load another one"):
            load_state(accelerator, place)


@pytest.mark.parametrize("call", [lambda accelerator, _: finish(accelerator), save_state])
def test_what_fails_in_the_background_is_a_warning_and_raised_by_the_next_call(call, tmp_path, monkeypatch):
    def full(*_):
        raise OutputError("the disk is full")

    monkeypatch.setattr(sharded.Ckpt8StorageWriter, "write_data", full)
    accelerator, _ = begun()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        save_state(accelerator, tmp_path / "state", background=True)
        with pytest.raises(CheckpointException, match="the disk is full"):
            call(accelerator, tmp_path / "other")
        deadline = time.monotonic() + 30
        while not said(caught) and time.monotonic() < deadline:
            time.sleep(0.01)
    assert said(caught)
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    finish(accelerator)


def said(caught):
    return any("ckpt8: was not saved: " in str(each.message) for each in caught)


@pytest.mark.slow
def test_a_model_that_is_no_safetensors_file(trained, tmp_path):
    checkpoint = tmp_path / "state"
    expected, _ = losses(save_to=checkpoint, safe_serialization=False)
    assert expected == trained[0]
    manifest, restored = through(checkpoint, tmp_path / "there", "flash")
    formats = {member.path: member.format for member in manifest.members}
    assert formats["pytorch_model.bin"] == "torch-zip"
    assert "model.safetensors" not in formats
    # The order of the model is known, and so is the name of each parameter.
    assert [parameter.name for parameter in manifest.parameters] == [
        f"optimizer.bin:{name}" for name in ("0.weight", "0.bias", "3.weight", "3.bias")
    ]
    found, _ = losses(load_from=restored)
    check_goes_on("flash", found, expected, trained[1])
