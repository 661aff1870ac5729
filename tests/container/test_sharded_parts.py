"""Where a rank that saves on its own may write its part: not beside parts of another save."""

from __future__ import annotations

import pytest

from ckpt8.container.sharded import Part, ShardedIndex, has_other_parts


def put(folder, *parts):
    for part in parts:
        ShardedIndex({}, {}, {}, part=part).write(folder)


def allowed(folder, save, world):
    return [rank for rank in range(world) if not has_other_parts(folder, Part(rank, world, save))]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_no_rank_writes_beside_a_whole_set_of_parts(tmp_path, world):
    put(tmp_path, *(Part(rank, 3, "old") for rank in range(3)))
    assert allowed(tmp_path, "new", world) == []


def test_a_part_that_an_interrupted_save_of_more_ranks_has_left_is_seen(tmp_path):
    put(tmp_path, Part(5, 8, "old"))
    assert 0 not in allowed(tmp_path, "new", 2)


def test_parts_of_faster_ranks_are_no_hindrance(tmp_path):
    assert allowed(tmp_path, "new", 4) == [0, 1, 2, 3]
    put(tmp_path, Part(0, 4, "new"), Part(2, 4, "new"))
    assert allowed(tmp_path, "new", 4) == [1, 3]
    (tmp_path / "ckpt8-dcp.0.json").unlink()
    assert allowed(tmp_path, "new", 4) == [0, 1, 3]


def test_an_index_is_in_the_way_of_all(tmp_path):
    put(tmp_path, None)
    assert allowed(tmp_path, "new", 3) == []
