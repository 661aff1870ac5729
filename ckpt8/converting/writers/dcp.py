"""A directory of torch.distributed.checkpoint as one process writes it; any number of processes can load it.

Its one file is a row of files of ``torch.save``, one for each value. torch plans them, makes the metadata, and saves
each value with holes; this module streams the content into the holes.

``distributed_tree`` makes its state dict, with the names of torch's get_state_dict:

model.<name>, optimizer.state.<name>.<key>, optimizer.param_groups.<number>.<option>, and all else in the tree as it is
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItemType

from ckpt8.checkpoint.meaning.names import parameter_names
from ckpt8.checkpoint.meaning.pairing import saved_names, saved_parameters
from ckpt8.checkpoint.meaning.parameter_names import match
from ckpt8.checkpoint.meaning.state_dicts import Candidate
from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.sources.composite import Composite, computed
from ckpt8.checkpoint.tree import Components, TensorRef, format_path, iter_leaves, iter_nodes
from ckpt8.converting.choice import choose_model, choose_optimizer
from ckpt8.converting.request import OpenFile, Report, Request, new_file
from ckpt8.converting.weights import WeightTypes, strip_wrappers, unpack_tree
from ckpt8.converting.writers.torch_zip import Hollow, Saved, build_hollow, save_hollow, write_saved
from ckpt8.core.errors import UsageError

_MODEL, _OPTIMIZER = "model", "optimizer"


def distributed_tree(data: Composite, key: str | None, types: WeightTypes, report: Report) -> dict[str, Any]:
    """The state dict; with a ``key`` only the model at that path.

    Raises UsageError for several models or optimizers, and for a parameter without a known name.
    """
    model = choose_model(data, key)
    plain = strip_wrappers((str(name) for name in model.node), report)
    weights = {
        plain[str(name)]: types(str(name), value) if isinstance(value, TensorRef) else value
        for name, value in model.node.items()
    }
    if key is not None:
        return {_MODEL: weights}
    tree: dict[str, Any] = {_MODEL: weights}
    used = {id(model.value)}
    if (optimizer := choose_optimizer(data)) is not None:
        tree[_OPTIMIZER] = _named(data, model, optimizer, plain, report)
        used.add(id(optimizer.value))
    others = _without(data.tree, [path for path, node in iter_nodes(data.tree, data.label) if id(node) in used])
    named = others if isinstance(others, dict) else dict(enumerate(others or ()))
    for name, value in named.items():
        if name in tree:
            report.dropped.append(f"{name}: the format needs this name for the model or the optimizer")
        else:
            tree[str(name)] = value
    return tree


def _without(node: Any, paths: Sequence[Components]) -> Any:
    """A copy of a dictionary or list without the values at ``paths``, and without what becomes empty; else None."""
    if () in paths or not isinstance(node, (dict, list)):
        return None
    kept = []
    for name, value in node.items() if isinstance(node, dict) else enumerate(node):
        below = [path[1:] for path in paths if path[0] == str(name)]
        left = _without(value, below) if below else value
        if left or not below:
            kept.append((name, left))
    return dict(kept) if isinstance(node, dict) else [value for _, value in kept]


def _named(
    data: Composite, model: Candidate, optimizer: Candidate, plain: Mapping[str, str], report: Report
) -> dict[str, Any]:
    """The optimizer with names of parameters in place of numbers."""
    names = _names(model, optimizer, plain)
    before = optimizer.node["state"]
    states: dict[str, Any] = {}
    groups = []
    for group in optimizer.node["param_groups"]:
        listed = []
        for identifier in group["params"]:
            name, state = names.get(identifier), before.get(identifier)
            if name is not None:
                listed.append(name)
            elif state:
                raise UsageError(
                    f"{data.label}: {optimizer.path}: parameter {identifier} cannot be named, which this format needs: "
                    "the optimizer has no names, and they do not follow from the order of the model; "
                    f"--key {model.path} writes the model alone"
                )
            else:
                report.dropped.append(f"{optimizer.path}: parameter {identifier}: has neither a name nor a state")
            if name is not None and state:
                states[name] = state
        groups.append({**group, "params": listed, "param_names": list(listed)})
    return {"state": states, "param_groups": groups} | {
        key: value for key, value in optimizer.node.items() if key not in ("state", "param_groups")
    }


def _names(model: Candidate, optimizer: Candidate, plain: Mapping[str, str]) -> dict[int | str, str]:
    """The names of parameters by identifier: those of the model, or the optimizer's own where the model lacks them."""
    given = saved_names(optimizer.node["param_groups"])
    if isinstance(given, dict) and given:
        matched = match(model.node, given.values())
        return {identifier: plain.get(matched.get(name, name), name) for identifier, name in given.items()}
    tree = {_MODEL: model.node, _OPTIMIZER: optimizer.node}
    names = parameter_names(tree)
    return {
        parameter.identifier: plain[names[parameter.name]]
        for parameter in saved_parameters(tree)
        if parameter.name in names
    }


_FILE = "__0_0.distcp"

_MOST_KNOWN = 4096
"""Forms that are kept, of about a kilobyte each."""


def write(request: Request, report: Report) -> None:
    """Write the directory. Raises Ckpt8Error.

    ``model`` and ``optimizer`` have names of parameters for keys, as in torch's get_state_dict; the rest of the
    tree stays as it is. Weights keep their element type unless ``--dtype`` says otherwise; a packed optimizer of
    ckpt8 is unpacked.
    """
    with request.open(report) as content:
        data = content.data
        unpack_tree(data)
        tree = distributed_tree(data, request.key, WeightTypes(data, request.dtype, report), report)
        for path, leaf in iter_leaves(tree, data.label):
            if isinstance(leaf, TensorRef):
                data.check_extent(format_path(path), leaf)
        hollow = build_hollow(data, tree, report, partial(_alone, data))
        values, metadata = _plan(hollow)
        nbytes = sum(value.nbytes for _, value in values if isinstance(value, torch.Tensor))
        with request.new_directory(data, report) as output:
            with new_file(output, _FILE, request.progress_to(nbytes)) as out:
                metadata.storage_data = _write_values(hollow, values, out)
            if hasattr(metadata, "version"):
                metadata.version = "1.0.0"
            with new_file(output, METADATA) as out:
                out.write(pickle.dumps(metadata), 0)


def _plan(hollow: Hollow) -> tuple[list[tuple[MetadataIndex, Any]], Metadata]:
    """The values to write, in the order of the file, and the metadata without their places. Raises UsageError."""
    label = hollow.data.label
    planner = DefaultSavePlanner()
    try:
        planner.set_up_planner(hollow.built, is_coordinator=True)
        plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    except RecursionError as exc:
        raise UsageError(f"{label}: refers to itself, or is nested too deep for this format") from exc
    except ValueError as exc:
        raise UsageError(f"{label}: cannot be a distributed checkpoint: {exc}") from exc
    items = sorted(plans[0].items, key=lambda item: item.type is not WriteItemType.BYTE_IO)
    return [(item.index, planner.state_dict[item.index.fqn]) for item in items], metadata


def _alone(data: Composite, ref: TensorRef) -> TensorRef:
    """A tensor in a storage that holds nothing else."""
    is_whole = not ref.offset and data.places[ref.key].nbytes == ref.nbytes and ref.is_contiguous
    is_alone = is_whole and not (ref.conj or ref.neg)
    return ref if is_alone else computed(data, ref.dtype, ref.shape, partial(data.elements, ref))


def _kind(value: object) -> object:
    """What the form of a value depends on; None for one of which that is not known."""
    if type(value) is torch.Tensor:
        whole = value.untyped_storage().nbytes()
        return value.dtype, value.shape, value.stride(), value.storage_offset(), whole, value.is_conj(), value.is_neg()
    return (type(value), repr(value)) if type(value) in (bool, int, float, str, type(None)) else None


def _write_values(
    hollow: Hollow, values: Iterable[tuple[MetadataIndex, Any]], out: OpenFile
) -> dict[MetadataIndex, _StorageInfo]:
    """Write the values from the start of an empty file. Returns the place of each.

    Reports progress for tensors that are values of their own. Raises InputError, OutputError, and UnsupportedError for
    what torch does not save.
    """
    known: dict[object, Saved] = {}
    written, position = {}, 0
    for index, value in values:
        kind = _kind(value)
        saved = known.get(kind) or save_hollow(hollow, value, "archive")
        if kind is not None and len(known) < _MOST_KNOWN:
            known[kind] = saved
        counting = out if isinstance(value, torch.Tensor) else out._replace(progress=lambda _: None)
        if type(value) is torch.Tensor:
            address = value.untyped_storage().data_ptr()
            saved = saved._replace(places=[(place, address) for place, _ in saved.places])
        write_saved(hollow, saved, counting, position)
        written[index] = _StorageInfo(_FILE, position, saved.length)
        position += saved.length
    return written
