"""Keys and names that tell the role of a tensor: of models, lists of masters, buffers."""

from __future__ import annotations

import re
from collections.abc import Sequence

BUFFERS = frozenset(
    {
        "running_mean",
        "running_var",
        "num_batches_tracked",
        "n_averaged",
        "inv_freq",
        "position_ids",
        "cos_cached",
        "sin_cached",
        "freqs_cis",
        "masked_bias",
    }
)
"""The last components of names in a state dict that are no parameters."""

MODEL_ROOTS = frozenset(
    [
        "model",
        "state_dict",
        "model_state_dict",
        "model_state",
        "module",
        "params",
        "_parameters",
        "ema",
        "ema_model",
        "ema_state_dict",
        "model_ema",
        "state_dict_ema",
        "params_ema",
        "ema_params",
        "shadow_params",
        "g_ema",
    ]
)
"""Keys that lead to a model, or to an average of one, and name no part of it."""

MODEL_KEYS = MODEL_ROOTS | frozenset(
    [
        "net",
        "network",
        "weights",
        "backbone",
        "encoder",
        "decoder",
        "generator",
        "discriminator",
        "actor",
        "critic",
        "policy",
        "teacher",
        "student",
    ]
)
"""Keys under which checkpoints in the wild keep model weights or an average of them."""


_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_AVERAGE = re.compile(
    r"ema|swa|avg|averaged?s?|mean|shadow|polyak|targ(?:et)?|teacher|old|best|prev(?:ious)?|slow|copy|init(?:ial)?"
)


def words(path: str) -> list[str]:
    """The words of a key or path in lower case: those of ``optG`` and ``opt_g`` are ``opt`` and ``g``."""
    return [word.lower() for word in _WORD.findall(path)]


def is_average(path: str) -> bool:
    """Whether a word of a key says that it leads to a copy of a model that no optimizer trains."""
    return any(map(_AVERAGE.fullmatch, words(path)))


def model_path(parts: Sequence[str]) -> tuple[str, ...] | None:
    """The keys that lead to a model, and the name of a weight, of a path or name; None where no key names a model."""
    at = next((k for k, part in enumerate(parts[:-1]) if part in MODEL_KEYS), None)
    return None if at is None else (*parts[: at + 1], ".".join(parts[at + 1 :]))


STATE_LISTS = "base_optimizer_state"
"""The key under which DeepSpeed's elastic checkpoints keep a list of bare states, one for each group."""

MASTER_LISTS = frozenset(
    {
        "fp32_from_fp16_params",
        "fp32_from_fp16",
        "fp32_groups",
        "fp32_groups_flat",
        "fp32_flat_groups",
        "single_partition_of_fp32_groups",
    }
)
"""Keys under which Megatron, apex and DeepSpeed keep the fp32 master weights of a model that trains in 16 bits."""
