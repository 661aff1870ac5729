"""Checkpoints of the report's tests, and the reports about them, made by the command."""

from __future__ import annotations

import json

import pytest

import ckpt8


@pytest.fixture
def inspect(run_command):
    """Run ``inspect --json`` with a report: (facts, page, what is embedded in the page)."""

    def call(path, target, *options):
        code, out, err = run_command("inspect", path, "--html", target, "--json", *options)
        assert (code, err) == (0, "")
        page = target.read_bytes()
        return json.loads(out), page, embedded(page)

    return call


def embedded(page):
    """The tree that a page has in it."""
    _, _, rest = page.decode().partition('<script type="application/json" id="ckpt8-report">')
    return json.loads(rest.partition("</script>")[0])


@pytest.fixture
def packed(inputs, tmp_path):
    """The GPT with AdamW, compressed: (original, container)."""
    original, container = inputs / "gpt_adamw.pt", tmp_path / "gpt.ckpt8"
    ckpt8.compress(original, container)
    return original, container
