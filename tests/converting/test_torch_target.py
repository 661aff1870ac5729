"""``.pt`` files that torch.load(weights_only=True) reads: structure, values, sharing, and what cannot be there."""

from __future__ import annotations

import argparse
import zipfile
from collections import OrderedDict

import numpy as np
import pytest
import torch
from converting_kit import Net, assert_trees_equal, checkpoint, trained

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
    assert (
        ckpt8.restore(tmp_path / "converted.ckpt8", tmp_path / "again.pt").read_bytes()
        == (tmp_path / "converted.pt").read_bytes()
    )


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
    model = torch.nn.Sequential(torch.nn.Linear(12, 7), torch.nn.Linear(7, 9))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 12)).sum().backward()
    optimizer.step()
    from converting_kit import trainer_directory

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
    kept = {
        "best": 1.5,
        "count": 7,
        "shape": (2, 3),
        "dtype": torch.bfloat16,
        "many": OrderedDict(a=1),
        "text": b"bytes",
    }
    for key, value in kept.items():
        assert type(found[key]) is type(value)
        assert found[key] == value
    assert found["list"] == [1, None, None, "x"]
    assert found["rng"]["sets"] == {1, 2}
    assert torch.equal(found["rng"]["torch"], tree["rng"]["torch"])
    assert {"args", "complex", "kind"}.isdisjoint(found)
    lines = dict(line.split(": ", 1) for line in report.dropped)
    assert lines["args"] == lines["kind"] == "argparse.Namespace"
    assert lines["rng.numpy"] == "numpy.ndarray"
    assert lines["list.1"] == "builtins.frozenset"
    assert lines["list.2"].endswith("Custom")
    assert set(lines) == {"args", "kind", "rng.numpy", "list.1", "list.2", "complex"}


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
    with pytest.raises(InputError, match="expanded"):
        ckpt8.convert(tmp_path / "source.pt", tmp_path / "x.safetensors")
    with pytest.raises(InputError, match="expanded"):
        ckpt8.convert(tmp_path / "source.pt", tmp_path / "x.pt", dtype="bfloat16")
    found, _ = converted(tmp_path / "source.pt", tmp_path)
    assert found["model"]["w"].shape == (1 << 40,)


def test_a_file_of_a_directory(forms, tmp_path):
    for form in ("directory", "directory lossless"):
        found, report = converted(forms[form], tmp_path, member="optimizer.pt", force=True)
        assert report.layout == "file"
        assert set(found) == {"state", "param_groups"}
        with pytest.raises(UsageError, match="not one of"):
            ckpt8.convert(forms[form], tmp_path / "y.pt", member="nothing.pt")
