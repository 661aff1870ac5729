"""The ``config.json`` of a model with quantised weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.transformers_order import LONGEST_CONFIG
from ckpt8.converting.content import Content
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.urls import refuse_url
from ckpt8.core.json_text import parse_any_json

CONFIG = "config.json"
_QUANTIZATION = "quantization_config"
_TYPES = ("dtype", "torch_dtype")
"""Keys of a model's element type, in new and in old versions of transformers."""

_BF16 = "bfloat16"


def read_config(content: Content, given: Path | None) -> dict[str, Any] | None:
    """The configuration of the model: the file ``given``, or that of the source; None where there is none.

    Raises InputError where it cannot be read, UsageError where it says that the model is quantised already.
    """
    if given is not None:
        where, text = str(given), _read_file(given)
    else:
        member = next((each for each in content.others if each.path == CONFIG), None)
        if member is None:
            return None
        where = f"{content.data.label}: {CONFIG}"
        _check_size(where, member.checkpoint.size)
        text = bytearray(member.checkpoint.size)
        member.checkpoint.read_into(0, memoryview(text))
    try:
        config = parse_any_json(text, where)
        if not isinstance(config, dict):
            raise InputError(f"{where}: is not the configuration of a model")
        with_quantization(config, {})
    except (ValueError, RecursionError) as exc:
        raise InputError(f"{where}: is no JSON, or none that can be written again: {exc}") from exc
    if _QUANTIZATION in config:
        raise UsageError(f"{where}: the model is quantised already; convert the checkpoint that it was made of")
    return config


def _read_file(path: Path) -> bytearray:
    refuse_url(path)
    try:
        _check_size(str(path), path.stat().st_size)
        return bytearray(path.read_bytes())
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror or exc}") from exc


def _check_size(where: str, size: int) -> None:
    if size > LONGEST_CONFIG:
        raise InputError(f"{where}: has {size} bytes, too many for the configuration of a model")


def with_quantization(config: Mapping[str, Any] | None, quantization: Mapping[str, Any]) -> bytes:
    """The text of a configuration with that of the quantisation, and bf16 as the type of everything else."""
    found = _as_bf16(config or {})
    if not any(key in found for key in _TYPES):
        found["torch_dtype"] = _BF16
    found[_QUANTIZATION] = dict(quantization)
    return (json.dumps(found, indent=2, ensure_ascii=True) + "\n").encode()


def _as_bf16(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with bf16 for every element type, of the model and of its parts."""
    return {
        key: _BF16 if key in _TYPES else _as_bf16(value) if isinstance(value, dict) else value
        for key, value in config.items()
    }
