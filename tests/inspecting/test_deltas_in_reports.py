"""What ``inspect`` says of a delta, whether or not its base is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from typer.testing import CliRunner

from ckpt8.cli.app import app

GOLDEN = Path(__file__).parents[2] / "fixtures/golden"


def test_a_delta_names_its_base(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    alone = shutil.copy(GOLDEN / "chain_2.archive.ckpt8", tmp_path / "alone.ckpt8")
    page = tmp_path / "page.html"
    shown = CliRunner().invoke(app, ["inspect", str(alone)])
    assert shown.exit_code == 0
    assert "delta to chain_1.archive.ckpt8, 2 files below it" in shown.output
    with_bases = CliRunner().invoke(app, ["inspect", str(GOLDEN / "chain_2.archive.ckpt8"), "--html", str(page)])
    assert with_bases.exit_code == 0
    assert "delta to chain_1.archive.ckpt8" in page.read_text()


def facts_of(number):
    shown = CliRunner().invoke(app, ["inspect", str(GOLDEN / f"chain_{number}.archive.ckpt8"), "--json"])
    return json.loads(shown.stdout)


def test_the_facts_of_a_delta_are_those_of_its_manifest():
    key, delta = facts_of(0), facts_of(1)
    assert (key["base"], key["differences"]) == (None, 0)
    assert delta["base"]["path"] == "chain_0.archive.ckpt8"
    assert (delta["base"]["seal"], delta["base"]["place"]) == (delta["base"]["key"], 1)
    assert delta["differences"] > 0
