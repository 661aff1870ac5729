"""Optimizer state of 8 bits or fewer: recognised, shown, kept byte for byte, and its program goes on with it."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import ckpt8
from ckpt8.checkpoint.meaning.optimizer_state import find_low_bit
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.cli.app import app
from ckpt8.codecs.error_stats import read_error
from ckpt8.core.tensors import DType, Role, TensorSpec
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

INPUTS = Path(__file__).parents[3] / "fixtures" / "inputs" / "low_bit"
SMALL = 64 + 4 * 64 + 4
"""Elements of the parameters that are too small for 8 bits."""

ROWS = {
    "bitsandbytes.pt": ("bitsandbytes", "8-bit", 256, 1),
    "torchao_8.pt": ("torchao", "8-bit", 256, 1),
    "torchao_4.pt": ("torchao", "4-bit", 128, 1),
    "torchao_fp8.pt": ("torchao", "fp8", 256, 1),
    "flash.pt": ("flashoptim", "8-bit", 32, 4),
}

spec = importlib.util.spec_from_file_location("make_low_bit", INPUTS / "make_low_bit.py")
make_low_bit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_low_bit)


def storages(path):
    """The bytes of every storage by the names of the tensors in it, with their roles; no package is needed."""
    from ckpt8.compressing.planning import make_plan
    from ckpt8.compressing.policy import Policy

    found = {}
    with open_checkpoint(path) as checkpoint:
        for stream in make_plan(checkpoint, Policy()).streams:
            buffer = bytearray(stream.storage.nbytes)
            checkpoint.read_into(stream.storage.offset, memoryview(buffer))
            found[stream.spec.name] = stream.spec.role, bytes(buffer)
    return found


@pytest.mark.by_default("bitsandbytes.pt-flash", "torchao_fp8.pt-flash")
@pytest.mark.parametrize("preset", ["flash", "compact", "archive"])
@pytest.mark.parametrize("name", ROWS)
def test_it_is_recognised_and_kept(name, preset, tmp_path, run_command):
    source, container = INPUTS / name, tmp_path / "a.ckpt8"
    program, bits, block, count = ROWS[name]
    line = f"optimizer: {program} {bits} state of {count} parameter{'s' * (count > 1)} (block {block}), kept as it is"
    assert line in run_command.shown("compress", source, "-o", container, "--preset", preset).splitlines()
    for facts in (inspect_checkpoint(source), inspect_container(container)):
        (row,) = facts["low_bit"]
        assert (row["program"], row["bits"], row["block"], row["parameters"]) == ROWS[name]
    restored = ckpt8.restore(container, tmp_path / name)
    before, after = storages(source), storages(restored)
    assert before.keys() == after.keys()
    state = {key for key in before if key.startswith("optimizer.")}
    assert all(before[key] == after[key] for key in state)
    # No scale, table or residual is a moment by accident.
    moments = {key for key, (role, _) in before.items() if role in (Role.MOMENT1, Role.MOMENT2)}
    assert sum(len(before[key][1]) for key in moments) in (0, 2 * 4 * SMALL)
    if program != "flashoptim":
        assert before["model.0.weight"] != after["model.0.weight"]
    stored = {storage.name: storage.codec["id"] for storage in ckpt8.open(container).manifest.storages}
    assert {stored[key] for key in state} == {"lossless/1"}
    for path in (source, container):
        assert line in CliRunner().invoke(app, ["inspect", str(path)]).output.splitlines()
        assert json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).output)["low_bit"]


def tensors(node):
    """All tensors of an optimizer's state dict, those inside tensors of a class of their own too."""
    if hasattr(node, "__tensor_flatten__") and type(node) is not torch.Tensor:
        return [getattr(node, key) for key in node.__tensor_flatten__()[0]]
    if isinstance(node, torch.Tensor):
        return [node]
    values = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors(value)]


def same_bits(x, y):
    return torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("preset", ["flash", "compact", "archive"])
@pytest.mark.parametrize("name", ROWS)
def test_the_program_goes_on_with_it(name, preset, tmp_path):
    package = "pytorch_optimizer" if name == "flash.pt" else ROWS[name][0]
    pytest.importorskip(package, reason=f"{package} is not installed")
    make = make_low_bit.MAKERS[name]
    with make_low_bit.quiet():
        torch.save(make_low_bit.trained(make), tmp_path / "run.pt")
        ckpt8.compress(tmp_path / "run.pt", preset=preset)
        restored = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back.pt")
        runs = []
        for path in (tmp_path / "run.pt", restored):
            model = make_low_bit.network(seed=1)
            optimizer = make(model)
            tree = torch.load(path, weights_only=False)
            optimizer.load_state_dict(tree["optimizer"])
            loaded = [tensor.clone() for tensor in tensors(optimizer.state_dict()["state"])]
            model.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=False)["model"])
            losses = [make_low_bit.step(model, optimizer, seed) for seed in range(100, 103)]
            runs.append((loaded, losses, list(model.parameters())))
    # From equal weights, state that is equal bit for bit gives equal steps.
    (before, losses, weights), (after, again, weights_again) = runs
    assert len(before) == len(after) > 8
    assert all(same_bits(x, y) for x, y in zip(before, after, strict=True))
    assert losses == again
    assert all(torch.equal(x, y) for x, y in zip(weights, weights_again, strict=True))


def wide(name, nested=True, **options):
    """A checkpoint of a large enough network; before its version 0.50 the state was not nested."""
    bnb = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    torch.manual_seed(0)
    model = torch.nn.Linear(80, 80)
    optimizer = getattr(bnb.optim, name)(model.parameters(), lr=1e-3, **options)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 80)).square().sum().backward()
        optimizer.step()
    state = optimizer.state_dict()
    if not nested:
        inner = "__bnb_optimizer_quant_state__"
        state["state"] = {k: {"step": each["step"], **each[inner]} for k, each in state["state"].items()}
    return {"model": model.state_dict(), "optimizer": state}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize(("name", "options", "rule", "moments"), [
    ("AdamW32bit", {}, "adam", 2),
    ("Adam32bit", {}, "adam", 2),
    ("LAMB32bit", {"max_unorm": 1.0}, None, 2),
    ("Lion32bit", {}, "replayed", 1),
])  # fmt: skip
def test_32_bit_moments_that_can_be_told_are_moments(name, options, rule, moments, nested, tmp_path):
    torch.save(wide(name, nested, **options), tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt")
    parameter = next(each for each in manifest.parameters if each.name == "weight")
    assert (parameter.rule and parameter.rule["kind"]) == rule
    assert [manifest.storages[index].codec["id"] for index in parameter.moments.values()] == ["companded8/1"] * moments
    if rule == "adam":
        assert parameter.rule["step"] == 3
        assert 0 < read_error(parameter.error).nmse < 1e-4
    assert inspect_container(tmp_path / "run.ckpt8")["low_bit"] == []
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures


UNCLEAR = [(name, {}) for name in ("RMSprop32bit", "Adagrad32bit", "AdEMAMix")]
UNCLEAR += [("RMSprop32bit", {"eps": 0.0}), ("SGD32bit", {"momentum": 0.9})]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "options"), UNCLEAR)
def test_32_bit_state_that_cannot_be_told_is_kept(name, options, tmp_path):
    torch.save(wide(name, **options), tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt")
    state = [storage for storage in manifest.storages if storage.name.startswith("optimizer.")]
    assert {storage.codec["id"] for storage in state} == {"lossless/1"}
    (row,) = inspect_container(tmp_path / "run.ckpt8")["low_bit"]
    assert row == inspect_checkpoint(tmp_path / "run.pt")["low_bit"][0]
    assert (row["bits"], row["parameters"]) == ("32-bit", 2)
    assert "cannot be told" in CliRunner().invoke(app, ["inspect", str(tmp_path / "run.pt")]).output


@pytest.mark.parametrize(
    "names",
    [["head.exp_avg_codes"], ["a.state1"], ["a.exp_avg.3.codes"], ["a.exp_avg::quantized"], ["a.qmap1", "a.absmax1"]],
)
def test_what_only_looks_like_it(names):
    assert find_low_bit(TensorSpec(name, Role.OTHER, DType.UINT8, (8,)) for name in names) == []


@pytest.mark.filterwarnings("ignore")
def test_our_own_packed_state(tmp_path):
    with make_low_bit.quiet():
        torch.save(make_low_bit.trained(make_low_bit.packed), tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    (row,) = inspect_container(tmp_path / "run.ckpt8")["low_bit"]
    assert (row["program"], row["bits"], row["block"], row["parameters"]) == ("ckpt8.optim", "8-bit", 32, 1)
    restored = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back.pt")
    before, after = storages(tmp_path / "run.pt"), storages(restored)
    assert all(before[key] == after[key] for key in before if ".state.0." in key)
