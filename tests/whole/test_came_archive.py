"""CAME under a budget: first moments coded in its own update space, from statistics kept exactly."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch
from flips_kit import places
from hostile_kit import pack, unpack
from strict_reader import Strict
from torch import nn

import ckpt8
from ckpt8.codecs.base import Factors
from ckpt8.codecs.vscaled import statistics
from ckpt8.compressing import groups, spending
from ckpt8.core.arrays import as_array
from ckpt8.core.errors import Ckpt8Error, InputError

came_pytorch = pytest.importorskip("came_pytorch")

LR, BETA1 = 1e-4, 0.9


def expand(factors, rows, columns, first, count):
    return torch.from_numpy(
        statistics.expand(factors, as_array(rows.flatten()), as_array(columns.flatten()), first, count)
    )


def make():
    """A convolution, a matrix of more than one chunk and a small one, and their optimizer."""
    layers = nn.Conv2d(12, 40, 3), nn.Flatten(), nn.Linear(360, 3000), nn.ReLU(), nn.Linear(3000, 70)
    net = nn.Sequential(*layers)
    return net, came_pytorch.CAME(net.parameters(), lr=LR, weight_decay=0.0)


def trained():
    torch.manual_seed(0)
    net, optimizer = make()
    for _ in range(5):
        x = torch.randn(16, 12, 5, 5)
        (net(x) - x.flatten(1)[:, :70]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The source, its container, whose storages have entries of their own, and what it restores to."""
    folder = tmp_path_factory.mktemp("came")
    torch.save(trained(), folder / "run.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_ROOM", 1 << 40)
        ckpt8.compress(folder / "run.pt", preset="archive")
    ckpt8.restore(folder / "run.ckpt8", folder / "back.pt")
    return folder


def both(run):
    return torch.load(run / "run.pt"), torch.load(run / "back.pt")


def states(tree):
    """The state of every matrix, and the name of its weight."""
    names = [name for name, _ in make()[0].named_parameters()]
    return {names[k]: state for k, state in tree["optimizer"]["state"].items() if "exp_avg_res_row" in state}


def second(rows, columns):
    """(R / mean R) (x) C in float64."""
    relative = rows.double() / rows.double().mean(-1, keepdim=True)
    return relative.unsqueeze(-1) * columns.double().unsqueeze(-2)


def codec_of(path, number):
    """That of the first moment of a parameter."""
    records = {each["name"]: each for each in unpack(path.read_bytes())[2]["storages"]}
    return records[f"optimizer.state.{number}.exp_avg"]["codec"]["id"]


def test_no_update_errs_by_more_than_half_of_u_max(run):
    source, back = both(run)
    for name, state in states(source).items():
        there = states(back)[name]
        for key in ("exp_avg_res_row", "exp_avg_res_col", "exp_avg_sq_row", "exp_avg_sq_col"):
            assert torch.equal(there[key], state[key])
        root = second(state["exp_avg_res_row"], state["exp_avg_res_col"]).sqrt()
        error = (there["exp_avg"].double() - state["exp_avg"].double()).abs() / root
        assert 0.05 < float(error.max()) <= 0.5


def test_the_error_is_the_budget(run):
    """S_W is up to a third of M1, and S_M takes what that leaves; it is less where u_max is the smaller step."""
    source, back = both(run)
    moved = weight = moment = 0.0
    for name, state in states(source).items():
        there = states(back)[name]
        v = second(state["exp_avg_sq_row"], state["exp_avg_sq_col"])
        f = second(state["exp_avg_res_row"], state["exp_avg_res_col"])
        dw = back["model"][name].double() - source["model"][name].double()
        dm = there["exp_avg"].double() - state["exp_avg"].double()
        moved += float((v / f * (LR * state["exp_avg"].double()).square()).sum())
        weight += float((v * dw.square()).sum())
        moment += float((v / f * (LR * BETA1 / (1 - BETA1) * dm).square()).sum())
    assert 0.65 / 3 < weight / moved <= 1 / 3
    assert (weight + moment) / moved <= 2 / 3
    manifest = unpack((run / "run.ckpt8").read_bytes())[2]
    sums = [each["steps"] for each in manifest["parameters"] if each.get("steps")]
    for key, expected in (("step", moved), ("weight", weight), ("moment1", moment)):
        assert sum(each[key] for each in sums) == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
def test_it_is_verified_and_another_state_is_not_taken_for_it(run, tmp_path):
    assert not ckpt8.verify(run / "run.ckpt8", run / "run.pt").failures
    other = torch.load(run / "run.pt")
    other["optimizer"]["state"][2]["exp_avg_res_row"][0] *= 2
    torch.save(other, tmp_path / "run.pt")
    failures = ckpt8.verify(run / "run.ckpt8", tmp_path / "run.pt").failures
    assert any("exp_avg_res_row" in failure for failure in failures)


def test_a_reader_written_from_the_format_reads_the_same(run):
    plain, back = Strict(run / "run.ckpt8"), torch.load(run / "back.pt")
    for record in plain.records.values():
        if record["name"].endswith("exp_avg"):
            place = int(record["name"].split(".")[-2])
            expected = back["optimizer"]["state"][place]["exp_avg"]
            assert plain.content(record["storage"]) == expected.numpy().tobytes()


@pytest.mark.slow
def test_training_goes_on_from_it(run):
    net, optimizer = make()
    ckpt8.resume(run / "run.ckpt8", net, optimizer)
    back = torch.load(run / "back.pt")
    for place, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["exp_avg"], back["optimizer"]["state"][place]["exp_avg"])


LOST = "no budget: its row and column statistics are not kept exactly in storages of their own"


def archived(tree, folder, **options):
    """Why storages of a tree are as they are, by name; the files are beside each other."""
    torch.save(tree, folder / "run.pt")
    ckpt8.compress(folder / "run.pt", preset="archive", **options)
    assert not ckpt8.verify(folder / "run.ckpt8", folder / "run.pt").failures
    return {each["name"]: each["reason"] for each in unpack((folder / "run.ckpt8").read_bytes())[2]["storages"]}


@pytest.mark.slow
def test_lossy_statistics_give_no_steps(run, tmp_path):
    rules = ["*.2.exp_avg_res_row=companded8(signed=False)"]
    assert archived(torch.load(run / "run.pt"), tmp_path, rules=rules)["optimizer.state.2.exp_avg"] == LOST
    assert [codec_of(tmp_path / "run.ckpt8", number) for number in (2, 4)] == ["companded8/1", "vscaled/1"]


def test_statistics_longer_than_a_chunk_give_no_steps(run, tmp_path, monkeypatch):
    monkeypatch.setattr(spending, "FRAME", 2999)
    found = archived(torch.load(run / "run.pt"), tmp_path)
    assert [found[f"optimizer.state.{k}.exp_avg"] for k in (0, 2, 4)] == [None, LOST, LOST]


def test_statistics_of_another_shape_are_told(run, tmp_path):
    tree = torch.load(run / "run.pt")
    state = tree["optimizer"]["state"][2]
    state["exp_avg_res_row"] = state["exp_avg_res_row"][:-1].clone()
    reason = archived(tree, tmp_path)["optimizer.state.2.exp_avg"]
    assert "row and column statistics are not fp32 of the parameter's shape" in reason


@pytest.mark.by_default("0.0")
@pytest.mark.parametrize("value", [0.0, -1e-3, math.nan, math.inf])
def test_statistics_that_give_no_second_moment_are_refused(run, tmp_path, value):
    tree = torch.load(run / "run.pt")
    tree["optimizer"]["state"][2]["exp_avg_res_col"][7] = value
    assert archived(tree, tmp_path)["optimizer.state.2.exp_avg"]
    assert codec_of(tmp_path / "run.ckpt8", 2) != "vscaled/1" == codec_of(tmp_path / "run.ckpt8", 4)


@pytest.mark.slow
def test_damaged_statistics_take_the_first_moments_with_them(run, tmp_path):
    data = bytearray((run / "run.ckpt8").read_bytes())
    start, _ = next((a, b) for name, a, b in places(bytes(data)) if "exp_avg_res_row" in name)
    data[start + 2] ^= 4
    (tmp_path / "bad.ckpt8").write_bytes(data)
    with pytest.raises(InputError, match="checksum"):
        ckpt8.load(tmp_path / "bad.ckpt8")
    lost = {each.name for each in ckpt8.restore(tmp_path / "bad.ckpt8", tmp_path / "x.pt", salvage=True).lost}
    assert any(name.endswith("exp_avg_res_row") for name in lost)
    assert any(name.endswith("exp_avg") for name in lost)


HOSTILE = [
    (lambda f, at: [10**6, *f[1:]], "is not a pair of storages"),
    (lambda f, at: [f[0], at["ckpt8.skeleton"], *f[2:]], "not kept exactly"),
    (lambda f, at: [at["optimizer.state.2.exp_avg"], *f[1:]], "not kept exactly"),
    (lambda f, at: [f[1], f[0], *f[2:]], "another shape"),
    (lambda f, at: [*f[:2], f[3], f[2]], "another shape"),
    (lambda f, at: [*f[:2], 1 << 62, 1 << 62], "another shape"),
    (lambda f, at: [at["optimizer.state.4.exp_avg_res_row"], *f[1:]], "another shape"),
    (lambda f, at: [*f[:3], 0], "not known to this version"),
    (lambda f, at: [-1, *f[1:]], "not known to this version"),
    (lambda f, at: f[:3], "not known to this version"),
    (lambda f, at: [*f, 1], "not known to this version"),
    (lambda f, at: [True, *f[1:]], "not known to this version"),
    (lambda f, at: [f, *f[1:]], "not known to this version"),
    (lambda f, at: at["optimizer.state.2.exp_avg_res_row"], "not a storage of as many elements"),
    (lambda f, at: None, "not a storage of as many elements"),
]


@pytest.mark.parametrize(("change", "message"), HOSTILE)
def test_statistics_that_are_none_are_refused(run, tmp_path, change, message):
    metadata, entries, manifest = unpack((run / "run.ckpt8").read_bytes())
    at = {each["name"]: k for k, each in enumerate(manifest["storages"])}
    record = manifest["storages"][at["optimizer.state.2.exp_avg"]]
    record["codec"]["second"] = change(record["codec"]["second"], at)
    target = tmp_path / "bad.ckpt8"
    target.write_bytes(pack(manifest, entries, metadata))
    with pytest.raises(Ckpt8Error, match=message):
        ckpt8.load(target)


def test_every_range_is_a_piece_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    rows, columns = torch.rand(5 * 7, generator=generator) * 1e-9, torch.rand(5 * 11, generator=generator)
    factors = Factors(0, 1, 7, 11)
    whole = expand(factors, rows, columns, 0, 385)
    for first in range(0, 385, 13):
        for count in (1, 10, 11, 12, 78, 385 - first):
            stop = min(first + count, 385)
            assert torch.equal(expand(factors, rows, columns, first, stop - first), whole[first:stop])
    expected = second(rows.view(5, 7), columns.view(5, 11)).flatten()
    np.testing.assert_allclose(whole.double(), expected, rtol=2e-7)


@pytest.mark.parametrize("matrices", [1, 9])
def test_the_sum_is_exact(matrices):
    """In any order that rounds, the small ones would be lost. Few rows of many matrices are summed together."""
    rows = torch.tensor([1e30, 1.0, -1e30, 3.0])
    for given in (rows, rows.flip(0), rows[[0, 2, 1, 3]]):
        all_rows = torch.rand(matrices, 4)
        all_rows[-1] = given
        found = expand(Factors(0, 1, 4, 1), all_rows.flatten(), torch.ones(matrices), 0, 4 * matrices)
        assert torch.equal(found.view(-1, 4)[-1], given)
        means = torch.tensor([math.fsum(each) for each in all_rows.tolist()], dtype=torch.float64) / 4
        assert torch.equal(found.view(-1, 4), (all_rows.double() / means[:, None]).float())


def test_sums_that_are_none_leave_the_elements_undefined():
    for rows, n in product(([math.inf, -math.inf], [math.nan, 1.0], [0.0, 0.0]), (1, 9)):
        assert expand(Factors(0, 1, 2, 3), torch.tensor(rows * n), torch.ones(3 * n), 0, 6 * n).isnan().all()
