"""Copies of weights that an optimizer steps, wherever a checkpoint keeps them: by name, and in the order of a model."""

from __future__ import annotations

import copy

import pytest
import torch
from dcp_kit import adam_state, save_small
from reference_kit import adamw
from torch import nn

import ckpt8
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.compressing.masters import copies_of_weights
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy


def make_net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(96, 64), nn.BatchNorm1d(64), nn.Linear(64, 96), nn.Linear(96, 96), nn.Linear(96, 96))


def averaged(net):
    other = copy.deepcopy(net)
    for p in other.parameters():
        p.data.mul_(0.9)
    return other


def trained(net, parameters=None):
    optimizer = torch.optim.AdamW(parameters or net.parameters())
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer.state_dict()


def found(path):
    with open_source(path) as source:
        plan = plan_bundle(source, Policy.of("archive"))
        copies = copies_of_weights(plan, source)
    names = {stream.index: stream.spec.name for stream in plan.streams}
    return {names[one]: names[weight] for one, weight in copies.items()}


def saved(tree, folder):
    torch.save(tree, folder / "run.pt")
    return found(folder / "run.pt")


def of_run(folder, net, key, copied, parameters=None):
    """The copies in a run of a network that has ``copied`` under ``key``."""
    return saved({"model": net.state_dict(), key: copied, "optimizer": trained(net, parameters)}, folder)


def expected(net, of, model):
    return {of.format(name): model.format(name) for name, _ in net.named_parameters()}


COPIES = [
    *((key, "", {}) for key in ("ema", "state_dict_ema", "anything", "teacher")),
    *((key, "module.", {"n_averaged": torch.tensor(3)}) for key in ("ema", "anything")),  # swa_utils.AveragedModel
    ("ema", "ema_model.", {"initted": torch.tensor(True), "step": torch.tensor(3)}),  # ema_pytorch
    ("anything", "", {"decay": torch.tensor(0.9), "num_updates": torch.tensor(3)}),
]


@pytest.mark.parametrize(("key", "prefix", "counters"), COPIES)
def test_a_copy_under_any_key_with_its_counters(key, prefix, counters, tmp_path):
    net = make_net()
    ema = counters | {f"{prefix}{name}": values for name, values in averaged(net).state_dict().items()}
    assert of_run(tmp_path, net, key, ema) == expected(net, f"{key}.{prefix}{{}}", "model.{}")


def test_a_copy_in_a_wrapper_and_without_buffers(tmp_path):
    net = make_net()
    ema = {"module." + name: p.data for name, p in averaged(net).named_parameters()}
    assert of_run(tmp_path, net, "ema", ema) == expected(net, "ema.module.{}", "model.{}")


def test_a_list_in_the_order_of_the_model(tmp_path):
    net = make_net()
    shadow = [p.data for p in averaged(net).parameters()]
    found_in = of_run(tmp_path, net, "ema", {"decay": 0.9, "shadow_params": shadow})
    assert found_in == {f"ema.shadow_params.{k}": f"model.{name}" for k, (name, _) in enumerate(net.named_parameters())}


def test_a_module_that_holds_its_average(tmp_path):
    """As a LightningModule with two attributes."""
    net = make_net()
    whole = nn.ModuleDict({"net": net, "ema_net": averaged(net)})
    tree = {"state_dict": whole.state_dict(), "optimizer_states": [trained(net)]}
    assert saved(tree, tmp_path) == expected(net, "state_dict.ema_net.{}", "state_dict.net.{}")


def test_a_copy_in_another_file(tmp_path):
    net = make_net()
    torch.save({"model": net.state_dict(), "optimizer": trained(net)}, tmp_path / "run.pt")
    torch.save(averaged(net).state_dict(), tmp_path / "ema.pt")
    assert found(tmp_path) == expected(net, "ema.pt:{}", "run.pt:model.{}")


def test_slices_of_a_distributed_checkpoint(tmp_path):
    weights = {"a.weight": torch.randn(80, 64), "b.weight": torch.randn(64, 64)}
    ema = {name: weight * 0.9 for name, weight in weights.items()}
    save_small({"model": weights, "ema": ema, "optimizer": adam_state(weights)}, tmp_path / "run")
    names = {one.partition(":")[2]: weight.partition(":")[2] for one, weight in found(tmp_path / "run").items()}
    assert names == {f"ema.{name}": f"model.{name}" for name in weights}


def test_an_average_of_masters(tmp_path):
    net = nn.Sequential(nn.Linear(96, 64), nn.Linear(64, 96))
    weights = [p.data for p in net.parameters()]
    model = {name: w.bfloat16() for name, w in net.state_dict().items()}
    tree = {"model": model, "ema": averaged(net).state_dict(), "optimizer": adamw(weights, master_param=weights)}
    copies = saved(tree, tmp_path)
    assert copies == {f"ema.{name}": f"optimizer.state.{k}.master_param" for k, name in enumerate(model)}


@pytest.mark.slow
def test_a_copy_of_many_large_layers(tmp_path):
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    assert of_run(tmp_path, net, "ema", averaged(net).state_dict()) == expected(net, "ema.{}", "model.{}")


# What is no copy


def test_two_models_that_are_both_trained(tmp_path):
    one, other = make_net(), make_net(1)
    tree = {"netA": one.state_dict(), "netB": other.state_dict(), "optA": trained(one), "optB": trained(other)}
    assert saved(tree, tmp_path) == {}


def test_an_average_that_may_be_of_either_of_two_models(tmp_path):
    one, other = make_net(), make_net(1)
    tree = {"netA": one.state_dict(), "netB": other.state_dict(), "optA": trained(one), "optB": trained(other)}
    assert saved({**tree, "ema": averaged(one).state_dict()}, tmp_path) == {}


def test_frozen_layers_that_are_alike_and_another_model(tmp_path):
    """Layers 3 and 4 have the same names and shapes; one of them is frozen."""
    net, other = make_net(), nn.Sequential(nn.Linear(96, 65), nn.Linear(65, 96))
    assert of_run(tmp_path, net, "rest", {}, [p for k in range(4) for p in net[k].parameters()]) == {}
    assert of_run(tmp_path, net, "ema", other.state_dict()) == {}


def test_a_copy_whose_elements_are_fewer_or_lie_elsewhere(tmp_path):
    net = make_net()
    ema = averaged(net).state_dict()
    buffer = torch.zeros(64 * 96 + 5)
    ema["0.weight"] = buffer[5:].view(64, 96)
    copies = of_run(tmp_path, net, "ema", ema)
    assert copies == {k: v for k, v in expected(net, "ema.{}", "model.{}").items() if k != "ema.0.weight"}


@pytest.mark.slow
def test_a_copy_has_the_step_of_its_weight_and_a_dither_of_its_own(tmp_path):
    net = make_net()
    tree = {"model": net.state_dict(), "ema": averaged(net).state_dict(), "optimizer": trained(net)}
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset="archive")
    records = {record.name: record for record in manifest.storages}
    for k in (0, 2, 3, 4):
        weight, ema = (records[f"{key}.{k}.weight"] for key in ("model", "ema"))
        assert weight.codec["id"] == ema.codec["id"] == "lattice/1"
        assert weight.codec["k"] == ema.codec["k"]
        assert weight.codec["salt"] != ema.codec["salt"]
        assert ema.reason == weight.reason
        step = 2.0 ** (ema.codec["k"] / 4)
        found = ckpt8.load(tmp_path / "run.ckpt8")["ema"][f"{k}.weight"]
        assert 0 < (found - tree["ema"][f"{k}.weight"]).abs().max() <= 0.51 * step
    assert records["ema.1.running_mean"].codec["id"] == "lossless/1"
    ruled = ckpt8.compress(tmp_path / "run.pt", tmp_path / "ruled.ckpt8", preset="archive", rules=["ema.0.*=lossless"])
    codecs = {record.name: record.codec["id"] for record in ruled.storages}
    assert (codecs["ema.0.weight"], codecs["ema.2.weight"]) == ("lossless/1", "lattice/1")
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures


def test_a_copy_of_weights_without_a_step_keeps_the_codec_of_the_preset(tmp_path):
    net = make_net()
    optimizer = trained(net)
    optimizer["param_groups"][0]["lr"] = 0.0
    tree = {"model": net.state_dict(), "ema": averaged(net).state_dict(), "optimizer": optimizer}
    torch.save(tree, tmp_path / "a.pt")
    manifest = ckpt8.compress(tmp_path / "a.pt", preset="archive")
    (record,) = [record for record in manifest.storages if record.name == "ema.0.weight"]
    assert record.codec["id"] == "split24/1"
    assert record.reason == "no budget: no optimizer in the file is known to update these weights"
