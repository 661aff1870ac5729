"""What may get into live objects: nothing that stands for an object, and nothing half way."""

import argparse
import copy
import pickle

import pytest
import torch
from every_optimizer_kit import build, foreign, network, quiet, step
from own_optimizer_kit import PlainEma
from resume_kit import same
from resumed_kit import refused as refused_unchanged
from resumed_kit import tree_of, write
from torch import nn

import ckpt8
from ckpt8.checkpoint.sources.composite import Fill
from ckpt8.core.errors import InputError, ResumeError, ResumeWarning

pytestmark = pytest.mark.filterwarnings("ignore")


def save(folder, model, optimizer):
    return write(folder, tree_of(model, optimizer))


def trained(kind, seed=0):
    model = network(seed)
    optimizer = build(kind, model)
    step(model, optimizer, 0)
    return model, optimizer


def refused(path, model, optimizer, match):
    assert "nothing was changed" in str(refused_unchanged(path, model, optimizer, match))
    step(model, optimizer, 5)


def goes_on(*runs):
    """The steps of two runs lead to the same weights."""
    for model, optimizer in runs:
        step(model, optimizer, 1)
    assert same(runs[0][0].state_dict(), runs[1][0].state_dict())


def test_an_object_in_a_group(tmp_path):
    model, optimizer = trained(torch.optim.AdamW)
    optimizer.param_groups[0]["schedule"] = argparse.Namespace(warmup=3)
    path = save(tmp_path, model, optimizer)
    refused(path, *trained(torch.optim.AdamW, 1), r"a parameter group holds a argparse.Namespace")
    with pytest.warns(ResumeWarning, match="argparse.Namespace"):
        ckpt8.resume(path, *trained(torch.optim.AdamW, 1), strict=False)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.RMSprop])
def test_an_object_in_a_state(tmp_path, kind):
    tree = tree_of(*trained(kind))
    tree["optimizer"]["state"][0]["step"] = argparse.Namespace(count=3)
    refused(write(tmp_path, tree), *trained(kind, 1), "holds a argparse.Namespace|is not a whole number")


class WithExtra(nn.Linear):
    extra = 0

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_an_object_in_an_extra_state(tmp_path):
    model = WithExtra(8, 8)
    model.extra = {"amax": [argparse.Namespace(x=1)]}
    path = write(tmp_path, {"model": model.state_dict()})
    other = WithExtra(8, 8)
    before = other.weight.detach().clone()
    with pytest.raises(ResumeError, match="model _extra_state: its extra state holds a argparse"):
        ckpt8.resume(path, other)
    assert other.extra == 0
    assert torch.equal(other.weight, before)


class Plain:
    """Nothing but attributes."""

    def __init__(self, rank):
        self.rank = rank


class Hooked(Plain):
    def __setstate__(self, state):
        raise AssertionError("code of the class was called")


def test_objects_of_plain_attributes_once_torch_calls_their_class_safe(tmp_path):
    model, optimizer = trained(PlainEma)
    for kind in (Plain, Hooked):
        for number, param in enumerate(model.parameters()):
            optimizer.state[param]["projector"] = kind.__new__(kind)
            optimizer.state[param]["projector"].__dict__ = {"rank": number, "basis": [torch.full((2,), float(number))]}
        path = save(tmp_path, model, optimizer)
        refused(path, *trained(PlainEma, 1), rf"holds a test_live_values\.{kind.__name__}, which resume does not make")
        with torch.serialization.safe_globals([kind]):
            if kind is Hooked:
                refused(path, *trained(PlainEma, 1), "holds a test_live_values.Hooked")
                continue
            other, fresh = trained(PlainEma, 1)
            ckpt8.resume(path, other, fresh)
        held = [fresh.state[param]["projector"] for param in other.parameters()]
        assert [(type(each), each.rank, each.basis[0].tolist()) for each in held] == [
            (Plain, number, [number, number]) for number in range(len(held))
        ]


def test_quantised_moments_are_no_plain_ones(tmp_path):
    torchao = pytest.importorskip("torchao.optim")
    with quiet():
        tree = tree_of(*trained(torchao.AdamW8bit))
        group, defaults = tree["optimizer"]["param_groups"][0], torch.optim.AdamW(network().parameters()).defaults
        group.update({**defaults, "lr": group["lr"]})
        path = write(tmp_path, tree)
    said = "0.weight: its optimizer state has exp_avg, exp_avg_sq in another form"
    refused(path, *trained(torch.optim.AdamW, 1), said)


@pytest.mark.parametrize("change", [
    lambda state: setattr(state, "codes", state.codes[:32]),
    lambda state: setattr(state, "codes", state.codes.float()),
    lambda state: setattr(state, "block_size", 128),
    lambda state: setattr(state, "scale", state.scale.view(4, 4)),
    lambda state: delattr(state, "qmap"),
])  # fmt: skip
def test_tensors_that_do_not_have_their_parts(tmp_path, change):
    torchao = pytest.importorskip("torchao.optim")
    with quiet():
        model, optimizer = trained(torchao.AdamW8bit)
        change(optimizer.state[model[0].weight]["exp_avg"])
        other = network(1)
        fresh = torchao.AdamW8bit(other.parameters())
        said = "OptimState8bit (cannot be made|does not have the parts)"
        refused(save(tmp_path, model, optimizer), other, fresh, said)


def test_offloaded_state_is_refused(tmp_path):
    """It has a copy of the weights, which resume would not reach, and its own form of state dict."""
    torchao = pytest.importorskip("torchao.optim")
    with quiet():
        model = network()
        # Its constructor needs a GPU.
        optimizer = object.__new__(torchao.CPUOffloadOptimizer)
        inner = {p: torch.optim.AdamW([p]) for p in model.parameters()}
        optimizer.__dict__.update(d_opt=None, d_param_groups=[], optim_dict=inner, queue={}, param_d2h_map={})
        model(torch.ones(2, 64)).sum().backward()
        for each in inner.values():
            each.step()
        path = save(tmp_path, model, optimizer)
        before = copy.deepcopy(optimizer.state_dict())
        with pytest.raises(ResumeError, match="CPUOffloadOptimizer has no state or parameter groups of its own"):
            ckpt8.resume(path, model, optimizer)
        assert same(optimizer.state_dict(), before)


def test_states_follow_the_names(tmp_path):
    bnb = pytest.importorskip("bitsandbytes.optim")
    with quiet():
        model = network()
        optimizer = bnb.AdamW8bit(list(model.named_parameters()), lr=1e-3)
        step(model, optimizer, 0)
        path = save(tmp_path, model, optimizer)
        other = network(1)
        fresh = bnb.AdamW8bit(list(other.named_parameters())[::-1], lr=0.5)
        ckpt8.resume(path, other, fresh)
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            assert same(dict(fresh.state[mine]), dict(optimizer.state[theirs]))
        assert fresh.param_groups[0]["lr"] == 1e-3
        assert fresh.param_groups[0]["param_names"] == [name for name, _ in list(model.named_parameters())[::-1]]
        goes_on((model, optimizer), (other, fresh))


def test_another_shape_is_refused(tmp_path):
    bnb = pytest.importorskip("bitsandbytes.optim")
    with quiet():
        tree = tree_of(*trained(bnb.AdamW8bit))
        states = tree["optimizer"]["state"]
        states[0], states[2] = states[2], states[0]
        said = r"0.weight: its optimizer state was saved with shape \[4, 64\]"
        refused(write(tmp_path, tree), *trained(bnb.AdamW8bit, 1), said)


def test_a_wrapper_of_accelerate_loads_through_it(tmp_path):
    bnb = pytest.importorskip("bitsandbytes.optim")
    accelerate = pytest.importorskip("accelerate")
    with quiet():
        model, optimizer = trained(bnb.AdamW8bit)
        path = save(tmp_path, model, optimizer)
        other = network(1)
        fresh = accelerate.Accelerator(cpu=True).prepare(bnb.AdamW8bit(other.parameters()))
        ckpt8.resume(path, other, fresh)
        assert same(fresh.optimizer.state_dict(), optimizer.state_dict())
        goes_on((model, optimizer), (other, fresh))


class Refuses(torch.optim.SGD):
    """Changes everything that it can before it raises."""

    table = None

    def load_state_dict(self, state_dict):
        self.table = "changed"
        self.param_groups[0]["lr"] = 77.0
        for state in self.state.values():
            state.clear()
        super().load_state_dict(state_dict)
        raise KeyError("no table\nin the state")


class Forgets(Refuses):
    """Raises where state is put in place."""

    load_state_dict = torch.optim.Optimizer.load_state_dict

    def __setstate__(self, state):
        super().__setstate__(state)
        raise KeyError("no table\nin the state")


@pytest.mark.parametrize("kind", [Refuses, Forgets])
def test_what_fails_in_the_optimizer_is_undone(tmp_path, monkeypatch, kind):
    monkeypatch.setattr("ckpt8.optim.known_optimizers.CARDS", {})
    model, other = network(), network(1)
    optimizer, fresh = kind(model.parameters(), lr=0.1, momentum=0.9), kind(other.parameters(), lr=0.2, momentum=0.8)
    step(model, optimizer, 0)
    step(other, fresh, 0)
    path = save(tmp_path, model, optimizer)
    state = fresh.state[other[0].weight]
    refused(path, other, fresh, rf"{kind.__name__} does not take the saved state: KeyError: 'no table")
    assert fresh.table is None
    assert fresh.state[other[0].weight] is state


def test_a_model_that_cannot_be_filled_leaves_the_optimizer(tmp_path, monkeypatch):
    path = save(tmp_path, *trained(torch.optim.AdamW))
    other, fresh = trained(torch.optim.AdamW, 1)
    before = copy.deepcopy(fresh.state_dict())

    def broken(*_):
        raise OSError("the disk is gone")

    monkeypatch.setattr("ckpt8.restoring.resume.resume.copy_of", lambda ref, _: Fill(ref, broken))
    with pytest.raises(InputError, match="the disk is gone"):
        ckpt8.resume(path, other, fresh)
    assert same(fresh.state_dict(), before)


def test_state_of_an_older_torch_takes_the_form_of_today(tmp_path):
    model, optimizer = trained(torch.optim.RMSprop)
    tree = copy.deepcopy(tree_of(model, optimizer))
    for state in tree["optimizer"]["state"].values():
        state["step"] = 1
    del tree["optimizer"]["param_groups"][0]["differentiable"]
    other = network(1)
    fresh = torch.optim.RMSprop(other.parameters())
    ckpt8.resume(write(tmp_path, tree), other, fresh)
    assert all(type(state["step"]) is torch.Tensor for state in fresh.state.values())
    goes_on((model, optimizer), (other, fresh))


def test_the_public_stand_ins(tmp_path):
    torch.save({"args": argparse.Namespace(x=1), "kind": argparse.Namespace, "w": torch.ones(2)}, tmp_path / "run.pt")
    rest = ckpt8.resume(tmp_path / "run.pt")
    assert type(rest["args"]) is ckpt8.Inert
    assert rest["args"].state == {"x": 1}
    assert rest["kind"] == ckpt8.Global("argparse.Namespace")
    assert {"Inert", "Global"} <= set(dir(ckpt8))
    again = pickle.loads(pickle.dumps(rest))
    assert again["kind"] == rest["kind"]
    assert (again["args"].name, again["args"].state) == ("argparse.Namespace", {"x": 1})
    assert b"readers" not in pickle.dumps(rest)


@pytest.mark.by_default("low_bit")
@pytest.mark.parametrize("folder", ["", "low_bit"])
def test_trees_hold_no_other_class_of_ours(inputs, tmp_path, folder):
    files = sorted((inputs / folder).glob("*.pt"))
    assert len(files) > 4
    for file in files:
        assert foreign(ckpt8.resume(file)) <= {"Inert", "Global"}
        ckpt8.compress(file, tmp_path / "a.ckpt8", force=True)
        assert foreign(ckpt8.resume(tmp_path / "a.ckpt8")) <= {"Inert", "Global"}
        for unpack in (False, True):
            try:
                tree = ckpt8.load(tmp_path / "a.ckpt8", unpack=unpack)
            except ckpt8.UnsupportedError:
                continue
            assert not foreign(tree)
