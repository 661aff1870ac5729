"""Every checkpoint of Adam's kind that the kits make: all its large weights are paired, whoever trained it.

The weights that the file says belong together do: each is the one that its optimizer would step.
"""

from __future__ import annotations

import converting_kit
import evidence_kit
import pytest
import resume_kit
import torch
from test_optimizer_steps import INPUTS, parameters, planned, saved

from ckpt8.core.tensors import Role

FILES = ["accelerate", "crc_off.pt", "gpt_adamw.pt", "gpt_bf16.pt", "gpt_came.pt", "gpt_stable_adamw.pt"]
FILES += ["trainer-adamw", "trainer-stable-adamw"]


def check(plan, moment_of=None):
    """All large weights are in a unit with moments; ``moment_of`` gives the name of the first moment of a weight."""
    names = {stream.index: stream.spec.name for stream in plan.streams}
    paired = {p.step.weight: p for p in parameters(plan) if p.step is not None}
    large = [s for s in plan.streams if s.spec.role is Role.WEIGHT and s.spec.numel >= 4096 and s.codec.copied is None]
    assert large
    for stream in large:
        assert stream.index in paired, stream.spec.name
    if moment_of is not None:
        assert all(names[p.moments["moment1"]] == moment_of(names[weight]) for weight, p in paired.items())


def state_of(model, optimizer, key="model"):
    """Where a saved run keeps the first moment of a weight, from the live objects."""
    listed = [p for group in optimizer.param_groups for p in group["params"]]
    number = {id(p): k for k, p in enumerate(listed)}
    places = {f"{key}.{name}": number.get(id(p)) for name, p in model.named_parameters(remove_duplicate=False)}
    return lambda name: f"optimizer.state.{places[name]}.exp_avg"


def test_named_groups(tmp_path):
    model = resume_kit.Net()
    optimizer = torch.optim.AdamW(resume_kit.groups(model, named=True))
    resume_kit.train(model, optimizer, 0, 2)
    plan = saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path)
    check(plan, state_of(model, optimizer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tied_weights_and_buffers(dtype, tmp_path):
    model, optimizer = converting_kit.trained(dtype=dtype)
    check(saved(converting_kit.checkpoint(model, optimizer), tmp_path), state_of(model, optimizer))


def test_a_directory_of_weights_in_another_order(tmp_path):
    check(planned(converting_kit.trainer_directory(tmp_path / "run", *converting_kit.trained())))


@pytest.mark.parametrize("form", ["tree", "list"])
def test_weights_by_evidence(form, tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(80, 80), torch.nn.Linear(80, 90))
    state = evidence_kit.trained(net)
    weights = evidence_kit.tree_of(net) if form == "tree" else [p.data for p in net.parameters()]
    check(saved({"anything": weights, "optimizer": state}, tmp_path))


@pytest.mark.parametrize("name", FILES)
def test_files_of_frameworks(name):
    check(planned(INPUTS / name))
