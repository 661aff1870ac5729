"""Scales and codes against their definition in float64, and which weights are taken for those of linear layers.

These are compared with the modules of models that transformers builds.
"""

import math
import re

import pytest
import torch

from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import Held, TensorRef
from ckpt8.converting import quantizing
from ckpt8.converting.quantizing import Scheme, choose_layers, encode_matrix, find_scales, quantize, row_parts
from ckpt8.core.tensors import DType

FP8, INT8 = DType.FLOAT8_E4M3FN, DType.INT8
SCHEMES = [
    Scheme(dtype, scale, per)
    for dtype, scale in ((FP8, "absmax"), (FP8, "unit"), (INT8, "absmax"))
    for per in ("channel", "tensor")
]
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
BITS = E4M3.isfinite().nonzero().view(-1)


def nearest_e4m3(x):
    """Nearest value of the type, and among two as near the one with an even code, in float64."""
    x = x.double().clamp(-448, 448)
    values = E4M3[BITS]
    distance = (x.view(-1, 1) - values).abs()
    nearest = distance == distance.amin(1, keepdim=True)
    found = values[(nearest * (2 - BITS % 2)).argmax(1)]
    return torch.copysign(found, x.view(-1)).view(x.shape)


def composite(x, dtype=DType.FLOAT32, transposed=False):
    data = Composite("run")
    stored = x.t().contiguous() if transposed else x
    held = Held(bytes(stored.view(torch.uint8).flatten().tolist()))
    key = data.add(held.read_into, held.size, dtype)
    return data, TensorRef(key, dtype, 0, tuple(x.shape), (1, x.shape[0]) if transposed else (x.shape[1], 1))


def encoded(data, ref, scheme):
    scales = find_scales(data, ref, scheme, lambda _: None)
    codes, error = encode_matrix(data, ref, scales, scheme)
    assert codes.dtype is scheme.dtype
    return data.elements(codes, 0, ref.numel).view(ref.shape), scales, error


def test_codes_are_the_nearest():
    """Every half-way point between two values of the type, its neighbours in fp32, and what lies beyond the largest."""
    values = E4M3[BITS].unique()
    middle = ((values[1:] + values[:-1]) / 2).float()
    x = torch.cat([middle, middle.nextafter(torch.tensor(1e9)), middle.nextafter(torch.tensor(-1e9)), values.float()])
    x = torch.cat([x, torch.tensor([449.0, -1e30, 1e-30, -1e-30, 2.0**-10, 3 * 2.0**-11])])
    for scale in (1.0, 2.0**-9, 2.0**20):
        found = quantize(x * scale, torch.tensor([scale]), Scheme(FP8))
        assert torch.equal(found.double(), nearest_e4m3(x))
    # And those of int8.
    x = torch.cat([torch.arange(-1300, 1301) / 10, torch.arange(-140, 141) + 0.5])
    found = quantize(x * 0.25, torch.tensor([0.25]), Scheme(INT8, per="tensor"))
    assert found.tolist() == [max(-127, min(127, round(float(value)))) for value in x]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("transposed", [False, True])
def test_definition(scheme, transposed, monkeypatch):
    """Also where a tile ends inside a row: the tiles are small here."""
    monkeypatch.setattr("ckpt8.converting.quantizing.FRAME", 50)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(37, 23, generator=generator) * torch.logspace(-6, 3, 37).view(-1, 1)
    codes, scales, error = encoded(*composite(x, transposed=transposed), scheme)
    wide = x.double()
    dims = 1 if scheme.per == "channel" else (0, 1)
    largest, rms = wide.abs().amax(dims), wide.square().mean(dims).sqrt()
    if scheme.scale == "absmax":
        expected = (largest / scheme.largest).bfloat16()
    else:
        expected = 2.0 ** torch.maximum(rms.log2().round(), (largest / 448).log2().ceil())
    assert scales.dtype is torch.float32
    assert scales.shape == ((37, 1) if scheme.per == "channel" else (1,))
    assert torch.equal(scales.double().view(expected.shape), expected.double())
    assert torch.equal(scales, scales.bfloat16().float())
    ratio = x / scales
    assert torch.equal(codes.double(), nearest_e4m3(ratio) if scheme.dtype is FP8 else ratio.round().double())
    if scheme.scale == "absmax":
        assert torch.equal(codes.double().abs().amax(dims), torch.full_like(largest, scheme.largest))
    else:
        assert float((wide / scales).abs().max()) <= 448
    decoded = codes.double() * scales.double()
    relative = (decoded - wide).abs() / wide.abs()
    assert error.count == x.numel()
    assert error.zeroed == int((decoded == 0).sum())
    assert error.max_relative == pytest.approx(float(relative.max()), rel=1e-5)
    assert error.rms_relative == pytest.approx(float(relative.square().mean().sqrt()), rel=1e-5)
    noise = float((decoded - wide).square().sum() / wide.square().sum())
    assert error.snr_db == pytest.approx(-10 * math.log10(noise), rel=1e-4)


def test_unit_scales_give_an_rms_near_1():
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2)) * torch.logspace(-20, 20, 64).view(-1, 1)
    _, scales, error = encoded(*composite(x), Scheme(FP8, "unit"))
    rms = (x / scales).square().mean(1).sqrt()
    assert 0.7 < float(rms.min()) <= float(rms.max()) < 1.42
    assert error.snr_db > 30


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_zeros_and_of_the_smallest_numbers(scheme):
    x = torch.tensor([0.0, 2.0**-149, -(2.0**-127), 2.0**126]).view(4, 1).repeat(1, 6)
    codes, scales, _ = encoded(*composite(x), scheme)
    assert bool(scales.isfinite().all())
    assert float(scales.min()) >= 2.0**-126
    decoded = codes.float() * scales
    assert bool(decoded.isfinite().all())
    assert torch.equal(decoded[0], torch.zeros(6))
    if scheme.per == "channel":
        assert float(scales[0]) == 1.0
        assert float((decoded[3] / x[3] - 1).abs().max()) < 2.0**-8
        # Half of the smallest code times the smallest scale, which is as fine as it gets.
        assert float((decoded[1:3] - x[1:3]).abs().max()) <= 2.0**-127


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**127])
def test_what_has_no_scale(value):
    x = torch.ones(5, 7)
    for entry, has_none in ((value, True), (2.0**126, False)):
        x[3, 2] = entry
        for scheme in SCHEMES:
            assert (find_scales(*composite(x), scheme, lambda _: None) is None) is has_none


def test_parts_of_rows():
    for start, stop in ((0, 20), (3, 20), (3, 4), (5, 10), (0, 0), (4, 6), (2, 17)):
        parts = list(row_parts(start, stop, 5))
        assert [k for _, _, begin, end in parts for k in range(begin, end)] == list(range(start, stop))
        for row, rows, begin, end in parts:
            assert begin // 5 == row
            assert (end - 1) // 5 == row + rows - 1
            assert rows == 1 or (begin % 5 == 0 and end % 5 == 0)
        assert len(parts) <= 3


def refs(shapes, dtype=DType.FLOAT32):
    return {name: TensorRef(name, dtype, 0, shape, (shape[-1], 1)[-len(shape) :]) for name, shape in shapes.items()}


def chosen(shapes, config=None, keep=(), tied=()):
    weights = refs(shapes)
    return choose_layers(weights, [weights[name] for name in tied], config, keep)


NAMES = {
    "quantized": [
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.11.mlp.gate_proj.weight",
        "encoder.layer.0.attention.output.dense.weight",
        "layers.3.attention.output.weight",
        "transformer_blocks.0.proj_out.weight",
        "model.layers.0.mlp.experts.7.down_proj.weight",
        "model.layers.0.mlp.shared_expert.up_proj.weight",
        "decoder.block.0.layer.0.SelfAttention.q.weight",
        "model.decoder.layers.0.fc1.weight",
    ],
    quantizing.ROUTER: ["model.layers.0.mlp.gate.weight"],
    quantizing.EMBEDDING: [
        *("model.embed_tokens.weight", "transformer.wpe.weight", "shared.weight"),
        "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    ],
    quantizing.HEAD: [
        *("lm_head.weight", "cls.predictions.decoder.weight", "classifier.6.weight", "classifier.dense.weight"),
        *("proj_out.weight", "score.weight"),
    ],
    None: ["weight", "layers.0.in_proj_weight"],
}


@pytest.mark.parametrize(("expected", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_names(expected, name):
    layers = chosen({name: (8, 4)})
    assert (next(iter(layers.kept.values()), None) if name not in layers.quantized else "quantized") == expected


def test_what_is_no_matrix_of_floats_and_what_is_kept():
    shapes = {"conv.weight": (8, 4, 3, 3), "norm.weight": (8,), "empty.weight": (0, 4), "up.weight": (8, 4)}
    layers = choose_layers({**refs(shapes), **refs({"ids.weight": (4, 4)}, DType.INT64)}, [], None)
    assert (layers.quantized, list(layers.kept)) == (["up.weight"], ["ids"])
    layers = chosen({"a.0.up.weight": (8, 4), "a.1.up.weight": (8, 4), "a.1.down.weight": (8, 4)}, keep=["a.1.*"])
    assert layers.quantized == ["a.0.up.weight"]
    assert layers.kept == {"a.1.up": quantizing.ASKED, "a.1.down": quantizing.ASKED}


def test_vocabulary():
    """A matrix of that size in no layer is an embedding or a head; in a layer it is not."""
    shapes = {"tokens.weight": (96, 8), "layers.0.up.weight": (96, 8), "top.weight": (12, 8)}
    for config in ({"vocab_size": 96}, {"text_config": {"vocab_size": 96}}):
        assert chosen(shapes, config).kept == {"tokens": quantizing.EMBEDDING}
    assert "tokens.weight" in chosen(shapes).quantized


def test_conv1d_is_told_by_biases_or_the_configuration():
    linear = {"h.0.attn.c_attn.weight": (24, 8), "h.0.attn.c_attn.bias": (24,), "h.0.attn.c_proj.weight": (8, 8)}
    transposed = {**linear, "h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_proj.bias": (8,)}
    assert len(chosen(linear).quantized) == 2
    for layers in (chosen(transposed), chosen(linear, {"model_type": "gpt2"})):
        assert layers.quantized == []
        assert set(layers.kept.values()) == {quantizing.TRANSPOSED}
    assert chosen({"x.weight": (8, 24), "x.bias": (24,)}).kept == {"x": quantizing.TRANSPOSED}


def test_what_loaders_ignore():
    layers = chosen({"embed.weight": (9, 4), "up.weight": (8, 4)}, tied=["embed.weight"])
    assert layers.kept == {"embed": quantizing.TIED}
    assert layers.ignore(["lm_head.weight", "buffer"]) == ["embed", "lm_head"]
    assert chosen({"lm_head.weight": (9, 4)}).ignore([]) == ["lm_head"]
    assert chosen({"embed.weight": (9, 4)}).ignore([]) == ["embed", "lm_head", quantizing.UNSAVED_HEADS]
    pattern = quantizing.UNSAVED_HEADS.removeprefix("re:")
    for name in ("lm_head", "cls.predictions.decoder", "embed_out"):
        assert re.match(pattern, name)
    for name in ("model.layers.0.attention.output", "lm_head_2", "layers.3.head", "up"):
        assert not re.match(pattern, name)


SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 80, "head_dim": 16,
}  # fmt: skip
MODELS = {
    "LlamaForCausalLM": SMALL,
    "Qwen2ForCausalLM": SMALL,
    "Gemma2ForCausalLM": SMALL,
    "Phi3ForCausalLM": {**SMALL, "pad_token_id": 0},
    "GPTNeoXForCausalLM": SMALL,
    "OPTForCausalLM": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "BertForMaskedLM": SMALL,
    "DistilBertForSequenceClassification": {"dim": 32, "hidden_dim": 48, "n_layers": 1, "n_heads": 2, "vocab_size": 80},
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 16, "d_ff": 48, "num_layers": 1, "num_heads": 2},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 80},
    "ViTForImageClassification": {**SMALL, "image_size": 32, "patch_size": 16},
    "WhisperForConditionalGeneration": {
        "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
        "decoder_attention_heads": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "vocab_size": 80,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("with_config", [True, False])
def test_models_of_transformers(name, with_config):
    """What is quantised is a Linear inside the model; no Linear inside a layer is left out but routers."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    kind = getattr(transformers, name)
    config = kind.config_class(**MODELS[name])
    with torch.device("meta"):
        model = kind(config)
    shapes = {each: tuple(tensor.shape) for each, tensor in model.state_dict().items()}
    layers = chosen(shapes, config.to_dict() if with_config else None)
    linear = {f"{each}.weight" for each, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    assert set(layers.quantized) <= linear
    inside = {each for each in linear if re.search(r"\.\d+\.", each)}
    assert inside <= set(layers.quantized)
    assert bool(layers.quantized) is (name != "GPT2LMHeadModel")
    head = model.get_output_embeddings()
    heads = {f"{each}.weight" for each, module in model.named_modules() if head is not None and module is head}
    assert not heads & set(layers.quantized)


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.BFLOAT16, DType.FLOAT16])
def test_other_types_are_widened(dtype):
    x = torch.randn(9, 31, generator=torch.Generator().manual_seed(3)).to(dtype.torch)
    found = encoded(*composite(x, dtype), Scheme())
    expected = encoded(*composite(x.float()), Scheme())
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8))
    assert torch.equal(found[1], expected[1])
