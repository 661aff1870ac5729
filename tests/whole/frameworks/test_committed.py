"""Checkpoints that frameworks wrote, committed: they come back, and errors are what they are said to be.

No framework is needed. ``fixtures/README.md`` says how they were made.
"""

from __future__ import annotations

import pytest
import torch
from frameworks_kit import through
from safetensors.torch import load_file
from updates_kit import adam_update, stable_update, update_errors

import ckpt8
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

DIRECTORIES = {
    "trainer-adamw": ("optimizer.pt", {"adam"}, 200),
    "trainer-stable-adamw": ("optimizer.pt", {"stable_adamw"}, None),
    "accelerate": ("optimizer.bin", {"adam"}, 300),
}


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", DIRECTORIES)
def test_lossless_is_the_same_directory(name, inputs, tmp_path):
    _, restored = through(inputs / name, tmp_path, "lossless")
    assert files(restored) == files(inputs / name)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_flash_changes_weights_and_moments_alone_and_states_the_error_of_the_update(name, inputs, tmp_path):
    optimizer, kinds, step = DIRECTORIES[name]
    manifest, restored = through(inputs / name, tmp_path, "flash")
    before, after = files(inputs / name), files(restored)
    assert {file for file in before if before[file] != after[file]} == {"model.safetensors", optimizer}
    formats = {member.path: member.format for member in manifest.members}
    assert {file for file, found in formats.items() if found == "file"} == {f for f in before if f.endswith(".json")}
    weights = [load_file(folder / "model.safetensors") for folder in (inputs / name, restored)]
    assert list(weights[0]) == list(weights[1])
    for key, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][key], tensor, rtol=1.55e-5, atol=0)
    states = [torch.load(folder / optimizer, weights_only=True) for folder in (inputs / name, restored)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert {parameter.rule["kind"] for parameter in manifest.parameters} == kinds
    if step:
        assert {parameter.rule["step"] for parameter in manifest.parameters} == {step}
    nmse, worst, _ = update_errors(*states, stable_update if kinds == {"stable_adamw"} else adam_update)
    errors = inspect_container(tmp_path / f"{name}.ckpt8")["errors"]
    stated = errors["update"]
    assert errors["update_unknown"] == 0
    assert stated["nmse"] == pytest.approx(nmse, rel=1e-3)
    assert stated["max_error"] == pytest.approx(worst, rel=1e-3)
    assert 0 < nmse < 3e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DIRECTORIES, "lightning.ckpt"])
def test_inspect_tells_the_rules_before_anything_is_compressed(name, inputs):
    facts = inspect_checkpoint(inputs / name)
    found = {row["rule"] for row in facts["optimizer"]}
    assert found == (DIRECTORIES[name][1] if name in DIRECTORIES else {"adam", "momentum"})


@pytest.mark.slow
def test_lightning(inputs, tmp_path):
    source = inputs / "lightning.ckpt"
    _, restored = through(source, tmp_path / "lossless", "lossless")
    assert restored.read_bytes() == source.read_bytes()
    manifest, restored = through(source, tmp_path / "flash", "flash")
    assert [parameter.rule["kind"] for parameter in manifest.parameters] == ["momentum"] + ["adam"] * 4
    # It holds an argparse.Namespace, and no class of Lightning.
    before, after = (torch.load(path, weights_only=False) for path in (source, restored))
    for key in before.keys() - {"state_dict", "optimizer_states"}:
        assert after[key] == before[key], key
    nmse, worst, _ = update_errors(before["optimizer_states"][1], after["optimizer_states"][1])
    assert 0 < nmse < 3e-4
    assert worst < 0.1
    momentum = [each["optimizer_states"][0]["state"][0]["momentum_buffer"] for each in (before, after)]
    assert momentum[0].numel() < 4096
    assert torch.equal(*momentum)
    with pytest.raises(Exception, match="Namespace"):
        ckpt8.load(tmp_path / "flash" / "lightning.ckpt.ckpt8")
