"""A disk that is full, for every command that writes and every format: exit code 4, the output named, nothing left.

A limit on the size of files fails a write as a full disk does; it holds for temporary files as well.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import sys

import pytest
from disk_kit import longest_file

import ckpt8
from ckpt8.converting.writers import WRITERS

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="limits of POSIX")


@pytest.fixture(scope="module")
def sources(inputs, scratch):
    """Checkpoints of every kind, and containers of them."""
    shutil.copyfile(inputs / "gpt_adamw.pt", scratch / "run.pt")
    ckpt8.convert(scratch / "run.pt", scratch / "slices", to="dcp")
    for name, source in {"run": scratch / "run.pt", "dir": inputs / "trainer-adamw", "dcp": scratch / "slices"}.items():
        ckpt8.compress(source, scratch / f"{name}.ckpt8")
    ckpt8.compress(scratch / "run.pt", scratch / "archive.ckpt8", preset="archive")
    return scratch


DIRECTORIES = ("trainer", "dcp", "compressed-tensors")
COMMANDS = {
    "compress a file": ("compress", "run.pt", "-o", "OUT"),
    "compress with a budget": ("compress", "run.pt", "--budget", "2", "-o", "OUT"),
    "compress a directory": ("compress", "slices", "-o", "OUT"),
    "restore a file": ("restore", "run.ckpt8", "-o", "OUT"),
    "restore an archive": ("restore", "archive.ckpt8", "-o", "OUT"),
    "restore a directory": ("restore", "dir.ckpt8", "-o", "OUT"),
    "restore a distributed checkpoint": ("restore", "dcp.ckpt8", "-o", "OUT"),
    "salvage a file": ("restore", "run.ckpt8", "--salvage", "-o", "OUT"),
    "salvage an archive": ("restore", "archive.ckpt8", "--salvage", "-o", "OUT"),
    "salvage a directory": ("restore", "dir.ckpt8", "--salvage", "-o", "OUT"),
    "a report": ("inspect", "run.ckpt8", "--html", "OUT"),
    "convert slices": ("convert", "slices", "OUT", "--to", "torch"),
    "convert a container": ("convert", "run.ckpt8", "OUT", "--to", "torch"),
    **{f"convert to {name}": ("convert", "run.pt", "OUT", "--to", name) for name in WRITERS if name not in DIRECTORIES},
    **{f"convert to {name}": ("convert", "run.pt", "OUT", "--to", name) for name in DIRECTORIES[:2]},
    "convert to int8": ("convert", "dir.ckpt8", "OUT", "--to", "compressed-tensors", "--dtype", "int8"),
}


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_full_disk_is_no_fault_of_the_source(command, run_command, sources, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    folder = tmp_path / "folder"
    folder.mkdir()
    arguments = [sources / word if (sources / word).exists() else word for word in COMMANDS[command]]
    arguments = [folder / "out" if word == "OUT" else word for word in arguments]
    before = {path: path.stat().st_mtime_ns for path in sources.rglob("*")}
    for length in (60, 500, 20_000):
        with longest_file(length):
            code, out, err = run_command(*arguments)
        assert (code, out) == (4, ""), (length, err)
        target, temporary = (re.escape(str(path)) for path in (folder / "out", tmp_path / "tmp"))
        says = rf"(?:{target}: cannot be written: |{temporary}: a temporary file cannot be written; )[^\n]+"
        assert re.fullmatch(rf"ckpt8: {says}\n", err)
        is_known = command.split()[0] in ("compress", "restore")
        assert re.search(r"; it needs (at most )?[0-9.]+ [kM]B$", err.strip()) is not None or not is_known
        assert [*folder.iterdir(), *(tmp_path / "tmp").iterdir()] == []
    assert {path: path.stat().st_mtime_ns for path in sources.rglob("*")} == before


@pytest.mark.parametrize("command", ["inspect", "compress", "verify", "diff", "restore", "convert"])
def test_a_disk_that_fails_to_read_is_no_fault_of_the_output(command, run_command, sources, tmp_path, monkeypatch):
    """At the first bytes and at the last: the line names the source, the code is 3."""
    source = sources / ("run.ckpt8" if command in ("verify", "restore") else "run.pt")
    arguments = {
        "diff": (source, source),
        "compress": (source, "-o", tmp_path / "out"),
        "restore": (source, "-o", tmp_path / "out"),
        "convert": (source, tmp_path / "out.pt"),
    }.get(command, (source,))
    read = os.preadv
    for broken in (0, 100, source.stat().st_size // 2):

        def preadv(descriptor, buffers, offset, *flags, broken=broken):
            if offset <= broken < offset + sum(map(len, buffers)) and os.path.samestat(
                os.fstat(descriptor), source.stat()
            ):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return read(descriptor, buffers, offset, *flags)

        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", preadv)
            code, out, err = run_command(command, *arguments, *(("--full",) if command == "inspect" else ()))
        assert (code, out) == (3, ""), (broken, err)
        assert re.fullmatch(rf"ckpt8: {re.escape(str(source))}: [^\n]*{os.strerror(errno.EIO)}\n", err)
        assert list(tmp_path.iterdir()) == []
