"""Readiness against an original: the error of containers, of converted files and of 8-bit weights, pair by pair."""

import math

import pytest
import safetensors.torch
import torch
from readiness_kit import normal, of_gpt, save

import ckpt8
from ckpt8.core.errors import CheckFailedError, InputError
from ckpt8.inspecting.readiness import inspect_readiness
from ckpt8.inspecting.tensors import open_tensors


def nmse_db(stored, original):
    error = (stored.double() - original.double()).square().sum() / original.double().square().sum()
    return -10 * math.log10(float(error)) if float(error) else None


def test_names_that_fit_twice_are_not_paired(tmp_path):
    x = normal(8, 8)
    torch.save(
        {"model": {name: x.clone() for name in ("a.up.weight", "b.up.weight", "a.down.weight")}}, tmp_path / "two"
    )
    safetensors.torch.save_file({"up.weight": x, "down.weight": x.clone(), "bias": normal(8)}, tmp_path / "one")
    for mine, theirs in (("two", "one"), ("one", "two")):
        report = inspect_readiness(tmp_path / mine, original=tmp_path / theirs)
        (paired,) = (each for each in report["tensors"] if each["measured"] is not None)
        assert {paired["name"], paired["measured"]["name"]} == {"model.a.down.weight", "down.weight"}
        assert report["against"]["unpaired"] == 2


@pytest.mark.parametrize("turned", [(True, True), (True, False), (False, True)])
def test_elements_are_compared_in_one_order(tmp_path, turned):
    """However the two lie in memory."""
    x = normal(60, 90)
    y = x.bfloat16().float()
    paths = []
    for name, value, is_turned in (("y.pt", y, turned[0]), ("x.pt", x, turned[1])):
        laid = value.t().contiguous().t() if is_turned else value
        torch.save({"model": {"up.weight": laid}}, tmp_path / name)
        paths.append(tmp_path / name)
    (found,) = inspect_readiness(paths[0], original=paths[1])["tensors"]
    assert math.isclose(found["measured"]["snr_db"], nmse_db(y, x), rel_tol=1e-9)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_beside_8_bit_weights(tmp_path, dtype, rows):
    x = normal(96, 80, scale=0.02) * torch.arange(1, 97).unsqueeze(1)
    top = 127 if dtype is torch.int8 else 448
    scale = (x.abs().amax(1, keepdim=True) if rows else x.abs().amax().view(1)) / top
    codes = (x / scale).round().to(dtype) if dtype is torch.int8 else (x / scale).clamp(-top, top).to(dtype)
    (tmp_path / "new").mkdir()
    path = save(tmp_path / "new", {"up.weight": codes, "up.weight_scale": scale, "up.bias": normal(96)})
    original = save(tmp_path, {"up.weight": x, "up.bias": normal(96)})
    report = inspect_readiness(path, original=original)
    found = {each["name"]: each for each in report["tensors"]}
    assert set(found) == {"up.weight", "up.bias"}
    assert found["up.weight"]["formats"] is None
    assert math.isclose(found["up.weight"]["measured"]["snr_db"], nmse_db(codes.float() * scale, x), rel_tol=1e-9)
    assert found["up.bias"]["measured"]["snr_db"] is None
    with open_tensors(path) as source:
        (tensor,) = (each for each in source.tensors if each.scale is not None)
        assert torch.equal(source.read(tensor, 100, 2003), (codes.float() * scale).view(-1)[100:2003])
    alone = inspect_readiness(save(tmp_path / "new", {"up.weight": codes, "up.bias": normal(96)}))
    assert alone["left_out"] == {f"of {str(dtype).removeprefix('torch.')}": 1}


def test_other_checkpoints_are_refused(inputs, tmp_path):
    with pytest.raises(CheckFailedError, match="no weight or moment"):
        inspect_readiness(inputs / "lightning.ckpt", original=inputs / "gpt_adamw.pt")
    with pytest.raises(InputError, match="No such file"):
        inspect_readiness(tmp_path / "nothing.pt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "notes.txt").write_text("no tensors")
    with pytest.raises(InputError, match="a directory without tensors"):
        inspect_readiness(tmp_path / "empty")


@pytest.mark.slow
def test_error_of_a_container(inputs, tmp_path):
    source, target = inputs / "gpt_adamw.pt", tmp_path / "gpt.ckpt8"
    ckpt8.compress(source, target)
    original, stored = of_gpt(source), ckpt8.load(target)
    report = inspect_readiness(target, full=True, original=source)
    assert report["against"]["unpaired"] == 0
    for each in report["tensors"]:
        role, x = original[each["name"]]
        if role == "weight":
            y = stored["model"][each["name"].removeprefix("model.")]
        else:
            _, _, number, key = each["name"].split(".")
            y = stored["optimizer"]["state"][int(number)][key]
        wanted = nmse_db(y, x)
        found = each["measured"]
        assert found["name"] == each["name"]
        assert found["snr_db"] is None if wanted is None else math.isclose(found["snr_db"], wanted, rel_tol=1e-9)
        assert found["max_error"] == float((y.double() - x.double()).abs().max())
        assert found["differing"] == int((y != x).sum()) / x.numel()
    assert {role: total["tensors"] for role, total in report["against"]["roles"].items()} == {
        "weight": 28,
        "moment1": 28,
        "moment2": 28,
    }


@pytest.mark.slow
def test_moments_pair_by_parameter(inputs, tmp_path, run_command):
    source, target = inputs / "gpt_adamw.pt", tmp_path / "dcp"
    assert run_command("convert", source, target, "--to", "dcp")[0] == 0
    report = inspect_readiness(target, full=True, original=source)
    moments = [each for each in report["tensors"] if each["role"] != "weight"]
    assert len(moments) == 56
    for each in moments:
        assert each["measured"]["name"].startswith("optimizer.state.")
        assert (each["measured"]["snr_db"], each["measured"]["differing"]) == (None, 0)
