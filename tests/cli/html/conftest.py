"""Checkpoints of the report's tests, and the reports about them, made by the command."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

import ckpt8
from ckpt8.cli.app import app


@pytest.fixture
def inspect(run_command):
    """Run ``inspect --json`` with a report: (facts, page, what is embedded in the page)."""

    def call(path, target, *options):
        out = run_command.shown("inspect", path, "--html", target, "--json", *options)
        page = target.read_bytes()
        return json.loads(out), page, embedded(page)

    return call


def embedded(page):
    """The tree that a page has in it."""
    _, _, rest = page.decode().partition('<script type="application/json" id="ckpt8-report">')
    return json.loads(rest.partition("</script>")[0])


@pytest.fixture(scope="session")
def made(inputs, tmp_path_factory):
    """The smallest checkpoint with moments, compressed, and what ``verify --json`` prints of three replayed steps."""
    original, container = inputs / "crc_off.pt", tmp_path_factory.mktemp("made") / "run.ckpt8"
    ckpt8.compress(original, container)
    shown = CliRunner().invoke(
        app, ["verify", str(container), "--against", str(original), "--resume-steps", "3", "--json"]
    )
    assert shown.exit_code == 0
    return container, shown.output


@pytest.fixture
def packed(inputs, made, tmp_path):
    """(Original, container): a copy, which a test may change."""
    return inputs / "crc_off.pt", Path(shutil.copy(made[0], tmp_path / "run.ckpt8"))
