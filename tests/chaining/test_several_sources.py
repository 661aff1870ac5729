"""``ckpt8 compress A B C``: each gets its container; one failure stops no other, and the exit code tells."""

from __future__ import annotations

import json
import os
import re
import shutil

import pytest
import torch
from chain_command_kit import make_run
from disk_kit import flip_bit, longest_file
from faults_kit import digest

import ckpt8


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", 3)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_collects_them(exists, run, run_command, tmp_path):
    folder = tmp_path / "out"
    if exists:
        folder.mkdir()
    facts = json.loads(run_command.shown("compress", *run, "-o", folder, "--json"))
    assert [row["target"] for row in facts["checkpoints"]] == [str(folder / f"step-{k}.ckpt8") for k in (5, 10, 15)]
    assert facts["bytes"] == sum(path.stat().st_size for path in run)
    assert facts["stored_bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert len(names(run[0].parent)) == 3


def test_a_damaged_one_amid_others(run, run_command):
    content = run[1].read_bytes()
    run[1].write_bytes(content[: len(content) // 2])
    sums = [digest(path) for path in run]
    code, out, err = run_command("compress", *run)
    assert code == 3
    assert re.fullmatch(rf"ckpt8: {re.escape(str(run[1]))}: [^\n]+\n", err)
    assert names(run[0].parent) == ["step-10.pt", "step-15.ckpt8", "step-15.pt", "step-5.ckpt8", "step-5.pt"]
    assert [digest(path) for path in run] == sums
    assert out.splitlines()[-1].endswith("; 1 failed")


def test_the_exit_code_is_the_highest(run, run_command):
    run[1].write_bytes(b"")
    run[2].with_suffix(".ckpt8").write_text("in the way")
    code, out, err = run_command("compress", *run, "--json")
    assert code == 4
    assert err.count("\n") == 2
    assert [row["exit_code"] for row in json.loads(out)["checkpoints"]] == [0, 3, 4]
    assert run[2].with_suffix(".ckpt8").read_text() == "in the way"


@pytest.mark.parametrize("folder", [True, False])
def test_two_with_the_same_target_are_refused_before_anything(folder, run, run_command, tmp_path):
    if folder:
        others = [shutil.copy(run[0], tmp_path / "step-5.pt")]
        more = ["-o", tmp_path / "out"]
    else:
        others, more = [shutil.copy(run[0], run[0].with_suffix(".bin"))], []
    before = names(run[0].parent)
    code, out, err = run_command("compress", *run, *others, *more)
    assert (code, out) == (2, "")
    assert "would both become" in err
    assert str(run[0]) in err
    assert str(others[0]) in err
    assert names(run[0].parent) == before
    assert not (tmp_path / "out").exists()
    assert "given twice" in run_command.said(2, "compress", run[0], run[0])


def test_containers_are_refused_and_the_others_taken(run, run_command):
    run_command.shown("compress", *run)
    packed = [path.with_suffix(".ckpt8") for path in run]
    before = [digest(path) for path in (*run, *packed)]
    code, out, err = run_command("compress", *sorted([*run, *packed]))
    assert (code, out.count("was there already")) == (3, 3)
    assert [line.split(": ")[1:] for line in err.splitlines()] == [
        [str(path), "already a .ckpt8 file; give the checkpoint that it was made from"] for path in sorted(packed)
    ]
    assert run_command.refused(3, "compress", packed[0]) == err.splitlines(keepends=True)[-1]
    assert [digest(path) for path in (*run, *packed)] == before


@pytest.mark.slow
def test_a_source_that_is_kept_is_told_after_its_container(run, run_command, monkeypatch):
    """The container is there, and what it holds is shown; only the removal failed."""
    from ckpt8.chaining import jobs

    verify = jobs.verify

    def and_then_it_changes(container, source, **options):
        result = verify(container, source, **options)
        os.utime(source)
        return result

    monkeypatch.setattr(jobs, "verify", and_then_it_changes)
    code, out, err = run_command("compress", run[0], "--remove")
    assert code == 3
    assert "is kept" in err
    assert "\nerror: " in out
    assert run[0].is_file()
    code, out, err = run_command("compress", *run[1:], "--remove")
    assert (code, err.count("is kept")) == (3, 2)
    assert out.splitlines()[-1].endswith("; 2 failed")
    assert all(path.is_file() and path.with_suffix(".ckpt8").is_file() for path in run)


@pytest.mark.parametrize(
    ("command", "damaged", "as_json"),
    [
        *((command, False, as_json) for command in ("compress A", "compress B", "chain") for as_json in (False, True)),
        ("compress A B", False, False),
        *((command, True, False) for command in ("compress A", "compress B", "chain")),
    ],
)
def test_what_a_kill_left_is_finished_and_named(command, damaged, as_json, run, run_command):
    """A was set aside; its container is looked at again before it goes."""
    first, second, third = run
    third.unlink()
    if command == "chain":
        second.unlink()  # a delta would warn of a damaged base
    container = first.with_suffix(".ckpt8")
    ckpt8.compress(first)
    whole = digest(first)
    seal = container.read_bytes()[-32:].hex()[:16]
    first.rename(first.with_name(f".{first.name}.{seal}.ckpt8-removed"))
    if damaged:
        flip_bit(container)
    sources = {"A": first, "B": second}
    words = ["chain", first.parent] if command == "chain" else [sources.get(word, word) for word in command.split()]
    code, out, err = run_command(*words, "--remove", *(["--json"] if as_json else []))
    assert not [name for name in names(first.parent) if name.startswith(".")]
    if damaged:
        assert code in (3, 4)
        assert digest(first) == whole
        assert f"ckpt8: {first}: its removal was interrupted, and is not finished: {container}: " in err
        assert ".pt is back\n" in err
        if command == "chain":  # the removal and the container of one checkpoint fail
            assert json.loads(out)["failed"] if as_json else out.splitlines()[-1].endswith("; 1 failed")
            assert as_json or out.splitlines()[-1].startswith("1 checkpoint: ")
        if as_json:
            facts = json.loads(out)
            assert facts["exit_code"] == code
            assert f"ckpt8: {facts['error']}\n" in err
            row = facts["finished" if len(words) == 2 and command != "chain" else "checkpoints"][0]
            assert "its removal was interrupted" in row["error"]
        return
    assert (code, err) == (0, "")
    assert not first.exists()
    assert second.exists() == (command == "compress A")
    if as_json:
        facts = json.loads(out)
        row = facts["finished" if len(words) == 2 and command != "chain" else "checkpoints"][0]
        assert (row["source"], row["target"], row["removed"]) == (str(first), str(container), True)
    else:
        assert re.match(rf"{re.escape(str(container))}: .*; {first.name} removed\n", out)


@pytest.mark.parametrize("more", [("--preset", "tiny"), ("--budget", "99"), ("--rule", "x=unknown"), ("-o", "FILE")])
def test_wrong_arguments_are_told_once(more, run, run_command, tmp_path):
    (tmp_path / "file").write_text("x")
    err = run_command.refused(2, "compress", *run, *(tmp_path / "file" if each == "FILE" else each for each in more))
    assert err.count("\n") == 1
    assert len(names(run[0].parent)) == 3
    for count in (1, 3):
        code, _, err = run_command("compress", *run[:count], "--remove", "--no-stats")
        assert (code, "--no-stats" in err) == (2, True)
    assert len(names(run[0].parent)) == 3


def test_what_is_there_counts_where_it_was_made_from_the_source_as_asked(run, run_command, tmp_path):
    """After a kill the same command goes on; another container of the name is never taken for it."""
    out = tmp_path / "out"
    run_command("compress", *run[:2], "-o", out, "--budget", 10)
    before = {path: digest(path) for path in (*run, *out.iterdir())}
    code, text, err = run_command("compress", *run[:2], "-o", out, "--preset", "lossless", "--remove", "--json")
    assert (code, err.count("was made with budget 10, not with preset lossless")) == (1, 2)
    assert [row["exit_code"] for row in json.loads(text)["checkpoints"]] == [1, 1]
    other = make_run(tmp_path / "other", 3, seed=1)
    code, _, err = run_command("compress", *other[:2], "-o", out, "--budget", 10, "--remove")
    assert (code, err.count("was not made from")) == (4, 2)
    code, _, err = run_command("compress", *run[:2], "-o", out, "--budget", 10, "--max-update-error", "1e-9")
    assert (code, err.count("max |Δu|")) == (1, 2)
    assert {path: digest(path) for path in before} == before
    ckpt8.compress(run[2], out / "step-15.ckpt8", stats=False)
    code, _, err = run_command("compress", *run[1:], "-o", out, "--no-stats")
    assert (code, err.count("carries no statistics")) == (1, 1)
    (out / "step-15.ckpt8").unlink()
    code, text, err = run_command("compress", run[0], "-o", out, "--preset", "lossless", "--remove")
    assert (code, text, err.count("was made with budget 10, not with preset lossless")) == (1, "", 1)
    code, text, err = run_command("compress", run[0], "-o", out, "--budget", 10, "--remove")
    assert (code, err, text.count("was there already")) == (0, "", 1)
    code, text, err = run_command("compress", *run[1:], "-o", out, "--budget", 10, "--remove")
    assert (code, err, text.count("was there already")) == (0, "", 1)
    assert names(run[0].parent) == []
    assert names(other[0].parent) == ["step-10.pt", "step-15.pt", "step-5.pt"]


@pytest.mark.by_default("chain", "one")
@pytest.mark.parametrize("command", ["compress", "chain", "one"])
def test_lines_and_json_name_the_error_in_steps_and_what_is_under_no_budget(command, run, run_command):
    """As the container states them."""
    tree = torch.load(run[1])
    tree["optimizer"]["param_groups"] = [
        {**tree["optimizer"]["param_groups"][0], "params": [0, 1]},
        {**tree["optimizer"]["param_groups"][0], "params": [2, 3], "lr": 0.0},
    ]
    torch.save(tree, run[1])
    given = [run[0].parent] if command == "chain" else run[1:2] if command == "one" else run
    words = ["compress" if command == "one" else command, *given, "--budget", 2]
    _, out, err = run_command(*words, *(["--rest", 0] if command == "chain" else []))
    assert err == ""
    facts = json.loads(run_command("inspect", run[1].with_suffix(".ckpt8"), "--json")[1])["steps"]
    assert facts["fallbacks"]
    reason = facts["fallbacks"][0]["reason"]
    if command == "one":
        assert f"error: {facts['steps']:.3g} steps of the optimizer, " in out
        assert f"of what changed: {reason}" in " ".join(out.split())
        return
    line = next(line for line in out.splitlines() if line.startswith(str(run[1].with_suffix(".ckpt8"))))
    assert f", error {facts['steps']:.3g} steps (budget 2) in " in line
    assert f"; under no budget: {facts['fallbacks'][0]['count']} storages, {reason}" in line
    _, out, _ = run_command(*words, "--json", *(["--rest", 0] if command == "chain" else []))
    rows = {row["source"]: row["steps"] for row in json.loads(out)["checkpoints"]}
    assert rows[str(run[1])] == facts
    assert rows[str(run[0])]["fallbacks"] == []


@pytest.mark.parametrize("count", [1, 3])
def test_a_dry_run_writes_nothing(count, run, run_command, tmp_path):
    """No folder either, and what would be refused is refused."""
    kept = tmp_path / "kept"
    before = {path: (digest(path), path.stat()) for path in run[0].parent.iterdir()}
    where = kept if count > 1 else tmp_path / "kept.ckpt8"
    facts = json.loads(run_command.shown("compress", *run[:count], "-o", where, "--dry-run", "--remove", "--json"))
    assert (facts["dry_run"], facts["would_remove"], len(facts["checkpoints"])) == (True, count, count)
    assert not kept.exists()
    assert not where.exists()
    assert {path: (digest(path), path.stat()) for path in run[0].parent.iterdir()} == before
    code, _, err = run_command("compress", *run[:count], "--dry-run", "--rule", "nothing=lossless")
    assert (code, err.count("\n")) == (2, count)
    ckpt8.compress(run[0])
    for more, expected in (((), 4 if count == 1 else 0), (("--force",), 0)):
        code, _, err = run_command("compress", *run[:count], "--dry-run", *more)
        assert code == expected, err
        assert ("exists; use --force" in err) == bool(expected)
    if count == 1:
        assert "cannot be written" in run_command.said(4, "compress", run[0], "-o", kept / "x.ckpt8", "--dry-run")


def test_a_folder_that_cannot_be_made_a_full_disk_and_a_folder_that_is_there(run, run_command, tmp_path):
    for folder in (tmp_path / "none" / "deeper", run[0] / "below"):
        err = run_command.refused(4, "compress", *run, "-o", folder, "--remove")
        assert re.fullmatch(rf"ckpt8: {re.escape(str(folder))}: cannot be made: [^\n]+\n", err)
    assert len(names(run[0].parent)) == 3
    with longest_file(20_000):
        code, out, err = run_command("compress", *run, "-o", tmp_path / "out", "--remove")
    assert code == 4
    assert err.count("cannot be written") == 3
    assert "nothing was compressed" in out
    assert not (tmp_path / "out").exists()
    assert len(names(run[0].parent)) == 3
    (tmp_path / "out").mkdir()
    assert run_command("compress", run[0], "-o", tmp_path / "out")[0] == 0
    assert names(tmp_path / "out") == ["step-5.ckpt8"]
