"""The page of ``runs --html``: inert, and its figures are those of the JSON."""

from __future__ import annotations

import json

import pytest
from page_kit import assert_inert
from runs_kit import train

import ckpt8
from ckpt8.core.text import size

HOSTILE = "<img src=x onerror=alert(1)>&\"'</script>-40.pt"


@pytest.fixture
def made(tmp_path, run_command):
    """A run with a key, raw files, a damaged one and a hostile name: its records, and its page."""
    folder = tmp_path / "run"
    folder.mkdir()
    train(folder, (1, 2, 3), compressed=(2,), val_loss=1.25)
    (folder / "step-30.pt").rename(folder / HOSTILE.replace("/", "_"))
    (folder / "step-50.ckpt8").write_bytes((folder / "step-20.ckpt8").read_bytes()[:-1])
    code, _, _ = run_command("runs", folder, "--html", tmp_path / "page.html")
    assert code == 3
    return ckpt8.runs(folder), (tmp_path / "page.html").read_bytes()


def test_the_page_is_inert_and_holds_the_facts(made):
    run, page = made
    text = assert_inert(page, {"facts"})
    assert HOSTILE.replace("/", "_") in text
    _, _, rest = page.decode().partition('<script type="application/json" id="ckpt8-report">')
    facts = json.loads(rest.partition("</script>")[0])["facts"]
    assert facts == json.loads(json.dumps(run.to_json()))
    for record in run:
        assert record.name in text
        if record.loss is not None:
            assert f"{record.name}: step {record.step:,}, loss {record.loss:.3g}" in text
            assert f"{record.name}: step {record.step:,}, {size(record.stored_bytes)}" in text
    assert next(record.damage for record in run if record.damage) in text
