"""Processes that are killed, interrupted or starved at random moments; ``fixtures/bench/faults.py`` has the counts."""

from __future__ import annotations

import signal

import chain_faults_kit
import pytest
import rank_faults_kit
from faults_kit import SIGNALS, Outcome, Server, kill_rounds, operations, signal_rounds, size_rounds

ARCHIVES = ("compress archive", "restore archive", "background save archive")
NAMES = ("compress", "restore file", "restore directory", "background save", *ARCHIVES)
CHECKED = ("restore directory", "background save archive")


pytestmark = pytest.mark.slow


@pytest.fixture(params=NAMES)
def operation(request, tmp_path):
    return operations(tmp_path)[request.param]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


def test_kill_9_at_random_moments(operation, server):
    """The script does 200."""
    many = operation.name in CHECKED
    outcome = kill_rounds(server, operation, 24 if many else 6, seed=3)
    assert outcome.faults == []
    if not many:
        return
    # Moments before, within and after the writing were all met. A busy machine takes longer than it did alone.
    states = [f"target {state}" for state in ("absent", "old", "complete")]
    for seed in range(4, 8):
        if min(outcome.counts[state] for state in states) == 0:
            operation.seconds *= 1.5
            more = kill_rounds(server, operation, 24, seed)
            assert more.faults == []
            outcome.counts += more.counts
    assert min(outcome.counts[state] for state in states) > 0
    assert outcome.counts["with leftovers"] > 0


@pytest.mark.parametrize("operation", NAMES[:5], indirect=True)
def test_a_limit_on_the_size_of_files_anywhere(operation, server):
    assert size_rounds(server, operation, 8).faults == []


@pytest.mark.parametrize("operation", NAMES[:3], indirect=True)
@pytest.mark.parametrize("name", SIGNALS)
def test_interrupts_at_random_moments(name, operation, server):
    assert signal_rounds(server, operation, name, 5, seed=4).faults == []


@pytest.fixture
def run(tmp_path):
    return chain_faults_kit.Run(tmp_path)


@pytest.mark.parametrize("command", chain_faults_kit.COMMANDS[1:])
def test_a_command_on_a_run_is_killed(command, server, tmp_path):
    run = chain_faults_kit.Run(tmp_path, command)
    outcome = chain_faults_kit.kill_rounds(server, run, 5, seed=7)
    assert outcome.faults == []
    assert outcome.counts["killed"] >= 5


@pytest.mark.parametrize("moment", chain_faults_kit.MOMENTS)
def test_a_kill_as_a_directory_goes(moment, run, server):
    outcome = Outcome()
    run.reset()
    assert run.run(server, die=moment)[0] == -signal.SIGKILL
    assert run.container("checkpoint-12").is_file()
    assert (run.folder / "checkpoint-12").exists() == (moment == "before the rename")
    run.check(outcome, moment)
    run.finish(server, outcome, moment)
    assert outcome.faults == []


def test_a_chain_is_killed_many_times(run, server):
    """The script does 200."""
    outcome = chain_faults_kit.kill_rounds(server, run, 16, seed=8)
    assert outcome.faults == []
    assert min(outcome.counts[state] for state in ("as original", "as both", "as container", "with leftovers")) > 0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with rank_faults_kit.Ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("count", "job"),
    [(5, {"worlds": (2, 3)}), (2, {"worlds": (2,), "parts": True}), (1, {"worlds": (2,), "number": signal.SIGSTOP})],
    ids=["killed", "killed with parts of their own", "stopped"],
)
def test_ranks_end_at_random_moments(count, job, ranks):
    """``fixtures/bench/faults.py`` does 100."""
    outcome = rank_faults_kit.kill_rounds(ranks, count, seed=2, **job)
    assert outcome.faults == []
    assert outcome.counts["met"] == count or "parts" in job


def test_full_disks_of_any_size(ranks):
    assert rank_faults_kit.full_disk_rounds(ranks, [60, 500_000], worlds=(2,)).faults == []
    assert rank_faults_kit.full_disk_rounds(ranks, [20_000], worlds=(3,), victims=(1,)).faults == []
