"""First moments in steps of the second: the bound on every update, in float64, with the divisor that fp32 gives."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from archive_kit import each_backend, each_dtype, half_units, integers, there_and_back

import ckpt8
from ckpt8.codecs.base import Factors
from ckpt8.codecs.lattice.reference import dither
from ckpt8.codecs.rclog import OCTAVE, RowColumnLog
from ckpt8.codecs.vscaled import VScaled
from ckpt8.codecs.vscaled.statistics import expand
from ckpt8.core.errors import RefusedError

N = 20_000
ADAM = VScaled(second=0, k=2.0**-9, u_max=1.0, bias1=1 - 0.9**7, root_bias2=math.sqrt(1 - 0.99**7), salt=5)
GROUPS = {
    "ordinary": lambda rng: rng.normal(-12, 2, N),
    "subnormal": lambda rng: rng.uniform(-45, -36, N),
    "huge": lambda rng: rng.uniform(20, 38.4, N),
    "mixed": lambda rng: rng.choice([-44.0, -30.0, -8.0, 0.0, 20.0], N) + rng.normal(0, 1, N),
}
each_group = pytest.mark.parametrize("group", GROUPS)


def divisor(codec, v: torch.Tensor) -> np.ndarray:
    """The rule's divisor, rounded to fp32 at every step, in float64."""
    f4 = np.float32
    return ((np.sqrt(v.numpy()) / f4(codec.root_bias2) + f4(codec.eps)) * f4(codec.bias1)).astype(np.float64)


def state(codec, group, dtype=torch.float32, *, seed=0, spread=3.0, step=OCTAVE):
    """First moments, and their second moments as they were and as they come back."""
    rng = np.random.default_rng(seed)
    v = torch.from_numpy(np.minimum(10 ** GROUPS[group](rng), 3.3e38).astype(np.float32))
    v[::40], v[5000:5400] = 0.0, 0.0
    _, second = there_and_back(RowColumnLog(step, 100, columns=True), v, "torch")
    at = divisor(codec, v)
    most = np.where(second > 0, np.float64(codec.k) * second.double().numpy() ** 0.25, np.inf) * 2.0**14
    m = rng.normal(0, 1, N) * np.minimum(spread * codec.u_max * at, most)
    m *= 10.0 ** rng.choice([0, 0, -1, -4, -20], N)
    m = torch.from_numpy(np.clip(m, -3e38, 3e38)).to(dtype)
    m[::13], m[5100:5300] = 0.0, 0.0
    return m, {"second": second, "original_second": v}


def update_errors(codec, m, y, companions):
    """|u' - u| of every element, and half a unit of a bf16 output in the same measure."""
    before, after = divisor(codec, companions["original_second"]), divisor(codec, companions["second"])
    with np.errstate(all="ignore"):
        u, there = (np.where(x == 0, 0, x.double().numpy() / d) for x, d in ((m, before), (y, after)))
        return np.abs(there - u), np.where(after > 0, half_units(m, y) / after, 0)


@each_backend
@each_group
@each_dtype
@pytest.mark.parametrize("u_max", [2.0**-7, 0.125, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("k", [2.0**-14, 2.0**-7, 2.0**100])
def test_no_update_errs_by_more_than_half_of_u_max(k, u_max, dtype, group, backend):
    for eps in (1e-8, 1e-30, 0.0):
        codec = dataclasses.replace(ADAM, k=k, u_max=u_max, eps=eps)
        m, companions = state(codec, group, dtype)
        if not eps:
            m[companions["second"] == 0] = 0.0
        _, y = there_and_back(codec, m, backend, 3, companions)
        error, rounding = update_errors(codec, m, y, companions)
        assert (error <= codec.u_max / 2 + (rounding if dtype is torch.bfloat16 else 0)).all()
        assert np.isfinite(error).all()


@each_backend
def test_the_bound_holds_for_the_largest_updates_that_are_taken(backend):
    codec = dataclasses.replace(ADAM, k=2.0**100, u_max=0.125)
    m, companions = state(codec, "ordinary", seed=1)
    size = np.random.default_rng(2).uniform(3500, 4095, N) * codec.u_max * divisor(codec, companions["original_second"])
    m = torch.from_numpy(size).float() * m.sign()
    _, y = there_and_back(codec, m, backend, 3, companions)
    error, _ = update_errors(codec, m, y, companions)
    assert (error <= codec.u_max / 2).all()
    assert error.max() > 0.49 * codec.u_max


@each_group
def test_the_code_is_the_nearest_within_the_bound(group):
    """In float64, over the three lattice points on both sides; which of two that lie as near is not determined."""
    codec = dataclasses.replace(ADAM, k=2.0**-5, u_max=0.5, eps=1e-12)
    m, companions = state(codec, group, spread=10)
    parts, y = there_and_back(codec, m, "torch", 0, companions)
    second = companions["second"].double().numpy()
    at = divisor(codec, companions["second"])
    step = np.where(
        second > 0, np.minimum(codec.k * second**0.25, 127 / 128 * codec.u_max * at), 127 / 128 * codec.u_max * at
    )
    offset = np.where(second > 0, 0.5 - dither(0, N, codec.salt, torch.device("cpu")).double().numpy(), 0.0)
    q = integers(parts["codes"])
    x, u = m.double().numpy(), m.double().numpy() / divisor(codec, companions["original_second"])
    reach = (0.5 - 2.0**-9) * codec.u_max
    chosen = np.abs((q + offset) * step - x)
    assert np.allclose((q + offset) * step, y.double().numpy(), rtol=1e-6, atol=0)
    moved, fp32 = 0, 2.0**-21
    for shift in (-3, -2, -1, 1, 2, 3):
        point = (q + shift + offset) * step
        within = np.abs(point / at - u) <= reach - (np.abs(u) + reach) * fp32
        assert (chosen <= np.abs(point - x) + (np.abs(q) + 4) * step * fp32)[within].all()
        moved += int((np.abs(point - x) < chosen - 1e-3 * step).sum())
    assert moved > 0 or group == "subnormal"  # a nearer point lies beyond the bound


@each_backend
def test_the_same_configuration_gives_the_same_codes_and_another_salt_others(backend):
    m, companions = state(ADAM, "ordinary")
    one, again, other = (
        there_and_back(codec, m, backend, 7, companions)[0]["codes"]
        for codec in (ADAM, dataclasses.replace(ADAM), dataclasses.replace(ADAM, salt=6))
    )
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_steps_follow_the_fourth_root_of_the_second_moment():
    codec = dataclasses.replace(ADAM, k=2.0**-9, u_max=4.0, eps=1e-12)
    m, companions = state(codec, "ordinary", spread=0.5)
    _, y = there_and_back(codec, m, "torch", 0, companions)
    some = companions["second"] > 1e-20
    step = codec.k * companions["second"].double() ** 0.25
    error = ((y.double() - m.double()) / step)[
        some & (step < codec.u_max * torch.from_numpy(divisor(codec, companions["second"])) / 9)
    ]
    assert abs(float(error.mean())) < 0.02
    assert abs(float(error.square().mean()) * 12 - 1) < 0.05
    assert float(error.abs().max()) < 0.5001


@each_backend
@each_dtype
def test_moments_without_a_second_moment(dtype, backend):
    """They lie on steps of the divisor of zero, without dither: what never got a gradient stays zero."""
    zeros = {name: torch.zeros(1000) for name in ("second", "original_second")}
    m = torch.zeros(1000, dtype=dtype)
    for eps in (1e-8, 0.0):
        parts, y = there_and_back(dataclasses.replace(ADAM, eps=eps), m, backend, 0, zeros)
        assert parts["codes"].count_nonzero() == y.count_nonzero() == 0
    m[::2] = torch.linspace(-1e-7, 1e-7, 500).to(dtype)
    _, y = there_and_back(ADAM, m, backend, 0, zeros)
    error, rounding = update_errors(ADAM, m, y, zeros)
    assert (error <= ADAM.u_max / 2 + rounding * (dtype is torch.bfloat16)).all()
    assert y[1::2].count_nonzero() == 0


@each_backend
def test_what_is_refused(backend):
    codec = dataclasses.replace(ADAM, bias1=1.0, root_bias2=1.0, eps=0.0)
    ones = {"second": torch.ones(100), "original_second": torch.ones(100)}

    def refuses(m, codec=codec, **companions):
        x = torch.zeros(100)
        x[99] = m
        with pytest.raises(RefusedError, match="update"):
            codec.encode(x, backend=backend, companions=ones | companions)

    for value in (math.nan, math.inf, -math.inf, 3e38, 4096.0, -4096.0, 512.0):
        refuses(value)
    codec.encode(torch.full((100,), 511.0), backend=backend, companions=ones)
    larger = dataclasses.replace(codec, k=1.0)
    larger.encode(torch.full((100,), 4095.0), backend=backend, companions=ones)
    zeros = torch.zeros(100)
    refuses(1.0, second=zeros)
    refuses(1e-45, original_second=zeros)
    for wrong in (math.nan, math.inf, -1.0):
        refuses(1.0, second=torch.full((100,), wrong))
    refuses(0.0, second=torch.full((100,), math.nan))
    refuses(1.0, original_second=torch.full((100,), math.nan))
    # Steps that are subnormal or infinite.
    refuses(0.0, dataclasses.replace(codec, k=2.0**-100, root_bias2=2.0**100), second=torch.full((100,), 1e-40))
    refuses(0.0, dataclasses.replace(codec, eps=2.0**100, bias1=2.0**100), second=zeros)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_second_moments_of_every_type_that_is_stored_exactly_give_the_first_ones(dtype, tmp_path):
    """The reader takes them in fp32, as the codec did: other ones would give moments that have nothing in common."""
    weight = torch.randn(100, 110, generator=torch.Generator().manual_seed(0)).requires_grad_()
    optimizer = torch.optim.AdamW([weight])
    for _ in range(3):
        weight.grad = weight.detach().sin() * 100
        optimizer.step()
    tree = {"model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}
    moments = tree["optimizer"]["state"][0]
    moments["exp_avg_sq"] = moments["exp_avg_sq"].to(dtype)
    manifest = ckpt8.save(tree, tmp_path / "run.ckpt8", preset="archive", rules=["*.exp_avg_sq=lossless"])
    assert {storage.codec["id"] for storage in manifest.storages} >= {"vscaled/1", "lossless/1"}
    back = ckpt8.load(tmp_path / "run.ckpt8")["optimizer"]["state"][0]["exp_avg"]
    assert (back - moments["exp_avg"]).norm() < 0.2 * moments["exp_avg"].norm()


def test_statistics_that_signal_expand_without_a_warning():
    rows, columns = (np.array(bits, np.uint32).view(np.float32) for bits in ([0x7F80A000, 0x3F800000], [0x40000000]))
    assert np.isnan(expand(Factors(0, 1, 2, 1), rows, columns, 0, 2)).all()
