"""``inspect --readiness``: whole checkpoints against float64, verdicts, errors against an original, and the command."""

import json
import math
import re
from functools import partial

import pytest
import safetensors.torch
import torch
from dcp_kit import change_metadata, save_small
from readiness_kit import fast_expected, normal, of_gpt, of_optimizer, same, save
from rich.cells import cell_len
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

import ckpt8
from ckpt8.core.errors import CheckFailedError, InputError
from ckpt8.inspecting.readiness import FORMATS, inspect_readiness
from ckpt8.inspecting.tensors import PER_TENSOR, WINDOWS, open_tensors, windows

pytestmark = pytest.mark.usefixtures("without_predictions")


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
        for kind, by in (("raw", 1.0), ("scaled", unit if each.scaling == "unit" else 127 / tensor["absmax"])):
            found, wanted = tensor["formats"][each.id][kind], fast_expected(each.id, x, by, unit)
            # A quotient that is rounded in float64 may tie where the product did not, in int8 alone.
            same(found, wanted, tensor["name"], each.id, kind, tolerance=1e-3 if each.id == "int8" else 1e-7)


@pytest.mark.by_default("trainer-adamw")
@pytest.mark.parametrize("name", REAL)
def test_every_tensor_of_real_checkpoints(inputs, name):
    report = inspect_readiness(inputs / name, full=True)
    wanted = REAL[name](inputs / name)
    for each in report["tensors"]:
        check_figures(each, *wanted[each["name"]])
    assert {each["name"] for each in report["tensors"]} == set(wanted)
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


def test_a_sample_is_named_and_a_container_reads_as_the_file_it_was(tmp_path):
    """Two weights, one longer than a sample."""
    tensors = {"long.weight": normal(700, 700, scale=0.02, seed=5), "short.weight": normal(64, 64)}
    path = save(tmp_path, tensors)
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
    ckpt8.compress(path, tmp_path / "long.ckpt8", preset="lossless")
    for full in (False, True):
        assert inspect_readiness(tmp_path / "long.ckpt8", full=full) == inspect_readiness(path, full=full)


# Verdicts


def verdicts(report, role="weight"):
    return {each["format"]: each["roles"][role]["verdict"] for each in report["formats"]}


def fp8_line(report):
    return next(each["line"] for each in report["formats"] if each["format"] == "float8_e4m3fn")


READY = dict.fromkeys(("fp16", "bf16", "float8_e4m3fn", "float8_e5m2"), "ready") | {"int8": "ready with scaling"}


def test_ordinary_weights_are_ready_and_tiny_ones_with_scaling(tmp_path):
    path = save(tmp_path, {"a.weight": normal(128, 128), "b.weight": normal(128, 128, scale=0.5, seed=1)})
    assert verdicts(inspect_readiness(path)) == READY
    report = inspect_readiness(save(tmp_path, {"a.weight": normal(128, 128, scale=1e-6)}))
    assert verdicts(report) == dict.fromkeys(READY, "ready with scaling") | {"bf16": "ready"}
    assert fp8_line(report).startswith("fp8 e4m3fn: weights ready with unit scaling (SNR 31.")
    assert ", worst a.weight 31." in fp8_line(report)


def test_outliers(tmp_path):
    """One in ten thousand 3000 times larger than the rest: fp16 and bf16 hold it, fp8 and int8 lose all others."""
    x = normal(256, 256)
    x.view(-1)[::10_000] = 3000.0
    report = inspect_readiness(save(tmp_path, {"a.weight": x}), full=True)
    found = {name: verdict for name, verdict in verdicts(report).items() if name != "float8_e5m2"}
    assert found == {"fp16": "ready", "bf16": "ready", "float8_e4m3fn": "ready with scaling", "int8": "not ready"}
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
    assert "second moments not ready, 1 of 1 tensors (" in fp8_line(report)
    assert "% of state.0.exp_avg_sq become zero)" in fp8_line(report)


def test_few_elements_may_stay_in_16_bits(tmp_path):
    """A bias of which a third is next to nothing does not condemn the rest, unless it is a large part of it."""
    bias = normal(30)
    bias[:10] *= 1e-9
    report = inspect_readiness(save(tmp_path, {"a.weight": normal(128, 128), "a.bias": bias}))
    assert verdicts(report)["float8_e4m3fn"] == "ready but for a few"
    few = "1 of 2 tensors (33.3 % of a.bias become zero)"
    assert fp8_line(report) == f"fp8 e4m3fn: weights ready with unit scaling but for {few}"
    report = inspect_readiness(save(tmp_path, {"a.weight": normal(40, 40), "a.bias": bias}))
    assert verdicts(report)["float8_e4m3fn"] == "not ready"


def test_tied_and_strided_weights(tmp_path):
    """One storage is looked at once, a strided view element by element, and one that was expanded not at all."""
    base = normal(96, 64)
    views = {"row": normal(8, 200)[:, ::2], "turned": normal(30, 50).t(), "wide": normal(1).expand(999)}
    state = {"a": base, "tied": base, **views}
    torch.save({"model": state}, tmp_path / "views.pt")
    report = inspect_readiness(tmp_path / "views.pt")
    found = {each["name"]: each for each in report["tensors"]}
    assert set(found) == {"model.a", "model.row", "model.turned"}
    for name, figures in found.items():
        check_figures(figures, "weight", state[name.removeprefix("model.")])
    assert report["left_out"] == {"with more elements than are stored": 1}


# Against an original


def nmse_db(stored, original):
    error = (stored.double() - original.double()).square().sum() / original.double().square().sum()
    return -10 * math.log10(float(error)) if float(error) else None


def test_names_that_fit_twice_are_not_paired(tmp_path):
    x = normal(8, 8)
    model = {name: x.clone() for name in ("a.up.weight", "b.up.weight", "a.down.weight")}
    torch.save({"model": model}, tmp_path / "two")
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
    for name, value, is_turned in (("y.pt", y, turned[0]), ("x.pt", x, turned[1])):
        torch.save({"model": {"up.weight": value.t().contiguous().t() if is_turned else value}}, tmp_path / name)
    (found,) = inspect_readiness(tmp_path / "y.pt", original=tmp_path / "x.pt")["tensors"]
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
        place = each["name"].split(".", 3)
        model, states = stored["model"], stored["optimizer"]["state"]
        y = model[each["name"].removeprefix("model.")] if role == "weight" else states[int(place[2])][place[3]]
        wanted = nmse_db(y, x)
        found = each["measured"]
        assert found["name"] == each["name"]
        assert found["snr_db"] is None if wanted is None else math.isclose(found["snr_db"], wanted, rel_tol=1e-9)
        assert found["max_error"] == float((y.double() - x.double()).abs().max())
        assert found["differing"] == int((y != x).sum()) / x.numel()
    totals = {role: total["tensors"] for role, total in report["against"]["roles"].items()}
    assert totals == {"weight": 28, "moment1": 28, "moment2": 28}


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


# The command


def section(out):
    """What is printed about readiness."""
    return out[out.index("Low-precision readiness") :]


@pytest.fixture
def run(run_command):
    """Run inspect."""
    return partial(run_command, "inspect", columns=200)


@pytest.mark.by_default("lightning.ckpt-200")
@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("name", ["gpt_came.pt", "trainer-adamw", "lightning.ckpt"])
def test_nothing_is_wider_than_the_terminal(run, inputs, name, columns):
    code, out, _ = run(inputs / name, "--readiness", "--tensors", columns=columns)
    assert code == 0
    lines = section(out).splitlines()
    assert max(map(cell_len, lines)) <= columns
    assert "\x1b" not in out
    assert "…" not in "".join(lines)
    assert all(label in "".join(lines) for label in ("fp16", "bf16", "fp8 e4m3fn", "fp8 e5m2", "int8"))


def test_what_is_not_finite_is_said(run, tmp_path):
    path = tmp_path / "broken.safetensors"
    weights = {"a.weight": torch.tensor([1.0, float("nan"), float("inf")]), "b.weight": torch.ones(2, dtype=torch.int8)}
    safetensors.torch.save_file(weights, path)
    code, out, _ = run(path, "--readiness")
    assert code == 0
    assert "2 of them are NaN or infinite, and are left out" in section(out)
    assert "left out: 1 tensor of int8" in section(out)
    json.loads(run(path, "--readiness", "--json")[1])


def test_raw_checkpoints_compare_with_readiness_only(run, inputs, tmp_path):
    other = inputs / "gpt_stable_adamw.pt"
    code, out, err = run(inputs / "gpt_came.pt", "--against", other)
    assert (code, out) == (2, "")
    assert "which --against compares with its original; compare the two with ckpt8 diff" in err
    code, out, _ = run(inputs / "gpt_came.pt", "--against", other, "--readiness", columns=300)
    assert code == 0
    assert "weights, 28 tensors: SNR" in section(out)


def test_names_cannot_command_the_terminal(run, tmp_path):
    path = tmp_path / "hostile.safetensors"
    safetensors.torch.save_file({"[red]a\x1b[2J.weight": torch.ones(9), "b[/].weight": torch.ones(9) * 1e-30}, path)
    for columns in (40, 200):
        code, out, _ = run(path, "--readiness", "--tensors", columns=columns)
        assert code == 0
        assert "\x1b" not in out
        assert "[red]a" in out


def test_one_line_for_what_does_not_compare(run, inputs):
    for name, expected, words in (
        ("gpt_came.pt", 1, r"no weight or moment[^\n]*"),
        ("nothing.pt", 3, "No such file or directory"),
    ):
        code, out, err = run(inputs / "lightning.ckpt", "--against", inputs / name, "--readiness")
        assert (code, out) == (expected, "")
        assert re.fullmatch(rf"ckpt8: [^\n]*{words}\n", err)
