"""``chain --remove`` killed at random moments: each checkpoint is there whole, as original or as verified container."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace

import chain_command_kit
from faults_kit import INPUTS, LEFTOVER, Outcome, Server, digest

import ckpt8

ASIDE = re.compile(r"\..+\.[0-9a-f]{16}\.ckpt8-remov(?:ed|ing)")
MOMENTS = ("before the rename", "after the rename", "within the removal")


class Run:
    """The folder of a run of files and directories; ``whole`` has copies of its checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.whole, self.tmp = folder / "run", folder / "whole", folder / "tmp"
        self.tmp.mkdir(parents=True)
        chain_command_kit.make_run(self.whole, 3)
        shutil.copytree(INPUTS / "trainer-adamw", self.whole / "checkpoint-12")
        chain_command_kit.age(self.whole / "checkpoint-12")
        self.sums = {path.name: digest(path) for path in self.whole.iterdir()}
        self.seconds = 0.0

    def reset(self) -> None:
        """The run as it was before anything was compressed."""
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.whole, self.folder, symlinks=True)

    def container(self, name: str) -> Path:
        return self.folder / (name.removesuffix(".pt") + ".ckpt8")

    def run(self, server: Server, **more: object) -> tuple[int, float, str]:
        job = {"argv": ["chain", str(self.folder), "--remove", "--rest", "0", "--preset", "archive", "--threads", "2"]}
        return server.run(SimpleNamespace(job=job, folder=self.folder.parent), **more)

    def check(self, outcome: Outcome, what: str) -> None:
        """Count how every checkpoint is there, and note one that is not."""
        for name, sums in self.sums.items():
            original, container = self.folder / name, self.container(name)
            is_whole = os.path.lexists(original) and digest(original) == sums
            if os.path.lexists(original) and not is_whole:
                outcome.faults.append(f"{what}: {name} is there and not whole")
            if container.exists():
                failures = ckpt8.verify(container, self.whole / name).failures
                outcome.counts["as both" if is_whole else "as container"] += 1
                outcome.faults += [f"{what}: {name}: {failure}" for failure in failures]
            else:
                outcome.counts["as original"] += 1
                if not is_whole:
                    outcome.faults.append(f"{what}: {name} is lost")
        known = {*self.sums, *(self.container(name).name for name in self.sums)}
        left = [path.name for path in self.folder.iterdir() if path.name not in known]
        outcome.counts["with leftovers"] += bool(left)
        for name in left:
            if LEFTOVER.fullmatch(name) is None and ASIDE.fullmatch(name) is None:
                outcome.faults.append(f"{what}: left behind {name}")

    def finish(self, server: Server, outcome: Outcome, what: str) -> None:
        """One more run to the end: containers are left, and nothing else."""
        code, _, said = self.run(server)
        if (code, said) != (0, ""):
            outcome.faults.append(f"{what}: the last run: {code} {said}")
        expected = {self.container(name).name for name in self.sums}
        if {path.name for path in self.folder.iterdir()} != expected:
            outcome.faults.append(f"{what}: the last run left {sorted(path.name for path in self.folder.iterdir())}")
        self.check(outcome, f"{what}, the last run")


def kill_rounds(server: Server, run: Run, kills: int, seed: int) -> Outcome:
    """kill -9 at random moments, again and again until a run is through; the next one begins anew."""
    rng, outcome = random.Random(seed), Outcome()
    run.reset()
    code, run.seconds, said = run.run(server)
    assert (code, said) == (0, ""), said
    done = 0
    while done < kills:
        run.reset()
        for attempt in range(4):
            delay = rng.uniform(0, 1.1 * run.seconds / (attempt + 1))
            code, _, _ = run.run(server, delay=delay)
            done += code == -signal.SIGKILL
            outcome.counts["killed" if code == -signal.SIGKILL else "had ended"] += 1
            run.check(outcome, f"kill {done}, {delay:.4f} of {run.seconds:.4f} s")
        run.finish(server, outcome, f"kill {done}")
    return outcome


def die(moment: str) -> None:
    """Have this process kill itself at a moment of its first removal of a directory."""
    from ckpt8.chaining import removal

    rename, remove = removal.rename_new, removal.remove

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

    removal.rename_new = rename_new
    if moment == "within the removal":
        removal.remove = remove_some
