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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
    findings: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        """Merge the counts of another run."""
        for name in ("inputs", "read", "refused", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.slowest, self.memory = max(self.slowest, other.slowest), max(self.memory, other.memory)
        self.findings += other.findings


def generator(seed: int, target: str, number: int) -> random.Random:
    """The source of all choices for one input."""
    return random.Random(f"{seed}/{target}/{number}")


def try_one(name: str, seed: int, number: int, folder: Path, counts: Counts, idle: int | None = None) -> None:
    """Make one input, have it read, and count what comes of it. ``idle`` is the memory of the process without it."""
    from fuzz_targets import TARGETS, write

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
    except BaseException as exc:
        if isinstance(exc, KeyboardInterrupt):
            raise
        counts.findings.append(_finding(name, seed, number, _where(exc)))
    took = time.process_time() - start
    peak = _memory()
    grown = peak - (before if idle is None else idle) if peak > before else 0
    counts.slowest, counts.memory = max(counts.slowest, took), max(counts.memory, grown)
    if took > SLOW:
        counts.findings.append(_finding(name, seed, number, f"took {took:.1f} s"))
    if grown > MEMORY:
        counts.findings.append(_finding(name, seed, number, f"took {grown >> 20} MiB"))
        _forget_peak()


def _finding(target: str, seed: int, number: int, what: str) -> dict[str, Any]:
    return {"target": target, "seed": seed, "number": number, "what": what}


def _where(exc: BaseException) -> str:
    """The exception and the last line of ours that it went through."""
    frames = traceback.extract_tb(exc.__traceback__)
    ours = [frame for frame in frames if "ckpt8" in frame.filename and "/tests/" not in frame.filename] or frames
    last = ours[-1]
    return f"{type(exc).__name__} at {Path(last.filename).name}:{last.lineno}: {str(exc)[:160]}"


def _memory() -> int:
    """Peak resident memory in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _forget_peak() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """No flushing to the disk, one thread: what is tried is neither."""
    warnings.simplefilter("ignore")
    import torch

    before, threads = os.fsync, torch.get_num_threads()
    os.fsync = lambda _: None  # type: ignore[assignment]
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.fsync = before
        torch.set_num_threads(threads)


def _serve(target: str, seed: int, first: int, last: int, folder: Path) -> None:
    """In a process of its own: try the inputs from ``first`` to ``last``, noting each before it is tried."""
    counts, begun = Counts(), time.monotonic()
    note = os.open(folder / "number", os.O_RDWR | os.O_CREAT)
    with prepared():
        for number in range(first, min(first + 20, last)):
            _note(note, number)
            try_one(target, seed, number, folder, Counts())  # fills every cache, so that memory is comparable
        _forget_peak()
        idle = _memory()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + _ADDRESSES, used + _ADDRESSES))
        for number in range(first, last):
            _note(note, number)
            try_one(target, seed, number, folder, counts, idle)
            if not number % 1000:
                _save(folder, counts, begun)
    signal.setitimer(signal.ITIMER_REAL, 0)
    _save(folder, counts, begun)


def _note(note: int, number: int) -> None:
    """Say which input is next, and have the process end if it never does."""
    os.pwrite(note, number.to_bytes(8, "little"), 0)
    signal.setitimer(signal.ITIMER_REAL, HANG)


def _save(folder: Path, counts: Counts, begun: float) -> None:
    counts.seconds = time.monotonic() - begun
    (folder / "counts.new").write_text(json.dumps(asdict(counts)))
    (folder / "counts.new").replace(folder / "counts.json")


def run(target: str, seed: int, first: int, last: int, scratch: Path) -> Counts:
    """Try inputs in processes of their own; one that dies is a finding, and the next goes on behind it."""
    total = Counts()
    while first < last:
        with TemporaryDirectory(dir=scratch) as name:
            folder = Path(name)
            command = [sys.executable, __file__, "--serve", target, str(seed), str(first), str(last), name]
            code = subprocess.run(command, check=False).returncode
            saved = folder / "counts.json"
            counts = Counts(**json.loads(saved.read_text())) if saved.exists() else Counts()
            if code == 0:
                total.add(counts)
                return total
            died = int.from_bytes((folder / "number").read_bytes(), "little")
            counts.inputs = died + 1 - first
            counts.findings.append(_finding(target, seed, died, f"ended its process with {code}"))
            total.add(counts)
            first = died + 1
    return total


def shares(targets: list[str], inputs: int) -> dict[str, int]:
    """How many of all inputs each target gets."""
    from fuzz_targets import TARGETS

    whole = sum(TARGETS[name].share for name in targets)
    return {name: round(inputs * TARGETS[name].share / whole) for name in targets}


def keep(finding: dict[str, Any], folder: Path) -> None:
    """Write the input of a finding, to be made small and kept."""
    from fuzz_targets import TARGETS, write

    folder.mkdir(parents=True, exist_ok=True)
    data = TARGETS[finding["target"]].mutate(generator(finding["seed"], finding["target"], finding["number"]))
    with contextlib.suppress(OSError, ValueError):
        write(folder / f"{finding['target']}-{finding['seed']}-{finding['number']}", data)


def merged(report: dict[str, Any], found: dict[str, Counts], given: argparse.Namespace) -> dict[str, Any]:
    """The report of earlier runs with what was found by this one: totals by target, and which inputs they are."""
    targets, runs = report.get("targets", {}), report.get("runs", [])
    for name, counts in found.items():
        total = Counts(**targets.get(name, {}))
        total.add(counts)
        targets[name] = asdict(total)
        this = {"target": name, "seed": given.seed, "first": given.first, "inputs": counts.inputs}
        last = runs[-1] if runs else None
        if (
            last
            and all(last[key] == this[key] for key in ("target", "seed"))
            and last["first"] + last["inputs"] == given.first
        ):
            last["inputs"] += counts.inputs
        else:
            runs.append(this)
    inputs = sum(counts["inputs"] for counts in targets.values())
    return {"inputs": inputs, "seconds": sum(t["seconds"] for t in targets.values()), "targets": targets, "runs": runs}


def main() -> int:
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
    scratch = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with TemporaryDirectory(dir=scratch) as folder, ThreadPoolExecutor(given.jobs) as pool:
        numbers = shares(names, given.inputs)
        tasks = {
            name: pool.submit(run, name, given.seed, given.first, given.first + count, Path(folder))
            for name, count in numbers.items()
        }
        found = {name: task.result() for name, task in tasks.items()}
    report = merged(json.loads(given.json.read_text()) if given.json and given.json.exists() else {}, found, given)
    text = json.dumps(report, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n")
    findings = [finding for each in found.values() for finding in each.findings]
    if given.keep:
        for finding in findings:
            keep(finding, given.keep)
    return 1 if findings else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        target, seed, first, last, name = sys.argv[2:]
        _serve(target, int(seed), int(first), int(last), Path(name))
        sys.exit(0)
    sys.exit(main())
