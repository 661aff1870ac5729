"""The kernels that measure on a CPU, against the same measurements in torch and in float64."""

from __future__ import annotations

import numpy as np
import pytest

from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.compressing.chunk_encoder import ChunkEncoder
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.core import backend

pytest.importorskip("numba", reason="numba is not installed")


def assert_same_figures(found, expected):
    assert type(found) is type(expected)
    assert expected.disagreement(found, tolerance=1e-12) is None


@pytest.mark.by_default("flash-gpt_adamw.pt", "flash-gpt_came.pt")
@pytest.mark.parametrize("name", ["gpt_adamw.pt", "gpt_stable_adamw.pt", "gpt_came.pt", "gpt_bf16.pt"])
@pytest.mark.parametrize("preset", ["flash", "compact"])
def test_units_of_real_checkpoints(inputs, monkeypatch, name, preset):
    """With kernels or without: the same figures of every unit, whatever its length and its optimizer."""
    with open_source(inputs / name, containers=False) as source:
        for unit in plan_bundle(source, Policy.of(preset)).units:
            if not any(stream.lossy for stream in unit.streams):
                continue
            found = []
            for least in (0, 1 << 60):
                monkeypatch.setattr(backend, "LEAST_FOR_NUMBA", least)
                found.append(ChunkEncoder(source, measure=True).pack((unit, 0)))
            kernels, plain = found
            for one, other in zip(kernels.parts, plain.parts, strict=True):
                assert all(np.array_equal(one[name], other[name]) for name in other)
            for index, error in plain.errors.streams.items():
                assert_same_figures(kernels.errors.streams[index], error)
            if plain.errors.update is not None:
                assert_same_figures(kernels.errors.update, plain.errors.update)
