"""DTensors in pickles: forms of older versions of torch, and lies about meshes, places and shapes."""

from __future__ import annotations

import io
import random
import sys
import zipfile
from collections import namedtuple
from dataclasses import replace
from types import ModuleType

import pytest
import torch
import torch.distributed.tensor
from hostile_kit import Pickled
from members_kit import tree as bytes_of_files

import ckpt8
from ckpt8.checkpoint.readers.directory import open_directory
from ckpt8.checkpoint.readers.entries import check_shares, refuse_share, walk
from ckpt8.checkpoint.readers.inert_pickle import StorageTable, load_pickle
from ckpt8.checkpoint.tree import Share, TensorRef
from ckpt8.core.errors import Ckpt8Error, InputError, UnsupportedError
from ckpt8.core.tensors import DType

RANKS = 4
SHAPE = (10, 6)


def places(package, api):
    """The modules of the classes in a version of torch that has them in ``package``."""
    spec = dict.fromkeys(("DTensorSpec", "TensorMeta"), f"{package}._dtensor_spec")
    placements = dict.fromkeys(("Shard", "_StridedShard", "Replicate", "Partial"), f"{package}.placement_types")
    return {"DTensor": api, **spec, **placements, "DeviceMesh": "torch.distributed.device_mesh"}


NEW = places("torch.distributed.tensor", "torch.distributed.tensor")
PLACES = {
    "2.4": places("torch.distributed._tensor", "torch.distributed._tensor.api"),
    "2.8": NEW,
    "2.10": {**NEW, "_MeshLayout": "torch.distributed._mesh_layout"},
}


class Classes:
    """Stand-ins for classes of torch.distributed at the places that a version had them, for the pickle to name.

    The objects of that version have these attributes.
    """

    def __init__(self, monkeypatch, version):
        self.version = version
        for name, place in PLACES[version].items():
            made = type(name, (), {"__module__": place})
            if name == "TensorMeta":
                made = namedtuple(name, "shape stride dtype", module=place)
            if place not in sys.modules:
                monkeypatch.setitem(sys.modules, place, ModuleType(place))
            monkeypatch.setattr(sys.modules[place], name, made, raising=False)
            setattr(self, name, made)

    def made(self, kind, **attributes):
        """An object of a class with these attributes."""
        found = getattr(self, kind)()
        found.__dict__.update(attributes)
        return found

    def mesh(self, shape, coordinate, **changed):
        """A mesh of all ranks as that version pickles it."""
        ranks = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
        state = {
            "device_type": "cuda",
            "mesh": ranks,
            "mesh_dim_names": tuple("abcd"[: len(shape)]),
            "_flatten_mesh_list": tuple(ranks.flatten().tolist()),
            "_coordinate_on_dim": list(coordinate),
            "_dim_group_infos": [("", [0, 1], "1")],
            "_thread_id": None,
        }
        if self.version == "2.10":
            strides = tuple(ranks.stride())
            layout = self.made("_MeshLayout", shape=tuple(shape), stride=strides)
            if len(shape) == 1:
                layout.__dict__.update(shape=shape[0], stride=strides[0])
            del state["mesh"]
            state |= {"_layout": layout, "_rank_map": ranks.flatten()}
        return self.made("DeviceMesh", **{**state, **changed})

    def tensor(self, local, mesh, placements, shape=SHAPE, **changed):
        """A DTensor as that version pickles it."""
        stride = torch.empty(shape, device="meta").stride() if min(shape, default=1) >= 0 else (1,) * len(shape)
        meta = self.TensorMeta(torch.Size(shape), stride, torch.float32)
        spec = self.made("DTensorSpec", mesh=mesh, placements=tuple(placements), tensor_meta=meta, _hash=5)
        spec.__dict__.update(changed)
        kind, slots = self.DTensor, (None, {"_local_tensor": local, "_spec": spec})
        about = (kind, torch.float32, torch.Size(shape), stride, 0, torch.strided, torch.device("cpu"), False)
        wrapped = torch._utils._rebuild_wrapper_subclass
        return Pickled(torch._tensor._rebuild_from_type_v2, wrapped, kind, about, slots)


@pytest.fixture(params=list(PLACES))
def classes(request, monkeypatch):
    return Classes(monkeypatch, request.param)


@pytest.fixture
def new(monkeypatch):
    return Classes(monkeypatch, "2.8")


def save(folder, rank, saved):
    folder.mkdir(exist_ok=True)
    torch.save(saved, folder / f"model_rank_{rank}.pt")


def members(folder):
    with open_directory(folder, walk(folder), decode=True) as found:
        return list(found)


WHOLE = torch.arange(60, dtype=torch.float32).reshape(SHAPE)


def rows(rank):
    """Those of ten that the rank of four has."""
    return slice(3 * rank, min(3 * rank + 3, 10))


def write_rows(classes, folder, ranks=range(RANKS), change=lambda rank, made: made):
    """Files of ranks that have rows of one tensor; ``change`` alters the one of a rank."""
    for rank in ranks:
        shard = classes.made("Shard", dim=0)
        made = classes.tensor(WHOLE[rows(rank)].clone(), classes.mesh((RANKS,), (rank,)), [shard])
        save(folder, rank, {"w": change(rank, made)})


# Forms of other versions


def test_files_of_older_versions_are_joined(classes, tmp_path):
    write_rows(classes, tmp_path / "run")
    ckpt8.convert(tmp_path / "run", tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt")["model"]["w"], WHOLE)


def test_a_mesh_of_two_dimensions(classes, tmp_path):
    for rank in range(RANKS):
        first, second = divmod(rank, 2)
        local = WHOLE[5 * first : 5 * first + 5, 3 * second : 3 * second + 3].clone()
        mesh = classes.mesh((2, 2), (first, second))
        placed = [classes.made("Shard", dim=0), classes.made("Shard", dim=1)]
        copy = classes.tensor(WHOLE[:5].clone(), mesh, [classes.made("Replicate"), classes.made("Replicate")], (5, 6))
        save(tmp_path / "run", rank, {"w": classes.tensor(local, mesh, placed), "copy": copy})
    ckpt8.convert(tmp_path / "run", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt")["model"]
    assert torch.equal(found["w"], WHOLE)
    assert torch.equal(found["copy"], WHOLE[:5])


def test_the_files_of_one_rank_are_whole(new, tmp_path):
    made = new.tensor(WHOLE.clone(), new.mesh((1,), (0,)), [new.made("Shard", dim=0)])
    save(tmp_path / "run", 0, {"w": made})
    ckpt8.convert(tmp_path / "run" / "model_rank_0.pt", tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt")["w"], WHOLE)
    tensors = ckpt8.compress(tmp_path / "run", tmp_path / "x.ckpt8").tensors
    assert [tensor.name for tensor in tensors if tensor.shape == [10, 6]] == ["model_rank_0.pt:w"]


# What is not understood stays as it is


def unknown(new):
    """Tensors of rank 1 whose place cannot be known, by what is wrong."""
    shard, mesh = new.made("Shard", dim=0), new.mesh((RANKS,), (1,))
    local, none = WHOLE[rows(1)].clone(), torch.zeros(0, 6)

    def tensor(value=local, its_mesh=mesh, placements=(shard,), **changed):
        return new.tensor(value, its_mesh, placements, **changed)

    return {
        "sums": tensor(WHOLE.clone(), placements=[new.made("Partial", reduce_op="sum")]),
        "another shape": tensor(WHOLE[:2].clone()),
        "another meta": tensor(tensor_meta=new.TensorMeta(torch.Size((11, 6)), (6, 1), torch.float32)),
        "a dimension beyond": tensor(placements=[new.made("Shard", dim=2)]),
        "a negative dimension": tensor(placements=[new.made("Shard", dim=-2)]),
        "no dimension": tensor(placements=[new.made("Shard", dim="0")]),
        "two placements": tensor(placements=[shard, shard]),
        "no placements": tensor(placements=[]),
        "a placement of another kind": tensor(placements=["Shard(0)"]),
        "a coordinate outside": tensor(none, new.mesh((RANKS,), (RANKS,))),
        "a negative coordinate": tensor(none, new.mesh((RANKS,), (-1,))),
        "no coordinate": tensor(its_mesh=new.mesh((RANKS,), (1,), _coordinate_on_dim=None)),
        "no mesh": tensor(its_mesh=None),
        "a mesh without ranks": tensor(its_mesh=new.mesh((RANKS,), (1,), mesh=None)),
        "an empty mesh": tensor(none, new.mesh((0,), (0,))),
        "another type": tensor(local.double()),
        "rows of several places": tensor(
            WHOLE[[0, 5, 2, 3, 4]].clone(), new.mesh((2,), (0,)), [new.made("_StridedShard", dim=0, split_factor=5)]
        ),
        "a factor of nothing": tensor(placements=[new.made("_StridedShard", dim=0, split_factor=0)]),
        "an order of its own": tensor(shard_order=(new.made("Shard", dim=0),)),
        "a mesh in its storage": tensor(its_mesh=new.mesh((RANKS,), (1,), mesh=local.flatten()[:RANKS])),
    }


def names_of_unknown():
    with pytest.MonkeyPatch.context() as patch:
        return list(unknown(Classes(patch, "2.8")))


@pytest.mark.parametrize("what", names_of_unknown())
def test_a_place_that_is_not_understood_keeps_the_file_as_it_is(what, new, tmp_path):
    write_rows(new, tmp_path / "run", change=lambda rank, made: unknown(new)[what] if rank == 1 else made)
    reasons = {member.path: member.reason for member in members(tmp_path / "run")}
    assert reasons.pop("model_rank_1.pt").startswith("kept as it is: a file of one rank: ")
    assert set(reasons.values()) == {None}
    ckpt8.compress(tmp_path / "run", tmp_path / "run.ckpt8", preset="lossless")
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    assert bytes_of_files(back) == bytes_of_files(tmp_path / "run")
    with pytest.raises(InputError, match=r"model_rank_1\.pt: kept as it is: .*; it cannot be converted") as caught:
        ckpt8.convert(tmp_path / "run", tmp_path / "whole.pt")
    assert "\n" not in str(caught.value)


# Lies that only all files together show


def place(new, local, coordinate, ranks=RANKS, shape=SHAPE):
    """A tensor at a coordinate that may be that of another rank."""
    return new.tensor(local.clone(), new.mesh((ranks,), (coordinate,)), [new.made("Shard", dim=0)], shape)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda new, made: place(new, WHOLE[3:6], 1, shape=(12, 6)),
            "has another shape or type on rank 1 than on rank 0",
        ),
        (lambda new, made: WHOLE[3:6].clone(), "has another shape or type on rank 1 than on rank 0"),
        (lambda new, made: place(new, WHOLE[3:6], 2), "is another tensor on rank 2 than on a rank with the same part"),
        (lambda new, made: place(new, WHOLE[:5], 0, 2), "its slices overlap"),
        (lambda new, made: place(new, torch.zeros(0, 6), 50, 60), "the file of rank 4 of 60 is not there"),
        (lambda new, made: {"inner": made}, "slices are missing: 42 of 60 elements are there"),
    ],
)
def test_files_that_contradict_each_other_are_one_line(change, message, new, tmp_path):
    write_rows(new, tmp_path / "run", change=lambda rank, made: change(new, made) if rank == 1 else made)
    assert all(member.reason is None for member in members(tmp_path / "run"))
    with pytest.raises(InputError, match=message) as caught:
        ckpt8.convert(tmp_path / "run", tmp_path / "whole.pt")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "whole.pt").exists()
    ckpt8.compress(tmp_path / "run", tmp_path / "run.ckpt8", preset="lossless")
    assert bytes_of_files(ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")) == bytes_of_files(tmp_path / "run")


@pytest.mark.parametrize(("count", "reason"), [(1, None), (64, None), (65, "kept as it is: a file of one rank: ")])
def test_no_more_of_an_order_is_looked_at_than_a_tensor_has_dimensions(count, reason, new, tmp_path, monkeypatch):
    place = "torch.distributed.tensor._dtensor_spec"
    entry = namedtuple("ShardOrderEntry", "tensor_dim mesh_dims", module=place)
    monkeypatch.setattr(sys.modules[place], "ShardOrderEntry", entry, raising=False)
    mesh, shard = new.mesh((RANKS,), (0,)), new.made("Shard", dim=0)
    made = new.tensor(WHOLE[rows(0)].clone(), mesh, [shard], shard_order=(entry(0, (0,)),) * count)
    save(tmp_path / "run", 0, {"w": made})
    (found,) = [member.reason for member in members(tmp_path / "run")]
    assert found is None if reason is None else found.startswith(reason)


def test_an_enormous_mesh_takes_no_time(new, tmp_path):
    huge = 1 << 40
    mesh = new.mesh((1,), (0,), mesh=None, _layout=new.made("Shard", shape=huge), _coordinate_on_dim=[5])
    for factor in (1, huge):
        placed = [new.made("_StridedShard", dim=0, split_factor=factor)]
        save(tmp_path / "run", 0, {"w": new.tensor(torch.zeros(0, 6), mesh, placed)})
        with pytest.raises(Ckpt8Error) as caught:
            ckpt8.convert(tmp_path / "run", tmp_path / "whole.pt")
        assert "\n" not in str(caught.value)


def test_changed_bytes_are_an_error_of_one_line_or_another_tree(new, tmp_path):
    mesh = new.mesh((2, 2), (1, 0))
    placed = [new.made("_StridedShard", dim=0, split_factor=2), new.made("Shard", dim=0)]
    save(tmp_path, 0, {"w": new.tensor(WHOLE[3:5].clone(), mesh, placed)})
    with zipfile.ZipFile(tmp_path / "model_rank_0.pt") as file:
        content = file.read("model_rank_0/data.pkl")
    assert read(content)["w"].share.offsets == (3, 0)
    numbers, messages = random.Random(0), []
    for _ in range(3000):
        changed = bytearray(content)
        for _ in range(numbers.randrange(1, 4)):
            changed[numbers.randrange(len(changed))] = numbers.randrange(256)
        try:
            read(bytes(changed))
        except Ckpt8Error as exc:
            messages.append(str(exc))
    assert messages
    assert not any("\n" in message for message in messages)


def read(content):
    names = set()
    found = load_pickle(io.BytesIO(content), len(content), "x", StorageTable("x").load, names=names)
    check_shares(found, names, "x")
    return found


def test_the_message_names_a_part_alone():
    share = Share((3, 0), SHAPE, RANKS, 1, None)
    with pytest.raises(UnsupportedError, match="x: the file of one rank"):
        refuse_share({"w": replace(TensorRef.whole("0", DType.FLOAT32, (3, 6)), share=share)}, "x")
