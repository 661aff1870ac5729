"""Persistent ids: what a pickle may say about a storage."""

from __future__ import annotations

import pytest

from ckpt8.checkpoint.readers.inert_pickle import StorageTable
from ckpt8.checkpoint.readers.rebuild import make_tensor
from ckpt8.checkpoint.tree import Global, StorageRef
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.tensors import DType


def test_one_storage_under_two_types():
    table = StorageTable("file.pt")
    kinds = [Global("torch.FloatStorage"), Global("torch.cuda.ByteStorage"), Global("torch.storage.UntypedStorage")]
    assert table.load(("storage", kinds[0], "k", "cpu", 2)) == StorageRef("k", DType.FLOAT32, 2)
    assert table.dtype_for("k", 8) is DType.FLOAT32
    assert table.load(("storage", kinds[1], "k", "cpu", 8)) == StorageRef("k", DType.UINT8, 8)
    assert table.dtype_for("k", 8) is DType.UINT8
    table.load(("storage", kinds[2], "k", "cpu", 9))
    with pytest.raises(InputError, match="9 elements"):
        table.dtype_for("k", 8)


FLOAT = Global("torch.FloatStorage")


@pytest.mark.parametrize(
    "pid",
    [
        None,
        "storage",
        (),
        ("storage",),
        ("other", FLOAT, "k", "cpu", 1),
        ("storage", "FloatStorage", "k", "cpu", 1),
        ("storage", FLOAT, ("k",), "cpu", 1),
        ("storage", FLOAT, "k", None, 1),
        ("storage", FLOAT, "k", "cpu", -1),
        ("storage", FLOAT, "k", "cpu", 2**63),
        ("storage", FLOAT, "k", "cpu", True),
        ("storage", FLOAT, "k", "cpu", 5, ("v", 3, 3)),
        ("storage", FLOAT, "k", "cpu", 5, ("v", -1, 3)),
        ("storage", FLOAT, "k", "cpu", 5, (1, 2)),
        ("module", "x", "y", "z"),
    ],
    ids=repr,
)
def test_malformed_persistent_ids(pid):
    with pytest.raises(InputError, match=r"^file\.pt: damaged pickle"):
        StorageTable("file.pt").load(pid)


def test_a_typed_view_starts_at_a_whole_element():
    view = StorageRef("k", DType.UINT8, 8, offset=4)
    assert make_tensor(view, DType.FLOAT32, 1, (1,), (1,)).offset == 2
    with pytest.raises(ValueError, match="starts inside an element"):
        make_tensor(StorageRef("k", DType.UINT8, 8, offset=2), DType.FLOAT32, 0, (1,), (1,))
    with pytest.raises(ValueError, match="reaches element 2 of a storage that has 2"):
        make_tensor(view, DType.FLOAT32, 2, (1,), (1,))


def test_unknown_storage_types_are_named():
    with pytest.raises(UnsupportedError, match=r"torch\.QuaternionStorage"):
        StorageTable("file.pt").load(("storage", Global("torch.QuaternionStorage"), "k", "cpu", 1))
