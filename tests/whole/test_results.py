"""What public functions return prints as a few lines, says what is true of the files, and shows names escaped."""

from __future__ import annotations

import json

import pytest
import torch

import ckpt8
from ckpt8.restoring.restore import restore_original

HOSTILE = '<script>alert("x")</script>\x1b[2J\u202e' + "n" * 100_000
ORIGINAL, PACKED = "<b>\u202e.pt", "<b>\u202e.ckpt8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of 1,000 tensors, one with a hostile name, its container, and a copy that differs everywhere."""
    folder = tmp_path_factory.mktemp("results")
    tensors = {HOSTILE: torch.randn(16)} | {f"layers.{k}.weight": torch.randn(16) for k in range(999)}
    torch.save(tensors, folder / ORIGINAL)
    torch.save({name: tensor + len(name) for name, tensor in tensors.items()}, folder / "other.pt")
    ckpt8.compress(folder / ORIGINAL)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 128)).square().sum().backward()
    optimizer.step()
    path = tmp_path_factory.mktemp("trained") / "run.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


def opened(path):
    with ckpt8.open(path) as file:
        return file


def restored(source, target):
    return restore_original(source, target, force=False, threads=None, progress=lambda _: None)


RESULTS = {
    "compress": lambda folder, new: ckpt8.compress(folder / ORIGINAL, new),
    "save": lambda folder, new: ckpt8.save(torch.load(folder / ORIGINAL), new),
    "pending": lambda folder, new: ckpt8.save(torch.load(folder / ORIGINAL), new, background=True),
    "manifest": lambda folder, new: opened(folder / PACKED).manifest,
    "container": lambda folder, new: opened(folder / PACKED),
    "plain": lambda folder, new: opened(folder / ORIGINAL),
    "diff": lambda folder, new: ckpt8.diff(folder / ORIGINAL, folder / "other.pt"),
    "verify": lambda folder, new: ckpt8.verify(folder / PACKED, folder / ORIGINAL),
    "verify plain": lambda folder, new: ckpt8.verify(folder / ORIGINAL),
    "runs": lambda folder, new: ckpt8.runs(folder),
    "record": lambda folder, new: next(iter(ckpt8.runs(folder))),
    "restored": lambda folder, new: restored(folder / PACKED, new.with_suffix(".pt")),
    "convert": lambda folder, new: ckpt8.convert(folder / ORIGINAL, new.with_suffix(".safetensors")),
    "inspect": lambda folder, new: ckpt8.inspect(folder / PACKED, tensors=True),
    "inert": lambda folder, new: ckpt8.Inert("a.B", state=dict.fromkeys(range(1000), "<" * 9)),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_prints_as_a_few_lines(name, folder, tmp_path):
    result = RESULTS[name](folder, tmp_path / "new.ckpt8")
    if name == "pending":
        with result:
            pass
    lines = repr(result).splitlines()
    assert sum(map(len, lines)) <= 1001
    assert 1 <= len(lines) <= 6
    assert all(line.isprintable() for line in lines)
    if name != "inert":
        html = result._repr_html_()
        assert html.startswith("<table>")
        assert not any(text in html for text in ("<script", "<b>", "\x1b", "\u202e"))


def test_what_failed_and_what_differs_is_shown(folder, trained, tmp_path):
    difference = ckpt8.diff(folder / ORIGINAL, folder / "other.pt")
    assert "1,000 of 1,000 differ" in repr(difference)
    assert "&lt;b&gt;" in difference._repr_html_()
    (tmp_path / "step-1.pt").write_bytes(trained.read_bytes())
    (tmp_path / "step-2.pt").write_bytes(trained.read_bytes()[:-40])
    outcomes = ckpt8.chain(tmp_path, rest=0)
    assert "2 checkpoints, 1 failed" in repr(outcomes)
    assert str(outcomes[1].error)[:60] in repr(outcomes[1])
    (tmp_path / "step-3.ckpt8").write_bytes((tmp_path / "step-1.ckpt8").read_bytes()[:-1])
    run = ckpt8.runs(tmp_path)
    assert "2, the first: " in repr(run)
    assert "step-2.pt" in repr(run).splitlines()[-1]
    assert "step-3.ckpt8" in repr(run.checkpoints[-1])


@pytest.mark.parametrize("asked", [{}, {"preset": "archive"}, {"budget": 0.5}, {"preset": "lossless"}], ids=str)
def test_the_figures_of_a_manifest_are_those_of_the_files_and_of_the_report(asked, trained, tmp_path, run_command):
    target = tmp_path / "run.ckpt8"
    manifest = ckpt8.compress(trained, target, **asked)
    stored, original = target.stat().st_size, trained.stat().st_size
    report = json.loads(run_command("inspect", target, "--json")[1])
    with ckpt8.open(target) as file:
        for each in (manifest, file.manifest):
            assert (each.nbytes, each.stored_nbytes, each.ratio) == (original, stored, original / stored)
            if report["steps"] is None:
                is_exact = asked == {"preset": "lossless"}
                assert each.error_in_steps == (0.0 if is_exact else None)
                assert each.expected_drift == ((0.0, 0.0) if is_exact else None)
            else:
                drift = report["steps"]["drift"]
                assert each.error_in_steps == report["steps"]["steps"] > 0
                assert each.expected_drift == (drift["low"], drift["high"])
        assert manifest == file.manifest


@pytest.mark.parametrize("name", ["run.pt", "run.ckpt8"])
def test_inspect_gives_what_the_command_prints(name, trained, run_command):
    ckpt8.compress(trained, force=True)
    path = trained.with_name(name)
    inspection = ckpt8.inspect(path, tensors=True)
    printed = json.loads(run_command("inspect", path, "--tensors", "--json")[1])
    assert printed.pop("schema") == 1
    assert json.loads(json.dumps(inspection.to_json())) == printed
    assert inspection["bytes"] == trained.stat().st_size
    assert len(repr(inspection).splitlines()) in range(2, 7)
