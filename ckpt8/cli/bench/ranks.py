"""``ckpt8 bench --ranks``: a sharded state saved and loaded by ranks of one gloo job, beside torch's own storage.

The ranks are processes of this machine. They hold the state of a trained GPT as FSDP2 does, each a part of the rows of
every tensor, and do every operation with ckpt8 and with torch in turn. A first round brings code and caches in place;
its times are reported apart. The figures are medians of the rounds that follow, and their ratios.

One rank of ``bench --ranks``: its part of the state, and the operations on it.
"""

from __future__ import annotations

import gc
import os
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import gettempdir
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckpt8.cli.bench.child import PeakMemory, Run, run_child
from ckpt8.cli.bench.run import Bench, free_bytes, versions
from ckpt8.cli.bench.source import OWN, PLAIN, RANKS_DO
from ckpt8.cli.bench.training import GPT, GPTConfig
from ckpt8.core.errors import OutputError
from ckpt8.core.files.atomic import temporary_directory
from ckpt8.core.workers import threads_of_rank
from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter

GANG = "ckpt8.cli.bench.child"


def bench_ranks(
    ranks: int,
    *,
    size: int,
    threads: int | None,
    repeat: int,
    scratch: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
    run: Run | None = None,
) -> dict[str, Any]:
    """Measure saves and loads of a state of ``size`` bytes by so many ranks, each with ``threads`` threads.

    Raises OutputError if ``scratch`` has too little room, UsageError for the size.
    """
    folder = scratch or Path(gettempdir())
    free_bytes(folder)
    try:
        context = temporary_directory("ckpt8-bench-", folder)
    except OSError as exc:
        raise OutputError(f"{folder}: cannot be written to: {exc.strerror}") from exc
    with context as work:
        here = Bench(work, run or run_child(work), threads or 0, repeat, say)
        with here.training(size) as source:
            say(f"{ranks} ranks save and load, {repeat + 1} rounds")
            job = {"source": source.path, "folder": str(work), "ranks": ranks, "threads": threads, "repeat": repeat}
            done = here.run(GANG, job, False)["ranks"]
        return {
            "ranks": ranks,
            "bytes": sum(each["state_bytes"] for each in done),
            "bytes_per_rank": max(each["state_bytes"] for each in done),
            "trained": here.trained,
            "threads": done[0]["threads"],
            "repeat": repeat,
            "versions": versions(),
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "results": [_row(name, done) for name in RANKS_DO],
        }


def _row(name: str, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One operation: the figures of both sides, and ratios of ckpt8 to torch.

    All ranks wait for the last one, so that the times of the first are those of all. Memory is that of the rank with
    the highest peak.
    """
    row: dict[str, Any] = {"operation": name}
    for side in (OWN, PLAIN):
        rounds = [each["rounds"][name][side] for each in ranks]
        times = [each["seconds"] for each in rounds[0][1:]]
        processor = [[each["processor_seconds"] for each in rank[1:]] for rank in rounds]
        row[side] = {
            "seconds": median(times),
            "times": times,
            "first": rounds[0][0]["seconds"],
            "processor_seconds": median(sum(each) for each in zip(*processor, strict=True)),
            "peak_memory": max(each["peak_memory"] for rank in rounds for each in rank[1:]),
            "stored_bytes": rounds[0][-1]["stored_bytes"],
        }
    return {**row, "ratio": row[OWN]["seconds"] / row[PLAIN]["seconds"]}


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
