"""Into ckpt8.optim: from files of the published optimizers, raw and compressed, and from its own."""

from __future__ import annotations

import copy

import pytest
import torch
from resume_kit import OPTIMIZERS, Net, groups, same, snapshot, train, trained

import ckpt8
import ckpt8.optim
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.split24 import Split24, Split32
from ckpt8.optim import state_conversion as convert

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
PACKED = {
    "torch-adamw": "AdamW",
    "torch-adam": "Adam",
    "torch-sgd-momentum": "SGD",
    "optimi-stable-adamw": "StableAdamW",
    "pytorch-optimizer-stable-adamw": "StableAdamW",
    "came-pytorch": "CAME",
    "pytorch-optimizer-came": "CAME",
    "optimi-lion": "Lion",
    "pytorch-optimizer-lion": "Lion",
    "lion-pytorch": "Lion",
    "torch-adafactor": "Adafactor",
}
"""Published optimizer to packed class."""

NO_STEP = ("torch-sgd-momentum", "optimi-lion", "lion-pytorch")
"""These keep no step: 1 stands for "not the first"."""

MATRICES = ("embed.weight", "conv.weight", "body.weight")
"""What is large enough to be packed."""


def save(path, model, optimizer, **settings):
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    if path.suffix == ".pt":
        torch.save(checkpoint, path)
    else:
        ckpt8.save(checkpoint, path, **settings)
    return path


def fresh(name, dtype=FP32, **settings):
    model = Net(seed=9, dtype=dtype)
    lr = 0.5 if name == "SGD" else 0.004
    more = {"momentum": 0.5} if name == "SGD" else {}
    return model, getattr(ckpt8.optim, name)(groups(model), lr=lr, **more, **settings)


def params(model):
    return dict(model.named_parameters())


def masters(model, optimizer):
    """The weights in full, by name."""
    found = {}
    for name, param in params(model).items():
        state = optimizer.state.get(param) or {}
        part = state.get("residual", state.get("master"))
        codec = Split32() if part is not None and part.dtype == torch.int16 else Split24()
        found[name] = param.detach().float() if part is None else convert.join_weight(param, part, codec)
    return found


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("source", PACKED)
def test_stored_codes_are_the_state(tmp_path, source):
    model, optimizer = trained(OPTIMIZERS[source])
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    live, packed = fresh(PACKED[source])
    assert ckpt8.resume(path, live, packed) == {"step": 3}
    assert same(live.state_dict(), ckpt8.load(path)["model"])
    for name in MATRICES:
        theirs = optimizer.state[params(model)[name]]
        mine = packed.state[params(live)[name]]
        assert int(mine["step"]) == (1 if source in NO_STEP else 3)
        for moment in ("exp_avg", "momentum_buffer", "exp_avg_sq"):
            if moment not in theirs:
                continue
            codec = Companded8(signed=False, Q=255) if moment == "exp_avg_sq" else Companded8()
            parts = codec.encode(theirs[moment])
            assert same(mine[f"{moment}_codes"].flatten(), parts["codes"])
            assert same(mine[f"{moment}_scales"], parts["scales"])
        for key in theirs:
            if key.endswith(("_row", "_col")):
                assert same(mine[key], theirs[key])
    small = packed.state[live.body.bias]
    for key, value in optimizer.state[model.body.bias].items():
        if key.startswith(("exp_avg", "momentum")):
            assert same(small[key], value)
    train(live, packed, 3, 2)


@pytest.mark.by_default(most=7)
@pytest.mark.parametrize("source", PACKED)
def test_a_raw_checkpoint_is_packed_on_the_way(tmp_path, source):
    model, optimizer = trained(OPTIMIZERS[source])
    live, packed = fresh(PACKED[source])
    ckpt8.resume(save(tmp_path / "run.pt", model, optimizer), live, packed)
    assert same(live.state_dict(), model.state_dict())
    for name in MATRICES:
        mine = packed.state[params(live)[name]]
        for moment, values in optimizer.state[params(model)[name]].items():
            if f"{moment}_codes" in mine:
                codec = Companded8(signed=False, Q=255, p=0.5) if moment == "exp_avg_sq" else Companded8()
                parts = codec.encode(values)
                assert same(mine[f"{moment}_codes"].flatten(), parts["codes"])
                assert same(mine[f"{moment}_scales"], parts["scales"])
    group = packed.param_groups[0]
    assert group["moment2"] == {"id": "companded8/1", "signed": False, "Q": 255, "p": 0.5}
    assert group["weight_decay"] == optimizer.param_groups[0]["weight_decay"]


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("suffix", ["pt", "ckpt8"])
@pytest.mark.parametrize("source", PACKED)
def test_the_run_goes_on(tmp_path, source, suffix):
    """Two more steps move the weights as the published optimizer moves them."""
    model, optimizer = trained(OPTIMIZERS[source])
    path = save(tmp_path / f"run.{suffix}", model, optimizer)
    live, packed = fresh(PACKED[source])
    ckpt8.resume(path, live, packed)
    before = {name: value.clone() for name, value in masters(live, packed).items()}
    train(model, optimizer, 3, 2)
    train(live, packed, 3, 2)
    for name in MATRICES:
        moved = params(model)[name].detach() - before[name]
        error = masters(live, packed)[name] - params(model)[name].detach()
        assert error.norm() < 0.12 * moved.norm(), name


@pytest.mark.parametrize("suffix", ["pt", "ckpt8"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("source", ["torch-adamw", "came-pytorch", "torch-sgd-momentum"])
def test_wide_weights_go_into_narrow_parameters_and_what_completes_them(tmp_path, source, dtype, suffix):
    model, optimizer = trained(OPTIMIZERS[source])
    with torch.no_grad():
        model.norm.running_mean.copy_(model.norm.running_mean.bfloat16())  # buffers are narrow in a narrow model
        model.norm.running_var.copy_(model.norm.running_var.bfloat16())
    narrow = Net(seed=9, dtype=dtype)
    model.norm.to(dtype)
    model.frozen.data = model.frozen.data.to(dtype)
    saved = {name: value.detach().float() for name, value in model.named_parameters()}
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    path = tmp_path / f"run.{suffix}"
    (torch.save if suffix == "pt" else ckpt8.save)(checkpoint, path)
    packed = getattr(ckpt8.optim, PACKED[source])(groups(narrow), lr=0.1)
    ckpt8.resume(path, narrow, packed)
    found = masters(narrow, packed)
    for name, value in saved.items():
        if name in MATRICES:
            near = value.to(dtype)
            if dtype == FP16 and suffix == "ckpt8":  # of the weights as they were stored
                near = ckpt8.load(path)["model"][name].to(dtype)
            assert same(params(narrow)[name].detach(), near), name
            bound = 0.0 if dtype == FP16 and suffix == "pt" else 1.54e-5
            assert ((found[name] - value).abs() <= bound * value.abs()).all(), name
        else:
            assert torch.equal(found[name], value), name
    train(narrow, packed, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["torch-adamw", "optimi-stable-adamw", "came-pytorch"])
def test_weights_on_a_lattice_go_into_narrow_parameters_and_residuals(tmp_path, source):
    """As their decoded values would, and the run goes on."""
    model, optimizer = trained(OPTIMIZERS[source])
    model.norm.to(BF16)
    model.frozen.data = model.frozen.data.to(BF16)
    path = save(tmp_path / "run.ckpt8", model, optimizer, preset="archive")
    narrow, packed = fresh(PACKED[source], BF16)
    ckpt8.resume(path, narrow, packed)
    decoded = ckpt8.load(path)["model"]
    found = masters(narrow, packed)
    for name in MATRICES:
        assert not torch.equal(decoded[name], model.state_dict()[name])
        assert same(params(narrow)[name].detach(), decoded[name].bfloat16()), name
        assert ((found[name] - decoded[name]).abs() <= 1.54e-5 * decoded[name].abs()).all(), name
    train(narrow, packed, 3, 2)


FEWER_LEVELS = [
    "*.exp_avg=companded8(Q=31)",
    "*.exp_avg_sq=companded8(signed=False, Q=63, p=0.5)",
    "model.*weight=split24(R=7)",
]
"""What the preset compact of older files is made of."""


@pytest.mark.by_default("settings3")
@pytest.mark.parametrize(
    "settings", [{"rules": FEWER_LEVELS}, {"preset": "compact"}, {"preset": "archive"}, {"budget": 5}]
)
def test_what_the_optimizer_cannot_hold_is_encoded_anew(tmp_path, settings):
    """Fewer levels than it has, and codes on a lattice."""
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    path = save(tmp_path / "run.ckpt8", model, optimizer, **settings)
    live, packed = fresh("AdamW")
    ckpt8.resume(path, live, packed)
    group = packed.param_groups[0]
    assert (group["moment1"]["Q"], group["moment2"]["Q"], group["moment2"]["p"]) == (127, 255, 0.5)
    decoded = ckpt8.load(path)["optimizer"]["state"]
    order = [p for g in optimizer.param_groups for p in g["params"]]
    index = next(i for i, p in enumerate(order) if p is model.body.weight)
    parts = Companded8().encode(decoded[index]["exp_avg"])
    assert same(packed.state[live.body.weight]["exp_avg_codes"].flatten(), parts["codes"])


def test_what_the_file_keeps_exact_stays_exact(tmp_path):
    """By a rule, or because it was refused; but a lossless file is packed like a raw one."""
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    optimizer.state[model.conv.weight]["exp_avg"][0, 0, 0] = float("nan")
    path = save(tmp_path / "run.ckpt8", model, optimizer, rules=["model.body.weight=lossless"])
    model_bf16 = Net(seed=9, dtype=BF16)
    model_bf16.norm.float()
    model_bf16.frozen.data = model_bf16.frozen.data.float()
    packed = ckpt8.optim.AdamW(groups(model_bf16))
    ckpt8.resume(path, model_bf16, packed)
    assert same(packed.state[model_bf16.conv.weight]["exp_avg"], optimizer.state[model.conv.weight]["exp_avg"])
    assert packed.state[model_bf16.embed.weight]["exp_avg_sq_codes"].dtype == torch.uint8
    assert packed.state[model_bf16.body.weight]["residual"].dtype == torch.int16
    assert torch.equal(masters(model_bf16, packed)["body.weight"], model.body.weight.detach())
    saved = copy.deepcopy(packed.state_dict())
    again = ckpt8.optim.AdamW(groups(model_bf16))
    again.load_state_dict(saved)
    assert same(again.state_dict(), saved)
    train(model_bf16, packed, 3, 1)

    optimizer.state[model.conv.weight]["exp_avg"].nan_to_num_(0.0)
    live, plain = fresh("AdamW")
    ckpt8.resume(save(tmp_path / "lossless.ckpt8", model, optimizer, preset="lossless"), live, plain)
    assert plain.state[live.body.weight]["exp_avg_codes"].dtype == torch.int8


@pytest.mark.parametrize("unpacked", ["moment1", "moment2"])
def test_a_moment_that_the_optimizer_holds_in_fp32_is_decoded(tmp_path, unpacked):
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    live, packed = fresh("AdamW", **{unpacked: "lossless"})
    ckpt8.resume(path, live, packed)
    name = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}[unpacked]
    order = [p for g in optimizer.param_groups for p in g["params"]]
    index = next(i for i, p in enumerate(order) if p is model.body.weight)
    assert same(packed.state[live.body.weight][name], ckpt8.load(path)["optimizer"]["state"][index][name])


def test_strides_do_not_matter(tmp_path):
    """State in another memory format, a slice of a larger storage, and a live parameter that is not contiguous."""
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    state = optimizer.state[model.conv.weight]
    expected = Companded8().encode(state["exp_avg"].contiguous())
    state["exp_avg"] = state["exp_avg"].permute(2, 0, 1).contiguous().permute(1, 2, 0)
    bias = torch.zeros(7 + state["exp_avg_sq"].numel())
    bias[7:] = state["exp_avg_sq"].flatten()
    roots = Companded8(signed=False, Q=255, p=0.5).encode(state["exp_avg_sq"])
    state["exp_avg_sq"] = bias[7:].view(state["exp_avg"].shape)
    path = save(tmp_path / "run.pt", model, optimizer)
    live, packed = fresh("AdamW")
    live.body.weight.data = live.body.weight.data.t().contiguous().t()
    ckpt8.resume(path, live, packed)
    assert same(packed.state[live.conv.weight]["exp_avg_codes"].flatten(), expected["codes"])
    assert same(packed.state[live.conv.weight]["exp_avg_sq_codes"].flatten(), roots["codes"])
    assert torch.equal(live.body.weight, model.body.weight)


@pytest.mark.by_default("CAME-dtype0", "Adafactor-dtype0")
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
@pytest.mark.parametrize("name", [name for name, _ in ckpt8.optim.OPTIMIZERS])
def test_a_packed_run_goes_on_bit_for_bit(tmp_path, name, dtype):
    model, optimizer = fresh(name, dtype, seed=3)
    optimizer.param_groups[0]["initial_lr"] = 0.25
    train(model, optimizer, 0, 3)
    path = save(tmp_path / "run.ckpt8", model, optimizer, preset="lossless")
    live, packed = fresh(name, dtype)
    assert ckpt8.resume(path, live, packed) == {"step": 3}
    assert same(snapshot(live, packed), snapshot(model, optimizer))
    train(model, optimizer, 3, 2)
    train(live, packed, 3, 2)
    assert same(snapshot(live, packed), snapshot(model, optimizer))


def test_schedulers_find_their_settings(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.004)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    train(model, optimizer, 0, 1)
    scheduler.step()
    path = save(tmp_path / "run.pt", model, optimizer)
    live, packed = fresh("AdamW")
    ckpt8.resume(path, live, packed)
    theirs, mine = optimizer.param_groups[0], packed.param_groups[0]
    for key in ("lr", "initial_lr", "max_lr", "min_lr", "betas", "max_momentum"):
        assert mine[key] == theirs[key], key
    again = torch.optim.lr_scheduler.OneCycleLR(packed, max_lr=0.01, total_steps=10, last_epoch=1)
    again.load_state_dict(scheduler.state_dict())
    scheduler.step()
    again.step()
    assert mine["lr"] == theirs["lr"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-12])
@pytest.mark.parametrize("form", ["pt", "lossless"])
def test_what_a_codec_refuses_stays_exact(tmp_path, form, value):
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    optimizer.state[model.conv.weight]["exp_avg_sq"][0, 0, 0] = value
    settings = {} if form == "pt" else {"preset": "lossless"}
    path = save(tmp_path / ("run.pt" if form == "pt" else "run.ckpt8"), model, optimizer, **settings)
    live, packed = fresh("AdamW")
    ckpt8.resume(path, live, packed)
    state = packed.state[live.conv.weight]
    assert same(state["exp_avg_sq"], optimizer.state[model.conv.weight]["exp_avg_sq"])
    assert state["exp_avg_codes"].dtype == torch.int8


def test_half_precision_moments_are_packed_from_any_file(tmp_path):
    """A file keeps them lossless for their type alone."""
    model, optimizer = trained(OPTIMIZERS["torch-adamw"])
    state = optimizer.state[model.body.weight]
    state["exp_avg"] = state["exp_avg"].half()
    for path in (tmp_path / "run.pt", tmp_path / "run.ckpt8"):
        live, packed = fresh("AdamW")
        ckpt8.resume(save(path, model, optimizer), live, packed)
        assert packed.state[live.body.weight]["exp_avg_codes"].dtype == torch.int8


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_packed_run_of_wide_parameters_goes_into_narrow_ones(tmp_path, dtype):
    model, optimizer = fresh("AdamW")
    train(model, optimizer, 0, 3)
    model.norm.to(dtype)
    model.frozen.data = model.frozen.data.to(dtype)
    narrow, packed = fresh("AdamW", dtype)
    ckpt8.resume(save(tmp_path / "run.pt", model, optimizer), narrow, packed)
    mine, theirs = packed.state[narrow.body.weight], optimizer.state[model.body.weight]
    assert same(mine["exp_avg_codes"], theirs["exp_avg_codes"])
    error = masters(narrow, packed)["body.weight"] - model.body.weight.detach()
    assert (error.abs() <= 1.54e-5 * model.body.weight.detach().abs()).all()


def test_groups_of_equal_settings_may_be_merged(tmp_path):
    """What a group says of its parameters does not make it another."""
    model = Net(dtype=BF16)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = ckpt8.optim.AdamW([{"params": named[:3]}, {"params": named[3:]}], lr=0.01)
    train(model, optimizer, 0, 3)
    live = Net(seed=9, dtype=BF16)
    packed = ckpt8.optim.AdamW([(name, p) for name, p in live.named_parameters() if p.requires_grad], lr=0.01)
    ckpt8.resume(save(tmp_path / "run.pt", model, optimizer), live, packed)
    assert same(live.state_dict(), model.state_dict())
    for (_, mine), (_, theirs) in zip(live.named_parameters(), model.named_parameters(), strict=True):
        assert same(dict(packed.state.get(mine) or {}), dict(optimizer.state.get(theirs) or {}))
