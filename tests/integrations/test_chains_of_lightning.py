"""Chains that Lightning's plugin writes: ``save_top_k`` removes what it likes, and the rest comes back."""

from __future__ import annotations

import gc
import threading
import warnings

import pytest
import torch

import ckpt8

L = pytest.importorskip("lightning", reason="lightning is not installed")

from lattice_kit import check_weights, record  # noqa: E402
from test_lightning_io import Net, batches, trainer  # noqa: E402

from ckpt8.compressing.compress import wait_for  # noqa: E402
from ckpt8.container.bases import kept_name  # noqa: E402
from ckpt8.container.kept_bases import dependents  # noqa: E402
from ckpt8.container.reader import ContainerReader  # noqa: E402
from ckpt8.container.writer import ContainerWriter  # noqa: E402
from ckpt8.core.errors import UsageError  # noqa: E402
from ckpt8.integrations.lightning import Ckpt8CheckpointIO  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore", "error::RuntimeWarning")


class Seen(Ckpt8CheckpointIO):
    """The plugin, and the weights that it was given."""

    def __init__(self, **options):
        super().__init__(preset="archive", base="auto", **options)
        self.weights = {}

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        state = checkpoint["state_dict"]
        self.weights[str(path)] = {name: x.clone() for name, x in state.items() if x.ndim == 2}
        super().save_checkpoint(checkpoint, path, storage_options)


def fit(folder, plugin, steps, **options):
    keep = L.pytorch.callbacks.ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=2, **options)
    trainer(folder, steps, [plugin], [keep]).fit(Net(), batches())


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("mode", ["max", "min"])
def test_what_is_removed_breaks_no_chain(mode, background, tmp_path):
    """Of the greatest steps all but the last two are removed; of the least, each new one but for ``last.ckpt``."""
    folder, plugin = tmp_path / "run", Seen(background=background)
    fit(folder, plugin, 6, monitor="step", mode=mode, save_last=True)
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


def test_a_plugin_that_is_gone_leaves_what_its_last_save_needs(tmp_path, monkeypatch):
    """As in a function that ends with a save of Fabric: nobody waits for it."""
    plugin, state = Ckpt8CheckpointIO(preset="lossless", base="auto", background=True), torch.arange(1e5)
    checkpoint = {"model": {"w": state}}
    plugin.save_checkpoint(checkpoint, tmp_path / "1.ckpt")
    plugin.teardown()
    go_on, finish = threading.Event(), ContainerWriter.finish

    def slow(self, *args):
        go_on.wait()
        finish(self, *args)

    monkeypatch.setattr(ContainerWriter, "finish", slow)
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


def test_the_base_is_auto_or_none():
    with pytest.raises(UsageError, match=r"base is 'auto' or None, not 'last\.ckpt'"):
        Ckpt8CheckpointIO(base="last.ckpt")
