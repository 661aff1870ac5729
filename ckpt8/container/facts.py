"""Facts about the tensors, codecs and errors of a container, for reports. Imports no torch."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from ckpt8.codecs import BUDGETED, codec_from_config
from ckpt8.codecs.error_stats import LatticeError, MomentError, UpdateError, WeightError, read_error
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK, Manifest, ParameterRecord, StorageRecord, TensorRecord
from ckpt8.container.steps import NO_PARAMETER, NOT_MEASURED
from ckpt8.core.tensors import Role

SKELETON_ROLE, FILE_ROLE = "structure", "file"


def skeleton_role(member_format: str) -> str:
    """How reports name the bytes outside the storages of a member: the whole of a file that is no checkpoint."""
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


def codec_kind(config: dict[str, Any]) -> str:
    """A stored configuration in one word; of a codec of a budget the id alone: fields differ for every storage."""
    return str(config["id"]) if config["id"] in dict(BUDGETED) else codec_name(config)


def tensor_facts(manifest: Manifest, tensor: TensorRecord) -> dict[str, Any]:
    """Role and element type of a tensor; codec, sizes in bytes and error of its storage, and why that is lossless."""
    record = manifest.storages[tensor.storage]
    return {
        "role": record.role.value,
        "dtype": tensor.dtype.label,
        "codec": codec_name(record.codec),
        "reason": record.reason,
        "elements": record.nbytes // tensor.dtype.itemsize,
        "bytes": record.nbytes,
        "stored_bytes": record.stored_bytes,
        "parts": record.part_bytes,
        "masters": _masters(manifest, record),
        "error": error_facts(record.error),
    }


def _masters(manifest: Manifest, record: StorageRecord) -> list[str]:
    """The names of the storages that a reference copies."""
    runs = record.codec.get("runs", []) if record.is_reference else []
    return [manifest.storages[index].name for index in dict.fromkeys(run[0] for run in runs) if index is not None]


def total_errors(manifest: Manifest, count: Callable[[Iterable[str]], int]) -> dict[str, Any]:
    """The errors of weights, moments and updates over the whole file; None where nothing was measured.

    ``lattice`` are figures of weights on a lattice, ``update`` those in update space, ``replayed`` those of the first
    replayed step: see ``figure_of``. ``count`` counts parameters by their names.
    """
    weights, lattice = WeightError(), LatticeError()
    moments = {Role.MOMENT1: MomentError(), Role.MOMENT2: MomentError()}
    counts: Counter[str] = Counter()
    for record in manifest.storages:
        error = read_error(record.error)
        if isinstance(error, WeightError):
            weights.merge(error)
        elif isinstance(error, LatticeError):
            lattice.merge(error)
            counts["lattice"] += 1
        elif isinstance(error, MomentError) and record.role in moments:
            moments[record.role].merge(error)
            counts[record.role.value] += 1
    steps = {kind: (UpdateError(), list[str]()) for kind in ("update", "replayed")}
    for parameter in manifest.parameters:
        if isinstance(error := read_error(parameter.error), UpdateError):
            total, names = steps[figure_of(parameter)]
            total.merge(error)
            names.append(parameter.name)
    return {
        "weight": figures(weights) if weights.count else None,
        "lattice": figures(lattice) if counts["lattice"] else None,
        **{role.value: figures(error) if counts[role.value] else None for role, error in moments.items()},
        **{
            kind: {**figures(total), "parameters": count(names)} if names else None
            for kind, (total, names) in steps.items()
        },
        **unknown_updates(_unknown_reasons(manifest), count),
    }


def unknown_updates(names: Mapping[str, Iterable[str]], count: Callable[[Iterable[str]], int]) -> dict[str, Any]:
    """How many parameters with lossy moments have an update of unknown error, and how many by reason.

    ``names`` are those of the parameters, by reason.
    """
    reasons = Counter({reason: count(name) for reason, name in names.items()})
    return {"update_unknown": reasons.total(), "update_reasons": dict(reasons.most_common())}


def figure_of(parameter: ParameterRecord) -> Literal["update", "replayed"]:
    """What the error of a parameter's update is: in update space, or of the first replayed step."""
    return "replayed" if (parameter.rule or {}).get("kind") == "replayed" else "update"


def _unknown_reasons(manifest: Manifest) -> dict[str, list[str]]:
    """The parameters with lossy moments whose error of the update is unknown, by the reason for that."""
    lossy = {
        index
        for index, record in enumerate(manifest.storages)
        if record.role in (Role.MOMENT1, Role.MOMENT2) and codec_from_config(record.codec).measured_as is not None
    }
    reasons = defaultdict[str, list[str]](list)
    for parameter in manifest.parameters:
        if parameter.error is None and not lossy.isdisjoint(parameter.moments.values()):
            reasons[parameter.reason or NOT_MEASURED].append(parameter.name)
    lossy.difference_update(*(parameter.moments.values() for parameter in manifest.parameters))
    if others := {manifest.storages[index].name.rpartition(".")[0] for index in lossy}:
        reasons[NO_PARAMETER] += others
    return reasons


def error_facts(stored: dict[str, Any] | None) -> dict[str, Any] | None:
    """The figures of a stored error that people read; None where nothing was measured."""
    error = read_error(stored)
    return figures(error) if error else None


def figures(error: WeightError | LatticeError | MomentError | UpdateError) -> dict[str, Any]:
    """The figures of an error that people read; ``max_scaled`` is None for moments without a scale."""
    if isinstance(error, WeightError):
        return {name: getattr(error, name) for name in ("max_relative", "mean_relative", "max_bf16_ulp")}
    noise = {"nmse": error.nmse if math.isfinite(error.nmse) else None, "snr_db": error.snr_db}
    if isinstance(error, MomentError):
        return {**noise, "max_scaled": error.max_scaled or (None if error.sum_square_error else 0.0)}
    if isinstance(error, LatticeError):
        return {**noise, "max_distance": error.max_distance}
    return {**noise, "max_error": error.max_error, "max_update": error.max_update}
