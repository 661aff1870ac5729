"""The slices that a container states, read by a reader of FORMAT.md alone, and hostile ones."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hostile_kit import drop, edited, put, unpack
from strict_reader import Strict

import ckpt8
from ckpt8.container.sharded import slices_of
from ckpt8.core.errors import InputError
from ckpt8.integrations.dcp import Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The file of a rank, and what it holds."""
    torch.manual_seed(0)
    state = {"model": {"w": torch.randn(60, 50), "b": torch.randn(50).bfloat16()}, "n": torch.tensor(3.0), "text": "x"}
    state["model"]["tied"] = state["model"]["w"]
    folder = tmp_path_factory.mktemp("slices")
    dcp.save(state, storage_writer=Ckpt8StorageWriter(folder, preset="lossless"), no_dist=True)
    return folder / "__0_0.ckpt8", {
        ("model.w", (0, 0)): state["model"]["w"],
        ("model.tied", (0, 0)): state["model"]["w"],
        ("model.b", (0,)): state["model"]["b"],
        ("n", ()): state["n"],
    }


def test_a_reader_of_the_format_alone_finds_the_slices(saved):
    path, expected = saved
    plain = Strict(path)
    assert plain.manifest["version"] == "1.6"
    found = plain.parts_of_tensors()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())


def test_slices_name_tensors_of_the_container(saved):
    path, expected = saved
    with ckpt8.open(path) as file:
        found = slices_of(file.manifest)
        assert {key: tuple(record.shape) for key, record in found.items()} == {
            key: tuple(tensor.shape) for key, tensor in expected.items()
        }


def test_other_containers_state_none(tmp_path):
    ckpt8.save({"w": torch.ones(4)}, tmp_path / "x.ckpt8")
    assert Strict(tmp_path / "x.ckpt8").manifest["version"] != "1.6"
    with ckpt8.open(tmp_path / "x.ckpt8") as file:
        assert slices_of(file.manifest) == {}


def more_dimensions(manifest):
    if "tensor_table" in manifest:
        others = [None] * (len(manifest["tensor_table"]["name"]) - 1)
        manifest["tensor_table"] |= {"shape": [[1] * 70, *others], "stride": [[1] * 70, *others]}
    else:
        manifest["tensors"][0] |= {"shape": [1] * 70, "stride": [1] * 70}
    manifest["slices"] = {"name": ["w"], "tensor": [0], "offsets": [None]}


HOSTILE = {
    "no table": put("slices", []),
    "no names": put("slices", "name", {"all": "w"}),
    "a name that is a number": put("slices", "name", lambda names: [1, *names[1:]]),
    "half of a surrogate pair": put("slices", "name", lambda names: ["\ud800", *names[1:]]),
    "a tensor too many": put("slices", "tensor", lambda _: [0, 1, 2, 99]),
    "a tensor below 0": put("slices", "tensor", lambda _: [0, 1, 2, -1]),
    "tensors from far away": put("slices", "tensor", {"from": 90}),
    "offsets of a dimension too many": put("slices", "offsets", {"all": [0, 0, 0]}),
    "negative offsets": put("slices", "offsets", lambda _: [[-1, 0], None, None, None]),
    "a column too short": put("slices", "offsets", [None]),
    "a column missing": drop("slices", "offsets"),
    "a slice twice": put("slices", "name", lambda names: [names[0]] * len(names)),
    "too many dimensions": more_dimensions,
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_slices_are_refused_in_one_line(case, saved, tmp_path):
    edited(unpack(saved[0].read_bytes()), HOSTILE[case], tmp_path / "x.ckpt8")
    with pytest.raises(InputError) as caught:
        ckpt8.open(tmp_path / "x.ckpt8")
    assert str(caught.value).startswith(f"{tmp_path / 'x.ckpt8'}: manifest is malformed at ")
    assert "\n" not in str(caught.value)
