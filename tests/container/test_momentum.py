"""First moments on a lattice: containers, packs and deltas against FORMAT.md, and hostile ones."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from hostile_kit import bounded, edited, fields, put, unpack
from strict_reader import Strict
from test_damage import exercise

import ckpt8
from ckpt8.container.reader import ContainerReader
from ckpt8.core import backend
from ckpt8.core.errors import InputError, UnsupportedError

M = "optimizer.state.0.momentum_buffer"
RATE, MOMENTUM = 0.02, 0.95


def states(*steps, dtype=torch.float32, sizes=((260, 300), (64, 65))):
    """Checkpoints of SGD with momentum after so many steps; a row of each matrix never gets a gradient."""
    generator = torch.Generator().manual_seed(0)
    layers = [torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in sizes]
    optimizer, found = torch.optim.SGD(layers, lr=RATE, momentum=MOMENTUM, nesterov=True), []
    for step in range(max(steps)):
        for w in layers:
            w.grad = torch.randn(w.shape, generator=generator).to(dtype) * 1e-3
            w.grad[3] = 0
        optimizer.step()
        if step + 1 in steps:
            model = {str(k): w.detach() for k, w in enumerate(layers)}
            found.append(copy.deepcopy({"model": model, "optimizer": optimizer.state_dict()}))
    return found


def saved(tree, path, *, k=-50, salt=7, **options):
    torch.save(tree, path.parent / "run.pt")
    rules = [f"*.momentum_buffer=lattice2(k={k}, salt={salt})"]
    return ckpt8.compress(path.parent / "run.pt", path, rules=rules, **options)


def agrees(path, tree):
    """The container, read from the specification alone, after a check that moments are at most half a step away."""
    plain = Strict(path)
    assert ckpt8.restore(path, path.with_suffix(".back"), force=True).read_bytes() == plain.original()
    assert plain.manifest["version"] == "1.7"
    assert not ckpt8.verify(path).failures
    found = 0
    for record in plain.records.values():
        storage = plain.storages[record["storage"]]
        if storage["codec"]["id"] != "lattice/2":
            assert storage["role"] != "moment1"
            continue
        decoded, index = plain.tensor(record), int(record["name"].split(".")[2])
        original = tree["optimizer"]["state"][index]["momentum_buffer"]
        with ckpt8.open(path) as file:
            assert torch.equal(file.get_tensor(record["name"]), decoded)
        error = (decoded.double() - original.double()).abs()
        assert bool((error <= 2 ** (storage["codec"]["k"] / 4) * (0.5 + 1e-3) + original.double().abs() / 256).all())
        assert bool((error > 0).any())
        assert torch.equal(decoded[3].view(torch.uint8), torch.zeros_like(decoded[3]).view(torch.uint8))
        found += 1
    assert found == len(tree["optimizer"]["state"])
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_momentum_comes_back_as_the_specification_says_from_either_engine(dtype, tmp_path, monkeypatch):
    (tree,), content = states(20, dtype=dtype), set()
    for least in (0, 1 << 28):
        monkeypatch.setattr(backend, "LEAST_FOR_NUMBA", least)
        saved(tree, tmp_path / "x.ckpt8", force=True)
        agrees(tmp_path / "x.ckpt8", tree)
        content.add((tmp_path / "x.ckpt8").read_bytes())
    assert len(content) == 1


def test_small_buffers_share_entries(tmp_path):
    (tree,) = states(20, sizes=[(5, 7 + k) for k in range(60)])
    manifest = saved(tree, tmp_path / "x.ckpt8")
    assert all(each.pack is not None for each in manifest.storages if each.codec["id"] == "lattice/2")
    agrees(tmp_path / "x.ckpt8", tree)


def test_files_without_it_state_an_earlier_version(tmp_path):
    (tree,) = states(20)
    assert ckpt8.save(tree, tmp_path / "x.ckpt8").version < "1.7"


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """The folder of a key, a delta on its lattice and one on another, and their checkpoints."""
    folder, trees = tmp_path_factory.mktemp("chain"), states(60, 62, 64)
    for name, tree, base, settings in (
        ("key", trees[0], None, {}),
        ("same", trees[1], "key", {}),
        ("other", trees[2], "same", {"k": -53, "salt": 8}),
    ):
        saved(tree, folder / f"{name}.ckpt8", base=base and folder / f"{base}.ckpt8", **settings)
        saved(tree, folder / f"whole-{name}.ckpt8", **settings)
    return folder, dict(zip(("key", "same", "other"), trees, strict=True))


@pytest.mark.parametrize("name", ["same", "other"])
def test_differences_are_smaller_and_decode_to_what_the_whole_file_does(name, chain):
    folder, trees = chain
    plain = agrees(folder / f"{name}.ckpt8", trees[name])
    with ContainerReader(folder / f"{name}.ckpt8") as delta, ContainerReader(folder / f"whole-{name}.ckpt8") as whole:
        for own, other in zip(delta.manifest.storages, whole.manifest.storages, strict=True):
            if own.codec["id"] == "lattice/2":
                assert own.codec == other.codec
                assert own.base is not None
                assert own.stored_bytes < 0.9 * other.stored_bytes
    assert plain.original() == ckpt8.restore(folder / f"whole-{name}.ckpt8", folder / "back", force=True).read_bytes()
    ckpt8.rebase(folder / f"{name}.ckpt8", folder / "rebased.ckpt8", force=True)
    restored = [ckpt8.restore(folder / f"{each}.ckpt8", folder / "back", force=True) for each in ("rebased", name)]
    assert restored[0].read_bytes() == restored[1].read_bytes()


def test_a_step_near_that_of_the_base_is_continued(chain, tmp_path):
    folder, trees = chain
    manifest = saved(trees["same"], tmp_path / "x.ckpt8", k=-51, salt=8, base=folder / "key.ckpt8")
    found = [each for each in manifest.storages if each.codec["id"] == "lattice/2"]
    assert {(each.codec["k"], each.codec["salt"]) for each in found} == {(-50, 7)}
    assert all(each.base is not None for each in found)
    agrees(tmp_path / "x.ckpt8", trees["same"])


def test_a_lattice_of_weights_is_no_base_for_momentum(chain, tmp_path):
    folder, _ = chain
    parts = unpack((folder / "same.ckpt8").read_bytes())
    change = fields(
        "storages", M, role="weight", codec=lambda own: {**own, "codec": {**own["codec"], "id": "lattice/1"}}
    )
    path = edited(parts, change, folder / "hostile.ckpt8")
    with pytest.raises(InputError, match=rf"{re.escape(M)}: has a partner with another codec"):
        ckpt8.verify(path)
    path.unlink()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    folder = tmp_path_factory.mktemp("small")
    torch.save(states(20, sizes=((64, 65), (64, 65)))[0], folder / "a.pt")
    ckpt8.compress(folder / "a.pt", rules=["*.momentum_buffer=lattice2(k=-50)"], threads=1)
    return folder / "a.pt"


@pytest.fixture(scope="module")
def parts(small):
    return unpack(small.with_suffix(".ckpt8").read_bytes())


codec = partial(fields, "storages", M, "codec")
REFUSED = {
    **{f"the role {role}": put("storages", M, "role", role) for role in ("weight", "moment2", "other")},
    **{f"elements of {dtype}": put("storages", M, "dtype", dtype) for dtype in ("int32", "float16")},
    "no modes": put("storages", M, "parts", "codes", "modes", []),
    "k too large": codec(k=401),
    "k of another type": codec(k=-50.0),
    "a salt below zero": codec(salt=-1),
    "one field more": codec(step=1),
    "a lattice of a later version": codec(id="lattice/3"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_sound_is_refused_in_a_line(name, parts, small, tmp_path):
    path = edited(parts, REFUSED[name], tmp_path / "x.ckpt8")
    with bounded(), pytest.raises((InputError, UnsupportedError)) as caught:
        ckpt8.verify(path, threads=1)
    assert len(str(caught.value)) < 500
    exercise(path, small, tmp_path)
