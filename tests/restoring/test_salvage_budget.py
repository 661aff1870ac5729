"""Salvage of containers under a budget: what is lost with a tensor is what is decoded from it, and nothing else."""

from __future__ import annotations

import pytest
import torch
from budget_kit import run_of
from flips_kit import places
from test_salvage import FRAME, assert_all_but, damage, loaded, own_entries

import ckpt8
from ckpt8.core.errors import InputError

W, M, V = "model.layers.0.weight", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq"


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A container of two parameters under a budget, and what it restores to."""
    folder = tmp_path_factory.mktemp("budget")
    torch.save(run_of([(96, 80), (70, 64)]), folder / "run.pt")
    with own_entries():
        ckpt8.compress(folder / "run.pt", preset="archive")
    ckpt8.restore(folder / "run.ckpt8", folder / "whole.pt")
    return folder / "run.ckpt8"


@pytest.mark.parametrize(
    ("part", "lost"),
    [(f"{W}/codes", {W}), (f"{M}/codes", {M}), (f"{V}/codes", {V, M}), (f"{V}/rows", {V, M}), (f"{V}/columns", {V, M})],
)
def test_first_moments_are_lost_with_the_second_ones_that_they_need(part, lost, sample, tmp_path):
    path = damage(sample, tmp_path / "x.ckpt8", part)
    with pytest.raises(InputError, match="checksum"):
        ckpt8.restore(path, tmp_path / "y.pt")
    found = ckpt8.restore(path, tmp_path / "x.pt", salvage=True)
    assert {each.name for each in found.lost} == lost
    assert_all_but(lost, tmp_path / "x.pt", sample.with_name("whole.pt"))
    assert all(loaded(tmp_path / "x.pt")[name].isnan().all() for name in lost)


@pytest.mark.parametrize("place", [0, 293, 1758])
def test_a_damaged_header_loses_nothing(place, sample, tmp_path):
    """Entries are found again by their first frames, which hold digits."""
    path = damage(sample, tmp_path / "x.ckpt8", ("header", place), bits=3)
    found = ckpt8.restore(path, tmp_path / "x.pt", salvage=True)
    assert found.damage is not None
    assert found.lost == []
    assert_all_but(set(), tmp_path / "x.pt", sample.with_name("whole.pt"))


@pytest.mark.slow
def test_a_lost_chunk_leaves_the_others_of_its_storage(tmp_path):
    torch.save(run_of([(1500, 1024)]), tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt", preset="archive")
    ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "whole.pt")
    stop = next(b - a for name, a, b in places((tmp_path / "run.ckpt8").read_bytes()) if name == f"{V}/codes")
    path = damage(tmp_path / "run.ckpt8", tmp_path / "x.ckpt8", (f"{V}/codes", stop - 9))
    found = ckpt8.restore(path, tmp_path / "x.pt", salvage=True)
    assert {each.name for each in found.lost} == {V, M}
    before, after = loaded(tmp_path / "whole.pt"), loaded(tmp_path / "x.pt")
    for name in (V, M):
        assert torch.equal(after[name].flatten()[:FRAME], before[name].flatten()[:FRAME])
        assert bool(after[name].flatten()[FRAME:].isnan().all())
    assert torch.equal(after[W], before[W])
