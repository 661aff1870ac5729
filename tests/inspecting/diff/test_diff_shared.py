"""One dictionary at several paths: a walk meets it once, and both sides call it the same."""

from __future__ import annotations

import pytest
import torch
from diff_kit import saved

import ckpt8


def _state_of_two(run):
    run["optimizer"]["state"][2] = run["optimizer"]["state"][1]


def _state_elsewhere(run):
    run["first"] = run["optimizer"]["state"][1]
    run["model"], run["optimizer"] = run.pop("model"), run.pop("optimizer")


def _states_of_two_optimizers(run):
    run["other"] = {**run["optimizer"], "state": dict(run["optimizer"]["state"])}


@pytest.mark.parametrize("share", [_state_of_two, _state_elsewhere, _states_of_two_optimizers])
def test_a_file_is_identical_to_itself(tmp_path, share):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    run["optimizer"]["param_groups"][0]["param_names"] = list(run["model"])
    share(run)
    path = saved(tmp_path / "run.pt", run)
    assert ckpt8.diff(path, path).identical
