"""The simulation of many ranks at a small scale, and what its figures at full scale must be."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from ckpt8.container.sharded.reading import read_index

pytestmark = pytest.mark.filterwarnings("ignore")

BENCH = Path(__file__).parents[2] / "fixtures" / "bench"


@pytest.fixture(scope="module")
def simulation():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCH))
        import ranks_simulation

        yield ranks_simulation
    sys.modules.pop("ranks_simulation")


@pytest.mark.by_default(most=1)
@pytest.mark.parametrize("mesh", ["fsdp", "tp8"])
def test_sixteen_ranks(mesh, simulation):
    found = simulation.simulate(16, 2, mesh, 1)
    parameters = len(list(simulation.parameters(2)))
    assert found["items_of_all_ranks"] == 16 * (4 * parameters + 1)
    # Tensor parallelism keeps norms whole, which are written once.
    whole = sum(dim < 0 for *_, dim in simulation.parameters(2)) if mesh == "tp8" else 0
    assert found["slices"] == 3 * (16 * (parameters - whole) + 2 * whole) + parameters + 1
    assert found["index_bytes"] < 50_000
    assert [each["items"] for each in found["load_plan"]] == [4 * parameters + 1] * 3
    # At the same world size each box is one slice; twice as large ones are two.
    assert found["load_plan"][0]["slices"] == 4 * parameters + 1
    assert found["load_plan"][1]["slices"] == 3 * 2 * parameters + parameters + 1


@pytest.mark.parametrize("mesh", ["fsdp", "tp8"])
def test_the_index_has_the_boxes_that_were_planned(mesh, simulation, tmp_path):
    plans, metadata = simulation.plan_globally(dcp.DefaultSavePlanner(), simulation.local_plans(16, 1, mesh))
    simulation.finish(tmp_path / "x", plans, metadata)
    index = read_index(tmp_path / "x")
    planned = {
        (f"__{rank}_0.ckpt8", item.index.fqn, *map(tuple, (item.index.offset, item.tensor_data.chunk.sizes)))
        for rank, plan in enumerate(plans)
        for item in plan.items
        if item.tensor_data is not None and all(item.tensor_data.chunk.sizes)
    }
    found = {(box.file, name, *box[1:]) for name, tensor in index.tensors.items() for box in tensor.boxes()}
    assert found == planned
    assert all(tensor.is_whole for tensor in index.tensors.values())


def test_the_figures_of_1024_ranks():
    runs = json.loads((BENCH / "ranks_simulation.json").read_text())
    assert {(each["ranks"], each["layers"]) for each in runs} == {(1024, 126)}
    assert {each["mesh"] for each in runs} == {"fsdp", "tp8"}
    for run in runs:
        assert run["index_bytes"] < 20e6
        assert run["global_plan_ratio"] <= 1.1
        same, half, twice = run["load_plan"]
        assert (same["ranks"], half["ranks"], twice["ranks"]) == (1024, 512, 2048)
        # At twice the ranks under tensor parallelism torch takes 4.5 s to find where each DTensor of the rank begins.
        assert same["sum_s"] < 5
        assert half["sum_s"] < 5
        assert all(each["read_index_s"] + each["find_slices_s"] < 1 for each in run["load_plan"])
