"""Ranks that are killed or stopped at random moments of a save, or whose disk is full."""

from __future__ import annotations

import signal
import sys

import pytest
from rank_faults_kit import Ranks, full_disk_rounds, kill_rounds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals and limits of POSIX"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(tmp_path_factory.mktemp("ranks")) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("count", "job"),
    [
        (5, {"worlds": (2, 3)}),
        (2, {"worlds": (2,), "parts": True}),
        (1, {"worlds": (2,), "number": signal.SIGSTOP}),
    ],
    ids=["killed", "killed with parts of their own", "stopped"],
)
def test_ranks_end_at_random_moments(count, job, ranks):
    """``fixtures/bench/faults.py`` does 100."""
    outcome = kill_rounds(ranks, count, seed=2, **job)
    assert outcome.faults == []
    assert outcome.counts["met"] == count or "parts" in job


def test_full_disks_of_any_size(ranks):
    assert full_disk_rounds(ranks, [60, 500_000], worlds=(2,)).faults == []
    assert full_disk_rounds(ranks, [20_000], worlds=(3,), victims=(1,)).faults == []
