"""Errors in steps of SGD with momentum, Lion and Muon: worked out in float64 from what load gives back."""

from __future__ import annotations

import math
from functools import partial

import lion_pytorch
import pytest
import pytorch_optimizer
import torch
from budget_kit import OPTIONS, check_against, each_engine, random_run
from step_kit import energies, moments, momentum_of
from torch import nn
from torch.optim import SGD, Muon

import ckpt8
from ckpt8.compressing import spending
from ckpt8.container.steps import CAPPED, MOMENTUM, NOISE, RISE, UNCOUNTED
from ckpt8.core.tensors import Role


def is_matrix(parameter):
    return parameter.ndim == 2


def one(make, **settings):
    return lambda params: [make(params, **settings)]


def muon_beside_adamw(params, **settings):
    """torch's Muon takes matrices and nothing else."""
    settings = {"lr": 1e-2, **settings}
    return [Muon(filter(is_matrix, params), **settings), torch.optim.AdamW([p for p in params if p.ndim < 2], lr=1e-3)]


def muon_with_adamw(params, **settings):
    """One optimizer whose groups follow two rules."""
    groups = [
        {"params": [p for p in params if is_matrix(p) == use_muon], "use_muon": use_muon} for use_muon in (True, False)
    ]
    return [pytorch_optimizer.Muon(groups, lr=1e-2, **settings)]


RUNS = {
    "SGD": one(SGD, lr=0.03, momentum=0.9),
    "SGD, dampened": one(SGD, lr=0.2, momentum=0.8, dampening=0.3, weight_decay=1e-4),
    "SGD, Nesterov": one(SGD, lr=0.03, momentum=0.95, nesterov=True),
    "Lion": one(lion_pytorch.Lion, lr=1e-3),
    "Lion, other betas": one(lion_pytorch.Lion, lr=1e-3, betas=(0.95, 0.98), weight_decay=0.1),
    "Muon": muon_beside_adamw,
    "Muon, matched": partial(muon_beside_adamw, lr=1e-3, momentum=0.9, adjust_lr_fn="match_rms_adamw"),
    "Muon, no Nesterov": partial(muon_beside_adamw, nesterov=False),
    "Muon and AdamW in one": muon_with_adamw,
}
"""Optimizers of a list of parameters."""

LARGE = (("up.weight", (144, 60)), ("down.weight", (64, 128)))


def trained(name, small=0, dtype=torch.float32, moment=None, steps=12):
    """A checkpoint of random gradients, and the names of each optimizer's parameters in the order of its groups.

    Each tensor has gradients of another size, and a row of the first has none.
    """
    shapes = (*LARGE, ("bias", (64,)), *((f"small.{k}.weight", (5, 3 + k)) for k in range(small)))
    weights, optimizers = random_run(shapes, RUNS[name], {"up.weight": 5}, dtype=dtype, steps=steps)
    if moment is not None:
        for state in (state for optimizer in optimizers for state in optimizer.state.values()):
            state |= {key: x.to(moment) for key, x in state.items() if key in ("momentum_buffer", "exp_avg")}
    known = {id(weight): key for key, weight in weights.items()}
    names = [[known[id(p)] for group in each.param_groups for p in group["params"]] for each in optimizers]
    states = [optimizer.state_dict() for optimizer in optimizers]
    model = {key: weight.detach() for key, weight in weights.items()}
    return {"model": model, "optimizer": states if len(states) > 1 else states[0]}, names


def rule_of(name):
    return name.partition(",")[0].partition(" ")[0].lower()


def in_float64(name, was, there, names):
    """Steps, their parts of weights and momentum, and drift, of the first optimizer but for groups of AdamW."""
    first = [
        tree["optimizer"][0] if isinstance(tree["optimizer"], list) else tree["optimizer"] for tree in (was, there)
    ]
    total = [0.0, 0.0, 0.0, 0.0]
    for group in first[0]["param_groups"]:
        for index in group["params"] if group.get("use_muon") is not False else ():
            own = [side["state"][index] for side in first]
            [b], [decoded] = map(moments, own)
            if b.any() and b.isfinite().all():
                pair = [tree["model"][names[0][index]] for tree in (was, there)]
                total = [x + y for x, y in zip(total, energies(rule_of(name), group, *own, pair), strict=True)]
            else:
                assert b.any() or torch.equal(b, decoded)
    moved, weights, momentum, _ = total
    energy = weights + momentum
    return {
        "drift": MOMENTUM * (NOISE * math.sqrt(energy) + RISE * energy / math.sqrt(moved)),
        "steps": math.sqrt(energy / moved),
        "weight": math.sqrt(weights / moved),
        "moment1": math.sqrt(momentum / moved),
    }


def rows_of(facts):
    """The optimizers whose steps are counted by momentum."""
    return [row for row in facts["steps"]["optimizers"] if row["measure"].startswith("momentum")]


def assert_row(row, expected):
    found = {part: row[part]["mean"] if part == "drift" else row[part] for part in expected}
    assert found == pytest.approx(expected, rel=1e-5)
    assert row["moment2"] == 0


DTYPES = {
    "fp32": {},
    "bf16": {"dtype": torch.bfloat16},
    "bf16 momentum": {"moment": torch.bfloat16},
    "bf16 weights": {"dtype": torch.bfloat16, "moment": torch.float32},
}


@pytest.mark.by_default(most=6)
@pytest.mark.parametrize("small", [0, 40], ids=["own entries", "packs"])
@pytest.mark.parametrize(
    ("name", "dtype", "option"),
    [
        *((name, "fp32", option) for name in RUNS for option in OPTIONS),
        *(
            (name, dtype, "archive")
            for name in ("SGD, Nesterov", "Lion", "Muon")
            for dtype in DTYPES
            if dtype != "fp32"
        ),
    ],
)
def test_figures_are_what_the_decoded_tensors_say(name, dtype, option, small, tmp_path):
    tree, names = trained(name, small, **DTYPES[dtype])
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", **OPTIONS[option])
    assert bool(manifest.packs) == bool(small)
    (row,) = rows_of(facts := ckpt8.inspect(tmp_path / "run.ckpt8"))
    assert row["measure"] == f"momentum, its step is {'known' if name.startswith('Lion') else 'estimated'}"
    assert row["parameters"] == sum(not name.startswith("Muon") or "bias" not in key for key in names[0])
    assert_row(row, in_float64(name, tree, ckpt8.load(tmp_path / "run.ckpt8"), names))
    assert manifest.error_in_steps == facts["steps"]["steps"]
    assert (facts["steps"]["drift"]["low"], facts["steps"]["drift"]["high"]) == manifest.expected_drift
    budget = facts["steps"]["budget"]
    if budget is not None:
        assert facts["steps"]["outside"] == facts["steps"]["fallbacks"] == []
        codecs = {each.codec["id"] for each in manifest.storages if each.numel > 4096 and each.role is not Role.OTHER}
        assert codecs == {"lattice/1", "lattice/2"}
        assert 0 < row["steps"] <= budget
        # Up to a half may stay: steps are rounded down to quarter octaves, and one tensor cannot use its share.
        assert small or option != "archive" or row["steps"] > 0.55 * budget
    check_against(tmp_path, tree, manifest, OPTIONS[option])


@pytest.mark.parametrize("name", ["SGD", "SGD, dampened", "SGD, Nesterov", "Lion", "Muon", "Muon, matched"])
def test_the_step_is_how_far_the_next_one_moves_the_weights(name, tmp_path):
    """On a network that learns; Nesterov's step has the next gradient in it, and Muon's is a mean over matrices."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(60, 144), nn.Tanh(), nn.Linear(144, 64))
    params, inputs = list(model.parameters()), torch.randn(256, 60)
    targets = torch.randn(64, 60) @ inputs.T
    optimizers = RUNS[name](params)
    optimizers[0].param_groups[0] |= {"lr": 1e-3, "weight_decay": 0.0}

    def step(number):
        rows = torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(number))
        (model(inputs[rows]) - targets.T[rows]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()

    for number in range(40):
        step(number)
    stated = moved = 0.0
    for number in range(40, 48):
        states = [optimizer.state_dict() for optimizer in optimizers]
        tree = {"model": model.state_dict(), "optimizer": states if len(states) > 1 else states[0]}
        manifest = ckpt8.save(tree, tmp_path / "run.ckpt8")
        stated += sum(each.steps["step"] for each in manifest.parameters if "momentum" in each.steps)
        group = optimizers[0].param_groups[0]
        buffers = [next(iter(optimizers[0].state[p].values())).double().clone() for p in group["params"]]
        before = [p.detach().clone() for p in group["params"]]
        step(number)
        for w, b, was in zip(group["params"], buffers, before, strict=True):
            mean_square = float(b.square().mean())
            gain = momentum_of(rule_of(name), group, tuple(w.shape), mean_square)[2]
            moved += gain * mean_square * float((w.detach() - was).double().square().sum())
    least, most = {"L": (0.99, 1.001), "M": (0.48 / 0.72, 0.95 / 0.72)}.get(name[0], (0.95, 1.05))
    if name == "SGD, Nesterov":
        least, most = 1.0, 2.3
    assert least < math.sqrt(moved / stated) < most


@pytest.mark.by_default("SGD, Nesterov", "Lion")
@pytest.mark.parametrize("name", ["SGD", "SGD, dampened", "SGD, Nesterov", "Lion"])
def test_an_error_of_the_momentum_moves_the_weights_until_it_has_healed(name, tmp_path):
    """Two runs from the original and from the file, on white gradients: their weights end as far apart as it says."""
    generator, sizes = torch.Generator().manual_seed(1), (0.01, 0.3)
    weights = [nn.Parameter(torch.randn(shape, generator=generator) * 0.05) for _, shape in LARGE]
    (optimizer,) = RUNS[name](weights)
    optimizer.param_groups[0]["weight_decay"] = 0.0

    def train(weights, optimizer, generator, steps):
        for _ in range(steps):
            for w, size in zip(weights, sizes, strict=True):
                w.grad = torch.randn(w.shape, generator=generator) * size
            optimizer.step()

    train(weights, optimizer, generator, 300)
    tree = {"model": {str(k): w.detach() for k, w in enumerate(weights)}, "optimizer": optimizer.state_dict()}
    manifest = ckpt8.save(tree, tmp_path / "run.ckpt8", budget=5, rules=["model.*=lossless"])
    back = ckpt8.load(tmp_path / "run.ckpt8")
    others = [nn.Parameter(w) for w in back["model"].values()]
    (other,) = RUNS[name](others)
    other.load_state_dict(back["optimizer"])
    twin = torch.Generator()
    twin.set_state(generator.get_state())
    for each, made, random in ((weights, optimizer, generator), (others, other, twin)):
        train(each, made, random, 300)
    apart = sum(
        size**2 * float((w - v).detach().double().square().sum())
        for size, w, v in zip(sizes, weights, others, strict=True)
    )
    stated = sum(each.steps["moment1"] for each in manifest.parameters)
    assert math.sqrt(apart / stated) == pytest.approx(1, abs=0.1 if name == "Lion" else 0.03)


def few_rows(name, seed, size):
    """A checkpoint with a table of weights of a ``size``, of which few rows carry the step."""
    tree, generator = trained(name)[0], torch.Generator().manual_seed(seed)
    rows = torch.full((6000, 1), 1e-3)
    rows[torch.randperm(6000, generator=generator)[:8]] = 10
    (state, *_) = tree["optimizer"]["state"].values()
    key = next(iter(state.keys() & {"exp_avg", "momentum_buffer"}))
    state[key] = torch.randn(6000, 60, generator=generator) * rows
    tree["model"]["up.weight"] = torch.randn(6000, 60, generator=generator) * size
    return tree


def test_a_lattice_that_is_made_finer_is_capped_no_more(tmp_path, monkeypatch):
    tree, first, correct = few_rows("SGD, Nesterov", 6, 0.05), [], spending._correct
    tree["optimizer"]["param_groups"][0]["lr"] = 0.01
    monkeypatch.setattr(
        spending, "_correct", lambda *given: (first.extend(each.reason for each in given[0].streams), correct(*given))
    )
    manifest = ckpt8.save(tree, tmp_path / "run.ckpt8", budget=0.3)
    assert CAPPED in first
    assert CAPPED not in {each.reason for each in manifest.storages}


@pytest.mark.parametrize(("name", "seed"), [("SGD, Nesterov", 5), ("Lion", 11), ("Muon", 0)])
def test_engines_threads_and_tiles_choose_one_lattice(name, seed, tmp_path, monkeypatch):
    """Also where a sample misjudges the few rows of a table that carry the step, so that a file is encoded anew."""
    tree = trained(name)[0] if name == "Muon" else few_rows(name, seed, 5)
    torch.save(tree, tmp_path / "run.pt")
    codecs, content, corrected = set(), set(), []
    correct = spending._correct
    monkeypatch.setattr(spending, "_correct", lambda *given: corrected.append(correct(*given)))
    for threads, _ in each_engine(monkeypatch):
        manifest = ckpt8.compress(tmp_path / "run.pt", budget=0.3, threads=threads, force=True)
        (row,) = rows_of(ckpt8.inspect(tmp_path / "run.ckpt8"))
        assert 0.15 < row["steps"] <= 0.3
        codecs.add(str([each.codec for each in manifest.storages]))
        content.add(str([{part: table.crcs for part, table in each.parts.items()} for each in manifest.storages]))
    assert len(codecs) == len(content) == 1
    assert len(corrected) == (0 if name == "Muon" else 3)


def test_without_momentum_the_step_is_unknown_and_flash_stays(tmp_path):
    weight = nn.Parameter(torch.randn(80, 64))
    optimizer = SGD([weight], lr=0.1)
    weight.grad = torch.randn(80, 64)
    optimizer.step()
    tree = {"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}
    manifest = ckpt8.save(tree, tmp_path / "run.ckpt8", preset="archive")
    (record,) = (each for each in manifest.storages if each.name == "model.w")
    assert record.codec["id"] == "split24/1"
    assert record.reason.startswith("no budget: ")
    assert (manifest.error_in_steps, manifest.expected_drift) == (None, None)
    assert "unknown in steps of the optimizer" in repr(manifest)


@pytest.mark.parametrize("settings", [{"momentum": 1.0}, {"dampening": 1.0}], ids=str)
def test_settings_without_a_step_are_not_counted(settings, tmp_path):
    tree, _ = trained("SGD")
    tree["optimizer"]["param_groups"][0] |= settings
    manifest = ckpt8.save(tree, tmp_path / "run.ckpt8", preset="archive")
    assert {each.codec["id"] for each in manifest.storages} == {"split24/1", "companded8/1", "lossless/1"}
    assert UNCOUNTED in repr(manifest)


@pytest.mark.parametrize("name", ["SGD, Nesterov", "Lion"])
@pytest.mark.parametrize("spoilt", ["NaN", "zero", "a NaN in the weight", "all zero"])
def test_a_tensor_that_cannot_be_counted_leaves_the_budget_to_the_others(name, spoilt, tmp_path):
    tree, names = trained(name)
    key = "exp_avg" if name == "Lion" else "momentum_buffer"
    match spoilt:
        case "NaN":
            tree["optimizer"]["state"][0][key][7, 9] = math.nan
        case "zero":
            tree["optimizer"]["state"][0][key].zero_()
        case "a NaN in the weight":
            tree["model"]["up.weight"][7, 9] = math.nan
        case _:
            for state in tree["optimizer"]["state"].values():
                state[key].zero_()
    torch.save(tree, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset="archive")
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures
    codecs = {each.name: each.codec["id"] for each in manifest.storages}
    if spoilt == "all zero":
        assert manifest.error_in_steps is None
        assert "has not moved anything yet" in next(each.reason for each in manifest.storages if each.reason)
        return
    assert codecs["model.down.weight"] == "lattice/1"
    assert codecs[f"optimizer.state.1.{key}"] == "lattice/2"
    assert codecs[f"optimizer.state.0.{key}"] == (
        {"NaN": "lossless/1", "zero": "companded8/1"}.get(spoilt, "lattice/2")
    )
    if spoilt == "zero":
        assert torch.equal(ckpt8.load(tmp_path / "run.ckpt8")["optimizer"]["state"][0][key], torch.zeros(144, 60))
        assert codecs["model.up.weight"] == "split24/1"
    if "weight" not in spoilt:
        facts = ckpt8.inspect(tmp_path / "run.ckpt8")
        assert_row(rows_of(facts)[0], in_float64(name, tree, ckpt8.load(tmp_path / "run.ckpt8"), names))
        assert 0.5 < manifest.error_in_steps <= 1


def test_the_rate_is_a_tenth_of_the_initial_one_at_least_and_large_steps_are_capped(tmp_path):
    tree, names = trained("Lion")
    tree["optimizer"]["param_groups"][0] |= {"lr": 0.0, "initial_lr": 1.0}
    manifest = ckpt8.save(tree, tmp_path / "run.ckpt8", budget=5)
    facts = ckpt8.inspect(tmp_path / "run.ckpt8")
    assert facts["steps"]["rates"] == [{"rate": 0.1, "stated": 0.0, "parameters": 3}]
    tree["optimizer"]["param_groups"][0]["lr"] = 0.1
    assert_row(rows_of(facts)[0], in_float64("Lion", tree, ckpt8.load(tmp_path / "run.ckpt8"), names))
    capped = facts["steps"]["capped"]
    assert capped["elements"] == capped["of"] == sum(math.prod(shape) for _, shape in LARGE)
    assert {each.reason for each in manifest.storages if each.codec["id"] == "lattice/1"} == {CAPPED}


@pytest.mark.slow
def test_a_matrix_too_large_to_replay_has_its_steps(tmp_path):
    generator = torch.Generator().manual_seed(0)
    w, b = (torch.randn(2112, 2048, generator=generator) * size for size in (0.02, 1e-3))
    weight = nn.Parameter(w)
    optimizer = Muon([weight], lr=1e-3)
    optimizer.state[weight]["momentum_buffer"] = b
    tree = {"model": {"w": w}, "optimizer": optimizer.state_dict()}
    manifest = ckpt8.save(tree, tmp_path / "run.ckpt8", preset="archive")
    assert {each.codec["id"] for each in manifest.storages if each.role is not Role.OTHER} == {"lattice/1", "lattice/2"}
    (row,) = rows_of(ckpt8.inspect(tmp_path / "run.ckpt8"))
    assert_row(row, in_float64("Muon", tree, ckpt8.load(tmp_path / "run.ckpt8"), [["w"]]))
    assert 0.8 < row["steps"] <= 1
    torch.save(tree, tmp_path / "run.pt")
    predicted = ckpt8.inspect(tmp_path / "run.pt")["predicted"]["archive"]
    assert predicted["drift"]["mean"] == pytest.approx(row["drift"]["mean"], rel=0.1)


@pytest.mark.parametrize("name", ["SGD", "Lion"])
def test_a_momentum_below_the_smallest_step_of_a_lattice_keeps_flash(name, tmp_path):
    tree, _ = trained(name)
    for state in tree["optimizer"]["state"].values():
        next(x for x in state.values() if isinstance(x, torch.Tensor)).mul_(1e-33)
    manifest = ckpt8.save(tree, tmp_path / "run.ckpt8", budget=1)
    codecs = {each.codec["id"] for each in manifest.storages if each.role is Role.MOMENT1 and each.numel > 1000}
    assert codecs <= {"companded8/1", "lossless/1"}
