"""Which file holds which part of a tensor: grids and lists beside the boxes that they were made of; parts of an index.

A rank that saves on its own writes no part beside those of another save.
"""

from __future__ import annotations

import json
import time
import tracemalloc
from itertools import product

import pytest
import torch
import torch.distributed.checkpoint as dcp
from fuzz_mutations import slots
from hypothesis import given
from hypothesis import strategies as st

from ckpt8.container.collecting import RankFile, collect
from ckpt8.container.joined import JoinedReader
from ckpt8.container.sharded import GlobalTensor, Grid, Listed, Part, Place, ShardedIndex, has_other_parts, parse_index
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType
from ckpt8.integrations.dcp import Ckpt8StorageWriter

SEAL = "0" * 64


def collected(boxes, shape, files):
    """The layout of one tensor from ``boxes``: file, offsets and sizes."""
    ranks = [
        RankFile.of(f"{k}", SEAL, [("t", at, size) for file, at, size in boxes if file == k]) for k in range(files)
    ]
    return collect(ranks, {"t": shape})["t"]


def read_again(layout, shape, files):
    """The tensor of a layout, written and read."""
    names = [f"{k}" for k in range(files)]
    index = ShardedIndex(dict.fromkeys(names, SEAL), {"t": GlobalTensor(DType.INT8, shape, layout, names)}, {})
    return parse_index(index.to_bytes(), "x").tensors["t"]


@st.composite
def grids(draw):
    """A tensor, its boxes as cuts make them, and the number of files."""
    cuts = [draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)) for _ in range(draw(st.integers(0, 3)))]
    files = draw(st.integers(1, 4))
    boxes = []
    for cell in product(*(range(len(sizes)) for sizes in cuts)):
        offsets = tuple(sum(sizes[:k]) for sizes, k in zip(cuts, cell, strict=True))
        sizes = tuple(sizes[k] for sizes, k in zip(cuts, cell, strict=True))
        boxes.append((draw(st.integers(0, files - 1)), offsets, sizes))
    return tuple(map(sum, cuts)), boxes, files


def elements(offsets, sizes):
    return set(product(*(range(at, at + size) for at, size in zip(offsets, sizes, strict=True))))


@given(grids(), st.data())
def test_a_grid_has_the_boxes_that_it_was_made_of(grid, data):
    shape, boxes, files = grid
    tensor = read_again(collected(boxes, shape, files), shape, files)
    assert tensor.is_whole
    assert [(int(file), *box) for file, *box in tensor.boxes()] == sorted(boxes, key=lambda each: each[1])
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
    wanted = elements(offsets, sizes)
    found = {(int(file), *box) for file, *box in tensor.overlapping(offsets, sizes)}
    assert found == {each for each in boxes if elements(*each[1:]) & wanted}


@given(grids(), st.data())
def test_boxes_that_are_no_grid_are_listed(grid, data):
    shape, boxes, files = grid
    kept = [each for each in boxes if data.draw(st.booleans())]
    if not kept or len(kept) == len(boxes):
        return
    layout = collected(kept, shape, files)
    tensor = read_again(layout, shape, files)
    assert not tensor.is_whole
    assert isinstance(layout, Listed)
    assert sorted((int(file), *box) for file, *box in tensor.boxes()) == sorted(kept)
    offsets = tuple(data.draw(st.integers(0, size - 1)) for size in shape)
    sizes = tuple(data.draw(st.integers(0, size - at)) for size, at in zip(shape, offsets, strict=True))
    for start, lengths in (((0,) * len(shape), shape), (offsets, sizes)):
        wanted = elements(start, lengths)
        assert tensor.overlapping(start, lengths) == [each for each in tensor.boxes() if elements(*each[1:]) & wanted]


def growth(call, size: int, times: int = 4) -> float:
    """How much longer ``call(times * size)`` takes than ``call(size)``, in processor time: the least of three tries.

    About ``times`` where the time grows with the size, ``times`` squared where it grows with its square.
    """

    def seconds(given: int) -> float:
        start = time.process_time()
        call(given)
        return time.process_time() - start

    return min(seconds(times * size) / seconds(size) for _ in range(3))


@pytest.mark.slow
def test_the_time_to_find_every_box_of_a_list_grows_with_their_number():
    """A plan of torch asks for each box by itself."""

    def find_all(bricks):
        rows = [(0, (0, 4 * k), (1, 4)) for k in range(bricks)]
        wall = Listed([*rows, (0, (1, 0), (1, 2)), *((0, (1, 4 * k + 2), (1, 4)) for k in range(bricks - 1))])
        assert sum(len(list(wall.overlapping(*box[1:]))) for box in wall.listed) == len(wall.listed)

    assert growth(find_all, 500) < 8


def test_a_brick_wall_is_no_grid():
    wall = [(0, (0, 0), (1, 2)), (0, (0, 2), (1, 2)), (1, (1, 0), (1, 3)), (1, (1, 3), (1, 1))]
    tensor = read_again(collected(wall, (2, 4), 2), (2, 4), 2)
    assert not tensor.is_whole
    assert [int(each.file) for each in tensor.overlapping((1, 2), (1, 2))] == [1, 1]
    assert len(tensor.overlapping((0, 1), (2, 2))) == 3


@pytest.mark.slow
def test_files_of_meshes_are_a_few_numbers():
    ranks = range(1024)
    rows = [(rank, (rank * 16, 0), (16, 64)) for rank in ranks]
    assert collected(rows, (16384, 64), 1024).owners == [[0, 1024, 1]]
    # FSDP over 128, then tensor parallel over 8, both in the first dimension.
    both = [(rank, ((rank % 8) * 2048 + rank // 8 * 16, 0), (16, 64)) for rank in ranks]
    assert collected(both, (16384, 64), 1024).owners == [[first, 128, 8] for first in range(8)]
    last = collected([(0, (0,), (126,)), (1, (126,), (126,)), (2, (252,), (4,))], (256,), 3)
    assert [cuts.runs for cuts in last.cuts] == [[[126, 2], [4, 1]]]


def test_of_equal_boxes_the_first_counts():
    boxes = [(0, (0,), (4,)), (1, (0,), (4,)), (1, (4,), (4,))]
    assert [int(each.file) for each in read_again(collected(boxes, (8,), 2), (8,), 2).boxes()] == [0, 1]


def test_tensors_without_elements_have_no_boxes():
    tensor = read_again(Listed([]), (0, 7), 1)
    assert tensor.boxes() == tensor.overlapping((0, 0), (0, 7)) == []


def test_pickled_boxes_keep_their_places():
    rank = RankFile.of("0", SEAL, [("t", (0, 4), (3, 4))], pickled={("t", (0, 4)): (7, 90)})
    layout = collect([rank], {"t": (3, 8)})["t"]
    tensor = read_again(layout, (3, 8), 1)
    assert tensor.pickled(tensor.boxes()[0]) == Place("0", 7, 90)


@pytest.mark.slow
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-2, 1 << 70) | st.floats(allow_nan=False) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
    st.data(),
)
def test_any_other_value_is_refused_or_harmless(value, data):
    cells = Grid([[[2, 3]], [[4, 1]]], [[0, 2, 1], 0])
    tensors = {
        "grid": GlobalTensor(DType.INT8, (6, 4), cells, ["a", "b"]),
        "list": GlobalTensor(DType.INT8, (6,), Listed([(1, (2,), (3,))], {(2,): (0, 9)}), ["a", "b"]),
    }
    index = ShardedIndex({"a": SEAL, "b": SEAL}, tensors, {"o": Place("a", 0, 5)}, {"o": ("o", 1)}, "1.0.0", "s")
    tree = json.loads(index.to_bytes())
    places = list(slots(tree))
    _, node, key = places[data.draw(st.integers(0, len(places) - 1))]
    node[key] = value
    try:
        found = parse_index(json.dumps(tree).encode(), "x")
    except InputError:
        return
    for tensor in found.tensors.values():
        for box in tensor.boxes():
            assert box.file in found.files
            assert all(
                0 <= at < at + size <= whole
                for at, size, whole in zip(box.offsets, box.sizes, tensor.shape, strict=True)
            )


def test_an_index_that_names_too_many_cells_is_refused():
    tensor = {"dtype": "int8", "shape": [1 << 40], "cuts": [[[1, 1 << 40]]], "owners": [[0, 1 << 40, 0]]}
    tree = {"format": "ckpt8-dcp", "version": "2.0", "files": [["a", SEAL]], "tensors": {"t": tensor}, "objects": {}}
    with pytest.raises(InputError, match="malformed at 'tensors'"):
        parse_index(json.dumps(tree).encode(), "x")


@pytest.mark.filterwarnings("ignore")
def test_cells_that_no_file_holds_are_not_listed(tmp_path):
    """An index says much in a few numbers: memory does not grow with what nobody wrote."""
    cells = 2_000_000
    dcp.save({"w": torch.ones(8)}, storage_writer=Ckpt8StorageWriter(tmp_path / "x"), no_dist=True)
    index = tmp_path / "x" / "ckpt8-dcp.json"
    tree = json.loads(index.read_text())
    tree["tensors"]["w"] |= {"shape": [cells], "cuts": [[[1, cells]]], "owners": [[0, cells, 0]]}
    index.write_text(json.dumps(tree | {"padding": "x" * (cells // 64)}))
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="names 2000000 slices, and its files hold 1"):
            JoinedReader(tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()


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
