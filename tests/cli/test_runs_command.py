"""The command ``runs``: its table at any width, its JSON, its exit codes."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from chain_kit import chain
from runs_kit import train

import ckpt8
from ckpt8.container.kept_bases import KeptBases


@pytest.fixture
def run(tmp_path):
    """A folder with a run, one of whose files is damaged."""
    folder = tmp_path / "run"
    folder.mkdir()
    train(folder, (1, 2, 3), compressed=(2, 3))
    content = (folder / "step-30.ckpt8").read_bytes()
    (folder / "step-30.ckpt8").write_bytes(content[:-1])
    return folder


def test_a_table_at_any_width_json_and_a_page(run, run_command, monkeypatch, tmp_path):
    record = ckpt8.runs(run).checkpoints[1]
    for width in (500, 100, 60, 24):
        code, out, err = run_command("runs", run, columns=width)
        assert code == 3
        assert err.count("\n") == 1
        assert "1 checkpoint cannot be read whole, the first: " in err
        assert "step-30.ckpt8: holds" in err
        assert max(map(len, out.splitlines())) <= width
        flat = " ".join(out.split())
        for words in ("step-10.pt", "preset archive", f"{record.ratio:.2f}x", f"{record.steps:.3g} steps", "sealed"):
            assert words in flat
        assert "3 checkpoints: 1 key, 1 raw;" in flat
        assert "1 damaged" in flat
    # JSON is that of Python.
    code, out, err = run_command("runs", run, "--json")
    assert code == 3
    assert err.startswith("ckpt8: 1 checkpoint")
    failure = {"error": err.strip().removeprefix("ckpt8: "), "exit_code": 3}
    facts = json.loads(out)
    kept = facts.pop("keep_log")
    assert kept == {"stay": len(ckpt8.runs(run)), "bytes": sum(r.stored_bytes + r.raw_bytes for r in ckpt8.runs(run))}
    assert facts == {"schema": 1, **json.loads(json.dumps(ckpt8.runs(run).to_json())), **failure}
    assert run_command("runs", tmp_path / "none")[0] == 3
    assert run_command("runs", "https://example.org/run")[0] == 2
    page = tmp_path / "page.html"
    page.write_text("mine")
    code, out, err = run_command("runs", run, "--html", page)
    assert (code, out, err.count("\n"), page.read_text()) == (4, "", 1, "mine")
    assert run_command("runs", run, "--html", page, "--force")[0] == 3
    assert page.read_text().startswith("<!doctype html>")
    # Columns without a value are left out, and those that say the same of all rows.
    monkeypatch.setenv("COLUMNS", "200")
    (run / "step-30.ckpt8").unlink()
    ckpt8.compress(run / "step-10.pt")
    out = run_command.shown("runs", run)
    assert "2 checkpoints: 2 keys; " in out
    assert "1 of them raw as well, which takes" in out
    common = ["checkpoint", "step", "loss", "size", "ratio", "error", "kind"]
    assert titles(out) == [*common, "made with"]
    assert titles(run_command.shown("runs", "-v", run)) == [*common, "made with", "state", "saved"]
    (run / "step-10.ckpt8").unlink()
    out = run_command.shown("runs", run)
    assert out.splitlines()[0] == f"{run}, preset archive"
    assert titles(out) == common
    # Where no step is known the time is said.
    ckpt8.save({"model": {"w": torch.rand(90, 90)}}, run / "model.ckpt8", preset="archive")
    assert titles(run_command.shown("runs", run)) == [*common, "saved"]


def titles(out):
    return [title.strip() for title in out.splitlines()[1].split("  ") if title.strip()]


def test_a_base_in_another_folder(inputs, tmp_path, run_command):
    for k, folder in enumerate(("keys", "deltas")):
        (tmp_path / folder).mkdir()
        name = f"chain_{k}.archive.ckpt8"
        shutil.copy(inputs.parent / "golden" / name, tmp_path / folder / name)
    assert run_command("runs", tmp_path / "deltas")[0] == 3
    out = run_command.shown("runs", tmp_path / "deltas", "--base-dir", tmp_path / "keys", "--json")
    assert json.loads(out)["checkpoints"][0]["base"] == str(tmp_path / "keys" / "chain_0.archive.ckpt8")


def test_release_frees_what_nothing_needs(tmp_path, run_command):
    """A key and two deltas, first in a copy, whose links are files of their own; then one after the other goes."""
    files, _ = chain(tmp_path, 3)
    run = tmp_path / "run"
    run.mkdir()
    for path in files:
        path.rename(run / path.name)
    with KeptBases(run) as kept:
        kept.link_needed()
    run = shutil.copytree(run, tmp_path / "copy")
    key, first, last = (run / path.name for path in files)
    sizes = [path.stat().st_size for path in (key, first)]

    def released():
        facts = json.loads(run_command.shown("runs", run, "--release", "--json"))
        return facts["freed_bytes"], facts["bases_bytes"]

    assert ckpt8.runs(run).bases_bytes == sum(sizes)
    assert released() == (sum(sizes), 0)
    assert ckpt8.runs(run).bases_bytes == 0
    key.unlink()
    first.unlink()
    assert ckpt8.runs(run).bases_bytes == sum(sizes)
    assert released() == (0, sum(sizes))
    assert not ckpt8.verify(last).failures
    with KeptBases(run):
        code, _, err = run_command("runs", run, "--release")
    assert code == 4
    assert "a checkpoint is being saved there" in err
    (run / "bad.ckpt8").write_bytes(last.read_bytes()[:-1])
    err = run_command.said(3, "runs", run, "--release")
    assert f"{run / 'bad.ckpt8'}: cannot be read, so it may need anything in {run / 'bases'}" in err
    (run / "bad.ckpt8").unlink()
    assert run_command("rebase", last)[0] == 0
    assert not (run / "bases").exists()
    code, out, _ = run_command("runs", run, "--release")
    assert (code, out) == (0, f"{run}: 0 B freed\n")


def test_names_command_no_terminal(tmp_path, run_command):
    train(tmp_path, (1,))
    (tmp_path / "step-10.pt").rename(tmp_path / "[bold]\x1b[31m-10.pt")
    code, out, _ = run_command("runs", tmp_path)
    assert code == 0
    assert "[bold]\\x1b[31m-10.pt" in out


def test_a_run_without_steps_has_a_page(tmp_path, run_command, inputs):
    shutil.copy(inputs / "module.pt", tmp_path / "module.pt")
    assert run_command("runs", tmp_path, "--html", tmp_path / "page.html")[0] == 0
    assert "module.pt" in (tmp_path / "page.html").read_text()
