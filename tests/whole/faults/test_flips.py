"""``verify`` notices every flipped bit, and where that is in a tensor it names it."""

from __future__ import annotations

import random

import pytest
from flips_kit import SAMPLES, flip, make_sample, places


@pytest.mark.by_default("directory", "chain")
@pytest.mark.parametrize("kind", [*SAMPLES, "chain"])
def test_flips_all_over_the_file_are_noticed_and_named(kind, tmp_path):
    path, rng = make_sample(tmp_path, kind), random.Random(1)
    size = path.stat().st_size
    wanted = [(place, rng.randrange(8)) for place in range(rng.randrange(5), size, max(5, size // 400))]
    found = flip(path, wanted)
    assert found.faults == []
    assert {"in ckpt8.manifest", "in ckpt8.seal", "in header", "in padding", "in planes"} <= found.counts.keys()


def test_flips_in_the_base_of_a_delta_are_noticed_where_it_needs_them(tmp_path):
    """It needs all but first moments and the skeleton."""
    path, rng = make_sample(tmp_path, "chain"), random.Random(1)
    base = tmp_path / "budget.ckpt8"
    needed = [
        (start, stop)
        for name, start, stop in places(base.read_bytes())
        if "exp_avg/" not in name and not name.startswith("ckpt8.skeleton")
    ]
    bytes_ = [place for start, stop in needed for place in range(start, stop)]
    found = flip(base, [(place, rng.randrange(8)) for place in bytes_[:: len(bytes_) // 300]], path)
    assert found.faults == []
    assert {"in ckpt8.manifest", "in ckpt8.seal", "in header", "in padding", "in planes"} <= found.counts.keys()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "every"), [("file", 1), ("directory", 1), ("budget", 3), ("chain", 3)])
def test_a_flipped_bit_in_any_byte_is_noticed_and_named(kind, every, tmp_path):
    """``fixtures/bench/faults.py`` flips every bit."""
    path, rng = make_sample(tmp_path, kind), random.Random(2)
    found = flip(path, [(place, rng.randrange(8)) for place in range(0, path.stat().st_size, every)])
    assert found.faults == []
