"""Facts of a manifest in the words of ``inspect``: of a container, or of a raw checkpoint, see ``tensors.describe``.

Nothing here needs torch.

``layers_of`` groups storages by the part of the model that their parameter belongs to, and adds up bytes. The first
number in the name of a parameter counts layers (``transformer.h.0``); parameters before and after the layers are
grouped by module (``transformer.wte``, ``lm_head``). Moments and other state of an optimizer belong to the layer of
their parameter if its name is known.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from ckpt8.checkpoint.meaning.optimizer_state import find_low_bit, read_rule
from ckpt8.checkpoint.meaning.parameter_names import (
    SLICE,
    display_names,
    in_model_order,
    layer_of,
    plain_path,
    split_member,
    whole_name,
    whole_tensor,
)
from ckpt8.checkpoint.vocabulary import MASTER_LISTS
from ckpt8.codecs import codec_from_config
from ckpt8.compressing.policy import PRESET_BUDGETS
from ckpt8.container.facts import FILE_ROLE, SKELETON_ROLE, codec_kind, skeleton_role
from ckpt8.container.manifest import Manifest, StorageRecord
from ckpt8.container.sharded import RANK_FILE
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import DType, Role, TensorSpec, is_small

ROLE_WORDS = {
    "weight": "weights",
    "moment1": "first moments",
    "moment2": "second moments",
    "other": "other tensors",
    SKELETON_ROLE: "structure of the files",
    FILE_ROLE: "files without tensors",
}
"""Every role in words, in the order of reports."""

FIGURE_WORDS = {"update": "update space", "replayed": "first replayed step"}
"""What the error of an update is, in words: see ``facts.figure_of``."""

_BY_FILES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("Hugging Face Trainer", re.compile(r"(?:.*/)?trainer_state\.json")),
    ("accelerate", re.compile(r"(?:.*/)?random_states_\d+\.pkl")),
    ("DeepSpeed", re.compile(r"(?:.*/)?[^/]*_optim_states\.pt")),
    ("verl", re.compile(r"(?:.*/)?fsdp_config\.json")),
    ("torch.distributed.checkpoint", re.compile(rf"(?:.*/)?(?:\.metadata|{RANK_FILE})")),
)


def asked_words(preset: str, budget: Mapping[str, float] | None) -> str:
    """What a container was made with, in words."""
    known = PRESET_BUDGETS.get(preset)
    if not budget:
        return f"preset {preset}" + (", of an earlier version" if known else "")
    if known is not None and (known.steps, known.cap) == (budget.get("steps"), budget.get("cap")):
        return f"preset {preset}"
    return f"budget {float(budget.get('steps', 0.0))!r}".removesuffix(".0")


def frameworks_by_folder(paths: Collection[str]) -> dict[str, str]:
    """The program that wrote the files of a folder, by the path of the folder; folders inside belong to it."""
    by_folder: dict[str, str] = {}
    for name, pattern in _BY_FILES:
        for path in filter(pattern.fullmatch, paths):
            by_folder.setdefault(path.rpartition("/")[0], name)
    return {
        folder: by_folder[folder]
        for folder in sorted(by_folder)
        if not any(other != folder and is_below(folder, other) for other in by_folder)
    }


def is_below(path: str, folder: str) -> bool:
    """Whether a path is in a folder, or is that folder; the empty folder is the whole directory."""
    return not folder or path == folder or path.startswith(f"{folder}/")


def skeleton_roles(manifest: Manifest) -> dict[int, str]:
    """``structure`` or ``file`` for every storage that holds the bytes of a member outside its tensors."""
    return {member.skeleton: skeleton_role(member.format) for member in manifest.members}


def dtypes(manifest: Manifest) -> dict[int, DType]:
    """The element type of every storage, from its first tensor: the container stores some as plain bytes."""
    stored = {index: record.dtype for index, record in enumerate(manifest.storages)}
    return stored | {tensor.storage: tensor.dtype for tensor in reversed(manifest.tensors)}


def whole_shapes(manifest: Manifest) -> dict[str, list[int]]:
    """The shapes of the tensors that the file has in slices, by the name of each slice."""
    sizes: dict[str, list[int]] = {}
    slices: dict[str, str] = {}
    for tensor in manifest.tensors:
        if match := SLICE.search(tensor.name):
            ends = [place.rpartition(":")[2] for place in match[0][1:-1].split(",")]
            if len(ends) == len(tensor.shape):
                whole = slices[tensor.name] = whole_name(tensor.name)
                reached = [int(end or size) for end, size in zip(ends, tensor.shape, strict=True)]
                sizes[whole] = [max(pair) for pair in zip(sizes.get(whole, reached), reached, strict=False)]
    return {name: sizes[whole] for name, whole in slices.items()}


def unrecognised(manifest: Manifest) -> list[dict[str, Any]]:
    """The fp32 tensors that stay lossless because nothing shows what they are, by the rule that would compress them.

    Places with less than a hundredth of the bytes, and tensors that presets never compress, are not listed.
    """
    records = ((tensor, manifest.storages[tensor.storage]) for tensor in manifest.tensors)
    storages = grouped(
        (_rule_for(tensor.name), tensor.storage)
        for tensor, record in records
        if record.role is Role.OTHER
        and not codec_from_config(record.codec).is_lossy
        and tensor.dtype is DType.FLOAT32
        and not is_small(tuple(tensor.shape))
    )
    least = sum(member.size for member in manifest.members) / 100
    rows: list[dict[str, Any]] = [
        {
            "rule": rule,
            "tensors": len(indices),
            "bytes": sum(manifest.storages[index].nbytes for index in set(indices)),
        }
        for rule, indices in storages.items()
    ]
    return sorted((row for row in rows if row["bytes"] >= least), key=lambda row: -row["bytes"])


def _rule_for(name: str) -> str:
    """A rule for all tensors beside one: of an optimizer's state those with its key, else those under its first key.

    A list at the top has one rule.
    """
    member, bare = split_member(name)
    prefix = f"{member}:" if member else ""
    parts = [re.sub(r"[*?[]", "?", part) for part in bare.split(".")]
    if parts[0].isdigit():
        return f"{prefix}[0-9]*=split24"
    if "state" in parts[:-2]:
        return f"{prefix}{'.'.join(parts[: parts.index('state') + 1])}.*.{parts[-1]}=companded8"
    return f"{prefix}{parts[0]}{'.*' if len(parts) > 1 else ''}=split24"


def sizes_by(column: str, manifest: Manifest) -> list[dict[str, Any]]:
    """Storages, elements and bytes by role and ``column``, ``dtype`` or ``codec``; sorted by both."""
    rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    types, skeletons = dtypes(manifest), skeleton_roles(manifest)
    codecs: dict[int, str] = {}  # those of a pack are one object
    for index, record in enumerate(manifest.storages):
        value = types[index].label if column == "dtype" else codecs.get(id(record.codec))
        if value is None:
            value = codecs[id(record.codec)] = codec_kind(record.codec)
        row = rows[skeletons.get(index, record.role.value), value]
        row["storages"] += 1
        row["elements"] += record.nbytes // types[index].itemsize
        row["bytes"] += record.nbytes
        row["stored_bytes"] += record.stored_bytes
    return [{"role": role, column: value, **row} for (role, value), row in sorted(rows.items())]


def low_bit_state(manifest: Manifest) -> list[dict[str, Any]]:
    """Quantised optimizer state of another program, see ``find_low_bit``."""
    return find_low_bit(
        TensorSpec(tensor.name, manifest.storages[tensor.storage].role, tensor.dtype, tuple(tensor.shape))
        for tensor in manifest.tensors
    )


def shown_names(manifest: Manifest) -> list[dict[str, Any]]:
    """``name`` and ``named`` of every parameter, see ``display_names``."""
    given = [
        (parameter.name, [manifest.storages[index].name for index in parameter.moments.values()])
        for parameter in manifest.parameters
    ]
    return display_names(given, directory=manifest.directory is not None)


def parameter_facts(manifest: Manifest) -> list[dict[str, Any]]:
    """For every parameter with moments its name, their names, its update rule, or the reason why it has none."""
    return [
        {
            **shown,
            "moments": {slot: manifest.storages[index].name for slot, index in parameter.moments.items()},
            "rule": read_rule(parameter.rule),
            "reason": parameter.reason,
        }
        for shown, parameter in zip(shown_names(manifest), manifest.parameters, strict=True)
    ]


STEP_KEYS = ("global_step", "step", "iter_num", "iteration", "iter", "global_steps", "num_updates", "steps")

GLOBAL_KEYS = ("global_step", "iter_num", "iteration", "global_steps", "num_updates")
"""Those that no scheduler or random generator uses for a count of its own."""

EPOCH_KEYS = ("epoch", "current_epoch", "epochs")
LARGEST = 1 << 53


def first_number(trees: Sequence[Mapping[Any, Any]], keys: Iterable[str], *, whole: bool) -> int | float | None:
    """The first number under one of the keys, in their order; whole numbers only if ``whole``."""
    kinds = (int,) if whole else (int, float)
    values: Iterator[Any] = (tree.get(key) for key in keys for tree in trees)
    return next((value for value in values if type(value) in kinds and 0 <= value < LARGEST), None)


UNNAMED = "optimizer state without names"
MASTERS = "flat master weights"
OUTSIDE_LAYERS = "other"


def layers_of(manifest: Manifest) -> list[dict[str, Any]]:
    """Groups in the order of the source: {group, parameters, bytes, roles}; ``roles`` are bytes by role.

    ``parameters`` of a group are the elements of its weights; copies of a weight, as an average or masters, count once.
    """
    owners: dict[str, str] = {}
    for parameter, shown in zip(manifest.parameters, shown_names(manifest), strict=True):
        path = plain_path(shown["name"]) if shown["named"] else ""
        owners.update((_state(manifest.storages[index].name), path) for index in parameter.moments.values())
    types, skeletons = dtypes(manifest), skeleton_roles(manifest)
    storages = [(record, types[index]) for index, record in enumerate(manifest.storages) if index not in skeletons]
    names = {record.name for record, _ in storages}
    sizes: dict[str, Counter[str]] = defaultdict(Counter)
    counts: dict[tuple[str, str, str], int] = {}
    for record, dtype in storages:
        owner = owners.get(_state(record.name)) if owners else None
        plain = plain_path(record.name) if record.role is Role.WEIGHT else ""
        group = _group(record, owner, plain)
        sizes[group][record.role.value] += record.nbytes
        # The scale of codes of 8 bits is no parameter, the codes are.
        is_scale = record.name.endswith("weight_scale") and record.name.removesuffix("_scale") in names
        if record.role is Role.WEIGHT and not is_scale and (dtype.is_floating or f"{record.name}_scale" in names):
            key = group, owner or plain, "".join(SLICE.findall(record.name))
            counts.setdefault(key, record.nbytes // dtype.itemsize)
    totals: Counter[str] = Counter()
    for (group, _, _), count in counts.items():
        totals[group] += count
    elsewhere = any(group != MASTERS for group in totals)
    return [
        {
            "group": group,
            "parameters": 0 if group == MASTERS and elsewhere else totals[group],
            "bytes": sizes[group].total(),
            "roles": dict(sizes[group]),
        }
        for group in sorted(in_model_order(sizes), key=lambda group: group in (UNNAMED, MASTERS, OUTSIDE_LAYERS))
    ]


def _state(name: str) -> str:
    """The path of the state of a parameter, from the name of a tensor in it."""
    return whole_tensor(name).rpartition(".")[0]


def _group(stored: StorageRecord, path: str | None, plain: str) -> str:
    """The group of a storage. ``path`` is that of its optimizer's parameter, if it has one, ``plain`` its own."""
    if path is not None:
        return layer_of(path) if path else UNNAMED
    if stored.role is Role.WEIGHT:
        return MASTERS if not MASTER_LISTS.isdisjoint(re.split(r"[.:]", stored.name)) else layer_of(plain)
    return UNNAMED if stored.role in (Role.MOMENT1, Role.MOMENT2) else OUTSIDE_LAYERS
