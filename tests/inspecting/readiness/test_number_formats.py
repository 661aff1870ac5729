"""Rounding to every number format against a search among all its numbers, and its bounds against random values."""

import math

import pytest
import torch
from readiness_kit import all_finite, numbers, round_one

from ckpt8.inspecting.readiness import CREST, FORMATS, round_to_odd

by_format = pytest.mark.parametrize("number_format", FORMATS, ids=lambda each: each.id)


def check(number_format, x):
    """Whatever is rounded, and what is counted as an overflow, is as the search says."""
    rounded = number_format.round(x)
    overflows = number_format.overflows(x.abs()).tolist()
    assert rounded.dtype is torch.float32
    for value, found, over in zip(x.tolist(), rounded.tolist(), overflows, strict=True):
        wanted, wanted_over, _, _ = round_one(number_format.id, value)
        assert (found, over) == (wanted, wanted_over), value
        assert math.copysign(1, found) == math.copysign(1, wanted), value


@by_format
def test_range_is_that_of_the_numbers(number_format):
    values, beyond, normal = numbers(number_format.id)
    assert (number_format.largest, number_format.smallest_normal) == (values[-1], normal)
    assert number_format.step == values[-1] - values[-2] == beyond - values[-1]


@pytest.mark.by_default(most=4)
@by_format
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number(number_format, dtype):
    check(number_format, all_finite(dtype))


@by_format
def test_ties_and_their_neighbours(number_format):
    values, beyond, _ = numbers(number_format.id)
    line = torch.tensor([*values, beyond], dtype=torch.float64)
    if len(line) > 2048:
        line = line[torch.linspace(0, len(line) - 1, 2048).long()[:-1].unsqueeze(1) + torch.tensor([0, 1])].view(-1)
        ties = (line[::2] + line[1::2]) / 2
    else:
        ties = (line[:-1] + line[1:]) / 2
    ties = torch.cat([ties, -ties])
    near = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (-math.inf, math.inf)]
    for x in (ties, *near):
        check(number_format, x)
    single = ties.float()
    single = single[(single != 0) & single.isfinite()]
    for end in (-math.inf, math.inf):
        near = torch.nextafter(single, torch.full_like(single, end))
        check(number_format, near[near.isfinite()])


@by_format
def test_special_values(number_format):
    largest, step = number_format.largest, number_format.step
    tie = largest + step / 2
    small = [2.0**-149, -(2.0**-149), 2.0**-126]
    values = [0.0, -0.0, largest, -largest, tie, -tie, *small, 3.4e38, -3.4e38, 1e300, 5e-324]
    check(number_format, torch.tensor(values, dtype=torch.float64))
    check(number_format, torch.tensor(values, dtype=torch.float64)[:-2].float())


@by_format
def test_ideal_is_what_a_normal_distribution_gets(number_format):
    x = torch.randn(1 << 20, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    if number_format.mantissa is None:
        x = x.clamp(-CREST, CREST) * (127 / CREST)
    error = number_format.round(x).double() - x
    snr = 10 * math.log10(float(x.square().sum() / error.square().sum()))
    assert abs(snr - number_format.ideal_snr) < 0.1


@pytest.mark.parametrize("number_format", [each for each in FORMATS if each.mantissa is not None], ids=lambda f: f.id)
def test_worst_normal_number_is_at_the_floor(number_format):
    """Half a step above a power of two: no normal number has a larger relative error."""
    bits = number_format.mantissa
    worst = torch.tensor([1 + 2.0 ** -(bits + 1)])
    error = float(number_format.round(worst) - worst)
    snr = 20 * math.log10(float(worst) / abs(error))
    assert math.isclose(snr, 20 * math.log10(2 ** (bits + 1) + 1))
    assert math.isclose(number_format.floor_snr, 20 * math.log10(2 ** (bits + 1)))
    assert number_format.floor_snr < snr < number_format.ideal_snr


def test_round_to_odd_is_never_on_a_tie_unless_it_was():
    values = [464.0, math.nextafter(464.0, 500), math.nextafter(464.0, 0), 1e-60, -1e-60, 1e300, -1e300, 0.1]
    x = torch.tensor(values, dtype=torch.float64)
    odd = round_to_odd(x)
    assert odd[0] == 464
    assert odd[1] > 464 > odd[2]
    assert odd[3] == 2.0**-149 == -odd[4]
    assert odd[5] == torch.finfo(torch.float32).max == -odd[6]
    assert abs(odd[7].double() - x[7]) < 2.0**-27
