"""Processes that are killed, interrupted or starved at random moments; ``fixtures/bench/faults.py`` has the counts."""

from __future__ import annotations

import pytest
from faults_kit import SIGNALS, Server, kill_rounds, operations, signal_rounds, size_rounds

ARCHIVES = ("compress archive", "restore archive", "background save archive")
NAMES = ("compress", "restore file", "restore directory", "background save", *ARCHIVES)


@pytest.fixture(params=NAMES)
def operation(request, tmp_path):
    return operations(tmp_path)[request.param]


@pytest.fixture
def server(operation):
    with Server(operation.tmp) as server:
        yield server


def test_a_few_kills_limits_and_interrupts(operation, server):
    assert kill_rounds(server, operation, 6, seed=1).faults == []
    assert size_rounds(server, operation, 4).faults == []
    for name in SIGNALS if "save" not in operation.name else ():
        assert signal_rounds(server, operation, name, 3, seed=2).faults == []


@pytest.mark.slow
def test_kill_9_at_random_moments(operation, server):
    """The script does 200."""
    outcome = kill_rounds(server, operation, 40, seed=3)
    assert outcome.faults == []
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
        assert signal_rounds(None, operation, name, 4, seed=5).faults == []
