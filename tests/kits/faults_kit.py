"""Operations on real files that are killed, interrupted or starved in other processes, and what must hold after."""

from __future__ import annotations

import hashlib
import os
import random
import re
import shutil
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import program_kit

import ckpt8

INPUTS = Path(__file__).parents[2] / "fixtures" / "inputs"
LEFTOVER = re.compile(r"\..{1,40}\.[0-9a-f]{16}\.ckpt8-partial")
SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM}


def digest(path: Path) -> str:
    """Of a file, or of a directory with every name, link and byte in it."""
    sums = hashlib.sha256()
    for each in [path, *sorted(path.rglob("*"))]:
        kind = "link" if each.is_symlink() else "directory" if each.is_dir() else "file"
        content = b""
        if kind != "directory":
            content = os.fsencode(each.readlink()) if kind == "link" else each.read_bytes()
        name = "" if each == path else str(each.relative_to(path))
        sums.update(f"{name}\0{kind}\0{len(content)}\0".encode() + content)
    return sums.hexdigest()


@dataclass
class Operation:
    """Something that writes ``target`` from ``source``; ``tmp`` is the directory for temporary files."""

    name: str
    folder: Path
    source: Path
    target: Path
    expected: str = ""
    seconds: float = 0.0

    @property
    def tmp(self) -> Path:
        return self.folder / "tmp"

    @property
    def preset(self) -> str:
        return "archive" if "archive" in self.name else "flash"

    @property
    def job(self) -> dict:
        if "save" in self.name:
            return {"save": str(self.source), "target": str(self.target), "preset": self.preset}
        command = self.name.split()[0]
        more = ["--preset", self.preset] if command == "compress" else []
        return {"argv": [command, str(self.source), "-o", str(self.target), "--force", "--threads", "2", *more]}

    def leftovers(self) -> list[str]:
        """Names that neither source nor target have."""
        known = {self.source.name, self.target.name, "tmp", "stderr"}
        return sorted(each.name for each in [*self.folder.iterdir(), *self.tmp.iterdir()] if each.name not in known)


def operations(folder: Path) -> dict[str, Operation]:
    """Compress, restore a file, restore a directory, save in the background: each in a folder of its own.

    Those with "archive" in their names are of files of that preset.
    """
    found = {}
    for name, source, target in (
        ("compress", "run.pt", "run.ckpt8"),
        ("restore file", "run.ckpt8", "run.pt"),
        ("restore directory", "run.ckpt8", "run"),
        ("background save", "run.pt", "run.ckpt8"),
        ("compress archive", "run.pt", "run.ckpt8"),
        ("restore archive", "run.ckpt8", "run.pt"),
        ("background save archive", "run.pt", "run.ckpt8"),
    ):
        own = folder / name.replace(" ", "_")
        (own / "tmp").mkdir(parents=True)
        operation = found[name] = Operation(name, own, own / source, own / target)
        if source == "run.pt":
            shutil.copy(INPUTS / "gpt_adamw.pt", operation.source)
        elif target == "run.pt":
            ckpt8.compress(INPUTS / "gpt_adamw.pt", operation.source, preset=operation.preset)
        else:
            with tempfile.TemporaryDirectory(dir=folder) as scratch:
                run = make_run(Path(scratch) / "run")
                ckpt8.compress(run, operation.source)
    return found


def make_run(root: Path) -> Path:
    """A directory of checkpoints, other files, a link and an empty directory."""
    (root / "sub" / "empty").mkdir(parents=True)
    shutil.copy(INPUTS / "gpt_adamw.pt", root / "model.pt")
    shutil.copy(INPUTS / "views.pt", root / "sub" / "views.pt")
    shutil.copy(INPUTS / "legacy.pt", root / "sub" / "legacy.pt")
    (root / "config.json").write_text('{"layers": 4}')
    (root / "latest.pt").symlink_to("model.pt")
    return root


class Server(program_kit.Server):
    """Runs jobs, see ``fork_server``."""

    def __init__(self, tmp: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp)}
        server = Path(__file__).with_name("fork_server.py")
        super().__init__("-W", "ignore", server, environment=environment)

    def run(self, operation: Operation, **more: float) -> tuple[int, float, str]:
        """Exit code, seconds, and what was said."""
        errors = operation.folder / "stderr"
        job = {**operation.job, **more, "stderr": str(errors), "tmp": str(operation.tmp)}
        code, seconds = self.ask(job)
        return code, seconds, errors.read_text()


@dataclass
class Outcome:
    """Counts by what was found, and lines of text for what must not be."""

    counts: Counter = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def to_json(self) -> dict:
        return {**dict(sorted(self.counts.items())), "faults": self.faults}


def prepare(server: Server, operation: Operation) -> None:
    """Run it to the end a few times, if that was not done yet: how long it takes, and what its result is."""
    if operation.expected:
        return
    taken = []
    for _ in range(3):
        remove(operation.target)
        code, seconds, said = server.run(operation)
        assert (code, said) == (0, ""), said
        assert not operation.leftovers()
        taken.append(seconds)
    operation.seconds = statistics.median(taken)
    operation.expected = digest(operation.target)
    if operation.target.suffix == ".ckpt8":
        # What is saved has the tensors of the source, but torch.save lays them out anew.
        against = None if "save" in operation.job else operation.source
        assert not ckpt8.verify(operation.target, against).failures


def remove(target: Path) -> None:
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)


def place_old(operation: Operation) -> str:
    """Something complete under the target's name from before."""
    remove(operation.target)
    if operation.name == "restore directory":
        operation.target.mkdir()
        shutil.copy(INPUTS / "views.pt", operation.target / "optimizer.pt")
    elif operation.target.suffix == ".ckpt8":
        shutil.copy(INPUTS.parent / "golden" / "views.flash.ckpt8", operation.target)
    else:
        shutil.copy(INPUTS / "views.pt", operation.target)
    return digest(operation.target)


def state(operation: Operation, old: str | None) -> str:
    """Whether the target is absent, what it was, or new and complete; anything else is a fault."""
    if not os.path.lexists(operation.target):
        return "absent" if old is None else "FAULT: the old target is gone"
    found = digest(operation.target)
    if found == operation.expected:
        return "complete"
    return "old" if found == old else "FAULT: neither old nor new"


def check(operation: Operation, outcome: Outcome, source: str, old: str | None, what: str, *, clean: bool) -> None:
    """Count the state of the target; note what must not be."""
    found = state(operation, old)
    left = operation.leftovers()
    outcome.counts["rounds"] += 1
    outcome.counts[f"target {found}"] += 1
    outcome.counts["with leftovers"] += bool(left)
    if found.startswith("FAULT"):
        outcome.faults.append(f"{what}: {found}")
    if digest(operation.source) != source:
        outcome.faults.append(f"{what}: the source has changed")
    if any(LEFTOVER.fullmatch(name) is None for name in left) or (clean and left):
        outcome.faults.append(f"{what}: left behind {left}")


def attempts(
    server: Server, operation: Operation, outcome: Outcome, jobs: Iterable[dict], *, clean: bool
) -> Iterator[tuple[str, int, str]]:
    """Run it once for each of ``jobs``, onto an old target in every other round, and check what is there then.

    Yields what the round was, the exit code and what was said.
    """
    prepare(server, operation)
    source = digest(operation.source)
    for k, job in enumerate(jobs):
        remove(operation.target)
        old = place_old(operation) if k % 2 else None
        code, _, said = server.run(operation, **job)
        what = f"round {k} with {job}, {operation.seconds:.4f} s"
        check(operation, outcome, source, old, what, clean=clean)
        yield what, code, said


def kill_rounds(server: Server, operation: Operation, rounds: int, seed: int) -> Outcome:
    """kill -9 at random moments; then a run that cleans up."""
    rng, outcome = random.Random(seed), Outcome()
    jobs = ({"delay": rng.uniform(0, 1.1 * operation.seconds)} for _ in range(rounds))
    for what, code, _ in attempts(server, operation, outcome, jobs, clean=False):
        outcome.counts["killed" if code == -signal.SIGKILL else "had ended"] += 1
        if operation.leftovers():
            exit_code, _, said = server.run(operation)
            outcome.counts["cleaned by the next run"] += 1
            if exit_code or said or digest(operation.target) != operation.expected or operation.leftovers():
                outcome.faults.append(f"{what}: the next run: {exit_code} {said!r} {operation.leftovers()}")
    return outcome


def signal_rounds(server: Server, operation: Operation, name: str, rounds: int, seed: int) -> Outcome:
    """SIGINT or SIGTERM at random moments."""
    rng, outcome, number = random.Random(seed), Outcome(), SIGNALS[name]
    jobs = ({"delay": rng.uniform(0, 1.05 * operation.seconds), "signal": number} for _ in range(rounds))
    for what, code, said in attempts(server, operation, outcome, jobs, clean=True):
        # Until ``main`` is reached it is the interpreter that is interrupted, and says so.
        began = code != -number
        ended = {128 + number: "stopped", 0: "had ended"}.get(code) if began else "stopped before it began"
        outcome.counts[ended or f"exit code {code}"] += 1
        complete = digest(operation.target) == operation.expected if operation.target.exists() else False
        if ended is None or (code == 0 and not complete) or (began and said.count("\n") > 1):
            outcome.faults.append(f"{what}: exit code {code}: {said}")
    return outcome


def size_rounds(server: Server, operation: Operation, limits: int) -> Outcome:
    """A limit on the size of files fails a write as a full disk does: limits spread over all that is written."""
    outcome = Outcome()
    prepare(server, operation)
    remove(operation.target)
    assert server.run(operation)[0] == 0
    written = [path.stat().st_size for path in [operation.target, *operation.target.rglob("*")] if path.is_file()]
    jobs = ({"size": max(written) * k // limits} for k in range(1, limits))  # what is said counts as well
    expected = 1 if "save" in operation.job else 4
    for what, code, said in attempts(server, operation, outcome, jobs, clean=True):
        outcome.counts[f"exit code {code}"] += 1
        last = said.strip().rpartition("\n")[2]
        if code != expected or "cannot be written" not in last or (expected == 4 and said.count("\n") != 1):
            outcome.faults.append(f"{what}: exit code {code}: {said}")
    return outcome
