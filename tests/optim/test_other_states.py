"""Optimizers without a rule of ours: the roles of their state, the size, and the step that the restored state takes."""

from __future__ import annotations

import every_optimizer_kit
import pytest
import torch
from every_optimizer_kit import quiet, step, trained
from torch import nn

import ckpt8
from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.core.tensors import Role
from ckpt8.optim.other_states import OTHER_STATES, other_roles

CASES = {
    ("torch.optim", "Adamax"): 2.6,
    ("torch.optim", "Adagrad"): 2.2,
    ("torch.optim", "RMSprop"): 2.2,
    ("torch.optim", "Adadelta"): 2.6,
    ("torch.optim", "ASGD"): 1.6,
    ("optimi", "Adan"): 2.9,
    ("optimi", "Ranger"): 2.2,
    ("pytorch_optimizer", "AdaMax"): 2.6,
    ("pytorch_optimizer", "AdaBelief"): 2.6,
    ("pytorch_optimizer", "AdEMAMix"): 2.7,
    ("pytorch_optimizer", "Adan"): 2.9,
    ("pytorch_optimizer", "ScheduleFreeAdamW"): 1.8,
    ("pytorch_optimizer", "Prodigy"): 2.2,
    ("pytorch_optimizer", "AdamMini"): 2.2,
}
"""The least ratio of a matrix and its state."""


@pytest.fixture(autouse=True)
def _large(monkeypatch):
    def network(seed=0, *, matrices=False):
        torch.manual_seed(seed)
        layer = nn.Linear(every_optimizer_kit.WIDTH, 1024, bias=not matrices)
        return nn.Sequential(layer, nn.Tanh(), nn.Linear(1024, 4, bias=not matrices))

    monkeypatch.setattr(every_optimizer_kit, "network", network)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "kind"), CASES)
def test_roles_size_and_the_next_step(package, kind, tmp_path):
    module = pytest.importorskip(package, reason=f"{package} is not installed")
    path = tmp_path / "run.pt"
    with quiet():
        model, optimizer = trained(getattr(module, kind), 0, 4)
        state = optimizer.state_dict()
        torch.save({"model": model.state_dict(), "optimizer": state}, path)
        ckpt8.compress(path)
        ratio = path.stat().st_size / path.with_suffix(".ckpt8").stat().st_size
        assert ratio > CASES[package, kind]
        with open_checkpoint(path) as checkpoint:
            roles = {each.name: each.role for each in classify(checkpoint.tree).tensors}
        for identifier, values in state["state"].items():
            for key, value in values.items():
                if roles.get(f"optimizer.state.{identifier}.{key}") is Role.MOMENT2:
                    assert (value >= 0).all(), key
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step(model, optimizer, 4)
        ours = ckpt8.load(path.with_suffix(".ckpt8"))
        again, fresh = trained(type(optimizer), 1, 0)
        again.load_state_dict(torch.load(path, weights_only=False)["model"])
        fresh.load_state_dict(ours["optimizer"])
        step(again, fresh, 4)
    for start, one, other in zip(before, model.parameters(), again.parameters(), strict=True):
        moved = (one - start).norm()
        assert (one - other).norm() <= 0.05 * moved + 1e-6 * start.norm()


def test_a_key_alone_says_nothing():
    assert other_roles({"sum"}) == {"sum": Role.MOMENT2}
    assert other_roles({"sum", "history"}) == {}
    assert other_roles({"z"})["z"] is Role.WEIGHT
    assert other_roles({"z", "noise"}) == {}
    assert other_roles(()) == {}


def test_every_state_is_found_as_itself():
    for each in OTHER_STATES:
        assert other_roles(each.roles).items() >= each.roles.items()
