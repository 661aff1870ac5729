"""``load(..., unpack=True)``: from runs of ckpt8.optim to what the published optimizers load."""

from __future__ import annotations

import copy

import pytest
import torch
from resume_kit import OPTIMIZERS, Net, groups, same, train
from test_resume_packed import BF16, FP16, FP32, PACKED, fresh, masters, save

import ckpt8
import ckpt8.optim
from ckpt8.core.errors import ResumeError, UsageError
from ckpt8.optim import state_conversion as convert

PUBLISHED = {
    "AdamW": "torch-adamw",
    "Adam": "torch-adam",
    "StableAdamW": "optimi-stable-adamw",
    "CAME": "came-pytorch",
    "SGD": "torch-sgd-momentum",
    "Lion": "lion-pytorch",
    "Adafactor": "torch-adafactor",
}
NAMES = [name for name, _ in ckpt8.optim.OPTIMIZERS]


@pytest.mark.by_default("CAME-dtype0", "AdamW-dtype2")
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", NAMES)
def test_reloading_is_byte_identical_and_unpacking_gives_the_published_state(tmp_path, name, dtype):
    model, optimizer = fresh(name, dtype)
    train(model, optimizer, 0, 3)
    path = save(tmp_path / "run.ckpt8", model, optimizer, rules=["model.*=lossless"])
    loaded = ckpt8.load(path)
    assert same(loaded["optimizer"], optimizer.state_dict())
    assert same(loaded["model"], model.state_dict())

    plain = ckpt8.load(path, unpack=True)
    assert same(plain["optimizer"], convert.unpack(optimizer.state_dict()))
    full = {key: value.clone() for key, value in masters(model, optimizer).items()}
    for key, value in full.items():
        if optimizer.state.get(dict(model.named_parameters())[key]):
            assert same(plain["model"][key], value), key
    assert plain["model"]["head.weight"].data_ptr() == plain["model"]["embed.weight"].data_ptr()

    live = Net(seed=9)
    live.load_state_dict({key: value.float() for key, value in plain["model"].items()})
    published = OPTIMIZERS[PUBLISHED[name]](groups(live), 0.1)
    published.load_state_dict(plain["optimizer"])
    assert PACKED[PUBLISHED[name]] == name
    train(live, published, 3, 1)
    if dtype == FP32:
        before = full["body.weight"]
        train(model, optimizer, 3, 1)
        moved = model.body.weight.detach() - before
        assert (live.body.weight.detach() - model.body.weight.detach()).norm() <= 0.1 * moved.norm()


def test_what_is_not_packed_stays_as_it_is(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(groups(model))
    train(model, optimizer, 0, 1)
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    assert same(ckpt8.load(path, unpack=True), ckpt8.load(path))


def test_the_state_dict_alone(tmp_path):
    """Also as a file of its own, and inside a list; in fp32 no weight is needed."""
    model, optimizer = fresh("AdamW")
    train(model, optimizer, 0, 2)
    expected = convert.unpack(optimizer.state_dict())
    ckpt8.save(optimizer.state_dict(), tmp_path / "alone.ckpt8")
    assert same(ckpt8.load(tmp_path / "alone.ckpt8", unpack=True), expected)
    ckpt8.save({"optimizer_states": [optimizer.state_dict()]}, tmp_path / "list.ckpt8")
    assert same(ckpt8.load(tmp_path / "list.ckpt8", unpack=True), {"optimizer_states": [expected]})


def test_weights_that_cannot_be_told_are_never_guessed(tmp_path):
    model, optimizer = fresh("AdamW", BF16)
    train(model, optimizer, 0, 2)
    ckpt8.save(optimizer.state_dict(), tmp_path / "alone.ckpt8")
    with pytest.raises(UsageError, match="no state dict of a model"):
        ckpt8.load(tmp_path / "alone.ckpt8", unpack=True)
    several = {
        "one": {"model": model.state_dict()},
        "other": {"model": copy.deepcopy(model.state_dict())},
        "optimizer": optimizer.state_dict(),
    }
    ckpt8.save(several, tmp_path / "several.ckpt8")
    with pytest.raises(UsageError, match="several models"):
        ckpt8.load(tmp_path / "several.ckpt8", unpack=True)


@pytest.mark.slow
def test_an_average_stays_as_it_is(tmp_path):
    model, optimizer = fresh("AdamW", BF16)
    train(model, optimizer, 0, 2)
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    ckpt8.save(tree, tmp_path / "run.ckpt8")
    average = {name: tensor * 0.5 for name, tensor in model.state_dict().items()}
    ckpt8.save({"ema": average, **tree}, tmp_path / "average.ckpt8")
    expected = {"ema": average, **ckpt8.load(tmp_path / "run.ckpt8", unpack=True)}
    assert same(ckpt8.load(tmp_path / "average.ckpt8", unpack=True), expected)


@pytest.mark.slow
def test_two_models_of_two_packed_optimizers(tmp_path):
    """Both have the same shapes; their keys tell which belongs to which, and the checks agree."""
    tree, plain = {}, {}
    for key in "GD":
        model, optimizer = fresh("AdamW", BF16)
        train(model, optimizer, 0, 2 + ord(key) % 3)
        own = {f"net{key}": model.state_dict(), f"opt{key}": optimizer.state_dict()}
        tree |= own
        ckpt8.save({"model": own[f"net{key}"], "optimizer": own[f"opt{key}"]}, tmp_path / "one.ckpt8")
        one = ckpt8.load(tmp_path / "one.ckpt8", unpack=True)
        plain |= {f"net{key}": one["model"], f"opt{key}": one["optimizer"]}
        (tmp_path / "one.ckpt8").unlink()
    ckpt8.save(tree, tmp_path / "both.ckpt8")
    assert same(ckpt8.load(tmp_path / "both.ckpt8", unpack=True), plain)


def test_names_decide_where_the_file_has_them(tmp_path):
    """Two weights of one shape in another order than the model's."""
    model = torch.nn.Sequential(torch.nn.Linear(80, 80, bias=False), torch.nn.Linear(80, 80, bias=False)).to(BF16)
    named = list(model.named_parameters())[::-1]
    optimizer = ckpt8.optim.AdamW(named, lr=0.01)
    for step in range(3):
        model(torch.randn(4, 80, generator=torch.Generator().manual_seed(step)).to(BF16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    ckpt8.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.ckpt8")
    plain = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)
    for key, value in masters(model, optimizer).items():
        assert same(plain["model"][key], value)


def test_a_tuple_cannot_be_changed(tmp_path):
    model, optimizer = fresh("AdamW")
    train(model, optimizer, 0, 1)
    ckpt8.save({"both": (model.state_dict(), optimizer.state_dict())}, tmp_path / "run.ckpt8")
    with pytest.raises(UsageError, match="tuple"):
        ckpt8.load(tmp_path / "run.ckpt8", unpack=True)


def two_layers(dtype, order):
    """Two weights of one shape that have gone different ways, their optimizer without names."""
    model = torch.nn.Sequential(torch.nn.Linear(80, 80, bias=False), torch.nn.Linear(80, 80, bias=False)).to(dtype)
    optimizer = ckpt8.optim.AdamW(list(model.parameters())[::order], lr=0.01)
    for step in range(3):
        inputs = torch.randn(4, 80, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_state_is_never_joined_to_another_weight(tmp_path, dtype):
    model, optimizer = two_layers(dtype, -1)
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    with pytest.raises(UsageError, match="belongs to another weight"):
        ckpt8.load(path, unpack=True)
    live, usual = two_layers(dtype, 1)
    before = copy.deepcopy((live.state_dict(), usual.state_dict()))
    with pytest.raises(ResumeError, match="belongs to another weight"):
        ckpt8.resume(path, live, usual)
    assert same((live.state_dict(), usual.state_dict()), before)
    live, reversed_too = two_layers(dtype, -1)
    ckpt8.resume(path, live, reversed_too)
    assert same(reversed_too.state_dict(), optimizer.state_dict())


def test_a_tied_weight_that_was_saved_twice_is_joined_twice(tmp_path):
    model, _ = fresh("AdamW", BF16)
    optimizer = ckpt8.optim.AdamW(model.named_parameters(), lr=0.01)
    train(model, optimizer, 0, 3)
    clones = {key: value.clone() for key, value in model.state_dict().items()}
    ckpt8.save({"model": clones, "optimizer": optimizer.state_dict()}, tmp_path / "run.ckpt8")
    plain = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)
    assert same(plain["model"]["head.weight"], masters(model, optimizer)["embed.weight"])
    assert plain["model"]["frozen"].dtype == BF16


def test_a_state_dict_that_hangs_in_two_places_is_unpacked_in_both(tmp_path):
    model, optimizer = fresh("AdamW")
    train(model, optimizer, 0, 1)
    state = optimizer.state_dict()
    ckpt8.save({"optimizer": state, "best": {"optimizer": state}}, tmp_path / "run.ckpt8")
    plain = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)
    assert same(plain["optimizer"], convert.unpack(state))
    assert plain["best"]["optimizer"] is plain["optimizer"]


@pytest.mark.parametrize("name", ["StableAdamW", "SGD"])
def test_a_parameter_that_never_took_a_step_has_no_state(tmp_path, name):
    published = OPTIMIZERS[PUBLISHED[name]]
    model = Net()
    optimizer = published(groups(model), 0.01)
    train(model, optimizer, 0, 2)
    model.norm.to(BF16)
    model.frozen.data = model.frozen.data.to(BF16)
    narrow, packed = fresh(name, BF16)
    ckpt8.resume(save(tmp_path / "run.pt", model, optimizer), narrow, packed)
    assert int(packed.state[narrow.unused]["step"]) == 0
    plain = ckpt8.load(save(tmp_path / "again.ckpt8", narrow, packed), unpack=True)
    assert len(plain["optimizer"]["state"]) == len(optimizer.state_dict()["state"])
    assert torch.equal(plain["model"]["unused"], model.unused.detach())


def test_the_meta_device_holds_nothing_to_unpack(tmp_path):
    model, optimizer = fresh("AdamW", BF16)
    train(model, optimizer, 0, 1)
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    with pytest.raises(UsageError, match="meta"):
        ckpt8.load(path, map_location="meta", unpack=True)
