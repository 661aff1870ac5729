"""Distributed checkpoints as a target: torch loads them, at any world size, and training goes on."""

import copy
import io
import zipfile

import make_dcp
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from converting_kit import Net, assert_trees_equal, checkpoint, converted, listing, trained, written
from dcp_kit import gaps, load_all, read_metadata, run_processes, save_small
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import ckpt8
from ckpt8.core.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def alone():
    """A run of one process as it saves itself into a ``.pt``, and the losses of the steps that followed."""
    net, optimizer = make_dcp.make()
    for number in range(make_dcp.BEFORE):
        make_dcp.step(net, optimizer, number)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    state = optimizer.state_dict()
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        saved["param_names"] = [names[id(parameter)] for parameter in group["params"]]
    others = {"iteration": make_dcp.BEFORE, "history": {"losses": [1.5, torch.ones(3)]}}
    saved = {"model": net.state_dict(), "optimizer": state, **others}
    return copy.deepcopy(saved), losses_after(net, optimizer)


@pytest.fixture(scope="module")
def made(alone, tmp_path_factory):
    """Distributed checkpoints that were made of the run, by the form of the source."""
    folder = tmp_path_factory.mktemp("made")
    torch.save(alone[0], folder / "run.pt")
    for preset in ("lossless", "flash"):
        ckpt8.compress(folder / "run.pt", folder / f"{preset}.ckpt8", preset=preset)
    for name in ("run.pt", "lossless.ckpt8", "flash.ckpt8"):
        ckpt8.convert(folder / name, folder / name.partition(".")[0], to="dcp")
    return {name: folder / name for name in ("run", "lossless", "flash")}


def losses_after(net, optimizer):
    return [make_dcp.step(net, optimizer, make_dcp.BEFORE + k) for k in range(make_dcp.AFTER)]


def test_without_processes(alone, made):
    net, optimizer = make_dcp.make()
    make_dcp.load(made["lossless"], net, optimizer)
    assert losses_after(net, optimizer) == alone[1]


def records(content, place):
    """All records of a slice; torch makes its id from checksums that it does not have yet here."""
    with zipfile.ZipFile(io.BytesIO(content[place.offset :][: place.length])) as archive:
        return [(name, "serialization_id" in name or archive.read(name)) for name in archive.namelist()]


def test_the_same_as_torch_writes(alone, made, tmp_path):
    net, optimizer = make_dcp.make()
    make_dcp.load(made["run"], net, optimizer)
    saved = make_dcp.states(net, optimizer)
    for number, group in enumerate(saved["optimizer"]["param_groups"]):
        group["param_names"] = list(group["params"])
        assert group["params"] == alone[0]["optimizer"]["param_groups"][number]["param_names"]
    theirs, ours = read_metadata(save_small(saved, tmp_path / "theirs")), read_metadata(made["run"])
    for field in ("state_dict_metadata", "planner_data", "version"):
        assert getattr(ours, field) == getattr(theirs, field)
    places, expected = ours.storage_data, theirs.storage_data
    assert set(places) == set(expected)
    mine, other = ((root / "__0_0.distcp").read_bytes() for root in (made["run"], tmp_path / "theirs"))
    for index, place in places.items():
        assert place.length == expected[index].length
        assert records(mine, place) == records(other, expected[index])
    assert sorted(listing(made["run"])) == [".metadata", "__0_0.distcp"]
    assert_trees_equal(load_all(made["run"]), load_all(tmp_path / "theirs"))


def test_torch_makes_the_same_file_of_it(alone, made, tmp_path):
    dcp_to_torch_save(made["run"], tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    saved = alone[0]
    assert_trees_equal(back["model"], dict(saved["model"]))
    assert (back["iteration"], back["history"]["losses"][0]) == (4, 1.5)
    for theirs, group in zip(back["optimizer"]["param_groups"], saved["optimizer"]["param_groups"], strict=True):
        assert theirs == group | {"params": group["param_names"]}
        for number, name in zip(group["params"], group["param_names"], strict=True):
            assert_trees_equal(back["optimizer"]["state"][name], saved["optimizer"]["state"][number])
    assert_trees_equal(converted(made["run"], tmp_path)["optimizer"]["state"], saved["optimizer"]["state"])


# Names


def live(model, optimizer):
    state, moments = get_state_dict(model, optimizer)
    return {f"model.{name}" for name in state} | {
        f"optimizer.state.{name}.{key}" for name, each in moments["state"].items() for key in each
    }


def test_names_from_the_order_of_the_model(run, tmp_path):
    """One group without names, a tied weight, buffers: what torch's own state dict asks for is there."""
    written(checkpoint(*run), tmp_path, "run", to="dcp")
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    found = load_all(tmp_path / "run")
    assert live(model, optimizer) <= found.keys()
    assert torch.equal(found["model.lm_head.weight"], found["model.embed.weight"])
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=tmp_path / "run", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert_trees_equal(optimizer.state_dict()["state"], run[1].state_dict()["state"])
    assert_trees_equal(dict(model.state_dict()), dict(run[0].state_dict()))


def test_names_that_cannot_be_told(alone, tmp_path):
    """Biases of one shape in two groups."""
    groups = [{**group, "param_names": None} for group in alone[0]["optimizer"]["param_groups"]]
    unnamed = alone[0] | {"optimizer": alone[0]["optimizer"] | {"param_groups": groups}}
    with pytest.raises(UsageError, match=r"parameter \d cannot be named.*--key model writes the model alone$"):
        written(unnamed, tmp_path, "run", to="dcp")
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]
    written(unnamed, tmp_path, "run", to="dcp", key="model")
    assert_trees_equal(load_all(tmp_path / "run"), {f"model.{name}": x for name, x in alone[0]["model"].items()})


def test_wrappers_and_other_homes(alone, tmp_path):
    """As Lightning and torch.compile name things: under the keys that a training script for DCP uses."""
    saved = {
        "state_dict": {f"_orig_mod.{name}": x for name, x in alone[0]["model"].items()},
        "optimizer_states": [alone[0]["optimizer"]],
        "epoch": 3,
    }
    for group in saved["optimizer_states"][0]["param_groups"]:
        assert all(not name.startswith("_orig_mod") for name in group["param_names"])
    _, report = written(saved, tmp_path, "run", to="dcp", dtype="bfloat16")
    assert report.casts == {"float32 -> bfloat16": 6}
    assert any("wrappers" in note for note in report.notes)
    found = load_all(tmp_path / "run")
    assert found["epoch"] == 3
    assert not [name for name in found if not name.startswith(("model.", "optimizer.")) and name != "epoch"]
    for name, x in alone[0]["model"].items():
        y = x if name == "running_mean" else x.bfloat16()
        assert torch.equal(found[f"model.{name}"], y)
    m = alone[0]["optimizer"]["state"][0]["exp_avg"]
    assert torch.equal(found["optimizer.state.up.weight.exp_avg"], m)


def test_packed_optimizers_are_unpacked(tmp_path):
    written(checkpoint(*trained(ckpt8.optim.AdamW, dtype=torch.bfloat16)), tmp_path, "run", to="dcp")
    plain = converted(tmp_path / "run.pt", tmp_path, dtype="float32")
    found = load_all(tmp_path / "run")
    assert torch.equal(found["optimizer.state.up.weight.exp_avg"], plain["optimizer"]["state"][1]["exp_avg"])
    assert torch.equal(found["model.up.weight"], plain["model"]["up.weight"])
    net = Net()
    assert live(net, torch.optim.AdamW(net.parameters())) <= found.keys()


# Odd trees


def test_odd_tensors_and_values(tmp_path):
    base = torch.randn(40, 30)
    model = {
        "view": base[3:5],
        "transposed": base.T,
        "strided": base[:, ::3],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "complex": torch.randn(4, dtype=torch.complex64).conj(),
        "half": torch.randn(6).bfloat16(),
        "flags": torch.tensor([True, False]),
    }
    saved = {"model": model, "pair": (torch.arange(3), [base[0]]), "none": None, "n": [2]}
    saved["list"] = [1, {"t": torch.ones(2)}]
    written(saved, tmp_path, "run", to="dcp")
    assert (tmp_path / "run" / "__0_0.distcp").stat().st_size < 40_000
    dcp_to_torch_save(tmp_path / "run", tmp_path / "back.pt")
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert_trees_equal(back, saved)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"model": {"w.x": torch.ones(3)}, "model.w.x": 3}, "duplicated flatten key"),
        ({"model": {"w": torch.ones(3)}, "state_dict": {"w": torch.ones(3)}}, "2 models; choose one with --key"),
        ({"iteration": 3, "rng": [torch.ones(3)]}, "no state dict of a model"),
    ],
)
def test_trees_that_cannot_be_one(tree, match, tmp_path):
    with pytest.raises(UsageError, match=match) as caught:
        written(tree, tmp_path, "run", to="dcp")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["run.pt"]


@pytest.fixture
def group_of_one(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.slow
def test_at_two_ranks(alone, distributed, made, tmp_path):
    again = tmp_path / "nested"
    ckpt8.convert(distributed[0] / "nested", again, to="dcp")
    losses = run_processes("resume", tmp_path, again, *made.values())
    assert losses[str(again)] == distributed[1]
    assert losses[str(made["run"])] == losses[str(made["lossless"])] == pytest.approx(alone[1], rel=1e-6)
    assert losses[str(made["flash"])] == pytest.approx(alone[1], rel=1e-4)


@pytest.mark.slow
def test_at_one_rank(alone, made, group_of_one):
    for sharded, tolerance in ((True, 1e-6), (False, 0)):
        net, optimizer = make_dcp.make(sharded=sharded)
        loaded = make_dcp.load(made["run"], net, optimizer)
        assert loaded["iteration"] == make_dcp.BEFORE
        assert losses_after(net, optimizer) == pytest.approx(alone[1], rel=tolerance)


def test_every_slice_is_a_sound_zip(made):
    for root in made.values():
        holes = gaps(root, ["__0_0.distcp"])["__0_0.distcp"]  # Python's zipfile finds all checksums right
        assert len(holes) == 27 - 1
        places = sorted((each.offset, each.length) for each in read_metadata(root).storage_data.values())
        ends = [0, *(offset + length for offset, length in places)]
        assert [offset for offset, _ in places] == ends[:-1]
        assert ends[-1] == (root / "__0_0.distcp").stat().st_size


def test_compressed_and_restored(made, tmp_path):
    ckpt8.compress(made["run"], tmp_path / "run.ckpt8", preset="lossless")
    ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    assert listing(tmp_path / "back") == listing(made["run"])
