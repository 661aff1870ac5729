"""Weights under keys that nobody listed: what an optimizer, a copy or names show, and what nothing shows."""

from __future__ import annotations

import json

import pytest
import torch
import torch.distributed.checkpoint as dcp
from evidence_kit import trained, tree_of
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import ckpt8
from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.core.tensors import Role


def network(seed=0, width=96):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(80, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 80))


def roles(tree, path):
    """The names of the tensors that are weights, and the others outside optimizers."""
    torch.save(tree, path)
    with open_checkpoint(path) as checkpoint:
        found = classify(checkpoint.tree).tensors
    weights = {each.name for each in found if each.role is Role.WEIGHT}
    return weights, {each.name for each in found if each.role is Role.OTHER and ".state." not in f".{each.name}"}


def two_models(*keys, together=False):
    one, other = network(0), network(1, width=64)
    optimizers = {"opt": trained(one, other)} if together else {"optG": trained(one), "optD": trained(other)}
    return {keys[0]: one.state_dict(), keys[1]: other.state_dict(), **optimizers}


def frozen():
    model = network()
    model[0].requires_grad_(False)
    return {
        "unet": model.state_dict(),
        "opt": trained(model, params=[p for p in model.parameters() if p.requires_grad]),
    }


def average():
    model = network()
    optimizer = trained(model)
    mean = torch.optim.swa_utils.AveragedModel(model)
    return {"model": model.state_dict(), "swa": mean.state_dict(), "optimizer": optimizer}


def shadow():
    model = network()
    averages = [p.data.clone() for p in model.parameters()]
    return {"net_a": model.state_dict(), "opt": trained(model), "averages": averages}


def beside_other_entries():
    model = network()
    return {**model.state_dict(), "epoch": 3, "seen": torch.randn(5000), "opt": trained(model)}


def by_name():
    model = network()
    wrapped = {f"_orig_mod.{name}": tensor for name, tensor in model.state_dict().items()}
    return {
        "anything": wrapped,
        "more": {"x": torch.randn(96, 80)},
        "opt": trained(model, params=list(model.named_parameters())),
    }


LARGE = ("0.weight", "3.weight")
CASES = {
    "an unknown key": (
        lambda: {"unet": (model := network()).state_dict(), "opt": trained(model)},
        {f"unet.{name}" for name in LARGE},
    ),
    "a tuple": (lambda: ((model := network()).state_dict(), trained(model)), {f"0.{name}" for name in LARGE}),
    "a list": (lambda: [trained(model := network()), 3, model.state_dict()], {f"2.{name}" for name in LARGE}),
    "two models": (lambda: two_models("netG", "netD"), {f"net{each}.{name}" for each in "GD" for name in LARGE}),
    "one optimizer of two": (
        lambda: two_models("stem", "head", together=True),
        {f"{each}.{name}" for each in ("stem", "head") for name in LARGE},
    ),
    "a tree": (
        lambda: {"variables": tree_of(model := network()), "opt": trained(model)},
        {"variables.layer0.weight", "variables.layer3.weight"},
    ),
    "frozen weights": (frozen, {f"unet.{name}" for name in LARGE}),
    "an average": (average, {f"{each}{name}" for each in ("model.", "swa.module.") for name in LARGE}),
    "an average as a list": (shadow, {f"net_a.{name}" for name in LARGE} | {"averages.0", "averages.4"}),
    "beside other entries": (beside_other_entries, set(LARGE)),
    "names": (by_name, {f"anything._orig_mod.{name}" for name in LARGE}),
    "momentum": (
        lambda: {"unet": (model := network()).state_dict(), "opt": trained(model, kind=torch.optim.SGD, momentum=0.9)},
        {f"unet.{name}" for name in LARGE},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_found(case, tmp_path):
    make, expected = CASES[case]
    weights, others = roles(make(), tmp_path / "run.pt")
    assert expected <= weights
    assert not {"seen", "more.x"} & weights
    assert not expected & others


@pytest.mark.filterwarnings("ignore")
def test_in_a_distributed_checkpoint(tmp_path):
    model = network()
    optimizer = torch.optim.Adamax(model.parameters(), lr=1e-3)
    model(torch.randn(8, 80)).square().mean().backward()
    optimizer.step()
    weights, state = get_state_dict(model, optimizer)
    tree = {"netG": weights, "opt": state, "features": {"0": {"weight": torch.randn(96, 81)}}}
    dcp.save(tree, storage_writer=dcp.FileSystemWriter(tmp_path / "run"), no_dist=True)
    ckpt8.compress(tmp_path / "run")
    with ckpt8.open(tmp_path / "run.ckpt8") as file:
        found = {record.name.rpartition(":")[2]: record.role for record in file.manifest.storages}
    assert found["netG.0.weight"] is found["netG.3.weight"] is Role.WEIGHT
    assert found["features.0.weight"] is Role.OTHER
    assert found["opt.state.0.weight.exp_inf"] is Role.MOMENT2


@pytest.mark.parametrize(("before", "found"), [(3, True), (70, False)])
def test_the_time_is_bounded(before, found, tmp_path):
    """Every optimizer is compared with every container: of very many optimizers only the first count."""
    model, other = network(), trained(network(seed=1, width=64))
    tree = {"others": [dict(other) for _ in range(before)], "unet": model.state_dict(), "opt": trained(model)}
    assert ("unet.0.weight" in roles(tree, tmp_path / "run.pt")[0]) is found


def test_what_nothing_shows_stays_as_it_is(tmp_path):
    model = network()
    tree = {
        "unet": model.state_dict(),
        "history": [torch.randn(100, 100) for _ in range(4)],
        "features": {"train": torch.randn(96, 96)},
    }
    assert roles(tree, tmp_path / "alone.pt")[0] == set()
    other = {**tree, "opt": trained(network(width=48))}
    assert roles(other, tmp_path / "other.pt")[0] == set()
    torch.save(other, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    back = torch.load(ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back.pt"), weights_only=True)
    assert torch.equal(back["features"]["train"], tree["features"]["train"])
    assert all(torch.equal(back["unet"][name], tensor) for name, tensor in tree["unet"].items())


@pytest.mark.parametrize("key", ["unet", "actor_state_dict"])
def test_convert_and_resume_take_the_same(key, tmp_path):
    model = network()
    torch.save({key: model.state_dict(), "opt": trained(model), "epoch": 3}, tmp_path / "run.pt")
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "run.safetensors", to="safetensors")
    ckpt8.compress(tmp_path / "run.pt", preset="lossless")
    other = network(seed=1)
    fresh = torch.optim.AdamW(other.parameters(), lr=1e-3)
    rest = ckpt8.resume(tmp_path / "run.ckpt8", other, fresh)
    assert rest == {"epoch": 3}
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), model.state_dict().values(), strict=True))


def test_what_stays_lossless_is_said_with_the_rule_that_compresses_it(tmp_path, run_command):
    """The rule works, and then nothing is left to say."""
    tree = {"unet": network().state_dict(), "opt": trained(network(seed=1, width=64), kind=torch.optim.Rprop)}
    path = tmp_path / "run.pt"
    torch.save(tree, path)
    expected = ["unet.*=split24", "opt.state.*.prev=companded8", "opt.state.*.step_size=companded8"]
    for command in (("compress", path), ("inspect", path), ("inspect", tmp_path / "run.ckpt8")):
        code, out, _ = run_command(*command)
        assert code == 0
        assert all(f"--rule '{rule}'" in out for rule in expected), out
    _, out, _ = run_command("inspect", path, "--json")
    found = json.loads(out)["unrecognised"]
    assert [row["rule"] for row in found] == expected
    assert found[0] == {"rule": expected[0], "tensors": 2, "bytes": 2 * 4 * 80 * 96}
    before = stored_bytes(tmp_path / "run.ckpt8")
    rules = [argument for rule in expected for argument in ("--rule", rule)]
    code, out, _ = run_command("compress", path, *rules, "--force")
    assert code == 0
    assert "--rule" not in out
    assert stored_bytes(tmp_path / "run.ckpt8") < 0.65 * before


def test_one_rule_compresses_the_tensors_of_a_list(tmp_path, run_command):
    torch.save([torch.randn(80, 96) for _ in range(12)], tmp_path / "run.pt")
    out = run_command.shown("compress", tmp_path / "run.pt")
    assert "12 tensors of unknown role" in out
    assert out.count("--rule") == 1
    assert "--rule" not in run_command.shown("compress", tmp_path / "run.pt", "--rule", "[0-9]*=split24", "--force")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_inspect_says_why_wide_weights_stay_lossless(tmp_path, run_command, dtype):
    torch.save({"model": {"0.weight": torch.randn(80, 96, dtype=dtype)}}, tmp_path / "run.pt")
    _, out, _ = run_command("inspect", tmp_path / "run.pt", columns=200)
    is_lossless = not ckpt8.compress(tmp_path / "run.pt").is_lossy
    said = "61.44 kB of weights and moments in float64, kept lossless: presets change float32 and bfloat16 alone"
    assert (said in out, "kept lossless" in out) == (is_lossless, is_lossless) == (dtype is torch.float64,) * 2


def stored_bytes(path):
    """What the storages take, without the entries around them."""
    with ckpt8.open(path) as file:
        return sum(record.stored_bytes for record in file.manifest.storages)


def test_a_small_parameter_shows_nothing(tmp_path):
    """A temperature has the shape of many things."""
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.ones(64), "exp_avg_sq": torch.ones(64)}}
    optimizer = {"state": state, "param_groups": [{"params": [0], "betas": (0.9, 0.999), "eps": 1e-8}]}
    tree = {"logs": [torch.randn(64) for _ in range(200)], "opt": optimizer}
    assert roles(tree, tmp_path / "run.pt")[0] == set()


@pytest.mark.filterwarnings("ignore")
def test_a_list_becomes_a_distributed_checkpoint(tmp_path):
    model = network()
    torch.save([model.state_dict(), trained(model), {"epoch": 3}], tmp_path / "run.pt")
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "run", to="dcp")
    weights = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    dcp.load({"model": weights}, checkpoint_id=tmp_path / "run", no_dist=True)
    assert torch.equal(weights["0.weight"], model[0].weight)


# Flat files of optimizers, as people write them with safetensors: roles by the components of names and by shapes

NAMES = {"model.layer.0.weight": (96, 80), "model.layer.0.bias": (96,), "model.head.weight": (80, 96)}
WAYS = {
    "key last": lambda name, key: f"{name}.{key}",
    "key first": lambda name, key: f"{key}.{name}",
    "key first, numbered": lambda name, key: f"{key}.{list(NAMES).index(name)}",
    "in the middle": lambda name, key: f"optimizer.{key}.{name}",
    "numbered": lambda name, key: f"optimizer.state.{list(NAMES).index(name)}.{key}",
    "slashes": lambda name, key: f"state/{list(NAMES).index(name)}/{key}",
    "slashes and a name": lambda name, key: f"optimizer/{name}/{key}",
    "without a prefix": lambda name, key: f"{key}/{name.removeprefix('model.')}",
}


def flat_roles(tensors, path):
    save_file(tensors, path)
    ckpt8.compress(path, force=True)
    with ckpt8.open(path.with_suffix(".ckpt8")) as file:
        return {each.name: each.role for each in file.manifest.storages}, file.manifest.parameters


def states(way, keys=("exp_avg", "exp_avg_sq")):
    return {way(name, key): torch.rand(shape) for name, shape in NAMES.items() for key in keys}


@pytest.mark.parametrize("with_weights", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_moments_are_found_in_every_order_of_the_name(way, with_weights, tmp_path):
    tensors = states(WAYS[way]) | {WAYS[way](name, "step"): torch.tensor(3.0) for name in NAMES}
    weights = {name: torch.randn(shape) for name, shape in NAMES.items()} if with_weights else {}
    found, parameters = flat_roles({**tensors, **weights}, tmp_path / "optimizer.safetensors")
    for name in NAMES:
        assert found[WAYS[way](name, "exp_avg")] is Role.MOMENT1
        assert found[WAYS[way](name, "exp_avg_sq")] is Role.MOMENT2
        assert found[WAYS[way](name, "step")] is Role.OTHER
        assert found.get(name, Role.WEIGHT) is Role.WEIGHT
    assert len(parameters) == len(NAMES)
    assert all(set(each.moments) == {"moment1", "moment2"} for each in parameters)


@pytest.mark.parametrize("way", ["key first", "in the middle", "without a prefix"])
def test_one_moment_counts_beside_its_weight(way, tmp_path):
    tensors = states(WAYS[way], ["momentum_buffer"])
    weights = {name: torch.randn(shape) for name, shape in NAMES.items()}
    found, _ = flat_roles({**tensors, **weights}, tmp_path / "run.safetensors")
    assert all(found[name] is Role.MOMENT1 for name in tensors)
    assert all(found[name] is Role.WEIGHT for name in weights)


def test_a_name_alone_shows_nothing(tmp_path):
    """A component of a model may have any name; a tensor beside the state that nothing fits is no weight."""
    model = {"exp_avg.encoder.weight": torch.randn(96, 80), "step.weight": torch.randn(80, 96)}
    found, parameters = flat_roles(model, tmp_path / "model.safetensors")
    assert set(found.values()) - {Role.OTHER} == {Role.WEIGHT}
    assert not parameters
    tensors = {**states(WAYS["key last"]), "seen": torch.randn(300, 300), "head.weight.more": torch.randn(80, 96)}
    found, _ = flat_roles(tensors, tmp_path / "run.safetensors")
    assert found["seen"] is found["head.weight.more"] is Role.OTHER


def test_extra_states_beside_the_state(tmp_path):
    """They are no tensors, whatever their names; that had been an AttributeError."""
    tensors = {**states(WAYS["key last"]), "b._extra_state": None, "a.exp_avg._extra_state": None}
    torch.save(tensors, tmp_path / "run.pt")
    moments = {
        f"{name}.{key}": role
        for name in NAMES
        for key, role in (("exp_avg", Role.MOMENT1), ("exp_avg_sq", Role.MOMENT2))
    }
    assert moments.items() <= {each.name: each.role for each in ckpt8.compress(tmp_path / "run.pt").storages}.items()
