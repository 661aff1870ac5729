"""``convert`` to a directory with quantised weights: what is written, kept, copied, reported and refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt8
from ckpt8.core.errors import InputError, UsageError

FP8, INT8 = "float8_e4m3fn", "int8"
CONFIG = {"model_type": "llama", "vocab_size": 50, "dtype": "float32", "text_config": {"torch_dtype": "float16"}}


def state(dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def values(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    shapes = {"up.weight": (48, 32), "up.bias": (48,), "down.weight": (32, 48), "norm.weight": (32,)}
    layers = {
        f"model.layers.{k}.{name}": values(*shape) * (0.1 if len(shape) > 1 else 1)
        for k in range(2)
        for name, shape in shapes.items()
    }
    embed = values(50, 32)
    return {"model.embed_tokens.weight": embed, **layers, "lm_head.weight": embed}


@pytest.fixture
def run(tmp_path):
    """A state dict in a file of torch, with its output layer tied to the embedding."""
    path = tmp_path / "run.pt"
    torch.save({"model": state()}, path)
    return path


@pytest.fixture
def folder(tmp_path):
    """A directory of transformers, as a training program leaves it."""
    path = tmp_path / "checkpoint-3"
    path.mkdir()
    save_file({name: value for name, value in state().items() if name != "lm_head.weight"}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "tokenizer.json").write_text('{"version": "1.0"}')
    (path / "trainer_state.json").write_text('{"global_step": 3}')
    torch.save({"last_epoch": 3}, path / "scheduler.pt")
    return path


def exported(source, target, dtype=FP8, **options):
    report = ckpt8.convert(source, target, dtype=dtype, **options)
    weights = load_file(target / "model.safetensors")
    return report, weights, json.loads((target / "config.json").read_text())


def assert_same_bits(found, expected):
    for name, value in expected.items():
        assert torch.equal(value.view(torch.uint8), found[name].view(torch.uint8))


def decoded(weights, name):
    return weights[name].float() * weights[f"{name}_scale"]


@pytest.mark.parametrize(
    ("dtype", "options", "kind", "strategy", "shape"),
    [
        (FP8, {}, "float", "channel", (48, 1)),
        (FP8, {"scale": "unit", "per": "tensor"}, "float", "tensor", (1,)),
        (INT8, {}, "int", "tensor", (1,)),
        (INT8, {"per": "channel"}, "int", "channel", (48, 1)),
    ],
)
def test_what_is_written(dtype, options, kind, strategy, shape, run, tmp_path):
    report, weights, config = exported(run, tmp_path / "out", dtype, **options)
    original = state()
    quantized = [name for name in original if name.endswith(("up.weight", "down.weight"))]
    names = {*original, *(f"{name}_scale" for name in quantized)} - {"lm_head.weight"}
    assert weights.keys() == names
    for name in names - {*quantized, *(f"{name}_scale" for name in quantized)}:
        assert weights[name].dtype is torch.bfloat16
        assert torch.equal(weights[name], original[name].bfloat16())
    for name in quantized:
        assert weights[name].dtype is getattr(torch, dtype)
        noise, signal = (x.double().square().sum() for x in (decoded(weights, name) - original[name], original[name]))
        assert 0 < float(noise / signal) < 1e-3
    assert weights["model.layers.0.up.weight_scale"].dtype is torch.float32
    assert weights["model.layers.0.up.weight_scale"].shape == shape
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    quantization = config["quantization_config"]
    assert quantization["format"] == f"{kind}-quantized"
    assert quantization["ignore"] == ["model.embed_tokens", "lm_head"]
    group = quantization["config_groups"]["group_0"]
    assert (group["weights"]["type"], group["weights"]["strategy"]) == (kind, strategy)
    assert (report.format, report.tensors, report.aliases) == ("compressed-tensors", len(names), ["lm_head.weight"])
    assert report.casts == {"float32 -> bfloat16": 5}
    assert any("--config" in note for note in report.notes)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("form", ["directory", "container"])
def test_a_model_directory(form, folder, tmp_path):
    source = folder
    if form == "container":
        source = tmp_path / "run.ckpt8"
        ckpt8.compress(folder, source, preset="lossless")
    report, _, config = exported(source, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    assert config["text_config"] == {"torch_dtype": "bfloat16"}
    # The output layer is tied to what is in the file, and is not in it itself.
    assert "lm_head" in config["quantization_config"]["ignore"]
    assert any("scheduler.pt, trainer_state.json" in note for note in report.notes)
    assert not any("--config" in note for note in report.notes)
    ckpt8.convert(folder, tmp_path / "again", dtype=FP8)
    files = [tmp_path / name / "model.safetensors" for name in ("again", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_configuration_from_elsewhere(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "time_step_limit": [0.0, float("inf")]}))
    report, _, config = exported(run, tmp_path / "out", config=tmp_path / "config.json")
    assert (config["model_type"], config["torch_dtype"]) == ("llama", "bfloat16")
    assert config["time_step_limit"] == [0.0, float("inf")]
    assert not any("--config" in note for note in report.notes)


def packed_run(*layers, steps):
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(96, 64), *layers).bfloat16()
    optimizer = ckpt8.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 96).bfloat16()).float().square().mean().backward()
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def test_masters_are_quantised_where_they_are_known(tmp_path):
    """bf16 weights of a packed run: their fp32 masters are, while what stays bf16 are the parameters themselves."""
    model, optimizer = packed_run(torch.nn.LayerNorm(64), torch.nn.Linear(64, 96), steps=3)
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "run.pt")
    _, weights, _ = exported(tmp_path / "run.pt", tmp_path / "out")
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "full.safetensors", dtype="float32")
    full = load_file(tmp_path / "full.safetensors")
    differ = 0
    for name in ("0.weight", "2.weight"):
        for source, equal in ((full[name], True), (model[name].float(), False)):
            scales = (source.abs().amax(1, keepdim=True) / 448).bfloat16().float()
            codes = (source / scales).to(torch.float8_e4m3fn)
            same = torch.equal(codes.float() * scales, decoded(weights, name))
            assert same or not equal
            differ += not same
    assert differ == 2
    for name in ("0.bias", "1.weight", "1.bias", "2.bias"):
        assert torch.equal(weights[name], model[name])


def test_masters_that_cannot_be_told(tmp_path):
    """A state that completes no weight of the model: the 16-bit weights are what there is, and a note says so."""
    model, optimizer = packed_run(steps=1)
    changed = {name: value + 1 for name, value in model.items()}
    torch.save({"model": changed, "optimizer": optimizer}, tmp_path / "run.pt")
    report, weights, _ = exported(tmp_path / "run.pt", tmp_path / "out")
    assert any("not their masters" in note for note in report.notes)
    assert torch.allclose(decoded(weights, "0.weight"), changed["0.weight"].float(), rtol=0.07)


def test_what_is_not_finite_stays(run, tmp_path):
    broken = state()
    broken["model.layers.1.up.weight"][3, 5] = float("nan")
    torch.save({"model": broken}, run)
    done = []
    report, weights, config = exported(run, tmp_path / "out", progress=done.append)
    assert weights["model.layers.1.up.weight"].dtype is torch.bfloat16
    expected = broken["model.layers.1.up.weight"].bfloat16()
    torch.testing.assert_close(weights["model.layers.1.up.weight"], expected, rtol=0, atol=0, equal_nan=True)
    assert "model.layers.1.up.weight_scale" not in weights
    assert "model.layers.1.up" in config["quantization_config"]["ignore"]
    assert "NaN" in report.quantized["kept"]["model.layers.1.up"]
    assert sum(done) == pytest.approx(run.stat().st_size, abs=2)


def test_the_report_is_what_was_written(run, tmp_path):
    report, weights, _ = exported(run, tmp_path / "out", INT8)
    facts = json.loads(json.dumps(report.to_json()))["quantized"]
    assert (facts["dtype"], facts["scale"], facts["per"]) == (INT8, "absmax", "tensor")
    original = {name: value.double() for name, value in state().items() if f"{name}_scale" in weights}
    noise = {name: decoded(weights, name).double() - value for name, value in original.items()}
    for row in facts["tensors"]:
        name = row["tensor"]
        ratio = original[name].square().sum() / noise[name].square().sum()
        assert row["snr_db"] == pytest.approx(10 * float(ratio.log10()), rel=1e-5)
        relative = noise[name].abs() / original[name].abs()
        assert row["max_relative"] == pytest.approx(float(relative.max()), rel=1e-4)
        assert row["rms_relative"] == pytest.approx(float(relative.square().mean().sqrt()), rel=1e-4)
        assert row["zeroed"] == int((weights[name] == 0).sum())
    assert facts["tensors"][0]["snr_db"] == min(row["snr_db"] for row in facts["tensors"])
    assert {row["class"]: row["tensors"] for row in facts["classes"]} == {"up": 2, "down": 2}
    total = sum(float(value.square().sum()) for value in original.values())
    error = sum(float(value.square().sum()) for value in noise.values())
    assert facts["all"]["snr_db"] == pytest.approx(10 * float(torch.tensor(total / error).log10()), rel=1e-4)
    assert facts["kept"] == {"model.embed_tokens": "tied"}


def test_refusals(run_command, run, folder, tmp_path):
    long = '{"a": "' + "x" * (1 << 20) + '"}'
    texts = {"text": "{", "list": "[]", "deep": "[" * 100_000, "long": long, "quantised": '{"quantization_config": {}}'}
    for name, text in texts.items():
        (tmp_path / f"{name}.json").write_text(text)
    models = {"none": {"embed.weight": torch.ones(4, 4)}, "inf": {"a.weight": torch.full((4, 4), float("inf"))}}
    models["scaled"] = {"a.weight": torch.ones(4, 4), "a.weight_scale": torch.ones(4)}
    for name, model in models.items():
        torch.save({"model": model}, tmp_path / f"{name}.pt")
    before = sorted(path.name for path in tmp_path.iterdir())
    to = tmp_path / "out"
    cases = [
        (2, (run, tmp_path / "x.safetensors", "--dtype", FP8), "give a directory"),
        (2, (run, tmp_path / "x.safetensors", "--to", "compressed-tensors"), "give a directory"),
        (2, (run, to, "--to", "safetensors", "--dtype", INT8), "give a directory"),
        (2, (run, to, "--to", "trainer", "--dtype", INT8), "give a directory"),
        (2, (run, to, "--to", "compressed-tensors", "--dtype", "float16"), "expected one of float8_e4m3fn, int8"),
        (2, (run, to, "--dtype", FP8, "--scale", "max"), "expected one of absmax, unit"),
        (2, (run, to, "--dtype", FP8, "--per", "row"), "expected one of tensor, channel"),
        (2, (run, to, "--dtype", INT8, "--scale", "unit"), "no exponent"),
        (2, (run, tmp_path / "x.pt", "--scale", "unit"), "are for quantised weights"),
        (2, (run, to, "--dtype", FP8, "--config", tmp_path / "quantised.json"), "quantised already"),
        (2, (run, to, "--dtype", FP8, "--keep", "*.up", "--keep", "*.7.up"), "--keep '*.7.up' matches no layer: "),
        (2, (run, to, "--dtype", FP8, "--keep", "nomatch"), "model.layers.1.down"),
        (2, (tmp_path / "scaled.pt", to, "--dtype", FP8), "a.weight_scale"),
        (2, (tmp_path / "none.pt", to, "--dtype", FP8), "no linear layer to quantise (1 embedding)"),
        (2, (tmp_path / "inf.pt", to, "--dtype", FP8), "no linear layer to quantise (1 holds NaN"),
        (3, (run, to, "--dtype", FP8, "--config", tmp_path / "missing.json"), "cannot be read"),
        (3, (run, to, "--dtype", FP8, "--config", tmp_path / "text.json"), "JSON"),
        (3, (run, to, "--dtype", FP8, "--config", tmp_path / "list.json"), "not the configuration"),
        (3, (run, to, "--dtype", FP8, "--config", tmp_path / "deep.json"), "JSON"),
        (3, (run, to, "--dtype", FP8, "--config", tmp_path / "long.json"), "too many"),
        (4, (run, folder, "--dtype", FP8), "--force"),
        (4, (folder, folder, "--dtype", FP8, "--force"), ""),
    ]
    for expected, arguments, text in cases:
        code, out, err = run_command("convert", *arguments)
        assert (code, out, err.count("\n")) == (expected, "", 1), (arguments, err)
        assert err.startswith("ckpt8: ")
        assert text in err
        assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_damaged_configuration_of_the_source(folder, tmp_path):
    for text in ("{", "[]", "3", '{"quantization_config": {"quant_method": "gptq"}}'):
        (folder / "config.json").write_text(text)
        with pytest.raises((InputError, UsageError), match=r"config\.json"):
            ckpt8.convert(folder, tmp_path / "out", dtype=FP8)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("depth", [100, 300, 500, 900, 1000, 5000])
def test_a_deep_configuration(depth, run, tmp_path):
    """Written again, or refused: how deep Python goes depends on its version."""
    (tmp_path / "deep.json").write_text('{"a":' * depth + "1" + "}" * depth)
    refusal = None
    try:
        ckpt8.convert(run, tmp_path / "out", dtype=FP8, config=tmp_path / "deep.json")
    except InputError as exc:
        refusal = str(exc)
    assert (tmp_path / "out").exists() is (refusal is None)
    assert refusal is None or (depth > 100 and "JSON" in refusal)


def test_names_of_wrappers(tmp_path):
    """Taken away everywhere, also where an entry that is no tensor stands beside them without one."""
    wrapped = {f"module._orig_mod.{name}": value for name, value in state().items()}
    torch.save({"model": {**wrapped, "_extra_state": {"scale": 1}}}, tmp_path / "run.pt")
    torch.save({"model": state()}, tmp_path / "plain.pt")
    report, weights, config = exported(tmp_path / "run.pt", tmp_path / "a")
    _, expected, other = exported(tmp_path / "plain.pt", tmp_path / "b")
    assert config == other
    assert weights.keys() == expected.keys()
    assert_same_bits(weights, expected)
    assert report.dropped == ["_extra_state: not a tensor"]


def test_kept_on_request(run, tmp_path):
    report, weights, config = exported(run, tmp_path / "out", keep=["model.layers.0.*", "*.1.down"])
    quantized = [name for name, value in weights.items() if value.dtype is torch.float8_e4m3fn]
    assert quantized == ["model.layers.1.up.weight"]
    assert {"model.layers.0.up", "model.layers.1.down"} <= set(config["quantization_config"]["ignore"])
    assert report.quantized["all"]["tensors"] == 1
    # What stays anyway may be asked for as well.
    report, _, _ = exported(run, tmp_path / "more", keep="model.embed_tokens")
    assert report.quantized["kept"]["model.embed_tokens"] == "kept on request"
    assert report.quantized["all"]["tensors"] == 4


def test_a_transposed_and_a_half_precision_source(tmp_path):
    """Strides and element types do not change what is written, but by what they round away."""
    weights = state(torch.float16)
    turned = {name: value.t().contiguous().t() if value.dim() == 2 else value for name, value in weights.items()}
    torch.save({"model": weights}, tmp_path / "a.pt")
    torch.save({"model": turned}, tmp_path / "b.pt")
    _, first, _ = exported(tmp_path / "a.pt", tmp_path / "a")
    _, second, _ = exported(tmp_path / "b.pt", tmp_path / "b")
    assert first.keys() - second.keys() == set()
    assert_same_bits(second, first)
    assert first["model.embed_tokens.weight"].dtype is torch.bfloat16
