"""Commands on a run killed at random moments: each checkpoint is there whole, as original or as verified container."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import chain_command_kit
from faults_kit import INPUTS, LEFTOVER, Outcome, Server, digest

import ckpt8
from ckpt8.container.reader import ContainerReader

ASIDE = re.compile(r"\..+\.[0-9a-f]{16}\.ckpt8-remov(?:ed|ing)")
MOMENTS = ("before the rename", "after the rename", "within the removal")
COMMANDS = ("chain --remove", "compress --remove", "rebase", "runs --release", "thin --apply", "thin a chain --apply")
SETTINGS = ("--preset", "archive", "--threads", "2")


class Run:
    """The folder of a run of files and directories; ``whole`` has copies of its checkpoints.

    ``rebase``, ``runs --release`` and ``thin a chain`` begin with the ``packed`` run, a chain of containers without
    originals. ``thin`` gets the ``room`` that all take as whole files at its coarsest.
    """

    def __init__(self, folder: Path, command: str = COMMANDS[0]) -> None:
        self.command = command
        self.folder, self.whole, self.packed, self.tmp = (folder / name for name in ("run", "whole", "packed", "tmp"))
        self.tmp.mkdir(parents=True)
        # Of small files, headers are most, which do not get coarser.
        width = 128 if command.startswith("thin") else 64
        chain_command_kit.make_run(self.whole, 3 if self.begins_raw else 5, width=width)
        if self.begins_raw:
            shutil.copytree(INPUTS / "trainer-adamw", self.whole / "checkpoint-12")
            chain_command_kit.age(self.whole / "checkpoint-12")
        else:
            shutil.copytree(self.whole, self.packed)
            ckpt8.chain(self.packed, preset="archive", remove=True)
        self.sums = {path.name: digest(path) for path in self.whole.iterdir()}
        self.room = 0
        for path in self.whole.iterdir() if command.startswith("thin") else ():
            small = self.tmp / "small.ckpt8"
            self.room += int(1.03 * ckpt8.compress(path, small, force=True, budget=5.0).stored_nbytes)
            small.unlink()
        self.thrown_away: set[str] = set()
        self.seconds = 0.0

    @property
    def begins_raw(self) -> bool:
        return self.command in ("chain --remove", "compress --remove", "thin --apply")

    def reset(self, rng: random.Random | None = None) -> None:
        """The run as it was in the beginning. Of a chain, somebody removes containers that others may need."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole if self.begins_raw else self.packed, self.folder, symlinks=True)
        self.thrown_away.clear()
        if self.command == "runs --release" and rng is not None:
            # Links as such, or copied as files of their own.
            if rng.random() < 0.5:
                shutil.rmtree(self.folder)
                subprocess.run(["cp", "-a", self.packed, self.folder], check=True)
            self.thrown_away.update(rng.sample(sorted(self.sums), rng.randint(1, 4)))
            for name in self.thrown_away:
                self.container(name).unlink()

    def container(self, name: str) -> Path:
        return self.folder / (name.removesuffix(".pt") + ".ckpt8")

    def arguments(self) -> list[str]:
        """The command line that has something to do next; empty where all is done."""
        left = [path.name for path in self.folder.iterdir()]
        if self.command == "chain --remove":
            return ["chain", str(self.folder), "--remove", "--rest", "0", *SETTINGS]
        if self.command == "compress --remove":
            names = [name for name in self.sums if name in left or any(each.startswith(f".{name}.") for each in left)]
            sources = [str(self.folder / name) for name in names]
            return ["compress", *sources, "--remove", "--base", "auto", *SETTINGS] if sources else []
        if self.command == "runs --release":
            return ["runs", str(self.folder), "--release"]
        if self.command.startswith("thin"):
            rungs = ["--finest", "budget:5", "--no-delta", "--threads", "2"]
            return ["thin", str(self.folder), "--keep", "last:99", "--to", str(self.room), "--apply", *rungs]
        deltas = [path for path in sorted(self.folder.glob("*.ckpt8")) if _base_of(path)]
        return ["rebase", str(deltas[-1]), "--threads", "2"] if deltas else []

    def run(self, server: Server, **more: object) -> tuple[int, float, str]:
        """Exit code, seconds and what was said; as if all went well where nothing is left to do."""
        if not (arguments := self.arguments()):
            return 0, 0.0, ""
        return server.run(SimpleNamespace(job={"argv": arguments}, folder=self.folder.parent, tmp=self.tmp), **more)

    def check(self, outcome: Outcome, what: str) -> None:
        """Count how every checkpoint is there, and note one that is not."""
        for name, sums in self.sums.items():
            if name in self.thrown_away:
                continue
            original, container = self.folder / name, self.container(name)
            is_whole = os.path.lexists(original) and digest(original) == sums
            if os.path.lexists(original) and not is_whole:
                outcome.faults.append(f"{what}: {name} is there and not whole")
            if container.exists():
                outcome.counts["as both" if is_whole else "as container"] += 1
                outcome.faults += [f"{what}: {name}: {failure}" for failure in _failures(container, self.whole / name)]
            else:
                outcome.counts["as original"] += 1
                if not is_whole:
                    outcome.faults.append(f"{what}: {name} is lost")
        known = {*self.sums, *(self.container(name).name for name in self.sums), "bases"}
        left = [path.name for path in self.folder.iterdir() if path.name not in known]
        outcome.counts["with leftovers"] += bool(left)
        for name in left:
            if LEFTOVER.fullmatch(name) is None and ASIDE.fullmatch(name) is None:
                outcome.faults.append(f"{what}: left behind {name}")

    def finish(self, server: Server, outcome: Outcome, what: str) -> None:
        """Runs to the end: containers are left, and nothing else."""
        for _ in range(1 if self.command != "rebase" else len(self.sums)):
            code, _, said = self.run(server)
            if (code, said) != (0, ""):
                outcome.faults.append(f"{what}: the last run: {code} {said}")
        expected = {self.container(name).name for name in self.sums if name not in self.thrown_away}
        if {path.name for path in self.folder.iterdir()} - {"bases"} != expected:
            outcome.faults.append(f"{what}: the last run left {sorted(path.name for path in self.folder.iterdir())}")
        self.check(outcome, f"{what}, the last run")


def _base_of(container: Path) -> bool:
    with ContainerReader(container) as reader:
        return reader.manifest.base is not None


def _failures(container: Path, original: Path) -> list[str]:
    try:
        with ContainerReader(container) as reader:
            manifest = reader.manifest
        if manifest.earlier is None:
            return list(ckpt8.verify(container, original).failures)
        error = ckpt8.inspect(container, against=original)["steps"]["steps"]
        failures = list(ckpt8.verify(container).failures)
        return failures if error <= manifest.error_in_steps * (1 + 1e-6) else [*failures, f"errs by {error} steps"]
    except ckpt8.Ckpt8Error as exc:
        return [str(exc)]


def kill_rounds(server: Server, run: Run, kills: int, seed: int) -> Outcome:
    """kill -9 at random moments, again and again until a run is through; the next one begins anew."""
    rng, outcome = random.Random(seed), Outcome()
    run.reset()
    code, run.seconds, said = run.run(server)
    assert (code, said) == (0, ""), said
    done = 0
    while done < kills:
        run.reset(rng)
        for attempt in range(4):
            delay = rng.uniform(0, 1.1 * run.seconds / (attempt + 1))
            code, _, _ = run.run(server, delay=delay)
            done += code == -signal.SIGKILL
            outcome.counts["killed" if code == -signal.SIGKILL else "had ended"] += 1
            run.check(outcome, f"kill {done}, {delay:.4f} of {run.seconds:.4f} s")
        run.finish(server, outcome, f"kill {done}")
    return outcome


def size_rounds(server: Server, run: Run, limits: int) -> Outcome:
    """A limit on the size of files fails a write as a full disk does: limits up to the largest that is written."""
    outcome = Outcome()
    run.reset()
    assert run.run(server)[0] == 0
    largest = max(path.stat().st_size for path in run.folder.glob("*.ckpt8"))
    for k in range(1, limits):
        run.reset()
        code, _, said = run.run(server, size=largest * k // limits)
        outcome.counts[f"exit code {code}"] += 1
        if code != 4 or "cannot be written" not in said:
            outcome.faults.append(f"limit {k}: exit code {code}: {said}")
        run.check(outcome, f"limit {k}")
        run.finish(server, outcome, f"limit {k}")
    return outcome


def die(moment: str) -> None:
    """Have this process kill itself at a moment of its first removal of a directory."""
    from ckpt8.chaining import jobs

    rename, remove = jobs.rename_new, jobs.remove

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def rename_new(old: Path, new: Path) -> None:
        is_directory = old.is_dir()
        if moment == "before the rename" and is_directory:
            kill()
        rename(old, new)
        if moment == "after the rename" and is_directory:
            kill()

    def remove_some(path: Path) -> None:
        if path.is_dir():
            remove(next(each for each in sorted(path.iterdir()) if each.is_file()))
            kill()
        remove(path)

    jobs.rename_new = rename_new
    if moment == "within the removal":
        jobs.remove = remove_some
