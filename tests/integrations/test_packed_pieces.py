"""A sharded tensor whose parts are no plain tensors, such as those of 8-bit optimizers: each is kept by torch.save."""

from __future__ import annotations

import io
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from packed_kit import save, save_plain
from plans_kit import tensor_item
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import ckpt8
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.core.errors import CheckFailedError, UnsupportedError
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container
from ckpt8.inspecting.verify import same_object

pytestmark = pytest.mark.filterwarnings("ignore")

WHOLE = torch.arange(12.0).view(4, 3)


class InParts(DefaultSavePlanner):
    """Plans two parts of a tensor; those that begin at a row in ``odd`` are ``wrapped``."""

    odd = (0, 2)
    wrapped = torch.Tensor.to_sparse

    def create_local_plan(self):
        items = [tensor_item("q", WHOLE.shape, ((row, 0), (2, 3))) for row in (0, 2)]
        items.append(tensor_item("w", (3,), ((0,), (3,))))
        self.plan = SavePlan(items, planner_data={"q": ("q",), "w": ("w",)})
        return self.plan

    def resolve_data(self, write_item):
        if write_item.index.fqn == "w":
            return torch.ones(3)
        row = write_item.index.offset[0]
        part = WHOLE[row : row + 2]
        return type(self).wrapped(part) if row in self.odd else part


def test_every_part_is_given_back_and_none_is_taken_for_the_whole(tmp_path):
    save({}, tmp_path / "x", InParts())
    with pytest.raises(UnsupportedError, match="'q': is in 2 parts, which only its class can join"):
        ckpt8.load(tmp_path / "x")

    ckpt8.restore(tmp_path / "x", tmp_path / "plain")
    stored = pickle.loads((tmp_path / "plain" / ".metadata").read_bytes()).storage_data
    assert {(index.fqn, *index.offset) for index in stored} == {("q", 0, 0), ("q", 2, 0), ("w", 0)}
    for index, place in stored.items():
        content = (tmp_path / "plain" / place.relative_path).read_bytes()[place.offset :][: place.length]
        part = torch.load(io.BytesIO(content), weights_only=True)
        expected = torch.ones(3) if index.fqn == "w" else WHOLE[index.offset[0] :][:2]
        assert torch.equal(part.to_dense(), expected)

    for name in ("x", "plain"):
        report = ckpt8.convert(tmp_path / name, tmp_path / f"{name}.pt")
        assert report.notes == ["left out: 'q': its file is not there, or it is in parts that only its class can join"]
        assert torch.load(tmp_path / f"{name}.pt").keys() == {"w"}


@pytest.mark.parametrize("row", [0, 2])
def test_a_tensor_of_which_some_parts_are_plain_is_refused(tmp_path, row):
    planner = InParts()
    planner.odd = (row,)
    save({}, tmp_path / "x", planner)
    for call in (ckpt8.load, lambda path: ckpt8.restore(path, tmp_path / "plain")):
        with pytest.raises(UnsupportedError, match="'q': only some of its parts are plain tensors"):
            call(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    planner = OwnInParts()
    planner.odd = (row,)
    dcp.save({}, storage_writer=dcp.FileSystemWriter(tmp_path / "plain"), planner=planner, no_dist=True)
    with pytest.raises(UnsupportedError, match="'q': only some of its parts are plain tensors"):
        ckpt8.convert(tmp_path / "plain", tmp_path / "x.pt")


class Own(torch.Tensor):
    """A class that no reader knows."""


class OwnInParts(InParts):
    """Parts that torch's own writer takes."""

    wrapped = staticmethod(lambda part: part.clone().as_subclass(Own))


def quantized(values):
    return torch.quantize_per_tensor(values, 0.5, 3, torch.qint8)


MADE = {"own class": lambda values: values.as_subclass(Own), "quantized": quantized}


@pytest.mark.parametrize("kind", MADE)
def test_verify_compares_what_torch_save_keeps(tmp_path, kind):
    def state_of(value):
        return {"q": value, "w": torch.ones(3)}

    save_plain(state_of(MADE[kind](WHOLE)), tmp_path / "plain")
    save(state_of(MADE[kind](WHOLE)), tmp_path / "x")
    assert ckpt8.verify(tmp_path / "x", tmp_path / "plain").failures == ()
    changed = WHOLE.clone()
    changed[3, 1] += 1
    save_plain(state_of(MADE[kind](changed)), tmp_path / "changed")
    assert ckpt8.verify(tmp_path / "x", tmp_path / "changed").failures == ("q: differs from the original",)
    facts = inspect_container(tmp_path / "x", original=tmp_path / "changed")
    assert facts["measured_from"]["differing"] == ["q"]
    if kind == "quantized":
        save_plain(state_of(torch.quantize_per_tensor(2 * WHOLE, 1.0, 3, torch.qint8)), tmp_path / "scaled")
        assert ckpt8.verify(tmp_path / "x", tmp_path / "scaled").failures == ("q: differs from the original",)


@pytest.mark.parametrize("values", [(3, torch.tensor(3)), (torch.tensor(3), 3)])
def test_verify_refuses_a_number_in_place_of_a_tensor(tmp_path, values):
    for name, value, write in zip(("x", "plain"), values, (save, save_plain), strict=True):
        write({"n": value, "w": torch.ones(3)}, tmp_path / name)
    with pytest.raises(CheckFailedError, match="'n' is of another type or shape"):
        ckpt8.verify(tmp_path / "x", tmp_path / "plain")


def test_verify_refuses_an_object_in_place_of_a_plain_tensor(tmp_path):
    save({"q": WHOLE, "w": torch.ones(3)}, tmp_path / "x")
    save_plain({"q": WHOLE.as_subclass(Own), "w": torch.ones(3)}, tmp_path / "plain")
    with pytest.raises(CheckFailedError, match="'q' is no plain tensor there; give the same checkpoint"):
        ckpt8.verify(tmp_path / "x", tmp_path / "plain")


def test_verify_names_parts_that_it_cannot_compare(tmp_path):
    save({}, tmp_path / "x", InParts())
    ckpt8.restore(tmp_path / "x", tmp_path / "plain")
    assert ckpt8.verify(tmp_path / "x", tmp_path / "plain").failures == ()
    save_plain({"q": WHOLE.as_subclass(Own), "w": torch.ones(3)}, tmp_path / "whole")
    assert ckpt8.verify(tmp_path / "x", tmp_path / "whole").failures == tuple(
        f"q[{rows},:]: differs from the original in how it is cut or kept, so that it cannot be compared"
        for rows in ("0:2", "2:4")
    )


def noted(**attributes):
    value = torch.arange(6.0).view(2, 3).as_subclass(Own)
    value.__dict__ |= attributes
    return value


OBJECTS = {
    "equal": (noted(note=["a", {2: float("nan")}]), noted(note=["a", {2: float("nan")}]), True),
    "another attribute": (noted(note=["a", 2]), noted(note=["a", 3]), False),
    "one more attribute": (noted(), noted(note=1), False),
    "layout in memory": ({"t": torch.ones(2, 3).t()}, {"t": torch.ones(3, 2)}, True),
    "values": ([torch.ones(2, 3)], [torch.zeros(2, 3)], False),
    "shape": ([torch.ones(2, 3)], [torch.ones(3, 2)], False),
    "type": ([torch.ones(2)], [torch.ones(2, dtype=torch.float64)], False),
    "conjugate": (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j]), True),
    "order of keys": ({"a": [1], "b": {}}, {"b": {}, "a": [1]}, True),
    "keys": ({"a": torch.ones(1)}, {"b": torch.ones(1)}, False),
    "length": ([torch.ones(1)], [torch.ones(1)] * 2, False),
    "storage": (torch.ones(2).untyped_storage(), torch.zeros(2).untyped_storage(), False),
    "sparse": (torch.eye(3).to_sparse(), torch.eye(3).flip(0).to_sparse(), False),
}


@pytest.mark.parametrize("case", OBJECTS)
def test_objects_are_compared_with_all_that_is_in_them(tmp_path, case):
    *values, expected = OBJECTS[case]
    paths = [tmp_path / f"{number}.pt" for number in range(2)]
    for value, path in zip(values, paths, strict=True):
        torch.save(value, path)
    with open_checkpoint(paths[0]) as one, open_checkpoint(paths[1]) as other, open_checkpoint(paths[0]) as again:
        assert same_object(one, other) is expected
        assert same_object(one, again)


def test_a_checkpoint_of_empty_tensors_alone(tmp_path):
    state = {"m": {"e": torch.zeros(0, 3), "f": torch.zeros(2, 0, dtype=torch.int8)}}
    save_plain(state, tmp_path / "plain")
    save(state, tmp_path / "x")
    ckpt8.restore(tmp_path / "x", tmp_path / "back")
    ckpt8.convert(tmp_path / "x", tmp_path / "x.pt")
    loaded = {"m.e": torch.ones(0, 3), "m.f": torch.ones(2, 0, dtype=torch.int8)}
    dcp.load(loaded, storage_reader=dcp.FileSystemReader(tmp_path / "back"), no_dist=True)
    stored = pickle.loads((tmp_path / "back" / ".metadata").read_bytes())
    assert {index.fqn for index in stored.storage_data} == {"m.e", "m.f"}
    for found in (ckpt8.load(tmp_path / "x"), torch.load(tmp_path / "x.pt")):
        assert {name: (value.shape, value.dtype) for name, value in found["m"].items()} == {
            "e": ((0, 3), torch.float32),
            "f": ((2, 0), torch.int8),
        }
    assert inspect_container(tmp_path / "x", full=True)["sample"] == {"elements": 0, "of": 0, "full": True}
    assert inspect_checkpoint(tmp_path / "plain")["bytes"] > 0
    assert ckpt8.verify(tmp_path / "x", tmp_path / "plain").failures == ()
    assert ckpt8.diff(tmp_path / "x", tmp_path / "plain").identical
