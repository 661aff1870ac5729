"""The parts of a survey: windows, rows in pieces, views, slices, layers, origins."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dcp_kit import save_small
from hypothesis import given
from hypothesis import strategies as st
from make_dcp import make, save, states, step
from survey_kit import as_pairs

import ckpt8
from ckpt8.checkpoint.meaning.parameter_names import layer_of, plain_path
from ckpt8.core.tensors import DType, Role
from ckpt8.inspecting import tensors
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container
from ckpt8.inspecting.facts import layers_of
from ckpt8.inspecting.survey import Rows, Tally

pytestmark = pytest.mark.usefixtures("without_predictions")


@given(st.integers(1, 1 << 20), st.integers(256, 1 << 15), st.integers(0, 1 << 16))
def test_windows_are_in_order_apart_and_no_more_than_asked_for(numel, most, row):
    found = list(tensors.windows(numel, most, row))
    assert found[0][0] == 0
    assert sum(found[-1]) == numel
    for (start, count), (following, _) in pairwise(found):
        assert start + count <= following
    assert all(count > 0 for _, count in found)
    assert sum(count for _, count in found) <= min(numel, most)
    if numel > most:
        unit = row if 0 < row <= most // 2 else tensors.GROUP
        assert all(start % unit == 0 for start, _ in found)
    assert list(tensors.windows(numel, None)) == list(tensors.windows(numel, numel, row))


@given(st.integers(1, 9), st.integers(2, 12), st.data())
def test_rows_that_come_in_pieces(count, row, data):
    x = torch.tensor(data.draw(st.lists(st.sampled_from([0, 0, 0, 1]), min_size=count * row, max_size=count * row)))
    cuts = sorted({0, count * row, *data.draw(st.lists(st.integers(0, count * row)))})
    rows = Rows(count, row)
    for start, stop in pairwise(cuts):
        rows.add(x[start:stop] != 0, start, reads_all=True)
    assert rows.seen == count
    assert rows.dead == sum(not one.any() for one in x.view(count, row))


@pytest.mark.parametrize("role", [Role.MOMENT1, Role.MOMENT2])
@pytest.mark.parametrize("row", [0, 130, 96])
def test_groups_of_a_sample_are_those_of_the_tensor(role, row):
    numel = 130 * 601
    power = 2 if role is Role.MOMENT2 else 1
    x = torch.randn(numel, generator=torch.Generator().manual_seed(row)).abs() * 4e-5**power
    tally = Tally(role, DType.FLOAT32, numel)
    windows = list(tensors.windows(numel, 1 << 14, row))
    for start, count in windows:
        tally.add(x[start : start + count], start)
    groups = [
        x[at : at + 32].max()
        for at in range(0, numel, 32)
        if any(start <= at and min(at + 32, numel) <= start + count for start, count in windows)
    ]
    scales = torch.stack(groups)
    halves = (scales.sqrt() if role is Role.MOMENT2 else scales).half()
    assert (tally.counts["groups"], tally.counts["zero_scales"]) == (len(groups), int((halves == 0).sum()))
    assert tally.counts["subnormal_scales"] == int(((halves > 0) & (halves < 2.0**-14)).sum())
    assert 0 < tally.counts["subnormal_scales"] < tally.counts["groups"]


def look_at(tree, path, *, full=True, **options):
    """The facts of a checkpoint, all of it read."""
    torch.save(tree, path)
    return inspect_checkpoint(path, full=full, **options)


@pytest.mark.slow
@given(st.data())
def test_a_strided_view_is_looked_at_where_it_is(data):
    base = torch.rand(6, 7, 8) + 1
    picks = [slice(data.draw(st.integers(0, n - 1)), n, data.draw(st.integers(1, 4))) for n in base.shape]
    view = base[tuple(picks)].permute(data.draw(st.permutations([0, 1, 2])))
    view[tuple(data.draw(st.integers(0, n - 1)) for n in view.shape)] = float("nan")
    inside = int(view.isnan().sum())
    mask = torch.ones_like(base, dtype=torch.bool)
    mask[tuple(picks)] = False
    base[mask] = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        found = look_at({"model": {"x": view}}, Path(folder) / "x.pt")
    assert as_pairs(found["flags"]) == {("nan", "model.x"): (inside, view.numel())}
    assert found["sample"]["of"] == view.numel()


def test_elements_of_several_views_are_looked_at_once(tmp_path):
    base = torch.rand(100) + 1
    base[50] = base[99] = float("nan")
    views = {"a": base[:60], "b": base[40:], "c": base[45:55], "d": base[70:90]}
    found = look_at({"model": views}, tmp_path / "x.pt")
    assert found["sample"]["of"] == 100
    assert as_pairs(found["flags"]) == {("nan", "model.a"): (1, 60), ("nan", "model.b"): (1, 40)}
    expanded = torch.tensor([1.0, float("nan")])[:, None].expand(2, 50)
    found = look_at({"model": {"x": expanded}}, tmp_path / "x.pt")
    assert (found["sample"]["elements"], found["flags"][0]["count"]) == (2, 1)


def test_many_strided_views_are_not_read_one_by_one(tmp_path):
    base, done = torch.ones(100, 64), []
    look_at({"model": {str(k): base[:, k] for k in range(64)}}, tmp_path / "x.pt", progress=done.append)
    assert sum(done) <= 18 * base.numel() * 4


def test_a_distributed_checkpoint(tmp_path):
    net, optimizer = make()
    for number in range(4):
        step(net, optimizer, number)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = states(net, optimizer)
    state = saved["optimizer"]["state"]
    state["up.weight"]["exp_avg"][5:9] = 0
    state["up.weight"]["exp_avg_sq"][5:9] = 0
    state["norm.bias"]["exp_avg"].zero_()
    saved["model"]["down.weight"][3, 3] = float("nan")
    saved["model"]["tied"] = saved["model"]["up.weight"]
    save(saved, tmp_path / "dcp")
    facts = inspect_checkpoint(tmp_path / "dcp", full=True)
    found = {}
    for flag in facts["flags"]:
        names = flag.get("tensors") or [flag["tensor"]]
        found.setdefault(flag["kind"], []).append(([name.rpartition(":")[2] for name in names], flag["count"]))
    assert found["dead_rows"] == [(["up.weight"], 4)]
    assert found["zero_moment"] == [(["optimizer.state.norm.bias.exp_avg"], 257)]
    assert found["nan"] == [(["model.down.weight"], 1)]
    assert [sorted(names) for names, _ in found["stored_twice"]] == [["model.tied", "model.up.weight"]]
    assert facts["framework"] == "torch.distributed.checkpoint"
    rows = facts["hyperparameters"]
    assert [(row["parameters"], row["options"]["weight_decay"]) for row in rows] == [(4, 0.01), (2, 0.0)]
    assert {row["options"]["lr"] for row in rows} == {2e-3}
    groups = {group["group"]: group for group in facts["layers"]}
    assert groups["up"]["roles"]["moment1"] == (257 * 64 + 257) * 4
    assert groups["up"]["roles"]["weight"] == groups["up"]["roles"]["moment1"]


@pytest.mark.by_default("gpt_bf16.pt", "trainer-adamw")
@pytest.mark.parametrize("name", ["gpt_adamw.pt", "gpt_bf16.pt", "accelerate", "trainer-adamw"])
def test_layers_have_all_bytes_and_every_moment_is_with_its_weight(name, inputs, tmp_path):
    facts = inspect_checkpoint(inputs / name)
    kept = [row for row in facts["roles"] if row["role"] not in ("structure", "file")]
    assert sum(group["bytes"] for group in facts["layers"]) == sum(row["bytes"] for row in kept)
    for group in facts["layers"]:
        assert group["bytes"] == sum(group["roles"].values())
        if group["group"] != "other":
            assert group["roles"]["moment1"] == group["roles"]["moment2"] == group["roles"]["weight"], group
    ckpt8.compress(inputs / name, tmp_path / "run.ckpt8")
    assert inspect_container(tmp_path / "run.ckpt8")["layers"] == facts["layers"]


def test_masters_and_averages_are_no_more_parameters():
    rows = [
        SimpleNamespace(name="model.h.0.w", role=Role.WEIGHT, dtype=DType.BFLOAT16, nbytes=2 * 100),
        SimpleNamespace(name="optimizer.fp32_groups_flat.0", role=Role.WEIGHT, dtype=DType.FLOAT32, nbytes=4 * 100),
        SimpleNamespace(name="ema.h.0.w", role=Role.WEIGHT, dtype=DType.FLOAT32, nbytes=4 * 100),
        SimpleNamespace(name="optimizer.state.0.exp_avg", role=Role.MOMENT1, dtype=DType.FLOAT32, nbytes=4 * 100),
    ]
    parameter = SimpleNamespace(name="h.0.w", moments={"moment1": 3})
    manifest = SimpleNamespace(storages=rows, tensors=[], members=[], parameters=[parameter], directory=None)
    assert [(group["group"], group["parameters"], group["bytes"]) for group in layers_of(manifest)] == [
        ("h.0", 100, 1000),
        ("flat master weights", 0, 400),
    ]
    manifest.storages, manifest.parameters = rows[1:2], []
    assert layers_of(manifest)[0]["parameters"] == 100


@pytest.mark.parametrize(
    ("name", "path", "layer"),
    [
        ("model._orig_mod.transformer.h.10.attn.weight", "transformer.h.10.attn.weight", "transformer.h.10"),
        ("model.safetensors:model.layers.3.mlp.experts.7.up.weight", "layers.3.mlp.experts.7.up.weight", "layers.3"),
        ("__0_0.distcp:model.lm_head.weight[0:8,:]", "lm_head.weight", "lm_head"),
        ("encoder.block.0.w", "encoder.block.0.w", "encoder.block.0"),
        ("weight", "weight", "weight"),
        ("state_dict.module.0.bias#2", "0.bias", "0"),
        (
            "a/model.safetensors:frozen.blocks.11.mlp.experts.7.w1",
            "frozen.blocks.11.mlp.experts.7.w1",
            "frozen.blocks.11",
        ),
    ],
)
def test_names_of_layers(name, path, layer):
    assert plain_path(name) == path
    assert layer_of(path) == layer


def test_odd_options_are_json(tmp_path):
    odd = {"lr": float("nan"), "huge": 10**5000, "text": "x" * 1000, "nested": [[[]]], "deep": {"a": 1}, "params": [0]}
    group = {"eps": float("-inf"), 3: 4, "none": None, "flag": True, **odd}
    tree = {"step": 10**400, "epoch": -1, "optimizer": {"state": {}, "param_groups": [group, 7]}, "w": torch.ones(3)}
    facts = look_at(tree, tmp_path / "a.pt", full=False)
    (row,) = json.loads(json.dumps(facts, allow_nan=False))["hyperparameters"]
    assert row["options"] == {"eps": "-inf", "none": None, "flag": True, "lr": "nan", "text": "x" * 100}
    assert (facts["step"], facts["epoch"]) == (None, None)


def test_the_step_of_the_optimizers_where_nothing_else_counts(tmp_path):
    weights = {name: torch.ones(70, 70) for name in "ab"}
    state = {name: {"step": torch.tensor(9.0), "exp_avg": w, "exp_avg_sq": w} for name, w in weights.items()}
    for other, expected in ((9.0, 9), (8.0, None)):
        state["b"]["step"] = torch.tensor(other)
        save_small({"model": weights, "optimizer": {"state": state}}, tmp_path / str(other))
        assert inspect_checkpoint(tmp_path / str(other))["step"] == expected


def test_plain_values_count(tmp_path):
    for name, tree in {
        "top": {"global_step": 5, "epoch": 2},
        "inside": {"trainer": {"iteration": torch.tensor(5), "epoch": 2.0}},
        "both": {"step": 5, "epoch": 2, "data": {"global_step": 7, "epoch": 9}},
        "no number": {"step": 5, "epoch": 2, "data": {"global_step": "x"}},
    }.items():
        save_small({**tree, "w": torch.ones(70, 70)}, tmp_path / name)
        facts = inspect_checkpoint(tmp_path / name)
        assert (facts["step"], facts["epoch"]) == (5, 2), name


# Directories with checkpoints of several programs


@pytest.fixture
def look(run_command):
    def call(path):
        code, out, err = run_command("inspect", path, "--json")
        assert (code, err) == (0, "")
        facts = json.loads(out)
        return facts["framework"], {row["path"]: row["framework"] for row in facts["origins"]}, facts

    return call


def test_every_checkpoint_of_a_mixed_directory_is_listed(look, run_command, inputs, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(inputs / "trainer-adamw", mixed / "hf")
    shutil.copytree(inputs / "accelerate", mixed / "acc")
    for name in ("lightning.ckpt", "gpt_bf16.pt", "views.pt"):
        shutil.copyfile(inputs / name, mixed / name)
    framework, origins, facts = look(mixed)
    folders = {"acc": "accelerate", "hf": "Hugging Face Trainer"}
    files = {"gpt_bf16.pt": "nanoGPT", "lightning.ckpt": "Lightning", "views.pt": None}
    assert (framework, origins) == (None, folders | files)
    assert (facts["step"], facts["epoch"], facts["version"]) == (None, None, None)
    steps = {row["path"]: row["step"] for row in facts["origins"]}
    alone = {"gpt_bf16.pt": inputs / "gpt_bf16.pt", "hf": inputs / "trainer-adamw"}
    assert {path: steps[path] for path in alone} == {path: look(each)[2]["step"] for path, each in alone.items()}
    out = run_command("inspect", mixed)[1]
    assert f"  gpt_bf16.pt: nanoGPT, step {steps['gpt_bf16.pt']}\n" in out
    assert "  views.pt: of unknown origin\n" in out
    # A container says what the names of the files tell.
    ckpt8.compress(mixed, tmp_path / "mixed.ckpt8")
    assert look(tmp_path / "mixed.ckpt8")[:2] == (None, folders)
    assert "  hf: Hugging Face Trainer\n" in run_command("inspect", tmp_path / "mixed.ckpt8")[1]


def test_programs_below_another_do_not_count(look, inputs, tmp_path):
    """DeepSpeed's and torch's own files in a directory of Trainer, and Lightning's keys in such a file."""
    folder = tmp_path / "run"
    shutil.copytree(inputs / "trainer-adamw", folder)
    (folder / "global_step3").mkdir()
    states = folder / "global_step3" / "mp_rank_00_model_states.pt"
    torch.save({"ds_version": "0.19", "module": {"w": torch.randn(80, 80)}}, states)
    torch.save({"w": torch.randn(80, 80)}, folder / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    assert look(folder)[:2] == ("Hugging Face Trainer", {})
    torch.save({"ds_version": "0.19", "pytorch-lightning_version": "2.6", "w": torch.randn(80, 80)}, states)
    assert look(folder / "global_step3")[:2] == ("DeepSpeed", {})
    # Several checkpoints of one program have its name.
    for name in ("a", "b"):
        shutil.copytree(inputs / "trainer-adamw", tmp_path / "runs" / name)
    assert look(tmp_path / "runs")[:2] == ("Hugging Face Trainer", {})
