"""Which rank writes what: the plans of many ranks, without data."""

from __future__ import annotations

import itertools
from collections import defaultdict
from math import prod

import pytest
import torch
from plans_kit import MOMENTS, adam_items, homes, llama, loads, mesh_plans, tensor_item, together, whole
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckpt8.container.collecting import RankFile, collect
from ckpt8.container.sharded import GlobalTensor
from ckpt8.core.tensors import DType, Role
from ckpt8.integrations.dcp import Ckpt8SavePlanner
from ckpt8.integrations.dcp.planner import count_parted
from ckpt8.integrations.dcp.rank_file import Copy, without_copies

SHAPES = llama(layers=2)


def share(plans, **state):
    """The plans that the ranks get."""
    planner = Ckpt8SavePlanner()
    planner.state_dict = state
    return planner.create_global_plan(plans)[0]


def plan_of(*items):
    return SavePlan([*items], planner_data={})


def ranks_of(plans):
    """The rank that writes a value, by its name, where that is one slice."""
    return {name: ranks[0] for (name, _), ranks in homes(plans).items()}


@pytest.mark.by_default("{'replicas': 2}", "{'replicas': 7}")
@pytest.mark.parametrize(
    "mesh",
    [
        *({"replicas": 2}, {"replicas": 7}, {"replicas": 64}, {"replicas": 4, "shards": 4}),
        *({"shards": 4, "tensor_parallel": 4}, {"replicas": 2, "shards": 3, "tensor_parallel": 2}, {"shards": 6}),
    ],
    ids=str,
)
def test_one_rank_writes_weight_and_moments_of_a_slice(mesh):
    plans = mesh_plans(SHAPES, **mesh)
    shared = share(plans)
    found = homes(shared)
    assert found.keys() == homes(plans).keys()
    assert all(len(ranks) == 1 and ranks[0] in homes(plans)[key] for key, ranks in found.items())
    assert together(shared, SHAPES) == 1
    assert shared == share(plans)
    ranks = len(plans)
    largest = prod(SHAPES["lm_head.weight"]) * 10 / (mesh.get("shards", 1) * mesh.get("tensor_parallel", 1))
    assert max(loads(shared)) <= sum(loads(shared)) / ranks + largest


@pytest.mark.parametrize(("replicas", "share_of_torch"), [(2, 0.5), pytest.param(64, 0.1, marks=pytest.mark.slow)])
def test_a_llama_of_8_b_stays_together_where_torch_takes_it_apart(replicas, share_of_torch):
    plans = mesh_plans(llama(), replicas=replicas)
    assert together(share(plans), llama()) == 1
    assert together(DefaultSavePlanner().create_global_plan(plans)[0], llama()) < share_of_torch


def index_of(plans):
    """The tensors of the index of a save with these plans."""
    files, shapes = [], {}
    for rank, plan in enumerate(plans):
        data = [(item.index.fqn, item.tensor_data) for item in plan.items if item.tensor_data is not None]
        shapes |= {name: each.size for name, each in data}
        boxes = [(name, each.chunk.offsets, each.chunk.sizes) for name, each in data if prod(each.chunk.sizes)]
        files.append(RankFile.of(f"__{rank}_0.ckpt8", "0" * 64, boxes))
    names = [file.file for file in files]
    layouts = collect(files, {name: tuple(shape) for name, shape in shapes.items()})
    return {name: GlobalTensor(DType.FLOAT32, tuple(shapes[name]), layout, names) for name, layout in layouts.items()}


@pytest.mark.parametrize("mesh", [{"replicas": 2}, {"replicas": 3, "shards": 4}, {"shards": 8, "tensor_parallel": 4}])
def test_parameters_that_are_taken_apart_are_counted(mesh):
    plans = mesh_plans(SHAPES, **mesh)
    apart = DefaultSavePlanner().create_global_plan(plans)[0]
    expected = round((1 - together(apart, SHAPES)) * len(SHAPES))
    assert expected > 0
    assert count_parted(index_of(apart)) == (expected, len(SHAPES))
    assert count_parted(index_of(share(plans))) == (0, len(SHAPES))
    # There are no masters here.
    assert count_parted(index_of(apart), {Role.WEIGHT}) == (0, 0)


def test_only_boxes_that_are_the_same_are_compared():
    """A parameter whose weight is whole and whose moments are cut is not what a planner takes apart."""
    shape, halves = (8, 4), [((0, 0), (4, 4)), ((4, 0), (4, 4))]
    moments = [[tensor_item(f"optim.state.w.{key}", shape, half) for key in MOMENTS] for half in halves]
    weight = tensor_item("model.w", shape, whole(shape))
    assert count_parted(index_of([plan_of(weight, *moments[0]), plan_of(*moments[1])])) == (0, 1)
    # An average of the weights counts for nothing where the weight itself is with its moments.
    copy = tensor_item("ema.w", shape, whole(shape))
    moments = [tensor_item(f"optim.state.w.{key}", shape, whole(shape)) for key in MOMENTS]
    assert count_parted(index_of([plan_of(weight, *moments), plan_of(copy)])) == (0, 1)
    assert count_parted(index_of([plan_of(weight, copy), plan_of(*moments)])) == (1, 1)
    assert count_parted(index_of([plan_of(weight, moments[0]), plan_of(moments[1])])) == (1, 1)
    # A grid beside boxes that are none: half of a tensor.
    half = [tensor_item(f"optim.state.w.{key}", shape, halves[0]) for key in MOMENTS]
    assert count_parted(index_of([plan_of(half[0]), plan_of(half[1])])) == (1, 1)


def test_masters_apart_from_their_weights_are_counted():
    shape = (8, 4)
    weight, master = (tensor_item(name, shape, whole(shape)) for name in ("model.w", "optim.state.w.master_param"))
    assert count_parted(index_of([plan_of(weight), plan_of(master)]), {Role.WEIGHT}) == (1, 1)
    assert count_parted(index_of([plan_of(weight, master)]), {Role.WEIGHT}) == (0, 1)


def test_numbers_and_objects_go_to_the_lowest_rank_that_has_them():
    note = WriteItem(MetadataIndex("optimizer.param_groups.0.weight.lr"), WriteItemType.BYTE_IO)
    plans = mesh_plans(SHAPES, replicas=4)
    plans = [SavePlan([*plan.items, note] if rank else plan.items, planner_data={}) for rank, plan in enumerate(plans)]
    found = ranks_of(share(plans))
    assert found.pop(note.index.fqn) == 1
    assert {rank for name, rank in found.items() if name.endswith(".step")} == {0}


AVERAGES = {"exp_avg_sq_row": -1, "exp_avg_res_row": -1, "exp_avg_sq_col": -2, "exp_avg_res_col": -2}


def came_items(name, shape, box, sharded):
    """Weight, first moment and averages of a slice."""
    state = f"optim.state.{name}"
    found = [tensor_item(f"model.{name}", shape, box), tensor_item(f"{state}.exp_avg", shape, box)]
    for key, gone in AVERAGES.items() if len(shape) > 1 else ():
        own, *place = (each[: len(shape) + gone] + each[len(shape) + gone + 1 :] for each in (shape, *box))
        found.append(tensor_item(f"{state}.{key}", own, place))
    return found


CAME_SHAPES = {f"{layer}.weight": (96 + layer, 64) for layer in range(9)} | {"norm.weight": (48,)}


@pytest.mark.parametrize(
    "mesh", [{"replicas": 5}, {"shards": 3}, {"replicas": 5, "shards": 3}, {"tensor_parallel": 3}], ids=str
)
def test_the_averages_of_came_are_with_their_slices(mesh):
    shapes = CAME_SHAPES | {"layers.0.down_proj.weight": (48, 96), "experts": (6, 20, 30)}
    plans, planner = mesh_plans(shapes, **mesh, items=came_items), Ckpt8SavePlanner()
    shared, metadata = planner.create_global_plan(plans)
    found, held = homes(shared), homes(plans)
    for name, shape in shapes.items():
        slices = [(box, ranks) for (key, box), ranks in found.items() if key == f"model.{name}"]
        assert len(slices) == (1 if len(shape) == 1 else mesh.get("tensor_parallel", 1)) * mesh.get("shards", 1)
        written = defaultdict(set)
        for (offset, ranks), (key, gone) in itertools.product(slices, AVERAGES.items() if len(shape) > 1 else ()):
            assert len(ranks) == 1
            box = offset[: len(shape) + gone] + offset[len(shape) + gone + 1 :]
            written[f"optim.state.{name}.{key}", box] |= {*ranks}
        for place, ranks in written.items():
            assert {*found[place]} == ranks <= {*held[place]}
    # A copy is no chunk of the tensor: torch's own planner has the same ones.
    expected = DefaultSavePlanner().create_global_plan(plans)[1].state_dict_metadata
    assert {name: {*map(str, each.chunks)} for name, each in metadata.state_dict_metadata.items()} == {
        name: {*map(str, each.chunks)} for name, each in expected.items()
    }
    assert all(len({*map(str, each.chunks)}) == len(each.chunks) for each in metadata.state_dict_metadata.values())


def copies(plans):
    """What ranks write besides the values of the checkpoint: rank, parameter and key of each."""
    found = ((rank, item.index.fqn) for rank, plan in enumerate(plans) for item in plan.items if type(item) is Copy)
    return {(rank, *name.removeprefix("optim.state.").rsplit(".", 1)) for rank, name in found}


def test_what_no_slice_needs_is_not_copied():
    assert not copies(share(mesh_plans(SHAPES, replicas=3, shards=4)))
    shared = share(mesh_plans(CAME_SHAPES, shards=3, items=came_items))
    assert {key for _, _, key in copies(shared)} == {"exp_avg_sq_col", "exp_avg_res_col"}
    chunks = {item.index.fqn: item.tensor_data.chunk for item in shared[0].items}
    for item in (item for plan in shared[1:] for item in plan.items if type(item) is Copy):
        assert str(item.tensor_data.chunk) == str(chunks[item.index.fqn])
    without = [without_copies(plan) for plan in shared]
    assert not copies(without)
    assert homes(without).keys() == homes(shared).keys()
    # Slices of few rows save less than a copy takes; of 17 rows the fourth rank has none.
    shapes = {"few": (60, 64), "enough": (64, 64), "none": (17, 64)}
    shared = share(mesh_plans(shapes, shards=4, items=came_items))
    assert {name for _, name, _ in copies(shared)} == {"enough"}
    assert len(copies(shared)) == 2 * 3
    # Each rank with its own part of the metadata writes all that it has.
    alone = mesh_plans(CAME_SHAPES, shards=3, items=came_items)[1]
    assert share([alone])[0].items == alone.items


def test_masters_and_copies_are_with_the_weight():
    def items(name, shape, box, sharded):
        found = adam_items(name, shape, box, sharded)
        for copy in (f"optimizer.state.{name}.master_param", f"ema.{name}", f"ema.shadow.{name}"):
            found.append(tensor_item(copy, shape, box, sharded=sharded))
        return found

    found = ranks_of(share(mesh_plans(SHAPES, replicas=6, items=items)))
    for name in SHAPES:
        assert len({rank for key, rank in found.items() if name in key and not key.endswith(".step")}) == 1


def test_the_rank_that_alone_has_the_moments_writes_the_weight():
    """As ZeroRedundancyOptimizer leaves it: all ranks have the weights, each some of the moments."""
    plans = mesh_plans(SHAPES, replicas=4)
    owner = {f"optimizer.state.{name}": number % 4 for number, name in enumerate(SHAPES)}

    def kept(item, rank):
        return owner.get(item.index.fqn.rpartition(".")[0], rank) == rank

    plans = [plan_of(*(item for item in plan.items if kept(item, rank))) for rank, plan in enumerate(plans)]
    shared = share(plans)
    assert together(shared, SHAPES) == 1
    found = ranks_of(shared)
    assert [found[f"model.{name}"] for name in SHAPES] == [number % 4 for number in range(len(SHAPES))]


def test_moments_stay_together_where_no_rank_has_all():
    shape = (8, 8)
    weight = tensor_item("model.weight", shape, whole(shape), sharded=False)
    moments = [tensor_item(f"optim.state.weight.{key}", shape, whole(shape), sharded=False) for key in MOMENTS]
    alone = tensor_item("other", shape, whole(shape), sharded=False)
    shared = share([plan_of(weight), plan_of(weight, alone), plan_of(*moments, alone), plan_of(*moments)])
    found = ranks_of(shared)
    assert {found[f"optim.state.weight.{key}"] for key in MOMENTS} == {2}
    assert found["model.weight"] == 0


def test_stages_of_a_pipeline_have_names_of_their_own():
    first, second = (
        {name: shape for name, shape in SHAPES.items() if (".0." in name) is half} for half in (True, False)
    )
    plans = mesh_plans(first, replicas=2) + mesh_plans(second, replicas=3)
    shared = share(plans)
    assert homes(shared).keys() == homes(plans).keys()
    assert together(shared, SHAPES) == 1
    assert all(load > 0 for load in loads(shared))


def test_tied_weights_are_with_each_other():
    shape, tied = (32, 32), torch.nn.Parameter(torch.zeros(32, 32))
    other = torch.zeros(32, 32)
    items = adam_items("head.weight", shape, whole(shape), sharded=False)
    items += [tensor_item(f"model.{name}", shape, whole(shape), sharded=False) for name in ("embed.weight", "free")]
    # The order in which they come is that of the state dict: the tied weight without a state of its own first, or last.
    for order in (items, items[::-1]):
        state = {"model.embed.weight": tied, "model.head.weight": tied, "model.free": other}
        found = ranks_of(share([plan_of(*order)] * 2, **state))
        family = {found[f"optimizer.state.head.weight.{key}"] for key in MOMENTS}
        assert {found["model.embed.weight"], found["model.head.weight"]} == family
        assert {found["model.free"]} != family


UNCHANGED = SavePlan([], usable=False)


@pytest.fixture
def planner(monkeypatch):
    """One that keeps the plans of the last save."""
    for cache in ("_cached_save_plan", "_cached_all_plans", "_cached_global_plan", "_cached_metadata"):
        monkeypatch.setattr(SavePlanner, cache, {})
    return Ckpt8SavePlanner(enable_plan_caching=True)


def test_plans_that_are_kept_from_the_last_save_stay_together(planner):
    plans = mesh_plans(SHAPES, replicas=3)
    first, metadata = planner.create_global_plan(plans)
    assert together(first, SHAPES) == 1
    unchanged, again = planner.create_global_plan([UNCHANGED] * 3)
    assert not any(plan.usable for plan in unchanged)
    assert again is metadata
    # Rank 1 comes without the last layer: its plan is new, and those of the others are those of the last save.
    kept = [item for item in plans[1].items if "layers.1" not in item.index.fqn]
    planner.create_global_plan([UNCHANGED, plan_of(*kept), UNCHANGED])
    assert together(planner.global_plan, SHAPES) == 1
    assert homes(planner.global_plan).keys() == homes(plans).keys()
    assert not any("layers.1" in item.index.fqn for item in planner.global_plan[1].items)


def test_state_dicts_that_are_not_flattened_are_shared_as_well():
    shape = (16, 16)
    plans = [SavePlan([tensor_item(f"layer.{n}", shape, whole(shape), sharded=False) for n in range(6)])] * 3
    shared = Ckpt8SavePlanner(flatten_state_dict=False).create_global_plan(plans)[0]
    assert len(set(loads(shared))) == 1


def test_plans_with_copies_are_kept_from_the_last_save(planner):
    plans = mesh_plans(CAME_SHAPES, shards=3, items=came_items)
    first = planner.create_global_plan(plans)[0]
    less = plan_of(*(item for item in plans[1].items if not item.index.fqn.endswith("4.weight.exp_avg_sq_col")))
    for changed in (UNCHANGED, less):
        planner.create_global_plan([UNCHANGED, changed, UNCHANGED])
        gone = {(1, "4.weight", "exp_avg_sq_col")} if changed is less else set()
        assert copies(planner.global_plan) == copies(first) - gone
    assert gone < copies(first)


def test_whole_weights_are_spread_where_only_moments_are_cut():
    shapes = {f"{layer}.weight": (64, 64) for layer in range(8)}

    def items(name, shape, box, sharded):
        rest = [tensor_item(f"optim.state.{name}.{key}", shape, box) for key in MOMENTS]
        return [tensor_item(f"model.{name}", shape, whole(shape), sharded=False), *rest]

    assert len(set(loads(share(mesh_plans(shapes, shards=4, items=items))))) == 1
