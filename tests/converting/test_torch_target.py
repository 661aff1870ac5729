"""Files of torch and safetensors: structure, values, sharing, rounding, and what cannot be there."""

import argparse
import json
import struct
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from converting_kit import Net, assert_trees_equal, checkpoint, trained, trainer_directory, two_layers, weights_of
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt8
from ckpt8.core.errors import InputError, UsageError


def converted(source, tmp_path, **options):
    target = tmp_path / "converted.pt"
    report = ckpt8.convert(source, target, **options)
    with zipfile.ZipFile(target) as archive:
        assert archive.testzip() is None
        assert all(name.startswith("converted/") for name in archive.namelist())
    return torch.load(target, weights_only=True), report


@pytest.mark.parametrize("form", ["zip", "legacy", "zip lossless"])
def test_the_tree_is_the_same(form, run, forms, tmp_path):
    found, report = converted(forms[form], tmp_path)
    assert_trees_equal(found, checkpoint(*run))
    assert found["model"]["lm_head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    assert found["model"]._metadata == run[0].state_dict()._metadata
    assert not report.dropped
    assert not report.casts
    # What our own reader, strict about every byte outside the storages, and torch make of it.
    ckpt8.compress(tmp_path / "converted.pt", preset="lossless")
    again = ckpt8.restore(tmp_path / "converted.ckpt8", tmp_path / "again.pt")
    assert again.read_bytes() == (tmp_path / "converted.pt").read_bytes()


def test_an_optimizer_of_torch_goes_on(run, forms, tmp_path):
    found, _ = converted(forms["zip"], tmp_path)
    runs = []
    for tree in (found, checkpoint(*run)):
        model = Net()
        model.load_state_dict(tree["model"])
        optimizer = torch.optim.AdamW(model.parameters())
        optimizer.load_state_dict(tree["optimizer"])
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(32)).square().mean().backward()
            optimizer.step()
        runs.append(model.state_dict())
    assert_trees_equal(*runs)


def test_names_of_a_directory(tmp_path):
    """Every parameter has a shape of its own: the order of the file does not matter."""
    model, optimizer = two_layers()
    folder = trainer_directory(tmp_path / "checkpoint-1", model, optimizer)
    found, _ = converted(folder, tmp_path)
    group = found["optimizer"]["param_groups"][0]
    assert group["param_names"] == [name for name, _ in model.named_parameters()]
    assert_trees_equal(found["model"], {name: model.state_dict()[name] for name in sorted(model.state_dict())})
    # And torch takes it.
    torch.optim.AdamW(list(model.named_parameters())).load_state_dict(found["optimizer"])


class Custom:
    def __init__(self):
        self.weights = torch.ones(3)


def test_objects_that_weights_only_refuses_are_left_out_and_named(tmp_path):
    tree = {
        "model": {"w": torch.ones(2, 2)},
        "args": argparse.Namespace(lr=1e-3),
        "best": np.float64(1.5),
        "count": np.int64(7),
        "rng": {"numpy": np.arange(3), "torch": torch.get_rng_state(), "sets": {1, 2}},
        "list": [1, frozenset({1}), Custom(), "x"],
        "shape": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "many": OrderedDict(a=1),
        "text": b"bytes",
        "complex": 1j,
        "kind": argparse.Namespace,
    }
    torch.save(tree, tmp_path / "source.pt")
    found, report = converted(tmp_path / "source.pt", tmp_path)
    kept = {key: tree[key] for key in ("dtype", "many", "text")}
    for key, value in (kept | {"best": 1.5, "count": 7, "shape": (2, 3)}).items():
        assert type(found[key]) is type(value)
        assert found[key] == value
    assert found["list"] == [1, None, None, "x"]
    assert found["rng"]["sets"] == {1, 2}
    assert torch.equal(found["rng"]["torch"], tree["rng"]["torch"])
    assert {"args", "complex", "kind"}.isdisjoint(found)
    lines = dict(line.split(": ", 1) for line in report.dropped)
    assert lines.pop("list.2").endswith("Custom")
    assert set(lines) == {"args", "kind", "rng.numpy", "list.1", "complex"}
    assert lines["args"] == lines["kind"] == "argparse.Namespace"
    assert (lines["rng.numpy"], lines["list.1"]) == ("numpy.ndarray", "builtins.frozenset")


def test_a_pickled_object_is_not_the_model_but_its_dictionaries_are(inputs, tmp_path):
    found, report = converted(inputs / "custom_objects.pt", tmp_path)
    assert report.dropped
    assert found
    with pytest.raises(InputError, match="holds no tensors"):
        ckpt8.convert(inputs / "module.pt", tmp_path / "module.pt")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16])
def test_weights_of_another_type(dtype, source, tmp_path):
    model, optimizer = trained(dtype=source)
    tree = {**checkpoint(model, optimizer), "ema": model.state_dict()}
    torch.save(tree, tmp_path / "source.pt")
    found, report = converted(tmp_path / "source.pt", tmp_path, dtype=dtype)
    wanted = getattr(torch, dtype)
    for part in ("model", "ema"):
        for name, tensor in model.state_dict().items():
            buffer = name.startswith("norm.running") or not tensor.is_floating_point()
            expected = tensor if buffer else tensor.to(wanted)
            assert found[part][name].dtype is expected.dtype
            assert torch.equal(found[part][name], expected)
        assert found[part]["lm_head.weight"].data_ptr() == found[part]["embed.weight"].data_ptr()
    assert_trees_equal(found["optimizer"], optimizer.state_dict())
    assert bool(report.casts) is (wanted is not source)


def test_a_value_beyond_float16_is_named(tmp_path):
    torch.save({"model": {"fine": torch.ones(3), "big": torch.tensor([1.0, 70000.0])}}, tmp_path / "source.pt")
    for name in ("x.pt", "x.safetensors"):
        with pytest.raises(UsageError, match=r"big: 70000 is beyond the range of float16"):
            ckpt8.convert(tmp_path / "source.pt", tmp_path / name, dtype="float16")
    torch.save({"model": {"big": torch.tensor([1.0, float("inf")])}}, tmp_path / "source.pt")
    found, _ = converted(tmp_path / "source.pt", tmp_path, dtype="float16")
    assert found["model"]["big"].isinf().tolist() == [False, True]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["converted.pt", "source.pt"]


def test_a_key_gives_one_state_dict(tmp_path):
    tree = {"model": {"w": torch.zeros(3)}, "ema": {"w": torch.ones(3)}, "x": {"deep": {"w": torch.full((3,), 2.0)}}}
    torch.save(tree, tmp_path / "source.pt")
    for key, value in (("ema", 1.0), ("x.deep", 2.0)):
        found, _ = converted(tmp_path / "source.pt", tmp_path, key=key, force=True, dtype="bfloat16")
        assert_trees_equal(found, {"w": torch.full((3,), value, dtype=torch.bfloat16)})
    with pytest.raises(UsageError, match="model, ema"):
        ckpt8.convert(tmp_path / "source.pt", tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match="leads to no dictionary of tensors"):
        ckpt8.convert(tmp_path / "source.pt", tmp_path / "x.pt", key="x")


def test_views_that_are_not_contiguous(tmp_path):
    """Transposed, sliced, expanded and negated tensors, kept as they are and cast."""
    base = torch.randn(60, 50)
    tree = {"t": base.t(), "rows": base[3:17, ::2], "one": base[5], "many": torch.randn(1, 8).expand(5, 8)}
    tree["neg"] = torch._neg_view(base[:2])
    torch.save({"model": tree}, tmp_path / "source.pt")
    found, _ = converted(tmp_path / "source.pt", tmp_path)
    assert found["model"]["t"].stride() == (1, 50)
    assert found["model"]["many"].stride() == (0, 1)
    cast, _ = converted(tmp_path / "source.pt", tmp_path, dtype="bfloat16", force=True)
    for name, tensor in tree.items():
        assert torch.equal(found["model"][name], tensor)
        assert torch.equal(cast["model"][name], tensor.bfloat16())


def test_a_tensor_expanded_out_of_proportion_is_refused(tmp_path):
    torch.save({"model": {"w": torch.randn(1).expand(1 << 40)}}, tmp_path / "source.pt")
    for name, dtype in (("x.safetensors", None), ("x.pt", "bfloat16")):
        with pytest.raises(InputError, match="expanded"):
            ckpt8.convert(tmp_path / "source.pt", tmp_path / name, dtype=dtype)
    found, _ = converted(tmp_path / "source.pt", tmp_path)
    assert found["model"]["w"].shape == (1 << 40,)


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


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."])
def test_names_of_wrappers_are_taken_away(prefix, run, tmp_path):
    state = {prefix + name: tensor for name, tensor in run[0].state_dict().items()}
    found, report = weights_of({"state_dict": state}, tmp_path)
    assert_same(found, expected_weights(run[0]))
    assert any("without wrappers" in note for note in report.notes)


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
    found, report = weights_of({"model": dict.fromkeys(names, torch.randn(6, 5))}, tmp_path)
    assert list(found) == [kept]
    assert sorted([*report.aliases, kept]) == sorted(names)


FLAT = torch.randn(40)


@pytest.mark.parametrize(
    "state",
    [
        # Names stay where they would collide without those of wrappers; views of one storage are no aliases.
        {"a._orig_mod.w": torch.zeros(2), "a.w": torch.ones(2)},
        {
            "a": FLAT[:20].view(4, 5),
            "b": FLAT[20:].view(4, 5),
            "c": FLAT[:20].view(5, 4),
            "d": FLAT[:20].view(4, 5).t(),
        },
    ],
)
def test_what_stays_apart(state, tmp_path):
    found, _ = weights_of({"model": state}, tmp_path, dtype="float32")
    assert_same(found, {name: tensor.contiguous() for name, tensor in state.items()})


def test_what_a_state_dict_holds_beside_tensors(tmp_path):
    _, report = weights_of({"model": {"w": torch.ones(3), "_extra_state": {"scale": 1}}}, tmp_path)
    assert report.dropped == ["_extra_state: not a tensor"]


def test_what_cannot_be_held(tmp_path):
    for name, dtype in (("w", torch.complex128), ("\ud800", None), ("__metadata__", None)):
        with pytest.raises((UsageError, InputError)):
            weights_of({"model": {name: torch.ones(3, dtype=dtype)}}, tmp_path)
    with pytest.raises(UsageError, match="no state dict of a model"):
        weights_of({"optimizer": Net().state_dict(), "step": torch.ones(3)}, tmp_path)
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
    for text in ("{", "{}", "[" * 100000, *('{"weight_map": ' + x + "}" for x in ("3", '{"a": "../x"}', '{"a": 1}'))):
        index.write_text(text)
        with pytest.raises(InputError, match=r"index\.json"):
            ckpt8.convert(folder, tmp_path / "y.safetensors")


SOURCES = [torch.float32, torch.bfloat16, torch.float16]
TYPES = [(source, dtype) for source in SOURCES for dtype in (None, "float32", "bfloat16", "float16")]


@pytest.mark.parametrize(("source", "dtype"), [*TYPES, (torch.float64, None)])
def test_every_type_to_every_type(source, dtype, tmp_path):
    """Without a type fp32 becomes bf16, and other types stay."""
    weights = {"a.weight": torch.randn(70, 50).to(source), "b.inv_freq": torch.randn(4), "c": torch.arange(3)}
    save_file(weights, tmp_path / "in.safetensors")
    ckpt8.convert(tmp_path / "in.safetensors", tmp_path / "out.safetensors", dtype=dtype)
    kept = torch.bfloat16 if source is torch.float32 else source
    wanted = kept if dtype is None else getattr(torch, dtype)
    assert_same(load_file(tmp_path / "out.safetensors"), {**weights, "a.weight": weights["a.weight"].to(wanted)})


@pytest.mark.slow
def test_masters_of_a_packed_run(tmp_path):
    """bf16 parameters and their residuals: by default the parameters, with float32 the master weights."""
    model, optimizer = trained(ckpt8.optim.AdamW, dtype=torch.bfloat16)
    torch.save(checkpoint(model, optimizer), tmp_path / "run.pt")
    ckpt8.compress(tmp_path / "run.pt")
    full = ckpt8.load(tmp_path / "run.ckpt8", unpack=True)["model"]
    for source in ("run.pt", "run.ckpt8"):
        ckpt8.convert(tmp_path / source, tmp_path / "x.safetensors", force=True)
        assert_same(load_file(tmp_path / "x.safetensors"), expected_weights(model))
        ckpt8.convert(tmp_path / source, tmp_path / "x.safetensors", dtype="float32", force=True)
        found = load_file(tmp_path / "x.safetensors")
        for name, tensor in found.items():
            expected = full[name] if name.startswith("norm.running") else full[name].float()
            assert torch.equal(tensor, expected if tensor.is_floating_point() else full[name])
        assert not torch.equal(found["up.weight"], model.up.weight.float())


@pytest.mark.slow
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=12),
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.float64]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_the_library_reads_every_header(tmp_path_factory, shapes):
    folder = tmp_path_factory.mktemp("header")
    state = {name: torch.ones(shape, dtype=dtype) for name, (dtype, shape) in shapes.items() if name != "__metadata__"}
    torch.save({"model": state}, folder / "run.pt")
    if not any(tensor.numel() for tensor in state.values()):
        return
    ckpt8.convert(folder / "run.pt", folder / "x.safetensors", key="model", dtype="float32")
    data = (folder / "x.safetensors").read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    assert length % 8 == 0
    assert json.loads(data[8 : 8 + length])
    found = load_file(folder / "x.safetensors")
    assert found.keys() == state.keys()
    for name, tensor in state.items():
        wanted = torch.float32 if tensor.is_floating_point() else tensor.dtype
        assert torch.equal(found[name], tensor.to(wanted))


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize(
    "name", ["views.pt", "crc_off.pt", "legacy.pt", "gpt_adamw.pt", "gpt_bf16.pt", "gpt_came.pt", "gpt_stable_adamw.pt"]
)
def test_committed_checkpoints(name, inputs, tmp_path):
    found, report = converted(inputs / name, tmp_path)
    assert_trees_equal(found, torch.load(inputs / name, weights_only=True))
    assert not report.dropped


def test_a_run_that_was_compressed_gives_what_restore_gives(forms, tmp_path):
    found, _ = converted(forms["zip flash"], tmp_path)
    assert_trees_equal(found, ckpt8.load(forms["zip flash"]))


def test_a_file_of_a_directory(forms, tmp_path):
    for form in ("directory", "directory lossless"):
        found, report = converted(forms[form], tmp_path, member="optimizer.pt", force=True)
        assert report.layout == "file"
        assert set(found) == {"state", "param_groups"}
        with pytest.raises(UsageError, match="not one of"):
            ckpt8.convert(forms[form], tmp_path / "y.pt", member="nothing.pt")
