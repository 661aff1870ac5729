"""Distributed checkpoints as a source: slices, in boxes of any cut, become the tensors that torch itself puts together.

Those that are damaged or made to harm get one line; nothing is written or executed.
"""

import functools
import random
import shutil

import make_dcp
import pytest
import torch
import torch.distributed.checkpoint as dcp
from converting_kit import assert_trees_equal, checkpoint, converted, refused, refused_or_done, trained
from dcp_kit import adam_state, change_metadata, load_all, save_in_pieces, save_small
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import torch_save_to_dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckpt8
from ckpt8.converting.sources import open_content
from ckpt8.core.errors import InputError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUTS = ["nested", "flat", "threads", "zstd", "titan"]
GROUPS = [["up.weight", "down.weight"], ["up.bias", "down.bias"], ["norm.weight", "norm.bias"]]
ALIKE = [GROUPS[0] + GROUPS[1], GROUPS[2]]
"""Groups of equal settings are one where every parameter has its own."""


# What processes wrote


@pytest.mark.by_default("nested-raw", "zstd-raw")
@pytest.mark.parametrize("form", ["raw", "lossless", "flash"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tensors_by_name(layout, form, distributed, tmp_path):
    source = original = distributed[0] / layout
    if form != "raw":
        source = tmp_path / "run.ckpt8"
        ckpt8.compress(original, source, preset=form)
        original = ckpt8.restore(source, tmp_path / "back")
    expected = load_all(original)
    found = converted(source, tmp_path)
    prefix = "" if layout == "titan" else "model."
    assert sorted(found["model"]) == sorted(make_dcp.Net().state_dict())
    for name, value in found["model"].items():
        assert torch.equal(value, expected[prefix + name])
    groups = found["optimizer"]["param_groups"]
    flat = layout in ("flat", "titan")
    assert [group["param_names"] for group in groups] == (ALIKE if flat else GROUPS)
    assert [group["weight_decay"] for group in groups] == [*([0.01] * (len(groups) - 1)), 0.0]
    assert all((group["lr"], group["betas"]) == (2e-3, (0.9, 0.99)) for group in groups)
    names = {k: name for group in groups for k, name in zip(group["params"], group["param_names"], strict=True)}
    assert sorted(found["optimizer"]["state"]) == sorted(names) == list(range(6))
    for number, state in found["optimizer"]["state"].items():
        assert sorted(state) == ["exp_avg", "exp_avg_sq", "step"]
        for key, value in state.items():
            assert torch.equal(value, expected[f"optimizer.state.{names[number]}.{key}"])
    if layout == "titan":
        assert found["train_state"] == {"step": torch.tensor(4)}
    else:
        assert found["iteration"] == make_dcp.BEFORE
        assert_trees_equal(found["history"], {"losses": [1.5, torch.ones(3)]})


def test_training_goes_on_in_one_process_without_distributed_checkpoints(distributed, tmp_path):
    for layout, same_groups in (("nested", True), ("flat", False)):
        found = converted(distributed[0] / layout, tmp_path)
        net, optimizer = make_dcp.make()
        net.load_state_dict(found["model"])
        if not same_groups:
            groups = optimizer.param_groups
            merged = [p for group in groups[:2] for p in group["params"]]
            optimizer = torch.optim.AdamW([{"params": merged}, {"params": groups[2]["params"]}])
        optimizer.load_state_dict(found["optimizer"])
        losses = [make_dcp.step(net, optimizer, make_dcp.BEFORE + k) for k in range(make_dcp.AFTER)]
        assert losses == pytest.approx(distributed[1], rel=1e-6)


OPTIMIZERS = {
    "adafactor": torch.optim.Adafactor,
    "amsgrad": functools.partial(torch.optim.Adam, amsgrad=True),
    "lr in a tensor": functools.partial(torch.optim.AdamW, lr=torch.tensor(2e-3)),
    "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    "no state": torch.optim.SGD,
    "rmsprop": torch.optim.RMSprop,
}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_of_torch(kind, flat, tmp_path):
    model, optimizer = trained(OPTIMIZERS[kind])
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))
    found = converted(save_small(saved, tmp_path / "run"), tmp_path)
    again = OPTIMIZERS[kind](model.parameters())
    again.load_state_dict(found["optimizer"])
    groups = again.state_dict()["param_groups"]
    names = [name for name, _ in model.named_parameters()]
    assert [group.pop("param_names") for group in groups] == [names]
    expected = optimizer.state_dict()
    assert_trees_equal(*([dict(sorted(each.items())) for each in own] for own in (groups, expected["param_groups"])))
    assert_trees_equal(again.state_dict()["state"], expected["state"])


def test_a_bare_state_dict(tmp_path):
    saved = {"a.weight": torch.randn(7, 3).T, "b": torch.tensor(3), "empty": torch.zeros(0, 4)}
    saved["c"] = torch.ones(2).cfloat()
    found = converted(save_small(saved, tmp_path / "run"), tmp_path)
    assert_trees_equal(found, saved)
    ckpt8.convert(tmp_path / "run", tmp_path / "x.safetensors", dtype="float32")
    assert torch.equal(load_file(tmp_path / "x.safetensors")["a.weight"], saved["a.weight"])


def test_names_without_paths(tmp_path):
    """A planner that does not flatten keeps no paths."""
    weights = {"up.weight": torch.randn(4, 3)}
    state = adam_state(weights)
    flat = {"model.up.weight": weights["up.weight"]}
    flat |= {f"optimizer.state.up.weight.{key}": value for key, value in state["state"]["up.weight"].items()}
    flat |= {f"optimizer.param_groups.0.{key}": value for key, value in state["param_groups"][0].items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(flat, checkpoint_id=tmp_path / "run", planner=planner, no_dist=True)
    found = converted(tmp_path / "run", tmp_path)
    assert_trees_equal(found["model"], weights)
    assert found["optimizer"]["param_groups"][0]["param_names"] == ["up.weight"]
    assert_trees_equal(found["optimizer"]["state"], {0: state["state"]["up.weight"]})


def test_tied_weights_are_one_again(run, tmp_path):
    saved = {"model": run[0].state_dict(), "optimizer": run[1].state_dict()}
    found = converted(save_small(saved, tmp_path / "run"), tmp_path)
    assert found["model"]["lm_head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
    assert ckpt8.convert(tmp_path / "run", tmp_path / "x.safetensors").aliases == ["lm_head.weight"]
    for k, value in ((0, 1.0), (-1, 1.0), (slice(None), 0.0)):
        untied = saved["model"] | {"lm_head.weight": saved["model"]["embed.weight"].clone()}
        untied["lm_head.weight"].view(-1)[k] = value
        untied["embed.weight"] = torch.zeros(64, 96) if value == 0 else untied["embed.weight"]
        found = converted(save_small({"model": untied}, tmp_path / "run", overwrite=True), tmp_path)
        assert_trees_equal(found["model"], dict(untied))
        assert found["model"]["lm_head.weight"].data_ptr() != found["model"]["embed.weight"].data_ptr()


# Values, folders, what cannot be converted


class Odd:
    """An object that holds a tensor."""

    def __init__(self):
        self.tensor = torch.ones(3)


def test_an_object_with_tensors_is_left_out_with_a_note(tmp_path):
    saved = {"model": {"w": torch.ones(4)}, "pair": (torch.arange(3), [torch.ones(2)]), "n": {"k": {1, 2}}}
    root = save_small({"odd": Odd(), **saved}, tmp_path / "run")
    report = ckpt8.convert(root, tmp_path / "x.pt")
    assert [note for note in report.notes if "'odd'" in note and "left out" in note]
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert_trees_equal(found, saved)


def test_a_model_and_an_optimizer_in_folders(tmp_path):
    """As Trainer and accelerate lay out FSDP."""
    weights = {"embed.weight": torch.randn(9, 7), "head.weight": torch.randn(7, 9)}
    state = adam_state(weights)
    root = tmp_path / "checkpoint-5"
    save_small({"model": weights}, root / "pytorch_model_fsdp_0")
    save_small({"optimizer": state}, root / "optimizer_0")
    (root / "trainer_state.json").write_text("{}")
    ckpt8.compress(root, tmp_path / "run.ckpt8", preset="lossless")
    for source in (root, tmp_path / "run.ckpt8"):
        found = converted(source, tmp_path)
        assert_trees_equal(found["model"], weights)
        assert_trees_equal(list(found["optimizer"]["state"].values()), list(state["state"].values()))
        report = ckpt8.convert(source, tmp_path / "trainer", to="trainer", force=True)
        assert not [note for note in report.notes if "trainer_state" in note]
        assert torch.equal(load_file(tmp_path / "trainer" / "model.safetensors")["head.weight"], weights["head.weight"])


def test_two_checkpoints_of_the_same_names(tmp_path):
    for number in (1, 2):
        save_small({"model": {"w.x": torch.full((3,), number)}}, tmp_path / "runs" / f"step-{number}")
    ckpt8.compress(tmp_path / "runs", tmp_path / "runs.ckpt8")
    for source in (tmp_path / "runs", tmp_path / "runs.ckpt8"):
        refused(source, tmp_path, r"several .*'model'.*--member: step-1, step-2$", UsageError)
        refused(source, tmp_path, r"is not one of step-1, step-2$", UsageError, member="step-3")
        for number in (1, 2):
            assert converted(source, tmp_path, member=f"step-{number}")["model"]["w.x"].tolist() == [number] * 3


def test_paths_that_contradict_each_other(tmp_path):
    saved = {"model": {"w": torch.ones(4), "w.x": torch.ones(2)}}
    root = save_small(saved, tmp_path / "run")
    change_metadata(root, lambda m: m.planner_data.update({"model.w.x": ("model", "w", "x")}))
    refused(root, tmp_path, r"'model\.w\.x' lies inside another value$")
    change_metadata(root, lambda m: setattr(m, "planner_data", {"model.w.x": ("model", "w", "x")}))
    refused(root, tmp_path, r"'model\.w' lies where another value does$")


def test_paths_that_are_long_or_lead_far(tmp_path):
    long = ".".join("a" * 5000)
    root = save_small({"model": {"w": torch.ones(4)}, "list": {"999999999": 3}, long: 1}, tmp_path / "run")
    change_metadata(root, lambda m: m.planner_data.update({"list.999999999": ("list", 999999999)}))
    assert converted(root, tmp_path)["list"] == {999999999: 3}
    change_metadata(root, lambda m: m.planner_data.update({long: tuple("a" * 5000)}))
    refused(root, tmp_path, "nested deeper than 1000")


@pytest.mark.parametrize("params", [[["w"]], [{}], ["w", 0], "w", [None], ["w", "w"], [], [0, 0], None])
def test_groups_that_make_no_sense(params, tmp_path):
    weights = {"w": torch.randn(5, 4)}
    state = adam_state(weights)
    state["param_groups"][0]["params"] = params
    root = save_small({"model": weights, "optimizer": state}, tmp_path / "run")
    for name, options in (("x.pt", {}), ("x", {"to": "dcp"}), ("y", {"to": "trainer"})):
        refused_or_done(root, tmp_path / name, **options)


def test_a_slice_that_is_damaged(distributed, tmp_path):
    root = save_small({"model": {"w": torch.ones(400), "b": torch.ones(2)}}, tmp_path / "run")
    file = root / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-900])
    refused(root, tmp_path, r"slice 'model\..' ends at byte")
    shutil.copytree(distributed[0] / "nested", tmp_path / "other")
    (tmp_path / "other" / "__1_0.distcp").unlink()
    refused(tmp_path / "other", tmp_path, r"names '__1_0\.distcp', which is not there")
    assert not list(tmp_path.glob(".*"))


def test_slices_that_nobody_can_decode(tmp_path):
    root = save_small({"model": {"w": torch.ones(400)}}, tmp_path / "run")

    def change(metadata):
        for place in metadata.storage_data.values():
            place.transform_descriptors = ["stream.other/1"]

    change_metadata(root, change)
    refused(root, tmp_path, r"'stream\.other/1', which is not known; it cannot be converted$")


def test_a_source_that_changes_while_it_is_read(tmp_path):
    weights = {"up.weight": torch.randn(40, 30)}
    for name, to in (("x.pt", "torch"), ("x.safetensors", "safetensors"), ("x", "dcp"), ("y", "trainer")):
        root = save_small({"model": weights, "optimizer": adam_state(weights)}, tmp_path / "run", overwrite=True)
        file = root / "__0_0.distcp"

        def change(_, file=file):
            file.write_bytes(file.read_bytes() + b"x")

        with pytest.raises(InputError, match="changed while it was read"):
            ckpt8.convert(root, tmp_path / name, to=to, progress=change)
        assert [each.name for each in tmp_path.iterdir()] == ["run"]


def halves(shape, dim, at):
    none, first, second, offsets = [0] * len(shape), [*shape], [*shape], [0] * len(shape)
    first[dim], second[dim], offsets[dim] = at, shape[dim] - at, at
    return [(none, first), (offsets, second)]


BOXES = {
    "rows": ((11, 7), halves((11, 7), 0, 6)),
    "columns": ((11, 7), halves((11, 7), 1, 3)),
    "inner": ((5, 4, 6), halves((5, 4, 6), 2, 5)),
    "middle": ((5, 4, 6), halves((5, 4, 6), 1, 1)),
    "grid": ((9, 8), [((r, c), (h, w)) for r, h in ((0, 5), (5, 4)) for c, w in ((0, 3), (3, 3), (6, 2))]),
    "pinwheel": ((3, 3), [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]),
    "with an empty one": ((6, 4), [((0, 0), (6, 4)), ((6, 0), (0, 4))]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("case", BOXES)
def test_boxes_become_the_tensor_that_torch_loads(case, dtype, tmp_path):
    shape, boxes = BOXES[case]
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(4)).to(dtype)
    root = save_in_pieces({"w.x": (tensor, boxes)}, tmp_path / "run")
    expected = load_all(root)["w.x"]
    assert torch.equal(expected, tensor)
    assert torch.equal(converted(root, tmp_path)["w.x"], expected)
    ckpt8.compress(root, tmp_path / "run.ckpt8", preset="lossless")
    assert torch.equal(converted(tmp_path / "run.ckpt8", tmp_path)["w.x"], expected)


@pytest.mark.parametrize("case", ["grid", "inner", "pinwheel"])
def test_any_stretch_of_a_tensor_in_boxes(case, tmp_path):
    shape, boxes = BOXES[case]
    tensor = torch.randn(shape)
    root = save_in_pieces({"w.x": (tensor, boxes)}, tmp_path / "run")
    chance = random.Random(5)
    with open_content(root) as content:
        for _ in range(200):
            start, stop = sorted(chance.choices(range(tensor.numel() + 1), k=2))
            found = content.data.elements(content.data.tree["w.x"], start, stop)
            assert torch.equal(found, tensor.flatten()[start:stop])


def drop(name, number):
    """Take one slice out of the metadata."""

    def change(metadata):
        index = [each for each in metadata.storage_data if each.fqn == name][number]
        del metadata.storage_data[index]
        chunks = metadata.state_dict_metadata[name].chunks
        metadata.state_dict_metadata[name].chunks = [each for each in chunks if each.offsets != index.offset]

    return change


@pytest.mark.parametrize(("number", "there"), [(0, 57), (3, 60), (5, 64)])
def test_a_slice_that_is_missing(number, there, tmp_path):
    shape, boxes = BOXES["grid"]
    pieces = {"w.x": (torch.randn(shape), boxes), "w.y": (torch.ones(2), [((0,), (2,))])}
    root = save_in_pieces(pieces, tmp_path / "run")
    change_metadata(root, drop("w.x", number))
    refused(root, tmp_path, rf"'w\.x': slices are missing: {there} of 72 elements are there")


@pytest.mark.parametrize(
    ("boxes", "match"),
    [
        ([((0, 0), (4, 4)), ((3, 0), (3, 4))], "overlap"),
        ([((0, 0), (6, 4)), ((2, 2), (1, 1))], "overlap"),
        ([((0, 0), (3, 4)), ((2, 0), (3, 4))], "overlap"),  # as many elements as there are, with a gap
        ([((0, 0), (2, 4)), ((1, 0), (2, 4))], "missing"),
    ],
)
def test_slices_that_overlap(boxes, match, tmp_path):
    root = save_in_pieces({"w.x": (torch.randn(6, 4), boxes)}, tmp_path / "run")
    refused(root, tmp_path, rf"'w\.x': .*{match}")


def test_what_torch_makes_of_a_file(run, tmp_path):
    """Numbers for parameters: they become text in a distributed checkpoint, and numbers again here."""
    saved = {**checkpoint(*run), "history": [1.5, {"loss": torch.ones(3)}], "pair": (torch.arange(4), "x")}
    torch.save(saved, tmp_path / "run.pt")
    torch_save_to_dcp(tmp_path / "run.pt", tmp_path / "run")
    assert_trees_equal(converted(tmp_path / "run", tmp_path), {**saved, "model": dict(saved["model"])})
