"""Saves of ranks that go wrong: what must hold of the others and of the directory, over many rounds.

``Ranks`` starts this file as a process with everything imported, which forks the ranks of a gloo job for every line of
its standard input. A job names a ``folder``, the number ``world`` of ranks, and the numbers of two states. The ranks
save state ``before`` into ``folder/saved``, then state ``after``, of which one thing goes wrong: ``victim`` gets
``signal`` after ``delay`` seconds, or its files may not grow beyond ``size`` bytes. With "parts" the second save goes
to a directory of its own with use_collectives=False. The answer has the exit code of each rank, the seconds it took
after the fault, and what it said; and which of the two states the directory then holds.
"""

from __future__ import annotations

import datetime
import json
import os
import random
import resource
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import faults_kit
import program_kit
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

TIMEOUT = 5
"""Seconds that the ranks' group waits."""
GRACE = 30
"""Seconds beyond that until a rank counts as hung."""
SHAPES = {"0.weight": (640, 512), "1.weight": (512, 512), "1.bias": (512,)}


class Outcome(faults_kit.Outcome):
    """Counts of the moments that were met, and sentences about what did not hold."""

    def check(self, holds, what, answer):
        if not holds:
            self.faults.append(f"{what}: {json.dumps(answer)[:1000]}")


class Ranks(program_kit.Server):
    """The server, and one directory that its ranks save into again and again."""

    def __init__(self, folder):
        self.folder = folder
        self._number = 0
        (folder / "tmp").mkdir()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp")}
        super().__init__(__file__, environment=environment)

    def save(self, outcome, **job):
        """Let ranks save two states; the answer. What an earlier round left must be gone after the first save."""
        self._number += 2
        numbers = {"before": self._number, "after": self._number + 1}
        job = {"folder": str(self.folder), **numbers, **job}
        answer = self.ask(job)
        names = answer["names"] or []
        own = [name for name in names if name.startswith("__")]
        outcome.check(
            len(own) == job["world"] and sorted([*own, "ckpt8-dcp.json"]) == names, "not cleaned", [job, answer]
        )
        return answer


def undisturbed(ranks, outcome, world):
    """The seconds that a save takes."""
    answer = ranks.save(outcome, world=world, victim=0)
    outcome.check(answer["codes"] == [0] * world and answer["held"] == "after", "undisturbed", answer)
    return max(answer["seconds"])


def kill_rounds(ranks, count, seed, worlds=(2, 3, 4), number=signal.SIGKILL, **job):
    """End a rank at random moments of ``count`` saves.

    A rank may be through with the save already; in every other case all others must end with an error in time, and
    the directory must hold one of the two states whole: the new one only where the coordinator got as far.
    """
    outcome, rng = Outcome(), random.Random(seed)
    span = {world: undisturbed(ranks, outcome, world) for world in worlds}
    while outcome.counts["met"] < count and outcome.counts["missed"] < 2 * count + 4:
        world = rng.choice(worlds)
        victim, delay = rng.randrange(world), rng.uniform(0, 1.1 * span[world])
        answer = ranks.save(outcome, world=world, victim=victim, delay=delay, signal=number, **job)
        if answer["codes"][victim] == 0:
            outcome.counts["missed"] += 1
            span[world] *= 0.9
            continue
        span[world] *= 1.03
        outcome.counts["met"] += 1
        outcome.counts[f"holds {answer['held']}"] += 1
        check(outcome, world, victim, answer)
        if job.get("parts"):
            complete = answer["parts"] == "after"
            refused = answer["parts"].startswith("CheckpointException") or "InputError" in answer["parts"]
            outcome.check(complete or refused, "parts", answer)
            outcome.check(answer["held"] == "before", "another directory changed", answer)
    return outcome


def check(outcome, world, victim, answer):
    """What holds of a save of which one rank failed."""
    others = [rank for rank in range(world) if rank != victim]
    late = max((answer["seconds"][rank] for rank in others), default=0)
    outcome.counts["slowest"] = max(outcome.counts["slowest"], round(late))
    outcome.check(answer["held"] in ("before", "after"), "no whole checkpoint", answer)
    outcome.check(all(answer["codes"][rank] in (0, 1) for rank in others), "ended otherwise", answer)
    outcome.check(late < TIMEOUT + 5, "too late", answer)
    through = [rank for rank in others if answer["codes"][rank] == 0]
    outcome.check(not through or answer["held"] == "after" or answer.get("parts"), "said it was done", answer)


def full_disk_rounds(ranks, sizes, worlds=(2, 3), victims=(0, 1)):
    """Fill the disk of one rank during a save: all ranks end with an error, which one of them explains."""
    outcome = Outcome()
    for size in sizes:
        for world in worlds:
            for victim in victims:
                answer = ranks.save(outcome, world=world, victim=victim, size=size)
                outcome.counts["met"] += 1
                outcome.check(answer["codes"] == [1] * world, "went on", answer)
                outcome.check(answer["held"] == "before", "no checkpoint of before", answer)
                outcome.check("cannot be written" in answer["said"][victim], "no reason", answer)
                outcome.check(max(answer["seconds"]) < TIMEOUT, "too late", answer)
    # The next save removes what the last one left.
    undisturbed(ranks, outcome, worlds[0])
    return outcome


# In the server


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
    from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageWriter

    world, folder = job["world"], Path(job["folder"])
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": str(world)}
    timeout = datetime.timedelta(seconds=TIMEOUT)
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
        late = time.monotonic() - started > TIMEOUT + GRACE
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
    said = [Path(f"{job['folder']}/said-{rank}").read_text() for rank in range(job["world"])]
    ordered = {"codes": codes, "seconds": seconds}
    return {"names": names, "said": said} | {name: [got[k] for k in sorted(got)] for name, got in ordered.items()}


def same(one, other):
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def look(job, out, folder):
    """Print which of the two states a directory holds."""
    from ckpt8.integrations.dcp import Ckpt8StorageReader

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


def serve():
    import ckpt8.integrations.dcp  # noqa: F401 (once for all ranks)

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    while line := sys.stdin.readline():
        job = json.loads(line)
        folder, number = Path(job["folder"]), job["after"]
        answer = run(job)
        answer["held"] = held(job, folder / "saved")
        if job.get("parts"):
            answer["parts"] = held(job, folder / f"parts-{number}")
        (folder / f"store-{number}").unlink(missing_ok=True)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
