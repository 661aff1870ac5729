"""Saves of ranks that go wrong: what must hold of the others and of the directory, over many rounds."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import faults_kit
import program_kit

TIMEOUT = 5
"""Seconds that the ranks' group waits."""


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
        super().__init__(Path(__file__).with_name("rank_faults_server.py"), environment=environment)

    def save(self, outcome, **job):
        """Let ranks save two states; the answer. What an earlier round left must be gone after the first save."""
        self._number += 2
        numbers = {"before": self._number, "after": self._number + 1}
        job = {"folder": str(self.folder), "timeout": TIMEOUT, **numbers, **job}
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
