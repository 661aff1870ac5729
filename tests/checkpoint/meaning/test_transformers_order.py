"""The order of parameters of every model in the table, and the groups of the Trainer, against transformers itself.

Models are made on the meta device: they have names and shapes, and no weights.
"""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from ckpt8.checkpoint.meaning.names import NEWEST, OLDEST, REARRANGED, SEQUENCES, Weights, of_config, parameter_names
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.tensors import DType

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
auto = pytest.importorskip("transformers.models.auto.modeling_auto")
loading = pytest.importorskip("transformers.core_model_loading", reason="transformers is older than 5")

pytestmark = pytest.mark.filterwarnings("ignore")

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers", "decoder_layers", "n_layers", "depth")
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type")
HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForImageClassification", "ForCTC")
SETTINGS = {"feed_forward_proj": "gated-gelu", "word_embed_proj_dim": 64, "embedding_size": 96, "num_kv_heads": 2}
EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "qwen3_next", "olmoe", "phimoe", "jamba"]


def classes(kind):
    """All models of a type."""
    names = set()
    for mapping in (getattr(auto, name) for name in dir(auto) if name.endswith("_MAPPING_NAMES")):
        found = mapping.get(kind, ())
        names.update(found if isinstance(found, (tuple, list)) else [found])
    found = [getattr(transformers, name, None) for name in sorted(names)]
    return [each for each in found if isinstance(each, type) and issubclass(each, torch.nn.Module)]


def heads(kind):
    """One or two of them, those that are trained most."""
    return [each for each in classes(kind) if each.__name__.endswith(HEADS)][:2] or classes(kind)[:2]


def shrink(config):
    """Three layers."""
    for key in LAYERS:
        if isinstance(getattr(config, key, None), int):
            setattr(config, key, 3)
    for key in LISTS:
        if isinstance(getattr(config, key, None), list):
            with contextlib.suppress(AttributeError):  # where it follows from the number of layers
                setattr(config, key, getattr(config, key)[:3])
    if config.model_type == "gpt_neo":
        config.attention_layers = ["global", "local", "global"]
    for value in list(vars(config).values()):
        if isinstance(value, transformers.PretrainedConfig):
            shrink(value)


def build(model_class, kind, settings=()):
    """A model without weights, None where the settings do not go together."""
    config = transformers.CONFIG_MAPPING[kind]()
    try:
        shrink(config)
        for key, value in dict(settings).items():
            setattr(config, key, value)
        with torch.device("meta"):
            return model_class(config)
    except Exception:
        return None


def saved_names(model):
    """The parameters in the order of the model, by the name that ``save_pretrained`` gives them; experts have none."""
    live = dict(model.named_parameters())
    saved = loading.revert_weight_conversion(model, dict(live))
    name_of = {id(parameter): name for name, parameter in saved.items()}
    return [name_of.get(id(parameter)) for parameter in live.values()], saved


def order_of(kind, version=transformers.__version__):
    return of_config(json.dumps({"model_type": kind, "transformers_version": version}).encode())


def check_order(kind, model):
    names = [name for name in saved_names(model)[0] if name is not None]
    places = order_of(kind).places(names)
    assert sorted(places, key=places.get) == names
    return names


def test_this_version_was_compared():
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    assert OLDEST <= version <= NEWEST, "compare the orders of this version; if they hold, raise NEWEST"
    assert order_of("llama")


def ref(key, tensor):
    return TensorRef(key, DType.FLOAT32, 0, tuple(tensor.shape), tuple(tensor.stride()))


@pytest.mark.by_default(most=16)
@pytest.mark.parametrize("kind", sorted({*REARRANGED, *SEQUENCES}))
def test_the_order_and_the_groups_of_the_trainer(kind):
    """Every name given is right, and all are given where the file has the tensors of the model."""
    pytest.importorskip("accelerate", reason="Trainer needs accelerate, which is not installed")
    models = [model for each in heads(kind) if (model := build(each, kind)) is not None]
    assert models
    for model in models:
        assert check_order(kind, model)
        names, saved = saved_names(model)
        decays = set(transformers.Trainer.get_decay_parameter_names(None, model))
        live = list(zip(model.named_parameters(), names, strict=True))
        groups = [[each for each in live if (each[0][0] in decays) is wanted] for wanted in (True, False)]
        listed = groups[0] + groups[1]
        split = len(groups[0])
        optimizer = {
            "state": {k: {"exp_avg": ref(f"m{k}", tensor)} for k, ((_, tensor), _) in enumerate(listed)},
            "param_groups": [
                {"params": list(range(split)), "weight_decay": 0.1},
                {"params": list(range(split, len(listed))), "weight_decay": 0.0},
            ],
        }
        weights = Weights(ordered=False, order=order_of(kind), trainer=True)
        weights.add({name: ref(name, saved[name]) for name in sorted(saved)})
        found = parameter_names(optimizer, lambda weights=weights: [weights])
        expected = {f"state.{k}": name for k, (_, name) in enumerate(listed)}
        assert found.items() <= expected.items()
        if None not in names:
            assert found == expected
        else:
            assert kind in EXPERTS
            assert len(found) > len(expected) / 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted({*REARRANGED, *SEQUENCES}))
def test_the_order_does_not_depend_on_settings_or_heads(kind):
    """Every switch of the configuration turned over, and what adds modules; every class of the type."""
    for model in filter(None, (build(each, kind) for each in classes(kind))):
        check_order(kind, model)
    config = transformers.CONFIG_MAPPING[kind]()
    settings = [{key: not value} for key, value in config.to_dict().items() if isinstance(value, bool)]
    settings += [{key: value} for key, value in SETTINGS.items() if hasattr(config, key)]
    settings.append({"is_decoder": True, "add_cross_attention": True})
    for each in heads(kind):
        for model in filter(None, (build(each, kind, setting) for setting in settings)):
            check_order(kind, model)


LLAMA = {"model_type": "llama", "transformers_version": "5.0.0"}
UNKNOWN = [
    *({**LLAMA, "transformers_version": version} for version in ("5", "4.20.1", "6.0.0", 5.2)),
    *({**LLAMA, "model_type": kind} for kind in (["llama"], "unheard_of", "roberta")),
    {**LLAMA, "auto_map": {"AutoModel": "mine.Model"}},
    {"model_type": "llama"},
]


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b"[" * 100_000, *(json.dumps(each).encode() for each in UNKNOWN)])
def test_what_is_not_known(config):
    assert of_config(config) is None


def test_models_that_were_rearranged_have_the_order_of_their_version():
    names = ["roberta.embeddings.token_type_embeddings.weight", "roberta.embeddings.position_embeddings.weight"]
    for version, expected in (("4.44.2", names[::-1]), ("4.57.3", names[::-1]), ("5.23.0", names)):
        places = order_of("roberta", version).places(names)
        assert sorted(places, key=places.get) == expected


def test_a_name_that_the_model_does_not_have_is_left_out():
    names = ["model.layers.10.mlp.up_proj.weight", "model.layers.9.mlp.up_proj.weight", "model.layers.9.adapter"]
    names.append(f"model.layers.{'9' * 5000}.mlp.up_proj.weight")
    places = order_of("llama", "5.23.0").places(names)
    assert sorted(places, key=places.get) == names[1::-1]
