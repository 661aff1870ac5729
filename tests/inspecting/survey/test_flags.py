"""Red flags: each planted fault is found with its count, none is invented, and a sample says what it is.

Names that a pickle would call outside ``weights_only`` are one of them, in every report, and a line in ``restore``.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
from pathlib import PurePosixPath

import pytest
import torch
from diff_kit import tensors_of as flatten
from disk_kit import flip_bit
from safetensors.torch import load_file
from survey_kit import ROWS, WIDTH, as_pairs, dead_rows, expected, healthy, plant, unseen
from torch import _weights_only_unpickler as unpickler

import ckpt8
from ckpt8.checkpoint.readers.torch_rules import ALLOWED
from ckpt8.inspecting import tensors
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

pytestmark = pytest.mark.usefixtures("without_predictions")


def flags_of(tree, tmp_path, *, full):
    torch.save(tree, tmp_path / "run.pt")
    return inspect_checkpoint(tmp_path / "run.pt", full=full)


@pytest.mark.slow
def test_each_planted_fault_is_found_and_no_other(tmp_path):
    tree = healthy()
    rows = plant(tree)
    facts = flags_of(tree, tmp_path, full=True)
    assert as_pairs(facts["flags"]) == expected(flatten(tree)) | rows
    (twins,) = [flag for flag in facts["flags"] if flag["kind"] == "stored_twice"]
    assert twins["tensors"] == ["model.embed.weight", "model.head.weight"]
    assert twins["count"] == twins["of"] == ROWS * WIDTH
    assert "byte-identical" in twins["message"]
    kinds = {flag["kind"]: flag["message"] for flag in facts["flags"]}
    assert len(kinds) == 9
    # 37 of 65,000 second moments.
    fp16_zero = "layers.0.weight, fp16 would round <0.1 % of the nonzero values to zero, in 65,000 elements"
    assert kinds["moment2_fp16_zero"] == fp16_zero
    scales = r".*in fp16 the scale would be zero for \S+ % of the groups, subnormal for \S+ %, in [\d,]+ elements"
    assert re.fullmatch(scales, kinds["fp16_scales"])
    assert not any(flag["sampled"] for flag in facts["flags"])
    assert all(flag["fraction"] == flag["count"] / flag["of"] for flag in facts["flags"])
    assert dead_rows([tree["optimizer"]["state"][0][key] for key in ("exp_avg", "exp_avg_sq")]) == (5, ROWS)


def test_second_moments_below_zero(tmp_path, run_command):
    """Those alone: first moments and weights have either sign."""
    tree = healthy()
    state = tree["optimizer"]["state"]
    state[0]["exp_avg"].neg_()
    tree["model"]["head.weight"].neg_()
    assert flags_of(tree, tmp_path, full=False)["flags"] == []
    seconds = state[0]["exp_avg_sq"]
    seconds.view(-1)[unseen(seconds.shape)] = -1.0
    assert flags_of(tree, tmp_path, full=False)["flags"] == []
    seconds[0, 0] = -0.25
    (flag,) = flags_of(tree, tmp_path, full=False)["flags"]
    assert (flag["kind"], flag["tensor"], flag["count"]) == ("negative_moment2", "optimizer.state.0.exp_avg_sq", 1)
    assert flag["sampled"]
    assert flag["of"] < ROWS * WIDTH
    (flag,) = [flag for flag in flags_of(tree, tmp_path, full=True)["flags"] if flag["kind"] == "negative_moment2"]
    assert (flag["count"], flag["of"]) == (2, ROWS * WIDTH)
    ckpt8.compress(tmp_path / "run.pt", tmp_path / "run.ckpt8")
    kept = inspect_container(tmp_path / "run.ckpt8", full=True)["flags"]
    assert [flag["count"] for flag in kept if flag["kind"] == "negative_moment2"] == [2]
    _, out, _ = run_command("inspect", tmp_path / "run.pt", "--full", "--html", tmp_path / "a.html")
    assert "second moments below zero: 1 tensor\n" in out
    assert "second moments below zero" in (tmp_path / "a.html").read_text()


@pytest.mark.slow
def test_copies_that_differ_in_one_element_are_told_apart_by_full_alone(tmp_path):
    tree = healthy()
    embed = tree["model"]["embed.weight"]
    tree["model"]["head.weight"] = embed.clone()
    tree["model"]["head.weight"].view(-1)[unseen(embed.shape)] += 1
    (flag,) = flags_of(tree, tmp_path, full=False)["flags"]
    assert (flag["kind"], flag["sampled"]) == ("stored_twice", True)
    assert flags_of(tree, tmp_path, full=True)["flags"] == []
    tree["model"]["head.weight"] = embed.clone().view(ROWS // 5, WIDTH * 5)
    (flag,) = flags_of(tree, tmp_path, full=False)["flags"]
    assert flag["tensors"] == ["model.embed.weight", "model.head.weight"]
    tree["model"]["head.weight"] = embed  # tied in the file as well
    assert flags_of(tree, tmp_path, full=True)["flags"] == []


def test_copies_that_are_flags_and_copies_that_are_none(tmp_path):
    """Three copies are one flag, constants none; a parameter without any moment has no dead rows."""
    tree = healthy()
    for key in ("exp_avg", "exp_avg_sq"):
        tree["optimizer"]["state"][0][key].zero_()
    model = tree["model"]
    model.update(a=model["bias"].clone(), b=model["bias"].clone())
    model.update(ones=torch.ones(64, 64), again=torch.ones(64, 64), mask=torch.eye(80), other=torch.eye(80))
    # The best score of a callback may be infinite.
    tree["callbacks"] = {"best": torch.tensor(float("inf")), "scores": torch.tensor([1.0, float("inf")])}
    inf, *zero, copies = flags_of(tree, tmp_path, full=True)["flags"]
    assert (inf["kind"], inf["tensor"]) == ("inf", "callbacks.scores")
    assert [flag["kind"] for flag in zero] == ["zero_moment", "zero_moment"]
    assert copies["tensors"] == ["model.bias", "model.a", "model.b"]


FLOATS = [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_that_are_not_finite_in_every_type(dtype, tmp_path):
    x = (torch.rand(80, 80) + 0.5).to(dtype)
    x.view({1: torch.uint8, 2: torch.int16, 8: torch.int64}[x.element_size()])[3, 4] = -1
    torch.save({"model": {"x": x, "count": torch.arange(5)}}, tmp_path / "a.pt")
    facts = inspect_checkpoint(tmp_path / "a.pt", full=True)
    assert [(flag["kind"], flag["count"]) for flag in facts["flags"]] == [("nan", int(x.float().isnan().sum()))]
    assert facts["sample"] == {"elements": 6400, "of": 6400, "full": True}


FILES = ["gpt_adamw.pt", "gpt_stable_adamw.pt", "gpt_came.pt", "gpt_bf16.pt", "crc_off.pt", "lightning.ckpt"]


def tensors_of(root):
    """All tensors of a fixture as other programs load them, by the names that ckpt8 has for them."""
    if root.is_file():
        with torch.serialization.safe_globals([argparse.Namespace, PurePosixPath]):
            return flatten(torch.load(root, weights_only=True))
    optimizer = next(path for path in (root / "optimizer.pt", root / "optimizer.bin") if path.exists())
    state = flatten(torch.load(optimizer, weights_only=True), f"{optimizer.name}:")
    weights = {f"model.safetensors:{name}": x for name, x in load_file(root / "model.safetensors").items()}
    return weights | {name.replace(":.", ":"): x for name, x in state.items()}


@pytest.mark.by_default("gpt_came.pt", "crc_off.pt", "trainer-adamw")
@pytest.mark.parametrize("name", [*FILES, "accelerate", "trainer-adamw", "trainer-stable-adamw"])
def test_flags_of_real_checkpoints_are_those_of_their_values(name, inputs):
    tensors = tensors_of(inputs / name)
    pairs = as_pairs(inspect_checkpoint(inputs / name, full=True)["flags"])
    rows = sorted(each for (kind, _), each in pairs.items() if kind == "dead_rows")
    flags = {key: each for key, each in pairs.items() if key[0] != "dead_rows"}
    assert flags == expected(tensors)
    assert not {"nan", "inf", "zero_moment", "bf16_in_fp32"} & {kind for kind, _ in flags}
    states = {}
    for key, x in tensors.items():
        place, _, last = key.rpartition(".")
        if last in ("exp_avg", "exp_avg_sq", "momentum_buffer") and x.dim() > 1:
            states.setdefault(place, []).append(x)
    assert rows == sorted(dead for dead in map(dead_rows, states.values()) if 0 < dead[0] < dead[1])


@pytest.mark.parametrize("name", ["legacy.pt", "views.pt", "module.pt", "custom_objects.pt", "low_bit/flash.pt"])
def test_odd_fixtures_raise_no_alarm(name, inputs):
    kinds = {flag["kind"] for flag in inspect_checkpoint(inputs / name, full=True)["flags"]}
    named = {"foreign_globals"} if name in ("module.pt", "custom_objects.pt") else set()
    assert kinds - named <= {"moment2_fp16_zero", "fp16_scales"}


@pytest.mark.by_default("views.pt", "trainer-adamw")
@pytest.mark.parametrize("name", ["gpt_adamw.pt", "views.pt", "trainer-adamw", "low_bit/torchao_fp8.pt"])
def test_a_container_has_the_flags_of_its_original(name, inputs, tmp_path):
    ckpt8.compress(inputs / name, tmp_path / "run.ckpt8", preset="lossless")
    raw = inspect_checkpoint(inputs / name, full=True)
    stored = inspect_container(tmp_path / "run.ckpt8", full=True)
    assert (stored["flags"], stored["sample"]) == (raw["flags"], raw["sample"])
    quick = inspect_container(tmp_path / "run.ckpt8")
    assert quick["flags"] == [flag for flag in raw["flags"] if flag["kind"] == "foreign_globals"]
    assert quick["sample"] == {"elements": 0, "of": raw["sample"]["of"], "full": False}


@pytest.mark.parametrize("full", [False, True])
def test_nothing_is_found_where_nothing_is(full, tmp_path):
    facts = flags_of(healthy(), tmp_path, full=full)
    assert facts["flags"] == []
    numel = sum(x.numel() for x in flatten(healthy()).values())
    assert facts["sample"]["of"] == numel
    assert facts["sample"]["full"] is full
    assert (facts["sample"]["elements"] == numel) is full


@pytest.mark.slow
def test_a_sample_does_not_claim_what_it_did_not_see(tmp_path, run_command):
    tree = healthy()
    plant(tree)
    facts = flags_of(tree, tmp_path, full=False)
    found = {flag["kind"]: flag for flag in facts["flags"]}
    assert "nan" not in found
    assert found["inf"]["sampled"] is False
    assert (found["stored_twice"]["sampled"], found["zero_moment"]["sampled"]) == (True, True)
    assert found["zero_moment"]["count"] < ROWS * WIDTH
    whole = [range(at, at + n) for at, n in tensors.windows(ROWS * WIDTH, tensors.PER_TENSOR, WIDTH)]
    rows = [row for row in range(ROWS) if any(row * WIDTH in w and (row + 1) * WIDTH - 1 in w for w in whole)]
    dead = found["dead_rows"]
    assert (dead["count"], dead["of"]) == (len({3, 4, 5, 6, 7} & set(rows)), len(rows))
    assert f"elements looked at, of {ROWS * WIDTH:,}" in found["zero_moment"]["message"]
    _, out, _ = run_command("inspect", tmp_path / "run.pt")
    share = facts["sample"]["elements"] / facts["sample"]["of"]
    assert 0 < share < 1
    assert f"looked at {int(share * 1000) / 10} % of {facts['sample']['of']:,} elements; --full reads all" in out
    _, out, _ = run_command("inspect", "--full", tmp_path / "run.pt")
    assert f"looked at all {facts['sample']['of']:,} elements" in out
    assert f"model.layers.0.weight: 1 NaN in {500 * 130:,} elements" in out
    torch.save(healthy(), tmp_path / "run.pt")
    _, out, _ = run_command("inspect", tmp_path / "run.pt")
    assert re.search(r"\nRed flags: none in \d\d\.\d % of [\d,]+ elements; --full reads all\n", out)


# Names that a pickle would call


class Evil:
    """Calls something when it is unpickled."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def test_the_names_are_those_that_torch_allows():
    """All of this version, and beyond them only what other versions allow."""
    allowed = set(unpickler._get_allowed_globals())
    assert allowed - ALLOWED == set()
    types = {name for name in ALLOWED if "int" in name or "float" in name or "bits" in name}
    assert ALLOWED - allowed <= {"torch._utils._rebuild_nested_tensor", "torch.bcomplex32"} | types


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("zipped", [True, False])
def test_every_report_of_a_file_has_the_names(zipped, protocol, run_command, tmp_path):
    tree = {"a": Evil(os.system, "true"), "b": Evil(eval, "1"), "model": {"w": torch.randn(80, 80)}}
    source, packed = tmp_path / "run.pt", tmp_path / "run.ckpt8"
    torch.save(tree, source, _use_new_zipfile_serialization=zipped, pickle_protocol=protocol)
    ckpt8.compress(source)
    for path in (source, packed):
        code, out, err = run_command("inspect", path)
        assert (code, err) == (0, "")
        assert "classes and functions that torch.load(weights_only=True) refuses" in out
        assert "run.pt: builtins.eval, posix.system" in out
        for flags in ((), ("--full",)):
            found = json.loads(run_command("inspect", path, "--json", *flags)[1])["flags"][0]
            assert (found["kind"], found["tensor"], found["count"]) == ("foreign_globals", "run.pt", 2)
            assert found["globals"] == ["builtins.eval", "posix.system"]
        run_command("inspect", path, "--html", tmp_path / "r.html", "--force")
        assert "run.pt: builtins.eval, posix.system" in (tmp_path / "r.html").read_text()
    for shown in ((), ("--json",)):
        code, out, err = run_command("restore", packed, "-o", tmp_path / "back.pt", "--force", *shown)
        assert code == 0
        assert err.startswith(
            f"ckpt8: {tmp_path / 'back.pt'}: refers to builtins.eval, posix.system, which torch.load "
        )
        assert err.count("\n") == 1
    if zipped and protocol == 2:
        with pytest.raises(pickle.UnpicklingError):
            torch.load(source, weights_only=True)


def test_files_of_a_directory_are_named(run_command, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    torch.save({"model": {"w": torch.randn(80, 80)}}, folder / "clean.pt")
    torch.save({"evil": Evil(os.system, "true"), "w": torch.randn(80, 80)}, folder / "evil\x1b[2K.pt")
    ckpt8.compress(folder, tmp_path / "run.ckpt8")
    for path in (folder, tmp_path / "run.ckpt8"):
        flags = json.loads(run_command("inspect", path, "--json")[1])["flags"]
        assert [flag["tensor"] for flag in flags if flag["kind"] == "foreign_globals"] == ["evil\x1b[2K.pt"]
        assert r"evil\x1b[2K.pt: posix.system" in run_command("inspect", path)[1]


def test_a_damaged_skeleton_is_still_inspected(run_command, tmp_path):
    """Plain ``inspect`` reads no tensor; ``verify`` finds the damage."""
    torch.save({"evil": Evil(os.system, "true"), "w": torch.randn(80, 80)}, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    path = tmp_path / "run.ckpt8"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    start, _ = json.loads(content[8 : 8 + length])["ckpt8.skeleton/bytes"]["data_offsets"]
    flip_bit(path, 8 + length + start + 5)
    code, out, err = run_command("inspect", path)
    assert (code, err) == (0, "")
    assert "posix.system" not in out
    assert run_command("verify", path)[0] == 3
