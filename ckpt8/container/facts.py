"""What a container says of its tensors, codecs and errors, for reports. Nothing here needs torch."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from ckpt8.codecs import codec_from_config
from ckpt8.codecs.error_stats import MomentError, NoiseError, UpdateError, WeightError, read_error
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK, Manifest, ParameterRecord, StorageRecord, TensorRecord
from ckpt8.core.tensors import Role

SKELETON_ROLE, FILE_ROLE = "structure", "file"


def skeleton_role(member_format: str) -> str:
    """What the bytes outside the storages of a member are called: of what is no checkpoint they are all it has."""
    return FILE_ROLE if member_format in (FILE, SYMLINK, DIRECTORY) else SKELETON_ROLE


def codec_name(config: dict[str, Any]) -> str:
    """A stored configuration in one word: ``companded8/1(signed=False, Q=255)``, without defaults and storages."""
    codec = codec_from_config(config)
    default = type(codec)()
    given = [
        f"{key}={value}"
        for key, value in config.items()
        if key not in ("id", "runs", *codec.companions) and value != getattr(default, key)
    ]
    return codec.id + (f"({', '.join(given)})" if given else "")


def tensor_facts(manifest: Manifest, tensor: TensorRecord) -> dict[str, Any]:
    """Role, element type, and of its storage codec, sizes in bytes, error and why it is lossless, if it need not be."""
    record = manifest.storages[tensor.storage]
    return {
        "role": record.role.value,
        "dtype": tensor.dtype.label,
        "codec": codec_name(record.codec),
        "reason": record.reason,
        "elements": record.nbytes // tensor.dtype.itemsize,
        "bytes": record.nbytes,
        "stored_bytes": record.stored_bytes,
        "parts": {part: sum(table.lengths) for part, table in record.parts.items()},
        "masters": _masters(manifest, record),
        "error": error_facts(record.error),
    }


def _masters(manifest: Manifest, record: StorageRecord) -> list[str]:
    """The storages that a reference leads to."""
    runs = record.codec.get("runs", []) if record.is_reference else []
    return [manifest.storages[index].name for index in dict.fromkeys(run[0] for run in runs) if index is not None]


def total_errors(manifest: Manifest) -> dict[str, Any]:
    """Errors of the whole file by what they are errors of; None where nothing was measured."""
    weights, updates = WeightError(), UpdateError()
    moments = {Role.MOMENT1: MomentError(), Role.MOMENT2: MomentError()}
    counts: Counter[str] = Counter()
    for record in manifest.storages:
        error = read_error(record.error)
        if isinstance(error, WeightError):
            weights.merge(error)
        elif isinstance(error, MomentError) and record.role in moments:
            moments[record.role].merge(error)
            counts[record.role.value] += 1
    known = [error for p in manifest.parameters if isinstance(error := read_error(p.error), UpdateError)]
    for error in known:
        updates.merge(error)
    return {
        "weight": weight_facts(weights) if weights.count else None,
        **{role.value: _moment_facts(error) if counts[role.value] else None for role, error in moments.items()},
        "update": {**update_facts(updates), "parameters": len(known)} if known else None,
        "update_unknown": sum(_is_unknown(manifest, parameter) for parameter in manifest.parameters),
    }


def _is_unknown(manifest: Manifest, parameter: ParameterRecord) -> bool:
    codecs = (codec_from_config(manifest.storages[index].codec) for index in parameter.moments.values())
    lossy = any(codec.measured_as is not None for codec in codecs)
    return lossy and parameter.error is None


def weight_facts(error: WeightError) -> dict[str, Any]:
    """Errors of weights."""
    return {
        "max_relative": error.max_relative,
        "mean_relative": error.mean_relative,
        "max_bf16_ulp": error.max_bf16_ulp,
    }


def _noise_facts(error: NoiseError) -> dict[str, Any]:
    return {"nmse": error.nmse if math.isfinite(error.nmse) else None, "snr_db": error.snr_db}


def _moment_facts(error: MomentError) -> dict[str, Any]:
    return {**_noise_facts(error), "max_scaled": error.max_scaled}


def update_facts(error: UpdateError) -> dict[str, Any]:
    """Errors in update space."""
    return {**_noise_facts(error), "max_error": error.max_error, "max_update": error.max_update}


def error_facts(stored: dict[str, Any] | None) -> dict[str, Any] | None:
    """A stored record as the figures that people read."""
    match read_error(stored):
        case WeightError() as weight:
            return weight_facts(weight)
        case MomentError() as moment:
            return _moment_facts(moment)
        case UpdateError() as update:
            return update_facts(update)
    return None
