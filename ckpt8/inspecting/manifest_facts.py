"""Facts of a manifest in the words of ``inspect``: of a container, or of a raw checkpoint, see ``opening.describe``.

Nothing here needs torch.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import SLICE, display_names, split_member, whole_name
from ckpt8.checkpoint.meaning.quantised_state import find_low_bit
from ckpt8.checkpoint.meaning.update_rules import read_rule
from ckpt8.codecs import codec_from_config
from ckpt8.compressing.budget import PRESET_BUDGETS
from ckpt8.container.facts import FILE_ROLE, SKELETON_ROLE, codec_kind, skeleton_role
from ckpt8.container.manifest import Manifest
from ckpt8.container.sharded import RANK_FILE
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


def framework_of_files(paths: Collection[str]) -> str | None:
    """The program that wrote the files of a directory; None if no name shows it, or names show several."""
    found = set(frameworks_by_folder(paths).values())
    return found.pop() if len(found) == 1 else None


def frameworks_by_folder(paths: Collection[str]) -> dict[str, str]:
    """The program that wrote the files of a folder, by the path of the folder; folders inside belong to it."""
    found: dict[str, str] = {}
    for name, pattern in _BY_FILES:
        for path in filter(pattern.fullmatch, paths):
            found.setdefault(path.rpartition("/")[0], name)
    return {
        folder: found[folder]
        for folder in sorted(found)
        if not any(other != folder and is_below(folder, other) for other in found)
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
        if found := SLICE.search(tensor.name):
            ends = [place.rpartition(":")[2] for place in found[0][1:-1].split(",")]
            if len(ends) == len(tensor.shape):
                whole = slices[tensor.name] = whole_name(tensor.name)
                reached = [int(end or size) for end, size in zip(ends, tensor.shape, strict=True)]
                known = sizes.get(whole, reached)
                sizes[whole] = [max(pair) for pair in zip(known, reached, strict=False)]
    return {name: sizes[whole] for name, whole in slices.items()}


def unrecognised(manifest: Manifest) -> list[dict[str, Any]]:
    """The fp32 tensors that stay lossless because nothing shows what they are, by the rule that would compress them.

    Places with less than a hundredth of the bytes, and tensors that presets never compress, are not listed.
    """
    storages: dict[str, list[int]] = defaultdict(list)
    for tensor in manifest.tensors:
        record = manifest.storages[tensor.storage]
        is_unknown = record.role is Role.OTHER and not codec_from_config(record.codec).is_lossy
        if is_unknown and tensor.dtype is DType.FLOAT32 and not is_small(tuple(tensor.shape)):
            storages[_rule_for(tensor.name)].append(tensor.storage)
    least = sum(member.size for member in manifest.members) / 100
    rows: list[dict[str, Any]] = []
    for rule, found in storages.items():
        nbytes = sum(manifest.storages[index].nbytes for index in set(found))
        if nbytes >= least:
            rows.append({"rule": rule, "tensors": len(found), "bytes": nbytes})
    return sorted(rows, key=lambda row: -row["bytes"])


def _rule_for(name: str) -> str:
    """A rule for all tensors beside one: of an optimizer's state those with its key, else those under its first key."""
    member, bare = split_member(name)
    prefix = f"{member}:" if member else ""
    parts = [re.sub(r"[*?[]", "?", part) for part in bare.split(".")]
    if "state" in parts[:-2]:
        return f"{prefix}{'.'.join(parts[: parts.index('state') + 1])}.*.{parts[-1]}=companded8"
    return f"{prefix}{parts[0]}{'.*' if len(parts) > 1 else ''}=split24"


def sizes_by(column: str, manifest: Manifest) -> list[dict[str, Any]]:
    """Storages, elements and bytes by role and ``column``, ``dtype`` or ``codec``; sorted by both."""
    rows: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    types, skeletons = dtypes(manifest), skeleton_roles(manifest)
    codecs: dict[int, str] = {}  # those of a pack are one object
    for index, record in enumerate(manifest.storages):
        if column == "dtype":
            value = types[index].label
        else:
            value = codecs.get(id(record.codec)) or codecs.setdefault(id(record.codec), codec_kind(record.codec))
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


def moment_names(manifest: Manifest) -> list[dict[str, str]]:
    """For every parameter the names of its moments' storages by slot."""
    storages = manifest.storages
    return [{slot: storages[index].name for slot, index in each.moments.items()} for each in manifest.parameters]


def shown_names(manifest: Manifest) -> list[dict[str, Any]]:
    """``name`` and ``named`` of every parameter, see ``display_names``."""
    given = [
        (parameter.name, list(names.values()))
        for parameter, names in zip(manifest.parameters, moment_names(manifest), strict=True)
    ]
    return display_names(given, directory=manifest.directory is not None)


def parameter_facts(manifest: Manifest) -> list[dict[str, Any]]:
    """For every parameter with moments its name, their names, its update rule, or the reason why it has none."""
    rows = zip(shown_names(manifest), moment_names(manifest), manifest.parameters, strict=True)
    return [
        {**shown, "moments": names, "rule": read_rule(parameter.rule), "reason": parameter.reason}
        for shown, names, parameter in rows
    ]
