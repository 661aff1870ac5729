"""Runs of ckpt8.optim, kept packed or unpacked as ``load(unpack=True)`` does it, and flashoptim's layout.

Its oracle is pytorch_optimizer's FlashAdamW, which has the same encoding.
"""

import warnings

import pytest
import torch
from converting_kit import assert_trees_equal, checkpoint, trained, trainer_directory, two_layers, written
from safetensors.torch import load_file

import ckpt8
from ckpt8.converting.writers.flashoptim import error_bits, quantize
from ckpt8.core.errors import InputError, UsageError
from ckpt8.optim.state_conversion import join_weight, moments_of

OPTIMIZERS = ["AdamW", "StableAdamW", "CAME", "SGD", "Lion", "Adafactor"]
SETTINGS = {"SGD": {"lr": 0.1, "momentum": 0.9}}


@pytest.fixture(params=OPTIMIZERS)
def packed(request, tmp_path):
    run = trained(getattr(ckpt8.optim, request.param), dtype=torch.bfloat16, **SETTINGS.get(request.param, {}))
    torch.save(checkpoint(*run), tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    return run


@pytest.mark.by_default("AdamW-run.pt", "CAME-run.pt", "SGD-run.ckpt8", "Lion-run.pt")
@pytest.mark.parametrize("source", ["run.pt", "run.ckpt8"])
def test_float32_unpacks_it(source, packed, tmp_path):
    ckpt8.convert(tmp_path / source, tmp_path / "x.pt", dtype="float32")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    expected = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)
    # What was never completed by a residual is cast; buffers stay.
    expected["model"] = {
        name: tensor.float() if tensor.is_floating_point() and "running" not in name else tensor
        for name, tensor in expected["model"].items()
    }
    found["model"] = dict(found["model"])
    assert_trees_equal(found, expected)


@pytest.mark.by_default("CAME", "SGD", "Lion")
def test_a_trainer_directory_has_it_unpacked(packed, tmp_path):
    ckpt8.convert(tmp_path / "run.ckpt8", tmp_path / "out", to="trainer")
    expected = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)
    found = torch.load(tmp_path / "out" / "optimizer.pt", weights_only=True)
    assert_trees_equal(found, expected["optimizer"])
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert set(expected["model"]) - set(weights) == {"lm_head.weight"}
    assert all(torch.equal(tensor, expected["model"][name]) for name, tensor in weights.items())


def test_weights_of_a_directory_are_told_by_their_checks(tmp_path):
    """Sorted by name, with three vectors of one shape: order says nothing, the sums over their bits do."""
    run = trained(ckpt8.optim.AdamW, dtype=torch.bfloat16)
    folder = trainer_directory(tmp_path / "checkpoint-3", *run)
    torch.save(checkpoint(*run), tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    expected = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)["model"]
    ckpt8.convert(folder, tmp_path / "x.safetensors", dtype="float32")
    found = load_file(tmp_path / "x.safetensors")
    for name, param in run[0].named_parameters():
        assert torch.equal(found[name], expected[name])
        assert torch.equal(found[name].bfloat16(), param.detach())


def test_weights_that_changed_since_are_refused(tmp_path):
    tree = checkpoint(*trained(ckpt8.optim.AdamW, dtype=torch.bfloat16))
    tree["model"]["up.weight"][3, 5] += 1
    for target in ("x.pt", "x.safetensors"):
        with pytest.raises(UsageError, match="completes no weight"):
            written(tree, tmp_path, target, dtype="float32")
    written(tree, tmp_path, "x.safetensors")


def test_a_malformed_packed_state_is_refused(tmp_path):
    model, optimizer = trained(ckpt8.optim.AdamW)
    for change in (
        lambda state, group: state.update(exp_avg_scales=torch.zeros(1, dtype=torch.uint16)),
        lambda state, group: state.pop("exp_avg_scales"),
        lambda state, group: state.update(step="x"),
        lambda state, group: state.update(exp_avg_codes=3),
        lambda state, group: group.update(moment1=5),
        lambda state, group: group.update(params=7),
        lambda state, group: group.update(betas=3, rule="stable_adamw"),
    ):
        tree = checkpoint(model, optimizer)
        tree["optimizer"] = {
            "state": {key: dict(value) for key, value in tree["optimizer"]["state"].items()},
            "param_groups": [dict(group) for group in tree["optimizer"]["param_groups"]],
        }
        change(tree["optimizer"]["state"][0], tree["optimizer"]["param_groups"][0])
        with pytest.raises((InputError, UsageError)) as caught:
            written(tree, tmp_path, "out", to="trainer")
        assert "\n" not in str(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from pytorch_optimizer.optimizer import flash_adamw as oracle


def values(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(70, 97, generator=generator) * torch.exp(torch.randn(70, 97, generator=generator)) * 1e-2


def assert_codes_agree(ours, theirs):
    """Where torch's own root is a step off, a code at a tie may be too."""
    difference = (ours.int() - theirs.int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference == 0).double().mean()) > 0.999


def test_codes_scales_and_residuals_are_the_oracles():
    for moment, x in (("exp_avg", values()), ("exp_avg_sq", values().square())):
        theirs = oracle.quantize_state(x, *oracle._state_spec(moment))
        codes, scales = quantize(moment, x)
        assert torch.equal(scales, theirs[1])
        assert_codes_agree(codes, theirs[0])
    for param in (values(1).bfloat16(), values(1).half()):
        assert torch.equal(error_bits(values(1), param), oracle.compute_ecc_bits(values(1), param, 3))


def converted(tree, tmp_path, **options):
    return torch.load(written(tree, tmp_path, "flash.pt", to="flashoptim", **options)[0], weights_only=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adam])
def test_what_is_written_is_the_oracles(make, dtype, tmp_path):
    model, optimizer = trained(make)
    found = converted(checkpoint(model, optimizer), tmp_path, dtype=dtype)
    kind = getattr(torch, dtype)
    assert found["iter_num"] == 3
    group = found["optimizer"]["param_groups"][0]
    assert group["master_bytewidth"] == (0 if dtype == "float32" else 3)
    assert (group["quantize"], group["initial_lr"], group["lr"]) == (True, 1e-3, 1e-3)
    for i, (name, param) in enumerate(model.named_parameters()):
        state, saved = found["optimizer"]["state"][i], optimizer.state[param]
        assert (state["step"].dtype, int(state["step"])) == (torch.int64, 3)
        for moment in ("exp_avg", "exp_avg_sq"):
            codes, scales = oracle.quantize_state(saved[moment], *oracle._state_spec(moment))
            theirs = state[f"{moment}::scales"].view(torch.float16)
            assert state[f"{moment}::scales"].dtype is (torch.bfloat16 if dtype == "bfloat16" else torch.float16)
            # Where torch's own root is a step off, a scale at a tie may be too.
            torch.testing.assert_close(theirs, scales, rtol=0 if moment == "exp_avg" else 1e-3, atol=0)
            assert_codes_agree(state[f"{moment}::quantized"], codes)
        weight = found["model"][name]
        assert weight.dtype is kind
        assert torch.equal(weight, param.detach().to(kind))
        if dtype == "float32":
            assert "error_bits" not in state
        else:
            bits = oracle.compute_ecc_bits(param.detach(), weight, 3)
            assert torch.equal(state["error_bits"], bits.to(kind))
            full = oracle.reconstruct_fp32_param(weight, state["error_bits"].to(torch.int8))
            torch.testing.assert_close(full, param.detach(), rtol=2e-5 if dtype == "bfloat16" else 2e-6, atol=1e-7)
    assert found["model"]["norm.running_mean"].dtype is torch.float32


def exported(optimizer):
    """The state of a packed optimizer of bf16 parameters in the layout."""
    packed, found = optimizer.state_dict(), {}
    (live,), (group,) = optimizer.param_groups, packed["param_groups"]
    for i, param in zip(group["params"], live["params"], strict=True):
        state = packed["state"][i]
        found[i] = {"step": state["step"].clone()}
        for name, values in moments_of(state, group).items():
            codes, scales = quantize(name, values)
            found[i] |= {f"{name}::quantized": codes, f"{name}::scales": scales.view(torch.bfloat16)}
        master = join_weight(param, state["residual"], optimizer.codec(live, "master", param))
        found[i]["error_bits"] = error_bits(master, param.detach()).to(param.dtype)
    return found


def test_a_packed_run_is_exported_as_its_optimizer_would_export_it(tmp_path):
    model, optimizer = trained(ckpt8.optim.AdamW, dtype=torch.bfloat16)
    found = converted(checkpoint(model, optimizer), tmp_path)
    assert_trees_equal(found["optimizer"]["state"], exported(optimizer))
    assert found["model"].keys() == model.state_dict().keys()
    assert all(torch.equal(found["model"][name], param) for name, param in model.named_parameters())


def test_weights_of_a_directory_are_told_by_their_shapes(tmp_path):
    model, optimizer = two_layers()
    folder = trainer_directory(tmp_path / "checkpoint-1", model, optimizer)
    ckpt8.convert(folder, tmp_path / "flash.pt", to="flashoptim")
    found = torch.load(tmp_path / "flash.pt", weights_only=True)
    for i, (name, param) in enumerate(model.named_parameters()):
        bits = oracle.compute_ecc_bits(param.detach(), found["model"][name], 3)
        assert torch.equal(found["optimizer"]["state"][i]["error_bits"], bits.bfloat16())


@pytest.mark.parametrize(
    ("make", "options", "key"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, "momentum_buffer"),
        (ckpt8.optim.Lion, {"lr": 1e-4}, "exp_avg"),
    ],
)
def test_other_rules_that_it_has(make, options, key, tmp_path):
    found = converted(checkpoint(*trained(make, **options)), tmp_path)
    assert set(found["optimizer"]["state"][0]) == {f"{key}::quantized", f"{key}::scales", "step", "error_bits"}


@pytest.mark.parametrize("make", [torch.optim.SGD, ckpt8.optim.SGD])
@pytest.mark.parametrize("nesterov", [True, False])
def test_sgd_keeps_every_setting(make, nesterov, tmp_path):
    model, optimizer = trained(make, lr=0.1, momentum=0.9, nesterov=nesterov)
    (found,) = converted(checkpoint(model, optimizer), tmp_path)["optimizer"]["param_groups"]
    (expected,) = ckpt8.optim.SGD(trained()[0].parameters(), 0.1, momentum=0.9, nesterov=nesterov).param_groups
    settings = ("lr", "momentum", "dampening", "weight_decay", "nesterov")
    assert {key: found.get(key) for key in settings} == {key: expected[key] for key in settings}
    assert found["nesterov"] is nesterov


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {"amsgrad": True}),
        (torch.optim.AdamW, {"maximize": True}),
        (torch.optim.Adafactor, {}),
        (torch.optim.RMSprop, {}),
        (ckpt8.optim.CAME, {}),
        (ckpt8.optim.StableAdamW, {}),
    ],
)
def test_rules_that_it_does_not_have(make, options, tmp_path):
    with pytest.raises(UsageError, match="flashoptim has no optimizer"):
        converted(checkpoint(*trained(make, **options)), tmp_path)
    assert not (tmp_path / "flash.pt").exists()


def test_what_it_cannot_do_without(tmp_path):
    model, optimizer = trained()
    for part, said in ((model, "no optimizer"), (optimizer, "no state dict of a model")):
        with pytest.raises(UsageError, match=said):
            converted({"model" if part is model else "optimizer": part.state_dict()}, tmp_path)
    folder = trainer_directory(tmp_path / "checkpoint-3", model, optimizer)
    with pytest.raises(UsageError, match="--dtype float32"):
        ckpt8.convert(folder, tmp_path / "x.pt", to="flashoptim")
    ckpt8.convert(folder, tmp_path / "sorted.pt")
    with pytest.raises(UsageError, match="in the order of the model"):
        ckpt8.convert(tmp_path / "sorted.pt", tmp_path / "x.pt", to="flashoptim")
    for step in (torch.tensor(1.5), "3", torch.tensor(float("nan"))):
        tree = checkpoint(model, optimizer)
        tree["optimizer"]["state"][0]["step"] = step
        with pytest.raises(InputError, match="not a whole number"):
            converted(tree, tmp_path)


@pytest.mark.by_default("CAME", "SGD", "Lion")
def test_a_pt_keeps_it_packed(packed, tmp_path):
    report = ckpt8.convert(tmp_path / "run.ckpt8", tmp_path / "x.pt")
    assert_trees_equal(torch.load(tmp_path / "x.pt", weights_only=True), ckpt8.load(tmp_path / "run.ckpt8"))
    assert not report.dropped
