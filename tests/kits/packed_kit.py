"""Packed directories of several ranks, made in one process, and the plain ones in slices that they are made of."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import change_metadata, save_in_pieces
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter
from ckpt8.integrations.dcp.sharing import SharingPlanner

INDEX = "ckpt8-dcp.json"


def save(state, folder, planner=None, **options):
    """``dcp.save`` by our writer, in this process alone."""
    return dcp.save(state, storage_writer=Ckpt8StorageWriter(folder, **options), planner=planner, no_dist=True)


def save_plain(state, folder):
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


def load(state, folder, planner=None):
    """``state``, filled by our reader in this process alone."""
    dcp.load(state, storage_reader=Ckpt8StorageReader(folder), planner=planner, no_dist=True)
    return state


def change_index(folder, change, name=INDEX):
    """Let ``change`` alter the index of a packed directory, or return another one."""
    tree = json.loads((folder / name).read_text())
    changed = change(tree)
    (folder / name).write_text(json.dumps(tree if changed is None else changed))


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


def raw(tensor):
    """The bytes of the values of a tensor, as uint8."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def halves(number, value):
    """Boxes of a tensor: rows, columns or quarters in turn; what is too small for that stays whole."""
    size, dims = tuple(value.shape), value.dim()
    cuts = [[(0, length)] for length in size]
    for dim in {0: [0], 1: [dims - 1], 2: range(min(dims, 2))}[number % 3] if dims else ():
        first = size[dim] // 2 + 1
        if size[dim] > 2:
            cuts[dim] = [(0, first), (first, size[dim] - first)]
    boxes = [((), ())]
    for cut in cuts:
        boxes = [((*at, offset), (*sizes, length)) for at, sizes in boxes for offset, length in cut]
    return boxes


def save_sliced(state, folder):
    """Save a nested state dict as a plain directory of torch whose tensors are cut by ``halves``."""
    flat, paths = flatten_state_dict(state)
    tensors = {name: value for name, value in flat.items() if isinstance(value, torch.Tensor)}
    pieces = {name: (value, halves(number, value)) for number, (name, value) in enumerate(tensors.items())}
    save_in_pieces(pieces, folder, {name: value for name, value in flat.items() if name not in tensors})
    change_metadata(folder, lambda metadata: metadata.planner_data.update(paths))
    return Path(folder)


def pack(plain, folder, world=2, **options):
    """What ``world`` ranks make of a plain directory: the steps of ``dcp.save``, without processes."""
    with ExitStack() as stack:
        planners = [stack.enter_context(closing(SharingPlanner(plain, rank, world))) for rank in range(world)]
        writers = [Ckpt8StorageWriter(folder, **options) for _ in range(world)]
        plans = []
        for rank, (planner, writer) in enumerate(zip(planners, writers, strict=True)):
            planner.set_up_planner({}, writer.storage_meta(), rank == 0)
            writer.set_up_storage_writer(rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        plans, metadata = planners[0].create_global_plan(plans)
        plans = writers[0].prepare_global_plan(plans)
        results = [
            writer.write_data(planner.finish_plan(plan), planner).wait()
            for planner, writer, plan in zip(planners, writers, plans, strict=True)
        ]
        writers[0].finish(metadata, results)
    return Path(folder)
