"""A process with everything imported that forks the ranks of a gloo job for every line of its standard input.

A job names a ``folder``, the number ``world`` of ranks, a ``timeout`` of their group in seconds, and the numbers of two
states. The ranks save state ``before`` into ``folder/saved``, then state ``after``, of which one thing goes wrong:
``victim`` gets ``signal`` after ``delay`` seconds, or its files may not grow beyond ``size`` bytes. With "parts" the
second save goes to a directory of its own with use_collectives=False. The answer has the exit code of each rank, the
seconds it took after the fault, and what it said; and which of the two states the directory then holds.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter

SHAPES = {"0.weight": (640, 512), "1.weight": (512, 512), "1.bias": (512,)}
GRACE = 30
"""Seconds beyond the timeout of the group until a rank counts as hung."""


def whole_state(number):
    generator = torch.Generator().manual_seed(number)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    moments = {
        name: {key: torch.randn(weight.shape, generator=generator) ** 2 for key in ("exp_avg", "exp_avg_sq")}
        for name, weight in weights.items()
    }
    return {"model": weights, "optimizer": {"state": moments}, "number": number}


def shard(tree, mesh):
    """Matrices cut by rows; the rest is on every rank."""
    if isinstance(tree, dict):
        return {key: shard(child, mesh) for key, child in tree.items()}
    if not isinstance(tree, torch.Tensor) or tree.dim() < 2:
        return tree
    parts = tree.chunk(mesh.size())
    return DTensor.from_local(parts[mesh.get_rank()].clone(), mesh, [Shard(0)], shape=tree.shape, stride=tree.stride())


def work(job, rank, go):
    world, folder = job["world"], Path(job["folder"])
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(world)}
    timeout = datetime.timedelta(seconds=job["timeout"])
    method = f"file://{folder}/store-{job['after']}"
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world, timeout=timeout)
    mesh = DeviceMesh("cpu", list(range(world)))
    first, second = (shard(whole_state(job[name]), mesh) for name in ("before", "after"))
    target = folder / "saved"

    def save(state, target, **options):
        writer = Ckpt8StorageWriter(target, preset="lossless")
        dcp.save(state, storage_writer=writer, planner=Ckpt8SavePlanner(), **options)

    save(first, target)
    dist.barrier()
    if "size" in job and rank == job["victim"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["size"], resource.RLIM_INFINITY))
    if rank == 0:
        names = sorted(path.name for path in target.iterdir())
        os.write(go, json.dumps(names).encode() + b"\n")
    if job.get("parts"):
        save(second, folder / f"parts-{job['after']}", use_collectives=False)
    else:
        save(second, target)


def rank_process(job, rank, go):
    os.dup2(os.open(f"{job['folder']}/said-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    try:
        work(job, rank, go)
    except BaseException:
        # The limit is for what the rank saves, not for what it says.
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def fork(call, *arguments):
    child = os.fork()
    if not child:
        try:
            call(*arguments)
        finally:
            os._exit(3)
    return child


def run(job):
    read, go = os.pipe()
    ranks = [fork(rank_process, job, rank, go) for rank in range(job["world"])]
    os.close(go)
    with os.fdopen(read) as pipe:
        names = json.loads(pipe.readline() or "null")
    started = time.monotonic()
    if names is not None and "signal" in job:
        time.sleep(job["delay"])
        started = time.monotonic()
        os.kill(ranks[job["victim"]], job["signal"])
    codes, seconds = {}, {}
    while len(codes) < len(ranks):
        late = time.monotonic() - started > job["timeout"] + GRACE
        for rank, pid in enumerate(ranks):
            if rank not in codes:
                # A rank that was stopped never ends by itself.
                others = len(codes) == len(ranks) - 1 and rank == job["victim"]
                if late or (others and job.get("signal") == signal.SIGSTOP):
                    os.kill(pid, signal.SIGKILL)
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[rank] = os.waitstatus_to_exitcode(status)
                    seconds[rank] = time.monotonic() - started
        time.sleep(0.005)
    ranks = range(job["world"])
    said = [Path(f"{job['folder']}/said-{rank}").read_text() for rank in ranks]
    return {
        "names": names,
        "codes": [codes[rank] for rank in ranks],
        "seconds": [seconds[rank] for rank in ranks],
        "said": said,
    }


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def look(job, out, folder):
    """Print which of the two states a directory holds."""
    found = whole_state(0)
    try:
        dcp.load(found, storage_reader=Ckpt8StorageReader(folder), no_dist=True)
        held = next((name for name in ("before", "after") if same(found, whole_state(job[name]))), "neither")
    except BaseException as exc:
        held = f"{type(exc).__name__}: {exc}"
    os.write(out, held.encode())


def held(job, folder):
    read, out = os.pipe()
    child = fork(look, job, out, folder)
    os.close(out)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return text


def main():
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while line := sys.stdin.readline():
        job = json.loads(line)
        answer = run(job)
        answer["held"] = held(job, Path(job["folder"]) / "saved")
        if job.get("parts"):
            answer["parts"] = held(job, Path(job["folder"]) / f"parts-{job['after']}")
        with contextlib.suppress(OSError):
            (Path(job["folder"]) / f"store-{job['after']}").unlink()
        print(json.dumps(answer), flush=True)


main()
