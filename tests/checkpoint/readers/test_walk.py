"""The walk over a tree: names, order, and trees made to be endless, deep or shared."""

from __future__ import annotations

import io
import time

import pytest

from ckpt8.checkpoint.readers.inert_pickle import load_pickle
from ckpt8.checkpoint.tree import (
    MAX_DEPTH,
    Inert,
    StatefulDict,
    StorageRef,
    TensorRef,
    check_depth,
    format_path,
    iter_leaves,
)
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType


def load(data, **options):
    return load_pickle(io.BytesIO(data), len(data), "file.pt", **options)


def storage(pid):
    return StorageRef(pid, DType.FLOAT32, 100)


def test_walk_names_and_order():
    tensors = [TensorRef(str(i), DType.FLOAT32, 0, (), ()) for i in range(9)]
    ref = StorageRef("s", DType.UINT8, 4)
    metadata = StatefulDict()
    metadata["w"] = tensors[0]
    metadata.state = {"_metadata": tensors[1]}
    empty = StatefulDict()
    empty.state = {"hook": tensors[0]}
    tree = {
        "model": metadata,
        "state": {0: {"m": tensors[2]}, (1, "x"): [tensors[3]]},
        "object": Inert("m.C", args=(0, tensors[4]), state={"weight": tensors[5]}),
        "slots": Inert("m.D", items=[tensors[6]], pairs=[("k", tensors[7])], state=(None, {"s": ref})),
        "scalar": 3,
        tensors[8]: None,
    }
    got = [(format_path(path), leaf.key) for path, leaf in iter_leaves(tree)]
    assert got == [
        ("model.w", "0"),
        ("model._metadata", "1"),
        ("state.0.m", "2"),
        ("state.(1,x).0", "3"),
        ("object.1", "4"),
        ("object.weight", "5"),
        ("slots.0", "6"),
        ("slots.k", "7"),
        ("slots.s", "s"),
        ("key", "8"),
    ]
    assert list(iter_leaves(tensors[0])) == [((), tensors[0])]
    assert [format_path(path) for path, _ in iter_leaves([empty])] == ["0.hook"]
    long = next(iter_leaves({"x" * 10_000: tensors[0]}))[0]
    assert len(format_path(long)) < 2000


def test_walk_depth_limit_is_exact():
    tree = [TensorRef("k", DType.FLOAT32, 0, (), ())]
    for _ in range(MAX_DEPTH - 1):
        tree = [tree]
    assert len(next(iter_leaves(tree))[0]) == MAX_DEPTH
    with pytest.raises(InputError, match="nested deeper"):
        check_depth([tree], "file.pt")


DEEP = {
    "tuples": b")" + b"\x85" * 1_000_000,
    "lists": b"]" * 200_000 + b"a" * 199_999,
    "dicts": b"}U\x01k" * 200_000 + b"N" + b"s" * 200_000,
    "calls": b")q\x00" + b"0cm\nC\nh\x00\x85Rq\x00" * 100_000,
    "states": b"cm\nC\n)R" * 100_000 + b"b" * 99_999,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", DEEP)
def test_deep_nesting_is_refused_by_the_walk_and_freed_safely(kind):
    tree = load(DEEP[kind] + b".")
    with pytest.raises(InputError, match=f"^file.pt: .*nested deeper than {MAX_DEPTH}"):
        check_depth(tree, "file.pt")
    del tree


SHARED = {
    "doubled tuples": b"X\x01\0\0\0kQ\x85" + b"2\x86" * 900,
    "one argument tuple": b"((X\x01\0\0\0kQ" + b"N" * 20_000 + b"tq\x000" + b"cm\nC\nh\x00R" * 20_000 + b"t",
    "one state": b"(}(" + b"U\x01kX\x01\0\0\0kQ" * 20_000 + b"uq\x000" + b"cm\nC\n)Rh\x00b" * 20_000 + b"t",
    "one set": b"((X\x01\0\0\0kQ" + b"N" * 20_000 + b"lq\x000" + b"c__builtin__\nset\nh\x00\x85R" * 20_000 + b"t",
}


@pytest.mark.by_default("doubled tuples")
@pytest.mark.parametrize("kind", SHARED)
def test_shared_parts_are_walked_once(kind):
    tree = load(SHARED[kind] + b".", persistent_load=storage)
    started = time.process_time()
    assert len(list(iter_leaves(tree))) == 1
    assert time.process_time() - started < 2  # quadratic time would be minutes
