"""Which weights are taken for those of linear layers: compared with the modules of models that transformers builds."""

from __future__ import annotations

import re

import pytest
import torch

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.converting.quantizing import (
    ASKED,
    EMBEDDING,
    HEAD,
    ROUTER,
    TIED,
    TRANSPOSED,
    UNSAVED_HEADS,
    choose_layers,
    class_of,
)
from ckpt8.core.tensors import DType


def refs(shapes, dtype=DType.FLOAT32):
    return {name: TensorRef(name, dtype, 0, shape, (shape[-1], 1)[-len(shape) :]) for name, shape in shapes.items()}


def chosen(shapes, config=None, keep=(), tied=()):
    weights = refs(shapes)
    return choose_layers(weights, [weights[name] for name in tied], config, keep)


def kind_of(name, shape=(8, 4), **options):
    layers = chosen({name: shape}, **options)
    return next(iter(layers.kept.values()), None) if name not in layers.quantized else "quantized"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "quantized"),
        ("model.layers.11.mlp.gate_proj.weight", "quantized"),
        ("encoder.layer.0.attention.output.dense.weight", "quantized"),
        ("layers.3.attention.output.weight", "quantized"),
        ("transformer_blocks.0.proj_out.weight", "quantized"),
        ("model.layers.0.mlp.experts.7.down_proj.weight", "quantized"),
        ("model.layers.0.mlp.gate.weight", ROUTER),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", "quantized"),
        ("model.embed_tokens.weight", EMBEDDING),
        ("transformer.wpe.weight", EMBEDDING),
        ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", EMBEDDING),
        ("shared.weight", EMBEDDING),
        ("lm_head.weight", HEAD),
        ("cls.predictions.decoder.weight", HEAD),
        ("classifier.6.weight", HEAD),
        ("classifier.dense.weight", HEAD),
        ("proj_out.weight", HEAD),
        ("score.weight", HEAD),
        ("decoder.block.0.layer.0.SelfAttention.q.weight", "quantized"),
        ("model.decoder.layers.0.fc1.weight", "quantized"),
        ("weight", None),
        ("layers.0.in_proj_weight", None),
    ],
)
def test_names(name, expected):
    assert kind_of(name) == expected


def test_what_is_no_matrix_of_floats():
    shapes = {"conv.weight": (8, 4, 3, 3), "norm.weight": (8,), "empty.weight": (0, 4), "up.weight": (8, 4)}
    layers = choose_layers({**refs(shapes), **refs({"ids.weight": (4, 4)}, DType.INT64)}, [], None)
    assert layers.quantized == ["up.weight"]
    assert list(layers.kept) == ["ids"]


def test_keep():
    layers = chosen({"a.0.up.weight": (8, 4), "a.1.up.weight": (8, 4), "a.1.down.weight": (8, 4)}, keep=["a.1.*"])
    assert layers.quantized == ["a.0.up.weight"]
    assert layers.kept == {"a.1.up": ASKED, "a.1.down": ASKED}


def test_vocabulary():
    """A matrix of that size in no layer is an embedding or a head; in a layer it is not."""
    shapes = {"tokens.weight": (96, 8), "layers.0.up.weight": (96, 8), "top.weight": (12, 8)}
    for config in ({"vocab_size": 96}, {"text_config": {"vocab_size": 96}}):
        layers = chosen(shapes, config)
        assert layers.kept == {"tokens": EMBEDDING}
    assert "tokens.weight" in chosen(shapes).quantized


def test_conv1d_is_told_by_biases_or_the_configuration():
    linear = {"h.0.attn.c_attn.weight": (24, 8), "h.0.attn.c_attn.bias": (24,), "h.0.attn.c_proj.weight": (8, 8)}
    transposed = {**linear, "h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_proj.bias": (8,)}
    assert len(chosen(linear).quantized) == 2
    for layers in (chosen(transposed), chosen(linear, {"model_type": "gpt2"})):
        assert layers.quantized == []
        assert set(layers.kept.values()) == {TRANSPOSED}
    assert chosen({"x.weight": (8, 24), "x.bias": (24,)}).kept == {"x": TRANSPOSED}


def test_what_loaders_ignore():
    layers = chosen({"embed.weight": (9, 4), "up.weight": (8, 4)}, tied=["embed.weight"])
    assert layers.kept == {"embed": TIED}
    assert layers.ignore(["lm_head.weight", "buffer"]) == ["embed", "lm_head"]
    assert chosen({"lm_head.weight": (9, 4)}).ignore([]) == ["lm_head"]
    assert chosen({"embed.weight": (9, 4)}).ignore([]) == ["embed", "lm_head", UNSAVED_HEADS]
    pattern = UNSAVED_HEADS.removeprefix("re:")
    for name in ("lm_head", "cls.predictions.decoder", "embed_out"):
        assert re.match(pattern, name)
    for name in ("model.layers.0.attention.output", "lm_head_2", "layers.3.head", "up"):
        assert not re.match(pattern, name)


def test_class_of_a_layer():
    assert class_of("model.layers.0.self_attn.q_proj.weight") == "q_proj"
    assert class_of("net.4.weight") == "net"
    assert class_of("4.weight") == "4"


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
