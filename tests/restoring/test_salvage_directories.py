"""``restore --salvage`` of what ranks packed, with files that are damaged or missing."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from dcp_kit import adam_state, load_all, read_metadata
from disk_kit import flip_bit
from packed_kit import pack, save_sliced
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import ckpt8
from ckpt8 import InputError, OutputError, UsageError
from ckpt8.container import plain_reader
from ckpt8.container.header import FRAME
from ckpt8.container.reader import ContainerReader
from ckpt8.integrations.dcp import Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")

HURT = "__1_0"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint that two ranks packed, and the plain directory that ``restore`` makes of it while it is whole."""
    folder = tmp_path_factory.mktemp("salvaged")
    torch.manual_seed(0)
    weights = {f"layers.{k}.{name}": torch.randn(96, 97 if name == "w" else 96) for k in range(4) for name in "wv"}
    progress = {"seen": 7, "note": "half way"}
    save_sliced({"model": weights, "optimizer": adam_state(weights), "progress": progress}, folder / "plain")
    pack(folder / "plain", folder / "packed", preset="flash")
    pack(folder / "plain", folder / "other", preset="lossless")
    ckpt8.restore(folder / "packed", folder / "whole")
    return folder


def names_in(plain, stem):
    """The values of which torch's metadata places a part in the file of one rank."""
    places = read_metadata(plain).storage_data.items()
    return {index.fqn for index, place in places if place.relative_path == f"{stem}.distcp"}


def boxes_in(plain, stem, name):
    metadata = read_metadata(plain)
    chunks = {tuple(chunk.offsets): tuple(chunk.sizes) for chunk in metadata.state_dict_metadata[name].chunks}
    return {
        (tuple(index.offset), chunks[tuple(index.offset)])
        for index, place in metadata.storage_data.items()
        if index.fqn == name and place.relative_path == f"{stem}.distcp"
    }


LOST_FILES = {
    "missing": (lambda saved, file: file.unlink(), "is missing"),
    "cut": (lambda saved, file: file.write_bytes(file.read_bytes()[:-200]), "has no readable manifest"),
    # The file that the same rank has written in another save, with slices of the same shapes.
    "of another save": (lambda saved, file: shutil.copyfile(saved / "other" / file.name, file), "belongs to another"),
}


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of what was packed, that a test may damage."""
    return shutil.copytree(saved / "packed", tmp_path / "x")


@pytest.mark.by_default("cut", "of another save")
@pytest.mark.parametrize("damage", LOST_FILES)
def test_what_the_other_ranks_have_whole_is_written(saved, folder, tmp_path, run_command, damage):
    hurt, reason = LOST_FILES[damage]
    hurt(saved, folder / f"{HURT}.ckpt8")
    code, out, err = run_command("restore", folder, "-o", tmp_path / "back", "--salvage")
    assert code == 1
    assert "not everything in it was recovered for certain" in err
    expected, found = load_all(saved / "whole"), load_all(tmp_path / "back")
    lost = names_in(saved / "whole", HURT)
    assert found.keys() == expected.keys() - lost != set()
    for name, value in found.items():
        assert torch.equal(value, expected[name]) if isinstance(value, torch.Tensor) else value == expected[name]
    for name in lost:
        assert f"  {name}: not written" in out
    assert f"{HURT}.ckpt8: {reason}" in out
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == [".metadata", "__0_0.distcp"]

    # A program that wants a lost tensor learns so, unless it asks for what is there.
    name = next(name for name in sorted(lost) if name.startswith("model."))
    wanted = {name: torch.zeros_like(expected[name])}
    with pytest.raises(BaseException, match="Missing key"):
        dcp.load(wanted, checkpoint_id=tmp_path / "back", no_dist=True)
    dcp.load(wanted, checkpoint_id=tmp_path / "back", planner=DefaultLoadPlanner(allow_partial_load=True), no_dist=True)

    code, out, _ = run_command("restore", folder, "-o", tmp_path / "again", "--salvage", "--json")
    facts = json.loads(out)
    assert not facts["complete"]
    assert {each["name"] for each in facts["lost"]} == lost
    assert facts["tensors"] + facts["values"] == len(found)
    for each in facts["lost"]:
        if each["shape"] is not None:
            boxes = {(tuple(part["offsets"]), tuple(part["sizes"])) for part in each["slices"]}
            assert boxes == boxes_in(saved / "whole", HURT, each["name"])


@pytest.mark.slow
def test_a_damaged_slice_costs_its_tensor_alone(saved, folder, tmp_path):
    file, name = folder / f"{HURT}.ckpt8", "model.layers.1.w"
    with ContainerReader(file) as reader:
        part = next(each for each in reader.manifest.slices if each.name == name)
        storage = reader.manifest.tensors[part.tensor].storage
        place = next(iter(reader.places[storage].values())).offsets[0]
    flip_bit(file, place + 3)
    found = ckpt8.restore(tmp_path / "x", tmp_path / "back", salvage=True)
    assert [(each.name, each.shape) for each in found.lost] == [(name, [96, 97])]
    (lost,) = found.lost[0].slices
    sizes = reader.manifest.tensors[part.tensor].shape
    assert (list(lost.offsets), list(lost.sizes)) == (list(part.offsets), list(sizes))
    assert found.lost[0].elements == lost.sizes[0] * lost.sizes[1]
    expected, written = load_all(saved / "whole"), load_all(tmp_path / "back")
    assert written.keys() == expected.keys() - {name}
    assert all(torch.equal(written[key], expected[key]) for key in written if isinstance(written[key], torch.Tensor))
    # What is written is a checkpoint like any other.
    ckpt8.convert(tmp_path / "back", tmp_path / "back.pt")
    assert name.removeprefix("model.") not in torch.load(tmp_path / "back.pt")["model"]


@pytest.mark.slow
def test_a_damaged_header_is_told_and_costs_nothing(saved, folder, tmp_path):
    flip_bit(folder / f"{HURT}.ckpt8", 40)
    found = ckpt8.restore(tmp_path / "x", tmp_path / "back", salvage=True)
    assert found.damage.keys() == {f"{HURT}.ckpt8"}
    assert (found.complete, found.lost) == (False, [])
    assert ckpt8.diff(tmp_path / "back", saved / "whole").identical


def test_a_flip_in_the_index_is_told_and_costs_nothing(saved, folder, tmp_path):
    index = folder / "ckpt8-dcp.json"
    flip_bit(index, index.read_bytes().rindex(b"note"))  # a key of the state dict
    for read in (ckpt8.verify, ckpt8.load, lambda source: ckpt8.restore(source, tmp_path / "back"), plain_reader.read):
        with pytest.raises((InputError, plain_reader.UnreadableError), match=r"ckpt8-dcp\.json: .*checksum"):
            read(folder)
    found = ckpt8.restore(folder, tmp_path / "back", salvage=True)
    assert found.damage.keys() == {index.name}
    assert (found.complete, found.lost) == (False, [])
    assert load_all(tmp_path / "back").keys() == load_all(saved / "whole").keys()


def test_values_and_parts_of_large_tensors(tmp_path):
    state = {"big": torch.randn(1200, 1000), "small": torch.randn(64, 64), "empty": torch.zeros(0, 3), "note": "x" * 99}
    dcp.save(state, storage_writer=Ckpt8StorageWriter(tmp_path / "x", preset="lossless"), no_dist=True)
    file = tmp_path / "x" / "__0_0.ckpt8"
    with ContainerReader(file) as reader:
        records = {each.name: each for each in reader.manifest.tensors}
        big = next(record for name, record in records.items() if name.endswith("big"))
        last = next(iter(reader.places[big.storage].values())).offsets[-1]
        objects = next(iter(reader.places[records["objects"].storage].values())).offsets[0]
    whole = file.read_bytes()
    flip_bit(file, last + 3)
    found = ckpt8.restore(tmp_path / "x", tmp_path / "one", salvage=True)
    assert [each.name for each in found.lost] == ["big"]
    assert found.lost[0].slices[0].reason == f"elements {FRAME} to 1199999 of its 1200000 are damaged"
    written = load_all(tmp_path / "one")
    assert written.keys() == {"small", "empty", "note"}
    assert torch.equal(written["small"], state["small"])
    assert written["empty"].shape == (0, 3)
    file.write_bytes(whole)
    flip_bit(file, objects + 3)
    found = ckpt8.restore(tmp_path / "x", tmp_path / "two", salvage=True)
    assert [(each.name, each.shape) for each in found.lost] == [("note", None)]
    assert load_all(tmp_path / "two").keys() == {"big", "small", "empty"}


def test_an_index_that_places_values_elsewhere_costs_these_values(folder, tmp_path):
    index = folder / "ckpt8-dcp.json"
    tree = json.loads(index.read_text())
    tree["objects"]["progress.seen"][0] ^= 1
    tree["objects"]["progress.note"][1] = 1 << 30
    index.write_text(json.dumps(tree))
    found = ckpt8.restore(tmp_path / "x", tmp_path / "back", salvage=True)
    reasons = {each.name: each.slices[0].reason for each in found.lost}
    assert reasons == {
        "progress.seen": "is not in this file, and ckpt8-dcp.json names it",
        "progress.note": "its file ends before it",
    }


def test_where_nothing_can_be_written_is_one_line(saved, folder, tmp_path):
    assert ckpt8.restore(folder, tmp_path / "whole", salvage=True).complete
    assert ckpt8.diff(tmp_path / "whole", saved / "whole").identical

    def refused(error, said, target=tmp_path / "back", **options):
        with pytest.raises(error, match=said):
            ckpt8.restore(folder, target, salvage=True, **options)

    refused(OutputError, "exists", tmp_path / "whole")
    refused(OutputError, None, folder, force=True)
    refused(UsageError, "-o DIR", None)
    file = folder / "ckpt8-dcp.json"
    index = file.read_text()
    file.write_text(index[:-9])
    refused(InputError, r"nothing can be recovered of the whole, salvage its files one by one: restore")
    tree = json.loads(index)
    name, tensor = next((name, each) for name, each in tree["tensors"].items() if len(each["shape"]) == 2)
    tree["tensors"][name] = {**tensor, "cuts": None, "owners": None, "boxes": [[0, [0, 0], [1, 1]]]}
    file.write_text(json.dumps(tree))
    refused(InputError, "slices are missing")
    file.write_text(index)
    for path in folder.glob("*.ckpt8"):
        path.unlink()
    refused(InputError, r"no tensor is whole \(__0_0\.ckpt8: is missing\); nothing can be recovered")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["whole", "x"]
