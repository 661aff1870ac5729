"""``--base``, ``--base-dir`` and ``rebase``: deltas of real runs, as the command line makes and opens them."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest
from chain_command_kit import make_run

import ckpt8
from ckpt8.cli.app import COMMANDS, make_app
from ckpt8.container.bases import KEPT, kept_name
from ckpt8.container.kept_bases import drop_unneeded
from ckpt8.container.reader import ContainerReader


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Eight checkpoints of a run that has found its step, and their chain."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    for early in make_run(folder, 10, every=10)[:2]:
        early.unlink()
    outcomes = ckpt8.chain(folder, preset="archive")
    assert not [each for each in outcomes if each.error]
    return folder, outcomes


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished[0], tmp_path / "run")


def bases(folder):
    """The name of the base of every container, None of a key."""
    found = {}
    for path in folder.glob("*.ckpt8"):
        with ckpt8.open(path) as file:
            found[path.name] = file.manifest.base and file.manifest.base.path
    return found


def check(folder):
    """Every container is what it was made from."""
    for path in folder.glob("*.ckpt8"):
        assert not ckpt8.verify(path, path.with_suffix(".pt")).failures
    check_links(folder)


def check_links(folder):
    """Every file that a container needs has a link, and nothing else."""
    needed = set()
    for path in folder.glob("*.ckpt8"):
        with ContainerReader(path) as reader:
            needed |= {kept_name(each.seal.hex()) for each in reader.links()}
    assert {path.name for path in folder.glob(f"{KEPT}/*")} == needed


@pytest.mark.slow
def test_a_chain_is_made_of_deltas_and_says_so(finished, run, run_command):
    _, outcomes = finished
    found = bases(run)
    assert {each.target.name: each.base for each in outcomes} == found
    assert sum(base is not None for base in found.values()) > len(found) / 2
    for source in run.glob("*.pt"):
        assert not ckpt8.verify(source.with_suffix(".ckpt8"), source).failures
    for path in run.glob("*.ckpt8"):
        path.unlink()
    out = run_command.shown("chain", run, "--preset", "archive")
    said = {line.partition(":")[0].rpartition("/")[2]: line for line in out.splitlines()}
    assert {name: f", delta to {base}, " in said[name] for name, base in found.items() if base} == {
        name: True for name, base in found.items() if base
    }


@pytest.mark.slow
@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_base_elsewhere(by, run, run_command, tmp_path, monkeypatch):
    delta = next(name for name, base in sorted(bases(run).items()) if base)
    away = tmp_path / "away"
    away.mkdir()
    shutil.copy(run / delta, away / delta)
    others = tmp_path / "others"
    others.mkdir()
    more = ("--base-dir", others, "--base-dir", run) if by == "option" else ()
    commands = (
        ("verify", away / delta),
        ("restore", away / delta, "-o", tmp_path / "back.pt"),
        ("inspect", away / delta, "--full"),
        ("convert", away / delta, tmp_path / "out.safetensors"),
        ("diff", away / delta, run / delta),
        ("rebase", away / delta, "-o", tmp_path / "whole.ckpt8"),
    )
    for arguments in commands:
        err = run_command.said(3, *arguments)
        assert err.count("\n") == 1
        assert bases(run)[delta] in err
    if by == "environment":
        monkeypatch.setenv("CKPT8_BASE_DIR", f"{others}:{run}")
    for arguments in commands:
        err = run_command.said(0, *arguments, *more)
        # convert says what weights under a budget are not for.
        assert err == "" or (arguments[0] == "convert" and "for resuming" in err)
    base = run / bases(run)[delta]
    content = base.read_bytes()
    for arguments in (("restore", away / delta, "-o"), ("rebase", away / delta, "-o"), ("convert", away / delta)):
        code, _, err = run_command(*arguments, base, "--force", *more)
        assert (code, "is the file that is read" in err) == (4, True)
        assert base.read_bytes() == content
    # Without its chain it is as good as with it.
    monkeypatch.delenv("CKPT8_BASE_DIR", raising=False)
    assert not ckpt8.verify(tmp_path / "whole.ckpt8", run / delta.replace(".ckpt8", ".pt")).failures


def test_every_command_that_opens_containers_has_the_option():
    import typer.main

    commands = typer.main.get_command(make_app(COMMANDS)).commands
    missing = [name for name, each in commands.items() if "--base-dir" not in [o for p in each.params for o in p.opts]]
    assert missing == ["bench"]


def test_rebase(run, run_command):
    found = bases(run)
    last = next(name for name, base in found.items() if base and name not in found.values())
    out = run_command.shown("rebase", run / last)
    assert f"no longer needs {found[last]}" in out
    assert bases(run)[last] is None
    assert not ckpt8.verify(run / last, run / last.replace(".ckpt8", ".pt")).failures
    facts = json.loads(run_command("rebase", run / last, "--json")[1])
    assert facts["base"] is None
    found = bases(run)
    needed = next(base for base in found.values() if found.get(base))
    assert run_command("rebase", run / needed)[0] == 0  # its link keeps the bytes that others need
    check(run)
    shutil.rmtree(run / KEPT)
    found = bases(run)
    needed = next(base for base in found.values() if base and (run / base).exists() and found[base])
    for arguments in (("rebase", run / needed), ("compress", run / needed.replace(".ckpt8", ".pt"), "--force")):
        assert "is the base of" in run_command.said(4, *arguments)


def test_remove_leaves_what_a_missing_base_spoils(run, run_command):
    """A delta whose base is gone cannot be read: its original stays, and it does not count as compressed."""
    found = bases(run)
    name = next(name for name, base in found.items() if base)
    (run / found[name]).rename(run.parent / found[name])
    shutil.rmtree(run / KEPT)
    (run / found[name].replace(".ckpt8", ".pt")).unlink()
    source = run / name.replace(".ckpt8", ".pt")
    for also in ([], ["--dry-run"], ["--remove"]):
        assert found[name] in run_command.said(3, "chain", run, "--preset", "archive", *also)
    assert source.is_file()
    assert run_command("chain", run, "--preset", "archive", "--force")[0] == 0
    assert not ckpt8.verify(run / name, source).failures


@pytest.mark.slow
def test_whatever_is_removed_breaks_no_chain(finished, run, tmp_path):
    """The key, any other, and the original of each, in a copy that was moved: its links are files of their own."""
    folder, _ = finished
    assert {path.stat().st_nlink for path in (folder / KEPT).iterdir()} == {2}
    moved = run.rename(tmp_path / "moved")
    for gone in ("step-30", "step-80"):
        (moved / f"{gone}.ckpt8").unlink()
        check(moved)
        ckpt8.compress(moved / "step-100.pt", preset="archive", base="auto", force=True)
        check_links(moved)
    for path in sorted(moved.glob("*.ckpt8")):
        path.unlink()
        drop_unneeded(moved)
        check_links(moved)
    assert not (moved / KEPT).exists()


@pytest.mark.slow
def test_a_chain_goes_on_where_it_was(finished, run):
    """The same chain comes out whether it was made at once or checkpoint by checkpoint."""
    before = bases(run)
    for path in sorted(run.glob("*.ckpt8"), key=lambda path: path.stat().st_mtime_ns)[-4:]:
        path.unlink()
    outcomes = ckpt8.chain(run, preset="archive", remove=True)
    assert sum(each.present for each in outcomes) == len(before) - 4
    assert bases(run) == before


@pytest.mark.slow
def test_a_base_that_is_named(run, run_command):
    old, new = (run / f"step-{step}" for step in (90, 100))
    name = str(old.with_suffix(".ckpt8"))
    code, _, err = run_command(
        "compress", new.with_suffix(".pt"), "-o", run / "delta.ckpt8", "--preset", "archive", "--base", name
    )
    assert (code, err) == (0, "")
    assert bases(run)["delta.ckpt8"] == "step-90.ckpt8"
    code, _, _ = run_command("compress", new.with_suffix(".pt"), "-o", run / "whole.ckpt8", "--preset", "archive")
    assert (run / "delta.ckpt8").stat().st_size < (run / "whole.ckpt8").stat().st_size
    err = run_command.said(3, "compress", new.with_suffix(".pt"), "--force", "--base", run / "nothing.ckpt8")
    assert "nothing.ckpt8" in err


@pytest.mark.slow
def test_without_hard_links_a_chain_has_deltas_and_says_so_once(run, run_command, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    before = bases(run)
    for path in run.glob("*.ckpt8"):
        path.unlink()
    monkeypatch.setattr(os, "link", refuse)
    with pytest.warns(RuntimeWarning) as warned:
        assert run_command("chain", run, "--preset", "archive")[0] == 0
    assert [str(each.message).partition(",")[0] for each in warned] == [
        f"{run}: files cannot be linked there (Operation not permitted)"
    ]
    assert bases(run) == before
    assert not (run / KEPT).exists()
