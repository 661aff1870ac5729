"""The optimizer, learning rate and weight of every parameter, from files that the optimizers' own packages wrote."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from reference_kit import GROUP, LAYOUTS, SHAPES, adamw, codecs, masters, rounded
from torch import nn

import ckpt8
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.compressing.planning import plan_bundle, plan_policies
from ckpt8.compressing.policy import Policy
from ckpt8.core.tensors import DType

INPUTS = Path(__file__).parents[2] / "fixtures" / "inputs"


def planned(path):
    """A plan, every stream of which is in one unit; a unit with a weight has all streams of its parameter."""
    with open_source(path) as source:
        plan = plan_bundle(source, Policy.of("archive"))
    indices = [stream.index for unit in plan.units for stream in unit.streams]
    assert sorted(indices) == list(range(len(indices)))
    offsets = [unit.streams[0].storage.offset for unit in plan.units]
    assert offsets == sorted(offsets)
    for unit in plan.units:
        assert len({stream.spec.numel for stream in unit.streams}) == 1
        if unit.parameter is not None:
            assert {stream.index for stream in unit.streams} == unit.parameter.streams
    return plan


def saved(tree, folder):
    torch.save(tree, folder / "run.pt")
    return planned(folder / "run.pt")


def of_run(folder, net, *arguments, **options):
    """The plan of a network and an optimizer that has trained it."""
    return saved({"model": net.state_dict(), "optimizer": trained(net, *arguments, **options).state_dict()}, folder)


def steps(plan):
    """The step of every parameter, or why it has none, in the order of the optimizers' states."""
    return [p.step or p.stepless for p in sorted(parameters(plan), key=lambda p: p.moments["moment1"])]


def parameters(plan):
    return [unit.parameter for unit in plan.units if unit.parameter is not None]


def pairs(plan):
    """The name of the weight, or why it is unknown, by the name of the parameter."""
    names = {stream.index: stream.spec.name for stream in plan.streams}
    found = [p for p in parameters(plan) if p.step]
    return {p.name: p.step.unpaired if p.step.weight is None else names[p.step.weight] for p in found}


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 64), nn.LayerNorm(64), nn.Linear(64, 96), nn.Linear(96, 64))


def trained(net, kind=torch.optim.AdamW, groups=None, **options):
    optimizer = kind(groups or net.parameters(), **{"lr": 1e-3, **options})
    for _ in range(2):
        for p in net.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("named", [False, True])
def test_a_file_of_model_and_optimizer(named, tmp_path):
    net = make_net()
    plan = of_run(tmp_path, net, groups=list(net.named_parameters()) if named else None, betas=(0.8, 0.95))
    assert pairs(plan) == {name: f"model.{name}" for name in net.state_dict()}
    for step in steps(plan):
        assert (step.optimizer, step.lr, step.beta1, step.beta2, step.unpaired) == (0, 1e-3, 0.8, 0.95, None)


@pytest.mark.parametrize("preset", ["flash", "lossless"])
def test_steps_are_known_without_a_budget_where_anything_is_lossy(preset, tmp_path):
    net = make_net()
    torch.save({"model": net.state_dict(), "optimizer": trained(net).state_dict()}, tmp_path / "run.pt")
    with open_source(tmp_path / "run.pt") as source:
        plan = plan_bundle(source, Policy.of(preset))
    assert {p.step is None for p in parameters(plan)} == {preset == "lossless"}
    assert {len(unit.streams) for unit in plan.units if unit.parameter is not None} == {
        2 if preset == "lossless" else 3
    }


def test_the_rate_is_that_of_the_group_and_a_tenth_of_the_first_at_least(tmp_path):
    net = make_net()
    groups = [
        {"params": net[0].parameters(), "lr": 1e-3, "initial_lr": 5e-3},
        {"params": net[1].parameters(), "lr": torch.tensor(0.125)},
        {"params": net[2].parameters(), "lr": 0.0, "initial_lr": 2e-3},
        {"params": [net[3].weight], "lr": 0.0},
        {"params": [net[3].bias], "lr": 0.0},
    ]
    state = trained(net, groups=groups).state_dict()
    state["param_groups"][4]["lr"] = math.nan
    plan = saved({"model": net.state_dict(), "optimizer": state}, tmp_path)
    found = [step if isinstance(step, str) else step.lr for step in steps(plan)]
    zero, nan = "its learning rate is zero", "its learning rate is not a finite number"
    assert found == [1e-3, 1e-3, 0.125, 0.125, 2e-4, 2e-4, zero, nan]


def test_two_optimizers_of_one_file(tmp_path):
    generator, discriminator = make_net(), make_net()
    tree = {
        "netG": generator.state_dict(),
        "netD": discriminator.state_dict(),
        "optG": trained(generator, betas=(0.5, 0.9)).state_dict(),
        "optD": trained(discriminator, lr=4e-3).state_dict(),
    }
    plan = saved(tree, tmp_path)
    assert pairs(plan) == {f"{net}.{name}": f"{net}.{name}" for net in ("netG", "netD") for name in tree[net]}
    found = {(step.optimizer, step.lr, step.beta1) for step in steps(plan)}
    assert found == {(0, 1e-3, 0.5), (1, 4e-3, 0.9)}


def test_a_largest_second_moment_is_in_the_unit(tmp_path):
    net = make_net()
    plan = of_run(tmp_path, net, amsgrad=True)
    assert {len(unit.streams) for unit in plan.units if unit.parameter is not None} == {4}
    assert pairs(plan) == {name: f"model.{name}" for name in net.state_dict()}


def test_a_rule_that_is_not_known(tmp_path):
    net = make_net()
    state = trained(net).state_dict()
    for each in state["state"].values():
        each["more"] = torch.ones(3)
    plan = saved({"model": net.state_dict(), "optimizer": state}, tmp_path)
    assert set(steps(plan)) == {"the optimizer is not one whose update rule is known"}


def test_elements_in_another_order_or_place_are_not_paired(tmp_path):
    net = make_net()
    optimizer, model = trained(net).state_dict(), net.state_dict()
    buffer = torch.zeros(7 + 64 * 96)
    model["0.weight"] = buffer[7:].view(64, 96).copy_(model["0.weight"])
    model["2.weight"] = model["2.weight"].t().contiguous().t()
    found = pairs(saved({"model": model, "optimizer": optimizer}, tmp_path))
    reason = "the elements of its weight do not lie as those of its moments"
    assert {name for name, weight in found.items() if weight == reason} == {"0.weight", "2.weight"}
    assert found["3.weight"] == "model.3.weight"


def test_both_in_another_order_are_paired(tmp_path):
    torch.manual_seed(0)
    net = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    plan = of_run(tmp_path, net)
    assert pairs(plan) == {name: f"model.{name}" for name in net.state_dict()}


def test_a_file_without_weights(tmp_path):
    plan = saved({"optimizer": trained(make_net()).state_dict()}, tmp_path)
    assert set(pairs(plan).values()) == {"the file has no state dict of a model"}
    assert {step.lr for step in steps(plan)} == {1e-3}


def test_weights_in_bf16_beside_moments_in_fp32(tmp_path):
    net = make_net()
    optimizer = trained(net).state_dict()
    plan = saved({"model": net.bfloat16().state_dict(), "optimizer": optimizer}, tmp_path)
    assert pairs(plan) == {name: f"model.{name}" for name in net.state_dict()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_masters_are_the_weights(layout, tmp_path):
    plan = saved(LAYOUTS[layout](masters()), tmp_path)
    by_name = {stream.spec.name: stream for stream in plan.streams}
    weights = [by_name[weight] for weight in pairs(plan).values()]
    assert {weight.spec.dtype for weight in weights} == {DType.FLOAT32}
    assert all(weight.spec.name.startswith("optimizer.") for weight in weights)
    assert sum(weight.spec.numel for weight in weights) >= sum(math.prod(shape) for shape in SHAPES.values())
    assert {step.lr for step in steps(plan)} == {GROUP["lr"]}


def test_a_copy_whose_masters_no_key_names_leads_to_them(tmp_path):
    weights = masters()
    tree = {"model": rounded(weights), "optimizer": adamw(list(weights.values())), "weights": list(weights.values())}
    plan = saved(tree, tmp_path)
    found = pairs(plan)
    assert {found[name] for name in SHAPES if "norm" not in name} == {
        f"weights.{k}" for k, name in enumerate(SHAPES) if "norm" not in name
    }


@pytest.mark.slow
def test_a_copy_that_a_rule_keeps_leads_to_its_master(tmp_path):
    """The weight does not depend on how the copy is kept: verify does not know the rules."""
    weights = masters()
    tree = {"model": rounded(weights), "optimizer": adamw(list(weights.values())), "weights": list(weights.values())}
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset="archive", rules=("model.*=lossless",))
    found = codecs(manifest)
    assert (found["model.embed.weight"][0], found["weights.0"][0]) == ("lossless/1", "lattice/1")
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures


def partition(case):
    """A flat share of masters whose moments have nine elements more: in zeros, as DeepSpeed pads the last rank."""
    flat = torch.cat([w.flatten() for w in masters().values()])
    buffer = torch.cat([flat, torch.full((9,), 2.0 if case == "other elements" else 0.0)])
    listed = [buffer[: len(flat)]]
    inner = adamw([buffer])
    for key in ("exp_avg", "exp_avg_sq"):
        inner["state"][0][key][len(flat) :] = 0
    tree = {"base_optimizer_state": inner, "single_partition_of_fp32_groups": listed}
    match case:
        case "none":
            listed[0] = flat
        case "too few":
            listed[0] = buffer[:-1].clone()[: len(flat)]
        case "another tensor":
            tree["rest"] = buffer[len(flat) :]
        case "before it":
            listed[0] = buffer.roll(9)[9:]
    return {"optimizer_state_dict": tree}, len(flat)


@pytest.mark.slow
def test_masters_that_end_before_the_padding_of_their_moments(tmp_path):
    tree, count = partition("zeros")
    torch.save(tree, tmp_path / "run.pt")
    plan = planned(tmp_path / "run.pt")
    assert set(pairs(plan).values()) == {"optimizer_state_dict.single_partition_of_fp32_groups.0"}
    manifest = ckpt8.compress(tmp_path / "run.pt", preset="archive")
    assert [record.codec["id"] for record in manifest.storages if record.numel == count + 9] == [
        "vscaled/1",
        "rclog/1",
        "lattice/1",
    ]
    (parameter,) = manifest.parameters
    assert 0 < parameter.steps["weight"] < parameter.steps["step"]
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures
    state = ckpt8.load(tmp_path / "run.ckpt8")["optimizer_state_dict"]
    back = state["single_partition_of_fp32_groups"][0]
    assert back.shape == (count,)
    for whole in (back.new_empty(0).set_(back.untyped_storage()), state["base_optimizer_state"]["state"][0]["exp_avg"]):
        assert len(whole) == count + 9
        assert not whole[count:].any()


@pytest.mark.parametrize("case", ["none", "too few", "other elements", "another tensor", "before it"])
def test_what_follows_a_master_is_no_padding_of_it(case, tmp_path):
    tree, count = partition(case)
    plan = saved(tree, tmp_path)
    reason = f"its weight has {count} elements and its moments have {count + 9}: one of them is padded"
    assert set(pairs(plan).values()) == {reason}


def test_plans_of_several_budgets_are_those_of_each(tmp_path):
    net = make_net()
    tree = {"model": net.state_dict(), "ema": net.state_dict(), "optimizer": trained(net).state_dict()}
    torch.save(tree, tmp_path / "run.pt")
    policies = [Policy.of("flash"), Policy.of("archive"), Policy.of("compact"), Policy.of(budget=5.0)]
    with open_source(tmp_path / "run.pt") as source:
        for plan, policy in zip(plan_policies(source, policies), policies, strict=True):
            assert plan == plan_bundle(source, policy)
