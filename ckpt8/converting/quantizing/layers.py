"""Chooses the weights to quantise: those of the linear layers inside a model, by their names, shapes and biases.

A checkpoint does not say what its modules are. A matrix called ``weight`` counts as that of a linear layer, except for

* embeddings and position tables: by the name of their module, or a first dimension as long as the vocabulary;
* output layers: by the name of a module inside no numbered one, or by that dimension;
* tied weights;
* routers of experts, which inference engines want as they are;
* ``Conv1D`` of GPT-2 and its relatives, whose matrices are transposed, which the layout cannot express: by the model
  type in the configuration, or by a bias as long as a row;
* what the user keeps.

These stay bf16, and the configuration tells loaders to leave them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.converting.computed import FLOATS
from ckpt8.converting.ties import HEADS

_WEIGHT = ".weight"
_EMBEDDINGS = frozenset({"wte", "wpe", "shared", "relative_attention_bias", "global_relative_attention_bias"})
_HEADS = HEADS | {"cls", "score", "qa_outputs", "output_projection", "logits_proj", "lm_loss", "vocab_projector"}
_HEAD_ENDINGS = ("head", "heads", "classifier")
_ROUTERS = frozenset({"gate", "router", "wg", "shared_expert_gate"})
_CONV1D = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})

ASKED, EMBEDDING, HEAD, TIED = "kept on request", "embedding", "output layer", "tied"
ROUTER, TRANSPOSED, TYPE = "router", "Conv1D, stored transposed", "not a float of 16 to 64 bits"

UNSAVED_HEADS = rf"re:(?:[A-Za-z_]\w*\.)*(?:{'|'.join(sorted(HEADS))})$"
"""Modules to ignore where the file has no output layer, because that is tied to a weight that it has."""


@dataclass(frozen=True, slots=True)
class Layers:
    """``quantized`` names the weights to quantise; ``kept`` the modules whose matrix stays, with the reason."""

    quantized: list[str]
    kept: dict[str, str]

    def keep(self, name: str, reason: str) -> None:
        """Take back a weight: it stays as it is."""
        self.quantized.remove(name)
        self.kept[name.removesuffix(_WEIGHT)] = reason

    def ignore(self, aliases: Iterable[str]) -> list[str]:
        """The modules that loaders leave alone: kept ones, and those of ``aliases``, tied weights without an entry."""
        tied = [name.removesuffix(_WEIGHT) for name in aliases if name.endswith(_WEIGHT)]
        heads = [] if HEAD in self.kept.values() or tied else ["lm_head", UNSAVED_HEADS]
        return [*dict.fromkeys([*self.kept, *tied, *heads])]

    @property
    def modules(self) -> list[str]:
        """All modules with a matrix."""
        return [*(name.removesuffix(_WEIGHT) for name in self.quantized), *self.kept]


def choose_layers(
    weights: Mapping[str, TensorRef],
    tied: Iterable[TensorRef],
    config: Mapping[str, Any] | None,
    keep: Sequence[str] = (),
) -> Layers:
    """Decide on each weight of a model. ``tied`` have a second name; ``keep`` are patterns of names of modules."""
    places = {(ref.key, ref.offset) for ref in tied}
    vocabularies = _vocabularies(config or {})
    conv1d = _holds_conv1d(weights, config or {})
    quantized, kept = [], {}
    for name, ref in weights.items():
        module = name.removesuffix(_WEIGHT)
        if module == name or len(ref.shape) != 2 or 0 in ref.shape:
            continue
        if any(matches(pattern, module) for pattern in keep):
            reason: str | None = ASKED
        elif ref.dtype not in FLOATS:
            reason = TYPE
        elif (ref.key, ref.offset) in places:
            reason = TIED
        else:
            reason = _by_name(module) or _by_shape(module, ref, weights.get(f"{module}.bias"), vocabularies, conv1d)
        if reason is None:
            quantized.append(name)
        else:
            kept[module] = reason
    return Layers(quantized, kept)


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of ``keep`` means a module, by its name or by that of its weight."""
    return fnmatchcase(module, pattern) or fnmatchcase(module + _WEIGHT, pattern)


def class_of(name: str) -> str:
    """The kind of layer that has a weight: the last part of its module's name that is not a number."""
    parts = name.removesuffix(_WEIGHT).split(".")
    return next((part for part in reversed(parts) if not part.isdecimal()), parts[-1])


def _by_name(module: str) -> str | None:
    parts = module.split(".")
    if "emb" in parts[-1].lower() or parts[-1] in _EMBEDDINGS:
        return EMBEDDING
    if parts[-1] in _ROUTERS:
        return ROUTER
    outside = parts[: next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts))]
    # Whole models are also called "decoder" and "output".
    last = outside == parts and parts[-1] in _HEADS
    return HEAD if last or any(part.endswith(_HEAD_ENDINGS) for part in outside) else None


def _by_shape(
    module: str, ref: TensorRef, bias: TensorRef | None, vocabularies: frozenset[int], conv1d: bool
) -> str | None:
    if (conv1d and module.rpartition(".")[2] in _CONV1D) or _is_transposed(ref, bias):
        return TRANSPOSED
    numbered = any(part.isdecimal() for part in module.split("."))
    return EMBEDDING if ref.shape[0] in vocabularies and not numbered else None


def _is_transposed(ref: TensorRef, bias: TensorRef | None) -> bool:
    return bias is not None and bias.shape != ref.shape[:1] and bias.shape == ref.shape[1:]


def _holds_conv1d(weights: Mapping[str, TensorRef], config: Mapping[str, Any]) -> bool:
    """Whether matrices with GPT-2's names are transposed. A square one does not tell: it follows the others."""
    return config.get("model_type") in _CONV1D_MODELS or any(
        module.rpartition(".")[2] in _CONV1D
        and len(ref.shape) == 2
        and _is_transposed(ref, weights.get(f"{module}.bias"))
        for name, ref in weights.items()
        if (module := name.removesuffix(_WEIGHT)) != name
    )


def _vocabularies(config: Mapping[str, Any]) -> frozenset[int]:
    """Sizes of vocabularies in a configuration and in the ones nested in it."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return frozenset(size for part in parts if isinstance(size := part.get("vocab_size"), int))
