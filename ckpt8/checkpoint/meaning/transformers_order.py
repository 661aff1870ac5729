"""The order of the parameters of transformers' models, from their names and the type of the model.

``named_parameters()`` gives the parameters of a module, then those of its submodules in the order of the constructor.
So the order of the names within one module gives the order of the model; numbers go by value. The sequences below merge
these orders, each for many types of models; names that no model has in one module may stand in either order. They come
from transformers 4.44, 4.57 and 5.23, with every setting of every type on and off, in the names that
``save_pretrained`` writes. Some models changed their order in between. The order is unknown for a version that nobody
compared, a type without a sequence, code that came with the model, and a name that the sequence lacks.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.core.errors import InputError
from ckpt8.core.json_text import parse_any_json

_FIRST = (
    "DenseReluDense EncDecAttention SelfAttention Wi Wqkv Wo albert alpha_p alpha_n attn_norm backbone bert c_attn "
    "c_fc cls_token deberta deit cls_classifier dense_h_to_4h dense_4h_to_h dinov2 distilbert "
    "distillation_classifier dt_bias A_log D conv1d electra discriminator_predictions embed_positions embed_tokens "
    "block embedding_hidden_mapping_in albert_layer_groups embeddings embeddings_project fc1 fc2 fc_in fc_out "
    "final_layer_norm full_layer_layer_norm gate gate_proj gate_up_proj gate_up_proj_bias generator_predictions "
    "generator_lm_head in_proj_qkvz in_proj_ba lambda_q1 lambda_k1 lambda_q2 lambda_k2 layer layers final_layernorm "
    "final_norm layoutlm lin1 lin2 linear_attn linear_y linear_x linear_out conv_1d lm_predictions ln_1 ln_q mamba "
    "feed_forward mask_token mpnet norm1 attention layer_scale1 layernorm_before layernorm_after norm2 norm_1 attn "
    "ln_2 crossattention intermediate ln_cross_attn mlp_norm norm_2 patch_embed pre_classifier predictions q k "
    "q_a_proj q_a_layernorm q_attn c_proj q_b_proj q_bias q_lin k_lin qkv proj query key query_key_value query_proj "
    "key_proj recurrent_param input_gate_weight input_gate_bias recurrent_gate_weight recurrent_gate_bias "
    "rel_embeddings rg_lru roberta roformer cls router experts sa_layer_norm ffn ffn_output output_layer_norm self "
    "output self_attn block_sparse_moe mlp attention_layernorm feedforward_layernorm input_layernorm layer_scale2 "
    "post_attention_layernorm post_self_attn_layernorm post_mlp_layernorm pre_feedforward_layernorm "
    "post_feedforward_layernorm pre_ff_layernorm seq_relationship sequence_summary shared encoder layernorm pooler "
    "shared_expert shared_expert_gate sinks q_proj k_proj kv_a_proj_with_mqa kv_a_layernorm kv_b_proj "
    "sop_classifier temporal_pre_norm temporal_block channel_pre_norm mlp_block tok_embeddings transformer "
    "classification_head up_proj down_proj act_fn down_proj_bias ffn_sub_norm v o relative_attention_bias v_bias "
    "in_proj v_lin out_lin v_proj o_proj attn_sub_norm q_norm k_norm qkv_proj value value_proj visual "
    "language_model model head score vit vocab_transform vocab_layer_norm vocab_projector w1 w2 w3 weight bias "
    "dense classifier dense_prediction layer_norm norm mixer q_layernorm k_layernorm transform decoder lm_head "
    "qa_outputs weights_in weights_out wi wi_0 wi_1 wo word_embeddings position_embeddings distillation_token "
    "patch_embeddings wte blocks merger norm_f wpe h ln_f x_position_embeddings x_proj dt_proj out_proj "
    "dt_layernorm b_layernorm c_layernorm y_position_embeddings h_position_embeddings w_position_embeddings "
    "token_type_embeddings LayerNorm"
)
_SECOND = (
    "biogpt c_fc c_proj class_embedding cls_token conv1 conv2 deit cls_classifier dense_h_to_4h dense_4h_to_h "
    "distillation_classifier distillation_token dt_bias A_log D conv1d embed_in embed_tokens embed_positions "
    "embeddings fc_in fc_out feed_forward gate_proj gpt_neox embed_out in_proj input_layernorm k_proj layers "
    "final_layernorm layernorm_embedding led ln_1 attn ln_2 logit_scale longformer longformer_self_attn mask_token "
    "model classification_head norm output_projection patch_embedding pre_ff_layernorm mamba pre_layrnorm proj_out "
    "query key query_key_value roberta self self_attention post_attention_layernorm attention crossattention "
    "intermediate output layernorm_before layernorm_after self_attn layer_norm1 mlp layer_norm2 "
    "self_attn_layer_norm encoder_attn encoder_attn_layer_norm fc1 fc2 shared encoder final_layer_norm layernorm "
    "pooler post_layernorm projector text_model token_embedding position_embedding transformer lm_head qa_outputs "
    "score up_proj down_proj v_proj q_proj value query_global key_global value_global vision_model "
    "visual_projection text_projection vit classifier weight bias dense layer_norm decoder out_proj word_embeddings "
    "token_type_embeddings LayerNorm position_embeddings patch_embeddings word_embeddings_layernorm wte wpe h ln_f"
)
_THIRD = (
    "attention codevectors conv batch_norm crossattention dense_h_to_4h dense_4h_to_h embed_tokens embed_positions "
    "embeddings intermediate intermediate_dense k_proj layer_weights hubert masked_spec_embed model original0 "
    "original1 output_dense pos_conv_embed project_out project_in query key query_key_value self output "
    "self_attention mlp ln_attn ln_mlp post_attention_layernorm input_layernorm self_attn self_attn_layer_norm fc1 "
    "fc2 transformer qa_outputs score v_proj q_proj value wav2vec2 lm_head projector quantizer project_hid "
    "project_q tdnn feature_extractor classifier feature_projection encoder adapter objective pooler roberta weight "
    "bias dense layer_norm decoder feed_forward final_layer_norm layers out_proj parametrizations projection "
    "weight_proj word_embeddings h ln_f token_type_embeddings LayerNorm position_embeddings"
)
_TYPES = {
    _FIRST: (
        "albert apertus arcee bert bitnet codegen cohere cohere2 deberta deberta-v2 deepseek_v3 diffllama dinov2 "
        "distilbert electra ernie4_5 eurobert exaone4 falcon_mamba gemma gemma2 gemma3_text glm glm4 gpt2 gpt_bigcode "
        "gpt_oss granite helium jamba layoutlm llama mamba mamba2 mistral mixtral modernbert mpnet mpt mt5 olmo olmo2 "
        "olmo3 olmoe persimmon phi phi3 phimoe qwen2 qwen2_5_vl qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next "
        "recurrent_gemma roformer seed_oss smollm3 stablelm starcoder2 t5 umt5"
    ),
    _SECOND: (
        "bamba bart biogpt blenderbot-small bloom clip gpt_neo gpt_neox gptj led longformer m2m_100 marian mbart "
        "pegasus whisper"
    ),
    _THIRD: ("falcon hubert opt wav2vec2"),
}
SEQUENCES: Mapping[str, str] = {kind: sequence for sequence, kinds in _TYPES.items() for kind in kinds.split()}
"""The sequence of each type of models."""

REARRANGED = {
    "camembert": (_FIRST, _THIRD),
    "deit": (_SECOND, _FIRST),
    "roberta": (_FIRST, _SECOND),
    "vit": (_SECOND, _FIRST),
    "xlm-roberta": (_FIRST, _THIRD),
}
"""Types whose order changed between the second and the third version: the sequences before and after."""

_INSIDE = {
    "albert": {"predictions": "bias LayerNorm dense decoder"},
    "electra": {"generator_predictions": "LayerNorm dense"},
}
"""The order inside a module that does not follow the sequence, by type and name of the module."""

OLDEST, BEFORE, NEWEST = (4, 44), (4, 57), (5, 23)
"""The compared versions of transformers. An order that is the same in two of them holds in between."""

LONGEST_CONFIG = 1 << 20
"""Bytes of a configuration that are read."""

_LONGEST_NAME = 512
_MOST_DIGITS = 9
_VERSION = re.compile(r"(\d{1,4})\.(\d{1,4})(?:\D|$)")

Place = tuple[tuple[int, int], ...]


def _ranks(sequence: str) -> dict[str, int]:
    return {name: rank for rank, name in enumerate(sequence.split())}


@dataclass(frozen=True, slots=True)
class ModelOrder:
    """The order of one model: ranks of names within a module, and other ranks ``inside`` modules of some names."""

    ranks: Mapping[str, int]
    inside: Mapping[str, Mapping[str, int]]

    def places(self, names: Iterable[str]) -> dict[str, Place]:
        """The sort keys of a model's parameters whose place is known. Wrappers in names do not matter."""
        short = (name for name in names if len(name) <= _LONGEST_NAME)
        plain = {name: tuple(without.split(".")) for name, without in plain_names(short).items()}
        siblings: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for components in plain.values():
            for depth, component in enumerate(components):
                siblings[components[:depth]].add(component)
        places = {name: self._place(components, siblings) for name, components in plain.items()}
        return {name: place for name, place in places.items() if place is not None}

    def _place(self, components: tuple[str, ...], siblings: Mapping[tuple[str, ...], set[str]]) -> Place | None:
        place = []
        for depth, name in enumerate(components):
            above = components[depth - 1] if depth else ""
            if name.isdecimal() and len(name) <= _MOST_DIGITS:
                place.append((-1, int(name)))
                continue
            rank = self.inside.get(above, self.ranks).get(name)
            if rank is None and len(siblings[components[:depth]]) > 1:
                return None
            place.append((rank or 0, 0))
        return tuple(place)


def of_config(text: bytes) -> ModelOrder | None:
    """The order of the model that a ``config.json`` describes; None where it is unknown."""
    try:
        config = parse_any_json(text, "config.json") if len(text) <= LONGEST_CONFIG else None
    except InputError:
        return None
    if not isinstance(config, dict) or config.get("auto_map"):
        return None
    kind, stated = config.get("model_type"), config.get("transformers_version")
    found = _VERSION.match(stated) if isinstance(stated, str) else None
    version = (int(found[1]), int(found[2])) if found else None
    if not isinstance(kind, str) or version is None or not OLDEST <= version <= NEWEST:
        return None
    sequence = SEQUENCES.get(kind)
    if kind in REARRANGED and not BEFORE < version < NEWEST:
        sequence = REARRANGED[kind][version == NEWEST]
    if sequence is None:
        return None
    return ModelOrder(_ranks(sequence), {name: _ranks(order) for name, order in _INSIDE.get(kind, {}).items()})
