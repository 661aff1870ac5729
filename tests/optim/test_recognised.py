"""Optimizers that ckpt8 recognises and does not train: their roles, rules and size, and the step after restore.

The oracle of a rule is its package: three real steps, then the rule on the saved state with the gradient of the fourth.
"""

from __future__ import annotations

import importlib
import importlib.util
from unittest import mock

import every_optimizer_kit as kit
import pytest
import torch
from next_step_kit import next_steps
from torch import nn

import ckpt8
from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.core.tensors import Role
from ckpt8.inspecting.container import inspect_container
from ckpt8.optim.known_optimizers import CARDS, identify, state_roles, why_unknown
from ckpt8.optim.recognised_cards import RECOGNISED

EXTRA = {"flashoptim", "schedulefree", "prodigyopt", "galore_torch", "apollo_torch", "muon", "adan_pytorch"}
EXTRA |= {"torch_optimizer"}
"""Packages that no environment of the tests needs: their classes are tested where they are installed."""


def is_there(package):
    return package not in EXTRA or importlib.util.find_spec(package) is not None


_L2, _DECOUPLED = {"weight_decay": 0.1}, {"weight_decay": 0.1, "decoupled_weight_decay": True}
_PO_L2, _PO_DECOUPLED = {"weight_decay": 0.1, "weight_decouple": False}, {"weight_decay": 0.1, "weight_decouple": True}
_MUON = {"lr": 0.02, "weight_decay": 0.1}

RULES = [
    ("torch.optim", "Adamax", "adamax", {**_L2, "betas": (0.8, 0.9), "eps": 1e-3}),
    ("torch.optim", "NAdam", "nadam", {**_L2, "betas": (0.8, 0.9), "momentum_decay": 0.02}),
    ("torch.optim", "NAdam", "nadam", {**_DECOUPLED, "eps": 1e-3}),
    ("torch.optim", "RAdam", "radam", {**_L2, "betas": (0.8, 0.999)}),
    ("torch.optim", "RAdam", "radam", {**_DECOUPLED, "betas": (0.8, 0.9)}),
    ("torch.optim", "RMSprop", "rmsprop", {**_L2, "alpha": 0.8}),
    ("torch.optim", "RMSprop", "rmsprop", {"momentum": 0.7, "centered": True, "eps": 1e-3}),
    ("torch.optim", "Adagrad", "adagrad", {**_L2, "lr_decay": 0.2, "initial_accumulator_value": 0.01}),
    ("torch.optim", "Adadelta", "adadelta", {**_L2, "rho": 0.7, "eps": 1e-4}),
    ("torch.optim", "Muon", "muon", {**_MUON, "momentum": 0.8}),
    ("torch.optim", "Muon", "muon", {**_MUON, "nesterov": False, "ns_steps": 3, "adjust_lr_fn": "match_rms_adamw"}),
    ("optimi", "Adan", "adan_optimi", {"weight_decay": 0.1, "betas": (0.9, 0.8, 0.7)}),
    ("optimi", "Adan", "adan_optimi", {}),
    ("pytorch_optimizer", "AdaMax", "adamax", _PO_DECOUPLED),
    ("pytorch_optimizer", "AdaMax", "adamax", _PO_L2),
    ("pytorch_optimizer", "AdaBelief", "adabelief", {**_PO_DECOUPLED, "betas": (0.8, 0.9)}),
    ("pytorch_optimizer", "AdaBelief", "adabelief", _PO_L2),
    ("pytorch_optimizer", "AdEMAMix", "ademamix", {**_PO_DECOUPLED, "betas": (0.8, 0.9, 0.99), "alpha": 3.0}),
    ("pytorch_optimizer", "AdEMAMix", "ademamix", _PO_L2),
    ("pytorch_optimizer", "Adan", "adan", {**_PO_DECOUPLED, "betas": (0.9, 0.8, 0.7)}),
    ("pytorch_optimizer", "Adan", "adan", _PO_L2),
    ("pytorch_optimizer", "AdaDelta", "adadelta", _PO_DECOUPLED),
    ("pytorch_optimizer", "ScheduleFreeAdamW", "schedule_free_adamw_step", {"weight_decay": 0.1, "warmup_steps": 7}),
    ("schedulefree", "AdamWScheduleFree", "schedule_free_adamw", {"weight_decay": 0.1, "warmup_steps": 7}),
    ("schedulefree", "AdamWScheduleFree", "schedule_free_adamw", {"betas": (0.8, 0.9), "r": 1.0, "foreach": False}),
]
RULES = [case for case in RULES if is_there(case[0])]


def class_of(package, kind):
    return getattr(pytest.importorskip(package, reason=f"{package} is not installed"), kind)


def build(package, kind, settings):
    """A trained run of three steps: model and optimizer."""
    module = pytest.importorskip(package, reason=f"{package} is not installed")
    cls = getattr(module, kind, None) or pytest.skip(f"{package} without {kind}")
    with kit.quiet(), mock.patch.dict(kit.SETTINGS, {kind: settings}):
        return kit.trained(cls, 0, 3)


def stepped(net, optimizer_of):
    """The same for an optimizer that ``optimizer_of`` makes of a model: it takes any settings."""
    with kit.quiet():
        optimizer = optimizer_of(net)
        for seed in range(3):
            kit.step(net, optimizer, seed)
    return net, optimizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "kind", "rule", "settings"), RULES)
def test_the_rule_takes_the_next_step_of_the_package(tmp_path, package, kind, rule, settings):
    found = next_steps(*build(package, kind, settings), tmp_path)
    assert {each.found for each in found} == {rule}
    assert max(each.ulps for each in found) <= 8
    assert max(each.error for each in found) <= 1e-5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", [*filter(is_there, ["muon", "pytorch_optimizer"])])
def test_muon_with_adamw_in_one_optimizer(tmp_path, package):
    """Muon steps the matrix of the model, AdamW its other parameters."""
    net = kit.network()
    matrix, *others = sorted(net.parameters(), key=lambda each: -each.numel())
    groups = [{"params": [matrix], "use_muon": True, "weight_decay": 0.1}, {"params": others, "use_muon": False}]
    cls = class_of(package, "SingleDeviceMuonWithAuxAdam" if package == "muon" else "Muon")
    found = next_steps(*stepped(net, lambda _: cls(groups)), tmp_path)
    rule = "muon_keller_jordan" if package == "muon" else "muon_pytorch_optimizer"
    assert [each.found for each in found] == [rule, "adamw", "adamw", "adamw"]
    assert max(each.ulps for each in found) <= 8


@pytest.mark.by_default(most=4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "kind", "rule", "settings"), [*{case[2]: case for case in RULES}.values()])
def test_the_stated_error_is_that_of_the_first_replayed_step(tmp_path, monkeypatch, package, kind, rule, settings):
    monkeypatch.setattr(kit, "network", lambda seed=0, **_: _large(seed, matrices=True))
    model, optimizer = build(package, kind, settings)
    path = tmp_path / "run.pt"
    torch.save({"netG": model.state_dict(), "opt": optimizer.state_dict()}, path)
    manifest = ckpt8.compress(path)
    resume = ckpt8.verify(path.with_suffix(".ckpt8"), path, resume_steps=1).resume
    assert resume["skipped"] == {}
    errors = inspect_container(path.with_suffix(".ckpt8"))["errors"]
    reasons = {each.reason for each in manifest.parameters}
    decoupled = settings.get("decoupled_weight_decay") or settings.get("weight_decouple") or CARDS[rule].own_decay
    coupled = CARDS[rule].coupled and settings.get("weight_decay") and not decoupled
    if CARDS[rule].needs_weight or coupled or reasons != {None}:
        assert errors["replayed"] is None
        assert all("needs the weight" in each for each in reasons), reasons
    else:
        assert errors["replayed"]["nmse"] == pytest.approx(resume["steps"][0]["update_nmse"], rel=0.01)
        assert 0 < errors["replayed"]["nmse"] < 0.01


VARIED = {
    ("pytorch_optimizer", "ScheduleFreeAdamW"): ({"decoupling_c": 2}, {"ams_bound": True}, {"use_palm": True}),
    ("pytorch_optimizer", "AdEMAMix"): ({"t_alpha_beta3": 10.0}, {"cautious": True}, {"stable_adamw": True}),
    ("pytorch_optimizer", "AdaBelief"): (
        *({"rectify": True}, {"ams_bound": True}, {"adanorm": True}, {"adam_debias": True}),
    ),
    ("pytorch_optimizer", "AdaMax"): ({"adanorm": True}, {"adam_debias": True}),
    ("pytorch_optimizer", "Adan"): ({"use_gc": True}, {"adanorm": True}),
    ("pytorch_optimizer", "Lion"): ({"cautious": True}, {"use_gc": True}, {"adanorm": True}),
    ("pytorch_optimizer", "StableAdamW"): ({"cautious": True},),
    ("schedulefree", "AdamWScheduleFree"): ({"weight_lr_power": 0.0},),
    ("optimi", "Adan"): ({"weight_decay": 0.1, "adam_wd": True, "triton": False},),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "kind"), [case for case in VARIED if is_there(case[0])])
def test_a_setting_that_changes_the_rule_is_in_it_or_makes_it_unknown(tmp_path, package, kind):
    cls = class_of(package, kind)
    for settings in VARIED[package, kind]:
        given = {"lr": 1e-3, **settings}
        run = stepped(kit.network(), lambda net, given=given: cls(net.parameters(), **given))
        for each in next_steps(*run, tmp_path):
            assert each.found not in CARDS or each.error <= 1e-5, settings


PACKAGES = (
    *("torch.optim", "pytorch_optimizer", "transformers.optimization", "lion_pytorch", "optimi", "came_pytorch"),
    *("bitsandbytes.optim", "flashoptim", "schedulefree", "prodigyopt", "galore_torch", "apollo_torch", "muon"),
    *("adan_pytorch", "torch_optimizer"),
)


@pytest.mark.by_default("transformers.optimization", "lion_pytorch", "optimi", "came_pytorch")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("package", [*filter(is_there, PACKAGES)])
def test_no_optimizer_is_taken_for_another(tmp_path, package):
    """Whatever class a package has: the replayed step is that of the class, or there is none."""
    replayed, wrong = 0, {}
    for name, kind in kit.classes(package).items():
        with kit.quiet():
            try:
                run = kit.trained(kind, 0, 3)
                run[1].state_dict()["param_groups"]
            except Exception:
                continue  # it needs arguments, a device or processes of its own
            found = next_steps(*run, tmp_path)
        replayed += sum(each.found in CARDS for each in found)
        off = {each.found: each.error for each in found if each.found in CARDS and not each.error <= 1e-4}
        wrong |= {name: off} if off else {}
    assert wrong == {}
    assert replayed or package not in ("torch.optim", "pytorch_optimizer", "optimi", "lion_pytorch", "came_pytorch")


SIZES = [
    *(("torch.optim", kind, 2.6) for kind in ("Adamax", "NAdam", "RAdam")),
    *(("torch.optim", "Adagrad", 2.2), ("torch.optim", "RMSprop", 2.2), ("torch.optim", "Adadelta", 2.6)),
    *(("torch.optim", "ASGD", 1.6), ("optimi", "Adan", 2.9), ("optimi", "Ranger", 2.2)),
    *(("pytorch_optimizer", "AdaMax", 2.6), ("pytorch_optimizer", "AdaBelief", 2.6)),
    *(("pytorch_optimizer", "AdEMAMix", 2.7), ("pytorch_optimizer", "Adan", 2.9)),
    *(("pytorch_optimizer", "ScheduleFreeAdamW", 1.8), ("pytorch_optimizer", "Prodigy", 2.2)),
    ("pytorch_optimizer", "AdamMini", 2.2),
]
"""The least ratio of a matrix and its state, under keys that name neither."""


def _large(seed=0, *, matrices=False):
    torch.manual_seed(seed)
    layer = nn.Linear(kit.WIDTH, 1024, bias=not matrices)
    return nn.Sequential(layer, nn.Tanh(), nn.Linear(1024, 4, bias=not matrices))


@pytest.mark.by_default(most=5)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "kind", "least"), SIZES)
def test_roles_size_and_the_next_step(package, kind, least, tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "network", _large)
    path = tmp_path / "run.pt"
    with kit.quiet():
        model, optimizer = kit.trained(class_of(package, kind), 0, 4)
        state = optimizer.state_dict()
        torch.save({"netG": model.state_dict(), "optG": state}, path)
        ckpt8.compress(path)
        ratio = path.stat().st_size / path.with_suffix(".ckpt8").stat().st_size
        assert ratio > least
        with open_checkpoint(path) as checkpoint:
            roles = {each.name: each.role for each in classify(checkpoint.tree).tensors}
        for identifier, values in state["state"].items():
            for key, value in values.items():
                if roles.get(f"optG.state.{identifier}.{key}") is Role.MOMENT2:
                    assert (value >= 0).all(), key
        before = [parameter.detach().clone() for parameter in model.parameters()]
        kit.step(model, optimizer, 4)
        ours = ckpt8.load(path.with_suffix(".ckpt8"))
        again, fresh = kit.trained(type(optimizer), 1, 0)
        again.load_state_dict(torch.load(path, weights_only=False)["netG"])
        fresh.load_state_dict(ours["optG"])
        kit.step(again, fresh, 4)
    for start, one, other in zip(before, model.parameters(), again.parameters(), strict=True):
        moved = (one - start).norm()
        assert (one - other).norm() <= 0.05 * moved + 1e-6 * start.norm()


RESUMED = [
    *(("torch.optim", name) for name in ("NAdam", "RMSprop", "Adadelta", "ASGD")),
    *(("pytorch_optimizer", name) for name in ("AdEMAMix", "ScheduleFreeAdamW", "SOAP", "AdaMuon")),
    *(("optimi", "Adan"), ("schedulefree", "SGDScheduleFree")),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("package", "kind"), [case for case in RESUMED if is_there(case[0])])
def test_a_run_goes_on(tmp_path, package, kind):
    model, optimizer = build(package, kind, {})
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt", preset="lossless")
    with kit.quiet(), mock.patch.dict(kit.SETTINGS, {kind: {}}):
        again, fresh = kit.trained(type(optimizer), 1, 0)
        ckpt8.resume(tmp_path / "run.ckpt8", model=again, optimizer=fresh)
        for run in ((model, optimizer), (again, fresh)):
            kit.step(*run, 3)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters(), strict=True))


def test_a_key_alone_says_nothing():
    assert state_roles({"sum"}) == {"sum": Role.MOMENT2}
    assert state_roles({"z"})["z"] is Role.WEIGHT
    assert [state_roles(keys) for keys in ({"sum", "history"}, {"z", "noise"}, ())] == [{}, {}, {}]


@pytest.mark.parametrize("card", RECOGNISED, ids=lambda card: card.rule_id)
def test_every_state_is_found_as_itself(card):
    if card.matrix.tensors:
        keys = {each.key for each in card.matrix.present({})}
        assert state_roles(keys).items() >= {key: card.tensors[key].role for key in keys}.items()
    if card.unknown:
        keys = {each.key for each in card.matrix.tensors}
        signs = dict.fromkeys(card.signs)
        assert why_unknown(keys, keys, signs) == card.unknown
        assert identify(keys, keys, signs) is None
