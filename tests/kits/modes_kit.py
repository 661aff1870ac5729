"""Runs of ``modes_nets`` that are saved by the ranks of one job, loaded by those of another, and trained on.

Beside each directory of ours lies one of torch's own writer, and what is loaded from that is the reference.
"""

from __future__ import annotations

import io
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from modes_nets import Run
from ranks import run_ranks
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter

BEFORE, AFTER = 6, 8
PROGRESS = {"seen": BEFORE, "note": "half way", "scale": torch.tensor(0.25)}


@dataclass(frozen=True)
class Save:
    """A save by our writer: its preset, how ``dcp`` is called, the form of the optimizer's state, and the planner."""

    preset: str = "lossless"
    way: str = "sync"
    flat: bool = False
    planner: type = Ckpt8SavePlanner

    @property
    def name(self):
        return f"{self.preset}-{self.way}{'-flat' * self.flat}{'-torch' * (self.planner is DefaultSavePlanner)}"


@dataclass(frozen=True)
class Case:
    """A run, how it is saved, and the setups and world sizes that load every save."""

    net: str
    setup: str
    world: int
    optimizer: str
    saves: tuple[Save, ...]
    loads: tuple[tuple[str, int], ...]

    def __str__(self):
        return f"{self.net}-{self.setup}-{self.world}-{self.optimizer}-{self.saves[0].way}"

    @property
    def forms(self):
        """Of the optimizer's state: nested and flat."""
        return sorted({save.flat for save in self.saves})


def plain_name(*, flat):
    """The directory that torch's own writer wrote."""
    return f"plain{'-flat' * flat}"


def _options(run, flat, **more):
    # torch 2.13 cannot give the full state of FSDP1 to rank 0 alone where the parameters are on the CPU already.
    to_rank0 = run.full and not isinstance(run.model, FullyShardedDataParallel)
    return StateDictOptions(
        flatten_optimizer_state_dict=flat, full_state_dict=run.full, cpu_offload=to_rank0 and not more, **more
    )


def state_of(run, *, flat):
    """All that a run keeps; of a run with full state dicts rank 0 has it, and with FSDP2 no other rank anything."""
    weights, moments = get_state_dict(run.model, run.optimizer, options=_options(run, flat))
    state = {"model": weights, "optimizer": moments, "progress": dict(PROGRESS)}
    if run.average is not None:
        state["ema"] = get_model_state_dict(run.average)
    return state


def _put(run, state, flat):
    weights, moments = state["model"], state["optimizer"]
    if run.full:
        # One after the other: set_state_dict takes no weights on the ranks that have none to give.
        options = _options(run, flat, broadcast_from_rank0=True)
        set_model_state_dict(run.model, weights, options=options)
        set_optimizer_state_dict(run.model, run.optimizer, moments, options=options)
    else:
        options = _options(run, flat)
        set_state_dict(run.model, run.optimizer, model_state_dict=weights, optim_state_dict=moments, options=options)
    if run.average is not None:
        set_model_state_dict(run.average, state["ema"])


def whole(state):
    """Every tensor of all ranks in full, by name."""
    flat = {name: full for name, value in _leaves(state) if isinstance(full := _in_full(value), torch.Tensor)}
    content = io.BytesIO()
    torch.save(flat, content)  # pickle alone cannot hold tensors of uint16
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, content.getvalue())
    return {name: value for each in reversed(found) for name, value in torch.load(io.BytesIO(each)).items()}


def _in_full(value):
    """A copy of a tensor; of a ShardedTensor on rank 0 alone."""
    if isinstance(value, DTensor):
        return value.full_tensor().clone()
    if hasattr(value, "local_shards"):
        full = torch.empty(value.size(), dtype=value.dtype) if dist.get_rank() == 0 else None
        value.gather(0, full)
        return full
    return value.clone() if isinstance(value, torch.Tensor) else None


def _leaves(node, path=()):
    if isinstance(node, (dict, list)):
        for key, child in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(child, (*path, str(key)))
    else:
        yield ".".join(path), node


def _write(folder, name, figures, tensors):
    if dist.get_rank() == 0:
        torch.save(tensors, folder / f"{name}.pt")
        (folder / f"{name}.json").write_text(json.dumps(figures))


def save_case(folder, case):
    """Train, save in every way, go on: losses after the save, and the state at the save."""
    folder.mkdir(exist_ok=True)
    run = Run(case.net, case.setup, case.optimizer)
    run.train(range(BEFORE))
    for flat in case.forms:
        dcp.save(state_of(run, flat=flat), storage_writer=dcp.FileSystemWriter(folder / plain_name(flat=flat)))
    before = whole(state_of(run, flat=False))
    pending = [WAYS[save.way](folder / save.name, save, state_of(run, flat=save.flat)) for save in case.saves]
    losses = run.train(range(BEFORE, BEFORE + AFTER))
    for each in pending:
        if each is not None:
            each.result()
    _write(folder, "uninterrupted", losses, before)


def _sync(path, save, state, **options):
    writer = Ckpt8StorageWriter(path, preset=save.preset)
    dcp.save(state, storage_writer=writer, **{"planner": save.planner(), **options})


def _alone(path, save, state):
    if dist.get_rank() == 0:
        _sync(path, save, state, no_dist=True)


def _cached(path, save, state):
    """Three saves, which plan as the one before did; the last has more to save."""
    shorter = {key: value for key, value in state.items() if key != "progress"}
    for number, kept in enumerate((shorter, shorter, state)):
        target = path if kept is state else path.with_name(f"{path.name}-{number}")
        _sync(target, save, kept, planner=save.planner(enable_plan_caching=True))


def _thread(path, save, state, **options):
    # A group of its own: the ranks talk about the save while they train.
    group = dist.new_group(backend="gloo")
    writer = Ckpt8StorageWriter(path, preset=save.preset)
    pending = dcp.async_save(state, storage_writer=writer, planner=save.planner(), process_group=group, **options)
    return getattr(pending, "upload_completion", pending)


def _staged(path, save, state):
    """Staged into shared memory, by a stager that may keep it for the next save."""
    stager = DefaultStager(StagingOptions(False, True, False, False))
    pending = _thread(path, save, state, async_stager=stager)
    pending.add_done_callback(lambda _: stager.close())
    return pending


WAYS = {
    "sync": _sync,
    "alone": _alone,
    "apart": partial(_sync, use_collectives=False),
    "cached": _cached,
    "thread": _thread,
    "apart_thread": partial(_thread, use_collectives=False),
    "staged": _staged,
    "process": partial(_thread, async_checkpointer_type=AsyncCheckpointerType.PROCESS),
}
"""How ``dcp`` is called: ``alone`` by rank 0 without the others, ``apart`` by each rank without collectives."""


def load_case(folder, case, setup):
    """Load every save and torch's own into new runs, and go on from each."""
    readers = [(save.name, Ckpt8StorageReader(folder / save.name), save.flat) for save in case.saves]
    for name, flat in ((plain_name(flat=flat), flat) for flat in case.forms):
        readers.append((name, dcp.FileSystemReader(folder / name), flat))
    losses, tensors = {}, {}
    for name, reader, flat in readers:
        run = Run(case.net, setup, case.optimizer, seed=1)
        state = state_of(run, flat=flat)
        state["progress"] = {"seen": 0, "note": "", "scale": torch.zeros(())}
        if not run.full or dist.get_rank() == 0:
            dcp.load(state, storage_reader=reader, no_dist=run.full)
            assert state["progress"] == PROGRESS
        _put(run, state, flat)
        tensors[name] = whole(state_of(run, flat=False))
        losses[name] = run.train(range(BEFORE, BEFORE + AFTER))
    _write(folder, f"{setup}-{dist.get_world_size()}", losses, tensors)


def call_all(_, calls):
    """What a rank does: one call after the other."""
    for call, *arguments in calls:
        call(*arguments)


def run_table(folder, cases):
    """Save and load all cases, in one gang of ranks for each world size."""
    saves, loads = defaultdict(list), defaultdict(list)
    for case in cases:
        saves[case.world].append((save_case, folder / str(case), case))
        for setup, world in case.loads:
            loads[world].append((load_case, folder / str(case), case, setup))
    for calls in (saves, loads):
        for world in sorted(calls):
            run_ranks(call_all, world, calls[world])


def figures(folder, name):
    """What a job wrote: losses and tensors."""
    return json.loads((folder / f"{name}.json").read_text()), torch.load(folder / f"{name}.pt")
