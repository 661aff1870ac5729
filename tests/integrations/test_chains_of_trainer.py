"""Chains that the callback writes in a real Trainer: whatever is removed, the rest comes back."""

from __future__ import annotations

import errno
import os

import pytest

import ckpt8

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")

from lattice_kit import check_weights, record  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from trainer_kit import names_in, trainer  # noqa: E402

from ckpt8.core.errors import UsageError  # noqa: E402
from ckpt8.integrations.transformers import Ckpt8Callback, restored_checkpoint  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore", "error::RuntimeWarning")


def run(folder, callback, resume=None, **arguments):
    settings = {"save_steps": 2, "max_steps": 14, "lr_scheduler_type": "constant", "learning_rate": 1e-3}
    settings["save_total_limit"] = 2
    trained = trainer(folder, [callback], **{**settings, **arguments})
    trained.train(resume_from_checkpoint=resume)
    return trained


def chained(**options):
    return Ckpt8Callback(preset="archive", base="auto", **options)


@pytest.mark.slow
@pytest.mark.parametrize("background", [False, True])
def test_the_limit_breaks_no_chain(background, tmp_path):
    folder = tmp_path / "run"
    run(folder, chained(background=background))
    originals = [folder / "checkpoint-12", folder / "checkpoint-14"]
    containers = [path.with_name(f"{path.name}.ckpt8") for path in originals]
    assert names_in(folder) == ["bases", *sorted(path.name for path in (*originals, *containers))]
    # The saves 0 to 6 are one chain: 5 needs 4 and 0, and so does 6.
    assert [(record(path).place, record(path).links) for path in containers] == [(5, 2), (6, 2)]
    assert len(names_in(folder / "bases")) == 2
    for original in originals:
        original.rename(tmp_path / original.name)
    moved = tmp_path / "elsewhere" / "run"
    moved.parent.mkdir()
    folder.rename(moved)
    for container in containers:
        original = tmp_path / container.stem
        assert not ckpt8.verify(moved / container.name, original).failures
        check_weights(moved / container.name, load_file(original / "model.safetensors"))
    path = restored_checkpoint(moved)
    assert path == str(moved / "checkpoint-14")
    resumed = run(moved, chained(background=background), resume=path, max_steps=18)
    assert resumed.state.global_step == 18
    # The weights of the resumed run lie on the lattice of the chain; it starts another one.
    assert record(moved / "checkpoint-16.ckpt8") is None
    assert record(moved / "checkpoint-18.ckpt8").links == 1
    assert len(names_in(moved / "bases")) == 1
    for step in (16, 18):
        check_weights(moved / f"checkpoint-{step}.ckpt8", load_file(moved / f"checkpoint-{step}" / "model.safetensors"))


def test_without_hard_links_every_container_is_whole(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.warns(RuntimeWarning, match="cannot be linked") as warned:
        run(tmp_path, chained(), max_steps=4)
    assert len(warned) == 1
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-2.ckpt8", "checkpoint-4", "checkpoint-4.ckpt8"]
    assert record(tmp_path / "checkpoint-4.ckpt8") is None


def test_the_base_is_auto_or_none():
    with pytest.raises(UsageError, match=r"base is 'auto' or None, not 'run\.ckpt8'"):
        Ckpt8Callback(base="run.ckpt8")
