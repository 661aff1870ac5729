"""Weights that a container keeps only well enough to resume, on their way to inference or to a public model."""

import json
import math

import pytest
import torch
from converting_kit import checkpoint
from reference_kit import adamw, masters, rounded

import ckpt8

TARGETS = {
    "safetensors": (["x.safetensors"], True),
    "flashoptim": (["x.pt", "--to", "flashoptim"], True),
    "one model": (["x.pt", "--key", "model"], True),
    "one model in slices": (["x/", "--to", "dcp", "--key", "model"], True),
    "int8": (["x/", "--dtype", "int8"], True),
    "torch": (["x.pt"], False),
    "torch, bf16": (["x.pt", "--dtype", "bf16"], False),
    "trainer": (["x/", "--to", "trainer"], False),
    "dcp": (["x/", "--to", "dcp"], False),
}
"""Arguments, and whether the weights alone are what the target is for."""


@pytest.fixture(scope="module")
def packed(run, tmp_path_factory):
    """The run under several presets, with and without statistics. No test may change them."""
    folder = tmp_path_factory.mktemp("packed")
    torch.save(checkpoint(*run), folder / "run.pt")
    for name, settings in {
        "archive": {"preset": "archive"},
        "unmeasured": {"preset": "archive", "stats": False},
        "fine": {"budget": 0.01},
        "flash": {},
    }.items():
        ckpt8.compress(folder / "run.pt", folder / f"{name}.ckpt8", **settings)
    return folder


def snr(folder, name):
    """SNR in dB of the weights that the container does not keep as they were or as flash does, from the tensors."""
    signal = noise = 0.0
    before = torch.load(folder / "run.pt")["model"]
    after = ckpt8.load(folder / f"{name}.ckpt8")["model"]
    with ckpt8.open(folder / f"{name}.ckpt8") as file:
        lattice = [key for key in before if file.stats(f"model.{key}")["codec"].startswith("lattice")]
    tied = {before[key].data_ptr(): key for key in lattice}
    assert len(tied) < len(lattice)
    for key in tied.values():
        signal += before[key].double().square().sum().item()
        noise += (after[key].double() - before[key].double()).square().sum().item()
    return 10 * math.log10(signal / noise)


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("target", TARGETS)
def test_a_warning_says_how_well_the_weights_are_kept(target, packed, run_command, tmp_path):
    arguments, warned = TARGETS[target]
    source = packed / "archive.ckpt8"
    code, out, err = run_command("convert", source, f"{tmp_path}/{arguments[0]}", *arguments[1:], "--json")
    facts = json.loads(out)
    assert code == 0
    if not warned:
        assert (err, facts["warning"], facts["weights_snr"]) == ("", None, None)
        return
    found = snr(packed, "archive")
    assert facts["weights_snr"] == pytest.approx(found, abs=1e-6)
    assert found < 60
    assert facts["warning"] == (
        f"{source}: keeps its weights to {found:.1f} dB, for resuming, not for inference or publishing; convert the "
        "original, or a flash or lossless .ckpt8 of it"
    )
    assert err == f"ckpt8: {facts['warning']}\n"


@pytest.mark.parametrize("source", ["unmeasured.ckpt8", "run.pt", "flash.ckpt8", "fine.ckpt8"])
def test_where_the_warning_says_that_it_is_unknown_or_there_is_none(source, packed, tmp_path):
    report = ckpt8.convert(packed / source, tmp_path / "x.safetensors")
    if source == "fine.ckpt8":
        assert report.weights_snr == pytest.approx(snr(packed, "fine"), abs=1e-6)
        assert report.weights_snr >= 60
    else:  # run.pt and flash.ckpt8 have no such weights
        assert report.weights_snr is None
    if source == "unmeasured.ckpt8":
        assert report.warning.endswith("; how well is unknown, it was not measured")
    else:
        assert report.warning is None


def test_copies_are_as_good_as_their_masters_in_another_member(tmp_path):
    weights = masters()
    root = tmp_path / "run"
    root.mkdir()
    torch.save(rounded(weights), root / "model.pt")
    torch.save(adamw(list(weights.values()), master_param=weights.values()), root / "optimizer.pt")
    ckpt8.compress(root, preset="archive")
    report = ckpt8.convert(tmp_path / "run.ckpt8", tmp_path / "x.safetensors", member="model.pt")
    with ckpt8.open(tmp_path / "run.ckpt8") as file:
        assert file.stats("model.pt:embed.weight")["codec"] == "reference/2"
        least = file.stats("optimizer.pt:state.0.master_param")["error"]["snr_db"]
    assert report.weights_snr == pytest.approx(least, abs=3)
    assert report.warning is not None


@pytest.mark.slow
def test_a_model_answers_for_itself(tmp_path):
    """Of two models, and of 16-bit weights whose masters are on a lattice."""
    torch.manual_seed(1)
    tree = {}
    for name, lr in (("one", 1e-3), ("two", 1e-5)):
        model = torch.nn.Linear(96, 96)
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        for _ in range(9):
            (model(torch.randn(8, 96)) ** 2).mean().backward()
            optimizer.step()
        tree[name], tree[f"opt_{name}"] = model.state_dict(), optimizer.state_dict()
    tree["half"] = {name: tensor.bfloat16() for name, tensor in tree["one"].items()}
    torch.save(tree, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt", preset="archive")
    after = ckpt8.load(tmp_path / "run.ckpt8")
    for key, stored in (("one", "one"), ("two", "two"), ("half", "one")):
        weight = tree[stored]["weight"].double()
        noise = (after[stored]["weight"].double() - weight).square().sum()
        report = ckpt8.convert(tmp_path / "run.ckpt8", tmp_path / f"{key}.safetensors", key=key)
        expected = 10 * math.log10(weight.square().sum() / noise)
        assert report.weights_snr == pytest.approx(expected, abs=1e-6)
