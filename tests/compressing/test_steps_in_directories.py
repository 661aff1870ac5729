"""Weights and states in several files: of one folder, of ranks, and in the slices of distributed checkpoints."""

from __future__ import annotations

import pytest
import torch
from dcp_kit import adam_state, change_metadata, save_in_pieces, save_small
from test_optimizer_steps import INPUTS, make_net, pairs, planned, steps, trained
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

NAMES = ("weight", "bias")
MOMENTS = ("exp_avg", "exp_avg_sq")


def test_the_weights_of_a_trainer_directory():
    for folder in ("trainer-adamw", "trainer-stable-adamw"):
        found = pairs(planned(INPUTS / folder))
        assert len(found) == 11
        assert found == {name: name.replace("optimizer.pt:", "model.safetensors:") for name in found}


def test_a_lightning_checkpoint():
    plan = planned(INPUTS / "lightning.ckpt")
    names = ["state_dict.network.0.weight", *(f"state_dict.network.{k}.{n}" for k in (2, 4) for n in NAMES)]
    assert pairs(plan) == {name: name for name in names}
    assert [dict(step.stated) for step in steps(plan)] == [{"momentum": "estimate"}, {}, {}, {}, {}]


def test_files_of_ranks_share_their_optimizer(tmp_path):
    """Flat parameters of FSDP as each rank saves its own: an imitation."""
    for rank in range(2):
        flat = nn.ParameterDict({"_flat_param": nn.Parameter(torch.randn(6000))})
        tree = {"model": flat.state_dict(), "optimizer": trained(flat).state_dict()}
        torch.save(tree, tmp_path / f"fsdp-rank{rank}.pt")
    plan = planned(tmp_path)
    assert {step.optimizer for step in steps(plan)} == {0}
    assert set(pairs(plan).values()) == {f"fsdp-rank{rank}.pt:model._flat_param" for rank in range(2)}


def test_files_of_two_optimizers_do_not(tmp_path):
    for name in ("optimizer.bin", "optimizer_1.bin"):
        torch.save(trained(make_net()).state_dict(), tmp_path / name)
    assert {step.optimizer for step in steps(planned(tmp_path))} == {0, 1}


@pytest.mark.parametrize("flat", [False, True])
def test_slices_of_a_distributed_checkpoint(flat, tmp_path):
    weights = {"a.weight": torch.randn(80, 64), "b.weight": torch.randn(64, 64)}
    state = adam_state(weights)
    sliced = {f"model.{name}" if not flat else name: weight for name, weight in weights.items()}
    sliced |= {f"optimizer.state.{name}.{key}": state["state"][name][key] for name in weights for key in MOMENTS}
    others = {f"optimizer.state.{name}.step": state["state"][name]["step"] for name in weights}
    others |= {f"optimizer.param_groups.0.{key}": value for key, value in state["param_groups"][0].items()}
    halves = {80: [((0, 0), (40, 64)), ((40, 0), (40, 64))], 64: [((0, 0), (64, 64))]}
    save_in_pieces({name: (each, halves[len(each)]) for name, each in sliced.items()}, tmp_path / "run", others)
    plan = planned(tmp_path / "run")
    found = {name.partition(":")[2]: weight.partition(":")[2] for name, weight in pairs(plan).items()}
    before = "" if flat else "model."
    assert found == {each: f"{before}{each}" for each in ("a.weight[0:40,:]", "a.weight[40:80,:]", "b.weight")}
    assert {(step.optimizer, step.lr, step.beta2) for step in steps(plan)} == {(0, 1e-3, 0.99)}


def test_a_distributed_checkpoint_of_the_model_beside_that_of_the_optimizer(tmp_path):
    """As accelerate writes them."""
    weights = {"a.weight": torch.randn(80, 64)}
    save_small({"model": weights}, tmp_path / "pytorch_model_fsdp_0")
    save_small({"optimizer": adam_state(weights)}, tmp_path / "optimizer_0")
    (weight,) = pairs(planned(tmp_path)).values()
    assert weight.startswith("pytorch_model_fsdp_0/")
    assert weight.endswith(":model.a.weight")


def test_slices_that_lie_in_other_places(tmp_path):
    weight = torch.randn(80, 64)
    state = adam_state({"a.weight": weight})
    whole, halves = [((0, 0), (80, 64))], [((0, 0), (40, 64)), ((40, 0), (40, 64))]
    sliced = {f"optimizer.state.a.weight.{key}": (state["state"]["a.weight"][key], halves) for key in MOMENTS}
    others = {f"optimizer.param_groups.0.{key}": value for key, value in state["param_groups"][0].items()}
    others["optimizer.state.a.weight.step"] = state["state"]["a.weight"]["step"]
    save_in_pieces({"model.a.weight": (weight, whole), **sliced}, tmp_path / "run", others)
    assert set(pairs(planned(tmp_path / "run")).values()) == {"its weight is cut into other slices than its moments"}


@pytest.mark.parametrize("flat", [True, False])
def test_a_learning_rate_that_is_a_tensor_in_a_distributed_checkpoint(flat, tmp_path):
    net = make_net()
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.125), foreach=False)
    optimizer.step()
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    model, state = get_state_dict(net, optimizer, options=options)
    save_small({"model": model, "optimizer": state}, tmp_path / "run")
    plan = planned(tmp_path / "run")
    assert {step.lr for step in steps(plan)} == {0.125}
    assert all(step.weight is not None for step in steps(plan))


@pytest.mark.parametrize("known", [True, False])
def test_an_optimizer_that_numbers_its_parameters(known, tmp_path):
    """The state dict has an order, where the metadata keep it; the order of tensors and slices says nothing."""
    net = make_net()
    save_small({"optimizer": trained(net).state_dict(), "model": net.state_dict()}, tmp_path / "run")

    def scramble(metadata):
        tensors = metadata.state_dict_metadata
        for name in sorted(tensors, reverse=True):
            tensors[name] = tensors.pop(name)
        metadata.planner_data = metadata.planner_data if known else None

    change_metadata(tmp_path / "run", scramble)
    plan = planned(tmp_path / "run")
    found = {int(name.rpartition(".")[2]): weight.rpartition(":")[2] for name, weight in pairs(plan).items()}
    names = {k: f"model.{name}" for k, name in enumerate(net.state_dict())}
    assert found == (names if known else dict.fromkeys(names, "no weight has its name"))


def test_a_master_in_a_distributed_checkpoint(tmp_path):
    weights = {"a.weight": torch.randn(80, 64)}
    state = adam_state(weights)
    state["state"]["a.weight"]["fp32_param"] = weights["a.weight"]
    save_small({"model": {"a.weight": weights["a.weight"].bfloat16()}, "optimizer": state}, tmp_path / "run")
    (weight,) = pairs(planned(tmp_path / "run")).values()
    assert weight.endswith(":optimizer.state.a.weight.fp32_param")
