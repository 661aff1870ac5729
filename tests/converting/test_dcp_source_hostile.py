"""Distributed checkpoints that are damaged or made to harm, as a source: one line, nothing written or executed."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
from converting_kit import converted, refused, refused_or_done
from dcp_kit import adam_state, change_metadata, save_small

import ckpt8
from ckpt8.core.errors import InputError

pytestmark = pytest.mark.filterwarnings("ignore")


def change_paths(**paths):
    return lambda metadata: metadata.planner_data.update(
        {name.replace("__", "."): path for name, path in paths.items()}
    )


class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_paths_that_contradict_each_other(tmp_path):
    saved = {"model": {"w": torch.ones(4), "w.x": torch.ones(2)}}
    root = save_small(saved, tmp_path / "run")
    change_metadata(root, change_paths(model__w__x=("model", "w", "x")))
    refused(root, tmp_path, r"'model\.w\.x' lies inside another value$")
    change_metadata(root, lambda m: setattr(m, "planner_data", {"model.w.x": ("model", "w", "x")}))
    refused(root, tmp_path, r"'model\.w' lies where another value does$")


def test_paths_that_are_long_or_lead_far(tmp_path):
    long = ".".join("a" * 5000)
    root = save_small({"model": {"w": torch.ones(4)}, "list": {"999999999": 3}, long: 1}, tmp_path / "run")
    change_metadata(root, change_paths(list__999999999=("list", 999999999)))
    assert converted(root, tmp_path)["list"] == {999999999: 3}
    change_metadata(root, lambda metadata: metadata.planner_data.update({long: tuple("a" * 5000)}))
    refused(root, tmp_path, "nested deeper than 1000")


@pytest.mark.parametrize("params", [[["w"]], [{}], ["w", 0], "w", [None], ["w", "w"], [], [0, 0], None])
def test_groups_that_make_no_sense(params, tmp_path):
    weights = {"w": torch.randn(5, 4)}
    state = adam_state(weights)
    state["param_groups"][0]["params"] = params
    root = save_small({"model": weights, "optimizer": state}, tmp_path / "run")
    for name, options in (("x.pt", {}), ("x", {"to": "dcp"}), ("y", {"to": "trainer"})):
        refused_or_done(root, tmp_path / name, **options)


def test_nothing_is_executed(tmp_path):
    marker = tmp_path / "ran"
    saved = {"model": {"w": torch.ones(4)}, "evil": Evil(marker), "more": [Evil(marker)]}
    root = save_small(saved, tmp_path / "run")
    report = ckpt8.convert(root, tmp_path / "y.pt")
    assert len(report.dropped) == 2
    change_metadata(root, lambda metadata: setattr(metadata, "planner_data", Evil(marker)))
    refused(root, tmp_path, "refers to 'posix")
    assert not marker.exists()


def test_a_slice_that_is_damaged(distributed, tmp_path):
    root = save_small({"model": {"w": torch.ones(400), "b": torch.ones(2)}}, tmp_path / "run")
    file = root / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-900])
    refused(root, tmp_path, r"slice 'model\..' ends at byte")
    shutil.copytree(distributed[0] / "nested", tmp_path / "other")
    (tmp_path / "other" / "__1_0.distcp").unlink()
    refused(tmp_path / "other", tmp_path, r"names '__1_0\.distcp', which is not there")
    assert not list(tmp_path.glob(".*"))


def test_slices_that_nobody_can_decode(tmp_path):
    root = save_small({"model": {"w": torch.ones(400)}}, tmp_path / "run")

    def change(metadata):
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["stream.other/1"]

    change_metadata(root, change)
    refused(root, tmp_path, r"'stream\.other/1', which is not known; it cannot be converted$")


def test_a_source_that_changes_while_it_is_read(tmp_path):
    weights = {"up.weight": torch.randn(40, 30)}
    for name, to in (("x.pt", "torch"), ("x.safetensors", "safetensors"), ("x", "dcp"), ("y", "trainer")):
        root = save_small({"model": weights, "optimizer": adam_state(weights)}, tmp_path / "run", overwrite=True)
        file = root / "__0_0.distcp"

        def change(_, file=file):
            file.write_bytes(file.read_bytes() + b"x")

        with pytest.raises(InputError, match="changed while it was read"):
            ckpt8.convert(root, tmp_path / name, to=to, progress=change)
        assert [each.name for each in tmp_path.iterdir()] == ["run"]
