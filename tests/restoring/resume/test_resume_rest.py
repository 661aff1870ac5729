"""The rest of the tree, and copies into tensors of any stride."""

import argparse
import random
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from resume_kit import same
from torch import nn

import ckpt8
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.sources import composite as streaming
from ckpt8.checkpoint.sources.composite import Streamer
from ckpt8.checkpoint.sources.objects import RestBuilder
from ckpt8.checkpoint.tree import Inert, TensorRef, iter_leaves


def round_trip(tmp_path, tree, model=None):
    path = tmp_path / "run.pt"
    torch.save(tree, path)
    ckpt8.compress(path, preset="lossless", force=True)
    rest = ckpt8.resume(path, model)
    again = ckpt8.resume(path.with_suffix(".ckpt8"), model)
    assert repr(again) == repr(rest)
    return rest


def test_plain_values_tensors_and_objects_of_other_classes(tmp_path):
    """Objects are not made; parts that are shared or hold themselves stay so."""
    base = torch.arange(12.0)
    tree = {
        "iter": 7,
        "config": {"lr": 1e-3, "betas": (0.9, 0.95), "names": ["a", None, True], 3: b"bytes", "inf": float("inf")},
        "rng": torch.get_rng_state(),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "views": [base, base[2:8:2], base.view(3, 4).t()],
        "ordered": OrderedDict(a=1),
        "set": {1, 2},
        "empty": {},
        "spectrum": torch.randn(4, dtype=torch.complex64).conj(),
        "negative": torch.randn(4, dtype=torch.complex64).conj().imag,
        "python": random.getstate(),
    }
    others = {"args": argparse.Namespace(lr=0.1, layers=[1, 2], table=torch.ones(2)), "path": Path("/x")}
    others |= {"a": tree["config"], "model": nn.Linear(64, 64).state_dict()}
    others["self"] = others
    rest = round_trip(tmp_path, tree | others, nn.Linear(64, 64))
    assert list(rest) == [*tree, "args", "path", "a", "self"]
    assert all(same(rest[key], tree[key]) for key in tree)
    whole, part, _ = rest["views"]
    whole[2] = -1
    assert part[0] == -1
    assert rest["a"] is rest["config"]
    assert rest["self"]["self"] is rest["self"]
    assert type(rest["args"]) is Inert
    assert rest["args"].name == "argparse.Namespace"
    assert rest["args"].state["layers"] == [1, 2]
    assert torch.equal(rest["args"].state["table"], torch.ones(2))
    assert rest["path"].name.startswith("pathlib.")


class NestedTwice:
    """A set of a tuple that holds one tuple twice, sixty deep: to hash it takes 2^60 steps."""

    def __reduce__(self):
        nested = (1,)
        for _ in range(60):
            nested = (nested, nested)
        return set, ([nested],)


class Colliding:
    """A set of numbers of one hash: to build it takes time with their square."""

    def __reduce__(self):
        return set, ([k * ((1 << 61) - 1) for k in range(1, 1 << 12)],)


def test_a_set_that_is_made_to_be_slow_is_not_built(tmp_path):
    torch.save({"s": NestedTwice()}, tmp_path / "a.pt")
    assert type(ckpt8.resume(tmp_path / "a.pt")["s"]) is Inert
    torch.save({"s": Colliding()}, tmp_path / "a.pt")
    with pytest.raises(ckpt8.InputError, match=r"a dictionary or set that cannot be built: .* made to collide"):
        ckpt8.resume(tmp_path / "a.pt")


def test_numpy(tmp_path):
    np = pytest.importorskip("numpy")
    generator = np.random.RandomState(3)
    tree = {
        "state": generator.get_state(),
        "f": np.float64(0.1),
        "big": np.arange(6, dtype=">i4").reshape(2, 3, order="F"),
    }
    rest = round_trip(tmp_path, tree | {"x": torch.ones(1), "text": np.array(["a"], dtype=object)})
    assert rest["f"] == tree["f"]
    assert type(rest["f"]) is np.float64
    np.testing.assert_array_equal(rest["big"], tree["big"])
    expected = generator.rand(3)
    other = np.random.RandomState(4)
    other.set_state(rest["state"])
    np.testing.assert_array_equal(other.rand(3), expected)
    assert type(rest["text"]) is Inert


@pytest.mark.parametrize("name", ["views.pt", "legacy.pt", "crc_off.pt"])
def test_the_rest_is_what_torch_loads(inputs, tmp_path, name):
    ckpt8.compress(inputs / name, tmp_path / "run.ckpt8", preset="lossless")
    for path in (inputs / name, tmp_path / "run.ckpt8"):
        assert same_values(ckpt8.resume(path), torch.load(inputs / name, weights_only=True))


def same_values(one, other):
    if isinstance(other, dict):
        return list(one) == list(other) and all(same_values(one[key], other[key]) for key in other)
    if isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(same_values(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(other, torch.Tensor):
        return same(one.detach(), other.detach())
    return one == other or (one != one and other != other)


@pytest.mark.by_default("views.pt-64", "gpt_came.pt-1048576")
@pytest.mark.parametrize("piece", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("name", ["views.pt", "gpt_came.pt"])
def test_copies_of_any_stride_into_any_stride(inputs, monkeypatch, name, piece):
    monkeypatch.setattr(streaming, "BLOCK", piece)
    with open_checkpoint(inputs / name) as checkpoint:
        streamer, builder = Streamer(checkpoint), RestBuilder(checkpoint)
        refs = [ref for _, ref in iter_leaves(checkpoint.tree) if isinstance(ref, TensorRef)]
        if piece < 64:
            refs = [ref for ref in refs if torch.Size(ref.shape).numel() < 300]
        assert refs
        for ref in refs:
            expected = builder.build(replace(ref, conj=False, neg=False))
            for target in targets(expected):
                streamer.copy(ref, target)
                assert same(target.clone(memory_format=torch.contiguous_format), expected.contiguous())
            assert streamer.equal(ref, ref)


def targets(like):
    """Tensors of one shape: contiguous, transposed, and with gaps."""
    shape = tuple(like.shape)
    backwards = torch.empty(shape[::-1], dtype=like.dtype).permute(tuple(reversed(range(len(shape)))))
    gaps = torch.empty((*shape, 2), dtype=like.dtype)[..., 0]
    return [torch.empty(shape, dtype=like.dtype), backwards, gaps]


def test_channels_last_stays(tmp_path):
    model = nn.Conv2d(4, 8, 3).to(memory_format=torch.channels_last)
    torch.save(model.state_dict(), tmp_path / "run.pt")
    for layout in (torch.channels_last, torch.contiguous_format):
        other = nn.Conv2d(4, 8, 3).to(memory_format=layout)
        stride = other.weight.stride()
        assert ckpt8.resume(tmp_path / "run.pt", other) == {}
        assert torch.equal(other.weight, model.weight)
        assert other.weight.stride() == stride


class WithExtra(nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.scale = scale

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


def test_extra_states(tmp_path):
    torch.save({"model": nn.Sequential(WithExtra(2.5)).state_dict()}, tmp_path / "run.pt")
    other = nn.Sequential(WithExtra(1.0))
    ckpt8.resume(tmp_path / "run.pt", other)
    assert other[0].scale == 2.5
