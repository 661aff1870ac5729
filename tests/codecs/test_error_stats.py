"""The error statistics against the same figures computed in float64 and with exact integers."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction

import pytest
import torch

from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.companded8.reference import root_of_tile
from ckpt8.codecs.error_stats import ErrorStats, MomentError, NoiseError, UpdateError, WeightError
from ckpt8.codecs.split24 import Split24
from ckpt8.compressing.measure_torch import moment_error, update_error, weight_error
from ckpt8.core.tensors import DType, Role, TensorSpec

NAN = math.nan


def normal(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).to(torch.int64)


def coded(codec, x: torch.Tensor, role: Role) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    parts = codec.encode(x)
    return codec.decode(parts, TensorSpec("x", role, DType.FLOAT32, (len(x),))), parts


def close(value: float, rel: float = 1e-12) -> object:
    """Relative only: sums of squares of moments are far below pytest's absolute tolerance."""
    return pytest.approx(value, rel=rel, abs=0)


def roots(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Square roots, rounded once."""
    return x.double().sqrt().float(), y.double().sqrt().float()


def figures(error: ErrorStats) -> dict[str, float]:
    return dataclasses.asdict(error)


def test_weight_error_against_float64():
    x = normal(70_001) * torch.exp2(torch.linspace(-140, 20, 70_001))
    y, _ = coded(Split24(R=7), x, Role.WEIGHT)
    error = weight_error(x, y)
    wide = (y.double() - x.double()).abs() / x.double().abs().clamp(min=2.0**-126)
    assert error.count == 70_001
    assert error.max_relative == close(float(wide.max()), rel=2e-7)
    assert error.sum_relative == close(float(wide.sum()), rel=1e-6)
    assert error.mean_relative == close(float(wide.mean()), rel=1e-6)
    assert error.max_steps == int((bits(y) - bits(x)).abs().max())
    assert 1000 < error.max_steps <= 2341
    assert error.max_bf16_ulp == error.max_steps / 65536


def test_weight_error_by_hand():
    x = torch.tensor([1.0, -2.0, 0.0, 2.0**-149, -0.0])
    y = torch.tensor([1.0 + 2.0**-23, -2.0 - 2.0**-21, 0.0, 2.0**-147, -0.0])
    error = weight_error(x, y)
    # Steps: 1, and 2 above 2 where a step is 2^-22; 4 - 1 = 3 among the subnormals.
    # Below 2^-126 errors are absolute.
    assert error == WeightError(5, 3 * 2.0**-23, sum_relative=2.0**-23 + 2.0**-22 + 3 * 2.0**-23, max_steps=3)


def test_exact_weights_have_no_error():
    x = normal(1000)
    assert weight_error(x, x.clone()) == WeightError(1000, 0.0, 0.0, 0)
    assert WeightError().mean_relative == 0.0


def scales_of(parts) -> torch.Tensor:
    u = parts["scales"].to(torch.int64)
    return torch.where(u > 0, torch.ldexp(1 + (u & 0xFF).double() / 256, (u >> 8) - 127), 0.0)


@pytest.mark.parametrize("numel", [1, 31, 32, 33, 5000, 65_536])
@pytest.mark.parametrize("second", [False, True])
def test_moment_error_against_float64(numel, second):
    codec = Companded8(signed=False, Q=255) if second else Companded8()
    x = normal(numel, seed=numel) * 1e-3
    x[3::7] = 0.0
    if second:
        x = x.square()
    y, parts = coded(codec, x, Role.MOMENT2 if second else Role.MOMENT1)
    scales = scales_of(parts)
    error = moment_error(x, y, scales.float(), roots(x, y) if second else None)
    wide, decoded = x.double(), y.double()
    assert error.sum_square == close(float(wide.square().sum()), rel=1e-9)
    # The difference of two close fp32 numbers is exact in fp32, so the sum is too, nearly.
    assert error.sum_square_error == close(float((decoded - wide).square().sum()), rel=1e-5)
    if second:
        wide, decoded = wide.sqrt(), decoded.sqrt()
    scaled = (decoded - wide).abs() / scales.repeat_interleave(32)[:numel].clamp(min=1e-300)
    assert error.max_scaled == close(float(scaled.max()), rel=2e-4)
    assert error.nmse == close(float((y.double() - x.double()).square().sum() / x.double().square().sum()), rel=1e-5)


def test_moment_error_is_relative_to_the_scale_of_its_own_group():
    x, y = torch.zeros(70), torch.zeros(70)
    y[3], y[40], y[69] = 0.5, -3.0, 0.25
    error = moment_error(x, y, torch.tensor([2.0, 8.0, 1.0]))
    assert error.max_scaled == 0.375  # 3/8 in the second group; 1/4 in the others
    assert moment_error(x[:32], y[:32], torch.tensor([2.0])).max_scaled == 0.25
    assert error.sum_square_error == 0.25 + 9 + 0.0625


def test_the_error_of_second_moments_is_scaled_in_the_domain_of_the_root():
    x, y = torch.full((32,), 4.0), torch.full((32,), 4.0)
    y[7] = 9.0
    error = moment_error(x, y, torch.tensor([4.0]), roots(x, y))
    assert error.max_scaled == 0.25  # (3 - 2) / 4
    assert error.sum_square_error == 25.0
    assert error.sum_square == 32 * 16.0


def test_groups_without_a_scale_count_as_noise_only():
    x = torch.zeros(64)
    x[40] = 1e-20
    error = moment_error(x, torch.zeros(64), torch.tensor([0.0, 0.0]))
    assert error.max_scaled == 0.0
    assert error.sum_square == error.sum_square_error == close(1e-40, rel=1e-6)
    assert error.nmse == 1.0


def test_nmse_and_decibels():
    assert NoiseError().nmse == 0.0
    assert NoiseError().snr_db is None
    assert NoiseError(0.0, 5.0).nmse == 0.0
    assert NoiseError(0.0, 5.0).snr_db is None
    assert NoiseError(1.0, 0.0).nmse == math.inf
    assert NoiseError(1.0, 0.0).snr_db is None
    assert NoiseError(1.0, 1000.0).nmse == 1e-3
    assert NoiseError(1.0, 1000.0).snr_db == close(30.0)


def test_update_error_against_float64():
    x = normal(10_000)
    y = x + 1e-3 * normal(10_000, seed=1)
    factor = 1 / (1 - 0.9**3)
    error = update_error(x, y, factor)
    wide, decoded = x.double() * factor, y.double() * factor
    assert error.sum_square == close(float(wide.square().sum()), rel=1e-12)
    assert error.sum_square_error == close(float((decoded - wide).square().sum()), rel=1e-5)
    assert error.max_error == close(float((decoded - wide).abs().max()), rel=1e-4)
    assert error.max_update == close(float(wide.abs().max()), rel=1e-7)
    assert error.nmse == close(1e-6, rel=0.1)


def test_update_error_by_hand():
    error = update_error(torch.tensor([1.0, -4.0, 2.0]), torch.tensor([1.5, -4.0, 4.0]), 0.5)
    assert error == UpdateError(sum_square_error=(0.25 + 4) / 4, sum_square=21 / 4, max_error=1.0, max_update=2.0)


def test_sums_are_taken_in_float64():
    """In fp32 a million times 1e-8 beside one 1 would be lost."""
    x = torch.full((1 << 20,), 1e-4)
    x[0] = 1.0
    exact = 1.0 + ((1 << 20) - 1) * float(x[1].double()) ** 2
    assert update_error(x, x, 1.0).sum_square == close(exact, rel=1e-12)
    assert moment_error(x, x, torch.ones(1 << 15)).sum_square == close(exact, rel=1e-12)


@pytest.mark.parametrize("measure", [update_error, weight_error, moment_error])
def test_tensors_that_are_measured_stay_as_they_are(measure):
    x, y = normal(100).square(), normal(100, seed=1).square()
    before = x.clone(), y.clone()
    measure(x, y, *{update_error: [2.0], moment_error: [torch.ones(4), roots(x, y)]}.get(measure, []))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def of_pieces(kind, cuts):
    """Statistics of 3,200 elements measured in pieces and merged in order."""
    x = normal(3200)
    y = x * (1 + 1e-3 * normal(3200, seed=1))
    total = kind()
    for a, b in zip([0, *cuts], [*cuts, 3200], strict=True):
        if kind is WeightError:
            piece = weight_error(x[a:b], y[a:b])
        elif kind is MomentError:
            piece = moment_error(x[a:b], y[a:b], torch.full((-(-(b - a) // 32),), 2.0))
        else:
            piece = update_error(x[a:b], y[a:b], 1.5)
        total.merge(piece)
    return total


@pytest.mark.parametrize("kind", [WeightError, MomentError, UpdateError])
def test_pieces_add_up_to_the_whole(kind):
    whole = of_pieces(kind, [])
    for cuts in ([32], [3168], [320, 640, 960], list(range(32, 3200, 32))):
        merged = of_pieces(kind, cuts)
        for name, value in figures(whole).items():
            if name.startswith("max_") or name == "count":
                assert getattr(merged, name) == value, name
            else:
                assert getattr(merged, name) == close(value, rel=1e-12), name
        assert whole.disagreement(merged) is None
    assert all(value > 0 for value in figures(whole).values())


@pytest.mark.parametrize("kind", [WeightError, MomentError, UpdateError])
def test_the_order_of_pieces_moves_sums_by_rounding_only(kind):
    pieces = [kind(*(float((7 * k + j) % 11) * 0.1 for j in range(len(dataclasses.fields(kind))))) for k in range(9)]
    forwards, backwards = kind(), kind()
    for piece in pieces:
        forwards.merge(piece)
    for piece in reversed(pieces):
        backwards.merge(piece)
    for field in dataclasses.fields(kind):
        values = [getattr(piece, field.name) for piece in pieces]
        expected = max(values) if field.name.startswith("max_") else math.fsum(values)
        assert getattr(forwards, field.name) == close(expected, rel=1e-14)
        assert getattr(backwards, field.name) == close(expected, rel=1e-14)


def test_merging_nothing_changes_nothing():
    error = WeightError(3, 0.5, 0.7, 9)
    error.merge(WeightError())
    assert error == WeightError(3, 0.5, 0.7, 9)
    empty = WeightError()
    empty.merge(error)
    assert empty == error


def test_nan_survives_merging():
    for first, second in ((NAN, 1.0), (1.0, NAN), (NAN, NAN), (NAN, math.inf), (math.inf, NAN)):
        error = UpdateError(0.0, 0.0, first, 0.0)
        error.merge(UpdateError(0.0, 0.0, second, 1.0))
        assert math.isnan(error.max_error)
        assert error.max_update == 1.0
        assert not error.finite


def test_nan_in_the_data_reaches_the_maxima():
    x = torch.ones(64)
    for position in (0, 31, 63):
        y = x.clone()
        y[position] = NAN
        assert math.isnan(update_error(x, y, 1.0).max_error)
        assert math.isnan(weight_error(x, y).max_relative)
        assert math.isnan(moment_error(x, y, torch.ones(2)).max_scaled)
        assert math.isnan(moment_error(x, x, torch.ones(2), (x, y)).max_scaled)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_finite(bad):
    for kind in (WeightError, MomentError, UpdateError):
        assert kind().finite
        for field in dataclasses.fields(kind):
            error = kind()
            setattr(error, field.name, bad)
            assert not error.finite, field.name


def test_maxima_and_counts_agree_exactly_or_not_at_all():
    mine = WeightError(10, 1e-5, 1e-4, 129)
    assert mine.disagreement(WeightError(10, 1e-5, 1e-4, 129)) is None
    for other in (
        WeightError(11, 1e-5, 1e-4, 129),
        WeightError(10, math.nextafter(1e-5, 1), 1e-4, 129),
        WeightError(10, 1e-5, 1e-4, 128),
        WeightError(10, NAN, 1e-4, 129),
    ):
        assert mine.disagreement(other) is not None
    huge = WeightError(10**12, 0.0, 0.0, 0)
    assert huge.disagreement(WeightError(10**12 + 1, 0.0, 0.0, 0)) is not None


@pytest.mark.parametrize("name", ["sum_square_error", "sum_square"])
def test_sums_agree_to_a_billionth(name):
    mine = MomentError(2.0, 3.0, 0.5)
    value = getattr(mine, name)
    for factor, agrees in ((1 + 5e-10, True), (1 - 5e-10, True), (1 + 2e-9, False), (1 - 2e-9, False), (NAN, False)):
        other = dataclasses.replace(mine, **{name: value * factor})
        assert (mine.disagreement(other) is None) is agrees
        assert (other.disagreement(mine) is None) is agrees
    # Relative, so that no sum is too small to matter.
    assert MomentError(1e-30, 3.0, 0.5).disagreement(MomentError(2e-30, 3.0, 0.5)) is not None
    assert MomentError(0.0, 3.0, 0.5).disagreement(MomentError(1e-300, 3.0, 0.5)) is not None


def test_the_disagreement_names_the_figure_and_both_values():
    text = UpdateError(1.0, 2.0, 0.25, 4.0).disagreement(UpdateError(1.0, 2.0, 0.125, 4.0))
    assert text is not None
    for part in ("max_error", "0.125", "0.25"):
        assert part in text


def test_plain_numbers():
    assert UpdateError(1.0, 2.0, 0.25, 4.0).to_json() == {
        "sum_square_error": 1.0,
        "sum_square": 2.0,
        "max_error": 0.25,
        "max_update": 4.0,
    }
    assert WeightError(**WeightError(3, 0.5, 0.7, 9).to_json()) == WeightError(3, 0.5, 0.7, 9)
    assert all(type(value) in (int, float) for value in weight_error(normal(10), normal(10, seed=1)).to_json().values())


@pytest.mark.slow
def test_roots_are_rounded_correctly():
    bits = torch.randint(0, 0x7F800000, (3000,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    x = torch.cat([bits.view(torch.float32), torch.tensor([0.0, 1.0, 1e-45, 2.0**-126, 3.4e38])])
    for value, found in zip(x.tolist(), root_of_tile(x).tolist(), strict=True):
        near = torch.tensor(found)
        below, above = (float(torch.nextafter(near, torch.tensor(end))) for end in (0.0, math.inf))
        lower, upper = ((Fraction(found) + Fraction(other)) / 2 for other in (below, above))
        assert lower**2 <= Fraction(value) <= upper**2


def test_a_square_has_the_root_that_was_squared():
    """What lets the kernels take a decoded root for the root of the decoded second moment."""
    bits = torch.randint(0x24800000, 0x5F000000, (1 << 20,), generator=torch.Generator().manual_seed(1))
    y = bits.int().view(torch.float32)
    assert torch.equal(root_of_tile(y * y), y)
