"""compressed-tensors and transformers read what was exported, and decode the weights that ckpt8 says it wrote."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file

import ckpt8
from ckpt8.core.errors import UsageError

pytest.importorskip("compressed_tensors", reason="compressed_tensors is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")

SCHEMES = {
    "fp8 absmax channel": {"dtype": "float8_e4m3fn"},
    "fp8 absmax tensor": {"dtype": "float8_e4m3fn", "per": "tensor"},
    "fp8 unit channel": {"dtype": "float8_e4m3fn", "scale": "unit"},
    "fp8 unit tensor": {"dtype": "float8_e4m3fn", "scale": "unit", "per": "tensor"},
    "int8 tensor": {"dtype": "int8"},
    "int8 channel": {"dtype": "int8", "per": "channel"},
}
TOKENS = torch.arange(48).view(2, 24) * 7 % 96


@pytest.fixture(scope="module")
def exports(inputs, tmp_path_factory):
    """The checkpoint that Trainer wrote, in every scheme: folders and reports."""
    root = tmp_path_factory.mktemp("exports")
    return {
        name: (root / name, ckpt8.convert(inputs / "trainer-adamw", root / name, to="compressed-tensors", **options))
        for name, options in SCHEMES.items()
    }


@pytest.fixture(scope="module")
def original(inputs):
    return load_file(inputs / "trainer-adamw" / "model.safetensors")


def decoded(folder):
    """All weights of an export in fp32."""
    found = load_file(folder / "model.safetensors")
    return {
        name: value.float() * found.get(f"{name}_scale", torch.ones(1))
        for name, value in found.items()
        if not name.endswith("_scale")
    }


def scheme_of(folder):
    """The compressor of compressed-tensors that the configuration asks for, and the scheme of its layers."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    parsed = QuantizationConfig.model_validate(config)
    assert parsed.quantization_status == "compressed"
    return BaseCompressor.get_value_from_registry(parsed.format), parsed.config_groups["group_0"]


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_decodes_our_weights(name, exports, original):
    """Bit for bit; it makes our codes of our scales, and our report has the error of what it decodes."""
    from compressed_tensors.quantization.utils import calculate_qparams

    folder, report = exports[name]
    compressor, scheme = scheme_of(folder)
    assert compressor.can_compress(torch.nn.Linear, scheme)
    stored, ours = load_file(folder / "model.safetensors"), decoded(folder)
    rows = {row["tensor"]: row for row in report.quantized["tensors"]}
    assert len(rows) == 7
    for weight, row in rows.items():
        scales = stored[f"{weight}_scale"]
        theirs = compressor.decompress({"weight": stored[weight], "weight_scale": scales}, scheme)["weight"]
        assert theirs.dtype is torch.float32
        assert torch.equal(theirs, ours[weight])
        again = compressor.compress({"weight": original[weight], "weight_scale": scales}, scheme)["weight"]
        assert again.dtype is stored[weight].dtype
        assert torch.equal(again.view(torch.uint8), stored[weight].view(torch.uint8))
        ratio = original[weight].double().square().sum() / (theirs.double() - original[weight]).square().sum()
        assert row["snr_db"] == pytest.approx(10 * float(ratio.log10()), rel=1e-5)
        if "int8" in name:
            dims = 1 if scheme.weights.strategy == "channel" else None
            low, high = (
                getattr(original[weight], which)(dims, keepdim=True) if dims else getattr(original[weight], which)()
                for which in ("amin", "amax")
            )
            expected, _ = calculate_qparams(low, high, scheme.weights)
            # Theirs divides by half of the range from -128 to 127, SwitchBack by 127.
            expected = expected * (127.5 / 127)
            assert torch.allclose(scales, expected, rtol=2**-8)


def loaded(kind, folder, **options):
    model, report = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **options)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return model


def assert_near(model, expected):
    with torch.no_grad():
        found, wanted = model(TOKENS).logits, expected(TOKENS).logits
    assert 0 < float((found - wanted).norm() / wanted.norm()) < 0.1


@pytest.mark.parametrize("form", ["as it is", "fp32", "dequantised", "dequantised fp32"])
@pytest.mark.parametrize("name", SCHEMES)
def test_transformers_loads_our_weights(name, form, exports):
    """Compressed until the first forward, or decoded while loading: fp32 bit for bit, bf16 its rounding."""
    folder, _ = exports[name]
    options = {}
    if "dequantised" in form:
        options["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    if "fp32" in form:
        options["dtype"] = torch.float32
    model = loaded("AutoModelForCausalLM", folder, **options)
    stored = load_file(folder / "model.safetensors")
    layer = model.model.layers[0].mlp.down_proj
    if "dequantised" not in form:
        assert layer.weight.dtype is stored["model.layers.0.mlp.down_proj.weight"].dtype
        assert not hasattr(model.lm_head, "quantization_scheme")
    with torch.no_grad():
        model(TOKENS)
    dtype = torch.float32 if "fp32" in form else torch.bfloat16
    found = {each: value for each, value in model.state_dict().items() if not each.endswith(("_scale", "_zero_point"))}
    ours = decoded(folder)
    ours["lm_head.weight"] = ours["model.embed_tokens.weight"]
    assert found.keys() == ours.keys()
    for each, value in ours.items():
        assert found[each].dtype is dtype
        assert torch.equal(found[each], value.to(dtype))


def saved(kind, folder, **settings):
    """A model with random weights as save_pretrained writes it."""
    torch.manual_seed(4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, kind)(getattr(transformers, kind).config_class(**settings))
        model.save_pretrained(folder)
    return model.eval()


def test_conv1d_of_gpt2_is_refused(tmp_path):
    """Its matrices stand transposed, which the layout cannot say: no loader would read them right."""
    model = saved("GPT2LMHeadModel", tmp_path / "gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=96)
    torch.save({"model": model.state_dict()}, tmp_path / "run.pt")
    for source in ("gpt2", "run.pt"):
        with pytest.raises(UsageError, match=r"no linear layer to quantise \(.*8 Conv1D, stored transposed") as caught:
            ckpt8.convert(tmp_path / source, tmp_path / "out", dtype="int8")
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()


SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 96}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("Qwen2ForCausalLM", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
        ("GPTNeoXForCausalLM", {}),
        ("OPTForCausalLM", {"ffn_dim": 64, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    ],
)
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_other_models(kind, settings, dtype, tmp_path):
    """With biases, with an output layer of its own, and with one that is tied."""
    expected = saved(kind, tmp_path / "model", **{**SIZES, **settings})
    ckpt8.convert(tmp_path / "model", tmp_path / "out", dtype=dtype)
    model = loaded(kind, tmp_path / "out", dtype=torch.float32)
    assert_near(model, expected)
    ours = decoded(tmp_path / "out")
    for name, module in model.named_modules():
        if hasattr(module, "quantization_scheme"):
            assert torch.equal(module.weight, ours[f"{name}.weight"])
    head = model.get_output_embeddings()
    assert not hasattr(head, "quantization_scheme")


def test_experts(tmp_path):
    """transformers decodes those in float8; int8 it does not load, and a note says so."""
    expected = saved("MixtralForCausalLM", tmp_path / "model", **SIZES, num_key_value_heads=1, num_local_experts=4)
    report = ckpt8.convert(tmp_path / "model", tmp_path / "out", dtype="float8_e4m3fn")
    assert report.quantized["all"]["tensors"] == 2 * (4 + 4 * 3)
    assert not any("experts" in note for note in report.notes)
    model = loaded("MixtralForCausalLM", tmp_path / "out", dtype=torch.float32)
    ours = decoded(tmp_path / "out")
    for name, wanted in expected.state_dict().items():
        if name.endswith("experts.down_proj"):
            stem = name.replace(".mlp.", ".block_sparse_moe.").removesuffix("down_proj")
            stacked = torch.stack([ours[f"{stem}{expert}.w2.weight"] for expert in range(len(wanted))])
            assert torch.equal(model.state_dict()[name], stacked)
    assert_near(model, expected)
    report = ckpt8.convert(tmp_path / "model", tmp_path / "int8", dtype="int8")
    assert any("experts" in note for note in report.notes)
    with pytest.raises(RuntimeError, match="conversion"):
        transformers.MixtralForCausalLM.from_pretrained(tmp_path / "int8")


def test_a_compressed_checkpoint_is_exported_alike(inputs, exports, tmp_path):
    """From what ckpt8 made of the directory: what it stores of a weight is 24 bits, and a code is 8."""
    ckpt8.compress(inputs / "trainer-adamw", tmp_path / "run.ckpt8")
    ckpt8.convert(tmp_path / "run.ckpt8", tmp_path / "out", dtype="float8_e4m3fn")
    folder, _ = exports["fp8 absmax channel"]
    assert (tmp_path / "out" / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    ours, theirs = decoded(tmp_path / "out"), decoded(folder)
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=2**-3, atol=2**-9)
        assert float((ours[name] != value).float().mean()) < 0.01


@pytest.mark.by_default("lightning.ckpt-3-fp8", "accelerate-3-int8", "trainer-stable-adamw-7-fp8")
@pytest.mark.parametrize("options", [{"dtype": "float8_e4m3fn"}, {"dtype": "int8"}], ids=["fp8", "int8"])
@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("gpt_adamw.pt", 8),
        ("gpt_stable_adamw.pt", 8),
        ("gpt_came.pt", 8),
        ("gpt_bf16.pt", 8),
        ("lightning.ckpt", 3),
        ("accelerate", 3),
        ("trainer-stable-adamw", 7),
    ],
)
def test_real_checkpoints(source, count, options, inputs, tmp_path):
    """Of every kind, compressed or not: compressed-tensors decodes what is within a step of the original."""
    ckpt8.convert(inputs / source, tmp_path / "full.safetensors", dtype="float32")
    wanted = load_file(tmp_path / "full.safetensors")
    ckpt8.compress(inputs / source, tmp_path / "run.ckpt8", stats=False)
    for form in (inputs / source, tmp_path / "run.ckpt8"):
        report = ckpt8.convert(form, tmp_path / "out", force=True, **options)
        compressor, scheme = scheme_of(tmp_path / "out")
        stored, ours = load_file(tmp_path / "out" / "model.safetensors"), decoded(tmp_path / "out")
        assert report.quantized["all"]["tensors"] == count
        assert ours.keys() == wanted.keys()
        for row in report.quantized["tensors"]:
            name = row["tensor"]
            parts = {"weight": stored[name], "weight_scale": stored[f"{name}_scale"]}
            theirs = compressor.decompress(parts, scheme)["weight"]
            assert torch.equal(theirs, ours[name])
            # Half a step of three mantissa bits, or of the integers; the smallest step of float8 is 2^-9.
            step = parts["weight_scale"] * (2.0**-10 if "float8" in options["dtype"] else 0.5)
            relative = 2.0**-4 if "float8" in options["dtype"] else 2.0**-14
            assert bool(((theirs - wanted[name]).abs() <= step * 1.01 + wanted[name].abs() * relative * 1.01).all())


def test_a_state_dict_with_the_configuration_given(inputs, exports, original, tmp_path):
    """A file of torch and a config.json become what the directory became."""
    torch.save({"model": original}, tmp_path / "run.pt")
    config = inputs / "trainer-adamw" / "config.json"
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "out", dtype="int8", config=config)
    folder, _ = exports["int8 tensor"]
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (folder / file).read_bytes()
