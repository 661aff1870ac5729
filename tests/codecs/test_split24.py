"""split24 and split32 against exact integers: the layouts are integer arithmetic, so the models here are too."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch

import ckpt8
from ckpt8.codecs.base import TILE
from ckpt8.codecs.split24 import Split24, Split32
from ckpt8.core.errors import RefusedError, UsageError
from ckpt8.core.tensors import DType, Role, TensorSpec

SIGN = 0x80000000
FIRST_OVERFLOW = 0x7F7F8000
"""Halfway between the largest finite bf16 (0x7f7f) and infinity; the tie goes to even, which is infinity."""
LARGEST_HI = 0x7F7F
LEVELS = (127, 7)
ALL_LEVELS = range(1, 128, 2)


def bound(levels: int) -> int:
    """The largest error in fp32 steps.

    rho is the nearest of the fractions 32768*rho/R to |d|, so at most 16384/R away; the decoder moves that fraction
    to an integer, by less than 1/2 since R is odd. Both ends are integers: floor(16384/R + 1/2).
    """
    return math.floor(Fraction(16384, levels) + Fraction(1, 2))


def model_encode(bits: int, levels: int) -> tuple[int, int, int]:
    """(exponent, mantissa, rho) of one weight."""
    sign, mag = bits >> 31, bits & 0x7FFFFFFF
    hi, rest = mag >> 16, mag & 0xFFFF
    if rest > 0x8000 or (rest == 0x8000 and hi % 2):
        hi += 1
    d = mag - hi * 65536
    rho = math.floor(Fraction(levels * abs(d), 32768) + Fraction(1, 2))
    return hi >> 7, (sign << 7) | (hi & 0x7F), rho if d >= 0 else -rho


def model_decode(exponent: int, mantissa: int, rho: int, levels: int) -> int:
    distance = Fraction(32768 * abs(rho), levels)
    step = min(math.floor(distance + Fraction(1, 2)), 32767)
    hi = (exponent << 7) | (mantissa & 0x7F)
    return ((mantissa >> 7) << 31) | ((hi << 16) + (step if rho >= 0 else -step))


def weights(bits: torch.Tensor) -> torch.Tensor:
    """fp32 of bit patterns given as int64 in 0 .. 2^32 - 1."""
    return torch.where(bits >= SIGN, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def bits_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32).to(torch.int64) & 0xFFFFFFFF


def spec(numel: int) -> TensorSpec:
    return TensorSpec("w", Role.WEIGHT, DType.FLOAT32, (numel,))


def hi_of(parts) -> torch.Tensor:
    """The bf16 bit pattern that the two first planes hold."""
    mantissa = parts["mantissa"].to(torch.int64)
    return ((mantissa >> 7) << 15) | (parts["exponent"].to(torch.int64) << 7) | (mantissa & 0x7F)


def check(mag: torch.Tensor, levels: int) -> torch.Tensor:
    """Everything that holds for increasing finite magnitudes (int64); gives the decoded magnitudes."""
    codec = Split24(R=levels)
    parts, mirrored = codec.encode(weights(mag)), codec.encode(weights(mag | SIGN))
    # hi is torch's own cast, and a sign changes nothing but the sign.
    cast = weights(mag).bfloat16().view(torch.int16).to(torch.int64)
    assert torch.equal(hi_of(parts), cast)
    assert torch.equal(hi_of(mirrored), cast | 0x8000)
    assert torch.equal(parts["rho"], mirrored["rho"])
    assert int(parts["rho"].abs().max()) <= levels
    decoded = bits_of(codec.decode(parts, spec(len(mag))))
    assert torch.equal(bits_of(codec.decode(mirrored, spec(len(mag)))), decoded | SIGN)
    assert int((decoded - mag).abs().max()) <= bound(levels)
    assert bool((decoded[1:] >= decoded[:-1]).all())
    return decoded


def sweep(exponent: int, levels: int, block: int = 1 << 20) -> None:
    """Every mantissa of one exponent, blocks overlapping so that order is checked across them."""
    first, last = exponent << 23, min((exponent + 1) << 23, FIRST_OVERFLOW - 1)
    worst = 0.0
    for start in range(first, last, block):
        mag = torch.arange(max(start - 1, 0), min(start + block, last + 1))
        decoded = check(mag, levels)
        if exponent:
            x, y = weights(mag).double(), weights(decoded).double()
            worst = max(worst, float(((y - x) / x).abs().max()))
    # An fp32 step is at most 2^-23 of a normal number.
    assert worst <= bound(levels) * 2.0**-23
    if levels == 127:
        assert worst <= 1.54e-5


@pytest.mark.slow
def test_the_bound_is_what_the_format_promises():
    assert bound(127) == 129
    assert bound(7) == 2341
    for levels in (127, 7, 1):
        worst = 0
        for d in range(32769):
            rho = math.floor(Fraction(levels * d, 32768) + Fraction(1, 2))
            worst = max(worst, abs(d - min(round(Fraction(32768 * rho, levels)), 32767)))
        assert worst <= bound(levels)
        assert worst >= bound(levels) - 1


@pytest.mark.slow
@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize("exponent", [0, 1, 127, 254])
def test_every_mantissa(exponent, levels):
    sweep(exponent, levels)


@pytest.mark.parametrize("levels", [127, 63, 7, 3, 1])
def test_powers_of_two_and_their_neighbours(levels):
    near = torch.tensor([j + k for j in (-65536, -32768, -16384, 0, 16384, 32768, 65536) for k in range(-3, 4)])
    mag = ((torch.arange(1, 255) << 23).unsqueeze(1) + near).flatten()
    decoded = check(mag[mag < FIRST_OVERFLOW], levels)
    powers = torch.arange(1, 255) << 23
    assert bool(torch.isin(powers, decoded).all())


@pytest.mark.parametrize("levels", LEVELS)
def test_smallest_magnitudes(levels):
    decoded = check(torch.arange(0, 1 << 18), levels)
    assert int(decoded[0]) == 0
    # Below 2^-126 the bound is absolute, in units of 2^-149.
    x, y = weights(torch.arange(0, 1 << 18)).double(), weights(decoded).double()
    assert float((y - x).abs().max()) <= bound(levels) * 2.0**-149


def test_signed_zeros():
    x = torch.tensor([0.0, -0.0])
    for levels in ALL_LEVELS:
        codec = Split24(R=levels)
        assert bits_of(codec.decode(codec.encode(x), spec(2))).tolist() == [0, SIGN]


@pytest.mark.parametrize("levels", [127, 63, 7, 1])
def test_every_bf16_is_exact(levels):
    hi = torch.cat([torch.arange(LARGEST_HI + 1), torch.arange(LARGEST_HI + 1) | 0x8000])
    assert len(hi) == 65280
    codec = Split24(R=levels)
    parts = codec.encode(weights(hi << 16))
    assert torch.equal(hi_of(parts), hi)
    assert int(parts["rho"].abs().max()) == 0
    assert torch.equal(bits_of(codec.decode(parts, spec(len(hi)))), hi << 16)


def _patterns(count: int) -> list[int]:
    """Random finite patterns, and those at ties: of hi (d = +-32768) and of rho (d = +-16384)."""
    rng = random.Random(24)
    found = [rng.getrandbits(32) for _ in range(count)]
    for d in (-32768, -32767, -16385, -16384, -16383, -1, 0, 1, 16383, 16384, 16385, 32767, 32768):
        found += [(rng.randrange(1, LARGEST_HI) << 16) + d | (rng.getrandbits(1) << 31) for _ in range(40)]
    return [bits for bits in found if bits & 0x7FFFFFFF < FIRST_OVERFLOW]


@pytest.mark.parametrize("levels", [127, 125, 63, 31, 7, 3, 1])
def test_bits_equal_the_integer_model(levels):
    patterns = _patterns(2000)
    codec = Split24(R=levels)
    parts = codec.encode(weights(torch.tensor(patterns)))
    expected = [model_encode(bits, levels) for bits in patterns]
    columns = zip(parts["exponent"].tolist(), parts["mantissa"].tolist(), parts["rho"].tolist(), strict=True)
    assert list(columns) == expected
    decoded = bits_of(codec.decode(parts, spec(len(patterns)))).tolist()
    assert decoded == [model_decode(*planes, levels) for planes in expected]


def test_every_residual_of_every_level_count_decodes_to_the_nearest_step():
    for levels in ALL_LEVELS:
        rho = torch.arange(-levels, levels + 1)
        n = len(rho)
        parts = {
            "exponent": torch.full((n,), 0x7F, dtype=torch.uint8),
            "mantissa": torch.full((n,), 0x80 | 0x35, dtype=torch.uint8),
            "rho": rho.to(torch.int8),
        }
        decoded = bits_of(Split24(R=levels).decode(parts, spec(n))).tolist()
        assert decoded == [model_decode(0x7F, 0x80 | 0x35, int(r), levels) for r in rho]


def test_every_offset_takes_the_nearest_level():
    """All 65,537 distances from an even bf16, where both ties belong to it."""
    d = torch.arange(-32768, 32769)
    bits = (0x3F80 << 16) + d
    for levels in ALL_LEVELS:
        rho = Split24(R=levels).encode(weights(bits))["rho"].to(torch.int64)
        expected = d.sign() * torch.div(2 * levels * d.abs() + 32768, 65536, rounding_mode="floor")
        assert torch.equal(rho, expected)


def _reencode(hi: torch.Tensor, levels: int) -> None:
    """Every residual over each hi, both signs. A residual below hi = 0 would be below zero, and is never written."""
    rho = torch.arange(-levels, levels + 1).repeat(len(hi))
    hi = hi.repeat_interleave(2 * levels + 1)
    keep = (hi & 0x7FFF > 0) | (rho >= 0)
    hi, rho = hi[keep], rho[keep].to(torch.int8)
    mantissa = ((hi >> 15) << 7) | (hi & 0x7F)
    parts = {"exponent": (hi >> 7 & 0xFF).to(torch.uint8), "mantissa": mantissa.to(torch.uint8), "rho": rho}
    codec = Split24(R=levels)
    again = codec.encode(codec.decode(parts, spec(len(hi))))
    for name, part in parts.items():
        assert torch.equal(again[name], part), name


@pytest.mark.parametrize("levels", LEVELS)
def test_pairs_encode_to_themselves(levels):
    edges = torch.cat([torch.arange(300), torch.arange(LARGEST_HI - 300, LARGEST_HI + 1)])
    powers = (torch.arange(1, 255) << 7).unsqueeze(1) + torch.tensor([-1, 0, 1])
    hi = torch.cat([edges, powers.flatten(), torch.arange(0, LARGEST_HI, 37)])
    _reencode(torch.cat([hi, hi | 0x8000]), levels)


@pytest.mark.slow
@pytest.mark.parametrize("levels", ALL_LEVELS)
def test_every_pair_encodes_to_itself(levels):
    for first in range(0, LARGEST_HI + 1, 4096):
        hi = torch.arange(first, min(first + 4096, LARGEST_HI + 1))
        _reencode(hi, levels)
        _reencode(hi | 0x8000, levels)


@pytest.mark.parametrize("sign", [0, SIGN])
@pytest.mark.parametrize("levels", LEVELS)
def test_the_last_value_before_overflow(levels, sign):
    codec = Split24(R=levels)
    largest = FIRST_OVERFLOW - 1
    x = weights(torch.tensor([largest | sign]))
    assert x.bfloat16().isfinite().all()
    parts = codec.encode(x)
    assert int(parts["rho"][0]) == levels
    decoded = bits_of(codec.decode(parts, spec(1)))
    assert int(decoded[0]) & SIGN == sign
    assert abs((int(decoded[0]) & ~SIGN) - largest) <= bound(levels)


@pytest.mark.parametrize("position", [0, 31, TILE - 1, TILE, TILE + 44])
@pytest.mark.parametrize(
    "mag", [FIRST_OVERFLOW, FIRST_OVERFLOW + 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], ids=hex
)
def test_refusals(mag, position):
    for sign in (0, SIGN):
        bits = torch.full((TILE + 45,), 0x3F812345)
        bits[position] = mag | sign
        for codec in (Split24(), Split24(R=7), Split32()):
            with pytest.raises(RefusedError):
                codec.encode(weights(bits))


def test_takes_fp32_of_any_role_and_nothing_else():
    for dtype in DType:
        for role in Role:
            place = TensorSpec("w", role, dtype, (64,))
            assert Split24().accepts(place) is Split32().accepts(place) is (dtype is DType.FLOAT32)


@pytest.mark.parametrize("levels", [0, -1, 2, 126, 128, 129, 255, 7.0, "7", None])
def test_levels_that_do_not_exist(levels):
    with pytest.raises(UsageError):
        Split24(R=levels)


# --- split32 ---------------------------------------------------------------------------------------------------


def check_exact(mag: torch.Tensor) -> None:
    """Every magnitude and its negative come back, and only the sign tells their parts apart."""
    parts, mirrored = Split32().encode(weights(mag)), Split32().encode(weights(mag | SIGN))
    assert torch.equal(Split32().decode(parts, spec(len(mag))).view(torch.int32), weights(mag).view(torch.int32))
    assert torch.equal(
        Split32().decode(mirrored, spec(len(mag))).view(torch.int32), weights(mag | SIGN).view(torch.int32)
    )
    assert torch.equal(parts["residual"], mirrored["residual"])
    assert torch.equal(parts["mantissa"] | 0x80, mirrored["mantissa"])
    hi = (parts["exponent"].to(torch.int64) << 7) | (parts["mantissa"].to(torch.int64) & 0x7F)
    assert torch.equal((hi << 16) + parts["residual"].to(torch.int64), mag)


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0, 1, 2, *range(9, 253, 27), 127, 253, 254])
def test_every_mantissa_of_split32(exponent):
    first, last = exponent << 23, min((exponent + 1) << 23, FIRST_OVERFLOW)
    for start in range(first, last, 1 << 20):
        check_exact(torch.arange(start, min(start + (1 << 20), last)))


def test_bits_of_split32_equal_the_integer_model():
    rng = random.Random(32)
    patterns = [rng.getrandbits(32) for _ in range(4000)]
    patterns += [(rng.randrange(1, 0x7F7F) << 16) + d for d in (-32769, -32768, -1, 0, 32767, 32768) for _ in range(50)]
    patterns = [bits for bits in patterns if bits & 0x7FFFFFFF < FIRST_OVERFLOW]
    parts = Split32().encode(weights(torch.tensor(patterns)))
    for bits, exponent, mantissa, residual in zip(patterns, *(parts[n].tolist() for n in parts), strict=True):
        mag = bits & 0x7FFFFFFF
        hi = (mag + 0x8000) // 65536
        assert (exponent, mantissa, residual) == (hi >> 7, (bits >> 31 << 7) | (hi & 0x7F), mag - 65536 * hi)


def test_split32_of_every_bf16_has_no_remainder_and_the_last_value_before_overflow_comes_back():
    hi = torch.cat([torch.arange(0x7F80), torch.arange(0x7F80) | 0x8000])
    assert not Split32().encode(weights(hi << 16))["residual"].any()
    check_exact(torch.tensor([FIRST_OVERFLOW - 1]))


@pytest.mark.parametrize("value", [0.25, float("nan")])
def test_split32_by_rule_in_a_file(tmp_path, value):
    """Bit for bit through a container; a tensor that the codec refuses is stored lossless instead."""
    w = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    w[7] = value
    manifest = ckpt8.save({"model": {"w": w}}, tmp_path / "w.ckpt8", rules=["*=split32"])
    assert manifest.storages[0].codec["id"] == ("split32/1" if value == value else "lossless/1")
    loaded = ckpt8.load(tmp_path / "w.ckpt8")["model"]["w"]
    assert torch.equal(loaded.view(torch.int32), w.view(torch.int32))
