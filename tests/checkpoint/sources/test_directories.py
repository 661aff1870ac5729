"""Directories: there and back, member by member, through every entry point."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest
import torch
from members_kit import LAYERS, make_directory, model, optimizer, tree
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt8
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError, InputError, OutputError, UsageError
from ckpt8.core.files import source_file as pool
from ckpt8.core.files.source_file import ByteRange
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container


@pytest.fixture
def root(tmp_path):
    """An empty folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
ENCODED = {*SHARDS, "optimizer.pt", "extra/old.pt"}


def test_lossless_gives_the_same_directory(run_directory, containers, tmp_path):
    before = tree(run_directory)
    target = ckpt8.restore(containers["lossless"], tmp_path / "back")
    assert tree(target) == before == tree(run_directory)
    assert [path.name for path in tmp_path.iterdir()] == ["back"]


def test_flash_changes_only_what_it_encodes_and_every_library_loads_it(run_directory, containers, tmp_path):
    target = ckpt8.restore(containers["flash"], tmp_path / "back")
    before, after = tree(run_directory), tree(target)
    assert {path for path in before if before[path] != after[path]} == ENCODED
    assert set(before) == set(after)
    for shard in SHARDS:
        original, restored = load_file(run_directory / shard), load_file(target / shard)
        assert list(original) == list(restored)
        for name, tensor in original.items():
            torch.testing.assert_close(restored[name], tensor, rtol=2e-5, atol=0)
        with safe_open(target / shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    state = torch.load(target / "optimizer.pt")["state"]
    assert state[0]["step"] == 7
    assert torch.load(target / "extra" / "old.pt")["ema"]["w"].shape == (80, 80)


def test_load_gives_what_each_library_gives(run_directory, containers):
    path = containers["lossless"]
    loaded = ckpt8.load(path, member=SHARDS[0])
    expected = load_file(run_directory / SHARDS[0])
    assert list(loaded) == list(expected)
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)
    assert ckpt8.load(path, member="extra/scheduler.bin")["last_epoch"] == 3
    assert torch.equal(ckpt8.load(path, member="extra/scheduler.bin", unpack=True)["seen"], torch.arange(10))
    assert next(iter(ckpt8.load(path, member=SHARDS[0], map_location="meta").values())).is_meta
    with pytest.raises(UsageError, match="takes a device"):
        ckpt8.load(path, member=SHARDS[0], map_location=lambda storage, _: storage)


def test_a_member_must_be_named(containers):
    with pytest.raises(UsageError, match=r"has \d+ members; give member= one of .*optimizer\.pt"):
        ckpt8.load(containers["flash"])
    with pytest.raises(UsageError, match="has no member 'x'"):
        ckpt8.load(containers["flash"], member="x")
    with pytest.raises(UsageError, match=r"'config\.json' is no checkpoint"):
        ckpt8.load(containers["flash"], member="config.json")


def test_the_only_checkpoint_needs_no_name(tmp_path):
    """As ``save_pretrained`` writes it."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    layer = torch.nn.Linear(70, 70)
    save_file(layer.state_dict(), tmp_path / "model" / "model.safetensors")
    ckpt8.compress(tmp_path / "model", preset="lossless")
    resumed = torch.nn.Linear(70, 70)
    assert ckpt8.resume(tmp_path / "model.ckpt8", model=resumed) == {}
    assert torch.equal(resumed.weight, layer.weight)
    assert torch.equal(ckpt8.load(tmp_path / "model.ckpt8")["bias"], layer.bias)


def stepped(parameters):
    """An AdamW after a step."""
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    adam = torch.optim.AdamW(parameters)
    adam.step()
    return adam


Net = partial(torch.nn.Linear, 64, 96)


@pytest.mark.parametrize("source", ["container", "directory"])
def test_resume_from_members(source, root, tmp_path):
    torch.manual_seed(0)
    net, other = Net(), Net()
    first, second = stepped(net.parameters()), torch.optim.AdamW(other.parameters())
    save_file(net.state_dict(), root / "model.safetensors")
    torch.save({"optimizer": first.state_dict(), "epoch": 3}, root / "optimizer.pt")
    path = root
    if source == "container":
        ckpt8.compress(root, preset="lossless")
        path = tmp_path / "run.ckpt8"
    assert ckpt8.resume(path, model=other, member="model.safetensors") is not None
    assert ckpt8.resume(path, optimizer=second, member="optimizer.pt")["epoch"] == 3
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), other.parameters(), strict=True))
    assert torch.equal(first.state[net.weight]["exp_avg"], second.state[other.weight]["exp_avg"])
    with pytest.raises((UsageError, InputError)):
        ckpt8.resume(path, model=other)


def test_damage_in_another_member_does_not_keep_from_resuming(root, tmp_path):
    net = Net()
    save_file(net.state_dict(), root / "model.safetensors")
    (root / "noise.bin").write_bytes(os.urandom(5000))
    ckpt8.compress(root)
    path = tmp_path / "run.ckpt8"
    data = bytearray(path.read_bytes())
    with ContainerReader(path) as reader:
        record = next(m for m in reader.manifest.members if m.path == "noise.bin")
        offset = reader.places[record.skeleton]["bytes"].offsets[0]
    data[offset + 10] ^= 1
    path.write_bytes(data)
    ckpt8.resume(path, model=Net(), member="model.safetensors")
    with pytest.raises(InputError, match=r"noise\.bin"):
        ckpt8.verify(path)
    with pytest.raises(InputError, match=r"noise\.bin"):
        ckpt8.restore(path, tmp_path / "back")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "run.ckpt8"]


# Names of parameters from the weights beside the optimizer


def test_names_are_told_where_the_order_is_known(containers, run_directory):
    facts = inspect_container(containers["flash"], tensors=True)
    names = [parameter["name"].removeprefix("optimizer.pt:") for parameter in facts["parameters"]]
    layers = [f"layers.{k}.up.weight" for k in range(LAYERS)]
    # The two vectors have one shape and nothing that orders them.
    assert names == ["embed.weight", *layers, f"state.{LAYERS + 1}", f"state.{LAYERS + 2}"]
    assert {row["name"].partition(":")[0] for row in facts["worst"]["update"]} == {"optimizer.pt"}


# Other sources


@pytest.mark.parametrize("given", [".", "", "../run", "deep/..", "../run/"])
def test_a_directory_has_its_name_however_it_is_given(given, tmp_path, monkeypatch):
    root = tmp_path / "run"
    (root / "deep").mkdir(parents=True)
    save_file({"w": torch.randn(80, 80)}, root / "w")
    monkeypatch.chdir(root)
    if given in (".", "deep/.."):  # nobody expects a file beside the folder
        with pytest.raises(UsageError, match="would go beside the folder"):
            ckpt8.compress(given)
        assert ckpt8.compress(given, tmp_path / "run.ckpt8").directory == "run"
    else:
        assert ckpt8.compress(given or root).directory == "run"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run.ckpt8"]


RUNS = {
    "files": ["step-10.pt", "step-20.pt"],
    "epochs": ["epoch=1.ckpt", "epoch=2.ckpt"],
    "folders": ["checkpoint-500/model.safetensors", "checkpoint-1000/model.safetensors"],
    "raw and packed": ["last.pt", "last.ckpt8"],
}
NO_RUNS = {
    "one checkpoint": ["model.safetensors", "optimizer.pt", "trainer_state.json"],
    "shards": ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
    "a pipeline": ["unet/model.safetensors", "vae/model.safetensors"],
    "two networks of a step": ["net_g_1000.pth", "net_d_1000.pth"],
    "one step": ["step-10.pt"],
}


@pytest.mark.parametrize("names", [*RUNS.values(), *NO_RUNS.values()], ids=[*RUNS, *NO_RUNS])
def test_the_folder_of_a_run_is_packed_into_one_file_only_by_name(names, tmp_path, run_command, monkeypatch):
    """Who gives it means ``chain``."""
    for name in names:
        path = tmp_path / "run" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith(".ckpt8"):
            ckpt8.save({"w": torch.ones(80, 80)}, path)
        elif name.endswith(".json"):
            path.write_text("{}")
        else:
            write = save_file if name.endswith("safetensors") else torch.save
            write({"w": torch.ones(80, 80)}, path)
    code, out, err = run_command("compress", tmp_path / "run")
    if names in NO_RUNS.values():
        assert (code, err) == (0, "")
        return
    assert (code, out) == (2, "")
    said = " ".join(run_command.shown("inspect", tmp_path / "run").split())
    assert "the folder of a run (" in said
    assert "lists them, and inspect takes one of them" in said
    assert f"ckpt8 chain {tmp_path / 'run'} compresses each" in err
    monkeypatch.chdir(tmp_path / "run")
    assert "ckpt8 chain . compresses each" in run_command("compress", ".")[2]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert run_command("compress", tmp_path / "run", "-o", tmp_path / "all.ckpt8")[0] == 0


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_what_no_reader_reads_is_kept_with_the_reason(root, tmp_path):
    save_file({"w": torch.randn(80, 80)}, root / "model.safetensors")
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), root / "script.pt")
    with (root / "half.distcp").open("wb") as file:  # two zip files in one
        torch.save(torch.ones(1), file)
        torch.save(torch.ones(2), file)
    ckpt8.compress(root)
    facts = inspect_container(tmp_path / "run.ckpt8")
    reasons = {row["names"][0]: row["reason"] for row in facts["lossless"]}
    assert "TorchScript" in reasons["script.pt:ckpt8.skeleton"]
    assert "distributed checkpoint" in reasons["half.distcp:ckpt8.skeleton"]
    assert tree(ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "b"))["script.pt"] == (root / "script.pt").read_bytes()
    raw = {m["path"]: m["reason"] for m in inspect_checkpoint(root)["members"]}
    assert "TorchScript" in raw["script.pt"]
    assert raw["model.safetensors"] is None


def test_damage_is_refused_with_the_name_of_the_member(tmp_path):
    root = make_directory(tmp_path / "run")
    whole = (root / "optimizer.pt").read_bytes()
    for damaged in (whole[: len(whole) // 2], whole.replace(b"exp_avg_sq", b"exp_avg_sr", 1)):
        (root / "optimizer.pt").write_bytes(damaged)
        with pytest.raises(InputError, match=r"optimizer\.pt") as caught:
            ckpt8.compress(root)
        assert "\n" not in str(caught.value)
    (root / "optimizer.pt").write_bytes(whole)
    shard = root / SHARDS[0]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InputError, match=f"{SHARDS[0]}: cut off"):
        ckpt8.compress(root)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_links_that_lead_out(root, tmp_path):
    save_file({"w": torch.randn(80, 80)}, tmp_path / "blob")
    (root / "model.safetensors").symlink_to(tmp_path / "blob")
    (root / "other").symlink_to("../blob")
    manifest = ckpt8.compress(root)
    assert {m.path: m.format for m in manifest.members} == dict.fromkeys(("model.safetensors", "other"), "safetensors")
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    assert not (back / "model.safetensors").is_symlink()
    (root / "bad").symlink_to(".")
    ckpt8.compress(root, force=True)
    for target in ("/etc", "../nothing"):
        (root / "bad").unlink()
        (root / "bad").symlink_to(target)
        with pytest.raises(InputError, match="a link that leads out of the directory, and to no file"):
            ckpt8.compress(root, force=True)


def test_where_a_link_leads_is_text(root):
    """The manifest states the target of a link that stays inside, whether anything is there or not."""
    target = os.fsdecode(b"blob\xff")
    (root / "link").symlink_to(target)
    save_file({"w": torch.randn(80, 80)}, root / "model.safetensors")
    with pytest.raises(InputError, match="link: the target of the link is not valid UTF-8; make the link again"):
        ckpt8.compress(root)
    assert sorted(path.name for path in root.parent.iterdir()) == [root.name]


def test_what_a_directory_may_not_hold(root):
    with pytest.raises(InputError, match="an empty directory"):
        ckpt8.compress(root)
    (root / "a.txt").write_text("x")
    with pytest.raises(InputError, match="holds no tensors"):
        ckpt8.compress(root)
    os.mkfifo(root / "pipe")
    with pytest.raises(InputError, match="pipe: is neither a file nor a directory nor a link"):
        ckpt8.compress(root)
    (root / "pipe").unlink()
    Path(os.fsdecode(os.fsencode(root) + b"/\xff")).touch()
    with pytest.raises(InputError, match="is not valid UTF-8; rename it"):
        ckpt8.compress(root)


def test_a_name_that_is_not_utf8_is_refused_before_anything_is_written(tmp_path):
    """A container states the name of its original, and no reader takes one that is no text."""
    name, tree = os.fsdecode(b"run\xff"), {"w": torch.ones(70, 70)}
    (tmp_path / name).mkdir()
    torch.save(tree, tmp_path / name / "model.pt")
    torch.save(tree, tmp_path / f"{name}.pt")
    before = sorted(tmp_path.rglob("*"))
    for source in (name, f"{name}.pt"):
        with pytest.raises(InputError, match="its name is not valid UTF-8"):
            ckpt8.compress(tmp_path / source, tmp_path / "out.ckpt8")
    for background in (False, True):
        with pytest.raises(UsageError, match="is not valid UTF-8"):
            ckpt8.save(tree, tmp_path / f"{name}.ckpt8", background=background)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_output_may_not_lie_in_the_directory(run_directory):
    before = tree(run_directory)
    with pytest.raises(OutputError, match="lies in the directory"):
        ckpt8.compress(run_directory, run_directory / "x.ckpt8")
    assert tree(run_directory) == before


@pytest.mark.parametrize("change", ["grows", "appears", "vanishes"])
def test_a_directory_that_changes_is_refused(change, tmp_path):
    root = make_directory(tmp_path / "run")

    def meanwhile(_):
        if change == "vanishes":
            (root / "extra" / "deep" / "nothing").unlink(missing_ok=True)
        else:
            (root / ("config.json" if change == "grows" else "new")).write_text("something longer than before")

    with pytest.raises(InputError, match=r"changed while it was read|cannot be read"):
        ckpt8.compress(root, progress=meanwhile)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_another_original(run_directory, containers, tmp_path):
    root = make_directory(tmp_path / "run")
    (root / "more").touch()
    with pytest.raises(CheckFailedError, match="'more'"):
        ckpt8.verify(containers["flash"], root)
    with pytest.raises(CheckFailedError, match=r"only one of them has 'config\.json'"):
        ckpt8.verify(containers["flash"], run_directory / "optimizer.pt")
    (root / "more").unlink()
    (root / "config.json").write_text('{"hidden": 65}')
    failures = ckpt8.verify(containers["flash"], root).failures
    assert any("config.json" in failure for failure in failures)


def test_a_pool_lets_go_of_files_in_order(tmp_path):
    files = [tmp_path / str(k) for k in range(3)]
    for path in files:
        path.write_bytes(b"abc")
    shared = pool.FilePool(limit=2)
    readers = [pool.PooledFile(ByteRange.of(path), shared) for path in files]
    assert [reader.read(0, 3) for reader in readers] == [b"abc"] * 3
    assert list(shared._handles) == files[1:]
    files[0].unlink()
    files[0].write_bytes(b"abcd")
    with pytest.raises(InputError, match="changed while it was read"):
        readers[0].read(0, 3)


def test_statistics_are_of_all_members_and_names_say_which(containers):
    with ckpt8.open(containers["flash"]) as file:
        keys = file.keys()
        assert "model-00002-of-00002.safetensors:layers.7.up.weight" in keys
        assert "optimizer.pt:state.0.exp_avg" in keys
        facts = file.stats("optimizer.pt:state.0.exp_avg_sq")
        assert facts["codec"].startswith("companded8")
        assert file.stats(f"{SHARDS[0]}:embed.weight")["role"] == "weight"
        shape = file.get_tensor("extra/old.pt:ema.w").shape
        assert shape == (80, 80)


def test_names_of_a_state_dict_of_torch_are_in_the_order_of_the_model(root):
    weights = {"b.weight": torch.randn(70, 70), "a.weight": torch.randn(70, 70), "c": torch.randn(90, 80)}
    torch.save(weights, root / "pytorch_model.bin")
    adam = stepped(torch.nn.Parameter(weight) for weight in weights.values())
    torch.save(adam.state_dict(), root / "optimizer.pt")
    ordered = [f"optimizer.pt:{name}" for name in weights]
    assert [p.name for p in ckpt8.compress(root).parameters] == ordered
    (root / "again.bin").write_bytes((root / "pytorch_model.bin").read_bytes())
    assert [p.name for p in ckpt8.compress(root, force=True).parameters] == ordered
    torch.save({f"other.{name}": weight for name, weight in weights.items()}, root / "again.bin")
    assert [p.name for p in ckpt8.compress(root, force=True).parameters] == [
        f"optimizer.pt:state.{k}" for k in range(3)
    ]


def test_frozen_weights_leave_their_shape_without_names(tmp_path):
    root = make_directory(tmp_path / "run")
    state = optimizer(model())
    del state["state"][3]
    torch.save(state, root / "optimizer.pt")
    names = {p.name for p in ckpt8.compress(root).parameters}
    assert "optimizer.pt:embed.weight" in names
    assert not any("up.weight" in name for name in names)


def test_a_directory_of_one_file_stays_a_directory(tmp_path):
    root = tmp_path / "a.b"
    root.mkdir()
    save_file({"w": torch.randn(80, 80)}, root / "only")
    ckpt8.compress(root)
    root.rename(tmp_path / "moved")
    assert ckpt8.restore(tmp_path / "a.b.ckpt8") == root
    assert (root / "only").is_file()
    assert list(ckpt8.load(tmp_path / "a.b.ckpt8")) == ["w"]


def test_a_container_inside_a_directory_is_a_plain_file(root):
    save_file({"w": torch.randn(80, 80)}, root / "model.safetensors")
    ckpt8.compress(root / "model.safetensors")
    manifest = ckpt8.compress(root)
    assert {m.path: m.format for m in manifest.members}["model.ckpt8"] == "file"


def test_a_record_with_a_wrong_checksum_is_named(tmp_path):
    root = make_directory(tmp_path / "run")
    data = bytearray((root / "optimizer.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (root / "optimizer.pt").write_bytes(data)
    with pytest.raises(InputError, match=r"run: optimizer\.pt:state\.\d+\.exp_avg.*checksum"):
        ckpt8.compress(root)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_more_files_than_may_be_open(root, tmp_path, monkeypatch):
    for k in range(90):
        torch.save({"w": torch.full((70, 70), float(k))}, root / f"{k:03}.pt")
    opened = []
    close, get = pool._Handle.__del__, pool._Handle.__init__
    monkeypatch.setattr(pool._Handle, "__init__", lambda self, path: (get(self, path), opened.append(1))[0])
    monkeypatch.setattr(pool._Handle, "__del__", lambda self: (close(self), opened.pop())[0])
    most = []
    ckpt8.compress(root, tmp_path / "zero.ckpt8", preset="lossless", progress=lambda _: most.append(len(opened)))
    assert 0 < max(most) <= 64 + 8
    assert tree(ckpt8.restore(tmp_path / "zero.ckpt8", tmp_path / "back")) == tree(root)
