"""torch.distributed.checkpoint: directories that real processes wrote, there and back, and training that goes on."""

from __future__ import annotations

import make_dcp
import pytest
import torch
import torch.distributed as dist
from dcp_kit import adam_state, gaps, load_all, run_processes, save_small
from members_kit import tree

import ckpt8
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.codecs.error_stats import UpdateError
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import UnsupportedError, UsageError
from ckpt8.inspecting.container import inspect_container

pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUTS = ["nested", "flat", "threads", "titan"]
LARGE = ["up.weight", "down.weight"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What two ranks of FSDP2 saved on their way, and the losses of the steps that followed."""
    root = tmp_path_factory.mktemp("trained")
    return root, run_processes("train", root)


@pytest.fixture(scope="module")
def packed(trained, tmp_path_factory):
    """Every layout compressed with flash, and restored: (container, directory)."""
    root, _ = trained
    folder = tmp_path_factory.mktemp("packed")
    found = {}
    for layout in [*LAYOUTS, "zstd"]:
        container = folder / f"{layout}.ckpt8"
        ckpt8.compress(root / layout, container)
        found[layout] = container, ckpt8.restore(container, folder / layout)
    return found


# There and back


@pytest.mark.parametrize("layout", [*LAYOUTS, "zstd"])
def test_slices_of_state_are_paired_with_those_of_weights(layout, trained):
    """By name, on both ranks, as slices of one optimizer."""
    with open_source(trained[0] / layout) as source:
        plan = plan_bundle(source, Policy.of("archive"))
    names = {stream.index: stream.spec.name.partition(":")[2] for stream in plan.streams}
    parameters = [unit.parameter for unit in plan.units if unit.parameter is not None]
    assert len(parameters) == 12
    assert {(p.step.optimizer, p.step.lr, p.step.beta1, p.step.beta2) for p in parameters} == {(0, 2e-3, 0.9, 0.99)}
    # With several files for each rank, a weight and its moments may be in two.
    assert all(names[p.step.weight].removeprefix("model.") == p.name.partition(":")[2] for p in parameters)


@pytest.mark.by_default("zstd")
@pytest.mark.parametrize("layout", [*LAYOUTS, "zstd"])
def test_lossless_is_the_same_directory(layout, trained, tmp_path):
    original = trained[0] / layout
    manifest = ckpt8.compress(original, tmp_path / "x.ckpt8", preset="lossless")
    assert tree(ckpt8.restore(tmp_path / "x.ckpt8", tmp_path / "back")) == tree(original)
    assert not ckpt8.verify(tmp_path / "x.ckpt8", original).failures
    formats = {member.path: member.format for member in manifest.members}
    assert formats.pop(".metadata") == "file"
    assert set(formats.values()) == {"file" if layout == "zstd" else "dcp"}


@pytest.mark.parametrize("layout", [*LAYOUTS, "zstd"])
def test_values_are_within_the_bounds_of_their_codecs(layout, trained, packed):
    before, after = load_all(trained[0] / layout), load_all(packed[layout][1])
    assert list(before) == list(after)
    lossy = 0
    for name, x in before.items():
        y = after[name]
        if not isinstance(x, torch.Tensor):
            assert x == y
        elif not any(large in name for large in LARGE) or name.endswith("step"):
            assert torch.equal(x, y), name
        else:
            lossy += 1
            halves = x.shape[0] - x.shape[0] // 2
            for a, b in zip(x.split(halves), y.split(halves), strict=True):
                assert 0 < _largest_error(name, a.flatten().double(), b.flatten().double()) <= 1
    assert lossy == 6


def _largest_error(name, x, y):
    """The largest error in units of what the codec allows.

    Of a weight a 254th of half a bf16 ulp, which is 2^-8 of it, and a unit of fp32; of a moment, a part of the scale
    of its group of 32.
    """
    if name.endswith("exp_avg_sq"):
        x, y, share = x.sqrt(), y.sqrt(), 1.001 / (2 * 255)
    elif name.endswith("exp_avg"):
        share = 1.01 / 127
    else:
        return ((x - y).abs() / ((2.0**-8 / 254 + 2.0**-23) * x.abs())).max()
    groups = torch.nn.functional.pad(x, (0, -len(x) % 32)).view(-1, 32)
    scale = groups.abs().amax(dim=1).repeat_interleave(32)[: len(x)]
    return ((x - y).abs() / (share * scale * 1.005)).max()


# Training goes on


def test_training_goes_on_at_two_ranks(trained, packed, tmp_path):
    root, expected = trained
    for layout in ("nested", "flat"):
        ckpt8.compress(root / layout, tmp_path / "x.ckpt8", preset="lossless", force=True)
        ckpt8.restore(tmp_path / "x.ckpt8", tmp_path / f"{layout}-lossless")
    exact = [tmp_path / "nested-lossless", tmp_path / "flat-lossless"]
    close = [packed[layout][1] for layout in ("nested", "flat", "threads", "zstd")]
    losses = run_processes("resume", tmp_path, *exact, *close)
    for directory in exact:
        assert losses[str(directory)] == expected
    for directory in close:
        assert losses[str(directory)] == pytest.approx(expected, rel=1e-4)
        assert losses[str(directory)] != expected


def test_training_goes_on_without_processes(trained, packed):
    for directory, tolerance in ((trained[0] / "nested", 1e-6), (packed["nested"][1], 1e-4)):
        assert go_on(directory, "nested") == pytest.approx(trained[1], rel=tolerance)


def go_on(directory, layout, **options):
    net, optimizer = make_dcp.make(**options)
    loaded = make_dcp.load(directory, net, optimizer, flat=layout == "flat")
    assert loaded["iteration"] == make_dcp.BEFORE
    return [make_dcp.step(net, optimizer, make_dcp.BEFORE + k) for k in range(make_dcp.AFTER)]


# Names, roles, update space


@pytest.mark.parametrize("layout", [*LAYOUTS, "zstd"])
def test_names_and_roles(layout, packed):
    facts = inspect_container(packed[layout][0], tensors=True)
    tensors = {tensor["name"].partition(":")[2]: tensor for tensor in facts["tensors"]}
    model = "" if layout == "titan" else "model."
    expected = {
        f"{model}up.weight[0:129,:]": ("weight", "split24/1", None),
        f"{model}up.weight[129:257,:]": ("weight", "split24/1", None),
        # Nothing says of a name without a dot at the top that it is of the model.
        f"{model}running_mean": ("weight", "lossless/1", "buffer") if model else ("other", "lossless/1", None),
        f"{model}norm.weight[0:129]": ("weight", "lossless/1", "small"),
        "optimizer.state.up.weight.exp_avg[129:257,:]": ("moment1", "companded8/1", None),
        "optimizer.state.down.weight.exp_avg_sq[0:32,:]": ("moment2", "companded8/1(Q=255)", None),
        "optimizer.state.up.weight.step": ("other", "lossless/1", None),
        ("train_state.step" if layout == "titan" else "history.losses.1"): ("other", "lossless/1", None),
    }
    for name, (role, codec, reason) in expected.items():
        found = tensors[name]
        assert (found["role"], found["codec"].replace("signed=False, ", ""), found["reason"]) == (role, codec, reason)
    parameters = {parameter["name"].partition(":")[2] for parameter in facts["parameters"]}
    large = {"up.weight[0:129,:]", "up.weight[129:257,:]", "down.weight[0:32,:]", "down.weight[32:64,:]"}
    assert large < parameters
    assert len(parameters) == 12
    assert {member["format"] for member in facts["members"] if member["path"] != ".metadata"} == {"dcp"}


@pytest.mark.parametrize("layout", ["nested", "flat", "threads", "titan", "zstd"])
def test_update_space(layout, trained, packed):
    """The figures of every slice, computed anew in float64 from what torch loads of both directories."""
    before, after = load_all(trained[0] / layout), load_all(packed[layout][1])
    with ContainerReader(packed[layout][0]) as reader:
        found = {record.name.partition(":")[2]: record for record in reader.manifest.parameters}
    checked = 0
    for name, rows in (("up.weight", 129), ("down.weight", 32)):
        for number, part in enumerate(("first", "second")):
            u, v = (_updates(values, name).split(rows)[number] for values in (before, after))
            stop = rows if part == "first" else before[f"optimizer.state.{name}.exp_avg"].shape[0]
            record = found[f"{name}[{stop - len(u)}:{stop},:]"]
            assert record.rule["kind"] == "adam"
            assert (record.rule["step"], record.rule["beta2"]) == (make_dcp.BEFORE, 0.99)
            nmse = ((u - v).square().sum() / u.square().sum()).item()
            assert UpdateError(**record.error).nmse == pytest.approx(nmse, rel=1e-3)
            assert 0 < nmse < 2e-4
            assert record.error["max_error"] == pytest.approx((u - v).abs().max().item(), rel=1e-3)
            checked += 1
    assert checked == 4


def _updates(values, name):
    m, v, step = (values[f"optimizer.state.{name}.{key}"].double() for key in ("exp_avg", "exp_avg_sq", "step"))
    return m / (1 - 0.9**step) / ((v / (1 - 0.99**step)).sqrt() + 1e-8)


# Other ways in


def test_slices_of_a_file_by_name(trained, packed):
    container, back = packed["nested"]
    expected = load_all(back)
    loaded = ckpt8.load(container, member="__1_0.distcp")
    assert torch.equal(loaded["model.up.weight[129:257,:]"], expected["model.up.weight"][129:])
    assert loaded["optimizer.state.up.weight.step"].shape == ()
    assert next(iter(ckpt8.load(container, member="__1_0.distcp", map_location="meta").values())).is_meta
    with ckpt8.open(container) as file:
        name = "__0_0.distcp:optimizer.state.down.weight.exp_avg[0:32,:]"
        assert torch.equal(file.get_tensor(name), expected["optimizer.state.down.weight.exp_avg"][:32])
        assert file.stats(name)["role"] == "moment1"
    with pytest.raises(UsageError, match=r"'\.metadata' is no checkpoint"):
        ckpt8.load(container, member=".metadata")
    with pytest.raises(UnsupportedError, match=r"restore it and load it with torch\.distributed\."):
        ckpt8.resume(container, model=torch.nn.Linear(2, 2), member="__0_0.distcp")


def test_checkpoints_in_folders(tmp_path):
    """As Trainer and accelerate lay out FSDP: a folder for the model and one for the optimizer, among other files."""
    root = tmp_path / "checkpoint-5"
    weights = {"embed.weight": torch.randn(90, 70), "head.weight": torch.randn(70, 90)}
    save_small({"model": weights}, root / "pytorch_model_fsdp_0")
    save_small({"optimizer": adam_state(weights)}, root / "optimizer_0")
    (root / "trainer_state.json").write_text("{}")
    manifest = ckpt8.compress(root)
    assert {record.name for record in manifest.parameters} == {f"optimizer_0/__0_0.distcp:{name}" for name in weights}
    assert all(record.error is not None for record in manifest.parameters)
    roles = {record.name: record.role.value for record in manifest.storages}
    assert roles["pytorch_model_fsdp_0/__0_0.distcp:model.embed.weight"] == "weight"
    back = ckpt8.restore(tmp_path / "checkpoint-5.ckpt8", tmp_path / "back")
    for folder in ("pytorch_model_fsdp_0", "optimizer_0"):
        before, after = load_all(root / folder), load_all(back / folder)
        assert all(
            a == after[n] if not isinstance(a, torch.Tensor) else a.shape == after[n].shape for n, a in before.items()
        )


def test_a_bare_state_dict_and_odd_tensors(tmp_path):
    """No optimizer, no keys of a model; strides, empty tensors, other element types."""
    saved = {
        "a": torch.randn(70, 80).T,
        "b.c": torch.randn(4, 70, 16, 3).to(memory_format=torch.channels_last),
        "empty": torch.zeros(0, 5),
        "half": torch.randn(80, 80).bfloat16(),
        "count": torch.arange(5000),
    }
    root = save_small(saved, tmp_path / "run")
    manifest = ckpt8.compress(root)
    assert {record.role.value for record in manifest.storages if "skeleton" not in record.name} == {"weight"}
    after = load_all(ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back"))
    for name, tensor in saved.items():
        torch.testing.assert_close(after[name], tensor, rtol=2e-5 if name in ("a", "b.c") else 0, atol=0)
    loaded = ckpt8.load(tmp_path / "run.ckpt8", member="__0_0.distcp")
    for name in saved:
        assert torch.equal(loaded[name], after[name])
    assert not ckpt8.verify(tmp_path / "run.ckpt8", root).failures


def test_a_shard_alone_is_refused_and_kept(trained, tmp_path):
    shard = trained[0] / "nested" / "__0_0.distcp"
    for source in (shard, trained[0] / "zstd" / "__0_0.distcp"):
        with pytest.raises(UnsupportedError, match=r"without the \.metadata .* give the folder") as caught:
            ckpt8.compress(source, tmp_path / "x.ckpt8")
        assert "\n" not in str(caught.value)
    root = save_small({"model": {"w": torch.randn(80, 80)}}, tmp_path / "run")
    (root / "__7_0.distcp").write_bytes(shard.read_bytes())
    facts = {m.path: m.format for m in ckpt8.compress(root).members}
    assert (facts["__0_0.distcp"], facts["__7_0.distcp"]) == ("dcp", "file")
    reasons = {row["names"][0]: row["reason"] for row in inspect_container(tmp_path / "run.ckpt8")["lossless"]}
    assert "without the .metadata" in reasons["__7_0.distcp:ckpt8.skeleton"]
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    assert (back / "__7_0.distcp").read_bytes() == shard.read_bytes()


def test_a_per_rank_file_of_dtensors_is_refused_alone_and_read_in_a_folder(trained, tmp_path):
    rank = trained[0] / "rank0.pt"
    with pytest.raises(UnsupportedError, match=r"the file of one rank.*give the folder with the files of all ranks"):
        ckpt8.compress(rank, tmp_path / "x.ckpt8")
    root = save_small({"model": {"w": torch.randn(80, 80)}}, tmp_path / "run")
    (root / "rank0.pt").write_bytes(rank.read_bytes())
    manifest = ckpt8.compress(root, preset="lossless")
    assert {member.path: member.format for member in manifest.members}["rank0.pt"] == "torch-zip"
    assert "rank0.pt:up.weight[0:129,:]" in {tensor.name for tensor in manifest.tensors}
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    assert (back / "rank0.pt").read_bytes() == rank.read_bytes()


@pytest.fixture
def alone(tmp_path):
    """A process group of gloo that this process has to itself."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_bytes_of_slices_change(layout, trained, packed):
    original, (container, back) = trained[0] / layout, packed[layout]
    before, after = tree(original), tree(back)
    assert list(before) == list(after)
    assert before[".metadata"] == after[".metadata"]
    files = [name for name in before if name != ".metadata"]
    # Of a slice that changed, the checksums changed with it: Python's zipfile finds them right in all of them.
    holes, again = gaps(original, files), gaps(back, files)
    assert holes == again
    changed = 0
    for name in files:
        assert len(before[name]) == len(after[name])
        x, y = bytearray(before[name]), bytearray(after[name])
        for start, length in holes[name]:
            changed += x[start : start + length] != y[start : start + length]
            x[start : start + length] = y[start : start + length] = bytes(length)
        # What is left to differ are two checksums of 4 bytes for each of the slices that changed.
        differ = sum(a != b for a, b in zip(x, y, strict=True))
        assert differ <= 8 * changed
    assert changed == 12
    assert not ckpt8.verify(container, original).failures


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["nested", "flat", "zstd"])
def test_training_goes_on_at_one_rank(layout, trained, packed, alone):
    """The slices of two ranks become those of one."""
    for directory, tolerance in ((trained[0] / layout, 1e-6), (packed[layout][1], 1e-4)):
        assert go_on(directory, layout, sharded=True) == pytest.approx(trained[1], rel=tolerance)


def test_parameters_of_a_raw_optimizer_have_the_names_of_their_places(tmp_path):
    weights = {"0": torch.randn(80, 80), "1": torch.randn(80, 80)}
    root = save_small({"optimizer": adam_state(weights), "epoch": 3}, tmp_path / "run")
    names = [record.name for record in ckpt8.compress(root).parameters]
    assert names == ["__0_0.distcp:optimizer.state.0", "__0_0.distcp:optimizer.state.1"]


@pytest.mark.slow
def test_a_rule_names_a_tensor_or_a_slice(trained, tmp_path):
    for glob in ("*:model.up.weight", "__0_0.distcp:model.up.weight[[]0:129,:]"):
        ckpt8.compress(trained[0] / "nested", tmp_path / "x.ckpt8", rules=[f"{glob}=lossless"], force=True)
        facts = inspect_container(tmp_path / "x.ckpt8", tensors=True)
        codecs = {t["name"]: t["codec"] for t in facts["tensors"] if "model.up.weight" in t["name"]}
        assert codecs["__0_0.distcp:model.up.weight[0:129,:]"] == "lossless/1"
        assert (codecs["__1_0.distcp:model.up.weight[129:257,:]"] == "lossless/1") == glob.startswith("*")
    with pytest.raises(UsageError, match="matches no tensor"):
        ckpt8.compress(trained[0] / "nested", tmp_path / "y.ckpt8", rules=["*:model.upp.weight=lossless"])


def test_tied_tensors_are_written_twice_and_come_back_equal(tmp_path):
    tied = torch.randn(90, 80)
    root = save_small({"model": {"wte.weight": tied, "lm_head.weight": tied}}, tmp_path / "run")
    ckpt8.compress(root)
    after = load_all(ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back"))
    assert torch.equal(after["model.wte.weight"], after["model.lm_head.weight"])
    assert not torch.equal(after["model.wte.weight"], tied)
