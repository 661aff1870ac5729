"""``verify`` notices every flipped bit, and where that is in a tensor it names it."""

from __future__ import annotations

import random

import pytest
from flips_kit import SAMPLES, flip, make_sample, sweep


@pytest.mark.parametrize("kind", SAMPLES)
def test_flips_all_over_the_file_are_noticed_and_named(kind, tmp_path):
    path, rng = make_sample(tmp_path, kind), random.Random(1)
    size = path.stat().st_size
    wanted = [(place, rng.randrange(8)) for place in range(rng.randrange(5), size, max(5, size // 1000))]
    found = flip(path, wanted)
    assert found.faults == []
    assert {"in ckpt8.manifest", "in ckpt8.seal", "in header", "in padding", "in planes"} <= found.counts.keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", SAMPLES)
def test_every_flipped_bit_is_noticed_and_named(kind, tmp_path):
    found = sweep(tmp_path, kind)
    assert found.faults == []
    assert found.counts["flips"] == 8 * (tmp_path / f"{kind}.ckpt8").stat().st_size
