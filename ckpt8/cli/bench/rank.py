"""One rank of ``bench --ranks``: its part of the state, and the operations on it."""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckpt8.cli.bench.gpt import GPT, GPTConfig
from ckpt8.cli.bench.jobs import OWN, PLAIN, RANKS_DO
from ckpt8.cli.bench.memory import PeakMemory
from ckpt8.core.workers import threads_of_rank
from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter

_SIDES = (OWN, PLAIN)

State = dict[str, Any]


def work(job: dict[str, Any]) -> dict[str, Any]:
    """``rounds``: for each operation and side, a row for each round. ``state_bytes`` are those of this rank's part."""
    rank, world, folder = job["rank"], job["ranks"], Path(job["folder"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        state = shard(Path(job["source"]), DeviceMesh("cpu", list(range(world))))
        group = dist.new_group(backend="gloo")
        rounds: dict[str, dict[str, list[State]]] = {name: {side: [] for side in _SIDES} for name in RANKS_DO}
        for number in range(job["repeat"] + 1):
            for side in _SIDES if number % 2 else _SIDES[::-1]:
                for name, row in _round(side, state, folder / "saved", job["threads"], group).items():
                    rounds[name][side].append(row)
        nbytes = sum(tensor.nbytes for tensor in _tensors(state))
        return {
            "rounds": rounds,
            "state_bytes": nbytes,
            "threads": max(job["threads"] or threads_of_rank(), 0),
        }
    finally:
        dist.destroy_process_group()


def shard(path: Path, mesh: DeviceMesh) -> State:
    """The part of this rank of the state of a trained GPT, named as ``get_state_dict`` names it."""
    saved = torch.load(path, weights_only=True, mmap=True)
    with torch.device("meta"):
        named = dict(
            GPT(GPTConfig(**{key: saved["model_args"][key] for key in GPTConfig.__slots__})).named_parameters()
        )
    # The optimizer of the GPT numbers matrices first; the output layer shares the memory of the embedding.
    names = [name for name in named if name != "lm_head.weight"]
    names.sort(key=lambda name: named[name].dim() < 2)
    optimizer = saved["optimizer"]
    states = {names[number]: values for number, values in optimizer["state"].items()}
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in optimizer["param_groups"]]
    tree = {"model": saved["model"], "optimizer": {"state": states, "param_groups": groups}, "step": saved["iter_num"]}

    def cut(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: cut(child) for key, child in value.items()}
        if not isinstance(value, torch.Tensor) or not value.dim():
            return value
        parts = value.chunk(mesh.size())
        mine = parts[mesh.get_rank()] if mesh.get_rank() < len(parts) else value[:0]
        return DTensor.from_local(mine.clone(), mesh, [Shard(0)], shape=value.shape, stride=value.stride())

    return {key: cut(value) for key, value in tree.items()}


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [tensor for child in value.values() for tensor in _tensors(child)]
    return [value.to_local() if isinstance(value, DTensor) else value] if isinstance(value, torch.Tensor) else []


def _blank(value: Any) -> Any:
    """The same tree with other memory, all of it written to once."""
    if isinstance(value, dict):
        return {key: _blank(child) for key, child in value.items()}
    return torch.zeros_like(value).fill_(1) if isinstance(value, torch.Tensor) else value


def _round(side: str, state: State, target: Path, threads: int | None, group: Any) -> dict[str, State]:
    """Do every operation once. ``group`` is for the ranks to talk about a save in the background."""
    own, rows = side == OWN, {}
    reader = Ckpt8StorageReader(target, threads=threads) if own else FileSystemReader(target)

    def options() -> State:
        if own:
            return {"storage_writer": Ckpt8StorageWriter(target, threads=threads), "planner": Ckpt8SavePlanner()}
        return {"storage_writer": FileSystemWriter(target)}

    _remove(target)
    rows["save"] = _timed(target, lambda: save(state, **options()))
    rows["load"] = _timed(target, partial(load, _blank(state), storage_reader=reader))
    _remove(target)
    rows["async_save"] = _timed(
        target,
        lambda: async_save(state, **options(), process_group=group),
        lambda pending: pending.result(),
    )
    _remove(target)
    return rows


def _timed(target: Path, call: Callable[[], Any], after: Callable[[Any], Any] = lambda _: None) -> State:
    """Do what all ranks do together; the seconds until the last has done it, and the memory taken beside the state.

    ``after`` is not timed, but its memory and its processor time count.
    """
    gc.collect()
    dist.barrier()
    memory = PeakMemory()
    started, processor = time.perf_counter(), time.process_time()
    result = call()
    dist.barrier()
    seconds = time.perf_counter() - started
    after(result)
    peak, processor = memory.taken(), time.process_time() - processor
    dist.barrier()
    stored = sum(path.stat().st_size for path in target.iterdir()) if dist.get_rank() == 0 else None
    return {"seconds": seconds, "processor_seconds": processor, "peak_memory": peak, "stored_bytes": stored}


def _remove(target: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(target, ignore_errors=True)
    dist.barrier()
