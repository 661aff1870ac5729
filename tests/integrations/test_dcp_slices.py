"""Boxes of stored tensors: equal to ``narrow`` of the tensor, from the chunks that they lie in and no others."""

from __future__ import annotations

import random

import pytest
import torch

import ckpt8
from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.container.decoding import fill_box
from ckpt8.container.frames import FRAME
from ckpt8.container.reader import ContainerReader
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Workers
from ckpt8.integrations.dcp.rank_file import Naming, build, fill_slots

SHAPES = {
    "vector": (2 * FRAME + 5,),
    "rows": (2100, 1000),
    "long rows": (2, FRAME + 77),
    "cube": (7, 300, 1001),
    "small": (3, 4, 5),
    "scalar": (),
}


@pytest.fixture(scope="module")
def tensors():
    generator = torch.Generator().manual_seed(0)
    found = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return found | {"counts": torch.arange(3 * FRAME // 2).view(3, -1)}


@pytest.fixture(scope="module")
def stored(tensors, tmp_path_factory):
    path = tmp_path_factory.mktemp("slices") / "x.ckpt8"
    ckpt8.save(tensors, path, preset="lossless", stats=False)
    with ContainerReader(path) as reader, Workers(2) as workers:
        yield reader, workers, {record.name: record.storage for record in reader.manifest.tensors}


def boxes(shape, count):
    rng = random.Random(str(shape))
    yield (0,) * len(shape), shape
    for _ in range(count if shape else 0):
        starts = tuple(rng.randrange(size) for size in shape)
        yield starts, tuple(rng.randint(0, size - start) for start, size in zip(starts, shape, strict=True))
    for _ in range(count if shape else 0):
        start = rng.randrange(shape[0])
        yield (start, *(0 for _ in shape[1:])), (rng.randint(1, shape[0] - start), *shape[1:])


def part(tensor, offsets, lengths):
    for dim, (offset, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dim, offset, length)
    return tensor


@pytest.mark.by_default("long rows", "small", "scalar")
@pytest.mark.parametrize("name", SHAPES)
def test_a_box_is_what_narrow_gives(name, tensors, stored):
    (reader, workers, storages), tensor = stored, tensors[name]
    storage = storages[name]
    for offsets, lengths in boxes(tuple(tensor.shape), 6):
        expected = part(tensor, offsets, lengths)
        plain = torch.full(lengths, torch.nan)
        fill_box(reader, storage, DType.FLOAT32, tensor.shape, plain, offsets, workers)
        assert torch.equal(plain, expected)
        # A target that is a view with gaps, of another type.
        wide = torch.full((*lengths, 2), torch.nan, dtype=torch.float64)
        fill_box(reader, storage, DType.FLOAT32, tensor.shape, wide[..., 0], offsets)
        assert torch.equal(wide[..., 0], expected.double())
        assert wide[..., 1].isnan().all()


@pytest.mark.slow
def test_integers_are_read_from_their_bytes(tensors, stored):
    (reader, workers, storages), counts = stored, tensors["counts"]
    for offsets, lengths in boxes(tuple(counts.shape), 5):
        for target in (torch.empty(lengths, dtype=torch.int64), torch.empty((*lengths, 2), dtype=torch.int32)[..., 0]):
            fill_box(reader, storages["counts"], DType.INT64, counts.shape, target, offsets, workers)
            assert torch.equal(target.long(), part(counts, offsets, lengths))


@pytest.mark.parametrize(
    ("name", "offsets", "lengths", "chunks"),
    [
        ("vector", (FRAME + 1,), (5,), {1}),
        ("vector", (FRAME - 1,), (2,), {0, 1}),
        ("rows", (1100, 0), (100, 1000), {1}),
        ("rows", (0, 10), (50, 3), {0}),
        ("rows", (0, 10), (0, 3), set()),
        ("long rows", (1, 100), (1, 5), {1}),
    ],
)
def test_only_the_chunks_that_are_needed_are_decoded(name, offsets, lengths, chunks, tensors, stored, monkeypatch):
    reader, workers, storages = stored
    decoded = set()
    decode = reader.decode_chunk

    def counting(storage, chunk, out):
        decoded.add(chunk)
        return decode(storage, chunk, out)

    monkeypatch.setattr(reader, "decode_chunk", counting)
    fill_box(reader, storages[name], DType.FLOAT32, tensors[name].shape, torch.empty(lengths), offsets, workers)
    assert decoded == chunks


def filled(names, pieces, known=(), objects=()):
    """The object of a file with the number of its piece in every slot. ``known`` are other values by name."""
    tree = build(Naming([*names, *known], objects), pieces, dict.fromkeys(names) | dict(known))
    assert {tensor.ref.key for tensor in classify(tree).tensors} == set(map(str, range(len(pieces))))
    return fill_slots(tree, range(9))


W, MOMENTS = "optimizer.state.w", ["optimizer.state.w.exp_avg", "optimizer.state.w.exp_avg_sq"]


def test_slices_of_one_tensor_and_names_that_collide():
    known = {f"{W}.step": torch.tensor(5.0), "optimizer.param_groups.w.betas": (0.9, 0.99)}
    items = [("model.w", (0, 0)), ("model.w", (4, 0)), ("w", (0,)), ("model", ()), (MOMENTS[0], (0,))]
    items += [(MOMENTS[0], (4,)), ("w", (0,))]
    found = filled(["model.w", "w", "model", MOMENTS[0]], [(*item, (), ()) for item in items], known, ["epoch"])
    assert found["model"] == {"w": 0, "w@4x0": 1}
    assert found["weights"] == {"w": 2, "w@0": 6}
    assert found["optimizer"] == {
        "state": {"w": {"exp_avg": 4, "step": 5.0}, "w@4": {"exp_avg": 5, "step": 5.0}},
        "param_groups": [{"params": ["w", "w@4"], "betas": (0.9, 0.99)}],
    }


def test_the_state_of_a_slice_states_the_shape_of_its_parameter():
    names = [MOMENTS[0], "optimizer.state.b.exp_avg"]
    found = filled(names, [(names[0], (3, 0), (3, 4), (9, 4)), (names[1], (0,), (4,), (4,))])
    assert found["optimizer"]["state"] == {"w": {"exp_avg": 0, "whole_shape": [9, 4]}, "b": {"exp_avg": 1}}


def test_averages_are_with_the_moments_of_their_slices():
    pieces = [
        (f"{W}.exp_avg_sq_col", (0,), (4,), (4,)),
        *((f"{W}.exp_avg_sq_row", (row,), (3,), (9,)) for row in (6, 3)),
        *((f"{W}.exp_avg", (row, 0), (3, 4), (9, 4)) for row in (3, 6)),
        ("optimizer.state.v.exp_avg_sq_row", (0,), (5,), (5,)),
    ]
    assert filled([name for name, *_ in pieces], pieces)["optimizer"]["state"] == {
        "w": {"exp_avg": 3, "exp_avg_sq_row": 2, "exp_avg_sq_col": 0, "whole_shape": [9, 4]},
        "w@6x0": {"exp_avg": 4, "exp_avg_sq_row": 1, "exp_avg_sq_col": 0, "whole_shape": [9, 4]},
        "v": {"exp_avg_sq_row": 5},
    }


def test_scalars_of_the_state_and_of_the_group_that_another_rank_stores():
    # As optimi's StableAdamW keeps them.
    group = {"beta1": 0.9, "step": torch.tensor(5, dtype=torch.int32), "params": ["w"]}
    known = {f"{W}.eps_sq": torch.tensor(0.5), f"{W}.kahan_comp": None}
    known |= {f"optimizer.param_groups.0.{key}": each for key, each in group.items()}
    assert filled(MOMENTS, [(name, (4,), (), ()) for name in MOMENTS], known)["optimizer"] == {
        "state": {"w": {"exp_avg": 0, "exp_avg_sq": 1, "eps_sq": 0.5, "kahan_comp": None}},
        "param_groups": [{"params": ["w"], "beta1": 0.9, "step": 5}],
    }


def test_no_rule_is_claimed_where_moments_are_in_another_file():
    found = filled(MOMENTS, [(MOMENTS[0], (0,), (), ())], {"optimizer.param_groups.w.betas": (0.9, 0.99)})
    assert found["optimizer"]["param_groups"] == []


def test_a_model_with_a_module_named_state():
    naming = Naming(["ssm.state.weight", "optimizer.state.ssm.state.weight.exp_avg"])
    assert naming.place("ssm.state.weight") == ("weights", "ssm.state.weight")
    place = ("optimizer", "state", "ssm.state.weight", "exp_avg")
    assert naming.place("optimizer.state.ssm.state.weight.exp_avg") == place


@pytest.mark.parametrize("rows", [4, 8])
def test_an_average_of_some_of_the_rows_says_so(rows):
    """A step of Adafactor counts by averages over the whole matrix."""
    state = "optimizer.state.w."
    boxes = {
        "model.w": ((rows, 8), (8, 8)),
        f"{state}row_var": ((rows, 1), (8, 1)),
        f"{state}col_var": ((1, 8), (1, 8)),
    }
    tree = build(Naming(boxes), [(name, (0, 0), *box) for name, box in boxes.items()], {})
    assert tree["optimizer"]["state"]["w"].get("whole_shape") == ([8, 1] if rows < 8 else None)
