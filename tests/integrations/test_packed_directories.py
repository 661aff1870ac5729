"""What two ranks packed is a checkpoint to every command: each gives what the plain directory of that state gives."""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from dcp_kit import load_all, read_metadata
from fsdp_kit import save_both, save_replicas, share
from modes_kit import call_all
from packed_kit import INDEX, change_index, load, names_in, save, save_plain
from ranks import run_ranks
from safetensors.torch import load_file
from test_dcp_storage import assert_same
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import CliRunner

import ckpt8
from ckpt8 import CheckFailedError, InputError, OutputError, ResumeError, UsageError
from ckpt8.cli.app import app
from ckpt8.inspecting.container import inspect_container
from ckpt8.integrations.sharded import load_model, save_packed, state_to_pack

pytestmark = pytest.mark.filterwarnings("ignore")

PRESETS = ("lossless", "flash", "archive")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """One state as ``plain`` and packed with each preset; ``run.pt`` is torch's own conversion of the plain one."""
    folder = tmp_path_factory.mktemp("packed")
    (folder / "replicas").mkdir()
    run_ranks(call_all, 2, [(save_both, folder, PRESETS), (share, folder), (save_replicas, folder / "replicas")])
    dcp_to_torch_save(folder / "plain", folder / "run.pt")
    return folder


@pytest.fixture
def copied(saved, tmp_path):
    """Copies what ranks packed with a preset to ``x`` in the folder of the test."""
    return lambda preset="flash": shutil.copytree(saved / preset, tmp_path / "x")


def call(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})


@pytest.mark.by_default("archive")
@pytest.mark.parametrize("preset", PRESETS)
def test_inspect_reports_on_all_ranks_as_on_one_file(saved, tmp_path, preset):
    ckpt8.compress(saved / "plain", tmp_path / "one.ckpt8", preset=preset)
    mine, one = (inspect_container(path, tensors=True) for path in (saved / preset, tmp_path / "one.ckpt8"))

    def sizes(facts):
        rows = (row for row in facts["roles"] if row["role"] in ("weight", "moment1", "moment2"))
        return {(row["role"], row["codec"]): (row["elements"], row["bytes"]) for row in rows}

    def names(rows):
        return {row["name"].partition(":")[2] if row["name"].startswith("__") else row["name"] for row in rows}

    assert sizes(mine) == sizes(one)
    assert names(mine["parameters"]) == names(one["parameters"])
    assert names(mine["tensors"]) - {"objects"} == names(one["tensors"]) - {"empty"}
    assert "0.weight[0:145,:]" in names(mine["parameters"])
    shapes = {row["name"]: row["whole_shape"] for row in mine["tensors"]}
    assert shapes["model.0.weight[145:289,:]"] == [289, 96]
    assert mine["asked"] == one["asked"]
    assert mine["framework"] == "torch.distributed.checkpoint"
    assert mine["ranks"] == {"files": 2, "strays": []}
    assert mine["stored_bytes"] == sum(path.stat().st_size for path in (saved / preset).iterdir())
    for key in ("weight", "lattice", "moment1", "moment2", "update"):
        assert (mine["errors"][key] is None) == (one["errors"][key] is None)
        if mine["errors"][key] is not None and preset == "flash":
            # The same elements in the same groups: the sums over slices are those of the same error.
            assert mine["errors"][key].get("nmse") == pytest.approx(one["errors"][key].get("nmse"))
    if preset == "archive":
        assert mine["steps"]["steps"] == pytest.approx(one["steps"]["steps"], rel=0.05)
        assert mine["steps"]["drift"] is not None
        assert len(mine["steps"]["optimizers"]) == 1


def test_inspect_in_a_terminal_as_json_and_as_a_page(saved, tmp_path):
    shown = call("inspect", saved / "flash", "--tensors")
    assert shown.exit_code == 0
    assert "from ranks of torch.distributed.checkpoint, 2 files" in shown.output
    assert "0.weight[0:145,:]" in shown.output
    facts = json.loads(call("inspect", saved / "flash", "--json", "--full", "--against", saved / "plain").output)
    assert facts["measured_from"] == {"path": str(saved / "plain"), "differing": []}
    assert facts["sample"]["full"]
    page = tmp_path / "page.html"
    assert call("inspect", saved / "flash", "--html", page, "--against", saved / "plain").exit_code == 0
    assert "0.weight[0:145,:]" in page.read_text()


@pytest.mark.by_default("flash")
@pytest.mark.parametrize("preset", PRESETS)
def test_verify_holds_and_repeats_every_figure_against_the_plain_directory(saved, preset):
    alone = ckpt8.verify(saved / preset)
    assert alone.frames > 0
    assert alone.failures == ()
    against = ckpt8.verify(saved / preset, saved / "plain", resume_steps=2)
    assert against.failures == ()
    assert against.resume["parameters"] == 4
    assert against.resume["with_weights"] == 4
    assert (against.statistics > 0) == (preset != "lossless")
    assert (against.resume["replay_error"] == 0) == (preset == "lossless")
    assert (against.steps is None) == (preset == "lossless")
    if preset != "lossless":
        assert against.steps["steps"] == pytest.approx(inspect_container(saved / preset)["steps"]["steps"])


def test_verify_against_another_checkpoint(saved, tmp_path):
    state = torch.load(saved / "run.pt", weights_only=True)
    state["optimizer"]["state"]["2.weight"]["exp_avg"][90, 5] += 1
    state["model"]["0.bias"][200] += 1
    state["progress"]["seen"] = 8
    save_plain(state, tmp_path / "changed")
    failures = " ".join(ckpt8.verify(saved / "lossless", tmp_path / "changed").failures)
    assert "__1_0.ckpt8: optimizer.state.2.weight.exp_avg: differs from the original" in failures
    assert "__1_0.ckpt8: model.0.bias: differs from the original" in failures
    assert "progress.seen: differs from the original" in failures
    assert "__0_0.ckpt8" not in failures
    shown = call("verify", saved / "lossless", "--against", tmp_path / "changed")
    assert shown.exit_code == 1
    del state["model"]["0.bias"]
    save_plain(state, tmp_path / "fewer")
    with pytest.raises(CheckFailedError, match=r"was not made from .*only one of them has 'model\.0\.bias'"):
        ckpt8.verify(saved / "lossless", tmp_path / "fewer")
    with pytest.raises(CheckFailedError, match="holds 0 checkpoints"):
        ckpt8.verify(saved / "lossless", saved / "run.pt")


@pytest.mark.parametrize("to", ["torch", "dcp", "trainer", "safetensors"])
@pytest.mark.parametrize("preset", ["lossless", "flash"])
def test_convert_gives_what_the_plain_directory_gives(saved, tmp_path, preset, to):
    # What flash decodes, by another way than slices: the plain directory with the restored values.
    plain = saved / "plain" if preset == "lossless" else ckpt8.restore(saved / preset, tmp_path / "restored")
    ckpt8.convert(saved / preset, tmp_path / "mine", to=to)
    ckpt8.convert(plain, tmp_path / "theirs", to=to)
    torchs = partial(torch.load, weights_only=True)
    read = {
        "torch": torchs,
        "dcp": load_all,
        "safetensors": load_file,
        "trainer": lambda path: [load_file(path / "model.safetensors"), torchs(path / "optimizer.pt")],
    }[to]
    assert_same(read(tmp_path / "mine"), read(tmp_path / "theirs"))


@pytest.mark.by_default("lossless")
@pytest.mark.parametrize("preset", PRESETS)
def test_restore_gives_a_plain_directory_that_torch_loads(saved, tmp_path, preset):
    assert call("restore", saved / preset, "-o", tmp_path / "back").exit_code == 0
    mine, theirs = load_all(tmp_path / "back"), load_all(saved / "plain")
    assert mine.keys() == theirs.keys()
    if preset == "lossless":
        assert_same({name: mine[name] for name in theirs}, theirs)
    else:
        loaded = ckpt8.load(saved / preset)
        assert_same(mine["optimizer.state.2.weight.exp_avg_sq"], loaded["optimizer"]["state"]["2.weight"]["exp_avg_sq"])
        assert not torch.equal(mine["model.0.weight"], theirs["model.0.weight"])
    one, other = read_metadata(tmp_path / "back"), read_metadata(saved / "plain")
    assert one.planner_data == other.planner_data
    assert one.state_dict_metadata.keys() == other.state_dict_metadata.keys()
    assert names_in(tmp_path / "back") == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    with pytest.raises(OutputError, match="exists"):
        ckpt8.restore(saved / preset, tmp_path / "back")
    ckpt8.restore(saved / preset, tmp_path / "back", force=True)
    with pytest.raises(OutputError):
        ckpt8.restore(saved / preset, saved / preset, force=True)
    with pytest.raises(UsageError, match="-o DIR"):
        ckpt8.restore(saved / preset)


def test_a_trainers_checkpoint_stands_for_the_folder_in_it(saved, tmp_path):
    checkpoint = tmp_path / "checkpoint-5"
    shutil.copytree(saved / "lossless", checkpoint / "ckpt8")
    (checkpoint / "trainer_state.json").write_text("{}")
    facts = json.loads(call("inspect", checkpoint, "--json").output)
    assert facts["path"] == str(checkpoint / "ckpt8")
    assert facts["ranks"]["files"] == 2
    assert ckpt8.verify(checkpoint, saved / "plain").failures == ()
    assert ckpt8.diff(checkpoint, saved / "plain").identical
    expected = torch.load(saved / "run.pt", weights_only=True)
    assert_same(ckpt8.load(checkpoint), expected)
    ckpt8.convert(checkpoint, tmp_path / "x.pt")
    assert_same(torch.load(tmp_path / "x.pt", weights_only=True)["model"], expected["model"])
    shown = call("restore", checkpoint, "-o", tmp_path / "back")
    assert "not written, as it is plain: trainer_state.json" in shown.output
    assert_same(load_all(tmp_path / "back"), load_all(saved / "plain"))
    with pytest.raises(OutputError):
        ckpt8.restore(checkpoint, checkpoint, force=True)
    with pytest.raises(ResumeError, match="model weight: is missing from the checkpoint"):
        ckpt8.resume(checkpoint, model=torch.nn.Linear(2, 2))
    with ckpt8.open(checkpoint) as file:
        assert torch.equal(file.get_tensor("model.0.weight"), expected["model"]["0.weight"])
    assert ckpt8.restore(checkpoint, tmp_path / "salvaged", salvage=True).complete
    assert_same(load_all(tmp_path / "salvaged"), load_all(saved / "plain"))


def test_load_gives_the_state_dict_that_was_saved(saved):
    assert_same(ckpt8.load(saved / "lossless"), torch.load(saved / "run.pt", weights_only=True))
    assert ckpt8.load(saved / "flash", map_location="meta")["model"]["0.weight"].is_meta
    with pytest.raises(UsageError, match="loaded as a whole"):
        ckpt8.load(saved / "flash", member="__0_0.ckpt8")


def cut(folder):
    file = folder / "__1_0.ckpt8"
    file.write_bytes(file.read_bytes()[:-100])


def replace(folder):
    save({"model": {"0.weight": torch.ones(3)}}, folder / "other")
    (folder / "other" / "__0_0.ckpt8").replace(folder / "__1_0.ckpt8")
    shutil.rmtree(folder / "other")


def forget(tree):
    del tree["tensors"]["model.2.bias"]


def index_with(**fields):
    """Damage to the index: a bias has these fields, in place of all others where they are boxes."""

    def change(tree):
        kept = {"dtype": "float32", "shape": [96]} if "boxes" in fields else tree["tensors"]["model.2.bias"]
        tree["tensors"]["model.2.bias"] = kept | fields

    return partial(change_index, change=change)


gap = index_with(boxes=[[0, [0], [48]]])
overlap = index_with(boxes=[[0, [0], [48]], [1, [47], [49]]])
DAMAGE = {
    "truncated": (cut, r"__1_0\.ckpt8.*"),
    "missing": (lambda folder: (folder / "__1_0.ckpt8").unlink(), r"__1_0\.ckpt8: is missing"),
    "another save": (replace, r"__1_0\.ckpt8: belongs to another save"),
    "another shape": (index_with(shape=[97], cuts=[[[49, 1], [48, 1]]]), r"model\.2\.bias"),
    "overlap": (overlap, r"model\.2\.bias.*(overlap|not in this file)"),
    "gap": (gap, r"model\.2\.bias.*slices are missing"),
    "other owners": (index_with(owners=[1, 0]), r"model\.2\.bias.*is not in this file"),
    "forgotten": (
        partial(change_index, change=forget),
        r"has a slice of 'model\.2\.bias' that ckpt8-dcp\.json does not name",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_line(saved, copied, tmp_path, damage):
    make, message = DAMAGE[damage]
    folder = copied()
    make(folder)
    before = names_in(folder)
    commands = {"inspect": (), "verify": (), "diff": [saved / "flash"], "convert": [tmp_path / "out.pt"]}
    for command, more in {**commands, "restore": ("-o", tmp_path / "back")}.items():
        result = call(command, folder, *more)
        assert isinstance(result.exception, InputError), command
        assert "\n" not in str(result.exception)
        with pytest.raises(InputError, match=message):
            raise result.exception
    for read in (ckpt8.load, ckpt8.open):
        with pytest.raises(InputError, match=message):
            read(folder)
    assert names_in(tmp_path) == ["x"]
    assert names_in(folder) == before


def test_a_stray_file_is_told_and_does_not_count(saved, copied, tmp_path):
    folder = copied()
    (folder / "__5_0.ckpt8").write_bytes(b"left by a killed save")
    assert inspect_container(folder)["ranks"] == {"files": 2, "strays": ["__5_0.ckpt8"]}
    assert "no part of it: __5_0.ckpt8" in call("inspect", folder).output
    assert ckpt8.verify(folder).failures == ()
    (row,) = json.loads(call("runs", tmp_path, "--json").output)["checkpoints"]
    assert row["stored_bytes"] == inspect_container(folder)["stored_bytes"]
    assert ckpt8.diff(folder, saved / "flash").identical


def test_a_hostile_nesting_is_refused(copied, tmp_path):
    folder, inside = copied(), {"model.0.bias": ["model", "0.weight", "inside"]}
    change_index(folder, lambda tree: tree["paths"].update(inside))
    for read in (ckpt8.load, lambda path: ckpt8.convert(path, tmp_path / "y.pt")):
        with pytest.raises(InputError, match="lies inside another value"):
            read(folder)


@pytest.mark.slow
def test_parts_of_ranks_that_saved_alone_are_one_checkpoint(saved, tmp_path):
    assert ckpt8.diff(saved / "parts", saved / "plain").identical
    assert ckpt8.verify(saved / "parts", saved / "plain").failures == ()
    facts = inspect_container(saved / "parts")
    assert facts["ranks"] == {"files": 2, "strays": []}
    assert facts["stored_bytes"] == sum(path.stat().st_size for path in (saved / "parts").iterdir())
    ckpt8.restore(saved / "parts", tmp_path / "back")
    assert_same(load_all(tmp_path / "back"), load_all(saved / "plain"))
    with pytest.raises(InputError, match="compressed already"):
        ckpt8.compress(saved / "parts", tmp_path / "x.ckpt8")


def test_the_failure_of_one_rank_leaves_no_checkpoint(saved):
    assert not (saved / "nothing").exists()
    assert names_in(saved / "older") == ["__0_0.ckpt8", "__1_0.ckpt8", INDEX]
    assert ckpt8.diff(saved / "older", saved / "plain").identical
    for target in ("nothing", "older"):
        errors = [(saved / f"{target}-{rank}.txt").read_text() for rank in range(2)]
        assert all(error.startswith("InputError: ") for error in errors)
        assert all("is damaged: its CRC does not match" in error for error in errors)
        assert sum("__1_0.distcp: slice" in error and "failed: " not in error for error in errors) == 1
        assert sum(": rank " in error and "failed: " in error for error in errors) == 1


def codecs(folder, rank):
    """The codec and the reason of every matrix in a rank's file."""
    with ckpt8.open(folder / f"__{rank}_0.ckpt8") as file:
        manifest = file.manifest
    records = {tensor.name: manifest.storages[tensor.storage] for tensor in manifest.tensors if len(tensor.shape) == 2}
    return {name: (record.codec["id"], record.reason) for name, record in records.items()}


def test_what_ranks_save_apart_is_counted_and_kept_as_flash_keeps_it(saved):
    replicas = saved / "replicas"
    names = ("spread", "together", "flash", "lossless")
    said = {name: json.loads((replicas / f"{name}.json").read_text()) for name in names}
    parted = "4 of 4 parameters have weight and moments in different ranks' files, so"
    kept = "6 of 16 slices are kept as flash keeps them, not within the budget"
    advice = "save with Ckpt8SavePlanner()"
    assert said == {
        "spread": [f"{replicas / 'spread'}: {parted} {kept}; {advice}"],
        "together": [],
        "flash": [f"{replicas / 'flash'}: {parted} the error of their updates is not measured; {advice}"],
        "lossless": [],
    }
    found = codecs(replicas / "spread", 0) | codecs(replicas / "spread", 1)
    assert {codec for codec, _ in found.values()} == {"split24/1", "companded8/1"}
    assert all(reason.startswith("no budget: ") for _, reason in found.values())
    for rank in (0, 1):
        found = codecs(replicas / "together", rank)
        assert {codec for codec, _ in found.values()} == {"lattice/1", "vscaled/1", "rclog/1"}


class Adapted(torch.nn.Module):
    """As peft makes it: a frozen base with tied weights, and an adapter of which a part is frozen too."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.base, self.head = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.head.weight = self.base.weight
        self.lora_a, self.lora_b = torch.nn.Linear(8, 2, bias=False), torch.nn.Linear(2, 8, bias=False)
        self.register_buffer("scale", torch.rand(1))
        for module in (self.base, self.head, self.lora_a):
            module.requires_grad_(False)
        self.peft_config = {"default": SimpleNamespace(is_prompt_learning=False)}


def _saved_by_peft(model, weights, adapter_name):
    return {name: each for name, each in weights.items() if name.startswith("lora_")}


@pytest.mark.parametrize("adapter_only", [True, False])
def test_a_model_with_adapters_is_packed_without_its_base(adapter_only, tmp_path, monkeypatch):
    """And takes them from a checkpoint with the base, too, which earlier versions wrote."""
    monkeypatch.setitem(sys.modules, "peft", SimpleNamespace(get_peft_model_state_dict=_saved_by_peft))
    there, here = Adapted(1), Adapted(2)
    optimizer = torch.optim.AdamW(there.parameters())
    there.lora_b(there.lora_a(torch.ones(1, 8))).sum().backward()
    optimizer.step()
    weights, moments = state_to_pack(there, optimizer, adapter_only=adapter_only)
    save_packed(tmp_path / "saved", {"model": weights, "optimizer": moments}, {"preset": "lossless"})
    with ckpt8.open(tmp_path / "saved") as file:
        packed = {key.removeprefix("model.") for key in file.keys() if key.startswith("model.")}  # noqa: SIM118
    assert packed == ({"lora_a.weight", "lora_b.weight", "scale"} if adapter_only else set(there.state_dict()))
    base = here.base.weight.clone()
    load_model(tmp_path / "saved", "model", here, has_adapters=True)
    assert torch.equal(here.base.weight, base if adapter_only else there.base.weight)
    assert all(torch.equal(here.state_dict()[name], there.state_dict()[name]) for name in packed)
    here.extra = torch.nn.Linear(2, 2)
    with pytest.raises(CheckpointException, match="extra"):
        load_model(tmp_path / "saved", "model", here, has_adapters=True)


def test_what_a_trainer_packed_of_tied_weights_becomes_a_plain_checkpoint_with_all_its_files(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    model[1].weight = model[0].weight
    state = state_to_pack(model, torch.optim.AdamW(model.parameters()), adapter_only=False)
    place = tmp_path / "checkpoint-8"
    save_packed(place / "ckpt8", dict(zip(("model", "optimizer"), state, strict=True)), {"preset": "lossless"})
    assert_same(ckpt8.load(place)["model"], dict(model.state_dict()))
    (place / "trainer_state.json").write_text("{}")
    torch.save({"last_epoch": 8}, place / "scheduler.pt")
    report = json.loads(call("convert", place, f"{tmp_path}/out/", "--to", "trainer", "--json").stdout)
    assert report["notes"] == []
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == {"0.weight", "0.bias", "1.bias"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("model.safetensors", "optimizer.pt", "trainer_state.json", "scheduler.pt")
    }
    assert (tmp_path / "out" / "scheduler.pt").read_bytes() == (place / "scheduler.pt").read_bytes()


def test_verify_against_a_plain_directory_that_is_cut_otherwise(saved, tmp_path):
    ckpt8.convert(saved / "plain", tmp_path / "whole", to="dcp")
    save_plain(torch.load(saved / "run.pt", weights_only=True), tmp_path / "one")
    assert ckpt8.verify(saved / "flash", tmp_path / "one").failures == ()


def test_weights_for_publishing_come_with_their_snr(saved, tmp_path):
    report = ckpt8.convert(saved / "archive", tmp_path / "archive.safetensors")
    assert report.weights_snr < 60
    assert f"{report.weights_snr:.1f} dB" in report.warning
    assert ckpt8.convert(saved / "flash", tmp_path / "flash.safetensors").warning is None


def test_runs_counts_a_directory_once(saved, tmp_path):
    for name in ("plain", "flash"):
        shutil.copytree(saved / name, tmp_path / name)
    found = {row["name"]: row for row in json.loads(call("runs", tmp_path, "--json").output)["checkpoints"]}
    assert found.keys() == {"plain", "flash"}
    assert found["flash"]["stored_bytes"] == sum(path.stat().st_size for path in (saved / "flash").iterdir())
    assert found["flash"]["step"] == found["plain"]["step"]


@pytest.mark.parametrize("damage", ["missing", "another save", "truncated", "gap"])
def test_runs_tells_of_damage(copied, tmp_path, damage):
    DAMAGE[damage][0](copied())
    shown = call("runs", tmp_path, "--json")
    assert isinstance(shown.exception, InputError) == (damage != "gap")
    (row,) = json.loads(shown.output.splitlines()[0])["checkpoints"]
    assert (row["damage"] is None) == (damage == "gap")  # boxes are what verify checks


def test_a_tensor_that_is_not_complete_is_not_loaded(copied):
    folder = copied("lossless")
    gap(folder)
    with pytest.raises(CheckpointException, match=r"model\.2\.bias.*: slices are missing: 48 of 96 elements"):
        load({"model": {"2.bias": torch.zeros(96)}}, folder)


def test_every_rank_measures_its_own_slices(saved):
    """With the steps and settings that one of them stores."""
    for rank in (0, 1):
        with ckpt8.open(saved / "flash" / f"__{rank}_0.ckpt8") as file:
            storages = file.manifest.storages
            found = {storages[record.moments["moment1"]].name: record.error for record in file.manifest.parameters}
        assert 0 < found["optimizer.state.0.weight.exp_avg"]["max_error"] < 0.1
        assert 0 < found["optimizer.state.2.weight.exp_avg"]["max_error"] < 0.1


def test_every_rank_spends_the_budget_on_its_own_slices(saved):
    for rank in (0, 1):
        found = codecs(saved / "archive", rank)
        assert {codec for codec, _ in found.values()} == {"lattice/1", "vscaled/1", "rclog/1"}
        assert len(found) == 2 * 3
        with ckpt8.open(saved / "archive" / f"__{rank}_0.ckpt8") as file:
            steps = [record.steps for record in file.manifest.parameters if record.steps]
        spent = sum(each["weight"] + each["moment1"] + each["moment2"] for each in steps)
        assert 0.3 < (spent / sum(each["step"] for each in steps)) ** 0.5 < 1.3
