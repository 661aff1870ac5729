"""fp16 copies of fp32 masters: given back bit for bit, whatever the masters are stored as, and small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from reference_kit import LAYOUTS, adamw, masters

import ckpt8
from ckpt8.codecs.base import Run
from ckpt8.codecs.rounded_copy import DELTA, ROUNDED, HalfReference
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import DType, Role, TensorSpec
from ckpt8.inspecting.checkpoint import inspect_checkpoint


def spec(numel):
    return TensorSpec("", Role.WEIGHT, DType.FLOAT16, (numel,))


def bits(x):
    return x.contiguous().view(torch.int16)


def half_of(tree, weights):
    """The copies as a trainer in fp16 rounds them: from the masters, not from bf16."""
    key = "model" if "model" in tree else "module"
    return tree | {key: {name: weights[name].half() for name in tree[key]}}


def codecs_of(path, dtype=DType.FLOAT16):
    with ckpt8.open(path) as file:
        manifest = file.manifest
    narrow = {tensor.storage for tensor in manifest.tensors if tensor.dtype is dtype}
    return {manifest.storages[index].codec["id"] for index in narrow}, manifest


def test_every_bf16_value_rounds_as_numpy_says():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    parts = {ROUNDED: every.view(torch.bfloat16), DELTA: torch.zeros(1 << 16, dtype=torch.int8)}
    found = HalfReference().decode(parts, spec(1 << 16))
    wide = (every.numpy().astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = wide.astype(np.float16).view(np.uint16)
    nan = np.isnan(wide)
    expected[nan] = (wide.view(np.uint32)[nan] >> 16 & 0x8000 | 0x7E00).astype(np.uint16)
    assert np.array_equal(bits(found).numpy().view(np.uint16), expected)
    assert (expected[~nan] & 0x7C00 == 0x7C00).any()
    assert ((expected & 0x7C00 == 0) & (expected & 0x3FF > 0)).any()


@pytest.mark.parametrize("scale", [1e-8, 3e-6, 1e-4, 0.05, 1.0, 3e4])
def test_what_is_encoded_comes_back(scale):
    """Subnormals, overflow, both zeros; rounding to nearest, down, and at random."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40_000, generator=generator) * scale
    x[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    near, down = x.half(), (x * (1 - 2**-12)).half()
    for copy in (near, down, torch.where(torch.rand(len(x), generator=generator) < 0.5, near, down)):
        parts = HalfReference().encode(copy, companions={ROUNDED: x.bfloat16()})
        assert {name: part.dtype for name, part in parts.items()} == {DELTA: torch.int8}
        assert parts[DELTA].abs().max() <= 9
        back = HalfReference().decode({**parts, ROUNDED: x.bfloat16()}, spec(len(x)))
        assert torch.equal(bits(back), bits(copy))
    with pytest.raises(RefusedError, match="fp16"):
        HalfReference().encode(near * 2 + 1, companions={ROUNDED: x.bfloat16()})


@pytest.mark.parametrize("preset", ["flash", "lossless"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_copies_of_every_layout_are_references(layout, preset, tmp_path):
    weights = masters()
    tree = half_of(LAYOUTS[layout](weights), weights)
    torch.save(tree, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt", preset=preset)
    found, manifest = codecs_of(tmp_path / "run.ckpt8")
    assert found == {"reference16/1"}
    assert manifest.version == "1.3"
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures
    key = "model" if "model" in tree else "module"
    restored = torch.load(ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back.pt"), weights_only=True)
    loaded = ckpt8.load(tmp_path / "run.ckpt8")
    for name, expected in tree[key].items():
        assert torch.equal(bits(restored[key][name]), bits(expected))
        assert torch.equal(bits(loaded[key][name]), bits(expected))
    if preset == "lossless":
        assert (tmp_path / "back.pt").read_bytes() == (tmp_path / "run.pt").read_bytes()


def test_a_copy_costs_a_fraction_of_itself(tmp_path):
    weights = {name: torch.randn(shape) * 0.05 for name, shape in {"a": (1000, 1200), "b": (512, 512)}.items()}
    optimizer = adamw(list(weights.values()), master_param=weights.values())
    tree = {"model": {name: w.half() for name, w in weights.items()}, "optimizer": optimizer}
    torch.save(tree, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    numel = sum(w.numel() for w in weights.values())
    _, manifest = codecs_of(tmp_path / "run.ckpt8")
    stored = sum(record.stored_bytes for record in manifest.storages if record.dtype is DType.FLOAT16)
    assert stored < 0.45 * numel
    assert (tmp_path / "run.pt").stat().st_size > 2.7 * (tmp_path / "run.ckpt8").stat().st_size
    predicted = inspect_checkpoint(tmp_path / "run.pt")["predicted"]["flash"]["bytes"]
    assert 0.95 < predicted / (tmp_path / "run.ckpt8").stat().st_size < 1.05


def test_masters_that_a_codec_refuses_do_not_matter(tmp_path):
    """A NaN has the masters stored lossless; the copy is the same, NaN among it."""
    weights = masters()
    weights["embed.weight"][200, 5] = torch.nan
    torch.save(half_of(LAYOUTS["apex"](weights), weights), tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    found, manifest = codecs_of(tmp_path / "run.ckpt8")
    assert "reference16/1" in found
    assert not ckpt8.verify(tmp_path / "run.ckpt8", tmp_path / "run.pt").failures
    masters_of = {record.codec["id"] for record in manifest.storages if record.dtype is DType.FLOAT32}
    assert "lossless/1" in masters_of


def test_what_is_no_copy_is_stored_itself(tmp_path):
    weights = masters()
    tree = half_of(LAYOUTS["apex"](weights), weights)
    changed = tree["model"]["embed.weight"]
    changed.view(-1)[5000] *= 3
    torch.save(tree, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    with ckpt8.open(tmp_path / "run.ckpt8") as file:
        assert file.stats("model.embed.weight")["codec"] == "lossless/1"
        assert "fp16" in file.stats("model.embed.weight")["reason"]
    assert torch.equal(ckpt8.load(tmp_path / "run.ckpt8")["model"]["embed.weight"], changed)


def test_chunks_of_a_long_copy(tmp_path):
    frame = 1 << 20
    weights = {"a": torch.randn(frame + 77), "b": torch.randn(65, 1001), "c": torch.randn(frame // 2 + 5)}
    tree = half_of(LAYOUTS["flat"](weights), weights)
    torch.save(tree, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    assert codecs_of(tmp_path / "run.ckpt8")[0] == {"reference16/1"}
    loaded = ckpt8.load(tmp_path / "run.ckpt8")["module"]
    assert all(torch.equal(bits(loaded[name]), bits(w.half())) for name, w in weights.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["fp32_groups_flat", "main_params", "of_any_name"])
def test_flat_masters_under_any_key(key, dtype, tmp_path):
    weights = masters()
    whole = torch.cat([w.flatten() for w in weights.values()])
    tree = {"model": {name: w.to(dtype) for name, w in weights.items()}, key: [whole], "opt": adamw([whole])}
    torch.save(tree, tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    expected = "reference16/1" if dtype is torch.float16 else "reference/1"
    assert codecs_of(tmp_path / "run.ckpt8", DType.from_label(str(dtype)))[0] == {expected}


def test_other_types_are_not_accepted():
    codec = HalfReference((Run(0, 0, 3),))
    assert codec.accepts(spec(3))
    assert not codec.accepts(TensorSpec("", Role.WEIGHT, DType.BFLOAT16, (3,)))
    assert codec.numel == 3
