"""What the tests of frameworks share: a checkpoint through a container, and how far apart two runs are."""

from __future__ import annotations

import warnings
from contextlib import contextmanager

import ckpt8

PRESETS = ["lossless", "flash", "compact", "archive"]
SHARE = {"flash": 0.01, "compact": 0.02, "archive": 0.2}
"""The largest drift of a resumed run, as a share of what another initialisation makes. Measured: a third at most."""


def through(checkpoint, folder, preset):
    """The manifest of ``checkpoint`` compressed into ``folder``, and what comes back under the name that it had."""
    folder.mkdir(exist_ok=True)
    container = folder / f"{checkpoint.name}.ckpt8"
    manifest = ckpt8.compress(checkpoint, container, preset=preset)
    assert not ckpt8.verify(container, checkpoint).failures
    restored = ckpt8.restore(container)
    assert restored.name == checkpoint.name
    return manifest, restored


def drift(losses, expected):
    """Mean |difference| of two runs, step by step."""
    return sum(abs(a - b) for a, b in zip(losses, expected, strict=True)) / len(expected)


def check_goes_on(preset, losses, expected, other):
    """``losses`` of the resumed run are those ``expected``, as closely as ``SHARE`` asks.

    ``other`` is a run from another initialisation.
    """
    if preset == "lossless":
        assert losses == expected
    else:
        assert 0 < drift(losses, expected) < drift(other, expected) * SHARE[preset]


@contextmanager
def quiet():
    """Without warnings of the framework, in fixtures, which the marks of a test do not reach."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
