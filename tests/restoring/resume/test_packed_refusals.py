"""What resume into ckpt8.optim refuses, and what it leaves alone, without a byte of model or optimizer changed."""

from __future__ import annotations

import pytest
import torch
from resume_kit import OPTIMIZERS, Net, groups, same, snapshot, train, trained
from test_resume_packed import BF16, FP16, MATRICES, PACKED, fresh, save

import ckpt8
import ckpt8.optim
from ckpt8.core.errors import ResumeError, ResumeWarning
from ckpt8.optim import state_conversion as convert


def refused(path, model, optimizer):
    before = snapshot(model, optimizer)
    with pytest.raises(ResumeError) as found:
        ckpt8.resume(path, model, optimizer)
    assert same(snapshot(model, optimizer), before)
    return str(found.value)


@pytest.mark.by_default(most=4)
@pytest.mark.parametrize("suffix", ["pt", "ckpt8"])
@pytest.mark.parametrize("source", [name for name in OPTIMIZERS if name != "torch-sgd"])
def test_another_class_is_refused(tmp_path, source, suffix):
    model, optimizer = trained(OPTIMIZERS[source])
    path = save(tmp_path / f"run.{suffix}", model, optimizer)
    for name, _ in ckpt8.optim.OPTIMIZERS:
        if PACKED.get(source) != name:
            refused(path, *fresh(name))


@pytest.mark.by_default("CAME")
@pytest.mark.parametrize("source", [name for name, _ in ckpt8.optim.OPTIMIZERS])
def test_packed_state_is_not_taken_by_others(tmp_path, source):
    model, optimizer = fresh(source)
    train(model, optimizer, 0, 2)
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    for name, _ in ckpt8.optim.OPTIMIZERS:
        if name != source:
            assert "rule" in refused(path, *fresh(name))
    for published, name in PACKED.items():
        if name == source:
            live = Net(seed=9)
            assert "unpack=True" in refused(path, live, OPTIMIZERS[published](groups(live), 0.1))


def test_a_residual_needs_the_weights(tmp_path):
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    path = save(tmp_path / "run.pt", model, optimizer)
    narrow, packed = fresh("AdamW", BF16)
    before = snapshot(narrow, packed)
    with pytest.raises(ResumeError, match="model="):
        ckpt8.resume(path, optimizer=packed)
    with pytest.raises(ResumeError, match="float32"):
        ckpt8.resume(path, model=narrow)
    assert same(snapshot(narrow, packed), before)


def test_shapes_and_missing_state_are_named(tmp_path):
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    state = optimizer.state[model.body.weight]
    state["exp_avg_sq"] = state["exp_avg_sq"][:5].clone()
    message = refused(save(tmp_path / "shape.pt", model, optimizer), *fresh("AdamW"))
    assert "body.weight" in message
    assert "exp_avg_sq was saved with shape [5, 72], here it has [72, 72]" in message
    del state["exp_avg_sq"]
    message = refused(save(tmp_path / "missing.pt", model, optimizer), *fresh("AdamW"))
    assert "body.weight" in message
    assert "lacks exp_avg_sq" in message


def test_kahan_compensation_is_not_dropped(tmp_path):
    make = OPTIMIZERS["optimi-stable-adamw"]
    model, optimizer = trained(make, dtype=BF16)
    assert optimizer.state[model.body.weight]["kahan_comp"].shape == model.body.weight.shape
    assert "Kahan" in refused(save(tmp_path / "run.pt", model, optimizer), *fresh("StableAdamW", BF16))


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_without_strict_a_weight_stays_with_what_completes_it(tmp_path, dtype):
    model = Net(dtype=dtype)
    optimizer = torch.optim.SGD(groups(model), lr=0.1)
    train(model, optimizer, 0, 2)
    live, packed = fresh("AdamW", dtype)
    train(live, packed, 0, 2)
    before = snapshot(live, packed)
    with pytest.warns(ResumeWarning, match="cannot change alone"):
        ckpt8.resume(save(tmp_path / "run.pt", model, optimizer), live, packed, strict=False)
    after = snapshot(live, packed)
    assert same(after[1], before[1])
    assert all(same(after[0][key], before[0][key]) for key in MATRICES)
    assert same(after[0]["norm.running_mean"], model.state_dict()["norm.running_mean"])


def test_without_strict_codes_keep_their_codec(tmp_path):
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    live = Net(seed=9)
    extra = torch.nn.Parameter(torch.randn(80, 80))
    named = [*live.named_parameters(), ("extra", extra)]
    packed = ckpt8.optim.AdamW([(name, p) for name, p in named if p.requires_grad])
    extra.grad = torch.randn_like(extra)
    packed.step()
    before = convert.moments_of(packed.state[extra], packed.param_groups[0])
    checkpoint = ckpt8.load(path)
    group = checkpoint["optimizer"]["param_groups"]
    names = [
        [n for n, p in model.named_parameters() if p.requires_grad and (p.dim() >= 2) == wide] for wide in (True, False)
    ]
    for each, own in zip(group, names, strict=True):
        each["param_names"] = own
        each["weight_decay"] = 0.1
    ckpt8.save(checkpoint, path)
    with pytest.warns(ResumeWarning, match="left alone"):
        ckpt8.resume(path, live, packed, strict=False)
    assert same(convert.moments_of(packed.state[extra], packed.param_groups[0]), before)


def test_a_missing_step_is_no_first_step(tmp_path):
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    del optimizer.state[model.body.weight]["step"]
    message = refused(save(tmp_path / "run.pt", model, optimizer), *fresh("AdamW"))
    assert "body.weight: its step is missing" in message


@pytest.mark.parametrize("step", [float("nan"), float("inf"), 2.5, 1e30, "x", True])
def test_a_step_that_is_no_count_is_refused(tmp_path, step):
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    optimizer.state[model.body.weight]["step"] = step if isinstance(step, (str, bool)) else torch.tensor(step)
    assert "not a whole number" in refused(save(tmp_path / "run.pt", model, optimizer), *fresh("AdamW"))


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", None), ("lr", "a"), ("weight_decay", None), ("betas", ("a", 0.9)), ("eps", float("nan")), ("eps", -1.0)],
)
def test_hyperparameters_that_make_no_sense_are_refused(tmp_path, key, value):
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    path = tmp_path / "run.pt"
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint["optimizer"]["param_groups"][0][key] = value
    torch.save(checkpoint, path)
    assert key in refused(path, *fresh("AdamW"))


def test_a_setting_that_makes_another_optimizer_is_refused(tmp_path):
    """LARS keeps what SGD keeps, and steps otherwise."""
    model, optimizer = trained(OPTIMIZERS["torch-sgd-momentum"])
    for group in optimizer.param_groups:
        group["trust_coefficient"] = 1e-3
    path = save(tmp_path / "run.pt", model, optimizer)
    assert "trust_coefficient" in refused(path, *fresh("SGD"))
    live = Net(seed=9)
    assert "trust_coefficient" in refused(path, live, OPTIMIZERS["torch-sgd-momentum"](groups(live), 0.1))


def test_a_state_that_no_group_lists_is_not_dropped(tmp_path):
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    checkpoint["optimizer"]["state"][99] = checkpoint["optimizer"]["state"][0]
    torch.save(checkpoint, tmp_path / "run.pt")
    assert "state of 99" in refused(tmp_path / "run.pt", *fresh("AdamW"))
    live = Net(seed=9)
    assert "state of 99" in refused(tmp_path / "run.pt", live, OPTIMIZERS["torch-adamw"](groups(live), 0.1))
