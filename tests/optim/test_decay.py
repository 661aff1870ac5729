"""Second moments follow beta2 in the long run: with zero gradients they decay, and they never vanish or explode."""

from __future__ import annotations

import pytest
import torch

import ckpt8.optim
from ckpt8.codecs.companded8 import Companded8
from ckpt8.codecs.companded8.reference import square_root
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType, Role, TensorSpec
from ckpt8.optim.packed import MOMENT2, PackedOptimizer
from ckpt8.optim.packed_tensor import encode_second_moment, random_bits, stream_key, weight_noise
from ckpt8.optim.state_conversion import moments_of

LINEAR = "companded8(signed=False, Q=255)"
CPU = torch.device("cpu")


def codec_of(fourth_root):
    return Companded8(signed=False, Q=255, p=0.5 if fourth_root else 1)


def decode(codec, parts, numel):
    return codec.decode(parts, TensorSpec("v", Role.MOMENT2, DType.FLOAT32, (numel,)))


def start(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(2, 16384, generator=generator)
    x = {"normal": x[0], "spread": x[0] * torch.exp(x[1])}[kind]
    return (x * 1e-4).square()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "spread"])
@pytest.mark.parametrize("fourth_root", [True, False])
@pytest.mark.parametrize("beta2", [0.99, 0.95, 0.999, 0.9999])
def test_v_decays_as_beta2_says(beta2, fourth_root, kind):
    codec, v = codec_of(fourth_root), start(kind)
    parts = codec.encode(v)
    first = float(v.double().mean())
    wait = round(1 / (1 - beta2))
    for step in range(1, 3 * wait + 1):
        bits = random_bits(stream_key(step), 0, len(v), CPU)
        encode_second_moment(decode(codec, parts, len(v)) * beta2, parts, 255, fourth_root, bits)
        if step in (wait, 3 * wait):
            mean = float(decode(codec, parts, len(v)).double().mean()) / first
            assert abs(mean / beta2**step - 1) < 0.1, step
    assert bool((parts["codes"] > 0).all())


@pytest.mark.slow
@pytest.mark.parametrize("which", ["AdamW", "Adam", "StableAdamW"])
@pytest.mark.parametrize("moment2", [MOMENT2, LINEAR])
def test_zero_gradients_after_training(which, moment2):
    """The whole optimizer: v decays, no step is larger than the ones with gradients."""
    params, beta2 = [torch.nn.Parameter(torch.zeros(64, 128))], 0.99
    optimizer = getattr(ckpt8.optim, which)(params, lr=1.0, betas=(0.9, beta2), weight_decay=0.0, moment2=moment2)

    def second() -> float:
        v = moments_of(optimizer.state[params[0]], optimizer.param_groups[0])["exp_avg_sq"]
        return float(v.double().mean())

    generator = torch.Generator().manual_seed(0)
    largest = 0.0
    for step in range(100 + 300):
        params[0].grad = torch.randn(64, 128, generator=generator) * 1e-3 if step < 100 else torch.zeros(64, 128)
        before = params[0].detach().clone()
        optimizer.step()
        moved = float((params[0].detach() - before).abs().max())
        if step < 100:
            largest, v = max(largest, moved), second()
        assert moved <= 1.5 * largest
    # StableAdamW's beta2 is debiased: what decays as beta2 says is u (1 - beta2^t).
    factor = (1 - beta2**400) / (1 - beta2**100) if which == "StableAdamW" else 1.0
    assert abs(second() * factor / (v * beta2**300) - 1) < 0.1


@pytest.mark.parametrize("fourth_root", [True, False])
def test_a_second_moment_never_vanishes(fourth_root):
    generator = torch.Generator().manual_seed(1)
    v = torch.exp(torch.randn(4096, generator=generator) * 30).clamp(1e-44, 1e37)
    v[::7] = 0.0
    v[64:96] = 0.0
    codec = codec_of(fourth_root)
    parts = codec.encode(torch.ones(4096))
    encode_second_moment(v, parts, 255, fourth_root, random_bits(5, 0, 4096, CPU))
    decoded = decode(codec, parts, 4096)
    assert torch.equal(decoded > 0, v > 0)
    assert bool(decoded.isfinite().all())


@pytest.mark.parametrize("fourth_root", [True, False])
def test_codes_are_neighbours_and_right_on_average(fourth_root):
    """Over many draws, the mean of v is kept above 1/16 of the scale, and that of 1/sqrt(v) below."""
    x = torch.linspace(0.02, 1.0, 32)
    x[-1] = 1.0
    codec, draws = codec_of(fourth_root), 4000
    v = x.square().repeat(draws)
    parts = codec.encode(v)
    encode_second_moment(v, parts, 255, fourth_root, random_bits(9, 0, len(v), CPU))
    t = (square_root(x) if fourth_root else x) * 255
    codes = parts["codes"].view(draws, 32).to(torch.int32)
    assert bool((codes >= t.floor() - 1e-3).all() and (codes <= t.floor() + 1).all())
    decoded = decode(codec, parts, len(v)).double().view(draws, 32)
    high = x >= 0.08
    torch.testing.assert_close(decoded.mean(0)[high], x.double().square()[high], rtol=2e-3, atol=0)
    torch.testing.assert_close(decoded.rsqrt().mean(0)[x < 0.06], 1 / x.double()[x < 0.06], rtol=5e-3, atol=0)


def test_random_bits_are_those_of_the_model():
    """In Python integers, and the same wherever a tensor is cut."""

    def mix(x: int) -> int:
        x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
        x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
        return x ^ (x >> 16)

    key = stream_key(7, 3, 12345)
    assert 0 <= key < 1 << 64
    first = (1 << 32) - 5
    got = random_bits(key, first, 10, CPU).to(torch.int64) & 0xFFFFFFFF
    low, high = key & 0xFFFFFFFF, (key >> 32) ^ (first >> 32)
    assert got.tolist() == [mix(mix((first + i) & 0xFFFFFFFF ^ low) ^ high) for i in range(10)]
    whole = random_bits(key, 0, 1000, CPU)
    assert torch.equal(torch.cat([random_bits(key, 0, 320, CPU), random_bits(key, 320, 680, CPU)]), whole)


def test_random_bits_are_uniform_and_depend_on_every_counter():
    bits = random_bits(stream_key(0, 0, 1), 0, 1 << 18, CPU)
    chance = ((bits >> 8) & 0xFFFFFF).double() / 2**24
    assert abs(float(chance.mean()) - 0.5) < 3e-3
    assert abs(float(chance.var()) - 1 / 12) < 1e-3
    noise = weight_noise(bits)
    assert (int(noise.min()), int(noise.max())) == (127, 32640)
    assert abs(float(noise.double().mean()) - 16383.5) < 100
    for other in ((1, 0, 1), (0, 1, 1), (0, 0, 2)):
        assert abs(float((random_bits(stream_key(*other), 0, 1 << 18, CPU) == bits).double().mean())) < 1e-3


def test_an_optimizer_without_a_card_cannot_be_made():
    unknown = type("Unknown", (PackedOptimizer,), {"rule_id": "unknown"})
    with pytest.raises(UsageError, match="no optimizer has the rule 'unknown'"):
        unknown([torch.nn.Parameter(torch.zeros(3))], {"lr": 0.1})
