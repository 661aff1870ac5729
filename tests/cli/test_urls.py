"""A URL in place of a path is named as a URL, whatever the argument, with what to do."""

from __future__ import annotations

import shutil

import pytest

import ckpt8
from ckpt8.core.errors import UsageError

URLS = (
    "https://host/run.pt",
    "gs://bucket/run.pt",
    "file:///a/run.pt",
)
S3, HUB = "s3://bucket/run.ckpt8", "hf://me/model/run.ckpt8"
ARGUMENTS = {
    "inspect": ("inspect", "URL"),
    "the original of inspect": ("inspect", "run.ckpt8", "--against", "URL"),
    "a report": ("inspect", "run.ckpt8", "--html", "URL"),
    "the replay of a report": ("inspect", "run.ckpt8", "--html", "r.html", "--replay", "URL"),
    "compress": ("compress", "URL"),
    "the target of compress": ("compress", "run.pt", "-o", "URL"),
    "restore": ("restore", "URL"),
    "the target of restore": ("restore", "run.ckpt8", "-o", "URL"),
    "salvage": ("restore", "URL", "--salvage"),
    "the target of salvage": ("restore", "run.ckpt8", "--salvage", "-o", "URL"),
    "verify": ("verify", "URL"),
    "the original of verify": ("verify", "run.ckpt8", "--against", "URL"),
    "diff": ("diff", "URL", "run.pt"),
    "the other side of diff": ("diff", "run.pt", "URL"),
    "convert": ("convert", "URL", "x.safetensors"),
    "the target of convert": ("convert", "run.pt", "URL", "--to", "torch"),
    "the target directory of convert": ("convert", "run.pt", "URL", "--to", "dcp"),
    "a configuration": ("convert", "run.pt", "x/", "--dtype", "int8", "--config", "URL"),
    "bench": ("bench", "URL"),
    "the folder of bench": ("bench", "run.pt", "--scratch", "URL"),
}


IN_STORES = {
    "inspect",
    "the original of inspect",
    "compress",
    "the target of compress",
    "restore",
    "the target of restore",
    "salvage",
    "the target of salvage",
    "verify",
    "the original of verify",
    "diff",
    "the other side of diff",
    "convert",
    "the target of convert",
    "the target directory of convert",
}
"""Where an object is read or written: tests/cli/test_s3_*.py and tests/core/stores have them."""


@pytest.fixture(scope="module")
def folder(inputs, scratch):
    shutil.copyfile(inputs / "legacy.pt", scratch / "run.pt")
    ckpt8.compress(scratch / "run.pt")
    return scratch


@pytest.mark.by_default(most=6)
@pytest.mark.parametrize("place", ARGUMENTS)
def test_a_url_is_a_usage_error_that_names_it(place, folder, run_command, monkeypatch):
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    for url in (S3, HUB, *URLS) if place not in IN_STORES else URLS:
        err = run_command.refused(2, *(url if word == "URL" else word for word in ARGUMENTS[place]))
        why = "which is not read or written here" if url in (S3, HUB) else "and ckpt8 reads and writes local files"
        assert err.startswith(f"ckpt8: {url}: is a URL, {why}; ")
        assert err.count("\n") == 1
    assert "give the path alone, /a/run.pt" in err
    assert sorted(folder.iterdir()) == before


def test_the_functions_say_so_too(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for call in (ckpt8.load, ckpt8.compress, lambda url: ckpt8.convert("run.pt", url, to="torch"), ckpt8.open):
        with pytest.raises(UsageError, match=r"gs://bucket/run\.ckpt8: is a URL.*gcloud storage cp"):
            call("gs://bucket/run.ckpt8")


def test_a_folder_may_have_such_a_name(folder, tmp_path, monkeypatch, run_command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    shutil.copyfile(folder / "run.pt", tmp_path / "s3:" / "run.pt")
    assert run_command("compress", "s3:/run.pt")[0] == 0
    assert run_command("inspect", "s3:/run.ckpt8")[0] == 0
