"""Ranks that are killed or stopped at random moments of a save, or whose disk is full."""

from __future__ import annotations

import signal
import sys

import pytest
from rank_faults_kit import Ranks, full_disk_rounds, kill_rounds

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.slow
def test_a_killed_rank_and_a_full_disk(ranks):
    assert kill_rounds(ranks, 1, seed=1, worlds=(2,)).faults == []
    assert full_disk_rounds(ranks, [500_000], worlds=(2,), victims=(1,)).faults == []


@pytest.mark.slow
def test_ranks_are_killed_at_random_moments(ranks):
    """``fixtures/bench/faults.py`` does 100."""
    outcome = kill_rounds(ranks, 12, seed=2)
    assert outcome.faults == []
    assert outcome.counts["met"] == 12
    assert outcome.counts["holds before"] > 0


@pytest.mark.slow
def test_ranks_that_write_their_parts_alone_are_killed(ranks):
    outcome = kill_rounds(ranks, 6, seed=3, worlds=(2, 3), parts=True)
    assert outcome.faults == []


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_others_in_time(ranks):
    outcome = kill_rounds(ranks, 2, seed=4, worlds=(2, 3), number=signal.SIGSTOP)
    assert outcome.faults == []


@pytest.mark.slow
def test_full_disks_of_any_size(ranks):
    assert full_disk_rounds(ranks, [60, 20_000, 1_000_000]).faults == []
