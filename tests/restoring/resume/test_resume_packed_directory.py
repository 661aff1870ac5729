"""``ckpt8.resume`` from a directory that several ranks packed, into a model and an optimizer of one process."""

import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from disk_kit import flip_bit
from packed_kit import pack, save_sliced
from resume_kit import same, snapshot
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import ckpt8
import ckpt8.optim
from ckpt8 import InputError, ResumeError, ResumeWarning, UsageError
from ckpt8.container.reader import ContainerReader
from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")

LAYOUTS = ("get_state_dict", "flat", "state_dict", "torchtitan")


def make(seed, kind=torch.optim.AdamW, dtype=torch.float32):
    """A model, and an optimizer with two groups."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(96, 289), torch.nn.Tanh(), torch.nn.Linear(289, 96)).to(dtype)
    matrices, vectors = ([p for p in model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return model, kind(groups, lr=1e-2 * (1 + seed))


def train(model, optimizer, steps):
    for step in steps:
        batch = torch.randn(8, 96, generator=torch.Generator().manual_seed(step))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model, optimizer, layout):
    weights, moments = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=layout in ("flat", "torchtitan"))
    )
    progress = {"seen": 7, "tokens": torch.arange(5000)}
    if layout == "torchtitan":
        return {**weights, "optimizer": moments, "progress": progress}
    if layout == "state_dict":
        weights, moments = model.state_dict(), optimizer.state_dict()
    return {"model": weights, "optimizer": moments, "progress": progress}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The state of one run in every layout, packed by two ranks; and in one of them with flash."""
    folder = tmp_path_factory.mktemp("resumed")
    model, optimizer = make(0)
    train(model, optimizer, range(3))
    for layout in LAYOUTS:
        plain = save_sliced(state_of(model, optimizer, layout), folder / f"plain-{layout}")
        pack(plain, folder / layout, preset="lossless")
    pack(folder / "plain-get_state_dict", folder / "flash", preset="flash")
    torch.save(state_of(model, optimizer, "state_dict"), folder / "run.pt")
    ckpt8.compress(folder / "plain-get_state_dict", folder / "run.ckpt8", preset="lossless")
    return folder


@pytest.mark.by_default("flat", "state_dict", "torchtitan", "plain-get_state_dict", "run.ckpt8")
@pytest.mark.parametrize("source", [*LAYOUTS, "plain-get_state_dict", "run.ckpt8"])
def test_a_run_goes_on_as_it_was(saved, source):
    """Also from a plain directory, and from a container of it."""
    original, its_optimizer = make(0)
    train(original, its_optimizer, range(3))
    model, optimizer = make(1)
    train(model, optimizer, range(1))
    kept = {name: value.data_ptr() for name, value in model.state_dict().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResumeWarning)
        rest = ckpt8.resume(saved / source, model=model, optimizer=optimizer)
    assert same(snapshot(model, optimizer), snapshot(original, its_optimizer))
    assert {name: value.data_ptr() for name, value in model.state_dict().items()} == kept
    assert same(rest, {"progress": {"seen": 7, "tokens": torch.arange(5000)}})
    for each in ((model, optimizer), (original, its_optimizer)):
        train(*each, range(3, 6))
    assert same(snapshot(model, optimizer), snapshot(original, its_optimizer))


def test_damage_of_a_plain_directory_changes_nothing(saved, tmp_path):
    plain = shutil.copytree(saved / "plain-get_state_dict", tmp_path / "plain")
    file = max(plain.glob("*.distcp"), key=lambda path: path.stat().st_size)
    flip_bit(file)
    model, optimizer = make(1)
    before = snapshot(model, optimizer)
    with pytest.raises(InputError, match="is damaged"):
        ckpt8.resume(plain, model=model, optimizer=optimizer)
    assert same(snapshot(model, optimizer), before)


def test_lossy_state_is_what_torch_loads_with_our_reader(saved):
    model, optimizer = make(1)
    train(model, optimizer, range(1))  # torch needs state to load into
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, storage_reader=Ckpt8StorageReader(saved / "flash"), no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    mine, my_optimizer = make(2)
    ckpt8.resume(saved / "flash", model=mine, optimizer=my_optimizer)
    assert same(snapshot(mine, None), snapshot(model, None))
    states = (each.state_dict()["state"] for each in (my_optimizer, optimizer))
    assert all(same(one, other) for one, other in zip(*(each.values() for each in states), strict=True))


def test_packed_optimizers_take_the_state_as_from_one_file(saved):
    def resumed(path):
        model, optimizer = make(1, ckpt8.optim.AdamW, torch.bfloat16)
        ckpt8.resume(path, model=model, optimizer=optimizer)
        return snapshot(model, optimizer)

    assert same(resumed(saved / "get_state_dict"), resumed(saved / "run.pt"))


def test_what_does_not_fit_changes_nothing(saved, tmp_path):
    folder = shutil.copytree(saved / "flash", tmp_path / "x")
    model, optimizer = make(1)
    train(model, optimizer, range(1))
    before = snapshot(model, optimizer)
    wide = torch.nn.Sequential(torch.nn.Linear(96, 288), torch.nn.Tanh(), torch.nn.Linear(288, 96))
    shapes = r"0\.weight: was saved with shape \[289, 96\], here it has \[288, 96\]"
    for other, said in ((wide, shapes), (torch.nn.Linear(3, 3), "weight: is missing from the checkpoint")):
        with pytest.raises(ResumeError, match=said):
            ckpt8.resume(folder, model=other, optimizer=optimizer)
    with pytest.raises(UsageError, match="one checkpoint; leave out member"):
        ckpt8.resume(folder, model=model, member="__0_0.ckpt8")
    for name in ("__0_0.ckpt8", "__1_0.ckpt8"):
        with ContainerReader(folder / name) as reader:
            part = [each for each in reader.manifest.slices if each.name.startswith("model.2")][-1]
            storage = reader.manifest.tensors[part.tensor].storage
            at = next(iter(reader.places[storage].values())).offsets[0] + 9
        content = (folder / name).read_bytes()
        flip_bit(folder / name, at)
        with pytest.raises(InputError, match=rf"^{folder / name}: .*checksum does not match"):
            ckpt8.resume(folder, model=model, optimizer=optimizer)
        assert same(snapshot(model, optimizer), before)
        (folder / name).write_bytes(content)
    (folder / "__1_0.ckpt8").unlink()
    with pytest.raises(InputError, match=r"__1_0\.ckpt8: is missing"):
        ckpt8.resume(folder, model=model, optimizer=optimizer)
    assert same(snapshot(model, optimizer), before)


def test_values_that_the_tree_does_not_hold_are_told(tmp_path):
    state = {"model": torch.nn.Linear(8, 8).state_dict(), "mask": torch.eye(3).to_sparse()}
    dcp.save(state, storage_writer=Ckpt8StorageWriter(tmp_path / "x"), no_dist=True)
    model = torch.nn.Linear(8, 8)
    with pytest.warns(ResumeWarning, match="left out: 'mask'"):
        ckpt8.resume(tmp_path / "x", model=model)
    assert same(model.state_dict(), state["model"])


def test_sharded_models_are_told_what_to_use(saved):
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, _ = make(1)
        fully_shard(model, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.AdamW(model.parameters())
        for given in ({"model": model}, {"optimizer": optimizer}, {"model": {"net": model}}):
            with pytest.raises(UsageError, match=r"DTensor.*checkpoint\.load and Ckpt8StorageReader") as caught:
                ckpt8.resume(saved / "flash", **given)
            assert "\n" not in str(caught.value)
    finally:
        dist.destroy_process_group()
