"""What ``inspect`` says of a delta, whether or not its base is there."""

from __future__ import annotations

import json
import shutil


def test_a_delta_names_its_base(inputs, run_command, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    golden, page = inputs.parent / "golden", tmp_path / "page.html"
    alone = shutil.copy(golden / "chain_2.archive.ckpt8", tmp_path / "alone.ckpt8")
    code, out, _ = run_command("inspect", alone)
    assert code == 0
    assert "delta to chain_1.archive.ckpt8, 2 files below it" in out
    assert run_command("inspect", golden / "chain_2.archive.ckpt8", "--html", page)[0] == 0
    assert "delta to chain_1.archive.ckpt8" in page.read_text()
    key, delta = (
        json.loads(run_command("inspect", golden / f"chain_{k}.archive.ckpt8", "--json")[1]) for k in range(2)
    )
    assert (key["base"], key["differences"]) == (None, 0)
    assert delta["base"]["path"] == "chain_0.archive.ckpt8"
    assert (delta["base"]["seal"], delta["base"]["place"]) == (delta["base"]["key"], 1)
    assert delta["differences"] > 0
