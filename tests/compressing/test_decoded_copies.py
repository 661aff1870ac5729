"""Copies of masters on a lattice: the decoded masters, rounded to bf16 or fp16, wherever a container is read."""

from __future__ import annotations

import pytest
import torch
from disk_kit import flip_bit
from hostile_kit import pack, unpack
from reference_kit import LAYOUTS, MATRICES, SHAPES, VECTORS, adamw, codecs, copies, masters, same, written

import ckpt8
from ckpt8.codecs.lossless import Lossless
from ckpt8.codecs.rounded_copy import LatticeReference, Run, round_to
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.tensors import DType, Role, TensorSpec

TYPES = (torch.bfloat16, torch.float16)


def tree_of(layout, dtype, weights):
    tree = LAYOUTS[layout](weights)
    key = "model" if "model" in tree else "module"
    if dtype is torch.float16 and layout == "flat buffer":
        flat = torch.cat([*(w.half().flatten() for w in weights.values()), torch.zeros(9).half()])
        parts = flat.split([*(w.numel() for w in weights.values()), 9])
        tree[key] = {name: part.view(weights[name].shape) for name, part in zip(weights, parts, strict=False)}
    elif dtype is torch.float16:
        tree[key] = {name: w.half() for name, w in weights.items()}
    return tree


def masters_in(layout, tree):
    """The masters of a tree by the name of the weight, from what the layout says of their order."""
    optimizer = tree["optimizer"]
    if layout in ("master_param", "master_weight"):
        return dict(zip(SHAPES, (state[layout] for state in optimizer["state"].values()), strict=True))
    key = {"megatron": "fp32_from_fp16_params", "apex": "fp32_from_fp16"}.get(layout, "fp32_groups_flat")
    groups = optimizer[key]
    names = [MATRICES, VECTORS] if len(groups) == 2 else [list(SHAPES)]
    found = {}
    for group, of_group in zip(groups, names, strict=True):
        sizes = [torch.Size(SHAPES[name]).numel() for name in of_group]
        flat = group if isinstance(group, torch.Tensor) else torch.cat([each.flatten() for each in group])
        runs = flat[: sum(sizes)].split(sizes)
        found |= {name: run.view(SHAPES[name]) for name, run in zip(of_group, runs, strict=True)}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copies_are_the_rounded_decoded_masters(layout, dtype, tmp_path):
    """As torch rounds them; those of matrices are not what they were."""
    weights = masters()
    tree = tree_of(layout, dtype, weights)
    manifest, path = written(tree, tmp_path, preset="archive")
    kinds = {tensor.name: manifest.storages[tensor.storage].codec["id"] for tensor in manifest.tensors}
    assert {kind for name, kind in kinds.items() if name.endswith(tuple(f"el.{each}" for each in MATRICES))} <= {
        "reference/2"
    }
    assert not ckpt8.verify(path, tmp_path / "run.pt").failures
    restored = torch.load(ckpt8.restore(path, tmp_path / "back.pt"), weights_only=True)
    loaded = ckpt8.load(path)
    originals, expected = copies(tree), masters_in(layout, restored)
    with ckpt8.open(path) as file:
        key = "model" if "model" in tree else "module"
        for name, original in originals.items():
            for found in (copies(restored)[name], copies(loaded)[name], file.get_tensor(f"{key}.{name}")):
                assert same(found, expected[name].to(dtype))
                if name in MATRICES or not layout.startswith("flat"):
                    assert same(found, original) == (name in VECTORS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", TYPES)
def test_one_element_that_differs(dtype, tmp_path):
    """The original must be the copy of the original master: the container says so."""
    weights = masters(shapes={"a": (300, 200), "b": (200, 300)})
    copied = {name: w.to(dtype) for name, w in weights.items()}
    tree = {"model": copied, "optimizer": adamw(list(weights.values()), master_param=weights.values())}
    kept = copied["a"].clone()
    copied["a"].view(-1).view(torch.int16)[7000] += 1
    manifest, path = written(tree, tmp_path, preset="archive")
    name = "fp16" if dtype is torch.float16 else "bf16"
    assert codecs(manifest)["model.a"] == ("lossless/1", f"differs from its fp32 master rounded to {name}")
    assert codecs(manifest)["model.b"] == ("reference/2", None)
    assert same(ckpt8.load(path)["model"]["a"], copied["a"])
    copied["a"].copy_(kept)
    manifest, path = written(tree, tmp_path, preset="archive")
    copied["a"].view(-1).view(torch.int16)[7000] += 1
    torch.save(tree, tmp_path / "run.pt")
    assert ckpt8.verify(path, tmp_path / "run.pt").failures[0] == "model.a: differs from the original"


@pytest.mark.slow
def test_live_objects(tmp_path):
    tree = tree_of("megatron", torch.bfloat16, masters())
    for options in ({}, {"background": True}):
        saved = ckpt8.save(tree, tmp_path / "run.ckpt8", preset="archive", force=True, **options)
        manifest = saved.result() if options else saved
        assert codecs(manifest)["model.embed.weight"] == ("reference/2", None)
    live = torch.nn.Module()
    for name, w in tree["model"].items():
        live.register_buffer(name.replace(".", "_"), torch.zeros_like(w))
    loaded = ckpt8.load(tmp_path / "run.ckpt8")
    assert same(loaded["model"]["embed.weight"], loaded["optimizer"]["fp32_from_fp16_params"][0][0].bfloat16())


@pytest.mark.slow
def test_damage_of_a_master_is_told_of_its_copy_and_salvaged(tmp_path):
    manifest, path = written(tree_of("master_param", torch.bfloat16, masters()), tmp_path, preset="archive")
    with ContainerReader(path) as reader:
        index = next(k for k, record in enumerate(manifest.storages) if record.name.endswith("state.0.master_param"))
        offset = reader.places[index]["codes"].offsets[0]
    flip_bit(path, offset + 40)
    with ckpt8.open(path) as file, pytest.raises(InputError, match=r"state\.0\.master_param"):
        file.get_tensor("model.embed.weight")
    found = ckpt8.restore(path, tmp_path / "back.pt", salvage=True)
    assert {lost.name for lost in found.lost} == {"model.embed.weight", "optimizer.state.0.master_param"}


@pytest.mark.slow
def test_a_live_model_takes_its_copies(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(128, 300), torch.nn.Linear(300, 100)).bfloat16()
    weights = {name: p.detach().float() + torch.randn(p.shape) * 1e-5 for name, p in model.named_parameters()}
    tree = {"model": {name: w.bfloat16() for name, w in weights.items()}}
    tree["optimizer"] = adamw(list(weights.values()), master_param=weights.values())
    manifest, path = written(tree, tmp_path, preset="archive")
    assert codecs(manifest)["model.0.weight"] == ("reference/2", None)
    ckpt8.resume(path, model=model)
    kept = ckpt8.load(path)["optimizer"]["state"]
    for k, (name, w) in enumerate(model.state_dict().items()):
        assert same(w, kept[k]["master_param"].bfloat16())
        assert same(w, tree["model"][name]) == name.endswith("bias")


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_rounding(dtype):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32)
    half = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.float16).float().view(torch.int32)
    ties = torch.cat([half, half + 0x1000, half + 0xFFF, half + 0x1001])
    x = torch.cat([bits, ties]).view(torch.float32)
    known = x[~x.isnan()]
    assert same(round_to(dtype, known), known.to(dtype.torch))
    nan = torch.tensor([0x7F800001, 0x7FC00000, -1], dtype=torch.int64).to(torch.int32).view(torch.float32)
    if dtype is DType.FLOAT16:
        found = round_to(dtype, nan).view(torch.int16).tolist()
        assert found == [0x7E00, 0x7E00, 0x7E00 - 0x8000]


def test_what_a_copy_takes():
    codec = LatticeReference((Run(0, 0, 8),))
    assert codec.is_lossy
    assert codec.measured_as is None
    assert not Lossless().is_lossy
    for dtype in DType:
        assert codec.accepts(TensorSpec("", Role.WEIGHT, dtype, (8,))) == (dtype in (DType.BFLOAT16, DType.FLOAT16))
    for dtype in TYPES:
        x = torch.randn(8).to(dtype)
        assert codec.encode(x, companions={"rounded": x}) == {}
        with pytest.raises(RefusedError):
            codec.encode(x, companions={"rounded": -x})


# Hostile containers


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    shapes = {"embed.weight": (80, 80), "head.weight": (80, 80)}
    weights = masters(shapes=shapes)
    tree = {"model": {k: w.bfloat16() for k, w in weights.items()}}
    tree["optimizer"] = adamw(list(weights.values()), master_param=weights.values())
    _, path = written(tree, tmp_path_factory.mktemp("small"), preset="archive")
    return unpack(path.read_bytes())


def index(manifest, name):
    return next(k for k, storage in enumerate(manifest["storages"]) if storage["name"] == name)


@pytest.mark.parametrize(
    ("codec_id", "master", "problem"),
    [
        ("reference/1", "optimizer.state.0.master_param", "other than elements of fp32 masters"),
        ("reference/2", "optimizer.state.0.exp_avg", "other than elements of fp32 masters"),
        ("reference/2", "optimizer.state.0.exp_avg_sq", "other than elements of fp32 masters"),
        ("reference/2", "model.head.weight", "other than elements of fp32 masters"),
        ("reference/2", "ckpt8.skeleton", "other than elements of fp32 masters"),
        ("reference16/1", "optimizer.state.0.master_param", "does not hold bfloat16"),
    ],
)
def test_masters_of_the_wrong_kind(codec_id, master, problem, parts, tmp_path):
    metadata, entries, manifest = parts
    manifest = {**manifest, "storages": [dict(each) for each in manifest["storages"]]}
    record = manifest["storages"][index(manifest, "model.embed.weight")]
    record["codec"] = {"id": codec_id, "runs": [[index(manifest, master), 0, 6400]]}
    (tmp_path / "a.ckpt8").write_bytes(pack(manifest, entries, metadata))
    with pytest.raises(InputError, match=problem):
        ckpt8.load(tmp_path / "a.ckpt8")
