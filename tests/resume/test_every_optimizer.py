"""Resume into every optimizer of every installed package: as its own load_state_dict would, or not at all."""

from __future__ import annotations

import pytest
import torch
from every_optimizer_kit import classes, foreign, quiet, step, trained
from resume_kit import same, snapshot

import ckpt8
from ckpt8.errors import Ckpt8Error

PACKAGES = {
    "torch.optim": 14,
    "optimi": 8,
    "came_pytorch": 1,
    "lion_pytorch": 1,
    "pytorch_optimizer": 110,
    "bitsandbytes.optim": 35,
    "torchao.optim": 7,
    "transformers.optimization": 1,
    "ckpt8.optim": 7,
}
"""How many classes of each go on at least."""

REFUSED = {}
"""Classes whose state is refused, by package."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", PACKAGES)
def test_every_optimizer(tmp_path, package):
    pytest.importorskip(package.partition(".")[0])
    refused, wrong, went_on = set(), {}, 0
    with quiet():
        for name, kind in classes(package).items():
            try:
                model, optimizer = trained(kind, 0, 2)
            except Exception as exc:  # noqa: BLE001
                print("SKIP", name, repr(exc)[:100])
                continue
            try:
                outcome = resumed(tmp_path, kind, model, optimizer)
            except Exception as exc:
                import traceback

                traceback.print_exc()
                outcome = "EXC " + repr(exc)[:150]
            if outcome is None:
                went_on += 1
            elif outcome == "refused":
                refused.add(name)
            else:
                wrong[name] = outcome
    assert not wrong
    assert refused == REFUSED.get(package, set())
    assert went_on >= PACKAGES[package]


def resumed(folder, kind, model, optimizer):
    """What is wrong with a run that goes on from a file, ``refused`` where it cannot, or None."""
    run = folder / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, run)
    step(model, optimizer, 2)
    uninterrupted = weights(model)
    for preset in ("lossless", "flash"):
        ckpt8.compress(run, folder / "run.ckpt8", preset=preset, force=True)
        other, fresh = trained(kind, 1, 0)
        before = snapshot(other, fresh)
        try:
            ckpt8.resume(folder / "run.ckpt8", other, fresh)
        except Ckpt8Error as exc:
            if not same(snapshot(other, fresh), before):
                return "refused, but changed"
            step(other, fresh, 2)
            print("REFUSED", kind.__name__, exc)
            return "refused"
        if found := foreign([dict(fresh.state), fresh.param_groups]):
            return f"holds {found}"
        step(other, fresh, 2)
        restored = run if preset == "lossless" else ckpt8.restore(folder / "run.ckpt8", folder / "back.pt", force=True)
        expected = weights(loaded(kind, restored))
        if not (same(weights(other), expected) or (preset == "lossless" and same(weights(other), uninterrupted))):
            return f"{preset}: goes on in another way"
        if preset == "lossless" and same(expected, uninterrupted) and not same(weights(other), uninterrupted):
            return f"{preset}: goes on in another way"
    return None


def loaded(kind, path):
    """A model one step after it, and its optimizer, took what torch loads."""
    tree = torch.load(path, weights_only=False)
    other, fresh = trained(kind, 1, 0)
    other.load_state_dict(tree["model"])
    fresh.load_state_dict(tree["optimizer"])
    step(other, fresh, 2)
    return other


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
