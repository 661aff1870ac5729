"""Containers under a budget, read from FORMAT.md alone: symbols, codecs with steps, copies of decoded masters."""

from __future__ import annotations

import pytest
import torch
from budget_kit import run_of
from plain_codecs import SYMBOLS
from plain_reader import Plain
from reference_kit import LAYOUTS, masters
from test_decoded_copies import tree_of
from test_format import FORMAT, agrees

import ckpt8
from ckpt8.container import header

CHUNK = 1 << 20
STEPPED = {"lattice/1", "rclog/1", "vscaled/1"}


def written(tree, folder, **options):
    torch.save(tree, folder / "a.pt")
    return ckpt8.compress(folder / "a.pt", **options), folder / "a.ckpt8"


def codecs(plain):
    return {storage["codec"]["id"] for storage in plain.storages}


def modes(plain):
    tables = [part for storage in plain.manifest["storages"] for part in storage["parts"].values()]
    return {(*mode[:3], *mode[4:]) for table in tables for mode in table.get("modes", [])}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_adamw.pt", "gpt_bf16.pt", "gpt_stable_adamw.pt"])
@pytest.mark.parametrize("options", [{"preset": "archive"}, {"preset": "compact"}, {"budget": 7}], ids=str)
def test_files_under_a_budget_read_from_the_specification_alone(name, options, inputs, tmp_path):
    ckpt8.compress(inputs / name, tmp_path / "x.ckpt8", **options)
    plain = agrees(tmp_path / "x.ckpt8")
    assert codecs(plain) == {"lossless/1", *STEPPED}
    assert plain.manifest["version"] == "1.6"
    assert len(modes(plain)) > 3
    section = FORMAT.partition("## Manifest")[2].partition("## Storages")[0]
    fields = {*plain.manifest["budget"], *plain.manifest["parameters"][0]["steps"], "modes", "budget", "steps"}
    assert all(field in section for field in fields)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["archive", "compact"])
def test_second_moments_from_rows_and_columns(preset, inputs, tmp_path):
    manifest = ckpt8.compress(inputs / "gpt_came.pt", tmp_path / "x.ckpt8", preset=preset)
    assert any(storage.codec["id"] == "vscaled/1" for storage in manifest.storages)
    agrees(tmp_path / "x.ckpt8")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_chunks_and_slabs_under_a_budget(dtype, tmp_path, monkeypatch):
    """Rows and columns of factors begin anew in every chunk, the dither and the rows of the tensor do not."""
    monkeypatch.setattr(header, "SLAB", CHUNK)
    manifest, path = written(run_of([(1100, 1000), (70_000,)], dtype=dtype), tmp_path, budget=1)
    plain = agrees(path)
    assert codecs(plain) >= STEPPED
    assert {
        (each.codec["C"], each.codec["columns"]) for each in manifest.storages if each.codec["id"] == "rclog/1"
    } == {
        (1000, True),
        (64, False),
    }
    assert "model.layers.0.weight/codes@1" in plain.entries


@pytest.mark.slow
def test_packs_of_symbols(tmp_path):
    """Second moments share entries where all else of their parameters is kept exactly."""
    rules = ["model.*=lossless", "*.exp_avg=lossless"]
    manifest, path = written(run_of([(64, 72), (70, 64)] * 20), tmp_path, budget=2, rules=rules)
    packed = [storage.codec["C"] for storage in manifest.storages if storage.pack and "C" in storage.codec]
    assert sorted(packed) == [64] * 20 + [72] * 20
    assert agrees(path).manifest["version"] in ("1.4", "1.6")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_copies_of_decoded_masters(layout, dtype, tmp_path):
    _, path = written(tree_of(layout, dtype, masters()), tmp_path, preset="archive")
    assert codecs(agrees(path)) >= {"reference/2", *STEPPED}


@pytest.mark.parametrize("preset", ["flash", "lossless"])
def test_files_without_a_budget_state_nothing_of_it(preset, inputs, tmp_path):
    ckpt8.compress(inputs / "gpt_adamw.pt", tmp_path / "x.ckpt8", preset=preset)
    manifest = Plain((tmp_path / "x.ckpt8").read_bytes()).manifest
    assert manifest["version"] == "1.3"
    assert "budget" not in manifest
    assert not any("steps" in parameter for parameter in manifest["parameters"])
    assert not any("modes" in part for storage in manifest["storages"] for part in storage["parts"].values())


@pytest.mark.slow
def test_a_chunk_of_symbols_has_four_frames(inputs, tmp_path):
    ckpt8.compress(inputs / "gpt_adamw.pt", tmp_path / "x.ckpt8", preset="archive")
    plain = Plain((tmp_path / "x.ckpt8").read_bytes())
    seen = 0
    for storage in plain.storages:
        for part, (width, _) in plain.layout(storage, max(storage["numel"], 1)).items():
            if width == SYMBOLS:
                assert len(storage["parts"][part]["lengths"]) == 4
                seen += 1
    assert seen == 30
