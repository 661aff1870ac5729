"""bf16 and fp16 copies of fp32 masters: found in every layout, proven on every element, and given back bit for bit."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from reference_kit import LAYOUTS, adamw, codecs, copies, masters, rounded, same, written
from safetensors.torch import save_file

import ckpt8
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.codecs.rounded_copy import DELTA, ROUNDED, HalfReference, Reference, Run
from ckpt8.codecs.split24 import Split24, Split32
from ckpt8.codecs.split24.reference import round_masters
from ckpt8.compressing import device_encoder
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.decoding import decode_storage
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arrays import as_array
from ckpt8.core.errors import CheckFailedError, RefusedError
from ckpt8.core.tensors import DType, Role, TensorSpec
from ckpt8.inspecting.checkpoint import inspect_checkpoint
from ckpt8.inspecting.container import inspect_container

REFERENCES = {torch.bfloat16: "reference/1", torch.float16: "reference16/1"}
"""The codec of copies of each type."""

FRAME = 1 << 20


def tree_in(dtype, layout, weights):
    """A layout with copies as a trainer in ``dtype`` rounds them: those in fp16 from the masters, not from bf16."""
    tree = LAYOUTS[layout](weights)
    if dtype is torch.bfloat16:
        return tree
    key = "model" if "model" in tree else "module"
    return tree | {key: {name: weights[name].half() for name in tree[key]}}


def of_copies(manifest, dtype=DType.BFLOAT16):
    """The distinct (codec, reason) of the storages that only tensors of that type have."""
    narrow = {tensor.storage for tensor in manifest.tensors if tensor.dtype is dtype}
    return {(manifest.storages[index].codec["id"], manifest.storages[index].reason) for index in narrow}


def test_masters_are_rounded_as_torch_and_split24_do():
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32)
    edges = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0x18000, 0x7F7F7FFF, 0x7F7F8000, 0x7F7FFFFF, 0x7F800000])
    bits = torch.cat([bits, edges.int(), (edges - 2**31).int()])
    x = bits.view(torch.float32)
    x = x[~x.isnan()]
    assert same(round_masters(x), x.bfloat16())
    finite = x[x.bfloat16().isfinite()]
    spec = TensorSpec("", Role.WEIGHT, DType.FLOAT32, (finite.numel(),))
    for codec in (Split24(), Split24(R=7), Split24(R=1), Split32()):
        assert same(round_masters(codec.decode(codec.encode(finite), spec)), finite.bfloat16())


def test_runs_are_cut_where_asked():
    runs = (Run(3, 10, 5), Run(None, 0x3F80, 4), Run(2, 0, 7))
    codec = Reference(runs)
    elements = [each for storage, start, length in runs for each in spread(storage, start, length)]
    for first in range(16):
        for length in range(1, 17 - first):
            found = [each for run in codec.cut(first, length) for each in spread(*run)]
            assert found == elements[first : first + length]


def spread(storage, start, length):
    return [(storage, start + (k if storage is not None else 0)) for k in range(length)]


@pytest.mark.by_default(
    "torch.bfloat16-flat-flash", "torch.bfloat16-flat groups-flash", "torch.float16-flat buffer-lossless"
)
@pytest.mark.parametrize("preset", ["flash", "lossless"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", REFERENCES, ids=str)
def test_the_copies_of_every_layout_are_references(dtype, layout, preset, tmp_path):
    tree = tree_in(dtype, layout, masters())
    manifest, path = written(tree, tmp_path, preset=preset)
    assert of_copies(manifest, DType.from_label(str(dtype))) == {(REFERENCES[dtype], None)}
    assert manifest.version == ("1.3" if manifest.packs or dtype is torch.float16 else "1.2")
    kinds = {record.codec["id"] for record in manifest.storages if record.dtype is DType.FLOAT32}
    assert ("split24/1" in kinds) == (preset != "lossless")
    assert not ckpt8.verify(path, tmp_path / "run.pt").failures
    restored = torch.load(ckpt8.restore(path, tmp_path / "back.pt"), weights_only=True)
    loaded = ckpt8.load(path)
    with ckpt8.open(path) as file:
        key = "model" if "model" in tree else "module"
        for name, expected in copies(tree).items():
            for found in (copies(restored)[name], copies(loaded)[name], file.get_tensor(f"{key}.{name}")):
                assert same(found, expected)
                assert found.shape == expected.shape
        assert file.stats(f"{key}.{name}")["codec"] == REFERENCES[dtype]
        assert all(master.startswith("optimizer.") for master in file.stats(f"{key}.{name}")["masters"])
    if preset == "lossless":
        assert (tmp_path / "back.pt").read_bytes() == (tmp_path / "run.pt").read_bytes()


@pytest.mark.slow
def test_a_parameter_of_mixed_precision_costs_what_one_of_fp32_costs(tmp_path):
    shapes = {"a": (1000, 512), "b": (512, 512)}
    weights = masters(shapes=shapes)
    numel = sum(w.numel() for w in weights.values())
    optimizer = adamw(list(weights.values()), master_param=weights.values())
    manifest, path = written({"model": rounded(weights), "optimizer": optimizer}, tmp_path)
    assert (tmp_path / "run.pt").stat().st_size / numel > 14
    assert path.stat().st_size / numel < 4.75
    wide = adamw(list(weights.values()))
    torch.save({"model": weights, "optimizer": wide}, tmp_path / "wide.pt")
    ckpt8.compress(tmp_path / "wide.pt")
    assert abs(path.stat().st_size - (tmp_path / "wide.ckpt8").stat().st_size) < 2048
    facts = inspect_container(path)
    assert facts["weights"] == numel
    (row,) = [row for row in facts["roles"] if row["codec"] == "reference/1"]
    assert (row["role"], row["bytes"], row["stored_bytes"]) == ("weight", 2 * numel, 0)
    predicted = inspect_checkpoint(tmp_path / "run.pt")
    assert 0.95 < predicted["predicted"]["flash"]["bytes"] / path.stat().st_size < 1.05
    assert predicted["unpredicted"] == {}
    assert manifest.version == ("1.3" if manifest.packs else "1.2")


@pytest.mark.slow
def test_chunks_of_long_copies(tmp_path):
    """Runs that begin and end anywhere, read from anywhere."""
    weights = masters(shapes={"a": (FRAME + 77,), "b": (65, 1001), "c": (FRAME // 2 + 5,), "d": (FRAME // 2,)})
    weights = {name: torch.randn(w.shape) for name, w in weights.items()}
    manifest, path = written(LAYOUTS["flat buffer"](weights), tmp_path)
    assert of_copies(manifest) == {("reference/1", None)}
    assert not ckpt8.verify(path, tmp_path / "run.pt").failures
    expected = torch.cat([w.flatten() for w in weights.values()]).bfloat16()
    index = next(k for k, record in enumerate(manifest.storages) if record.is_reference)
    with ContainerReader(path) as reader:
        for chunk in (2, 0, 1):
            out = torch.empty(min(FRAME, expected.numel() + 9 - chunk * FRAME), dtype=torch.bfloat16)
            reader.decode_chunk(index, chunk, as_array(out))
            wanted = expected[chunk * FRAME :][: len(out)]
            assert same(out[: len(wanted)], wanted)
            assert not out[len(wanted) :].any()
        # One master with several chunks: those that a run needs are all that is read.
        assert reader.read_parts(index, 0).keys() == {"rounded"}


def test_copies_in_several_pieces_of_masters(tmp_path):
    """A parameter that lies in the shares of two ranks, see test_deepspeed for real ones."""
    weights = {"a": torch.randn(300, 300), "b": torch.randn(200, 300)}
    whole = torch.cat([w.flatten() for w in weights.values()])
    root = tmp_path / "step"
    root.mkdir()
    torch.save({"module": rounded(weights)}, root / "mp_rank_00_model_states.pt")
    for rank in range(11):  # rank 10 comes behind rank 2
        share = whole[rank * 14_000 : (rank + 1) * 14_000].clone()
        state = {"single_partition_of_fp32_groups": [share], "base_optimizer_state": adamw([share])}
        path = root / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": state}, path)
    manifest = ckpt8.compress(root)
    assert of_copies(manifest) == {("reference/1", None)}
    assert not ckpt8.verify(tmp_path / "step.ckpt8", root).failures
    back = ckpt8.restore(tmp_path / "step.ckpt8", tmp_path / "back")
    name = "mp_rank_00_model_states.pt"
    assert (back / name).read_bytes() == (root / name).read_bytes()


def test_a_model_and_its_masters_in_several_files(tmp_path):
    weights = masters()
    root = tmp_path / "run"
    root.mkdir()
    names = sorted(weights)
    save_file(rounded({name: weights[name] for name in names[:3]}), root / "model-1.safetensors")
    save_file(rounded({name: weights[name] for name in names[3:]}), root / "model-2.safetensors")
    torch.save(adamw(list(weights.values()), master_param=weights.values()), root / "optimizer.pt")
    manifest = ckpt8.compress(root, tmp_path / "run.ckpt8")
    assert of_copies(manifest) == {("reference/1", None)}
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    for name in ("model-1.safetensors", "model-2.safetensors"):
        assert (back / name).read_bytes() == (root / name).read_bytes()
        assert all(same(w, weights[k].bfloat16()) for k, w in ckpt8.load(tmp_path / "run.ckpt8", member=name).items())
    # The same directory with a model of another step.
    save_file(rounded(dict.fromkeys(names[:3], torch.randn(7, 7))), root / "model-1.safetensors")
    with pytest.raises(CheckFailedError):
        ckpt8.verify(tmp_path / "run.ckpt8", root)


def test_another_copy_is_told(tmp_path):
    tree = LAYOUTS["megatron"](masters())
    _, path = written(tree, tmp_path)
    tree["model"]["embed.weight"][3, 5] += 1
    torch.save(tree, tmp_path / "run.pt")
    assert ckpt8.verify(path, tmp_path / "run.pt").failures[0] == "model.embed.weight: differs from the original"


# What is not a copy


@pytest.mark.parametrize("dtype", REFERENCES, ids=str)
@pytest.mark.parametrize("at", [0, 5000, -1])
def test_one_element_that_differs(at, dtype, tmp_path):
    tree = tree_in(dtype, "master_param", masters())
    spoiled = tree["model"]["layers.0.up.weight"].view(-1)
    # A copy in fp16 may be rounded in any way; it is no copy with another exponent.
    spoiled.view(torch.int16)[at] += 1 if dtype is torch.bfloat16 else 0x1000
    manifest, path = written(tree, tmp_path)
    found = codecs(manifest)
    codec, reason = found.pop("model.layers.0.up.weight")
    assert codec == "lossless/1"
    # What the sample shows is not expected to match; what only the proof finds is told.
    kind = "bf16" if dtype is torch.bfloat16 else "fp16"
    assert reason == (f"differs from its fp32 master rounded to {kind}" if at == 5000 else None)
    assert all(codec == REFERENCES[dtype] for name, (codec, _) in found.items() if name.startswith("model."))
    assert same(ckpt8.load(path)["model"]["layers.0.up.weight"], tree["model"]["layers.0.up.weight"])
    assert not ckpt8.verify(path, tmp_path / "run.pt").failures


@pytest.mark.parametrize(("padding", "codec"), [((-2.0,) * 9, "reference/1"), ((0.0,) * 8 + (3.0,), "lossless/1")])
def test_padding(padding, codec, tmp_path):
    tree = LAYOUTS["flat buffer"](masters())
    buffer = torch.empty(0, dtype=torch.bfloat16).set_(tree["module"]["embed.weight"].untyped_storage())
    buffer[-9:] = torch.tensor(padding)
    manifest, path = written(tree, tmp_path)
    reason = None if codec == "reference/1" else "differs from its fp32 master rounded to bf16"
    assert of_copies(manifest) == {(codec, reason)}
    with ContainerReader(path) as reader:
        index = next(tensor.storage for tensor in manifest.tensors if tensor.dtype is DType.BFLOAT16)
        assert same(decode_storage(reader, index), buffer)
    assert same(ckpt8.load(path)["module"]["embed.weight"], tree["module"]["embed.weight"])


@pytest.mark.by_default(most=3)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), 3.4e38, float("nan"), 1e-45, -0.0, "payload"])
def test_values_at_the_edges(value, tmp_path):
    weights = masters()
    w = weights["layers.0.up.weight"].view(-1)
    if value == "payload":
        w.view(torch.int32)[7000] = 0x7F800001  # a NaN that rounding turns into infinity
    else:
        w[7000] = value
    tree = LAYOUTS["master_param"](weights)
    if value != value:  # which NaN a cast gives is torch's affair
        tree["model"]["layers.0.up.weight"].view(-1).view(torch.int16)[7000] = 0x7FC0
        w.view(torch.int32)[7000] = 0x7FC00000
    manifest, path = written(tree, tmp_path)
    assert codecs(manifest)["model.layers.0.up.weight"][0] == ("lossless/1" if value == "payload" else "reference/1")
    loaded = ckpt8.load(path)
    assert same(loaded["model"]["layers.0.up.weight"], tree["model"]["layers.0.up.weight"])
    assert not ckpt8.verify(path, tmp_path / "run.pt").failures


def test_weights_of_another_run_are_left_as_they_are(tmp_path):
    tree = LAYOUTS["master_param"](masters())
    other = {"model": rounded(masters(seed=7)), "optimizer": tree["optimizer"]}
    manifest, _ = written(other, tmp_path)
    # Norms of ones agree, whoever they belong to.
    assert {name for name, (codec, _) in codecs(manifest).items() if codec == "reference/1"} == {
        "model.layers.0.norm.weight",
        "model.layers.1.norm.weight",
    }


def test_what_is_no_copy_costs_a_few_reads(tmp_path, monkeypatch):
    read = []
    read_into = Bundle.read_into
    weights = masters(shapes={f"w{k}": (128, 128) for k in range(20)})
    other = masters(seed=3, shapes={f"w{k}": (128, 128) for k in range(20)})
    tree = {"model": rounded(weights), "optimizer": adamw(list(other.values()), master_param=other.values())}
    torch.save(tree, tmp_path / "run.pt")

    def counting(self, offset, buffer):
        read.append(len(buffer))
        read_into(self, offset, buffer)

    monkeypatch.setattr(Bundle, "read_into", counting)
    with open_source(tmp_path / "run.pt", containers=False) as bundle:
        plan = plan_bundle(bundle, Policy())
    assert not any(isinstance(stream.codec, Reference) for stream in plan.streams)
    # The samples of 20 copies and 20 masters, and the step of every parameter.
    assert sum(read) <= 20 * 3 * 32 * (2 + 4) + 20 * 4


@pytest.mark.parametrize(
    ("rule", "copy_codec"),
    [
        ("model.embed.weight=lossless", "lossless/1"),
        ("optimizer.*master_param=split32", "reference/1"),
        ("optimizer.*master_param=split24(R=1)", "reference/1"),
        ("optimizer.state.0.master_param=companded8", "lossless/1"),
    ],
)
def test_rules(rule, copy_codec, tmp_path):
    tree = LAYOUTS["master_param"](masters())
    manifest, path = written(tree, tmp_path, rules=(rule,))
    found = codecs(manifest)
    assert found["model.embed.weight"][0] == copy_codec
    assert found["model.layers.1.up.weight"][0] == "reference/1"
    assert not ckpt8.verify(path, tmp_path / "run.pt").failures
    assert same(ckpt8.load(path)["model"]["embed.weight"], tree["model"]["embed.weight"])


def test_a_master_is_copied_four_times_at_most(tmp_path):
    weights = {"w": torch.randn(80, 80)}
    tree = {"model": {f"w{k}": weights["w"].bfloat16() for k in range(6)}}
    tree["optimizer"] = adamw(list(weights.values()), master_param=weights.values())
    manifest, path = written(tree, tmp_path)
    kinds = [codec for name, (codec, _) in codecs(manifest).items() if name.startswith("model.")]
    assert (kinds.count("reference/1"), kinds.count("lossless/1")) == (4, 2)
    assert not ckpt8.verify(path, tmp_path / "run.pt").failures


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["megatron", "flat buffer"])
def test_live_objects(layout, tmp_path):
    tree = LAYOUTS[layout](masters())
    for folder in ("front", "behind"):
        (tmp_path / folder).mkdir()
    front = ckpt8.save(tree, tmp_path / "front" / "run.ckpt8")
    assert of_copies(front) == {("reference/1", None)}
    kept = copy.deepcopy(tree)
    pending = ckpt8.save(tree, tmp_path / "behind" / "run.ckpt8", background=True)
    for tensor in copies(tree).values():
        tensor.zero_()
    pending.result()
    assert (tmp_path / "front" / "run.ckpt8").read_bytes() == (tmp_path / "behind" / "run.ckpt8").read_bytes()
    for name, expected in copies(kept).items():
        assert same(copies(ckpt8.load(tmp_path / "behind" / "run.ckpt8"))[name], expected)
    spoiled = copy.deepcopy(kept)
    next(iter(copies(spoiled).values())).view(-1).view(torch.int16)[9000] += 1
    for background in (False, True):
        target = tmp_path / f"spoiled-{background}.ckpt8"
        done = ckpt8.save(spoiled, target, background=background)
        manifest = done.result() if background else done
        assert "differs from its fp32 master rounded to bf16" in {reason for _, reason in of_copies(manifest)}
        assert same(*(next(iter(copies(each).values())) for each in (ckpt8.load(target), spoiled)))


@pytest.mark.parametrize("asked", [None, "cuda"])
def test_the_device_path(asked, tmp_path, monkeypatch):
    """A stand-in for a GPU, see test_device."""
    from test_gpu_encoder import Deferred

    Deferred.made, Deferred.marks = [], {}
    tree = LAYOUTS["megatron"](masters())
    _, path = written(tree, tmp_path)
    monkeypatch.setattr(device_encoder, "CudaTransfer", Deferred)
    monkeypatch.setattr(
        "ckpt8.compressing.compress.requested", lambda device: torch.device("cpu") if device == "cuda" else None
    )
    if asked:
        ckpt8.compress(tmp_path / "run.pt", tmp_path / "other.ckpt8", device=asked)
        assert path.read_bytes() == (tmp_path / "other.ckpt8").read_bytes()
    else:
        (tmp_path / "live").mkdir()
        manifest = ckpt8.save(tree, tmp_path / "live" / "run.ckpt8")
        assert of_copies(manifest) == {("reference/1", None)}
        assert all(same(copies(ckpt8.load(tmp_path / "live" / "run.ckpt8"))[k], v) for k, v in copies(tree).items())
    assert Deferred.made


# Copies in fp16


def test_every_bf16_value_rounds_as_numpy_says():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    parts = {ROUNDED: every.view(torch.bfloat16), DELTA: torch.zeros(1 << 16, dtype=torch.int8)}
    found = HalfReference().decode(parts, TensorSpec("", Role.WEIGHT, DType.FLOAT16, (1 << 16,)))
    wide = (every.numpy().astype(np.uint16).astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = wide.astype(np.float16).view(np.uint16)
    nan = np.isnan(wide)
    expected[nan] = (wide.view(np.uint32)[nan] >> 16 & 0x8000 | 0x7E00).astype(np.uint16)
    assert np.array_equal(found.view(torch.int16).numpy().view(np.uint16), expected)
    assert (expected[~nan] & 0x7C00 == 0x7C00).any()
    assert ((expected & 0x7C00 == 0) & (expected & 0x3FF > 0)).any()


@pytest.mark.parametrize("scale", [1e-8, 3e-6, 1e-4, 0.05, 1.0, 3e4])
def test_what_is_encoded_comes_back(scale):
    """Subnormals, overflow, both zeros; rounding to nearest, down, and at random."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40_000, generator=generator) * scale
    x[:4] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf])
    spec = TensorSpec("", Role.WEIGHT, DType.FLOAT16, (len(x),))
    near, down = x.half(), (x * (1 - 2**-12)).half()
    for half in (near, down, torch.where(torch.rand(len(x), generator=generator) < 0.5, near, down)):
        parts = HalfReference().encode(half, companions={ROUNDED: x.bfloat16()})
        assert {name: part.dtype for name, part in parts.items()} == {DELTA: torch.int8}
        assert parts[DELTA].abs().max() <= 9
        back = HalfReference().decode({**parts, ROUNDED: x.bfloat16()}, spec)
        assert same(back, half)
    with pytest.raises(RefusedError, match="fp16"):
        HalfReference().encode(near * 2 + 1, companions={ROUNDED: x.bfloat16()})


@pytest.mark.slow
def test_a_copy_in_fp16_costs_a_fraction_of_itself(tmp_path):
    weights = {name: torch.randn(shape) * 0.05 for name, shape in {"a": (1000, 1200), "b": (512, 512)}.items()}
    optimizer = adamw(list(weights.values()), master_param=weights.values())
    tree = {"model": {name: w.half() for name, w in weights.items()}, "optimizer": optimizer}
    manifest, path = written(tree, tmp_path)
    assert not ckpt8.verify(path, tmp_path / "run.pt").failures
    numel = sum(w.numel() for w in weights.values())
    stored = sum(record.stored_bytes for record in manifest.storages if record.dtype is DType.FLOAT16)
    assert stored < 0.45 * numel
    assert (tmp_path / "run.pt").stat().st_size > 2.7 * path.stat().st_size
    predicted = inspect_checkpoint(tmp_path / "run.pt")["predicted"]["flash"]["bytes"]
    assert 0.95 < predicted / path.stat().st_size < 1.05


def test_masters_that_a_codec_refuses_do_not_matter(tmp_path):
    """A NaN has the masters stored lossless; the copy is the same, NaN among it."""
    weights = masters()
    weights["embed.weight"][200, 5] = torch.nan
    manifest, path = written(tree_in(torch.float16, "apex", weights), tmp_path)
    assert ("reference16/1", None) in of_copies(manifest, DType.FLOAT16)
    assert not ckpt8.verify(path, tmp_path / "run.pt").failures
    masters_of = {record.codec["id"] for record in manifest.storages if record.dtype is DType.FLOAT32}
    assert "lossless/1" in masters_of


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", ["fp32_groups_flat", "main_params", "of_any_name"])
def test_flat_masters_under_any_key(key, dtype, tmp_path):
    weights = masters()
    whole = torch.cat([w.flatten() for w in weights.values()])
    tree = {"model": {name: w.to(dtype) for name, w in weights.items()}, key: [whole], "opt": adamw([whole])}
    assert of_copies(written(tree, tmp_path)[0], DType.from_label(str(dtype))) == {(REFERENCES[dtype], None)}
