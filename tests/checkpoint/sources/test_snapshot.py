"""A snapshot is what ``torch.save`` would have written at its moment, whatever becomes of the objects."""

from __future__ import annotations

import argparse
import gc
import io
import os
import warnings
from collections import Counter, OrderedDict, namedtuple

import numpy as np
import pytest
import torch

import ckpt8
from ckpt8.checkpoint.sources import snapshot
from ckpt8.checkpoint.sources.snapshot import Snapshot
from ckpt8.core.errors import UsageError

Point = namedtuple("Point", "x y")


def linear():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 40))
    model[2].weight = torch.nn.Parameter(model[0].weight.detach())
    return model


def with_attribute():
    parameter = torch.nn.Parameter(torch.randn(5))
    parameter.is_shared = True
    return parameter


def shared():
    inner = {"t": torch.ones(2), "n": [1, 2]}
    return {"a": inner, "b": inner, "c": (inner, [inner["t"]], (1, 2)), "d": (inner, 1)}


def loaded():
    file = io.BytesIO()
    torch.save({"w": torch.randn(3), "p": torch.nn.Parameter(torch.ones(2))}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def layouts():
    rows = np.arange(12.0).reshape(3, 4)
    return [rows, rows.T, rows[::2, 1:], rows, np.array(2.5), np.float64(3), np.array(["ab"])]


def ringed():
    ring = {"list": [torch.randn(3)]}
    ring["list"].append((ring, ring["list"]))
    return ring


def with_attributes():
    state = OrderedDict(w=torch.ones(2))
    state.attribute = state
    return [vars(state), state, vars(state)]


SEVERAL = torch.randn(6, 7)
PLAIN = {
    "state dict": lambda: linear().state_dict(),
    "parameters": lambda: {"model": dict(linear().named_parameters()), "list": list(linear().parameters())},
    "views": lambda: [SEVERAL, SEVERAL.t(), SEVERAL[2:4, ::2], SEVERAL[1, 1], SEVERAL[:0]],
    "gradients": lambda: [torch.ones(3, requires_grad=True) * 2, torch.ones(3, requires_grad=True)],
    "empty": lambda: {
        "w": torch.ones(3),
        "a": torch.empty(0),
        "b": torch.empty(0, 3, dtype=torch.int16),
        "c": [],
        "d": (),
        "e": {},
    },
    "types": lambda: {str(kind): torch.ones(5).to(kind) for kind in TYPES},
    "values": lambda: [None, True, 1 << 80, 0.1, 1j, "é", b"\0", torch.Size([2]), torch.float16, torch.device("cpu")],
    "shared": shared,
    "ring": ringed,
    "keys": lambda: {1: torch.ones(1), "1": 2, None: 3, 2.5: OrderedDict(a=1), b"x": [1, "a"]},
    "attributes": with_attributes,
    "large": lambda: [torch.arange(3 << 20), torch.arange(15 << 20, dtype=torch.int16), torch.arange(5)],
    "numpy": lambda: {"rng": ("MT19937", np.arange(6, dtype=np.uint32), 0.5), "w": torch.randn(4)},
    "numpy's layouts": layouts,
    "a scheduler's counts": lambda: {"milestones": Counter({30: 1, 80: 2}), "w": torch.ones(2)},
    "what torch.load gave": loaded,
    "one tensor": lambda: torch.randn(9),
    "a number": lambda: 3,
}
TYPES = [torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int8, torch.uint16, torch.float8_e4m3fn]

OTHERS = {
    "a tensor with an attribute": with_attribute,
    "conjugate": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "sparse": lambda: {"s": torch.eye(4).to_sparse(), "w": torch.randn(4)},
    "a subclass": lambda: [torch.nn.Buffer(torch.ones(3)), torch.nn.UninitializedParameter()],
    "a named tuple": lambda: Point(torch.ones(2), 3),
    "numpy's objects": lambda: {"o": np.array([None, 1]), "w": torch.randn(4)},
    "a namespace": lambda: argparse.Namespace(lr=0.1, w=torch.ones(3)),
    "storages": lambda: {"s": torch.arange(9).untyped_storage(), "w": torch.ones(3)},
    "a set": lambda: {"s": {1, 2, 3}, "w": torch.ones(3)},
    "a tuple as a key": lambda: {(1, 2): torch.ones(3)},
}


def spoil(node, seen):
    if id(node) in seen:
        return
    seen[id(node)] = node
    if (
        isinstance(node, torch.Tensor)
        and node.layout is torch.strided
        and not isinstance(node, torch.nn.parameter.UninitializedParameter)
    ):
        with torch.no_grad():
            torch.empty(0, dtype=torch.uint8).set_(node.untyped_storage()).fill_(7)
    elif isinstance(node, np.ndarray):
        node.fill(7)
    elif isinstance(node, torch.UntypedStorage):
        node.fill_(7)
    elif isinstance(node, (dict, argparse.Namespace)):
        values = node if isinstance(node, dict) else vars(node)
        for value in [*values.values(), getattr(node, "_metadata", None)]:
            spoil(value, seen)
        values.clear()
    elif isinstance(node, (list, tuple)):
        for value in node:
            spoil(value, seen)
        if isinstance(node, list):
            node.clear()


@pytest.mark.parametrize("name", [*PLAIN, *OTHERS])
def test_the_file_is_the_one_of_the_foreground(name, tmp_path):
    make, target = {**PLAIN, **OTHERS}[name], tmp_path / "a.ckpt8"
    tree = make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ckpt8.save(tree, target, preset="lossless")
        expected = target.read_bytes()
        with Snapshot(tree, "a") as taken:
            assert (taken.pickled is None) is (name in PLAIN)
        pending = ckpt8.save(tree, target, preset="lossless", background=True)
    spoil(tree, {})
    pending.result()
    assert target.read_bytes() == expected
    SEVERAL.copy_(torch.randn(6, 7))


def test_one_type_for_the_bytes_of_a_storage(tmp_path):
    """As torch.save asks for; told at the call."""
    weight = torch.randn(9)
    with pytest.raises(UsageError, match=r"view the same memory as different types, .*; clone"):
        ckpt8.save([weight, weight.view(torch.int32)], tmp_path / "a.ckpt8", background=True)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def nothing_kept():
    gc.collect()
    snapshot.give_back()
    yield
    snapshot.give_back()


def addresses(taken):
    with taken.checkpoint() as checkpoint:
        return [storage.data_ptr() for storage in checkpoint.memory.values()]


@pytest.mark.usefixtures("nothing_kept")
def test_memory_is_kept_for_the_next_snapshot_and_never_shared():
    tree = [torch.randn(1 << 20), torch.randn(9)]
    with Snapshot(tree, "a") as taken:
        first = addresses(taken)
    assert len(snapshot._kept) == 1
    with Snapshot(tree, "a") as taken, Snapshot(tree, "a") as other:
        assert snapshot._kept == []
        again, elsewhere = addresses(taken), addresses(other)
        assert again == first
        assert set(first).isdisjoint(elsewhere)
    assert len(snapshot._kept) == 1  # of the two
    with Snapshot([torch.randn(9)], "a") as taken:
        addresses(taken)
    assert [memory.nbytes for memory in snapshot._kept] == [1 << 21]
    tensors = Snapshot(tree, "a")
    del tensors
    gc.collect()
    assert [memory.nbytes for memory in snapshot._kept] == [3 << 21]
    with Snapshot(tree, "a"):
        snapshot.give_back()
    assert snapshot._kept == []


@pytest.mark.usefixtures("nothing_kept")
def test_a_packed_save_gives_the_memory_back(tmp_path):
    ckpt8.save({"w": torch.ones(9)}, tmp_path / "a.ckpt8", background=True).result()
    assert len(snapshot._kept) == 1
    ckpt8.save({"w": torch.ones(9)}, tmp_path / "a.ckpt8", background=True, snapshot="packed").result()
    assert snapshot._kept == []


@pytest.mark.usefixtures("nothing_kept")
def test_a_fork_does_not_get_the_memory():
    with Snapshot([torch.ones(1 << 22)], "a"):
        pending = Snapshot([torch.ones(1 << 22)], "a")
    assert len(snapshot._kept) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        is_there = pending._taken._memory.count_nonzero()  # zeros; what lay here instead would go with the memory
        pending.close()
        os._exit(len(snapshot._kept) + int(is_there))
    assert os.waitpid(child, 0)[1] == 0
    pending.close()
    assert len(snapshot._kept) == 1


def test_a_thread_that_does_not_start_in_time_is_not_waited_for(monkeypatch):
    tree, asked = [torch.arange(4 << 20), torch.arange(9)], []
    monkeypatch.setattr(snapshot, "default_threads", lambda: 4)
    monkeypatch.setattr(snapshot._thread, "start_new_thread", lambda *_: asked.append(1))
    with Snapshot(tree, "a") as taken, taken.checkpoint() as checkpoint:
        copies = [torch.empty(0, dtype=torch.int64).set_(storage) for storage in checkpoint.memory.values()]
        assert all(map(torch.equal, copies, tree))
    assert len(asked) == 3


def test_no_memory(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(snapshot.mmap, "mmap", refused)
    snapshot.give_back()
    with pytest.raises(MemoryError, match="snapshot='packed' takes less"):
        ckpt8.save({"w": torch.ones(9)}, tmp_path / "a.ckpt8", background=True)
    assert not list(tmp_path.iterdir())
