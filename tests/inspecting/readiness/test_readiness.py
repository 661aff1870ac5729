"""Whole checkpoints: every tensor of the fixtures against float64, containers, distributed ones, and planted faults."""

import math

import pytest
import safetensors.torch
import torch
from dcp_kit import change_metadata, save_small
from readiness_kit import fast_expected, normal, of_gpt, of_optimizer, same, save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

import ckpt8
from ckpt8.inspecting.readiness import FORMATS, inspect_readiness
from ckpt8.inspecting.tensors import PER_TENSOR, WINDOWS, open_tensors, windows


def of_trainer(path):
    weights = safetensors.torch.load_file(path / "model.safetensors")
    found = {f"model.safetensors:{name}": ("weight", value) for name, value in weights.items()}
    return found | of_optimizer(torch.load(path / "optimizer.pt"), "optimizer.pt:")


REAL = {"gpt_adamw.pt": of_gpt, "gpt_bf16.pt": of_gpt, "trainer-adamw": of_trainer}


def check_figures(tensor, role, value):
    """All figures of one tensor are those of ``value``, computed in another way."""
    x = value.double().reshape(-1)
    rms = math.sqrt(float(x.square().mean()))
    assert (tensor["role"], tensor["shape"]) == (role, list(value.shape))
    assert (tensor["looked_at"], tensor["elements"], tensor["nonfinite"]) == (len(x), len(x), 0)
    assert tensor["nonzero"] == int((x != 0).sum()) / len(x)
    assert tensor["absmax"] == float(x.abs().max())
    assert math.isclose(tensor["rms"], rms, rel_tol=1e-9)
    unit = tensor["unit_scale"]
    assert 2**-0.51 < unit * rms < 2**0.51
    for each in FORMATS:
        scale = unit if each.scaling == "unit" else 127 / tensor["absmax"]
        for kind, by in (("raw", 1.0), ("scaled", scale)):
            found, wanted = tensor["formats"][each.id][kind], fast_expected(each.id, x, by, unit)
            # A quotient that is rounded in float64 may tie where the product did not, in int8 alone.
            same(found, wanted, tensor["name"], each.id, kind, tolerance=1e-3 if each.id == "int8" else 1e-7)


@pytest.mark.by_default("trainer-adamw")
@pytest.mark.parametrize("name", REAL)
def test_every_tensor_of_real_checkpoints(inputs, name):
    report = inspect_readiness(inputs / name, full=True)
    wanted = REAL[name](inputs / name)
    assert {each["name"] for each in report["tensors"]} == set(wanted)
    for each in report["tensors"]:
        check_figures(each, *wanted[each["name"]])
    assert report["looked_at"] == report["elements"] == sum(value.numel() for _, value in wanted.values())
    assert (report["full"], report["sample"], report["nonfinite"]) == (True, None, 0)


def test_slices_of_a_tensor_are_one(tmp_path):
    """A tensor in two slices has one scale, and the figures of the whole."""
    x = torch.randn(300, 16, generator=torch.Generator().manual_seed(1))
    x[150:] *= 1000
    save_small({"up.weight/0": x[:150].clone(), "up.weight/1": x[150:].clone()}, tmp_path)

    def merge(metadata):
        old = metadata.state_dict_metadata.pop("up.weight/0")
        metadata.state_dict_metadata.pop("up.weight/1")
        chunks = [ChunkStorageMetadata(torch.Size([k, 0]), torch.Size([150, 16])) for k in (0, 150)]
        metadata.state_dict_metadata["up.weight"] = TensorStorageMetadata(old.properties, x.shape, chunks)
        metadata.storage_data = {
            MetadataIndex("up.weight", torch.Size([150 * int(index.fqn[-1]), 0])): place
            for index, place in metadata.storage_data.items()
        }
        metadata.planner_data = {"up.weight": ("up.weight",)}

    change_metadata(tmp_path, merge)
    with open_tensors(tmp_path) as source:
        (tensor,) = source.tensors
        assert (tensor.name, tensor.shape, tensor.numel) == ("up.weight", None, x.numel())
        assert torch.equal(source.read(tensor, 2000, 3000), x.view(-1)[2000:3000])
    (found,) = inspect_readiness(tmp_path)["tensors"]
    assert math.isclose(found["rms"], math.sqrt(float(x.double().square().mean())), rel_tol=1e-9)


# Samples


@pytest.fixture
def long(tmp_path):
    """Two weights, one longer than a sample."""
    generator = torch.Generator().manual_seed(5)
    tensors = {"long.weight": torch.randn(700, 700, generator=generator) * 0.02, "short.weight": torch.randn(64, 64)}
    path = tmp_path / "long.safetensors"
    safetensors.torch.save_file(tensors, path)
    return path, tensors


def test_sample_is_named_and_is_what_it_says(long):
    path, tensors = long
    report = inspect_readiness(path)
    by_name = {each["name"]: each for each in report["tensors"]}
    assert report["sample"] == {"elements": PER_TENSOR, "windows": WINDOWS}
    assert (report["looked_at"], report["elements"]) == (PER_TENSOR + 4096, 490_000 + 4096)
    flat = tensors["long.weight"].view(-1)
    seen = torch.cat([flat[at : at + n] for at, n in windows(len(flat), PER_TENSOR, 1)]).double()
    assert by_name["long.weight"]["absmax"] == float(seen.abs().max())
    unit = by_name["long.weight"]["unit_scale"]
    found = by_name["long.weight"]["formats"]["float8_e4m3fn"]
    same(found["scaled"], fast_expected("float8_e4m3fn", seen, unit, unit), tolerance=1e-7)
    assert by_name["short.weight"]["looked_at"] == 4096


def test_container_reads_as_the_file_it_was(long, tmp_path):
    path, _ = long
    ckpt8.compress(path, tmp_path / "long.ckpt8", preset="lossless")
    for full in (False, True):
        assert inspect_readiness(tmp_path / "long.ckpt8", full=full) == inspect_readiness(path, full=full)


# Verdicts


def verdicts(report, role="weight"):
    return {each["format"]: each["roles"][role]["verdict"] for each in report["formats"]}


READY = dict.fromkeys(("fp16", "bf16", "float8_e4m3fn", "float8_e5m2"), "ready") | {"int8": "ready with scaling"}


def test_ordinary_weights_are_ready_and_tiny_ones_with_scaling(tmp_path):
    path = save(tmp_path, {"a.weight": normal(128, 128), "b.weight": normal(128, 128, scale=0.5, seed=1)})
    assert verdicts(inspect_readiness(path)) == READY
    report = inspect_readiness(save(tmp_path, {"a.weight": normal(128, 128, scale=1e-6)}))
    assert verdicts(report) == dict.fromkeys(READY, "ready with scaling") | {"bf16": "ready"}
    line = next(each["line"] for each in report["formats"] if each["format"] == "float8_e4m3fn")
    assert line.startswith("fp8 e4m3fn: weights ready with unit scaling (SNR 31.")
    assert ", worst a.weight 31." in line


def test_outliers(tmp_path):
    """One in ten thousand 3000 times larger than the rest: fp16 and bf16 hold it, fp8 and int8 lose all others."""
    x = normal(256, 256)
    x.view(-1)[::10_000] = 3000.0
    report = inspect_readiness(save(tmp_path, {"a.weight": x}), full=True)
    found = verdicts(report)
    assert (found["fp16"], found["bf16"]) == ("ready", "ready")
    assert found["float8_e4m3fn"] == "ready with scaling"
    assert found["int8"] == "not ready"
    figures = report["tensors"][0]["formats"]["float8_e4m3fn"]
    assert figures["raw"]["overflow"] == 7 / 65536
    assert figures["scaled"]["overflow"] == 0


def test_second_moments_may_not_become_zero(tmp_path):
    """The SNR does not see what is small; a step divides by its root."""
    v = 10.0 ** torch.linspace(-14, -4, 4096)
    state = {"state": {0: {"step": torch.tensor(1.0), "exp_avg": normal(4096), "exp_avg_sq": v}}, "param_groups": []}
    torch.save(state, tmp_path / "optimizer.pt")
    report = inspect_readiness(tmp_path / "optimizer.pt")
    found = verdicts(report, "moment2")
    assert (found["bf16"], found["float8_e4m3fn"]) == ("ready", "not ready")
    tensor = next(each for each in report["tensors"] if each["role"] == "moment2")
    scaled = tensor["formats"]["float8_e4m3fn"]["scaled"]
    assert scaled["snr_db"] > 24.1
    assert scaled["underflow"] > 0.4
    line = next(each["line"] for each in report["formats"] if each["format"] == "float8_e4m3fn")
    assert "second moments not ready, 1 of 1 tensors (" in line
    assert "% of state.0.exp_avg_sq become zero)" in line


def test_few_elements_may_stay_in_16_bits(tmp_path):
    """A bias of which a third is next to nothing does not condemn the rest, unless it is a large part of it."""
    bias = normal(30)
    bias[:10] *= 1e-9
    weights = {"a.weight": normal(128, 128), "a.bias": bias}
    report = inspect_readiness(save(tmp_path, weights))
    assert verdicts(report)["float8_e4m3fn"] == "ready but for a few"
    line = next(each["line"] for each in report["formats"] if each["format"] == "float8_e4m3fn")
    assert line == "fp8 e4m3fn: weights ready with unit scaling but for 1 of 2 tensors (33.3 % of a.bias become zero)"
    report = inspect_readiness(save(tmp_path, {"a.weight": normal(40, 40), "a.bias": bias}))
    assert verdicts(report)["float8_e4m3fn"] == "not ready"


def test_tied_and_strided_weights(tmp_path):
    """One storage is looked at once, a strided view element by element, and one that was expanded not at all."""
    base = normal(96, 64)
    state = {
        "a": base,
        "tied": base,
        "row": normal(8, 200)[:, ::2],
        "turned": normal(30, 50).t(),
        "wide": normal(1).expand(999),
    }
    torch.save({"model": state}, tmp_path / "views.pt")
    report = inspect_readiness(tmp_path / "views.pt")
    found = {each["name"]: each for each in report["tensors"]}
    assert set(found) == {"model.a", "model.row", "model.turned"}
    for name, figures in found.items():
        check_figures(figures, "weight", state[name.removeprefix("model.")])
    assert report["left_out"] == {"with more elements than are stored": 1}
