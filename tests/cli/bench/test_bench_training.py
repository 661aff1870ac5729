"""The checkpoint that the benchmark trains: the updates are AdamW's own, and it is what a training run saves."""

from __future__ import annotations

import math

import pytest
import torch
from gpt_kit import SIZES, Run

from ckpt8.cli.bench.source import survey
from ckpt8.cli.bench.training import MAX_STEPS, MIN_STEPS, RunConfig, steps_for, train_checkpoint, update_in_backward


def adamw(groups, lr):
    return torch.optim.AdamW(groups, lr=lr)


def test_updates_in_the_backward_pass_are_those_of_a_step_after_it():
    settings = RunConfig(horizon=4, batch_size=2, lr=1e-3, warmup=2, grad_clip=math.inf)
    plain, fused = (Run(SIZES["mini"], settings, adamw) for _ in range(2))
    update_in_backward(fused)
    for step in range(4):
        plain.advance()
        for group in fused.optimizer.param_groups:
            group["lr"] = settings.lr_at(step)
        fused.loss(step).backward()
        assert all(param.grad is None for param in fused.model.parameters())
    expected, found = plain.optimizer.state_dict(), fused.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for key, tensor in state.items():
            assert torch.equal(found["state"][index][key], tensor), (index, key)
    for ours, theirs in zip(fused.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_it_is_a_checkpoint_of_the_size_asked_for_that_has_learned(tmp_path):
    target = tmp_path / "trained.pt"
    facts = train_checkpoint(target, 2_000_000)
    tree = torch.load(target, weights_only=True)
    assert abs(target.stat().st_size / 2e6 - 1) < 0.1
    assert survey(target).loaded == ("",)
    assert facts["steps"] == tree["iter_num"] == steps_for(2_000_000)
    assert facts["parameters"] == sum(t.numel() for t in {t.data_ptr(): t for t in tree["model"].values()}.values())
    assert facts["loss"] < math.log(96) - 0.1
    for state in tree["optimizer"]["state"].values():
        assert state["step"] == facts["steps"]
        assert state["exp_avg"].count_nonzero() > 0


@pytest.mark.parametrize(("size", "steps"), [(1e6, MAX_STEPS), (2.5e8, 16), (1.5e9, MIN_STEPS), (8e9, MIN_STEPS)])
def test_large_networks_take_fewer_steps(size, steps):
    assert steps_for(size) == steps
