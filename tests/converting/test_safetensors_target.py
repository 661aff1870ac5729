"""safetensors files: read back by the library, loaded by transformers, rounded as torch rounds."""

from __future__ import annotations

import json

import pytest
import torch
from converting_kit import Net
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt8
from ckpt8.core.errors import InputError, UsageError


def expected_weights(model, dtype=torch.bfloat16):
    """What transformers would save: no alias, parameters cast, buffers as they are."""
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    parameters = {name for name, _ in model.named_parameters()}
    return {name: tensor.to(dtype) if name in parameters else tensor for name, tensor in weights.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("form", ["zip", "legacy", "directory", "zip flash", "zip lossless", "directory flash"])
def test_weights_are_the_bf16_cast_of_the_original(form, run, forms, tmp_path):
    """Of a compressed run as well, to the bit: what it stores is the bf16 of the weight and what that leaves."""
    target = tmp_path / "model.safetensors"
    report = ckpt8.convert(forms[form], target)
    assert_same(load_file(target), expected_weights(run[0]))
    with safe_open(target, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    assert report.aliases == ([] if form.startswith("directory") else ["lm_head.weight"])
    assert report.casts == {"float32 -> bfloat16": 7}
    assert report.tensors == 10


@pytest.mark.parametrize("preset", ["flash", "compact", "archive"])
def test_the_cast_is_exact_for_all_magnitudes(preset, tmp_path):
    """Ties, values next to ties, subnormals, the largest that bf16 holds, zeros of both signs."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(2**31), 2**31 - 1, (1 << 16,), generator=generator, dtype=torch.int64).to(torch.int32)
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    bits = torch.cat([bits, (bits[: len(low) * 5000].view(-1, len(low)) & ~0xFFFF | low).view(-1)])
    magnitude = (bits & 0x7FFFFFFF).clamp_max(0x7F7F7FFF)
    weight = (magnitude | (bits & -(2**31))).view(torch.float32).view(-1, 2)
    torch.save({"model": {"weight": weight}}, tmp_path / "run.pt")
    manifest = ckpt8.compress(tmp_path / "run.pt", preset=preset)
    assert next(each for each in manifest.storages if each.name == "model.weight").codec["id"] == "split24/1"
    assert not torch.equal(ckpt8.load(tmp_path / "run.ckpt8")["model"]["weight"], weight)
    ckpt8.convert(tmp_path / "run.ckpt8", tmp_path / "x.safetensors")
    assert_same(load_file(tmp_path / "x.safetensors"), {"weight": weight.bfloat16()})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type_to_every_type(source, dtype, tmp_path):
    weights = {"a.weight": torch.randn(70, 50).to(source), "b.inv_freq": torch.randn(4), "c": torch.arange(3)}
    save_file(weights, tmp_path / "in.safetensors")
    ckpt8.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype=dtype)
    expected = {**weights, "a.weight": weights["a.weight"].to(getattr(torch, dtype))}
    assert_same(load_file(tmp_path / "out.safetensors"), expected)


def test_without_a_type_16_bit_weights_stay(tmp_path):
    weights = {
        "a": torch.randn(8).bfloat16(),
        "b": torch.randn(8).half(),
        "c": torch.randn(8),
        "d": torch.randn(8).double(),
    }
    save_file(weights, tmp_path / "in.safetensors")
    ckpt8.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors")
    assert_same(load_file(tmp_path / "out.safetensors"), {**weights, "c": weights["c"].bfloat16()})


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_names_of_wrappers_are_taken_away(prefix, run, tmp_path):
    state = {prefix + name: tensor for name, tensor in run[0].state_dict().items()}
    torch.save({"state_dict": state}, tmp_path / "run.pt")
    report = ckpt8.convert(tmp_path / "run.pt", tmp_path / "x.safetensors")
    assert_same(load_file(tmp_path / "x.safetensors"), expected_weights(run[0]))
    assert any("without wrappers" in note for note in report.notes)


def test_names_stay_where_they_would_collide(tmp_path):
    state = {"a._orig_mod.w": torch.zeros(2), "a.w": torch.ones(2)}
    torch.save({"model": state}, tmp_path / "run.pt")
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "x.safetensors", dtype="float32")
    assert_same(load_file(tmp_path / "x.safetensors"), state)


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["lm_head.weight", "model.embed_tokens.weight"], "model.embed_tokens.weight"),
        (["transformer.wte.weight", "lm_head.weight"], "transformer.wte.weight"),
        (["shared.weight", "encoder.embed_tokens.weight", "lm_head.weight"], "shared.weight"),
        (["a.decoder.weight", "b.head.weight"], "a.decoder.weight"),
    ],
)
def test_which_name_of_a_tied_weight_stays(names, kept, tmp_path):
    weight = torch.randn(6, 5)
    torch.save({"model": dict.fromkeys(names, weight)}, tmp_path / "run.pt")
    report = ckpt8.convert(tmp_path / "run.pt", tmp_path / "x.safetensors")
    assert list(load_file(tmp_path / "x.safetensors")) == [kept]
    assert sorted([*report.aliases, kept]) == sorted(names)


def test_views_of_one_storage_are_no_aliases(tmp_path):
    flat = torch.randn(40)
    state = {
        "a": flat[:20].view(4, 5),
        "b": flat[20:].view(4, 5),
        "c": flat[:20].view(5, 4),
        "d": flat[:20].view(4, 5).t(),
    }
    torch.save({"model": state}, tmp_path / "run.pt")
    ckpt8.convert(tmp_path / "run.pt", tmp_path / "x.safetensors", dtype="float32")
    assert_same(load_file(tmp_path / "x.safetensors"), {name: tensor.contiguous() for name, tensor in state.items()})


def test_what_a_state_dict_holds_beside_tensors(tmp_path):
    torch.save({"model": {"w": torch.ones(3), "_extra_state": {"scale": 1}}}, tmp_path / "run.pt")
    report = ckpt8.convert(tmp_path / "run.pt", tmp_path / "x.safetensors")
    assert report.dropped == ["_extra_state: not a tensor"]


def test_what_cannot_be_held(tmp_path):
    for state in (
        {"w": torch.ones(3, dtype=torch.complex128)},
        {"\ud800": torch.ones(3)},
        {"__metadata__": torch.ones(2)},
    ):
        torch.save({"model": state}, tmp_path / "run.pt")
        with pytest.raises((UsageError, InputError)):
            ckpt8.convert(tmp_path / "run.pt", tmp_path / "x.safetensors")
    torch.save({"optimizer": Net().state_dict(), "step": torch.ones(3)}, tmp_path / "run.pt")
    with pytest.raises(UsageError, match="no state dict of a model"):
        ckpt8.convert(tmp_path / "run.pt", tmp_path / "x.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


def test_shards_become_one_file(run, tmp_path):
    folder = tmp_path / "sharded"
    folder.mkdir()
    weights = expected_weights(run[0], torch.float32)
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, chosen in files.items():
        save_file({name: weights[name] for name in chosen}, folder / file, metadata={"format": "pt"})
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, chosen in files.items() for name in chosen}}))
    ckpt8.compress(folder)
    for source in (folder, tmp_path / "sharded.ckpt8"):
        ckpt8.convert(source, tmp_path / "x.safetensors", force=True)
        assert_same(load_file(tmp_path / "x.safetensors"), expected_weights(run[0]))
    for text in (
        "{",
        '{"weight_map": 3}',
        '{"weight_map": {"a": "../x"}}',
        '{"weight_map": {"a": 1}}',
        "[" * 100000,
        "{}",
    ):
        index.write_text(text)
        with pytest.raises(InputError, match=r"index\.json"):
            ckpt8.convert(folder, tmp_path / "y.safetensors")
