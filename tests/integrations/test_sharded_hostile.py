"""Indexes of sharded directories that somebody has changed: one line that names the directory, and nothing else."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from packed_kit import load, save
from torch.distributed.checkpoint.api import CheckpointException

import ckpt8
from ckpt8.core.errors import InputError
from ckpt8.integrations.dcp import Ckpt8StorageReader

pytestmark = pytest.mark.filterwarnings("ignore")


def put(tree, keys, value):
    tree = copy.deepcopy(tree)
    node = tree
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    return tree


def changed(tree, **fields):
    """The index with other fields of the tensor ``w``; None takes a field away."""
    tensor = tree["tensors"]["w"] | fields
    return put(tree, ["tensors", "w"], {key: value for key, value in tensor.items() if value is not None})


def boxed(tree, *boxes, **fields):
    return changed(tree, cuts=None, owners=None, boxes=list(boxes), **fields)


HOSTILE = {
    "no JSON": lambda tree: "{",
    "a list": lambda tree: [],
    "another format": lambda tree: {**tree, "format": "x"},
    "an earlier version": lambda tree: {**tree, "version": "1.0"},
    "a later version": lambda tree: {**tree, "version": "3.0"},
    "a file outside": lambda tree: put(tree, ["files", 0, 0], "../x.ckpt8"),
    "no seal": lambda tree: put(tree, ["files", 0, 1], "xyz"),
    "a file without a seal": lambda tree: put(tree, ["files", 0], ["__0_0.ckpt8"]),
    "a file twice": lambda tree: put(tree, ["files"], tree["files"] * 2),
    "files by name": lambda tree: put(tree, ["files"], dict(tree["files"])),
    "an unknown file": lambda tree: changed(tree, owners=[1]),
    "a file below 0": lambda tree: changed(tree, owners=[-1]),
    "a file that is true": lambda tree: changed(tree, owners=[True]),
    "steps out of the files": lambda tree: changed(tree, cuts=[[[4, 2]]], owners=[[0, 2, 1]]),
    "steps of no files": lambda tree: changed(tree, owners=[[0, 0, 0], 0]),
    "too many owners": lambda tree: changed(tree, owners=[0, 0]),
    "too few owners": lambda tree: changed(tree, owners=[]),
    "cuts beyond the tensor": lambda tree: changed(tree, cuts=[[[9, 1]]]),
    "cuts short of the tensor": lambda tree: changed(tree, cuts=[[[4, 1]]]),
    "cuts of a dimension too many": lambda tree: changed(tree, cuts=[[[8, 1]], [[1, 1]]]),
    "empty parts": lambda tree: changed(tree, cuts=[[[8, 1], [0, 1]]], owners=[0, 0]),
    "a negative part": lambda tree: changed(tree, cuts=[[[9, 1], [-1, 1]]], owners=[0, 0]),
    "a float for a size": lambda tree: changed(tree, cuts=[[[8.0, 1]]]),
    "no cuts": lambda tree: changed(tree, cuts=None),
    "more cells than there are": lambda tree: changed(
        tree, shape=[1 << 40], cuts=[[[1, 1 << 40]]], owners=[[0, 1 << 40, 0]]
    ),
    "two layouts": lambda tree: changed(tree, boxes=[[0, [0], [9]]]),
    "a box beyond the tensor": lambda tree: boxed(tree, [0, [1], [8]]),
    "an empty box": lambda tree: boxed(tree, [0, [0], [0]]),
    "a negative offset": lambda tree: boxed(tree, [0, [-1], [8]]),
    "an offset too many": lambda tree: boxed(tree, [0, [0, 0], [8, 1]]),
    "no box": boxed,
    "a box twice": lambda tree: boxed(tree, [0, [0], [8]], [0, [0], [8]]),
    "a box of an unknown file": lambda tree: boxed(tree, [3, [0], [8]]),
    "a box without a file": lambda tree: boxed(tree, [[0], [8]]),
    "a box that is a number": lambda tree: boxed(tree, 0),
    "pickled boxes without a length": lambda tree: boxed(tree, [0, [0], [8]], pickled=[[0]]),
    "pickled boxes of another number": lambda tree: boxed(tree, [0, [0], [8]], pickled=[]),
    "a pickled box that is none": lambda tree: boxed(tree, [0, [0], [8]], pickled=[[0, 7]]),
    "a pickled box that is an object": lambda tree: boxed(tree, [0, [0], [8]], pickled=[tree["objects"]["note"][1:]]),
    "another type": lambda tree: put(tree, ["tensors", "w", "dtype"], "float64"),
    "no type": lambda tree: put(tree, ["tensors", "w", "dtype"], "float7"),
    "a slice that the file does not have": lambda tree: changed(tree, cuts=[[[4, 2]]], owners=[0, 0]),
    "a tensor that is an object": lambda tree: put(tree, ["objects", "w"], [0, 0, 1]),
    "an object behind the end": lambda tree: put(tree, ["objects", "note", 1], 1 << 40),
    "an object too long": lambda tree: put(tree, ["objects", "note", 2], 1 << 40),
    "an object in an unknown file": lambda tree: put(tree, ["objects", "note", 0], 1),
    "an object without a place": lambda tree: put(tree, ["objects", "note"], None),
    "a path of lists": lambda tree: put(tree, ["paths", "w"], [["w"]]),
    "an empty path": lambda tree: put(tree, ["paths", "w"], []),
    "nesting without end": lambda tree: "[" * 100_000,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile") / "x"
    save({"w": torch.ones(8), "note": "x"}, folder, preset="lossless")
    return folder, (folder / "ckpt8-dcp.json").read_text()


NAMES = {
    "files": ("__0_0" * 50 + ".ckpt8", "é" * 125 + ".ckpt8", "a\ud800.ckpt8", "a\0.ckpt8"),
    "tensors": ("\ud800",),
    "objects": ("\ud800",),
    "paths": ("\ud800",),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in NAMES.items() for name in names])
def test_every_command_refuses_a_name_that_no_system_takes(kind, name, saved, tmp_path):
    folder, text = saved
    tree = json.loads(text)
    if kind == "files":
        tree["files"][0][0] = name
    elif kind == "paths":
        tree["paths"]["w"] = [name]
    else:
        tree[kind][name] = tree[kind].popitem()[1]
    (folder / "ckpt8-dcp.json").write_text(json.dumps(tree))
    for command in (
        *(ckpt8.verify, ckpt8.load, ckpt8.open, lambda folder: ckpt8.diff(folder, folder)),
        lambda folder: ckpt8.convert(folder, tmp_path / "out.pt"),
        lambda folder: ckpt8.restore(folder, tmp_path / "out"),
        lambda folder: ckpt8.restore(folder, tmp_path / "out", salvage=True),
        lambda folder: Ckpt8StorageReader(folder).read_metadata(),
    ):
        with pytest.raises(InputError) as caught:
            command(folder)
        assert str(caught.value).startswith(f"{folder / 'ckpt8-dcp.json'}: names the ")
        assert repr(name)[:40].rstrip("'") in str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_index_is_refused_in_one_line(case, saved):
    folder, text = saved
    tree = HOSTILE[case](json.loads(text))
    (folder / "ckpt8-dcp.json").write_text(tree if isinstance(tree, str) else json.dumps(tree))
    with pytest.raises(CheckpointException) as caught:
        load({"w": torch.zeros(8), "note": ""}, folder)
    said = str(caught.value)
    assert str(folder) in said or "Size mismatch between saved" in said
    # Either an error of ours as it is, or the line of it that torch repeats.
    assert "InputError" in said or "global metadata read failed" in said or "Size mismatch" in said
    assert "MemoryError" not in said


def test_the_index_as_it_was_is_read(saved):
    folder, text = saved
    (folder / "ckpt8-dcp.json").write_text(text)
    found = load({"w": torch.zeros(8), "note": ""}, folder)
    assert found["w"].eq(1).all()
    assert found["note"] == "x"
