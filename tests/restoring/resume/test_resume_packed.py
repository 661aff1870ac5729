"""Into ckpt8.optim: from files of the published optimizers, raw and compressed, and from its own."""

import copy

import pytest
import torch
from resume_kit import OPTIMIZERS, Net, groups, same, snapshot, train, trained
from resumed_kit import PACKED, fresh, masters, narrow_rest, refused, save, tree_of

import ckpt8
import ckpt8.optim
from ckpt8.codecs.companded8 import Companded8
from ckpt8.core.errors import ResumeError, ResumeWarning
from ckpt8.optim import state_conversion as convert

ADAMW = OPTIMIZERS["torch-adamw"]
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = [name for name, _ in ckpt8.optim.OPTIMIZERS]

NO_STEP = ("torch-sgd-momentum", "optimi-lion", "lion-pytorch")
"""These keep no step: 1 stands for "not the first"."""

MATRICES = ("embed.weight", "conv.weight", "body.weight")
"""What is large enough to be packed."""

BODY = MATRICES.index("body.weight")
"""Its identifier in the groups."""


def into(path, name="AdamW", dtype=FP32, **settings):
    """A model and a packed optimizer that take what is in a file."""
    live, packed = fresh(name, dtype, **settings)
    ckpt8.resume(path, live, packed)
    return live, packed


def pairs(name, *runs):
    """The states of the parameter of a name, in each run."""
    return [optimizer.state[model.get_parameter(name)] for model, optimizer in runs]


def assert_encoded(state, moment, values, codec):
    parts = codec.encode(values)
    assert same(state[f"{moment}_codes"].flatten(), parts["codes"])
    assert same(state[f"{moment}_scales"], parts["scales"])


BY_DEFAULT = [f"{list(PACKED)[at]}-pt" for at in (0, 1, 3, 4, 6, 7, 9)]
BY_DEFAULT += [f"{list(PACKED)[at]}-ckpt8" for at in (0, 3, 7)]


@pytest.mark.by_default(*BY_DEFAULT)
@pytest.mark.parametrize("suffix", ["pt", "ckpt8"])
@pytest.mark.parametrize("source", PACKED)
def test_a_published_run_goes_on(tmp_path, source, suffix):
    """Stored codes are the state, raw moments are encoded; two more steps move the weights as they move there."""
    model, optimizer = trained(OPTIMIZERS[source])
    path = save(tmp_path / f"run.{suffix}", model, optimizer)
    roots = Companded8(signed=False, Q=255, p=0.5) if suffix == "pt" else Companded8(signed=False, Q=255)
    live, packed = fresh(PACKED[source])
    assert ckpt8.resume(path, live, packed) == {"step": 3}
    assert same(live.state_dict(), model.state_dict() if suffix == "pt" else ckpt8.load(path)["model"])
    for name in MATRICES:
        theirs, mine = pairs(name, (model, optimizer), (live, packed))
        assert int(mine["step"]) == (1 if source in NO_STEP else 3)
        for key, values in theirs.items():
            if key in ("exp_avg", "momentum_buffer", "exp_avg_sq") or f"{key}_codes" in mine:
                assert_encoded(mine, key, values, roots if key == "exp_avg_sq" else Companded8())
            assert not key.endswith(("_row", "_col")) or same(mine[key], values)
    for key, value in optimizer.state[model.body.bias].items():
        assert not key.startswith(("exp_avg", "momentum")) or same(packed.state[live.body.bias][key], value)
    group = packed.param_groups[0]
    assert suffix != "pt" or group["moment2"] == {"id": "companded8/1", "signed": False, "Q": 255, "p": 0.5}
    assert group["weight_decay"] == optimizer.param_groups[0]["weight_decay"]
    before = {name: value.clone() for name, value in masters(live, packed).items()}
    train(model, optimizer, 3, 2)
    train(live, packed, 3, 2)
    for name in MATRICES:
        weight = model.get_parameter(name).detach()
        error = masters(live, packed)[name] - weight
        assert error.norm() < 0.12 * (weight - before[name]).norm(), name


@pytest.mark.parametrize("suffix", ["pt", "ckpt8"])
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("source", ["torch-adamw", "came-pytorch", "torch-sgd-momentum"])
def test_wide_weights_go_into_narrow_parameters_and_what_completes_them(tmp_path, source, dtype, suffix):
    model, optimizer = trained(OPTIMIZERS[source])
    with torch.no_grad():
        for buffer in (model.norm.running_mean, model.norm.running_var):
            buffer.copy_(buffer.bfloat16())  # buffers are narrow in a narrow model
    narrow_rest(model, dtype)
    saved = {name: value.detach().float() for name, value in model.named_parameters()}
    path = save(tmp_path / f"run.{suffix}", model, optimizer)
    narrow, packed = into(path, PACKED[source], dtype)
    found = masters(narrow, packed)
    # fp16 parameters are those of the weights as they were stored.
    near = ckpt8.load(path)["model"] if dtype == FP16 and suffix == "ckpt8" else saved
    bound = 0.0 if dtype == FP16 and suffix == "pt" else 1.54e-5
    for name, value in saved.items():
        if name in MATRICES:
            assert same(narrow.get_parameter(name).detach(), near[name].to(dtype)), name
            assert ((found[name] - value).abs() <= bound * value.abs()).all(), name
        else:
            assert torch.equal(found[name], value), name
    train(narrow, packed, 3, 1)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["torch-adamw", "optimi-stable-adamw", "came-pytorch"])
def test_weights_on_a_lattice_go_into_narrow_parameters_and_residuals(tmp_path, source):
    """As their decoded values would, and the run goes on."""
    model, optimizer = trained(OPTIMIZERS[source])
    narrow_rest(model, BF16)
    path = save(tmp_path / "run.ckpt8", model, optimizer, preset="archive")
    narrow, packed = into(path, PACKED[source], BF16)
    found = masters(narrow, packed)
    for name in MATRICES:
        decoded = ckpt8.load(path)["model"][name]
        assert not torch.equal(decoded, model.state_dict()[name])
        assert same(narrow.get_parameter(name).detach(), decoded.bfloat16()), name
        assert ((found[name] - decoded).abs() <= 1.54e-5 * decoded.abs()).all(), name
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
    path = save(tmp_path / "run.ckpt8", *trained(ADAMW), **settings)
    live, packed = into(path)
    group = packed.param_groups[0]
    assert (group["moment1"]["Q"], group["moment2"]["Q"], group["moment2"]["p"]) == (127, 255, 0.5)
    decoded = ckpt8.load(path)["optimizer"]["state"][BODY]
    assert_encoded(packed.state[live.body.weight], "exp_avg", decoded["exp_avg"], Companded8())


def test_what_the_file_keeps_exact_stays_exact(tmp_path):
    """By a rule, or because it was refused; but a lossless file is packed like a raw one."""
    model, optimizer = trained(ADAMW)
    optimizer.state[model.conv.weight]["exp_avg"][0, 0, 0] = float("nan")
    path = save(tmp_path / "run.ckpt8", model, optimizer, rules=["model.body.weight=lossless"])
    model_bf16 = Net(seed=9, dtype=BF16)
    narrow_rest(model_bf16, FP32)
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
    live, plain = into(save(tmp_path / "lossless.ckpt8", model, optimizer, preset="lossless"))
    assert plain.state[live.body.weight]["exp_avg_codes"].dtype == torch.int8


@pytest.mark.parametrize(("unpacked", "name"), [("moment1", "exp_avg"), ("moment2", "exp_avg_sq")])
def test_a_moment_that_the_optimizer_holds_in_fp32_is_decoded(tmp_path, unpacked, name):
    path = save(tmp_path / "run.ckpt8", *trained(ADAMW))
    live, packed = into(path, **{unpacked: "lossless"})
    assert same(packed.state[live.body.weight][name], ckpt8.load(path)["optimizer"]["state"][BODY][name])


def test_strides_do_not_matter(tmp_path):
    """State in another memory format, a slice of a larger storage, and a live parameter that is not contiguous."""
    model, optimizer = trained(ADAMW)
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
@pytest.mark.parametrize("name", NAMES)
def test_a_packed_run_goes_on_bit_for_bit(tmp_path, name, dtype):
    model, optimizer = fresh(name, dtype, seed=3)
    optimizer.param_groups[0]["initial_lr"] = 0.25
    train(model, optimizer, 0, 3)
    path = save(tmp_path / "run.ckpt8", model, optimizer, preset="lossless")
    live, packed = fresh(name, dtype)
    assert ckpt8.resume(path, live, packed) == {"step": 3}
    for steps in (0, 2):
        train(model, optimizer, 3, steps)
        train(live, packed, 3, steps)
        assert same(snapshot(live, packed), snapshot(model, optimizer))


def test_schedulers_find_their_settings(tmp_path):
    model = Net()
    optimizer = torch.optim.AdamW(groups(model), lr=0.004)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=10)
    train(model, optimizer, 0, 1)
    scheduler.step()
    _, packed = into(save(tmp_path / "run.pt", model, optimizer))
    theirs, mine = optimizer.param_groups[0], packed.param_groups[0]
    for key in ("lr", "initial_lr", "max_lr", "min_lr", "betas", "max_momentum"):
        assert mine[key] == theirs[key], key
    again = torch.optim.lr_scheduler.OneCycleLR(packed, max_lr=0.01, total_steps=10, last_epoch=1)
    again.load_state_dict(scheduler.state_dict())
    scheduler.step()
    again.step()
    assert mine["lr"] == theirs["lr"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-12])
@pytest.mark.parametrize("name", ["run.pt", "run.ckpt8"])
def test_what_a_codec_refuses_stays_exact(tmp_path, name, value):
    """But half-precision moments are packed, which a file keeps lossless for their type alone."""
    model, optimizer = trained(ADAMW)
    optimizer.state[model.conv.weight]["exp_avg_sq"][0, 0, 0] = value
    half = optimizer.state[model.body.weight]
    half["exp_avg"] = half["exp_avg"].half()
    live, packed = into(save(tmp_path / name, model, optimizer, preset="lossless"))
    state = packed.state[live.conv.weight]
    assert same(state["exp_avg_sq"], optimizer.state[model.conv.weight]["exp_avg_sq"])
    assert state["exp_avg_codes"].dtype == torch.int8
    live, packed = into(save(tmp_path / name, model, optimizer))
    assert packed.state[live.body.weight]["exp_avg_codes"].dtype == torch.int8


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_a_packed_run_of_wide_parameters_goes_into_narrow_ones(tmp_path, dtype):
    model, optimizer = fresh("AdamW")
    train(model, optimizer, 0, 3)
    narrow_rest(model, dtype)
    narrow, packed = into(save(tmp_path / "run.pt", model, optimizer), dtype=dtype)
    mine, theirs = pairs("body.weight", (narrow, packed), (model, optimizer))
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


# What is refused, and what is left alone


@pytest.mark.by_default(most=4)
@pytest.mark.parametrize("suffix", ["pt", "ckpt8"])
@pytest.mark.parametrize("source", [name for name in OPTIMIZERS if name != "torch-sgd"])
def test_another_class_is_refused(tmp_path, source, suffix):
    path = save(tmp_path / f"run.{suffix}", *trained(OPTIMIZERS[source]))
    for name in NAMES:
        if PACKED.get(source) != name:
            refused(path, *fresh(name), ".")


@pytest.mark.by_default("CAME")
@pytest.mark.parametrize("source", NAMES)
def test_packed_state_is_not_taken_by_others(tmp_path, source):
    model, optimizer = fresh(source)
    train(model, optimizer, 0, 2)
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    for name in NAMES:
        if name != source:
            refused(path, *fresh(name), "rule")
    for published, name in PACKED.items():
        if name == source:
            refused(path, *fresh(OPTIMIZERS[published]), "unpack=True")


def test_a_residual_needs_the_weights(tmp_path):
    path = save(tmp_path / "run.pt", *trained(ADAMW))
    narrow, packed = fresh("AdamW", BF16)
    before = snapshot(narrow, packed)
    with pytest.raises(ResumeError, match="model="):
        ckpt8.resume(path, optimizer=packed)
    with pytest.raises(ResumeError, match="float32"):
        ckpt8.resume(path, model=narrow)
    assert same(snapshot(narrow, packed), before)


def test_kahan_compensation_is_not_dropped(tmp_path):
    model, optimizer = trained(OPTIMIZERS["optimi-stable-adamw"], dtype=BF16)
    assert optimizer.state[model.body.weight]["kahan_comp"].shape == model.body.weight.shape
    refused(save(tmp_path / "run.pt", model, optimizer), *fresh("StableAdamW", BF16), "Kahan")


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
    model, optimizer = trained(ADAMW)
    path = save(tmp_path / "run.ckpt8", model, optimizer)
    live = Net(seed=9)
    extra = torch.nn.Parameter(torch.randn(80, 80))
    named = [*live.named_parameters(), ("extra", extra)]
    packed = ckpt8.optim.AdamW([(name, p) for name, p in named if p.requires_grad])
    extra.grad = torch.randn_like(extra)
    packed.step()
    before = convert.moments_of(packed.state[extra], packed.param_groups[0])
    checkpoint = ckpt8.load(path)
    for saved, own in zip(checkpoint["optimizer"]["param_groups"], groups(model, named=True), strict=True):
        saved |= {"param_names": [name for name, _ in own["params"]], "weight_decay": 0.1}
    ckpt8.save(checkpoint, path)
    with pytest.warns(ResumeWarning, match="left alone"):
        ckpt8.resume(path, live, packed, strict=False)
    assert same(convert.moments_of(packed.state[extra], packed.param_groups[0]), before)


STATES = [
    ({"step": None}, "its step is missing"),
    ({"exp_avg_sq": None}, "lacks exp_avg_sq"),
    ({"exp_avg_sq": torch.zeros(5, 72)}, r"exp_avg_sq was saved with shape \[5, 72\], here it has \[72, 72\]"),
    *(
        ({"step": step}, "not a whole number")
        for step in (*map(torch.tensor, (float("nan"), float("inf"), 2.5, 1e30)), "x", True)
    ),
]


@pytest.mark.parametrize(("change", "said"), STATES)
def test_a_state_that_makes_no_sense_is_named(tmp_path, change, said):
    """Also a step: one that is missing is no first step."""
    model, optimizer = trained(ADAMW)
    state = optimizer.state[model.body.weight]
    for key, value in (state | change).items():
        if value is None:
            del state[key]
        else:
            state[key] = value
    refused(save(tmp_path / "run.pt", model, optimizer), *fresh("AdamW"), f"body.weight: .*{said}")


@pytest.mark.parametrize(
    ("key", "value"),
    [("lr", None), ("lr", "a"), ("weight_decay", None), ("betas", ("a", 0.9)), ("eps", float("nan")), ("eps", -1.0)],
)
def test_hyperparameters_that_make_no_sense_are_refused(tmp_path, key, value):
    checkpoint = tree_of(*trained(ADAMW))
    checkpoint["optimizer"]["param_groups"][0][key] = value
    torch.save(checkpoint, tmp_path / "run.pt")
    refused(tmp_path / "run.pt", *fresh("AdamW"), key)


def test_a_setting_that_makes_another_optimizer_is_refused(tmp_path):
    """LARS keeps what SGD keeps, and steps otherwise."""
    make = OPTIMIZERS["torch-sgd-momentum"]
    model, optimizer = trained(make)
    for group in optimizer.param_groups:
        group["trust_coefficient"] = 1e-3
    for live in (fresh("SGD"), fresh(make)):
        refused(save(tmp_path / "run.pt", model, optimizer), *live, "trust_coefficient")


def test_a_state_that_no_group_lists_is_not_dropped(tmp_path):
    checkpoint = tree_of(*trained(ADAMW))
    checkpoint["optimizer"]["state"][99] = checkpoint["optimizer"]["state"][0]
    torch.save(checkpoint, tmp_path / "run.pt")
    for live in (fresh("AdamW"), fresh(ADAMW)):
        refused(tmp_path / "run.pt", *live, "state of 99")
