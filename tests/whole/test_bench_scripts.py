"""Scripts in ``fixtures/bench`` on tiny checkpoints: what they make and measure. No test looks at times."""

from __future__ import annotations

import copy
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gpt_kit import SIZES, Run, RunConfig

from ckpt8.cli.bench.probe import measured
from ckpt8.container.joined import read_index
from ckpt8.core.errors import OutputError
from ckpt8.core.files.atomic import any_file
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.stores import s3, writing

SCRIPTS = Path(__file__).parents[2] / "fixtures" / "bench"
NAMES = ("trained_gpt", "scaling", "sharded_saves", "ranks_simulation", "compare", "waiting", "stores")


@pytest.fixture(scope="module")
def scripts():
    """The modules by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        yield {name: importlib.import_module(name) for name in NAMES}
    for name in NAMES:
        sys.modules.pop(name)


def test_updates_in_the_backward_pass_are_those_of_a_step_after_it(scripts):
    settings = RunConfig(horizon=4, batch_size=2, lr=1e-3, warmup=2, grad_clip=math.inf)
    plain, fused = (Run(SIZES["mini"], settings, lambda groups, lr: torch.optim.AdamW(groups, lr=lr)) for _ in range(2))
    scripts["trained_gpt"].update_in_backward(fused)
    for step in range(4):
        plain.advance()
        for group in fused.optimizer.param_groups:
            group["lr"] = settings.lr_at(step)
        fused.loss(step).backward()
        assert all(param.grad is None for param in fused.model.parameters())
    expected, found = plain.optimizer.state_dict(), fused.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()
    for index, state in expected["state"].items():
        for key, tensor in state.items():
            assert torch.equal(found["state"][index][key], tensor), (index, key)
    for ours, theirs in zip(fused.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_a_trained_checkpoint_has_the_size_asked_for_and_has_learned(scripts, tmp_path):
    target = tmp_path / "trained.pt"
    facts = scripts["trained_gpt"].trained(target, 1_000_000)
    tree = torch.load(target, weights_only=True)
    assert abs(target.stat().st_size / 1e6 - 1) < 0.1
    assert facts["steps"] == tree["iter_num"] == 100
    assert facts["loss"] < math.log(96) - 0.1


@pytest.mark.slow
def test_scaling_over_threads_and_over_sizes(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(scripts["trained_gpt"], "MAX_STEPS", 5)
    scaling = scripts["scaling"]

    def run(module, job, watch):
        """Do a job here; what crosses to a process and back is JSON."""
        result = json.loads(json.dumps(measured(module, json.loads(json.dumps(job)))))
        return result | ({"session_pss": 1, "processes": 1} if watch else {})

    with scaling.opened(tmp_path, 2, 1, lambda _: None, run) as here:
        result = scaling.measure(here, [1_000_000, 10**16])
    assert list(tmp_path.iterdir()) == []
    names = {"compress", "compress --no-stats", "restore", "verify", "load"}
    threads = {(row["threads"], row["operation"]) for row in result["threads"]}
    assert threads == {(count, name) for count in (1, 2) for name in ("zstd -3", *names)}
    assert "are free" in result["skipped"]["10000000.00 GB"]
    assert {entry["operation"] for entry in result["laws"]} == {"cp", "zstd -3", "torch.load", *names}


@pytest.mark.parametrize(("name", "power", "held"), [("compress", 1, 0), ("verify", 2, 0), ("load", 1, 1)])
def test_laws_are_those_of_the_figures(name, power, held, scripts):
    sizes = (10**9, 2 * 10**9, 8 * 10**9)
    rows = [{"bytes": n, "seconds": 3 * (n / 1e9) ** power, "peak_memory": 5 + held * n} for n in sizes]
    law = scripts["scaling"].law(name, rows)
    assert law["exponent"] == pytest.approx(power)
    assert (law["peak_memory"], law["beyond_files"]) == ([5, 5], bool(held))
    assert scripts["scaling"].law(name, rows[:1])["exponent"] is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_two_ranks_save_and_load_with_both(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(scripts["trained_gpt"], "MAX_STEPS", 4)
    result = scripts["sharded_saves"].measure(2, 1_000_000, None, 2, tmp_path)
    assert list(tmp_path.iterdir()) == []
    json.dumps(result, allow_nan=False)
    # Weights and moments in fp32, the output layer once more, a step for each tensor in each rank.
    parameters, layers = result["trained"]["parameters"], result["trained"]["n_layer"]
    tied = result["trained"]["n_embd"] * result["trained"]["vocab_size"]
    assert result["bytes"] == 12 * parameters + 4 * tied + 2 * 4 * (12 * layers + 4)
    assert [row["operation"] for row in result["results"]] == ["save", "load", "async_save"]
    for row in result["results"]:
        assert row["ratio"] == row["ckpt8"]["seconds"] / row["dcp"]["seconds"]
        assert 0 < row["ckpt8"]["stored_bytes"] < row["dcp"]["stored_bytes"]


@pytest.mark.by_default(most=1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh", ["fsdp", "tp8"])
def test_sixteen_ranks(mesh, scripts):
    simulation = scripts["ranks_simulation"]
    found = simulation.simulate(16, 2, mesh, 1)
    parameters = len(list(simulation.parameters(2)))
    assert found["items_of_all_ranks"] == 16 * (4 * parameters + 1)
    # Tensor parallelism keeps norms whole, which are written once.
    whole = sum(dim < 0 for *_, dim in simulation.parameters(2)) if mesh == "tp8" else 0
    assert found["slices"] == 3 * (16 * (parameters - whole) + 2 * whole) + parameters + 1
    assert found["index_bytes"] < 50_000
    assert [each["items"] for each in found["load_plan"]] == [4 * parameters + 1] * 3
    # At the same world size each box is one slice; twice as large ones are two.
    assert found["load_plan"][0]["slices"] == 4 * parameters + 1
    assert found["load_plan"][1]["slices"] == 3 * 2 * parameters + parameters + 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mesh", ["fsdp", "tp8"])
def test_the_index_has_the_boxes_that_were_planned(mesh, scripts, tmp_path):
    simulation = scripts["ranks_simulation"]
    plans, metadata = simulation.plan_globally(dcp.DefaultSavePlanner(), simulation.local_plans(16, 1, mesh))
    simulation.finish(tmp_path / "x", plans, metadata)
    index = read_index(tmp_path / "x")
    planned = {
        (f"__{rank}_0.ckpt8", item.index.fqn, *map(tuple, (item.index.offset, item.tensor_data.chunk.sizes)))
        for rank, plan in enumerate(plans)
        for item in plan.items
        if item.tensor_data is not None and all(item.tensor_data.chunk.sizes)
    }
    found = {(box.file, name, *box[1:]) for name, tensor in index.tensors.items() for box in tensor.boxes()}
    assert found == planned
    assert all(tensor.is_whole for tensor in index.tensors.values())


def test_ways_to_store_a_checkpoint_give_back_what_they_state(scripts):
    compare = scripts["compare"]
    run = Run(SIZES["mini"], RunConfig(horizon=4), lambda groups, lr: torch.optim.AdamW(groups, lr=lr))
    run.advance()
    original = run.checkpoint()
    errors = {}
    for name, pack, unpack in compare.pairs():
        tree = unpack(data := pack(original))
        errors[name] = largest(original["model"], tree["model"])
        assert tree["iter_num"] == 1
        assert len(data) <= 1.01 * len(compare.save(original))
    assert {name for name, error in errors.items() if not error} >= {"torch.save", "ckpt8 lossless"}
    assert 2**-10 < errors["bf16"] <= 2**-8
    tree = copy.deepcopy(original)
    size = compare.flashoptim(compare.entries(tree, run))
    assert size == pytest.approx(5.125 * run.config.n_params, rel=0.01)
    # Half a step of bf16 in 127 parts, of which rounding leaves a half.
    assert largest(original["model"], tree["model"]) <= 2**-8 / 127 * 0.51


def largest(weights, others):
    """The largest relative error of weights."""
    pairs = [(a.double(), others[name].double()) for name, a in weights.items()]
    return max(float(((a - b).abs() / a.abs().clamp_min(1e-30)).max()) for a, b in pairs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_waits_are_measured_in_copies_of_what_is_saved(scripts, tmp_path):
    ways = scripts["waiting"].WAYS
    found = scripts["waiting"].measure([7_500_000], 1, list(ways), tmp_path)["results"]
    assert [row["way"] for row in found] == list(ways)
    for row in found:
        assert abs(row["bytes"] / 7.5e6 - 1) < 0.1, row
        assert row["rounds"] == 1
        assert row["wait"] / row["copy"] == pytest.approx(row["ratio"], abs=0.01)
    kept = {row["way"]: row["kept"] for row in found}
    for way in ("ckpt8.save(background=True)", "dcp.async_save with Ckpt8StorageWriter"):
        assert kept[way] == 8 << 20  # whole huge pages
    assert kept["torch.save"] == kept["dcp.async_save"] == 0
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info >= (3, 12), reason="the place of the lock's holder is that of 3.10 and 3.11")
def test_a_simulation_makes_few_calls_itself(tmp_path):
    """A simulated command sleeps in place of what it recorded, and ends as the real one does."""
    sizes = ["--size", "6e7", "--simulated", "1.2e8", "--threads", "1,8", "--repeat", "1"]
    names = "flash,restore flash"
    command = [
        sys.executable,
        SCRIPTS / "cores.py",
        "--shapes",
        "gpt",
        *sizes,
        "--commands",
        names,
        "--scratch",
        tmp_path,
    ]
    subprocess.run([*command, "--json", tmp_path / "cores.json"], check=True, capture_output=True, timeout=600)
    found = json.loads((tmp_path / "cores.json").read_text())["shapes"]["gpt"]["commands"]
    assert list(found) == names.split(",")
    for figures in found.values():
        assert 0 < figures["held_s_per_gb"] < figures["two_threads"]["wall_s"] / 0.06
        assert figures["simulated_gb_per_s"].keys() == {"1", "8"}
        assert figures["calls_per_gb"] > 500
        assert sum(figures["made"].values()) < 10


def test_the_server_of_stores_keeps_what_is_written_and_counts(scripts, monkeypatch, request):
    request.addfinalizer(s3._client.cache_clear)
    stores, content = scripts["stores"], bytes(range(256)) * 1000
    monkeypatch.setattr(writing, "PART", 100_000)
    with stores.serving("--latency", "0.001", "--rate", "1e9") as endpoint:
        for name, value in (stores.ENVIRONMENT | {"AWS_ENDPOINT_URL": endpoint}).items():
            monkeypatch.setenv(name, value)
        s3._client.cache_clear()
        path = as_path("s3://bucket/a")
        with path.new_object(force=False, check=any_file) as output:
            output.append([content])
            output.publish()
        # A look, a list of those left behind, the beginning, three parts, and the end.
        assert stores.counts(endpoint)["requests"] == 7
        with path.open("rb") as file:
            assert file.read() == content
        assert stores.counts(endpoint) == {"requests": 1, "bytes": len(content)}
        with pytest.raises(OutputError, match="exists"):
            path.new_object(force=False, check=any_file)
