"""``ckpt8 chain DIR``: the checkpoints of a run, oldest first, and again after whatever happened."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
import torch
from chain_command_kit import age, make_run
from disk_kit import longest_file
from faults_kit import digest

import ckpt8
from ckpt8.container.bases import KEPT


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", 4)


def names(folder):
    """What is in a folder beside the links to bases."""
    return sorted(path.name for path in folder.iterdir() if path.name != KEPT)


def chained(run_command, folder, *more, code=0):
    """The rows of ``chain --json``."""
    found, out, err = run_command("chain", folder, "--json", *more)
    assert found == code, err
    return json.loads(out)["checkpoints"], err


@pytest.mark.slow
def test_again_skips_what_is_there_and_removes_it_when_asked(run, run_command):
    folder = run[0].parent
    chained(run_command, folder)
    sums = {path: digest(path) for path in folder.iterdir()}
    rows, _ = chained(run_command, folder)
    assert all(row["present"] and not row["removed"] for row in rows)
    # Times that a copy does not keep say nothing: the container is verified.
    for seconds in (-7200, 7200):
        for path in run:
            age(path, seconds)
        rows, _ = chained(run_command, folder, "--rest", 0)
        assert all(row["present"] for row in rows)
        assert {path: digest(path) for path in folder.iterdir()} == sums
    rows, _ = chained(run_command, folder, "--remove")
    assert all(row["present"] and row["removed"] for row in rows)
    assert names(folder) == sorted(path.with_suffix(".ckpt8").name for path in run)
    assert chained(run_command, folder, "--remove") == ([], "")


@pytest.mark.parametrize("remove", [False, True])
def test_keep_raw_leaves_the_newest_and_all_where_there_are_no_more(remove, run, run_command):
    folder = run[0].parent
    for count in (4, 9):
        assert chained(run_command, folder, "--keep-raw", count, "--remove") == ([], "")
        assert names(folder) == sorted(path.name for path in run)
    options = ["--keep-raw", 2, *(["--remove"] if remove else [])]
    assert (
        "step-15.pt, step-20.pt: left alone: of the newest 2 steps (--keep-raw)"
        in run_command("chain", folder, "--dry-run", *options)[1]
    )
    rows, _ = chained(run_command, folder, *options)
    assert [row["source"] for row in rows] == [str(path) for path in run[:2]]
    expected = {path.name for path in run[2:]} | {path.with_suffix(".ckpt8").name for path in run[:2]}
    assert set(names(folder)) == expected | (set() if remove else {path.name for path in run[:2]})


def test_remove_leaves_what_a_resume_asks_for_until_it_asks_for_another(run, run_command):
    folder = run[0].parent
    (folder / "best.pt").symlink_to("step-5.pt")
    (folder / "latest").write_text("step-15.pt")
    out = run_command.shown("chain", folder, "--dry-run", "--remove")
    assert "step-5.pt: left alone: best.pt leads to it" in out
    assert "step-15.pt: left alone: latest names it" in out
    assert "left alone: latest" not in run_command.shown("chain", folder, "--dry-run")
    rows, _ = chained(run_command, folder, "--remove")
    assert [row["source"].rpartition("/")[2] for row in rows] == ["step-10.pt", "step-20.pt"]
    (folder / "latest").write_text("step-20.pt")
    rows, _ = chained(run_command, folder, "--remove")
    assert [row["source"].rpartition("/")[2] for row in rows] == ["step-15.pt"]
    assert names(folder) == ["best.pt", "latest", "step-10.ckpt8", "step-15.ckpt8", "step-20.ckpt8", "step-5.pt"]


@pytest.mark.slow
def test_keep_raw_does_not_count_a_copy_of_the_newest(run, run_command):
    """Nor a file of weights alone, which is written again and again: it may be the newest, and stays."""
    folder = run[0].parent
    shutil.copy(run[3], folder / "last.pt")
    shutil.copy(run[1], folder / "best.pt")
    torch.save({"model": torch.load(run[3])["model"]}, folder / "latest.pt")
    for name in ("last.pt", "best.pt", "latest.pt"):
        age(folder / name, 60)
    rows, _ = chained(run_command, folder, "--keep-raw", 2, "--remove")
    assert [row["source"].rpartition("/")[2] for row in rows] == ["step-5.pt", "step-10.pt", "best.pt"]
    assert {"step-15.pt", "step-20.pt", "last.pt", "latest.pt"} < set(names(folder))


def test_keep_raw_counts_epochs_that_count_their_steps_anew(tmp_path, run_command):
    for epoch, path in enumerate(make_run(tmp_path, 3)):
        torch.save({**torch.load(path), "iter": 0, "step": 0}, tmp_path / f"epoch_{epoch}.pt")
        path.unlink()
        age(tmp_path / f"epoch_{epoch}.pt")
    rows, _ = chained(run_command, tmp_path, "--keep-raw", 1)
    assert [row["source"].rpartition("/")[2] for row in rows] == ["epoch_0.pt", "epoch_1.pt"]


def test_a_whole_file_with_the_name_of_a_part_and_what_is_skipped(run, run_command):
    folder = run[0].parent
    for path in run[1:]:
        path.unlink()
    run[0].rename(folder / "model.pt")
    tree = torch.load(folder / "model.pt")
    rows, _ = chained(run_command, folder)
    assert [row["target"].rpartition("/")[2] for row in rows] == ["model.ckpt8"], "it is the only one"
    torch.save({"scale": torch.ones(()), "x": torch.ones(9)}, folder / "scaler.pt")
    torch.save(tree["model"], folder / "ema.pt")
    (folder / "last.pt").symlink_to("model.pt")
    out = run_command.shown("chain", folder, "--rest", 0)
    assert "ema.pt, scaler.pt: left alone: no step and no optimizer found" in out
    assert "last.pt: left alone: it is a link" in out
    found = json.loads(run_command("chain", folder, "--rest", 0, "--json")[1])
    assert {row["source"].rpartition("/")[2] for row in found["checkpoints"]} == {"model.pt"}
    assert {row["path"].rpartition("/")[2] for row in found["skipped"]} == {"scaler.pt", "ema.pt", "last.pt"}


def test_parts_of_one_checkpoint_are_named(tmp_path, run_command):
    (path,) = make_run(tmp_path, 1)
    tree = torch.load(path)
    path.unlink()
    torch.save(tree["model"], tmp_path / "model.pt")
    torch.save(tree["optimizer"], tmp_path / "optimizer.pt")
    err = run_command.said(3, "chain", tmp_path)
    assert "model.pt is left alone, it is a part of a checkpoint of several files" in err


def test_a_dry_run_writes_nothing_and_says_what_would_be_done(run, run_command):
    folder = run[0].parent
    ckpt8.compress(run[0])
    run[1].rename(folder / f".step-10.pt.{'0' * 16}.ckpt8-removed")
    run[3].write_bytes(run[3].read_bytes()[:-200])
    age(run[3])
    before = {path: (digest(path), path.stat()) for path in folder.iterdir()}
    code, out, err = run_command("chain", folder, "--dry-run", "--remove")
    assert code == 3
    assert err.count("\n") == 2, "the interrupted removal without a container, and the damaged one"
    lines = out.splitlines()
    assert lines[0].startswith(f"{run[0].with_suffix('.ckpt8')}: ")
    assert lines[0].endswith(f"is there already; {run[0]} would be removed once it is verified")
    assert lines[1].startswith(f"{run[2].with_suffix('.ckpt8')}: would be written, ")
    assert lines[2].endswith("2 would fail; nothing was written or removed")
    facts = json.loads(run_command("chain", folder, "--dry-run", "--budget", 2, "--json")[1])
    (row,) = [row for row in facts["checkpoints"] if row["predicted_bytes"]]
    assert (row["source"], row["would_remove"], row["bytes"]) == (str(run[2]), False, run[2].stat().st_size)
    assert {path: (digest(path), path.stat()) for path in folder.iterdir()} == before
    ckpt8.compress(run[2], budget=2)
    assert row["predicted_bytes"] == pytest.approx(run[2].with_suffix(".ckpt8").stat().st_size, rel=0.1)


@pytest.mark.slow
def test_containers_under_the_names_of_lightning_are_left_alone(run, run_command):
    """They are neither compressed again nor among the newest that stay as they are."""
    folder = run[0].parent
    for step in (5, 30):
        ckpt8.compress(run[0], folder / f"step={step}.ckpt")
    rows, err = chained(run_command, folder, "--keep-raw", 1)
    assert [row["source"] for row in rows] == [str(path) for path in run[:3]]
    assert err == ""


@pytest.mark.slow
def test_the_same_name_twice(tmp_path, run_command):
    """The second keeps its suffix; so it stays when one of them has gone."""
    folder = tmp_path / "run"
    _, second = make_run(folder, 2)
    tree = torch.load(second)
    second.unlink()
    torch.save(tree, folder / "step-5.bin")
    age(folder / "step-5.bin")
    for _ in range(2):
        rows, _ = chained(run_command, folder)
        made = {row["source"].rpartition("/")[2]: row["target"] for row in rows}
        assert set(made) == {"step-5.pt", "step-5.bin"}
        second = next(name for name, target in made.items() if target != str(folder / "step-5.ckpt8"))
        assert made[second] == str(folder / f"{second}.ckpt8")
        for name, target in made.items():
            assert not ckpt8.verify(target, folder / name).failures
    rows, _ = chained(run_command, folder, "--remove")
    assert all(row["removed"] for row in rows)
    assert len(names(folder)) == 2


@pytest.mark.slow
def test_another_checkpoint_of_the_same_name_is_not_lost(run, run_command):
    """A run that starts again in the same folder: of the older one only containers are left."""
    folder = run[0].parent
    chained(run_command, folder, "--remove")
    sums = {path: digest(path) for path in folder.iterdir()}
    again = make_run(folder, 4, seed=1)
    for path in again:
        age(path, -7200)
    rows, err = chained(run_command, folder, "--remove", "--rest", 0, code=4)
    assert err.count("--force replaces it") == 4
    assert not any(row["removed"] for row in rows)
    assert {path: digest(path) for path in sums} == sums
    # What others need has a link, and is replaced even so.
    whole = make_run(folder.with_name("whole"), 4, seed=1)
    rows, err = chained(run_command, folder, "--remove", "--force", "--rest", 0)
    assert (err, {row["removed"] for row in rows}) == ("", {True})
    for path, copy in zip(again, whole, strict=True):
        assert not ckpt8.verify(path.with_suffix(".ckpt8"), copy).failures
        assert digest(path.with_suffix(".ckpt8")) != sums[path.with_suffix(".ckpt8")]


def test_damaged_and_unfinished_ones_amid_others(run, run_command, inputs):
    folder = run[0].parent
    content = run[1].read_bytes()
    run[1].write_bytes(content[:-100])
    age(run[1])
    shutil.copytree(inputs / "trainer-adamw", folder / "checkpoint-12")
    (folder / "checkpoint-12" / "trainer_state.json").unlink()
    age(folder / "checkpoint-12")
    kept = {path: digest(path) for path in (run[1], folder / "checkpoint-12")}
    rows, err = chained(run_command, folder, "--remove", "--rest", 0.1, code=3)
    assert {path: digest(path) for path in kept} == kept
    assert err.count("\n") == 2
    assert "trainer_state.json" in err
    assert sum(row["removed"] for row in rows) == 3
    assert names(folder) == ["checkpoint-12", "step-10.pt", "step-15.ckpt8", "step-20.ckpt8", "step-5.ckpt8"]


def test_what_a_chain_waits_for_is_said_to_who_watches(tmp_path, run_command, monkeypatch, caplog):
    """On a terminal, with -v, and in the log of a program."""
    paths = make_run(tmp_path, 2)
    said = "waiting for step-5.pt, step-10.pt to stay unchanged for 0.2 s (--rest)"

    def err(*options):
        for path in paths:
            path.with_suffix(".ckpt8").unlink(missing_ok=True)
            age(path, -7200)  # a time that is yet to come says nothing
        return run_command("chain", tmp_path, "--rest", 0.2, *options)[2]

    assert err() == ""
    assert err("-v").count(f"ckpt8: {said}\n") == 1
    assert said not in caplog.messages
    with caplog.at_level("INFO", "ckpt8"):
        ckpt8.chain(tmp_path, rest=0.2)
    assert said in caplog.messages
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert err().count(f"ckpt8: {said}\n") == 1
    assert err("-q") == ""


def test_nothing_to_chain_and_wrong_arguments(tmp_path, run_command, inputs):
    for folder in (tmp_path, tmp_path / "none", inputs / "trainer-adamw", inputs / "views.pt"):
        err = run_command.refused(3, "chain", folder)
        assert err.startswith(f"ckpt8: {folder}: ")
    make_run(tmp_path, 4)
    for more in ("--preset tiny", "--budget 99", "--rest -1", "--watch --json", "--watch --dry-run"):
        assert run_command("chain", tmp_path, *more.split())[0] == 2
        assert len(names(tmp_path)) == 4


FIRST = ("--rule", "*0.weight=lossless")
SETTINGS = {
    "a preset for a budget": (("--budget", 10), ("--preset", "lossless"), "budget 10, not with preset lossless"),
    "a budget for a preset": (("--preset", "archive"), ("--budget", 1), "preset archive, not with budget 1"),
    "another budget": (("--budget", 1), ("--budget", 1.0000001), "budget 1, not with budget 1.0000001"),
    "the default": (("--budget", 1), (), "budget 1, not with preset flash, the default"),
    "a rule": ((), FIRST, r"no rules, not with the rules \*0.weight=lossless"),
    "no rule": (FIRST, (), r"the rules \*0.weight=lossless, not with no rules"),
}


@pytest.mark.by_default("a rule-False")
@pytest.mark.parametrize("remove", [False, True])
@pytest.mark.parametrize("case", SETTINGS)
def test_a_container_of_other_settings_is_not_the_one_asked_for(case, remove, run, run_command):
    folder = run[0].parent
    there, asked, words = SETTINGS[case]
    chained(run_command, folder, *there, "--keep-raw", 3)
    before = {path: digest(path) for path in folder.iterdir()}
    more = ["--keep-raw", "3", *(["--remove"] if remove else [])]
    (row,), err = chained(run_command, folder, *asked, *more, code=1)
    assert {path: digest(path) for path in folder.iterdir()} == before
    assert (row["exit_code"], row["present"], row["removed"]) == (1, False, False)
    start = f"ckpt8: {run[0].with_suffix('.ckpt8')}: was made with "
    assert re.fullmatch(rf"{re.escape(start)}[^;]*{words}; {re.escape(str(run[0]))} stays[^\n]*--force[^\n]*\n", err)
    (row,), _ = chained(run_command, folder, *asked, *more, "--force")
    assert (row["present"], row["removed"]) == (False, remove)
    chained(run_command, folder, *asked, *more)


@pytest.mark.slow
def test_steps_and_numbers_in_names(run, run_command, tmp_path):
    folder = run[0].parent
    run[3].rename(folder / "step-1.pt")
    rows, _ = chained(run_command, folder)
    assert [row["source"].rpartition("/")[2] for row in rows] == ["step-5.pt", "step-10.pt", "step-15.pt", "step-1.pt"]
    # A number behind a dot is no suffix.
    folder = tmp_path / "dots"
    for step, path in zip((500, 1000), make_run(folder, 2), strict=True):
        path.rename(folder / f"model.{step}")
    rows, _ = chained(run_command, folder, "--remove")
    assert [row["target"].rpartition("/")[2] for row in rows] == ["model.500.ckpt8", "model.1000.ckpt8"]


@pytest.mark.slow
def test_a_full_disk_leaves_originals(run, run_command):
    folder = run[0].parent
    sums = {path: digest(path) for path in run}
    with longest_file(20_000):
        rows, err = chained(run_command, folder, "--remove", code=4)
    assert err.count("cannot be written") == len(run)
    assert {path: digest(path) for path in folder.iterdir()} == sums
    rows, _ = chained(run_command, folder, "--remove")
    assert all(row["removed"] for row in rows)


@pytest.mark.slow
def test_a_container_without_statistics_is_made_anew(run):
    """One that was bound tighter than asked for is as good as asked for."""
    folder = run[0].parent
    ckpt8.compress(run[0], stats=False)
    ckpt8.compress(run[1], max_update_error=1e-9)
    first, second, *_ = ckpt8.chain(folder, remove=True)
    assert isinstance(first.error, ckpt8.CheckFailedError)
    assert "carries no statistics" in str(first.error)
    assert first.source.is_file()
    assert (second.present, second.removed, second.error) == (True, True, None)
    (again,) = ckpt8.chain(folder, remove=True, force=True)
    assert (again.present, again.removed, again.error) == (False, True, None)
