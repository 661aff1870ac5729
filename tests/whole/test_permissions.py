"""No output is more open to other users than what it was made from, or than the file whose place it takes."""

from __future__ import annotations

import json
import os
import sys
import warnings
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp

import ckpt8
from ckpt8.cli.show.report import Report
from ckpt8.core.files import atomic
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.integrations.dcp.sharing import compress_share

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="modes of POSIX")


@pytest.fixture(autouse=True)
def _umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def quietly(function, *arguments, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function(*arguments, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A file, its container and a delta to that, a directory and its container: public, for everybody to read."""
    folder = tmp_path_factory.mktemp("public")
    tree = {"model": {"w": torch.randn(96, 96)}}
    torch.save(tree, folder / "run.pt")
    ckpt8.compress(folder / "run.pt")
    tree["model"]["w"][0] += 1
    torch.save(tree, folder / "next.pt")
    ckpt8.compress(folder / "next.pt", base=folder / "run.ckpt8")
    (folder / "checkpoint-8" / "inner").mkdir(parents=True)
    torch.save(tree, folder / "checkpoint-8" / "inner" / "model.pt")
    ckpt8.compress(folder / "checkpoint-8")
    quietly(dcp.save, tree, checkpoint_id=folder / "slices")
    return folder


def modes(path):
    """Those of a file, or of a directory and everything in it: one of directories, one of files."""
    paths = [path, *path.rglob("*")]
    return {oct(each.stat().st_mode & 0o777) for each in paths}


def share(source, target):
    quietly(compress_share, source, target, {"threads": 1}, 0, 1, overwrite=False)


FOLDERS = {0o600: {"0o700", "0o600"}, 0o640: {"0o750", "0o640"}}
MAKE = {
    "compress": ("run.pt", ckpt8.compress, {0o600: {"0o600"}, 0o640: {"0o640"}, 0o444: {"0o444"}}),
    "a delta": (
        "run.pt",
        lambda source, target: ckpt8.compress(source, target, base=source.with_name("run.ckpt8")),
        {0o600: {"0o600"}},
    ),
    "a directory": ("checkpoint-8", ckpt8.compress, {0o700: {"0o600"}, 0o750: {"0o640"}, 0o711: {"0o600"}}),
    "restore": ("run.ckpt8", ckpt8.restore, {0o600: {"0o600"}, 0o640: {"0o640"}}),
    "restore a directory": ("checkpoint-8.ckpt8", ckpt8.restore, FOLDERS),
    "salvage": ("run.ckpt8", partial(ckpt8.restore, salvage=True), {0o600: {"0o600"}}),
    "rebase": ("next.ckpt8", ckpt8.rebase, {0o600: {"0o600"}}),
    "convert": ("run.ckpt8", partial(ckpt8.convert, to="safetensors"), {0o600: {"0o600"}}),
    "convert to a directory": ("run.ckpt8", partial(ckpt8.convert, to="dcp"), {0o600: {"0o700", "0o600"}}),
    "ranks": ("slices", share, {0o700: {"0o700", "0o600"}, 0o755: {"0o755", "0o644"}}),
    "a report": (
        "run.pt",
        lambda source, target: Report(target, source).write(inspect_checkpoint(source)),
        {0o600: {"0o600"}},
    ),
}


@pytest.mark.parametrize("what", MAKE)
def test_an_output_is_no_more_open_than_its_source(what, made, tmp_path):
    name, make, expected = MAKE[what]
    for mode, found in expected.items():
        before = (made / name).stat().st_mode
        (made / name).chmod(mode)
        try:
            make(made / name, tmp_path / oct(mode))
        finally:
            (made / name).chmod(before)
        assert modes(tmp_path / oct(mode)) == found, oct(mode)


def test_what_is_public_stays_public_and_a_live_object_asks_the_umask(made, tmp_path):
    ckpt8.compress(made / "run.pt", tmp_path / "out")
    ckpt8.save({"w": torch.ones(9)}, tmp_path / "live")
    assert modes(tmp_path / "out") == modes(tmp_path / "live") == {"0o644"}
    os.umask(0o027)
    ckpt8.save({"w": torch.ones(9)}, tmp_path / "group")
    assert modes(tmp_path / "group") == {"0o640"}


def test_a_delta_tells_what_its_private_base_holds(made, tmp_path):
    """What is made of both is as private as the base."""
    for name in ("run.ckpt8", "next.ckpt8"):
        (tmp_path / name).write_bytes((made / name).read_bytes())
    (tmp_path / "run.ckpt8").chmod(0o600)
    ckpt8.restore(tmp_path / "next.ckpt8", tmp_path / "back.pt")
    ckpt8.rebase(tmp_path / "next.ckpt8")
    assert modes(tmp_path / "back.pt") == modes(tmp_path / "next.ckpt8") == {"0o600"}


def test_what_takes_the_place_of_a_private_file_is_private(made, tmp_path):
    for name, make in (
        ("run.ckpt8", lambda target: ckpt8.compress(made / "run.pt", target, force=True)),
        ("live.ckpt8", lambda target: ckpt8.save({"w": torch.ones(9)}, target)),
    ):
        (tmp_path / name).write_bytes((made / "run.ckpt8").read_bytes())
        (tmp_path / name).chmod(0o600)
        make(tmp_path / name)
        assert modes(tmp_path / name) == {"0o600"}
    ckpt8.restore(made / "checkpoint-8.ckpt8", tmp_path / "checkpoint-8")
    (tmp_path / "checkpoint-8").chmod(0o700)
    ckpt8.restore(made / "checkpoint-8.ckpt8", tmp_path / "checkpoint-8", force=True)
    assert modes(tmp_path / "checkpoint-8") == {"0o700", "0o600"}


def test_a_temporary_is_its_users_alone(made, tmp_path):
    """Until the moment of the rename, whatever the output will be."""
    seen = set()

    def look(_):
        seen.update(oct(path.stat().st_mode & 0o777) for path in tmp_path.glob(".*partial"))

    ckpt8.compress(made / "run.pt", tmp_path / "out", progress=look)
    ckpt8.restore(made / "run.ckpt8", tmp_path / "file", progress=look)
    assert seen == {"0o600"}
    ckpt8.restore(made / "checkpoint-8.ckpt8", tmp_path / "folder", progress=look)
    assert seen == {"0o600", "0o700"}


def test_another_group_gets_what_everybody_gets(monkeypatch):
    """The members of the group of an output may be none of that of its source."""
    sources = [os.stat_result((mode, 0, 0, 0, 0, 7, 0, 0, 0, 0)) for mode in (0o100640, 0o100644)]
    monkeypatch.setattr(atomic, "_umask", lambda: 0o002)
    for status, same, other in ((sources[0], 0o640, 0o600), (sources[1], 0o644, 0o644)):
        assert atomic.mode_of_output(directory=False, group=7, replaced=status) == same
        assert atomic.mode_of_output(directory=False, group=8, replaced=status) == other


def test_the_umask_of_a_system_that_does_not_tell_it(monkeypatch, tmp_path):
    monkeypatch.setattr(atomic, "_STATUS", tmp_path / "missing")
    assert atomic._umask() == 0o022
    assert os.umask(0o022) == 0o022


def test_a_run_page_is_as_private_as_the_run(made, tmp_path, run_command):
    (tmp_path / "run").mkdir(0o700)
    (tmp_path / "run" / "step-8.ckpt8").write_bytes((made / "run.ckpt8").read_bytes())
    code, out, _ = run_command("runs", tmp_path / "run", "--html", tmp_path / "page.html", "--json")
    assert (code, json.loads(out)["schema"]) == (0, 1)
    assert modes(tmp_path / "page.html") == {"0o600"}
