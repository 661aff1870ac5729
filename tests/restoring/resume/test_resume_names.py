"""Which parameter is which: wrappers, ties, names and places, several candidates."""

import re

import pytest
import torch
from resume_kit import OPTIMIZERS, Net, groups, same, snapshot, trained
from resumed_kit import fresh, refused, tree_of, write
from torch import nn

import ckpt8
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.core.errors import ResumeError, UsageError

ADAMW = OPTIMIZERS["torch-adamw"]


def fqn_keyed(model, optimizer, prefix=""):
    """The optimizer state with names in place of numbers, as FSDP and accelerate write it."""
    state = optimizer.state_dict()
    names = {id(p): prefix + name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return {
        "state": {order[k]: value for k, value in reversed(state["state"].items())},
        "param_groups": [group | {"params": [order[k] for k in group["params"]]} for group in state["param_groups"]],
    }


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_do_not_matter(tmp_path, prefix):
    model, optimizer = trained(ADAMW)
    weights = {prefix + name: value for name, value in model.state_dict().items()}
    path = write(tmp_path, {"model": weights, "optimizer": fqn_keyed(model, optimizer, prefix)})
    other, mine = fresh(ADAMW)
    assert ckpt8.resume(path, other, mine) == {}
    assert same(snapshot(other, None), snapshot(model, None))
    for (name, here), there in zip(other.named_parameters(), model.parameters(), strict=True):
        assert same(mine.state.get(here), optimizer.state.get(there)), name


def test_a_compiled_model_takes_plain_names(tmp_path):
    model, optimizer = trained(ADAMW)
    path = write(tmp_path, tree_of(model, optimizer))
    other = Net(seed=1)
    ckpt8.resume(path, torch.compile(other, backend="eager"))
    assert same(snapshot(other, None), snapshot(model, None))
    wrapped = nn.DataParallel(Net(seed=2))
    ckpt8.resume(path, wrapped)
    assert same(snapshot(wrapped.module, None), snapshot(model, None))


def test_names_that_would_become_one_stay_as_they_are():
    for names in (["a._orig_mod.w", "a.w"], ["module.w", "v"]):
        assert match(names, names) == dict(zip(names, names, strict=True))
    assert match(["module.w", "module.v"], ["v"]) == {"v": "module.v"}
    assert match(["w"], ["v"]) == {}


def test_names_go_before_places(tmp_path):
    """Saved from two groups, resumed into one group per parameter in another order."""
    model = Net()
    optimizer = ADAMW(groups(model, named=True), 0.1)
    model(torch.randint(0, 64, (2, 5))).backward()
    optimizer.step()
    path = write(tmp_path, {"optimizer": optimizer.state_dict()})
    other = Net(seed=1)
    live = reversed([(name, p) for name, p in other.named_parameters() if p.requires_grad])
    mine = ADAMW([{"params": [pair]} for pair in live], 0.5)
    ckpt8.resume(path, optimizer=mine)
    assert {group["param_names"][0]: group["weight_decay"] for group in mine.param_groups} == {
        name: 0.1 if p.dim() >= 2 else 0.0 for name, p in other.named_parameters() if p.requires_grad
    }
    for name, p in other.named_parameters():
        assert same(mine.state.get(p), optimizer.state.get(model.get_parameter(name))), name
    # Groups that became one are refused.
    whole = ADAMW([(name, p) for name, p in model.named_parameters() if p.requires_grad], 0.5)
    with pytest.raises(ResumeError, match="belong to groups 0, 1 with other hyperparameters"):
        ckpt8.resume(path, optimizer=whole)


def test_parameters_by_name_that_are_missing_or_too_many(tmp_path):
    model, optimizer = trained(ADAMW)
    matrices, vectors = groups(model)
    path = write(tmp_path, {"model": model.state_dict(), "optimizer": fqn_keyed(model, optimizer)})
    for live, said in (
        ([{"params": [model.body.weight]}], "is in the optimizer of the checkpoint but not in this one"),
        (
            [matrices, {"params": [*vectors["params"], model.frozen]}],
            "frozen: is not in the optimizer of the checkpoint",
        ),
    ):
        with pytest.raises(ResumeError, match=said):
            ckpt8.resume(path, model, ADAMW(live, 0.1))
    with pytest.raises(ResumeError, match="give model= as well"):
        ckpt8.resume(path, optimizer=ADAMW(groups(model), 0.1))


def test_a_tie_that_only_one_side_has(tmp_path):
    model, _ = trained(ADAMW)
    path = write(tmp_path, model.state_dict())
    loose = Net(seed=1)
    loose.head.weight = nn.Parameter(torch.zeros(64, 72))
    assert ckpt8.resume(path, loose) == {}
    assert torch.equal(loose.head.weight, model.head.weight)
    # Saved apart but equal, or under one of its names alone.
    apart = {name: t.clone() for name, t in model.state_dict().items()}
    for tree in (apart, {name: t for name, t in apart.items() if name != "head.weight"}):
        other = Net(seed=2)
        ckpt8.resume(write(tmp_path, {"state_dict": tree}), other)
        assert same(snapshot(other, None), snapshot(model, None))
        assert other.head.weight is other.embed.weight


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module"])
def test_where_models_are(tmp_path, key):
    model, optimizer = trained(ADAMW)
    path = write(tmp_path, {"epoch": 2, key: model.state_dict(), "nested": {"opt": optimizer.state_dict()}})
    other, mine = fresh(ADAMW)
    assert ckpt8.resume(path, other, mine) == {"epoch": 2}
    assert same(snapshot(other, mine), snapshot(model, optimizer))


def test_several_models(tmp_path):
    model, other = Net(), Net(seed=1)
    alone = nn.Linear(2, 2)
    path = write(tmp_path, {"model": model.state_dict(), "critic": alone.state_dict()})
    rest = ckpt8.resume(path, other)
    assert same(snapshot(other, None), snapshot(model, None))
    assert torch.equal(rest["critic"]["weight"], alone.weight)
    path = write(tmp_path, {"state_dict": model.state_dict(), "model": Net(seed=4).state_dict()})
    refused(path, other, None, re.escape("(state_dict, model); choose with model_at="), UsageError)
    rest = ckpt8.resume(path, other, model_at="model")
    assert same(snapshot(other, None), snapshot(Net(seed=4), None))
    assert list(rest) == ["state_dict"]
    with pytest.raises(UsageError, match="model_at='x' is not one of state_dict, model"):
        ckpt8.resume(path, other, model_at="x")


def test_of_several_models_that_do_not_fit_the_nearest_is_shown(tmp_path):
    """With its first difference, and all places that were looked at."""
    saved = {"model": nn.Linear(2, 2), "net": nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 1), nn.Linear(1, 1))}
    path = write(tmp_path, {name: module.state_dict() for name, module in saved.items()})
    live = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1))
    differs = r"Nearest is net: 0\.weight: was saved with shape \[3, 5\], here it has \[4, 5\] \(and 4 more\)"
    refused(path, live, None, rf"fits the model\. {differs}\. Looked at model, net; name another place with model_at=$")
    path = write(tmp_path, {name: saved["net"].state_dict() for name in ("mine", "yours")})
    refused(
        path,
        live,
        None,
        "no model state dict under a name of models; choose one of mine, yours with model_at=$",
        UsageError,
    )


def test_several_optimizers(tmp_path):
    first, second = nn.Linear(3, 4), nn.Linear(4, 3)
    both = [trained_on(first), trained_on(second)]
    path = write(tmp_path, {"optimizer_states": [o.state_dict() for o in both], "epoch": 1})
    mine = ADAMW(nn.Linear(4, 3).parameters(), 0.5)
    rest = ckpt8.resume(path, optimizer=mine)
    assert same(mine.state_dict(), both[1].state_dict())
    assert rest["optimizer_states"][1] is None
    assert rest["optimizer_states"][0]["param_groups"] == both[0].state_dict()["param_groups"]
    path = write(tmp_path, {"optimizer_states": [trained_on(first).state_dict(), both[0].state_dict()]})
    again = ADAMW(nn.Linear(3, 4).parameters(), 0.5)
    with pytest.raises(UsageError, match=r"2 optimizers \(optimizer_states.0, optimizer_states.1\), and 2 fit"):
        ckpt8.resume(path, optimizer=again)
    ckpt8.resume(path, optimizer=again, optimizer_at="optimizer_states.1")
    assert same(again.state_dict(), both[0].state_dict())


def trained_on(model):
    optimizer = ADAMW(model.parameters(), 0.1)
    model(torch.randn(2, model.in_features)).square().sum().backward()
    optimizer.step()
    return optimizer


def test_schedulers_and_users_may_add_to_groups(tmp_path):
    _, optimizer = trained(ADAMW)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.param_groups[0]["lr_scale"] = 0.5
    path = write(tmp_path, {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()})
    _, mine = fresh(ADAMW)
    rest = ckpt8.resume(path, optimizer=mine)
    assert mine.param_groups[0]["lr_scale"] == 0.5
    assert [group["initial_lr"] for group in mine.param_groups] == [0.004, 0.004]
    assert rest["scheduler"] == scheduler.state_dict()


def test_older_files_lack_settings(tmp_path):
    _, optimizer = trained(ADAMW)
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        for key in ("maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay"):
            del group[key]
    _, mine = fresh(ADAMW)
    ckpt8.resume(write(tmp_path, {"optimizer": state}), optimizer=mine)
    assert same(snapshot(None, mine)[1]["state"], optimizer.state_dict()["state"])
    assert mine.param_groups[0]["decoupled_weight_decay"] is True


def test_how_a_step_is_computed_stays(tmp_path):
    _, optimizer = trained(ADAMW)
    for group in optimizer.param_groups:
        group["foreach"] = True
    path = write(tmp_path, {"optimizer": optimizer.state_dict()})
    for live, kept in ((False, False), (None, True)):
        mine = torch.optim.AdamW(groups(Net()), foreach=live)
        ckpt8.resume(path, optimizer=mine)
        assert [group["foreach"] for group in mine.param_groups] == [kept, kept]
