"""Opens what ``convert`` reads: one file, or a directory of a known layout, as one tree over one address space.

Two layouts are here, the others are modules of their own:

* directories of torch.distributed.checkpoint: tensors are put together from the slices that the processes wrote.
  Several checkpoints in one directory are one, unless two hold a value of the same name: some programs save the model
  and the optimizer into two folders of a directory;
* directories of transformers, accelerate and diffusers: weights in one file or in shards, an optimizer or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.names import NamesFromWeights, rank_file
from ckpt8.checkpoint.meaning.nodes import is_bare_state_dict
from ckpt8.checkpoint.meaning.optimizer_state import quantised_weights
from ckpt8.checkpoint.meaning.pairing import saved_parameters
from ckpt8.checkpoint.meaning.state_dicts import TOP_LEVEL, Candidate, find
from ckpt8.checkpoint.readers.dcp import DcpMember
from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.readers.directory import open_directory
from ckpt8.checkpoint.readers.entries import DirectoryMember, walk
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.distributed import tree_of
from ckpt8.checkpoint.sources.opening import check_storages, open_source
from ckpt8.checkpoint.tree import Checkpoint, iter_nodes
from ckpt8.container.joined import is_stored
from ckpt8.container.sharded import FOLDER, find_sharded
from ckpt8.converting import deepspeed, ranks
from ckpt8.converting.choice import SINGLE_FILE, Content, adopt_member, check_optimizer, tie_again
from ckpt8.core.errors import InputError, UnsupportedError, UsageError, require
from ckpt8.core.json_text import parse_any_json
from ckpt8.core.text import listed, printable, shown

_LISTED = 20

PER_RANK = "per-rank"
"""The layout of files that the ranks of a job wrote, each its own."""


@contextmanager
def open_content(path: Path, *, member: str | None = None, threads: int | None = None) -> Iterator[Content]:
    """Open a source; ``member`` names one file of a directory. Raises InputError, and UsageError for ``member``.

    Compares the checksums that the source states, outside a container, which checks its own: a target gets new
    checksums, and those would hide damage. The files of a trainer beside what ranks have packed are ``others``.
    """
    with ExitStack() as opened:
        members = opened.enter_context(open_source(path, threads=threads))
        chosen = members if member is None else members.only(member)
        if not is_stored(path):
            for file in chosen.opened:
                check_storages(file.checkpoint, str(path) if members.directory is None else f"{path}: {file.path}")
        content = content_of(chosen)
        for _, node in iter_nodes(content.data.tree):
            # No target format says what the codes of a model quantised for inference mean.
            if names := quantised_weights(node) if isinstance(node, Mapping) else []:
                are = f"and {len(names) - 1} more are" if names[1:] else "is"
                raise UnsupportedError(
                    f"{path}: {printable(names[0])} {are} quantised for inference, codes with a scale; convert what "
                    "they were made from"
                )
        if find_sharded(path) not in (None, path):
            beside = [entry for entry in walk(path) if entry.path.partition("/")[0] != FOLDER]
            content.others += opened.enter_context(open_directory(path, beside, decode=False)) if beside else ()
        yield content


def layout_of(members: Bundle) -> str | None:
    """The id of the first layout that matches, ``file`` for a single file, None for a directory of no known layout."""
    return next((layout_id for layout_id, (matches, _) in LAYOUTS.items() if matches(members)), None)


def content_of(members: Bundle) -> Content:
    """Open members as one tree. Raises InputError, and UsageError for a directory of no known layout."""
    if (layout := layout_of(members)) is None:
        known = listed((member.path for member in members.checkpoints), _LISTED)
        require(known, f"{members.path}: a directory without a checkpoint that can be read")
        raise UsageError(f"{members.path}: a directory of no known layout; choose a file with --member: {known}")
    content = LAYOUTS[layout][1](members)
    content.layout = layout
    return content


def _assemble_file(members: Bundle) -> Content:
    require(members.checkpoints, f"{members.path}: holds no checkpoint that can be converted")
    data, checkpoint = Composite(str(members.path)), members.checkpoints[0].checkpoint
    data.adopt(checkpoint)
    data.tree = checkpoint.tree
    return Content(data)


def _is_distributed(members: Bundle) -> bool:
    """Whether there is a ``.metadata`` with its files."""
    return bool(members.distributed) or any(member.holds_tensors for member in members.opened)


def assemble_distributed(members: Bundle) -> Content:
    """``{"model": {name: tensor}, "optimizer": ..., ...}`` as it was saved, with tied weights as one.

    Raises InputError for damage, UsageError where two checkpoints hold the same name.
    """
    data = Composite(str(members.path))
    by_home: dict[int, list[DcpMember]] = defaultdict(list)
    others = []
    for member in members.opened:
        if isinstance(member, DcpMember):
            by_home[id(member.home)].append(member)
        elif member.holds_tensors:
            raise InputError(f"{data.label}: {member.path}: {member.reason}; it cannot be converted")
        elif member.path.rpartition("/")[2] != METADATA:
            others.append(member)
    content = Content(data, others=others)
    data.tree = {}
    for files in by_home.values():
        tree = tree_of(data, files, content.notes)
        if both := data.tree.keys() & tree.keys():
            folders = listed(sorted({same[0].path.rpartition("/")[0] or "." for same in by_home.values()}))
            name = shown(min(map(str, both)))
            raise UsageError(f"{data.label}: several checkpoints hold {name}; choose one with --member: {folders}")
        data.tree |= tree
    tie_again(data)
    return content


_MODEL_FILES = (
    "model.safetensors",
    "pytorch_model.bin",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
    "adapter_model.bin",
)
"""Names of a model's only file, the preferred one first."""

_INDEX = ".index.json"
_MAX_INDEX_BYTES = 64 << 20


def _is_model_directory(members: Bundle) -> bool:
    """Whether there is a file of weights, or an index of some, at the top."""
    return any(member.path in _MODEL_FILES or _is_index(member.path) for member in members.opened)


def _assemble_model(members: Bundle) -> Content:
    """``{"model": ..., "optimizer": ...}``, with ``param_names`` where the names are known.

    Raises InputError, and UsageError for several optimizers.
    """
    data = Composite(str(members.path))
    top = {member.path: member for member in members.opened if "/" not in member.path}
    shards = _shards(top, data.label)
    data.tree = {"model": _merged(shards, data)}
    names = NamesFromWeights([(member.path, member.checkpoint) for member in members.opened])
    optimizers = [member for member in top.values() if _is_optimizer(member.checkpoint)]
    spread = [member for member in optimizers if rank_file(member.path, member.checkpoint.tree)]
    optimizers = [member for member in optimizers if member not in spread]
    if len(optimizers) > 1:
        paths = listed((member.path for member in optimizers), _LISTED)
        raise UsageError(f"{data.label}: has several optimizers; choose a file with --member: {paths}")
    for member in optimizers:
        data.adopt(member.checkpoint)
        check_optimizer(data.label, Candidate(member.path, member.checkpoint.tree))
        data.tree["optimizer"] = _named(member.checkpoint.tree, names.of_member(member.path))
    used = {id(member) for member in (*shards, *optimizers)}
    unused = [member for member in members.opened if id(member) not in used and not _is_index(member.path)]
    others = [member for member in unused if member.path not in _MODEL_FILES]
    notes = [f"{member.path}: the same weights again, not used" for member in unused if member not in others]
    notes += [f"left out: {member.path}: the file of one rank, with its parts of the tensors" for member in spread]
    ordered = len(shards) == 1 and shards[0].checkpoint.format != "safetensors"
    return Content(data, others=others, notes=notes, ordered=ordered)


def _is_index(name: str) -> bool:
    return name.endswith(_INDEX) and "/" not in name


def _is_optimizer(checkpoint: Checkpoint) -> bool:
    models, optimizers = find(checkpoint.tree)
    return not models and [candidate.path for candidate in optimizers] == [TOP_LEVEL]


def _shards(top: Mapping[str, DirectoryMember], label: str) -> list[DirectoryMember]:
    """The files of the model, from its index if it has one. Raises InputError."""
    if single := [top[name] for name in _MODEL_FILES if name in top]:
        return single[:1]
    # Weights in safetensors come before the same ones in pickles.
    index = min((name for name in top if _is_index(name)), key=lambda name: ("safetensors" not in name, name))
    checkpoint = top[index].checkpoint
    content = bytearray(min(checkpoint.size, _MAX_INDEX_BYTES))
    checkpoint.read_into(0, memoryview(content))
    try:
        return [top[name] for name in dict.fromkeys(parse_any_json(content, index).get("weight_map").values())]
    except (KeyError, TypeError, AttributeError, InputError) as exc:
        missing = f"names {str(exc)[:80]}, which is not there" if isinstance(exc, KeyError) else "cannot be read"
        raise InputError(f"{label}: the index {index} {missing}") from exc


def _merged(shards: Sequence[DirectoryMember], data: Composite) -> dict[str, Any]:
    """The state dict of all shards together."""
    merged: dict[str, Any] = {}
    for member in shards:
        tree = member.checkpoint.tree
        require(is_bare_state_dict(tree), f"{data.label}: {member.path} is not a state dict of a model")
        for name, value in adopt_member(data, member, tree).items():
            if name in merged:
                raise InputError(f"{data.label}: {name!r} is in two files of weights; choose one with --member")
            merged[name] = value
    return merged


def _named(tree: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The optimizer, with ``param_names`` in each group that has none and all of whose names are in ``names``."""
    known = {saved.identifier: names[saved.name] for saved in saved_parameters(tree) if saved.name in names}
    groups = []
    for group in tree["param_groups"]:
        own = [known.get(identifier) for identifier in group["params"]]
        complete = own and None not in own and "param_names" not in group
        groups.append({**group, "param_names": own} if complete else group)
    return {**tree, "param_groups": groups}


LAYOUTS: Mapping[str, tuple[Callable[[Bundle], bool], Callable[[Bundle], Content]]] = {
    SINGLE_FILE: (lambda members: members.directory is None, _assemble_file),
    "deepspeed-universal": (deepspeed.is_universal, deepspeed.assemble_universal),
    "deepspeed-partitions": (deepspeed.holds_partitions, deepspeed.refuse_partitions),
    "dcp": (_is_distributed, assemble_distributed),
    "model-directory": (_is_model_directory, _assemble_model),
    PER_RANK: (ranks.matches, ranks.assemble),
}
"""A file, and the layouts of directories, by id, in the order in which ``layout_of`` tries them.

Of each a function that says whether a source has this layout, judged by names and trees alone, and one that gives the
source as one tree: it raises InputError for damage, UsageError where a choice must be made.
"""
