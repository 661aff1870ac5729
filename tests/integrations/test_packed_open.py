"""``ckpt8.open`` of a packed directory gives whole tensors of all ranks, one by one; what memory its readers take."""

from __future__ import annotations

import shutil

import pytest
import torch
from dcp_kit import load_all, read_metadata, save_in_pieces
from memory_kit import run_measured
from packed_kit import load, pack, save, save_sliced
from sharded_kit import network

import ckpt8
from ckpt8 import InputError, UnsupportedError, UsageError
from ckpt8.integrations.dcp.sharing import compress_share

pytestmark = pytest.mark.filterwarnings("ignore")


def make_state():
    model = network()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=1e-2)
    for _ in range(3):
        model(torch.randn(8, 96)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    moments = optimizer.state_dict()
    names = [name for name, _ in model.named_parameters()]
    moments["state"] = {names[number]: state for number, state in moments["state"].items()}
    moments["param_groups"][0]["params"] = names
    counts = torch.arange(5000, dtype=torch.int16).view(50, 100)
    return {
        "model": model.state_dict(),
        "optimizer": moments,
        "progress": {"seen": 7, "counts": counts, "half": counts.bfloat16(), "truth": counts % 3 == 0},
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One state as the plain directory of torch, and packed by two ranks with each preset."""
    folder = tmp_path_factory.mktemp("open")
    plain = save_sliced(make_state(), folder / "plain")
    for preset in ("lossless", "flash"):
        pack(plain, folder / preset, preset=preset)
    pack(plain, folder / "budget", budget=1.0)
    return folder


def tensors_of(plain):
    return {name: value for name, value in load_all(plain).items() if isinstance(value, torch.Tensor)}


def test_a_slice_of_several_chunks_goes_to_its_columns(tmp_path):
    wide = torch.arange(1500 * 3000, dtype=torch.int32).view(1500, 3000)
    boxes = [((0, 0), (1500, 1600)), ((0, 1600), (1500, 1400))]
    plain = save_in_pieces({"wide": (wide, boxes)}, tmp_path / "plain")
    with ckpt8.open(pack(plain, tmp_path / "packed", preset="lossless")) as file:
        assert torch.equal(file.get_tensor("wide"), wide)


@pytest.mark.parametrize("preset", ["flash", "budget"])
def test_lossy_slices_are_those_that_torch_loads_with_our_reader(saved, preset):
    empty = {name: torch.empty_like(value) for name, value in tensors_of(saved / "plain").items()}
    expected = load(empty, saved / preset)
    with ckpt8.open(saved / preset) as file:
        assert sorted(file.keys()) == sorted(expected)
        for name, value in expected.items():
            assert torch.equal(file.get_tensor(name), value), name


def test_stats_are_those_of_all_slices(saved, tmp_path):
    ckpt8.compress(saved / "plain", tmp_path / "one.ckpt8", preset="flash")
    name = "optimizer.state.0.weight.exp_avg_sq"
    with ckpt8.open(saved / "flash") as file, ckpt8.open(tmp_path / "one.ckpt8") as one:
        mine = file.stats(name)
        keys = one.keys()
        theirs = [one.stats(key) for key in keys if f"{name}[" in key]
        assert len(theirs) == mine["slices"] == len(file._joined.index.tensors[name].boxes()) > 1
        assert mine["role"] == "moment2"
        assert mine["codec"] == theirs[0]["codec"]
        assert mine["elements"] == 289 * 96
        assert mine["bytes"] == 4 * 289 * 96
        assert mine["parts"].keys() == theirs[0]["parts"].keys()
        assert mine["stored_bytes"] == sum(mine["parts"].values())
        exact, found = tensors_of(saved / "plain")[name].double(), file.get_tensor(name).double()
        nmse = float((found - exact).square().sum() / exact.square().sum())
        assert mine["error"]["nmse"] == pytest.approx(nmse, rel=1e-3)
        assert file.stats("progress.counts")["error"] is None
        assert file.manifest.preset == "flash"


def test_only_the_slices_of_a_tensor_are_read(saved, tmp_path):
    folder = tmp_path / "x"
    shutil.copytree(saved / "lossless", folder)
    name, other = "model.2.weight", "model.0.weight"
    with ckpt8.open(folder) as file:
        joined = file._joined
        box = joined.index.tensors[other].boxes()[0]
        reader = joined.by_name[box.file]
        place = next(iter(reader.places[joined.slices[box.file][other, box.offsets].storage].values())).offsets[0]
    content = bytearray((folder / box.file).read_bytes())
    content[place + 5] ^= 1
    (folder / box.file).write_bytes(content)
    with ckpt8.open(folder) as file:
        assert torch.equal(file.get_tensor(name), tensors_of(saved / "plain")[name])
        with pytest.raises(InputError, match=rf"{box.file}: .*checksum does not match"):
            file.get_tensor(other)


def test_what_it_does_not_give_is_one_line(saved, tmp_path):
    with ckpt8.open(saved / "flash") as file:
        with pytest.raises(UsageError, match="has no tensor 'model'"):
            file.get_tensor("model")
        with pytest.raises(UnsupportedError, match=r"'progress\.seen' is kept as torch\.save writes it.*ckpt8\.load"):
            file.stats("progress.seen")
    state = {"empty": torch.zeros(0, 3), "sparse": torch.eye(3).to_sparse(), "scalar": torch.tensor(3.5)}
    save(state, tmp_path / "x")
    with ckpt8.open(tmp_path / "x") as file:
        assert file.keys() == ["empty", "scalar"]
        assert file.get_tensor("empty").shape == (0, 3)
        assert file.stats("empty")["slices"] == 0
        assert file.get_tensor("scalar").item() == 3.5
        with pytest.raises(UnsupportedError, match=r"ckpt8\.load"):
            file.get_tensor("sparse")
    (tmp_path / "x" / "__0_0.ckpt8").unlink()
    with pytest.raises(InputError, match="is missing"):
        ckpt8.open(tmp_path / "x")


# Other readers hold at most 300 MB above what importing takes, whatever the checkpoint's size


WIDTH = 3584
BOUND = 300e6

SETUP = """import ckpt8.converting.convert, ckpt8.converting.writers.torch_zip
import ckpt8.restoring.sharded, ckpt8.inspecting.verify"""
CODE = {
    "convert": 'ckpt8.convert(sys.argv[1], sys.argv[3], to="torch", threads=2)',
    "restore": "ckpt8.restore(sys.argv[1], sys.argv[3], threads=2)",
    "verify": "assert not ckpt8.verify(sys.argv[1], sys.argv[2], threads=2).failures",
    "diff": "assert ckpt8.diff(sys.argv[1], sys.argv[2], threads=2).identical",
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """616 MB of weights in boxes of columns: the plain directory, and the packed one."""
    folder = tmp_path_factory.mktemp("large")
    wide = torch.randn(WIDTH, 3 * WIDTH)
    boxes = [((0, k * WIDTH // 2), (WIDTH, WIDTH // 2)) for k in range(6)]
    plain = save_in_pieces({f"model.{k}.weight": (wide, boxes) for k in range(4)}, folder / "plain")
    compress_share(plain, folder / "packed", {"preset": "lossless", "stats": False}, 0, 1, overwrite=False)
    return folder / "packed", plain


@pytest.mark.slow
@pytest.mark.parametrize("action", ["convert", "restore", "verify", "diff"])
def test_memory_is_bounded(directories, tmp_path, action):
    found = run_measured(SETUP, f"{CODE[action]}\nfound = {{}}", *directories, tmp_path / "out")
    assert found["extra"] < BOUND


@pytest.mark.slow
def test_every_tensor_is_the_one_that_torch_gives(saved):
    expected = tensors_of(saved / "plain")
    with ckpt8.open(saved / "lossless") as file:
        # In the order of the state dict, which is that of torch's planner.
        assert file.keys() == [name for name in read_metadata(saved / "plain").planner_data if name in expected]
        for name, value in expected.items():
            found = file.get_tensor(name)
            assert (found.dtype, found.shape, found.is_contiguous()) == (value.dtype, value.shape, True)
            assert torch.equal(found, value), name
