"""A codec that counts elements and needs the decoded second moments, on every way into a container and out of it."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from flips_kit import places
from neighbour_kit import Neighbour, registered
from resume_kit import same
from test_damage import pack, unpack
from test_gpu_encoder import Deferred

import ckpt8
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError, InputError
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container
from ckpt8.restoring.resume import resume as resuming
from ckpt8.restoring.resume.new_state import DeviceCopy

FRAME = 1 << 20
RULE = "*.exp_avg=neighbour"
FIRST = "optimizer.state.0.exp_avg"


@pytest.fixture(scope="module", autouse=True)
def _registered():
    with registered():
        yield


def make_run(seed: int = 0):
    """A parameter of more than one chunk and one of less, whose moments are far from zero."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.ParameterList(
        [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((1100, 1000), (80, 70))]
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The source, its container, and what it restores to."""
    folder = tmp_path_factory.mktemp("companions")
    model, optimizer = make_run()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "run.pt")
    ckpt8.compress(folder / "run.pt", rules=[RULE])
    ckpt8.restore(folder / "run.ckpt8", folder / "back.pt")
    return folder


def expected(m: torch.Tensor, v: torch.Tensor) -> np.ndarray:
    """The first moments that come back, from the formula and the second moments that came back."""
    m, v = m.flatten().numpy(), v.flatten().numpy()
    index = np.arange(len(m), dtype=np.uint64)
    t = ((index * np.uint64(0x9E3779B1) & np.uint64(0xFFFFFFFF)) >> np.uint64(8)).astype(np.float32) * np.float32(
        2**-24
    )
    root = np.sqrt(np.sqrt(v.astype(np.float64))).astype(np.float32)
    s = np.where(v > 0, root * np.float32(2**-8), np.float32(2**-20))
    q = np.floor(m / s + t)
    return (q + (np.float32(0.5) - t)) * s


@pytest.mark.slow
def test_what_comes_back_follows_from_index_and_second_moment(run):
    source, back = torch.load(run / "run.pt"), torch.load(run / "back.pt")
    for k, state in source["optimizer"]["state"].items():
        found = back["optimizer"]["state"][k]
        assert not torch.equal(found["exp_avg_sq"], state["exp_avg_sq"])
        want = expected(state["exp_avg"], found["exp_avg_sq"])
        np.testing.assert_array_equal(found["exp_avg"].flatten().numpy(), want)


def test_the_container_names_the_second_moments(run):
    with ContainerReader(run / "run.ckpt8") as reader:
        names = [record.name for record in reader.manifest.storages]
        for k in (0, 1):
            record = reader.manifest.storages[names.index(f"optimizer.state.{k}.exp_avg")]
            assert record.codec == {"id": "neighbour/1", "second": names.index(f"optimizer.state.{k}.exp_avg_sq")}
            assert record.error["sum_square_error"] > 0
    rows = inspect_container(run / "run.ckpt8", tensors=True)["tensors"]
    assert {row["codec"] for row in rows if row["name"].endswith("exp_avg")} == {"neighbour/1"}


@pytest.mark.slow
def test_verify_measures_the_same_errors(run):
    found = ckpt8.verify(run / "run.ckpt8", run / "run.pt")
    assert found.against
    assert not found.failures


@pytest.mark.slow
def test_verify_finds_a_figure_that_does_not_hold(run, tmp_path):
    other = torch.load(run / "run.pt")
    other["optimizer"]["state"][0]["exp_avg"][1099] *= 1.5
    torch.save(other, tmp_path / "run.pt")
    found = ckpt8.verify(run / "run.ckpt8", tmp_path / "run.pt")
    names = [failure.partition(":")[0] for failure in found.failures]
    assert names == ["ckpt8.skeleton", FIRST, "0 (update)"]


@pytest.mark.slow
def test_every_way_out_gives_the_same(run, tmp_path):
    back = torch.load(run / "back.pt")
    assert same(ckpt8.load(run / "run.ckpt8"), back)
    ckpt8.convert(run / "run.ckpt8", tmp_path / "again.pt")
    assert same(torch.load(tmp_path / "again.pt")["optimizer"]["state"], back["optimizer"]["state"])


@pytest.mark.parametrize("on_device", [False, True])
def test_training_resumes_with_it(run, monkeypatch, on_device):
    if on_device:
        Deferred.made, Deferred.marks = [], {}
        monkeypatch.setattr(resuming, "DeviceCopy", partial(DeviceCopy, make=Deferred))
    model, optimizer = make_run(seed=1)
    ckpt8.resume(run / "run.ckpt8", model, optimizer)
    assert same(optimizer.state_dict()["state"], torch.load(run / "back.pt")["optimizer"]["state"])
    assert bool(on_device) == (on_device and any(each.uploads for each in Deferred.made))


@pytest.mark.slow
def test_live_objects_are_saved_alike(run, tmp_path):
    source = torch.load(run / "run.pt")
    ckpt8.save(source, tmp_path / "live.ckpt8", rules=[RULE])
    assert same(ckpt8.load(tmp_path / "live.ckpt8"), torch.load(run / "back.pt"))


@pytest.mark.slow
def test_a_directory_shifts_the_storages(run, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    torch.save({"w": torch.randn(80, 80)}, folder / "a.pt")
    (folder / "run.pt").write_bytes((run / "run.pt").read_bytes())
    ckpt8.compress(folder, tmp_path / "folder.ckpt8", rules=["*.exp_avg=neighbour"])
    assert not ckpt8.verify(tmp_path / "folder.ckpt8", folder).failures
    ckpt8.restore(tmp_path / "folder.ckpt8", tmp_path / "back")
    assert same(torch.load(tmp_path / "back" / "run.pt"), torch.load(run / "back.pt"))


def test_without_second_moments_it_is_lossless(tmp_path):
    """SGD has none; neither has a tensor that belongs to no parameter."""
    parameter = torch.nn.Parameter(torch.randn(100, 100))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.randn(100, 100)
    optimizer.step()
    torch.save({"optimizer": optimizer.state_dict(), "x": {"w": torch.randn(100, 101)}}, tmp_path / "sgd.pt")
    ckpt8.compress(tmp_path / "sgd.pt", rules=["*.momentum_buffer=neighbour", "x.w=neighbour"])
    assert not ckpt8.verify(tmp_path / "sgd.ckpt8", tmp_path / "sgd.pt").failures
    reasons = {row["name"]: row["reason"] for row in inspect_container(tmp_path / "sgd.ckpt8", tensors=True)["tensors"]}
    reason = "its codec needs max_moment2 of the same parameter"
    assert reasons == {"optimizer.state.0.momentum_buffer": reason, "x.w": reason}
    ckpt8.restore(tmp_path / "sgd.ckpt8", tmp_path / "back.pt")
    assert same(torch.load(tmp_path / "back.pt"), torch.load(tmp_path / "sgd.pt"))


def test_a_lost_second_moment_takes_its_first_with_it(run, tmp_path):
    data = bytearray((run / "run.ckpt8").read_bytes())
    found = {name: (start, stop) for name, start, stop in places(bytes(data))}
    start, stop = found["optimizer.state.0.exp_avg_sq/codes"]
    data[start + (stop - start) // 4] ^= 4  # in the first chunk
    (tmp_path / "bad.ckpt8").write_bytes(data)
    result = ckpt8.restore(tmp_path / "bad.ckpt8", tmp_path / "salvaged.pt", salvage=True)
    lost = {tensor.name: tensor.elements for tensor in result.lost}
    assert lost == {FIRST: [[0, FRAME]], "optimizer.state.0.exp_avg_sq": [[0, FRAME]]}
    whole, state = torch.load(run / "back.pt"), torch.load(tmp_path / "salvaged.pt", weights_only=False)
    m, expected_m = (each["optimizer"]["state"][0]["exp_avg"].flatten() for each in (state, whole))
    assert bool(m[:FRAME].isnan().all())
    assert torch.equal(m[FRAME:], expected_m[FRAME:])


@pytest.mark.slow
def test_inspect_predicts_the_size(run, monkeypatch):
    from ckpt8.compressing import plan
    from ckpt8.core.tensors import Role

    monkeypatch.setitem(plan.PRESETS["flash"], Role.MOMENT1, Neighbour())
    predicted = inspect_checkpoint(run / "run.pt")
    size = (run / "run.ckpt8").stat().st_size
    assert abs(predicted["predicted"]["flash"]["bytes"] - size) < 0.02 * size


def with_companion(run, folder, second):
    """The container, in which the first moments name another storage as that of their second ones."""
    metadata, entries, manifest = unpack((run / "run.ckpt8").read_bytes())
    (record,) = (each for each in manifest["storages"] if each["name"] == FIRST)
    record["codec"]["second"] = second
    (folder / "bad.ckpt8").write_bytes(pack(manifest, entries, metadata))
    return folder / "bad.ckpt8"


@pytest.mark.parametrize("second", [None, True, -1, 10**6, "0", 1, [1]])
def test_a_companion_that_is_none_is_refused(run, tmp_path, second):
    """Storage 1 has another length."""
    with pytest.raises(InputError, match="second is "):
        ckpt8.load(with_companion(run, tmp_path, second))


def test_a_companion_of_another_parameter_is_no_match_for_the_original(run, tmp_path):
    with pytest.raises(CheckFailedError, match="moments of another parameter"):
        ckpt8.verify(with_companion(run, tmp_path, 0), run / "run.pt")
