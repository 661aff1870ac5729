"""Names of the parameters of an optimizer, from the weights in its file or in other members of its directory.

An optimizer without names lists its parameters group by group, each group in the order of the model: so do torch and
the Trainer of transformers, which puts parameters that decay before the others. A state dict of torch has the order of
the model. A safetensors file is sorted by name; for the models of the table below, ``config.json`` tells theirs.

Where the order of all weights is known, it pairs the parameters with them: see ``pairing.paired_in_order``; for the two
groups of the Trainer, their names do. Otherwise the parameters of one shape get names if they are all in one group, as
many as the weights of that shape, and the order of these weights is known. Numbers tell it for names that differ in
nothing else, the layers of one stack. All other parameters get no name.

Where several models fit an optimizer alike, the names that they agree on stay. Names in a tree with several optimizers
begin with the key of the model.

``ModelOrder`` tells the order of the parameters of transformers' models from their names and the type of the model.

``named_parameters()`` gives the parameters of a module, then those of its submodules in the order of the constructor.
So the order of the names within one module gives the order of the model; numbers go by value. The sequences below merge
these orders, each for many types of models; names that no model has in one module may stand in either order. They come
from transformers 4.44, 4.57 and 5.23, with every setting of every type on and off, in the names that
``save_pretrained`` writes. Some models changed their order in between. The order is unknown for a version that nobody
compared, a type without a sequence, code that came with the model, and a name that the sequence lacks.

``RankFile`` is a file that one rank of a job wrote, with its parts of the tensors.

Its content shows that it is one, its name shows of which rank: the number behind ``rank``, or the last one. The name
without this number says which files belong together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ckpt8.checkpoint.meaning.nodes import LONGEST_NAME, Shape
from ckpt8.checkpoint.meaning.pairing import (
    Beside,
    OwnedOptimizer,
    models_and_optimizers,
    owned_optimizers,
    paired_in_order,
    place,
    places_of_shapes,
)
from ckpt8.checkpoint.meaning.parameter_names import plain_names
from ckpt8.checkpoint.meaning.state_dicts import (
    TOP_LEVEL,
    Candidate,
    evident_weights,
    find,
    shapes_of,
    untied,
    weights_of,
)
from ckpt8.checkpoint.tree import Checkpoint, TensorRef, iter_leaves
from ckpt8.container.manifest import FILE
from ckpt8.core.errors import InputError
from ckpt8.core.grouping import grouped
from ckpt8.core.json_text import parse_any_json
from ckpt8.core.text import natural_order

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
        short = plain_names(name for name in names if len(name) <= LONGEST_NAME)
        plain = {name: tuple(without.split(".")) for name, without in short.items()}
        siblings: dict[tuple[str, ...], set[str]] = defaultdict(set)
        for components in plain.values():
            for depth, component in enumerate(components):
                siblings[components[:depth]].add(component)
        places: dict[str, Place] = {}
        for name, components in plain.items():
            place = []
            for depth, part in enumerate(components):
                ranks = self.inside.get(components[depth - 1] if depth else "", self.ranks)
                if part.isdecimal() and len(part) <= _MOST_DIGITS:
                    place.append((-1, int(part)))
                elif part in ranks or len(siblings[components[:depth]]) == 1:
                    place.append((ranks.get(part, 0), 0))
            if len(place) == len(components):
                places[name] = tuple(place)
        return places


def of_config(text: bytes) -> ModelOrder | None:
    """The order of the model that a ``config.json`` describes; None where it is unknown."""
    try:
        config = parse_any_json(text, "config.json") if len(text) <= LONGEST_CONFIG else None
    except InputError:
        return None
    if not isinstance(config, dict) or config.get("auto_map"):
        return None
    kind, stated = config.get("model_type"), config.get("transformers_version")
    number = _VERSION.match(stated) if isinstance(stated, str) else None
    version = (int(number[1]), int(number[2])) if number else None
    if not isinstance(kind, str) or version is None or not OLDEST <= version <= NEWEST:
        return None
    sequence = SEQUENCES.get(kind)
    if kind in REARRANGED and not BEFORE < version < NEWEST:
        sequence = REARRANGED[kind][version == NEWEST]
    inside = {name: _ranks(order) for name, order in _INSIDE.get(kind, {}).items()}
    return None if sequence is None else ModelOrder(_ranks(sequence), inside)


_RANK = re.compile(r"(?:.*rank[_-]?|.*?(?=\d+\D*$))(\d+)", re.DOTALL)
_WORLD = re.compile(r"world[_-]?size[_-]?(\d+)")


class RankFile(NamedTuple):
    """The number of a rank, and the path of its file with ``*`` in place of that number."""

    rank: int
    pattern: str


def rank_file(path: str, tree: Any) -> RankFile | None:
    """What the file at ``path`` is of several; None if it holds no part of a tensor."""
    if not any(type(leaf) is TensorRef and leaf.share is not None for _, leaf in iter_leaves(tree)):
        return None
    return named_rank(path) or RankFile(0, path)


def named_rank(path: str) -> RankFile | None:
    """What the name of a file says that it is of several; None if it has no number."""
    folder, slash, name = path.rpartition("/")
    number = _RANK.match(name)
    if number is None or len(number[1]) > _MOST_DIGITS:
        return None
    return RankFile(int(number[1]), f"{folder}{slash}{name[: number.start(1)]}*{name[number.end(1) :]}")


def home_of(path: str, tree: Any) -> tuple[str, int | None]:
    """What a file shares with those whose tensors belong to its own: the folder, and the rank of a file of one rank."""
    file = rank_file(path, tree)
    return path.rpartition("/")[0], None if file is None else file.rank


def stated_world(path: str) -> int:
    """The number of ranks in the name of a file; 0 if it does not say."""
    number = _WORLD.search(path.rpartition("/")[2])
    return int(number[1]) if number is not None and len(number[1]) <= _MOST_DIGITS else 0


_MOST_ALIKE = 16
"""Of more models that fit alike, no name is agreed on."""

_NUMBER = re.compile(r"[0-9]+")
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
_LAYER_NORMS = frozenset({"ln_1", "ln_2", "ln_f", "ln_q", "norm1", "norm2", "norm_1", "norm_2", "norm_f"}) | {
    "layer_norm1",
    "layer_norm2",
    "pre_layrnorm",
}
"""Names of a LayerNorm that the rule of the Trainer does not match; some models give them to an RMSNorm."""


@dataclass(slots=True)
class Weights:
    """The shapes of the weights of one model, by name; ``names`` also has the further names of tied ones.

    ``path`` and ``node`` are those of a ``Candidate``; a model in shards has the entries of all. ``ordered``: the
    weights are in the order of the model. ``order``: the order of the model, if known. ``trainer``: the Trainer of
    transformers wrote the folder. ``files`` are the paths of the files of values, by the ``id`` of each.
    """

    path: str = ""
    shapes: dict[str, Shape] = field(default_factory=dict)
    ordered: bool = True
    order: ModelOrder | None = None
    trainer: bool = False
    names: set[str] = field(default_factory=set)
    node: dict[str, Any] = field(default_factory=dict)
    files: dict[int, str] = field(default_factory=dict)

    def add(self, state_dict: Mapping[str, object], files: Mapping[int, str] | None = None) -> Weights:
        """Add the weights of one state dict of a model, without its buffers; return this object."""
        self.files.update(files or {})
        weights = weights_of(state_dict)
        self.ordered &= not self.names
        self.names.update(weights)
        self.node.update(state_dict)
        self.shapes.update((name, ref.shape) for name, ref in untied(weights).items())
        return self

    def in_order(self) -> list[str]:
        """The names whose order is known, in the order of the model.

        A sorted state dict does not count as ordered: somebody may have read it from a safetensors file.
        """
        if self.ordered and list(self.shapes) != sorted(self.shapes):
            return list(self.shapes)
        places = {} if self.order is None else self.order.places(self.shapes)
        return sorted(places, key=lambda name: places[name])


class NamesFromWeights:
    """Names for the parameters of the optimizers in a directory, from the weights in the same folder.

    ``members`` are path and content. The weights beside the file of one rank are those of the same rank.
    """

    def __init__(self, members: Sequence[tuple[str, Checkpoint]]) -> None:
        self._members = dict(members)
        self._homes = {path: home_of(path, checkpoint.tree) for path, checkpoint in members}
        self._models: dict[tuple[str, int | None], list[Weights]] = {}

    def of_member(self, path: str) -> Mapping[str, str]:
        """The names of the parameters of a member by the place of their state, as ``state.17``. Raises InputError."""
        return parameter_names(self._members[path].tree, partial(self._models_beside, path))

    def beside(self, path: str) -> Beside:
        """The models in the folder of a member, and what they say of its parameters. Raises InputError."""
        models = self._models_beside(path)
        files = {ref: file for model in models for ref, file in model.files.items()}
        names = parameter_names(self._members[path].tree, lambda: models, bare=True)
        return Beside([Candidate(model.path, model.node) for model in models], names, files)

    def _models_beside(self, path: str) -> list[Weights]:
        home = self._homes[path]
        if home not in self._models:
            above = f"{home[0]}/" if home[0] else ""
            files = {file: self._members[file] for file, its_home in self._homes.items() if its_home == home}
            models, order = models_of_files(files), _order(files.get(f"{above}config.json"))
            for weights in models:
                weights.order, weights.trainer = order, f"{above}trainer_state.json" in files
            if not models:
                # All files serve if one alone has optimizers; else those below the folder.
                owners = (member for member in self._members.values() if find(member.tree)[1])
                alone = next(owners, None) is not None and next(owners, None) is None
                models = models_of_files({p: m for p, m in self._members.items() if alone or p.startswith(above)})
            self._models[home] = models
        return self._models[home]


def _order(config: Checkpoint | None) -> ModelOrder | None:
    if config is None or config.format != FILE or config.size > LONGEST_CONFIG:
        return None
    text = bytearray(config.size)
    config.read_into(0, memoryview(text))
    return of_config(bytes(text))


def models_of_files(files: Mapping[str, Checkpoint]) -> list[Weights]:
    """The models in files, by path. Files of weights that share no name can be one model."""
    models: list[Weights] = []
    shards: list[list[Weights]] = []
    evident = evident_weights(*(checkpoint.tree for checkpoint in files.values()))
    for name, checkpoint in files.items():
        ordered = checkpoint.format != "safetensors"
        for model in find(checkpoint.tree, evident)[0]:
            is_bare = model.path == TOP_LEVEL
            own = Weights(name if is_bare else f"{name}:{model.path}", ordered=ordered)
            models.append(own.add(model.node, {id(ref): name for ref in model.node.values()}))
            if is_bare:
                whole = next(
                    (shard for shard in shards if all(own.names.isdisjoint(part.names) for part in shard)), None
                )
                if whole is None:
                    shards.append([own])
                else:
                    whole.append(own)
    return models + [_joined(parts) for parts in shards if len(parts) > 1]


def _joined(parts: Sequence[Weights]) -> Weights:
    """All parts of a model in one; tied weights count once."""
    whole = Weights(parts[0].path, ordered=all(part.ordered for part in parts))
    for part in parts:
        whole.add(part.node, part.files)
    return whole


def parameter_names(
    tree: object, folder: Callable[[], Sequence[Weights]] = tuple, *, bare: bool = False
) -> Mapping[str, str]:
    """The known names of the parameters of the optimizers in ``tree``, by the place of their state.

    ``folder`` returns the models that serve where ``tree`` itself has none. With several optimizers the names begin
    with the keys of models, unless they are to be ``bare``.
    """
    models, optimizers = models_and_optimizers(tree)
    others = () if models or not optimizers else folder()
    beside = {id(other.node): other for other in others}
    owned = owned_optimizers(optimizers, models or [Candidate(other.path, other.node) for other in others])
    known: dict[str, str] = {}
    for number, optimizer in enumerate(owned):
        owner = optimizer.owner
        proposals: list[Mapping[int | str, str]] = []
        if optimizer.names == {} and len(owner.models) <= _MOST_ALIKE:
            mates = [owned[mate] for mate in optimizer.mates if mate != number]
            for model in (model for model in owner.models if not model.numbered):
                weights = beside.get(id(model.node)) or Weights(model.path).add(model.node)
                proposals.append(_names_in([optimizer, *mates], weights))
        is_several = len(owned) > 1 and not bare
        key = (owner.model.whole or owner.model.path) if is_several and owner.model else ""
        for identifier, names in grouped(named for given in proposals for named in given.items()).items():
            if len(set(names)) == 1:  # all models that fit alike agree
                known[place(optimizer.candidate, identifier)] = f"{key}.{names[0]}" if key else names[0]
    return known


def _names_in(optimizers: Sequence[OwnedOptimizer], weights: Weights) -> Mapping[int | str, str]:
    """The names of the parameters of the first optimizer; the others step the same model."""
    order = weights.in_order()
    described = [(optimizer.groups, shapes_of(optimizer.candidate.node["state"])) for optimizer in optimizers]
    groups, shapes = described[0]
    if len(order) < len(weights.shapes):
        return _by_shape(groups, shapes, weights, order)
    if names := _by_trainer(groups, shapes, weights, order):
        return names
    pairs = paired_in_order(described, {name: weights.node[name] for name in order})[0]
    return {identifier: pair[0] for identifier, pair in pairs.items() if not isinstance(pair, str)}


def _by_trainer(
    groups: Sequence[Mapping[Any, Any]], shapes: Mapping[int | str, Shape], weights: Weights, order: list[str]
) -> Mapping[int | str, str]:
    """All names, if exactly one way to make the two groups of the Trainer fits; else none."""
    candidates: list[dict[int | str, str]] = []
    for grouping in _groupings(order, groups) if weights.trainer else ():
        if [len(group["params"]) for group in groups] != [len(names) for names in grouping]:
            continue
        pairs = [
            pair
            for group, names in zip(groups, grouping, strict=True)
            for pair in zip(group["params"], names, strict=True)
        ]
        known = [
            shape == weights.shapes[name] for identifier, name in pairs if (shape := shapes.get(identifier)) is not None
        ]
        if known and all(known) and dict(pairs) not in candidates:
            candidates.append(dict(pairs))
    return candidates[0] if len(candidates) == 1 else {}


def _groupings(order: list[str], groups: Sequence[Mapping[Any, Any]]) -> Iterator[list[list[str]]]:
    """The ways in which the Trainer makes two groups of all parameters.

    A LayerNorm does not decay whatever its name. The number of parameters in a group tells whether a norm is one.
    """
    if len(groups) == 2 and groups[1].get("weight_decay") == 0:
        for norms in (_LAYER_NORMS, frozenset[str]()):
            spared = {name for name in order if _NO_DECAY.search(name.lower()) or norms.intersection(name.split("."))}
            yield [[name for name in order if name not in spared], [name for name in order if name in spared]]


def _by_shape(
    groups: Sequence[Mapping[Any, Any]],
    shapes: Mapping[int | str, Shape],
    weights: Weights,
    order: list[str],
) -> Mapping[int | str, str]:
    """Names of parameters whose shape only one group has, if the order of the weights of that shape is known."""
    alike = grouped((shape, name) for name, shape in weights.shapes.items())
    rank = {name: place for place, name in enumerate(order)}
    names = [name for of_shape in alike.values() for name in _in_order(of_shape, rank)]
    places = places_of_shapes(groups, shapes, [weights.shapes[name] for name in names])
    return {identifier: names[at] for identifier, at in places.items() if isinstance(at, int)}


def _in_order(names: list[str], rank: Mapping[str, int]) -> list[str]:
    """The names in the order of the model; none where it is unknown."""
    if all(name in rank for name in names):
        return sorted(names, key=lambda name: rank[name])
    return sorted(names, key=natural_order) if len({_NUMBER.sub("#", name) for name in names}) == 1 else []
