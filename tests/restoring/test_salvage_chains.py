"""Salvage of what needs other tensors: deltas, and first moments that are decoded with second ones."""

import pytest
import torch
from budget_kit import run_of
from chain_kit import chain, elements
from flips_kit import places
from test_salvage import FRAME, assert_all_but, damage, loaded, own_entries

import ckpt8
from ckpt8.core.errors import InputError

W, M, V = "model.layers.0.weight", "optimizer.state.0.exp_avg", "optimizer.state.0.exp_avg_sq"
W1, M1, V1 = (name.replace("0", "1", 1) for name in (W, M, V))
NEEDING = {W, W1, V, V1, M, M1, "optimizer.state.0.step", "optimizer.state.1.step"}
"""What is a difference, or is decoded with one."""


@pytest.fixture
def files(tmp_path):
    """A key and two deltas, and what the last one restores to."""
    with own_entries():
        found = chain(tmp_path, 3)[0]
    ckpt8.restore(found[-1], tmp_path / "whole.pt")
    return found


def test_what_needs_a_missing_base_is_named_and_the_rest_saved(files, tmp_path, run_command):
    files[0].unlink()
    said = f"ckpt8: {files[2]}: not everything in it was recovered for certain\n"  # it is not damaged itself
    assert run_command("restore", files[2], "-o", tmp_path / "y.pt", "--salvage")[::2] == (1, said)
    found = ckpt8.restore(files[2], tmp_path / "x.pt", salvage=True)
    assert not found.complete
    assert "is missing; looked for" in found.base
    assert found.base in found.lines()
    assert found.to_json()["base"] == found.base
    assert found.damage is None
    assert {each.name for each in found.lost} == NEEDING
    assert_all_but(NEEDING, tmp_path / "x.pt", tmp_path / "whole.pt")
    assert all(loaded(tmp_path / "x.pt")[name].isnan().all() for name in NEEDING)


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize(("part", "lost"), [(f"{W}/codes", {W}), (f"{V}/codes", {V, M}), (f"{V1}/rows", {V1, M1})])
def test_damage_anywhere_in_a_chain_loses_what_is_added_to_it(index, part, lost, files, tmp_path):
    damage(files[index], files[index], part)
    with pytest.raises(InputError, match=rf"{files[index].name}: .*: checksum does not match"):
        ckpt8.verify(files[2])
    found = ckpt8.restore(files[2], tmp_path / "x.pt", salvage=True)
    assert {each.name for each in found.lost} == lost
    assert_all_but(lost, tmp_path / "x.pt", tmp_path / "whole.pt")


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_first_moments_of_a_base_are_not_needed(index, files, tmp_path):
    damage(files[index], files[index], f"{M}/codes")
    assert ckpt8.verify(files[2]).failures == ()
    assert ckpt8.restore(files[2], tmp_path / "x.pt", salvage=True).complete


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("where", [("header", 300), ("ckpt8.manifest", 40)])
def test_a_base_whose_header_is_damaged_loses_nothing_that_can_be_read(index, where, files, tmp_path):
    """Without the manifest of the base there is none."""
    damage(files[index], files[index], where)
    with pytest.raises(InputError, match=rf"damaged: header or manifest of \S*{files[index].name} does not match"):
        ckpt8.verify(files[2])
    found = ckpt8.restore(files[2], tmp_path / "x.pt", salvage=True)
    assert not found.complete
    assert files[index].name in found.base
    lost = {each.name for each in found.lost}
    assert lost == (set() if where[0] == "header" else NEEDING)
    assert_all_but(lost, tmp_path / "x.pt", tmp_path / "whole.pt")


@pytest.mark.slow
def test_verify_names_the_links(files):
    assert ckpt8.verify(files[2]).links == (str(files[1]), str(files[0]))
    assert ckpt8.verify(files[0]).links == ()
    assert set(elements(files[2])) >= NEEDING


# Under a budget


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
