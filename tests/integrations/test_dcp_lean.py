"""What a save takes beside the state: values are copied chunk by chunk, and a rank looks for no names but its own."""

from __future__ import annotations

import os
import threading

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from memory_kit import run_measured
from packed_kit import load, raw, save

import ckpt8
from ckpt8.integrations.dcp import Ckpt8StorageWriter
from ckpt8.integrations.dcp.rank_file import Sources

pytestmark = pytest.mark.filterwarnings("ignore")

MB = 1 << 20

SETUP = """
import ctypes, warnings
import torch.distributed.checkpoint as dcp
from ckpt8.integrations.dcp import Ckpt8StorageWriter
warnings.simplefilter("ignore")

class Copying(dcp.DefaultSavePlanner):
    # As a planner does that takes its values from elsewhere.
    def transform_object(self, item, value):
        value = super().transform_object(item, value)
        return value.clone() if isinstance(value, torch.Tensor) else value

def save(state, folder, planner):
    writer = Ckpt8StorageWriter(folder, preset="flash", threads=1)
    dcp.save(state, storage_writer=writer, planner=planner, no_dist=True)

ctypes.CDLL(None).mallopt(-3, 1 << 20)  # what is freed is the system's again: the allocator's habits are not measured
state = {f"model.{k}": torch.randn(2, 1 << 20) for k in range(20)}
save({"warm": torch.randn(8, 64).t()}, sys.argv[1] + "/warm", None)
"""

CODE = """
save({k: v.t() for k, v in state.items()}, sys.argv[1], None)
save({k: v.view(torch.complex64).conj() for k, v in state.items()}, sys.argv[1], None)
save(state, sys.argv[1], Copying())
found = {}
"""


@pytest.mark.slow
def test_memory_beside_the_state_does_not_grow_with_its_values(tmp_path):
    # 20 values of 8 MB: transposed, conjugate, made by the planner. Of those the last four are kept.
    assert run_measured(SETUP, CODE, tmp_path)["extra"] < 100 * MB


class Planner:
    """Gives one value: the same each time, or a copy of it."""

    def __init__(self, value, *, copies):
        self.value, self.copies, self.asked = value, copies, 0

    def resolve_data(self, _):
        self.asked += 1
        return self.value.clone() if self.copies else self.value


def views():
    big = torch.arange(4 * 6 * 5, dtype=torch.float32).view(4, 6, 5)
    numbers = torch.randn(6, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    return [
        *(big, big[1:3], big.permute(2, 0, 1), big[:, ::2], big[2].t(), big[:, 3, 2], big[:, 1:2].expand(4, 3, 5)),
        *(torch.tensor(3.0).expand(3, 2), torch.tensor(7).reshape(())),
        *(numbers.conj(), numbers.t().conj()[1:], numbers.conj().imag, numbers.to(torch.complex128).t()),
        *(big[:2, :4].to(torch.float8_e4m3fn).permute(1, 0, 2), (big > 9).permute(2, 1, 0), big.bfloat16()[:, :, 1]),
    ]


@given(st.integers(0, len(views()) - 1), st.booleans(), st.data())
def test_a_stand_in_is_read_as_the_contiguous_value(which, copies, data):
    value = views()[which]
    expected = raw(value).numpy().tobytes()
    sources = Sources(Planner(value, copies=copies))
    found = sources.resolve(object())
    assert (found.shape, found.dtype, found.is_contiguous()) == (value.shape, value.dtype, True)
    assert found.untyped_storage().nbytes() == len(expected)
    read = sources.made.get(found.untyped_storage().data_ptr())
    if read is None:
        assert not copies
        assert found.view(-1).view(torch.uint8).numpy().tobytes() == expected
        return
    first = data.draw(st.integers(0, len(expected)))
    buffer = bytearray(data.draw(st.integers(0, len(expected) - first)))
    read(first, memoryview(buffer))
    assert buffer == expected[first : first + len(buffer)]


def test_values_in_place_are_not_copied_and_equal_ones_share_a_storage():
    big = torch.randn(40, 50)
    for part in (big[3:7], big.t()):
        sources = Sources(Planner(part, copies=False))
        found = [sources.resolve(object()) for _ in range(2)]
        assert found[0].data_ptr() == found[1].data_ptr()
    assert Sources(Planner(big[3:7], copies=False)).resolve(object()).data_ptr() == big[3:7].data_ptr()


def padded(value):
    """The same values in a larger storage: FSDP2 pads the slices of ranks that have fewer rows."""
    whole = torch.full((len(value) + 3, *value.shape[1:]), 7.25) if value.dim() else value
    whole[: len(value)] = value
    return whole[: len(value)]


def test_padding_is_not_stored_and_changes_nothing(tmp_path):
    torch.manual_seed(0)
    weight, first, second = torch.randn(62, 96), torch.randn(62, 96) * 1e-3, torch.rand(62, 96) * 1e-6
    group = {"params": ["w"], "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
    for name, make in (("padded", padded), ("cloned", torch.clone)):
        state = {"w": {"step": torch.tensor(5.0), "exp_avg": make(first), "exp_avg_sq": make(second)}}
        saved = {"model": {"w": make(weight)}, "optimizer": {"state": state, "param_groups": [group]}}
        save(saved, tmp_path / name, preset="archive")
    one, other = ((tmp_path / name / "__0_0.ckpt8").read_bytes() for name in ("padded", "cloned"))
    assert one == other
    with ckpt8.open(tmp_path / "padded" / "__0_0.ckpt8") as file:
        codecs = {each.name: each.codec["id"] for each in file.manifest.storages if each.numel == weight.numel()}
    assert {name.rpartition(".")[2]: codec.partition("/")[0] for name, codec in codecs.items()} == {
        "w": "lattice",
        "exp_avg": "vscaled",
        "exp_avg_sq": "rclog",
    }


def test_few_values_that_a_planner_makes_are_kept():
    planner = Planner(torch.randn(6), copies=True)
    sources = Sources(planner)
    items = [object() for _ in range(9)]
    found = [sources.made[sources.resolve(item).untyped_storage().data_ptr()] for item in items]
    assert planner.asked == len(items)
    for _ in range(3):
        for read in found[:3]:
            read(0, memoryview(bytearray(8)))
    assert planner.asked == len(items) + 3
    threads = [threading.Thread(target=read, args=(0, memoryview(bytearray(8)))) for read in found]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert planner.asked == 2 * len(items)


def test_a_rank_does_not_list_the_directory(tmp_path, monkeypatch):
    save({"w": torch.ones(8)}, tmp_path / "x", preset="lossless")
    writer = Ckpt8StorageWriter(tmp_path / "x", preset="lossless")
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"w": torch.ones(8)}, is_coordinator=True)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    (plan,) = writer.prepare_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    listed = []
    for module, name in ((os, "scandir"), (os, "listdir")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda path=".", real=real: listed.append(str(path)) or real(path))
    writer.write_data(plan, planner).wait()
    assert str(tmp_path / "x") not in listed
    assert (tmp_path / "x" / "__0_1.ckpt8").exists()


def test_values_of_every_layout_come_back(tmp_path):
    state = {f"{k}": value for k, value in enumerate(views())}

    class Copying(dcp.DefaultSavePlanner):
        def transform_object(self, item, value):
            value = super().transform_object(item, value)
            return value.clone() if isinstance(value, torch.Tensor) else value

    for name, planner in (("as they are", None), ("copies", Copying())):
        save(state, tmp_path / name, planner, preset="lossless")
        empty = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in state.items()}
        found = load(empty, tmp_path / name)
        assert all(torch.equal(raw(found[key]), raw(value)) for key, value in state.items())
