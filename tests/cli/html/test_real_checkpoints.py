"""A report about every real checkpoint that is committed, and about its container."""

from __future__ import annotations

from pathlib import Path

import pytest
from page_kit import assert_inert

import ckpt8

INPUTS = Path(__file__).parents[3] / "fixtures" / "inputs"
REAL = sorted(
    path.relative_to(INPUTS).as_posix()
    for path in [*INPUTS.iterdir(), *(INPUTS / "low_bit").iterdir()]
    if path.suffix in (".pt", ".ckpt") or (path.is_dir() and path.name not in ("low_bit", "__pycache__"))
)


@pytest.mark.by_default("gpt_came.pt", "custom_objects.pt", "trainer-stable-adamw", "low_bit/torchao_8.pt", "legacy.pt")
@pytest.mark.parametrize("name", REAL)
def test_every_real_checkpoint_and_its_container(name, inspect, inputs, tmp_path):
    path, container = inputs / name, tmp_path / "x.ckpt8"
    facts, content, tree = inspect(path, tmp_path / "raw.html")
    assert_inert(content)
    assert {"schema": 1, **tree["facts"]} == facts
    counted = sum(
        side["after"]["total"] for what, side in tree["distributions"]["histograms"].items() if what != "update"
    )
    assert counted == tree["distributions"]["sample"]["elements"]
    ckpt8.compress(path, container)
    facts, content, tree = inspect(container, tmp_path / "packed.html", "--against", path)
    text = assert_inert(content)
    assert {"schema": 1, **tree["facts"]} == facts
    assert "Where the bytes are" in text
    assert tree["distributions"]["sample"]["full"]
    if facts["errors"]["weight"]:
        assert "The worst tensors" in text
