"""The kernels that measure on a CPU, against the same measurements in torch and in float64."""

from __future__ import annotations

import math

import pytest
import torch

from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.codecs import error_measures as stats
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.companded8.reference import decode_scales
from ckpt8.codecs.split24 import Split24
from ckpt8.compressing.chunk_encoder import ChunkEncoder, read_chunk
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.core import backend
from ckpt8.core.tensors import DType, Role, TensorSpec

pytest.importorskip("numba", reason="numba is not installed")

COUNT = 64 * 256


def spread(seed: int, low: float, high: float) -> torch.Tensor:
    """Groups of many magnitudes, zeros among them, and a group of nothing else."""
    generator = torch.Generator().manual_seed(seed)
    centre = low + (high - low) * torch.rand(COUNT // 32, 1, generator=generator, dtype=torch.float64)
    x = 10**centre * torch.randn(COUNT // 32, 32, generator=generator, dtype=torch.float64)
    x[torch.rand(COUNT // 32, 32, generator=generator) < 0.05] = 0
    x[7] = 0
    return x.float().flatten()


def decoded(codec, x):
    parts = codec.encode(x, backend="torch")
    return parts, codec.decode(parts, TensorSpec("", Role.OTHER, DType.FLOAT32, tuple(x.shape)), backend="torch")


def assert_same_figures(found, expected):
    assert type(found) is type(expected)
    assert expected.disagreement(found, tolerance=1e-12) is None


@pytest.mark.by_default("-44--30", "-20-30")
@pytest.mark.parametrize(("low", "high"), [(-3, 0), (-44, -30), (-20, 30)])
def test_weights(low, high):
    from ckpt8.codecs import error_numba

    x = spread(1, low, high)
    codec = Split24()
    parts, y = decoded(codec, x)
    error = error_numba.weight_error(x, parts, codec)
    assert_same_figures(error, stats.weight_error(x, y))
    relative = ((y.double() - x.double()).abs() / x.double().abs().clamp_min(2.0**-126)).tolist()
    assert math.isclose(error.max_relative, max(relative), rel_tol=1e-6)
    assert math.isclose(error.sum_relative, math.fsum(relative), rel_tol=1e-6)


@pytest.mark.by_default(
    "-12--9-1e-08-Companded8(signed=False, Q=63, p=0.5)",
    "-17-2-1e-15-Companded8(signed=False, Q=255, p=1)",
    "-3-0-0.1-Companded8(signed=False, Q=63, p=0.5)",
)
@pytest.mark.parametrize("second", [Companded8(signed=False, Q=255), Companded8(signed=False, Q=63, p=0.5)], ids=repr)
@pytest.mark.parametrize(("low", "high", "eps"), [(-4, -1, 1e-8), (-12, -9, 1e-8), (-17, 2, 1e-15), (-3, 0, 0.1)])
def test_both_moments_and_the_update(second, low, high, eps):
    from ckpt8.codecs import error_numba

    first, rule = Companded8(), UpdateRule("adam", 100, 0.9, 0.999, eps)
    m, v = spread(2, low, high), spread(3, low, high).square_()
    (m_parts, m_there), (v_parts, v_there) = decoded(first, m), decoded(second, v)
    moments = (m, m_parts, first), (v, v_parts, second)
    of_m, of_v, of_u = error_numba.adam_errors(*moments, rule.divisor_eps, rule.factor)
    roots = stats.root(v), stats.root(v_there)
    assert_same_figures(of_m, stats.moment_error(m, m_there, decode_scales(m_parts["scales"])))
    assert_same_figures(of_v, stats.moment_error(v, v_there, decode_scales(v_parts["scales"]), roots))
    updates = [rule.apply(a, b, None) for a, b in ((m, roots[0]), (m_there, roots[1]))]
    assert_same_figures(of_u, stats.update_error(*updates, rule.factor))
    u, u_there = (a.double() / (b.double().sqrt() + rule.divisor_eps) for a, b in ((m, v), (m_there, v_there)))
    assert math.isclose(of_u.sum_square, float(u.square().sum()) * rule.factor**2, rel_tol=1e-5)
    assert math.isclose(of_u.sum_square_error, float((u_there - u).square().sum()) * rule.factor**2, rel_tol=1e-3)


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
            for least, smallest in ((0, 1), (1 << 60, 1 << 60)):
                monkeypatch.setattr(backend, "LEAST_FOR_NUMBA", least)
                monkeypatch.setattr(backend, "SMALLEST_FOR_NUMBA", smallest)
                encoder = ChunkEncoder(source, measure=True)
                found.append(
                    encoder.pack_tensors(
                        (unit, 0),
                        [read_chunk(source, s, 0, k)[0] for k, s in enumerate(unit.streams)],
                        [0] * len(unit.streams),
                    )
                )
            kernels, plain = found
            for one, other in zip(kernels.parts, plain.parts, strict=True):
                assert all(torch.equal(one[name], other[name]) for name in other)
            for index, error in plain.errors.streams.items():
                assert_same_figures(kernels.errors.streams[index], error)
            if plain.errors.update is not None:
                assert_same_figures(kernels.errors.update, plain.errors.update)
