"""Values of a state dict that are unlike others: each is given back, or refused before anything is written."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from ckpt8.integrations.dcp import Ckpt8SavePlanner, Ckpt8StorageReader, Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")


def save(state, path):
    dcp.save(state, storage_writer=Ckpt8StorageWriter(path, preset="lossless"), no_dist=True)


def given_back(state, path):
    found = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in state.items()}
    dcp.load(found, storage_reader=Ckpt8StorageReader(path), no_dist=True)
    return found


def test_values_of_several_types_in_one_place(tmp_path):
    real = torch.arange(64.0)
    state = {
        "real": real,
        "complex": torch.view_as_complex(real.view(32, 2)),
        "bits": real.view(torch.int32),
        "half": real[:8].view(torch.bfloat16),
        "again": real.view(8, 8),
    }
    save(state, tmp_path / "x")
    found = given_back(state, tmp_path / "x")
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize(("state", "said"), [
    ({"x\ud800": torch.ones(3)}, r"'x\\ud800': is no valid Unicode"),
    ({"x": torch.empty([1] * 65)}, r"'x': has 65 dimensions, more than 64"),
    ({"x": torch.empty(3, device="meta")}, r"'x': is on the device meta and has no values; initialise it first"),
])  # fmt: skip
def test_what_no_container_holds_is_refused_before_anything_is_written(tmp_path, state, said):
    with pytest.raises(CheckpointException, match=said):
        save(state | {"y": torch.ones(2)}, tmp_path / "x")
    assert not [*tmp_path.glob("x/*")]


def test_any_other_name_is_kept(tmp_path):
    names = ["", "a", "a@1", "a@0x0", "a.b@1", "a/b", "../x", "é\0\n", "objects", "objects#", "other", "x" * 5000]
    names += ["state.a@1.exp_avg", "state.a.exp_avg", "param_groups.a.lr"]
    state = {name: torch.full((3, 4), float(number)) for number, name in enumerate(names)}
    save(state, tmp_path / "x")
    found = given_back(state, tmp_path / "x")
    assert all(torch.equal(found[name], value) for name, value in state.items())


@pytest.mark.parametrize(("flag", "dtype"), [(torch._neg_view, torch.float32), (torch.conj, torch.complex64)])
def test_a_tensor_with_a_bit_that_changes_its_values_is_filled_with_what_was_saved(tmp_path, flag, dtype):
    state = {"x": torch.randn(5000, dtype=dtype)}
    save(state, tmp_path / "x")
    found = {"x": flag(torch.zeros(5000, dtype=dtype))}
    dcp.load(found, storage_reader=Ckpt8StorageReader(tmp_path / "x"), no_dist=True)
    assert torch.equal(found["x"].resolve_conj().resolve_neg(), state["x"])


class Casting(Ckpt8SavePlanner):
    """Writes another type than it has planned."""

    def transform_object(self, write_item, object):  # noqa: A002 - its name in torch
        found = super().transform_object(write_item, object)
        return found.double() if isinstance(found, torch.Tensor) else found


def test_a_value_that_is_not_as_planned_is_refused_before_it_is_written(tmp_path):
    writer = Ckpt8StorageWriter(tmp_path / "x", preset="lossless")
    with pytest.raises(CheckpointException, match=r"'w': the planner gives torch.float64 of \(3, 2\) for"):
        dcp.save({"w": torch.ones(3, 2)}, storage_writer=writer, planner=Casting(), no_dist=True)
    assert not [*tmp_path.glob("x/*")]
