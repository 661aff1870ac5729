"""Runs mutated inputs through everything of ckpt8 that reads, and keeps those that find something.

    python tests/whole/fuzz/fuzz.py --inputs 1000000 --seed 1 --target all --jobs 1 --json fuzz.json --keep findings

An input follows from the seed, the target and its number alone. A finding is an exception that is none of ckpt8's own,
or not one of the command's, a message that is not one line, more than a second of processor time, more than 512 MB of
memory, a crash, an output that is left behind or lies elsewhere, a source that is changed, and a result that is not
the original's though ``verify`` accepts the container.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.append(str(Path(__file__).parents[2] / "kits"))

SLOW = 1.0
"""Seconds of processor time that a small input may take."""
HANG = 30
"""Seconds after which an input is given up, with its process."""
MEMORY = 512 << 20
"""Bytes of resident memory that a small input may take above those of the process before it."""
_ADDRESSES = 3 << 30


@dataclass
class Counts:
    """What was tried on one target. Times in seconds, memory in bytes above that of the idle process."""

    inputs: int = 0
    read: int = 0
    refused: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    memory: int = 0
    findings: list = field(default_factory=list)

    def add(self, other):
        """Merge the counts of another run."""
        for name in ("inputs", "read", "refused", "seconds", "findings"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest, self.memory = max(self.slowest, other.slowest), max(self.memory, other.memory)


def generator(seed, target, number):
    """The source of all choices for one input."""
    return random.Random(f"{seed}/{target}/{number}")


def try_one(name, seed, number, folder, counts, idle=None):
    """Make one input, have it read, and count what comes of it. ``idle`` is the memory of the process without it."""
    from fuzz_targets import TARGETS, write

    def note(what):
        counts.findings.append({"target": name, "seed": seed, "number": number, "what": what})

    target, rng, path = TARGETS[name], generator(seed, name, number), folder / "input"
    data = target.mutate(rng)
    counts.inputs += 1
    try:
        write(path, data)
    except (OSError, ValueError):
        counts.refused += 1  # by the file system
        return
    before, start = _memory(), time.process_time()
    try:
        if target.run(path, rng, data):
            counts.read += 1
        else:
            counts.refused += 1
    except KeyboardInterrupt:
        raise
    except BaseException as exc:
        note(_where(exc))
    took, peak = time.process_time() - start, _memory()
    grown = peak - (before if idle is None else idle) if peak > before else 0
    counts.slowest, counts.memory = max(counts.slowest, took), max(counts.memory, grown)
    if took > SLOW:
        note(f"took {took:.1f} s")
    if grown > MEMORY:
        note(f"took {grown >> 20} MiB")
        _forget_peak()


def _where(exc):
    """The exception and the last line of ours that it went through."""
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [frame for frame in frames if "ckpt8" in frame.filename and "/tests/" not in frame.filename] or frames
    return f"{type(exc).__name__} at {Path(ours[-1].filename).name}:{ours[-1].lineno}: {str(exc)[:160]}"


def _memory():
    """Peak resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _forget_peak():
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def prepared():
    """No flushing to the disk, one thread: what is tried is neither."""
    warnings.simplefilter("ignore")
    import torch

    before, threads = os.fsync, torch.get_num_threads()
    os.fsync = lambda _: None
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.fsync = before
        torch.set_num_threads(threads)


def _serve(target, seed, first, last, folder):
    """In a process of its own: try the inputs from ``first`` to ``last``, noting each before it is tried."""
    counts, begun = Counts(), time.monotonic()
    noted = os.open(folder / "number", os.O_RDWR | os.O_CREAT)

    def begin(number):
        """Say which input is next, and have the process end if it never does."""
        os.pwrite(noted, number.to_bytes(8, "little"), 0)
        signal.setitimer(signal.ITIMER_REAL, HANG)

    def save():
        counts.seconds = time.monotonic() - begun
        (folder / "counts.new").write_text(json.dumps(asdict(counts)))
        (folder / "counts.new").replace(folder / "counts.json")

    import fuzz_targets  # noqa: F401 (no input takes the time that this takes)

    with prepared():
        for number in range(first, min(first + 20, last)):
            begin(number)
            try_one(target, seed, number, folder, Counts())  # fills every cache, so that memory is comparable
        _forget_peak()
        idle = _memory()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESSES, used + _ADDRESSES))
        for number in range(first, last):
            begin(number)
            try_one(target, seed, number, folder, counts, idle)
            if not number % 1000:
                save()
    signal.setitimer(signal.ITIMER_REAL, 0)
    save()


def run(target, seed, first, last, scratch):
    """Try inputs in processes of their own; one that dies is a finding, and the next goes on behind it."""
    total = Counts()
    while first < last:
        with TemporaryDirectory(dir=scratch) as name:
            folder = Path(name)
            command = [sys.executable, __file__, "--serve", target, str(seed), str(first), str(last), name]
            code = subprocess.run(command, check=False).returncode
            saved = folder / "counts.json"
            counts = Counts(**json.loads(saved.read_text())) if saved.exists() else Counts()
            died = last - 1
            if code:
                died = int.from_bytes((folder / "number").read_bytes(), "little")
                what = f"ended its process with {code}"
                counts.findings.append({"target": target, "seed": seed, "number": died, "what": what})
                counts.inputs = died + 1 - first
            total.add(counts)
            first = died + 1
    return total


def keep(finding, folder):
    """Write the input of a finding, to be made small and kept."""
    from fuzz_targets import TARGETS, write

    folder.mkdir(parents=True, exist_ok=True)
    target, seed, number = (finding[key] for key in ("target", "seed", "number"))
    with contextlib.suppress(OSError, ValueError):
        write(folder / f"{target}-{seed}-{number}", TARGETS[target].mutate(generator(seed, target, number)))


def merged(report, found, seed, first):
    """The report of earlier runs with what was found by this one: totals by target, and which inputs they are."""
    targets, runs = report.get("targets", {}), report.get("runs", [])
    for name, counts in found.items():
        total = Counts(**targets.get(name, {}))
        total.add(counts)
        targets[name] = asdict(total)
        last = runs[-1] if runs else {}
        if (last.get("target"), last.get("seed"), last.get("first", 0) + last.get("inputs", 0)) == (name, seed, first):
            last["inputs"] += counts.inputs
        else:
            runs.append({"target": name, "seed": seed, "first": first, "inputs": counts.inputs})
    inputs, seconds = (sum(counts[key] for counts in targets.values()) for key in ("inputs", "seconds"))
    return {"inputs": inputs, "seconds": seconds, "targets": targets, "runs": runs}


def main():
    """Run; the exit code is 1 where something was found."""
    from fuzz_targets import TARGETS

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first input of every target")
    parser.add_argument("--target", default="all", choices=["all", *TARGETS])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to write the counts")
    parser.add_argument("--keep", type=Path, help="folder for the inputs that find something")
    given = parser.parse_args()
    names = list(TARGETS) if given.target == "all" else [given.target]
    whole = sum(TARGETS[name].share for name in names)
    scratch = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=scratch) as folder, ThreadPoolExecutor(given.jobs) as pool:
        tasks = {}
        for name in names:
            last = given.first + round(given.inputs * TARGETS[name].share / whole)
            tasks[name] = pool.submit(run, name, given.seed, given.first, last, Path(folder))
        found = {name: task.result() for name, task in tasks.items()}
    before = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    text = json.dumps(merged(before, found, given.seed, given.first), indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    findings = [finding for counts in found.values() for finding in counts.findings]
    for finding in findings if given.keep else ():
        keep(finding, given.keep)
    return 1 if findings else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        target, seed, first, last, name = sys.argv[2:]
        _serve(target, int(seed), int(first), int(last), Path(name))
        sys.exit(0)
    sys.exit(main())
