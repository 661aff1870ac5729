"""The run goes on as if it had not been interrupted: bit for bit, for every optimizer."""

import pytest
import torch
from resume_kit import OPTIMIZERS, Net, groups, same, snapshot, train, trained
from resumed_kit import tree_of, write

import ckpt8

HALF = ("torch-adamw", "optimi-stable-adamw", "came-pytorch", "pytorch-optimizer-stable-adamw")


@pytest.mark.parametrize(
    ("name", "form", "dtype"),
    [
        *((name, form, torch.float32) for form in ("raw", "lossless") for name in OPTIMIZERS),
        *((name, "lossless", torch.bfloat16) for name in HALF),
    ],
)
def test_training_continues_bit_for_bit(tmp_path, name, form, dtype):
    make = OPTIMIZERS[name]
    model, optimizer = trained(make, dtype=dtype)
    path = write(tmp_path, tree_of(model, optimizer, step=3), form)
    saved = snapshot(model, optimizer)
    train(model, optimizer, 3, 3)
    other = Net(seed=1, dtype=dtype)
    fresh = make(groups(other), 0.001)
    before = {name: p.data_ptr() for name, p in other.named_parameters()}
    assert ckpt8.resume(path, other, fresh) == {"step": 3}
    assert same(snapshot(other, fresh), saved)
    assert {name: p.data_ptr() for name, p in other.named_parameters()} == before
    train(other, fresh, 3, 3)
    assert same(snapshot(other, fresh), snapshot(model, optimizer))
    assert not same(snapshot(other, fresh), saved)


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("preset", ["flash", "compact", "archive"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_gives_what_load_and_restore_give(tmp_path, name, preset):
    make = OPTIMIZERS[name]
    model, optimizer = trained(make)
    path = write(tmp_path, tree_of(model, optimizer), preset)
    loaded = ckpt8.load(path)
    other = Net(seed=1)
    fresh = make(groups(other), 0.001)
    ckpt8.resume(path, other, fresh)
    assert same(dict(other.state_dict()), dict(loaded["model"]))
    assert same(fresh.state_dict(), loaded["optimizer"])
    assert same(torch.load(ckpt8.restore(path, tmp_path / "back.pt"), weights_only=True), loaded)
    assert not same(dict(other.state_dict()), dict(model.state_dict()))


def test_state_does_not_alias_and_replaces_what_was_there(tmp_path):
    make = OPTIMIZERS["torch-adamw"]
    path = write(tmp_path, tree_of(*trained(make)))
    model, optimizer = trained(make, 5, seed=2)
    old = {p: state["exp_avg"] for p, state in optimizer.state.items()}
    kept = {p: t.clone() for p, t in old.items()}
    optimizer.state[model.unused] = {"step": torch.tensor(9.0)}
    ckpt8.resume(path, model, optimizer)
    assert model.unused not in optimizer.state
    assert len({state["exp_avg"].data_ptr() for state in optimizer.state.values()}) == len(old)
    assert all(torch.equal(old[p], kept[p]) for p in old)


@pytest.mark.parametrize("step", [3, torch.tensor(3), torch.tensor(3.0)])
def test_the_step_takes_the_form_that_the_optimizer_expects(tmp_path, step):
    for name, kind in (("torch-adamw", torch.Tensor), ("came-pytorch", int)):
        make = OPTIMIZERS[name]
        model, optimizer = trained(make)
        tree = tree_of(model, optimizer)
        for entry in tree["optimizer"]["state"].values():
            entry["step"] = step
        ckpt8.resume(write(tmp_path, tree), model, optimizer)
        found = [entry["step"] for entry in optimizer.state.values()]
        assert all(type(each) is kind and each == 3 for each in found)
        assert kind is int or {each.dtype for each in found} == {torch.float32}


def test_a_wide_state_keeps_its_type_under_a_stranger(tmp_path):
    """What load_state_dict would ruin: int8 codes, 16-bit scales, float32 moments of bfloat16 parameters."""

    class Stranger(torch.optim.Optimizer):
        def __init__(self, params, lr):
            super().__init__(params, {"lr": lr})

    model = Net(dtype=torch.bfloat16)
    optimizer = Stranger(model.parameters(), 0.1)
    for p in model.parameters():
        optimizer.state[p] = {
            "codes": torch.randint(-128, 128, p.shape, dtype=torch.int8),
            "scales": torch.randn(3).half(),
            "exp_avg": torch.randn(p.shape),
            "step": torch.tensor(10_001, dtype=torch.int64),
        }
    path = write(tmp_path, tree_of(model, optimizer), "lossless")
    saved = snapshot(model, optimizer)
    other = Net(seed=1, dtype=torch.bfloat16)
    fresh = Stranger(other.parameters(), 0.2)
    ckpt8.resume(path, other, fresh)
    assert same(snapshot(other, fresh), saved)
