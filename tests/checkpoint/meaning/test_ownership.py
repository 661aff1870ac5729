"""Which model an optimizer trains: averages, several models and optimizers, and weights in other files."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from evidence_kit import trained, tree_of
from safetensors.torch import save_file
from torch import nn

import ckpt8
from ckpt8.checkpoint.meaning.pairing import places_in_order, saved_parameters
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.core.tensors import Role


def network(seed=0, width=96):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(80, width), nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, 80))


def average(module):
    return {name: tensor * 0.5 for name, tensor in module.state_dict().items()}


NAMES = [name for name, _ in network().named_parameters()]


def named(*keys):
    return [f"{key}.{name}" for key in keys for name in NAMES]


def names_of(path):
    return [each.name for each in ckpt8.compress(path, force=True).parameters]


def weights_of(tree, path):
    """For every parameter that has a state, the path of its weight in the tree; else why it has none."""
    torch.save(tree, path)
    with open_checkpoint(path) as checkpoint:
        places = {}
        for key, node in checkpoint.tree.items():
            if isinstance(node, dict):
                places |= {id(ref): f"{key}.{name}" for name, ref in node.items()}
        found = saved_parameters(checkpoint.tree)
        return [each.unpaired or places[id(each.weight)] for each in found]


def steps(path):
    """The parameters whose steps have a weight, and all."""
    found = ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=1).resume
    return found["with_weights"], found["parameters"]


AVERAGES = {
    "model_ema": lambda model: {"model_ema": average(model)},
    "ema_state_dict": lambda model: {"ema_state_dict": average(model)},
    "swa": lambda model: {"swa": average(model)},
    "state_dict_ema": lambda model: {"state_dict_ema": average(model)},
    "teacher": lambda model: {"teacher": average(model)},
    "wrapped": lambda model: {"ema_model": torch.optim.swa_utils.AveragedModel(model).state_dict()},
    "a list": lambda model: {"averages": [p.data * 0.5 for p in model.parameters()]},
    "several": lambda model: {"ema": average(model), "swa_model": average(model), "best": {"model": average(model)}},
    "lightning": lambda model: {"current_model_state": model.state_dict()},
}


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("case", AVERAGES)
@pytest.mark.parametrize("first", [True, False])
def test_an_average_takes_no_names(case, first, tmp_path):
    model = network()
    more = AVERAGES[case](model)
    own = {"state_dict" if case == "lightning" else "model": model.state_dict(), "optimizer": trained(model)}
    tree = {**more, **own} if first else {**own, **more}
    owner = "current_model_state" if case == "lightning" else "model"
    assert weights_of(tree, tmp_path / "run.pt") == named(owner)
    assert names_of(tmp_path / "run.pt") == NAMES
    with ckpt8.open(tmp_path / "run.ckpt8") as file:
        large = [each for each in file.manifest.storages if each.nbytes > 4 * 4096]
    assert all(each.role is not Role.OTHER for each in large)


def test_an_average_in_a_file_of_its_own_takes_no_names(tmp_path):
    model, folder = network(), tmp_path / "run"
    folder.mkdir()
    torch.save(average(model), folder / "ema.pt")
    torch.save(trained(model), folder / "optimizer.pt")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.save({"average": average(model), "decay": 0.5}, folder / "averages.pt")
    assert names_of(folder) == [f"optimizer.pt:{name}" for name in NAMES]
    assert steps(folder) == (len(NAMES), len(NAMES))


STEMS = [
    ("netG", "netD", "optG", "optD"),
    ("netG", "netD", "optD", "optG"),
    ("generator", "discriminator", "optimizer_g", "optimizer_d"),
    ("actor_state_dict", "critic_state_dict", "critic_optimizer", "actor_optimizer"),
    ("G", "D", "D_optim", "G_optim"),
    ("model1", "model2", "optim2", "optim1"),
    ("last_model", "best_model", "best_optimizer", "last_optimizer"),
    ("student", "teacher", "optimizer_teacher", "optimizer_student"),
]


@pytest.mark.slow
@pytest.mark.parametrize("keys", STEMS)
@pytest.mark.parametrize("same", [True, False])
def test_two_models_of_two_optimizers(keys, same, tmp_path):
    straight = STEMS.index(keys) in (0, 2)
    modules = [network(0), network(1, width=96 if same else 64)]
    optimizers = map(trained, modules if straight else reversed(modules))
    tree = dict(zip(keys, (*(module.state_dict() for module in modules), *optimizers), strict=True))
    expected = named(*(keys[:2] if straight else keys[1::-1]))
    assert weights_of(tree, tmp_path / "run.pt") == expected
    assert names_of(tmp_path / "run.pt") == expected
    assert steps(tmp_path / "run.pt") == (2 * len(NAMES), 2 * len(NAMES))


def in_one(first, second, prefix=""):
    """Two models in one state dict, and the states of their optimizers."""
    module = nn.ModuleDict({first: network(0), second: network(1)})
    weights = {f"{prefix}{name}": values for name, values in module.state_dict().items()}
    return {"state_dict": weights, "optimizer_states": [trained(module[key]) for key in module]}


ONE, OTHER = network(0), network(1)
LISTS = {
    "order": (
        lambda: {"models": [ONE.state_dict(), OTHER.state_dict()], "optimizers": [trained(ONE), trained(OTHER)]},
        ["models.0", "models.1"],
    ),
    "pairs": (lambda: [(module.state_dict(), trained(module)) for module in (ONE, OTHER)], ["0.0", "1.0"]),
    "parts": (
        lambda: in_one("generator", "discriminator", "model."),
        ["state_dict.model.generator", "state_dict.model.discriminator"],
    ),
}


@pytest.mark.parametrize("case", LISTS)
def test_names_begin_with_the_keys_in_the_file(case, tmp_path):
    make, keys = LISTS[case]
    torch.save(make(), tmp_path / "run.pt")
    assert names_of(tmp_path / "run.pt") == named(*keys)


def test_what_cannot_be_told_is_said(tmp_path):
    one, other = network(0), network(1)
    tree = {"a": one.state_dict(), "b": other.state_dict(), "optimizer": trained(one)}
    assert weights_of(tree, tmp_path / "run.pt") == ["several models fit it: a, b"] * len(NAMES)
    assert names_of(tmp_path / "run.pt") == NAMES  # both agree on these
    with ckpt8.open(tmp_path / "run.ckpt8") as file:
        roles = {each.name: each.role for each in file.manifest.storages}
    assert roles["a.2.weight"] is roles["b.2.weight"] is Role.WEIGHT
    tree["model"], tree["c"] = network(2, width=48).state_dict(), tree.pop("a")
    assert len(set(weights_of(tree, tmp_path / "run.pt"))) == 1


def test_a_key_beside_one_that_names_a_model(tmp_path):
    """Both are models, for compress, resume and convert."""
    one, other = network(0), network(1, width=64)
    tree = {"model": one.state_dict(), "netG": other.state_dict(), "opt1": trained(one), "opt2": trained(other)}
    assert weights_of(tree, tmp_path / "run.pt") == named("model", "netG")
    ckpt8.compress(tmp_path / "run.pt", preset="lossless")
    fresh = network(7, width=64)
    ckpt8.resume(tmp_path / "run.ckpt8", fresh)
    assert torch.equal(fresh[2].weight, other[2].weight)
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "netG.safetensors", to="safetensors", key="netG")


@pytest.mark.parametrize("average_key", ["ema", "ema_model", "model_ema", "net_ema"])
@pytest.mark.parametrize("first", [True, False])
def test_an_average_in_the_state_dict_of_its_model_takes_no_names(average_key, first, tmp_path):
    model = network()
    own = {f"net.{name}": values for name, values in model.state_dict().items()}
    more = {f"{average_key}.{name}": values for name, values in average(model).items()}
    tree = {"state_dict": {**more, **own} if first else {**own, **more}, "optimizer_states": [trained(model)]}
    assert weights_of(tree, tmp_path / "run.pt") == named("state_dict.net")
    assert names_of(tmp_path / "run.pt") == named("net")


@pytest.mark.parametrize(
    "names", [("a.pt", "b.pt"), ("b.pt", "a.pt"), ("w/net.pt", "o/opt.pt"), ("w/net.pt", "opt.pt")]
)
@pytest.mark.parametrize("form", ["bare", "keyed", "flat", "live"])
def test_an_optimizer_alone_in_its_file(names, form, tmp_path):
    """Whatever the order of the files, and in other folders too."""
    model, folder = network(), tmp_path / "run"
    weights, state = (folder / name for name in names)
    for each in (weights, state):
        each.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"params_of_it": model.state_dict(), "iteration": 3}, weights)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 80)).square().mean().backward()
    optimizer.step()
    saved = optimizer.state_dict()
    if form == "flat":
        tensors = {f"{k}.{key}": value for k, each in saved["state"].items() for key, value in each.items()}
        save_file(tensors, state)
    else:
        torch.save({"bare": saved, "keyed": {"opt": saved}, "live": optimizer}[form], state)
    names = names_of(folder)
    with ckpt8.open(folder.with_suffix(".ckpt8")) as file:
        roles = {each.name.rpartition(":")[2]: each.role for each in file.manifest.storages}
    assert roles["params_of_it.2.weight"] is Role.WEIGHT
    if form != "flat":
        assert [name.rpartition(":")[2] for name in names] == NAMES


@pytest.mark.parametrize("keys", [("enc", "dec"), ("encoder", "decoder")])
@pytest.mark.parametrize("swapped", [True, False])
def test_one_optimizer_of_several_models(keys, swapped, tmp_path):
    """The order of the parameters tells the order of the models, whatever that is in the file."""
    modules = dict(zip(keys, (network(0), network(1, width=64)), strict=True))
    optimizer = trained(*modules.values())
    saved = {key: module.state_dict() for key, module in modules.items()}
    tree = {"other": {"x": torch.randn(9, 9)}, **(dict(reversed(saved.items())) if swapped else saved)}
    assert weights_of({**tree, "opt": optimizer}, tmp_path / "run.pt") == named(*keys)
    assert names_of(tmp_path / "run.pt") == named(*keys)


def test_models_that_could_meet_in_two_ways_are_not_told_apart(tmp_path):
    """One is the beginning of the other: the shapes do not say where it ends."""
    torch.manual_seed(0)
    short = nn.Sequential(nn.Linear(80, 80, bias=False))
    long = nn.Sequential(nn.Linear(80, 80, bias=False), nn.Linear(80, 80, bias=False))
    tree = {"model": short.state_dict(), "net": long.state_dict(), "opt": trained(short, long)}
    assert all("cannot be told apart" in each for each in weights_of(tree, tmp_path / "run.pt"))


class Stack(nn.Module):
    """An embedding, three blocks alike, and a head of the shape of the embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(80, 64), nn.Embedding(48, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)) for _ in range(3))
        self.head = nn.Linear(64, 80, bias=False)


def inside(*parts):
    """The parameters whose names begin so."""
    return lambda net: [p for name, p in net.named_parameters() if name.startswith(parts)]


def of_rank(dims, *parts):
    return lambda net: [p for p in inside(*parts)(net) if p.ndim == dims]


ALL = inside("")
REST, BODY = inside("place", "blocks", "head"), inside("embed", "place", "blocks")
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
# The groups of each optimizer, what has no gradient, and the parameters that nothing tells apart.
LISTED = {
    "a block is frozen": ([[ALL]], inside("blocks.1"), []),
    "all but the head are frozen": ([[ALL]], BODY, []),
    "decay and none": ([[of_rank(2, ""), of_rank(1, "")]], inside("blocks.1"), []),
    "the head is in Muon": ([[of_rank(2, "blocks", "head")], [lambda net: [
        p for p in net.parameters() if p.ndim == 1 or p is net.embed.weight or p is net.place.weight
    ]]], None, []),
    "a buffer": ([[ALL]], inside("blocks.0"), []),
    "shared by two": ([[inside("place", "blocks")], [ALL]], None, []),
    # What is not listed may be any of those alike.
    "a block is left out": ([[inside("embed", "place", "blocks.0", "blocks.2", "head")]], None, ["blocks"]),
    "the embedding is left out": ([[REST]], None, ["head"]),
    "a head before its body": ([[lambda net: [*inside("head")(net), *inside("place", "blocks")(net)]]], None, ["head"]),
    # Groups and optimizers may come in any order.
    "a group for each part": ([[inside("head"), BODY]], BODY, ["head"]),
    "a group for each block": ([[inside("embed", "place", "head"), *map(inside, BLOCKS)]], None, ["blocks"]),
    "another order": ([[lambda net: [*of_rank(1, "")(net), net.embed.weight, net.place.weight]],
                       [of_rank(2, "blocks", "head")]], None, ["embed", "head"]),
}  # fmt: skip


@pytest.mark.parametrize("case", LISTED)
def test_order_and_shapes_decide_where_every_weight_is_listed(case, tmp_path):
    """What is paired is paired with the weight that the optimizer stepped."""
    optimizers, unused, unknown = LISTED[case]
    net = Stack()
    if case == "a buffer":
        net.blocks[1].register_buffer("mask", torch.ones(96, 64, dtype=torch.bool))
    names = {id(p): f"model.{name}" for name, p in net.named_parameters()}
    still = {id(p) for p in unused(net)} if unused else set()
    tree, truth = {"model": net.state_dict()}, []
    for number, groups in enumerate(optimizers):
        optimizer = torch.optim.AdamW([{"params": group(net)} for group in groups], lr=1e-3)
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            p.grad = None if id(p) in still else torch.ones_like(p)
            truth += [] if id(p) in still else [names[id(p)]]
        optimizer.step()
        tree[f"opt{number}"] = optimizer.state_dict()
    found = weights_of(tree, tmp_path / "run.pt")
    unpaired = [weight for name, weight in zip(truth, found, strict=True) if weight != name]
    assert all("cannot be told apart" in reason for reason in unpaired)
    missing = [name for name, weight in zip(truth, found, strict=True) if weight != name]
    assert missing == [name for name in truth if name.startswith(tuple(f"model.{each}" for each in unknown))]


def programs(rng):
    """Shapes of a model of blocks alike; who lists which weight, by optimizer and group; the weights with a state."""
    shapes = [(4, 4), (4,), (8, 4), (4, 8), (16, 4)]
    block = rng.choices(shapes, k=rng.randint(1, 4))
    ends = [rng.choices(shapes, k=rng.randint(0, 1)) for _ in range(2)]
    weights = ends[0] + rng.randint(1, 4) * block + ends[1]
    every = range(len(weights))
    live = {k for k in every if rng.random() < rng.choice([0.5, 0.8, 1.0])}
    matrices = [k for k in every if len(weights[k]) > 1]
    muon, cut = matrices[1:], rng.randint(0, len(weights))
    listed = rng.choice(
        [
            [[every]],
            [[[k for k in every if k in live or rng.random() < 0.5]]],
            [[matrices, [k for k in every if k not in matrices]]],
            [[muon], [[k for k in every if k not in muon]]],
            [[every[cut:], every[:cut]]],
        ]
    )
    return weights, listed, live


@pytest.mark.parametrize("seed", range(3))
def test_no_program_is_paired_wrongly(seed):
    rng, right = random.Random(seed), 0
    for _ in range(400):
        weights, listed, live = programs(rng)
        given, truth = [], []
        for groups in listed:
            own = dict(enumerate(k for group in groups for k in group))
            numbers = iter(own)
            lists = [{"params": list(itertools.islice(numbers, len(group)))} for group in groups]
            given.append((lists, {each: weights[k] for each, k in own.items() if k in live}))
            truth.append(own)
        for (_, known), places, own in zip(given, places_in_order(given, weights), truth, strict=True):
            paired = {each: at for each, at in places.items() if each in known and isinstance(at, int)}
            assert paired == {each: own[each] for each in paired}, (weights, listed, live)
            right += len(paired)
    assert right > 1000


LOOSE = {
    "a tree": (lambda model: {"variables": tree_of(model)}, "variables.layer0.weight"),
    "beside other entries": (lambda model: {**model.state_dict(), "epoch": 3}, "0.weight"),
    "a list": (lambda model: {"fp32": list(model.parameters())}, "opt.state.0"),
    "nested lists": (
        lambda model: {"fp32": [list(model.parameters())[:3], list(model.parameters())[3:]]},
        "opt.state.0",
    ),
}


@pytest.mark.parametrize("case", LOOSE)
def test_weights_that_are_no_state_dict(case, tmp_path):
    """A place in a list is no name."""
    make, first = LOOSE[case]
    model = network()
    torch.save({**make(model), "opt": trained(model)}, tmp_path / "run.pt")
    assert names_of(tmp_path / "run.pt")[0].endswith(first.removeprefix("variables."))
    assert steps(tmp_path / "run.pt") == (len(NAMES), len(NAMES))


@pytest.mark.parametrize("stranger", [9, "9", -1, "lost"])
def test_a_state_that_no_group_lists_changes_nothing(stranger, tmp_path):
    """It has no name, though every parameter that the groups list has one."""
    model = network()
    run = {"model": model.state_dict(), "optimizer": trained(model, params=model.named_parameters())}
    before = weights_of(run, tmp_path / "run.pt")
    run["optimizer"]["state"][stranger] = copy.deepcopy(run["optimizer"]["state"][0])
    assert weights_of(run, tmp_path / "run.pt") == before == named("model")


def test_a_copy_under_another_key_does_not_stop_resume(tmp_path):
    model = network()
    torch.save({"model": model.state_dict(), "swa": average(model), "opt": trained(model)}, tmp_path / "run.pt")
    fresh = network(1)
    ckpt8.resume(tmp_path / "run.pt", fresh)
    assert torch.equal(fresh[2].weight, model[2].weight)


@pytest.mark.slow
def test_parts_of_one_state_dict(tmp_path):
    """As Lightning saves a GAN."""
    tree = in_one("generator", "discriminator")
    expected = named("state_dict.generator", "state_dict.discriminator")
    assert weights_of(tree, tmp_path / "run.ckpt") == expected
    names_of(tmp_path / "run.ckpt")
    with_weights, parameters = steps(tmp_path / "run.ckpt")
    assert with_weights == parameters


def test_the_optimizer_of_a_part_is_not_that_of_the_average(tmp_path):
    module = nn.ModuleDict({"encoder": network(0), "decoder": network(1, width=64)})
    tree = {"model": module.state_dict(), "model_ema": average(module), "optimizer": trained(module["decoder"])}
    found = weights_of(tree, tmp_path / "run.pt")
    assert not any(each.startswith("model_ema") for each in found)
    assert not any("ema" in name for name in names_of(tmp_path / "run.pt"))


def test_two_optimizers_of_one_model(tmp_path):
    model = network()
    muon, adamw = (trained(model, params=[p for p in model.parameters() if p.ndim == dims]) for dims in (2, 1))
    tree = {"model": model.state_dict(), "ema": average(model), "muon": muon, "adamw": adamw}
    found = weights_of(tree, tmp_path / "run.pt")
    assert found[:3] == [f"model.{name}" for name in NAMES if name.endswith("weight") and name != "1.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [True, False])
def test_weights_in_another_file_than_the_optimizer(keyed, tmp_path):
    one, other, folder = network(0), network(1, width=64), tmp_path / "run"
    folder.mkdir()
    for key, module in (("G", one), ("D", other)):
        weights = {"params_of_it": module.state_dict(), "iteration": 3} if keyed else module.state_dict()
        torch.save(weights, folder / f"net{key}_3.pth")
        torch.save({"state_of_it": trained(module), "iteration": 3}, folder / f"opt{key}_3.pth")
    torch.save({"features": torch.randn(300, 300)}, folder / "other.pth")
    manifest = ckpt8.compress(folder)
    roles = {each.name: each.role for each in manifest.storages}
    key = "params_of_it." if keyed else ""
    assert roles[f"netG_3.pth:{key}2.weight"] is roles[f"netD_3.pth:{key}2.weight"] is Role.WEIGHT
    assert [each.name for each in manifest.parameters] == [
        f"opt{which}_3.pth:{name}" for which in "DG" for name in NAMES
    ]
    assert steps(folder) == (2 * len(NAMES), 2 * len(NAMES))


def test_weights_alone_stay_as_they_are(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"params_of_it": network().state_dict(), "iteration": 3}, folder / "one.pt")
    torch.save(trained(network(1, width=64)), folder / "opt.pt")
    roles = {each.name: each.role for each in ckpt8.compress(folder).storages}
    assert roles["one.pt:params_of_it.2.weight"] is Role.OTHER
