"""Which weights of a model are quantised: those of linear layers inside it, told by their names, shapes and biases.

A checkpoint does not say what its modules are. The weight of one is taken for that of a linear layer if it is a matrix
called ``weight``, unless something says otherwise:

* embeddings and position tables by the name of their module, or as the first dimension is the size of the vocabulary;
* output layers by the name of a module that is in no numbered one, or by that size; weights that are tied;
* routers of experts, which inference engines want as they are;
* ``Conv1D`` of GPT-2 and its kin, whose matrices stand transposed: by the type of the model that its configuration
  names, or by a bias that is as long as a row; the layout has no way to say so;
* what the user keeps.

These stay bf16, and the configuration tells loaders to leave them alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.converting.ties import HEADS
from ckpt8.converting.weights import FLOATS

_WEIGHT = ".weight"
_EMBEDDINGS = frozenset({"wte", "wpe", "shared", "relative_attention_bias", "global_relative_attention_bias"})
_HEADS = HEADS | {"cls", "score", "qa_outputs", "output_projection", "logits_proj", "lm_loss", "vocab_projector"}
_HEAD_ENDINGS = ("head", "heads", "classifier")
_ROUTERS = frozenset({"gate", "router", "wg", "shared_expert_gate"})
_CONV1D = frozenset({"c_attn", "c_proj", "c_fc", "q_attn"})
_CONV1D_MODELS = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer", "clvp"})

ASKED, EMBEDDING, HEAD, TIED = "kept on request", "embedding", "output layer", "tied"
ROUTER, TRANSPOSED, TYPE = "router", "Conv1D, which stands transposed", "not a float of 16 to 64 bits"

UNSAVED_HEADS = rf"re:(?:[A-Za-z_]\w*\.)*(?:{'|'.join(sorted(HEADS))})$"
"""Modules to ignore where the output layer is not in the file, for it is tied to what is."""


@dataclass(frozen=True, slots=True)
class Layers:
    """Names of the weights to quantise, and of the modules with a matrix that stay as they are, with the reason."""

    quantized: list[str]
    kept: dict[str, str]

    def keep(self, name: str, reason: str) -> None:
        """Do not quantise a weight after all."""
        self.quantized.remove(name)
        self.kept[name.removesuffix(_WEIGHT)] = reason

    def ignore(self, aliases: Iterable[str]) -> list[str]:
        """What loaders shall leave alone: kept modules, and those of ``aliases``, weights that are not in the file."""
        tied = [name.removesuffix(_WEIGHT) for name in aliases if name.endswith(_WEIGHT)]
        heads = [] if HEAD in self.kept.values() or tied else ["lm_head", UNSAVED_HEADS]
        return [*dict.fromkeys([*self.kept, *tied, *heads])]

    @property
    def modules(self) -> list[str]:
        """All modules with a matrix."""
        return [*(name.removesuffix(_WEIGHT) for name in self.quantized), *self.kept]

    def unmatched(self, patterns: Iterable[str]) -> list[str]:
        """Those of the patterns that no module with a matrix matches."""
        return [pattern for pattern in patterns if not any(_matches(pattern, module) for module in self.modules)]

    def reasons(self) -> dict[str, int]:
        """How many modules stay for each reason."""
        found: dict[str, int] = {}
        for reason in self.kept.values():
            found[reason] = found.get(reason, 0) + 1
        return found


def choose_layers(
    weights: Mapping[str, TensorRef],
    tied: Iterable[TensorRef],
    config: Mapping[str, Any] | None,
    keep: Sequence[str] = (),
) -> Layers:
    """Sort the weights of a model. ``tied`` are those with another name; ``keep`` are patterns of names of modules."""
    places = {(ref.key, ref.offset) for ref in tied}
    vocabularies = _vocabularies(config or {})
    conv1d = _holds_conv1d(weights, config or {})
    quantized, kept = [], {}
    for name, ref in weights.items():
        module = name.removesuffix(_WEIGHT)
        if module == name or len(ref.shape) != 2 or 0 in ref.shape:
            continue
        if any(_matches(pattern, module) for pattern in keep):
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


def _matches(pattern: str, module: str) -> bool:
    return fnmatchcase(module, pattern) or fnmatchcase(module + _WEIGHT, pattern)


def class_of(name: str) -> str:
    """The kind of layer that a weight is of: the last part of its module that is not a number."""
    parts = name.removesuffix(_WEIGHT).split(".")
    return next((part for part in reversed(parts) if not part.isdecimal()), parts[-1])


def _by_name(module: str) -> str | None:
    parts = module.split(".")
    if "emb" in parts[-1].lower() or parts[-1] in _EMBEDDINGS:
        return EMBEDDING
    if parts[-1] in _ROUTERS:
        return ROUTER
    outside = parts[: next((at for at, part in enumerate(parts) if part.isdecimal()), len(parts))]
    # "decoder" and "output" are containers as well.
    last = outside == parts and parts[-1] in _HEADS
    return HEAD if last or any(part.endswith(_HEAD_ENDINGS) for part in outside) else None


def _by_shape(
    module: str, ref: TensorRef, bias: TensorRef | None, vocabularies: frozenset[int], conv1d: bool
) -> str | None:
    if conv1d and module.rpartition(".")[2] in _CONV1D:
        return TRANSPOSED
    if _is_transposed(ref, bias):
        return TRANSPOSED
    numbered = any(part.isdecimal() for part in module.split("."))
    return EMBEDDING if ref.shape[0] in vocabularies and not numbered else None


def _is_transposed(ref: TensorRef, bias: TensorRef | None) -> bool:
    return bias is not None and bias.shape != ref.shape[:1] and bias.shape == ref.shape[1:]


def _holds_conv1d(weights: Mapping[str, TensorRef], config: Mapping[str, Any]) -> bool:
    """Whether matrices with the names of GPT-2 stand transposed; square ones are as the others of the model."""
    if config.get("model_type") in _CONV1D_MODELS:
        return True
    return any(
        module.rpartition(".")[2] in _CONV1D
        and len(ref.shape) == 2
        and _is_transposed(ref, weights.get(f"{module}.bias"))
        for name, ref in weights.items()
        if (module := name.removesuffix(_WEIGHT)) != name
    )


def _vocabularies(config: Mapping[str, Any]) -> frozenset[int]:
    """Sizes of vocabularies in a configuration, and in those that it holds."""
    parts = [config, *(value for value in config.values() if isinstance(value, dict))]
    return frozenset(size for part in parts if isinstance(size := part.get("vocab_size"), int))
