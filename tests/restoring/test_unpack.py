"""``load(..., unpack=True)``: from runs of ckpt8.optim to what the published optimizers load."""

import copy

import pytest
import torch
from resume_kit import OPTIMIZERS, Net, groups, same, train
from resumed_kit import PACKED, fresh, masters, narrow_rest, refused, save, tree_of

import ckpt8
import ckpt8.optim
from ckpt8.core.errors import UsageError
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
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = [name for name, _ in ckpt8.optim.OPTIMIZERS]


@pytest.mark.by_default("CAME-dtype0", "AdamW-dtype2")
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", NAMES)
def test_reloading_is_byte_identical_and_unpacking_gives_the_published_state(tmp_path, name, dtype):
    model, optimizer = run_of(name, dtype, 3)
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


def run_of(name="AdamW", dtype=FP32, steps=1):
    model, optimizer = fresh(name, dtype)
    train(model, optimizer, 0, steps)
    return model, optimizer


def unpacked(folder, tree):
    """``tree`` in a container, as it is unpacked from there."""
    ckpt8.save(tree, folder / "tree.ckpt8")
    return ckpt8.load(folder / "tree.ckpt8", unpack=True)


def test_what_is_not_packed_stays_as_it_is(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(groups(model))
    train(model, optimizer, 0, 1)
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    assert same(ckpt8.load(path, unpack=True), ckpt8.load(path))


def test_the_state_dict_alone(tmp_path):
    """Also as a file of its own, inside a list, and at two places; in fp32 no weight is needed."""
    _, optimizer = run_of(steps=2)
    state = optimizer.state_dict()
    expected = convert.unpack(optimizer.state_dict())
    assert same(unpacked(tmp_path, state), expected)
    assert same(unpacked(tmp_path, {"optimizer_states": [state]}), {"optimizer_states": [expected]})
    plain = unpacked(tmp_path, {"optimizer": state, "best": {"optimizer": state}})
    assert same(plain["optimizer"], expected)
    assert plain["best"]["optimizer"] is plain["optimizer"]


def test_weights_that_cannot_be_told_are_never_guessed(tmp_path):
    model, optimizer = run_of(dtype=BF16, steps=2)
    with pytest.raises(UsageError, match="no state dict of a model"):
        unpacked(tmp_path, optimizer.state_dict())
    several = {"one": {"model": model.state_dict()}, "other": {"model": copy.deepcopy(model.state_dict())}}
    with pytest.raises(UsageError, match="several models"):
        unpacked(tmp_path, {**several, "optimizer": optimizer.state_dict()})


@pytest.mark.parametrize(("dtype", "options", "said"), [(FP32, {}, "tuple"), (BF16, {"map_location": "meta"}, "meta")])
def test_what_has_no_place_for_it(tmp_path, dtype, options, said):
    """A tuple cannot be changed, and the meta device holds nothing to unpack."""
    states = tree_of(*run_of(dtype=dtype))
    ckpt8.save({"both": tuple(states.values())} if said == "tuple" else states, tmp_path / "run.ckpt8")
    with pytest.raises(UsageError, match=said):
        ckpt8.load(tmp_path / "run.ckpt8", unpack=True, **options)


@pytest.mark.slow
def test_an_average_stays_as_it_is(tmp_path):
    tree = tree_of(*run_of(dtype=BF16, steps=2))
    expected = unpacked(tmp_path, tree)
    average = {name: tensor * 0.5 for name, tensor in tree["model"].items()}
    assert same(unpacked(tmp_path, {"ema": average, **tree}), {"ema": average, **expected})


@pytest.mark.slow
def test_two_models_of_two_packed_optimizers(tmp_path):
    """Both have the same shapes; their keys tell which belongs to which, and the checks agree."""
    tree, plain = {}, {}
    for key in "GD":
        own = tree_of(*run_of(dtype=BF16, steps=2 + ord(key) % 3))
        tree |= {f"net{key}": own["model"], f"opt{key}": own["optimizer"]}
        one = unpacked(tmp_path, own)
        plain |= {f"net{key}": one["model"], f"opt{key}": one["optimizer"]}
    assert same(unpacked(tmp_path, tree), plain)


def two_layers(dtype, order, *, named=False):
    """Two weights of one shape that have gone different ways, and their optimizer, with names or without."""
    model = torch.nn.Sequential(torch.nn.Linear(80, 80, bias=False), torch.nn.Linear(80, 80, bias=False)).to(dtype)
    parameters = model.named_parameters() if named else model.parameters()
    optimizer = ckpt8.optim.AdamW(list(parameters)[::order], lr=0.01)
    for step in range(3):
        inputs = torch.randn(4, 80, generator=torch.Generator().manual_seed(step)).to(dtype)
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def test_names_decide_where_the_file_has_them(tmp_path):
    """Two weights of one shape in another order than the model's."""
    model, optimizer = two_layers(BF16, -1, named=True)
    plain = unpacked(tmp_path, tree_of(model, optimizer))
    for key, value in masters(model, optimizer).items():
        assert same(plain["model"][key], value)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_state_is_never_joined_to_another_weight(tmp_path, dtype):
    model, optimizer = two_layers(dtype, -1)
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    with pytest.raises(UsageError, match="belongs to another weight"):
        ckpt8.load(path, unpack=True)
    live, usual = two_layers(dtype, 1)
    refused(path, live, usual, "belongs to another weight")
    live, reversed_too = two_layers(dtype, -1)
    ckpt8.resume(path, live, reversed_too)
    assert same(reversed_too.state_dict(), optimizer.state_dict())


def test_a_tied_weight_that_was_saved_twice_is_joined_twice(tmp_path):
    model, _ = fresh("AdamW", BF16)
    optimizer = ckpt8.optim.AdamW(model.named_parameters(), lr=0.01)
    train(model, optimizer, 0, 3)
    tree = tree_of(model, optimizer)
    plain = unpacked(tmp_path, tree | {"model": {key: value.clone() for key, value in tree["model"].items()}})
    assert same(plain["model"]["head.weight"], masters(model, optimizer)["embed.weight"])
    assert plain["model"]["frozen"].dtype == BF16


@pytest.mark.parametrize("name", ["StableAdamW", "SGD"])
def test_a_parameter_that_never_took_a_step_has_no_state(tmp_path, name):
    model = Net()
    optimizer = OPTIMIZERS[PUBLISHED[name]](groups(model), 0.01)
    train(model, optimizer, 0, 2)
    narrow_rest(model, BF16)
    narrow, packed = fresh(name, BF16)
    ckpt8.resume(save(tmp_path / "run.pt", model, optimizer), narrow, packed)
    assert int(packed.state[narrow.unused]["step"]) == 0
    plain = ckpt8.load(save(tmp_path / "again.ckpt8", narrow, packed), unpack=True)
    assert len(plain["optimizer"]["state"]) == len(optimizer.state_dict()["state"])
    assert torch.equal(plain["model"]["unused"], model.unused.detach())
