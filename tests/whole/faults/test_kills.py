"""Processes that are killed, interrupted or starved at random moments; ``fixtures/bench/faults.py`` has the counts."""

from __future__ import annotations

import signal

import chain_faults_kit
import pytest
from faults_kit import SIGNALS, Outcome, Server, kill_rounds, operations, signal_rounds, size_rounds

ARCHIVES = ("compress archive", "restore archive", "background save archive")
NAMES = ("compress", "restore file", "restore directory", "background save", *ARCHIVES)
QUICK = ("restore directory", "background save archive")


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in NAMES])
def operation(request, tmp_path):
    return operations(tmp_path)[request.param]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with Server(tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.mark.slow
def test_a_few_kills_limits_and_interrupts(operation, server):
    assert kill_rounds(server, operation, 4, seed=1).faults == []
    assert size_rounds(server, operation, 3).faults == []
    for name in SIGNALS if "save" not in operation.name else ():
        assert signal_rounds(server, operation, name, 2, seed=2).faults == []


@pytest.mark.slow
def test_kill_9_at_random_moments(operation, server):
    """The script does 200."""
    many = operation.name in QUICK
    outcome = kill_rounds(server, operation, 40 if many else 12, seed=3)
    assert outcome.faults == []
    if not many:
        return
    # Moments before, within and after the writing were all met.
    assert min(outcome.counts[f"target {state}"] for state in ("absent", "old", "complete")) > 0
    assert outcome.counts["with leftovers"] > 0


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_anywhere(operation, server):
    assert size_rounds(server, operation, 16).faults == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SIGNALS)
def test_interrupts_at_random_moments(name, operation, server):
    if "save" not in operation.name:
        assert signal_rounds(server, operation, name, 12, seed=4).faults == []
    if operation.name == "compress":  # until it begins, one process is as another
        assert signal_rounds(None, operation, name, 6, seed=5).faults == []


@pytest.fixture
def run(tmp_path):
    return chain_faults_kit.Run(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("command", chain_faults_kit.COMMANDS[1:])
def test_a_command_on_a_run_is_killed(command, server, tmp_path):
    run = chain_faults_kit.Run(tmp_path, command)
    outcome = chain_faults_kit.kill_rounds(server, run, 10, seed=7)
    assert outcome.faults == []
    assert outcome.counts["killed"] >= 10


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_chain_is_killed_many_times(run, server):
    """The script does 200."""
    outcome = chain_faults_kit.kill_rounds(server, run, 40, seed=8)
    assert outcome.faults == []
    assert min(outcome.counts[state] for state in ("as original", "as both", "as container", "with leftovers")) > 0
