"""A dithered lattice: the hash against its definition, bounds and statistics of the error in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from archive_kit import each_backend, each_dtype, half_units, integers, spec_of, there_and_back

from ckpt8.codecs.lattice import HIGHEST_K, LOWEST_K, DitheredLattice, Lattice, MomentLattice, step_of
from ckpt8.codecs.lattice.reference import dither
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import DType, Role, TensorSpec

CPU = torch.device("cpu")
COUNT = 1 << 21


def by_definition(index, salt):
    """t of one element, in Python's integers."""
    word = (1 << 32) - 1
    h = (index * 0x9E3779B1 + salt) & word
    h ^= h >> 15
    h = h * 0x2C1B3C6D & word
    h ^= h >> 12
    h = h * 0x297A2D39 & word
    h ^= h >> 15
    return (h >> 8) / 2**24


@pytest.mark.parametrize("salt", [0, 1, 12345, 1 << 31, (1 << 32) - 1])
@pytest.mark.parametrize("first", [0, (1 << 31) - 100, (1 << 32) - 100, (1 << 40) + 7])
def test_the_dither_is_what_the_format_says(first, salt):
    assert dither(first, 300, salt, CPU).tolist() == [by_definition(first + i, salt) for i in range(300)]


def centred(salt):
    return dither(0, COUNT, salt, CPU).double() - 0.5


@pytest.mark.parametrize("salt", [0, 1, 12345, (1 << 32) - 1])
def test_the_dither_is_even_and_neighbours_are_independent(salt):
    t = centred(salt)
    expected = COUNT / 256
    counts = torch.histc(t, 256, -0.5, 0.5)
    assert 0.7 < float(((counts - expected) ** 2 / expected).sum()) / 255 < 1.35
    assert abs(float(t.mean())) < 0.001
    for lag in (1, 2, 3, 4, 64, 384, 768):
        assert abs(float((t[:-lag] * t[lag:]).mean()) * 12) < 0.003, lag


@pytest.mark.slow
@pytest.mark.parametrize("salt", [0, 0xDEADBEEF])
def test_salts_one_bit_apart_give_independent_dithers(salt):
    t = centred(salt)
    for bit in range(32):
        assert abs(float((t * centred(salt ^ (1 << bit))).mean()) * 12) < 0.003, bit


def test_steps_are_quarter_octaves():
    for k in range(LOWEST_K, HIGHEST_K + 1):
        step = step_of(k)
        assert np.float32(step) == step
        assert abs(step / 2 ** (k / 4) - 1) < 2**-24
        assert step_of(4 * (k // 4)) == 2.0 ** (k // 4)


@each_backend
@each_dtype
@pytest.mark.parametrize("k", [LOWEST_K, -40, -39, -37, 0, HIGHEST_K])
def test_the_bound_holds_for_weights_of_every_magnitude(k, dtype, backend):
    codec, rng, step = Lattice(k, 9), np.random.default_rng(k % 99), step_of(k)
    for scale in (1e-30, 1e-3, 1.0, 2.0**8, 2.0**16, 2.0**17.99):
        x = torch.from_numpy(rng.uniform(-1, 1, 20_000) * scale * step).to(dtype)
        x[::97], x[1::97], x[2::97] = 0.0, -0.0, 1e-45
        parts, y = there_and_back(codec, x, backend, first=(1 << 32) - 5000)
        q = integers(parts["codes"])
        bound = step * (0.5 + (np.abs(q) + 1) * 2.0**-22)
        if dtype is torch.bfloat16:
            bound = bound + half_units(x, y)
        assert (np.abs(y.double().numpy() - x.double().numpy()) <= bound).all()
        assert (np.abs(q) < 1 << 18).all()
        zero = x == 0
        assert bool((parts["codes"][zero] == -1).all())
        assert not bool((parts["codes"][~zero] == -1).any())
        assert y[zero].view(torch.int32 if dtype is torch.float32 else torch.int16).count_nonzero() == 0  # +0


@each_backend
def test_every_code_comes_back_as_itself_in_fp32(backend):
    every = torch.arange((1 << 19) - 1, dtype=torch.int32)
    spec = spec_of(torch.empty(len(every)))
    for k, salt in ((-40, 0), (-37, 1), (-39, 77), (LOWEST_K, 5), (HIGHEST_K, 1 << 31)):
        codec = Lattice(k, salt)
        w = codec.decode({"codes": every}, spec, backend=backend)
        again = codec.encode(w, backend=backend)["codes"]
        assert bool(((again == every) | (w == 0)).all())
        assert torch.equal(codec.decode({"codes": again}, spec, backend=backend), w)


def test_the_error_is_even_whatever_the_weight():
    """Where nearest rounding gives every weight of one value the same error."""
    for weight in (0.1, 0.5, 1.0 + 2.0**-20, -1234.5):
        x = torch.full((200_000,), weight)
        errors = [there_and_back(Lattice(0, salt), x, "torch")[1].double() - weight for salt in (1, 2)]
        for error in errors:
            assert abs(float(error.mean())) < 0.005
            assert abs(float(error.square().mean()) * 12 - 1) < 0.01
        assert abs(float((errors[0] * errors[1]).mean()) * 12) < 0.02


def test_ten_restores_walk_and_do_not_pull_back():
    """Progress of a tenth of a step survives restores with other salts; with one salt and no progress nothing moves."""
    x = torch.zeros(100_000) + 0.3
    y = x.clone()
    for salt in range(10):
        y = there_and_back(Lattice(0, 1000 + salt), y + 0.1, "torch")[1]
    assert abs(float(y.double().mean()) - 1.3) < 0.02
    z = there_and_back(Lattice(0, 5), x, "torch")[1]
    assert torch.equal(there_and_back(Lattice(0, 5), z, "torch")[1], z)


@each_backend
@each_dtype
def test_what_is_refused(dtype, backend):
    codec = Lattice(0, 3)
    near = torch.ones(40, dtype=dtype)
    codec.encode(near * (2.0**18 - 1024), backend=backend)
    for value in (2.0**18, -(2.0**18 + 2048), math.inf, -math.inf, math.nan, 3e38):
        x = near.clone()
        x[33] = value
        with pytest.raises(RefusedError, match=r"2\^18 steps"):
            codec.encode(x, backend=backend)


@pytest.mark.parametrize("kind", [Lattice, MomentLattice])
def test_a_step_is_continued_within_half_an_octave(kind):
    base = kind(-20, salt=7)
    for k, kept in ((-20, True), (-22, True), (-18, True), (-23, False), (-17, False)):
        assert (kind(k, salt=9).continued(base) == base) is kept


@each_backend
@each_dtype
def test_first_moments_have_the_codes_of_weights(dtype, backend):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(3)).mul(1e-4).to(dtype)
    x[::9] = -0.0
    (parts, y), (expected, z) = (
        there_and_back(kind(-61, 9), x, backend, first=77) for kind in (MomentLattice, Lattice)
    )
    assert torch.equal(parts["codes"], expected["codes"])
    assert torch.equal(y, z)
    assert not torch.equal(y, x)
    assert bool((y[::9] == 0).all())


def test_weights_and_first_moments_are_told_apart():
    weights, moments = Lattice(-20, 7), MomentLattice(-20, 7)
    assert weights != moments
    assert not isinstance(weights, MomentLattice)
    assert not isinstance(moments, Lattice)
    assert all(isinstance(codec, DitheredLattice) for codec in (weights, moments))
    for one, other in ((weights, moments), (moments, weights)):
        assert one.continued(other) is None
        assert not one.counts_from(other)
    taken = {
        (dtype, role)
        for dtype in DType
        for role in Role
        if moments.accepts(TensorSpec("m", role, dtype, (4,)))
        and not weights.accepts(TensorSpec("m", role, dtype, (4,)))
    }
    assert taken == {(dtype, Role.MOMENT1) for dtype in (DType.FLOAT32, DType.BFLOAT16)}
