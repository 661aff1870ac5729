"""split32 is exact: every bit pattern that it takes comes back, and its planes are plain integer arithmetic."""

from __future__ import annotations

import random

import pytest
import torch

import ckpt8
from ckpt8.codecs.base import TILE
from ckpt8.codecs.split24 import Split32
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import DType, Role, TensorSpec

SIGN = 0x80000000
FIRST_OVERFLOW = 0x7F7F8000
CODEC = Split32()


def weights(bits: torch.Tensor) -> torch.Tensor:
    """fp32 of bit patterns given as int64 in 0 .. 2^32 - 1."""
    return torch.where(bits >= SIGN, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def spec(numel: int) -> TensorSpec:
    return TensorSpec("w", Role.WEIGHT, DType.FLOAT32, (numel,))


def check(mag: torch.Tensor) -> None:
    """Every magnitude and its negative come back, and only the sign tells their parts apart."""
    parts, mirrored = CODEC.encode(weights(mag)), CODEC.encode(weights(mag | SIGN))
    assert torch.equal(CODEC.decode(parts, spec(len(mag))).view(torch.int32), weights(mag).view(torch.int32))
    assert torch.equal(CODEC.decode(mirrored, spec(len(mag))).view(torch.int32), weights(mag | SIGN).view(torch.int32))
    assert torch.equal(parts["residual"], mirrored["residual"])
    assert torch.equal(parts["mantissa"] | 0x80, mirrored["mantissa"])
    hi = (parts["exponent"].to(torch.int64) << 7) | (parts["mantissa"].to(torch.int64) & 0x7F)
    assert torch.equal((hi << 16) + parts["residual"].to(torch.int64), mag)


def sweep(exponent: int, block: int = 1 << 20) -> None:
    first, last = exponent << 23, min((exponent + 1) << 23, FIRST_OVERFLOW)
    for start in range(first, last, block):
        check(torch.arange(start, min(start + block, last)))


@pytest.mark.slow
@pytest.mark.parametrize("exponent", [0, 1, 2, *range(9, 253, 27), 127, 253, 254])
def test_every_mantissa(exponent):
    sweep(exponent)


def test_bits_equal_the_integer_model():
    rng = random.Random(32)
    patterns = [rng.getrandbits(32) for _ in range(4000)]
    patterns += [(rng.randrange(1, 0x7F7F) << 16) + d for d in (-32769, -32768, -1, 0, 32767, 32768) for _ in range(50)]
    patterns = [bits for bits in patterns if bits & 0x7FFFFFFF < FIRST_OVERFLOW]
    parts = CODEC.encode(weights(torch.tensor(patterns)))
    for bits, exponent, mantissa, residual in zip(patterns, *(parts[n].tolist() for n in parts), strict=True):
        mag = bits & 0x7FFFFFFF
        hi = (mag + 0x8000) // 65536
        assert (exponent, mantissa, residual) == (hi >> 7, (bits >> 31 << 7) | (hi & 0x7F), mag - 65536 * hi)


def test_every_bf16_has_no_remainder():
    hi = torch.cat([torch.arange(0x7F80), torch.arange(0x7F80) | 0x8000])
    parts = CODEC.encode(weights(hi << 16))
    assert not parts["residual"].any()


@pytest.mark.parametrize("position", [0, 31, TILE - 1, TILE, TILE + 44])
@pytest.mark.parametrize("mag", [FIRST_OVERFLOW, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], ids=hex)
def test_refusals(mag, position):
    for sign in (0, SIGN):
        bits = torch.full((TILE + 45,), 0x3F812345)
        bits[position] = mag | sign
        with pytest.raises(RefusedError):
            CODEC.encode(weights(bits))


def test_the_last_value_before_overflow():
    check(torch.tensor([FIRST_OVERFLOW - 1]))


def test_takes_fp32_of_any_role_and_nothing_else():
    for dtype in DType:
        for role in Role:
            assert CODEC.accepts(TensorSpec("w", role, dtype, (64,))) is (dtype is DType.FLOAT32)


@pytest.mark.parametrize("value", [0.25, float("nan")])
def test_by_rule_in_a_file(tmp_path, value):
    """Bit for bit through a container; a tensor that the codec refuses is stored lossless instead."""
    w = torch.randn(70_000, generator=torch.Generator().manual_seed(0))
    w[7] = value
    manifest = ckpt8.save({"model": {"w": w}}, tmp_path / "w.ckpt8", rules=["*=split32"])
    assert manifest.storages[0].codec["id"] == ("split32/1" if value == value else "lossless/1")
    loaded = ckpt8.load(tmp_path / "w.ckpt8")["model"]["w"]
    assert torch.equal(loaded.view(torch.int32), w.view(torch.int32))
