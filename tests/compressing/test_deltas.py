"""Deltas of whole checkpoints: what comes back, what becomes a difference, and that nothing but the source shows."""

from __future__ import annotations

import pytest
import torch
from diff_kit import tensors_of as tensors
from disk_kit import flip_bit
from run_kit import SmallRun
from strict_reader import Strict

import ckpt8
from ckpt8.codecs import codec_from_config
from ckpt8.container.reader import ContainerReader
from ckpt8.core import backend
from ckpt8.core.arrays import as_tensors
from ckpt8.core.errors import InputError, OutputError, UsageError
from ckpt8.core.tensors import TensorSpec
from ckpt8.inspecting.container import inspect_container


@pytest.fixture(scope="module")
def states():
    """Checkpoints of one run, 40 steps from the first, then three steps apart."""
    run = SmallRun()
    return [run.advance(40), *(run.advance(3) for _ in range(3))]


def saved(tree, path, **options):
    return ckpt8.save(tree, path, **{"preset": "archive", **options})


def ids(manifest):
    return {record.codec["id"] for record in manifest.storages if record.base is not None}


def of(manifest, name):
    return next(record for record in manifest.storages if record.name == name)


def source_of(record, tree):
    return tensors(tree)[record.name].flatten()


def assert_equal(one, other):
    one, other = tensors(one), tensors(other)
    assert one.keys() == other.keys()
    for name, x in one.items():
        bits = [each.contiguous().flatten().view(torch.uint8) for each in (x, other[name])]
        assert torch.equal(*bits), name


@pytest.mark.slow
def test_a_delta_decodes_to_what_a_whole_file_on_its_lattice_does(states, tmp_path):
    key = saved(states[0], tmp_path / "0.ckpt8")
    assert key.base is None
    for k, tree in enumerate(states[1:], 1):
        manifest = saved(tree, tmp_path / f"{k}.ckpt8", base=tmp_path / f"{k - 1}.ckpt8")
        assert ids(manifest) >= {"lattice/1", "rclog/1"}
        found = tensors(ckpt8.load(tmp_path / f"{k}.ckpt8"))
        with ContainerReader(tmp_path / "0.ckpt8") as reader:
            names = {record.name: index for index, record in enumerate(reader.manifest.storages)}
            for record in (each for each in manifest.storages if each.base is not None):
                codec, x = codec_from_config(record.codec), source_of(record, tree)
                assert config_in(key, record) == record.codec
                factors = as_tensors(reader.read_parts(names[record.name], 0))
                parts = codec.encode(x, inherited=factors)
                expected = codec.decode(parts, TensorSpec("x", record.role, record.dtype, (record.numel,)))
                assert torch.equal(found[record.name].flatten(), expected), record.name


def config_in(manifest, record):
    return of(manifest, record.name).codec


@pytest.mark.slow
def test_a_delta_is_smaller_and_its_errors_are_those_of_its_budget(states, tmp_path):
    saved(states[0], tmp_path / "0.ckpt8")
    delta = saved(states[1], tmp_path / "delta.ckpt8", base=tmp_path / "0.ckpt8")
    whole = saved(states[1], tmp_path / "whole.ckpt8")
    shrunk = dict.fromkeys(("weight", "moment2"), 0)
    for one, other in zip(delta.storages, whole.storages, strict=True):
        if one.base is not None:
            shrunk[one.role.value] += other.stored_bytes - one.stored_bytes
            assert one.stored_bytes < other.stored_bytes
    assert min(shrunk.values()) > 0
    sums = [sum(each.steps["weight"] for each in manifest.parameters) for manifest in (delta, whole)]
    assert sums[0] <= 1.3 * sums[1]
    assert not ckpt8.verify(tmp_path / "delta.ckpt8").failures


@pytest.mark.slow
def test_no_delta_errs_by_more_than_the_budget(tmp_path):
    """The steps of the key become larger than those of a rate that decays; some deltas keep them."""
    run, found = SmallRun(), []
    run.advance(40)
    for k in range(5):
        run.set_rate(1e-3 * 0.95**k)
        manifest = saved(run.advance(3), tmp_path / f"{k}.ckpt8", base="auto" if k else None)
        found.append({each.name: each.codec for each in manifest.storages if each.codec["id"] == "lattice/1"})
        assert 0.9 < inspect_container(tmp_path / f"{k}.ckpt8")["steps"]["steps"] <= 1
    assert 1 < sum(each == found[0] for each in found) < 5


@pytest.mark.slow
def test_neither_threads_nor_kernels_nor_the_background_show(tmp_path, monkeypatch):
    run = SmallRun(sizes=(400, 640, 320))
    first, second = run.advance(20), run.advance(2)
    saved(first, tmp_path / "0.ckpt8")
    torch.save(second, tmp_path / "run.pt")
    content = set()
    for threads, least in ((1, 1 << 28), (4, 1 << 28), (2, 0)):
        monkeypatch.setattr(backend, "LEAST_FOR_NUMBA", least)
        target = tmp_path / "run.ckpt8"
        options = {"preset": "archive", "base": tmp_path / "0.ckpt8", "force": True, "stats": False}
        manifest = ckpt8.compress(tmp_path / "run.pt", target, threads=threads, **options)
        assert ids(manifest) >= {"lattice/1", "rclog/1"}
        content.add(target.read_bytes())
    assert len(content) == 1
    content.clear()
    for background in (False, True):
        pending = saved(second, tmp_path / "live.ckpt8", base="auto", background=background, threads=3)
        manifest = pending.result() if background else pending
        assert manifest.base.links == 1
        content.add((tmp_path / "live.ckpt8").read_bytes())
        (tmp_path / "live.ckpt8").unlink()
    assert len(content) == 1


def test_a_fine_tuning_run_in_bf16_is_kept_to_the_bit(tmp_path):
    run = SmallRun(dtype=torch.bfloat16, lr=1e-5)
    first, second = run.advance(30), run.advance(3)
    first, second = first["model"], second["model"]
    for k, tree in enumerate((first, second)):
        manifest = ckpt8.save(tree, tmp_path / f"{k}.ckpt8", preset="lossless", base="auto")
        assert_equal(ckpt8.load(tmp_path / f"{k}.ckpt8"), tree)
    assert ids(manifest) == {"lossless/1"}
    sizes = [(tmp_path / f"{k}.ckpt8").stat().st_size for k in range(2)]
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.slow
def test_first_moments_copies_and_what_shares_entries_stay_whole(states, tmp_path):
    for preset in ("flash", "lossless", "archive"):
        saved(states[0], tmp_path / "0.ckpt8", preset=preset)
        manifest = saved(states[1], tmp_path / "1.ckpt8", preset=preset, base=tmp_path / "0.ckpt8")
        assert all(each.base is None for each in manifest.storages if each.role.value == "moment1" or each.pack)
        assert manifest.base is not None
        restored = tensors(ckpt8.load(tmp_path / "1.ckpt8"))
        whole = saved(states[1], tmp_path / "whole.ckpt8", preset=preset)
        if preset != "archive":
            assert [each.codec for each in whole.storages] == [each.codec for each in manifest.storages]
            assert_equal(restored, tensors(ckpt8.load(tmp_path / "whole.ckpt8")))
        (tmp_path / "1.ckpt8").unlink()


def test_what_the_codec_of_the_base_refuses_is_kept_whole(states, tmp_path):
    saved(states[0], tmp_path / "0.ckpt8")
    for spoil in ("model", "exp_avg_sq"):
        tree = SmallRun()
        tree.load(states[1])
        tree = tree.checkpoint()
        where = tree["model"]["0.weight"] if spoil == "model" else tree["optimizer"]["state"][0]["exp_avg_sq"]
        where[80, 50] = 1e30 if spoil == "model" else -1.0
        manifest = saved(tree, tmp_path / f"{spoil}.ckpt8", base=tmp_path / "0.ckpt8")
        name = "model.0.weight" if spoil == "model" else "optimizer.state.0.exp_avg_sq"
        assert of(manifest, name).base is None
        assert of(manifest, name).reason
        assert of(manifest, "model.1.weight").base is not None
        found = tensors(ckpt8.load(tmp_path / f"{spoil}.ckpt8"))[name][80, 50]
        torch.testing.assert_close(found, where[80, 50], rtol=1e-4, atol=0)


@pytest.mark.slow
def test_a_run_resumed_from_the_lattice_of_the_base_gets_its_own(states, tmp_path):
    def save(tree, name, base=None):
        return ckpt8.save(tree, tmp_path / name, budget=5, base=base)

    key = save(states[0], "0.ckpt8")
    run = SmallRun()
    run.load(ckpt8.load(tmp_path / "0.ckpt8"))
    for steps in (0, 1, 1):
        tree = run.advance(steps)
        assert save(tree, "auto.ckpt8", "auto").base is None
        (tmp_path / "auto.ckpt8").unlink()
        explicit = save(tree, "explicit.ckpt8", tmp_path / "0.ckpt8")
        assert {"lattice/1"} <= ids(explicit) <= {"lattice/1", "lossless/1"}
        for record in explicit.storages:
            if record.codec["id"] == "lattice/1":
                assert record.codec["salt"] != config_in(key, record)["salt"]
        rebased = ckpt8.rebase(tmp_path / "explicit.ckpt8", tmp_path / "whole.ckpt8", force=True)
        assert_equal(ckpt8.load(tmp_path / "explicit.ckpt8"), ckpt8.load(rebased))
        (tmp_path / "explicit.ckpt8").unlink()
        rebased.unlink()
    # By now no weight is where it was decoded to.
    manifest = save(run.advance(20), "later.ckpt8", "auto")
    assert manifest.base is not None


@pytest.mark.slow
def test_a_step_that_the_budget_has_outgrown_makes_a_lattice_and_no_key(tmp_path):
    run = SmallRun()
    saved(run.advance(40), tmp_path / "0.ckpt8")
    run.set_rate(1e-3 * 0.8)
    tree = run.advance(3)
    delta = saved(tree, tmp_path / "1.ckpt8", base="auto")
    whole = saved(tree, tmp_path / "whole.ckpt8")
    weights = [each for each in delta.storages if each.codec["id"] == "lattice/1"]
    assert weights
    assert all(each.base is not None for each in weights)
    assert all(each.codec == config_in(whole, each) for each in weights)
    sizes = [sum(of(each, w.name).stored_bytes for w in weights) for each in (delta, whole)]
    assert sizes[0] < 0.8 * sizes[1]
    found = ckpt8.load(tmp_path / "1.ckpt8")["model"], ckpt8.load(tmp_path / "whole.ckpt8")["model"]
    assert_equal(*found)


def test_a_base_that_cannot_be_used_is_said_in_a_line(states, tmp_path):
    saved(states[0], tmp_path / "0.ckpt8")
    saved(states[1], tmp_path / "1.ckpt8", base=tmp_path / "0.ckpt8")
    with pytest.raises(InputError, match=r"none\.ckpt8"):
        saved(states[2], tmp_path / "2.ckpt8", base=tmp_path / "none.ckpt8")
    with pytest.raises(UsageError, match="needs this file"):
        saved(states[2], tmp_path / "1.ckpt8", base=tmp_path / "1.ckpt8")
    with pytest.raises((UsageError, OutputError)):
        saved(states[2], tmp_path / "0.ckpt8", base=tmp_path / "1.ckpt8")
    for wrong in (3, b"1.ckpt8", ["1.ckpt8"], ""):
        with pytest.raises(UsageError, match="base is"):
            saved(states[2], tmp_path / "2.ckpt8", base=wrong)
    with pytest.raises(UsageError, match="base_dirs is"):
        saved(states[2], tmp_path / "2.ckpt8", base="auto", base_dirs="folder")
    (tmp_path / "old").mkdir()
    (tmp_path / "0.ckpt8").rename(tmp_path / "old" / "0.ckpt8")
    with pytest.raises(InputError, match=r"1\.ckpt8: its base 0\.ckpt8 .* is missing"):
        saved(states[2], tmp_path / "2.ckpt8", base=tmp_path / "1.ckpt8")
    manifest = saved(states[2], tmp_path / "2.ckpt8", base=tmp_path / "1.ckpt8", base_dirs=[tmp_path / "old"])
    assert manifest.base.links == 2
    assert not (tmp_path / "old" / "2.ckpt8").exists()


@pytest.mark.slow
def test_a_base_in_another_folder_is_named_from_that_of_the_target(states, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    saved(states[0], tmp_path / "a" / "0.ckpt8")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    manifest = saved(states[1], tmp_path / "link" / "1.ckpt8", base=tmp_path / "a" / "0.ckpt8")
    assert manifest.base.path == "../a/0.ckpt8"
    assert ckpt8.load(tmp_path / "b" / "1.ckpt8").keys() == states[1].keys()


def damage(path):
    """Change a byte of the parts of a container, so that it still opens."""
    with ContainerReader(path) as reader:
        index = next(k for k, each in enumerate(reader.manifest.storages) if each.codec["id"] == "lattice/1")
        at = reader.places[index]["codes"].offsets[0]
    flip_bit(path, at + 5)


def test_damage_in_a_base_ends_the_chain_and_is_named_where_it_was_asked_for(states, tmp_path):
    saved(states[0], tmp_path / "0.ckpt8")
    damage(tmp_path / "0.ckpt8")
    with pytest.raises(InputError, match=r"0\.ckpt8: model\.[0-9.a-z]+: checksum"):
        saved(states[1], tmp_path / "1.ckpt8", base=tmp_path / "0.ckpt8")
    assert not (tmp_path / "1.ckpt8").exists()
    with pytest.warns(UserWarning, match=r"is stored whole.*0\.ckpt8"):
        assert saved(states[1], tmp_path / "1.ckpt8", base="auto").base is None
    assert not ckpt8.verify(tmp_path / "1.ckpt8").failures


@pytest.mark.slow
def test_a_reader_made_from_the_format_alone_reads_differences_of_either_kind(states, tmp_path):
    saved(states[0], tmp_path / "0.ckpt8")
    run = SmallRun()
    run.load(states[0])
    run.set_rate(1e-3 * 0.8)
    manifests = [saved(run.advance(2), tmp_path / f"{k}.ckpt8", base="auto") for k in (1, 2, 3)]
    salts = {of(manifest, "model.0.weight").codec["salt"] for manifest in manifests}
    assert 1 < len(salts) <= 3
    for k in (1, 2, 3):
        plain = Strict(tmp_path / f"{k}.ckpt8")
        restored = ckpt8.restore(tmp_path / f"{k}.ckpt8", tmp_path / "restored.pt", force=True).read_bytes()
        assert plain.original() == restored
