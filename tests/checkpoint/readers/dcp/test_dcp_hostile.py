"""Metadata and slices that are damaged or hostile: one line, exit code 3, nothing written, no time lost."""

from __future__ import annotations

import io
import os
import pickle
import time
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from dcp_kit import adam_state, change_metadata, read_metadata, save_small
from hostile_kit import Pickled, one_line
from torch.distributed.checkpoint._extension import ZStandard
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, ChunkStorageMetadata, MetadataIndex

import ckpt8
from ckpt8.container.manifest import FILE
from ckpt8.core.errors import InputError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore")


def trained():
    weights = {"up.weight": torch.randn(80, 80), "down.weight": torch.randn(80, 90)}
    return {"model": weights, "optimizer": adam_state(weights), "epoch": 3}


@pytest.fixture
def root(tmp_path):
    return save_small(trained(), tmp_path / "run")


@pytest.fixture
def compressed(tmp_path):
    """The same with slices that zstd compressed."""
    return save_small(trained(), tmp_path / "run", _extensions=[ZStandard()])


def refused(root, match, error=InputError):
    before = sorted(path.name for path in root.parent.iterdir())
    start = time.process_time()
    with pytest.raises(error, match=match) as caught:
        ckpt8.compress(root)
    assert time.process_time() - start < 1
    assert caught.value.exit_code == 3
    assert len(one_line(caught.value)) < 500
    assert sorted(path.name for path in root.parent.iterdir()) == before


@pytest.mark.parametrize("looked_up", [None, "__class__", "from_bytes"])
def test_members_of_an_enumeration_by_their_names(looked_up, tmp_path, monkeypatch):
    """As Python 3.11.2 of Debian 12 pickles them; it looks up nothing else."""
    monkeypatch.setattr(
        _MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), looked_up or self.name))
    )
    tree = trained()
    root = save_small(tree, tmp_path / "run")
    monkeypatch.undo()
    assert b"getattr" in (root / ".metadata").read_bytes()
    if looked_up is not None:
        refused(root, "looks up an attribute, which no distributed checkpoint needs; do not load it")
        return
    ckpt8.compress(root, tmp_path / "run.ckpt8", preset="lossless")
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    loaded = {"model": {name: torch.zeros_like(x) for name, x in tree["model"].items()}}
    dcp.load(loaded, checkpoint_id=back)
    assert all(torch.equal(loaded["model"][name], x) for name, x in tree["model"].items())


@pytest.mark.slow
def test_a_foreign_class_is_named_and_nothing_runs(root, tmp_path, run_command):
    marker = tmp_path / "ran"
    evil = Pickled(os.system, f"touch {marker}")
    change_metadata(root, lambda metadata: setattr(metadata, "planner_data", evil))
    refused(root, r"refers to 'posix\.system', which no distributed checkpoint needs")
    assert not marker.exists()
    code, _, err = run_command("inspect", root)
    assert (code, len(err.splitlines())) == (3, 1)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["torch.nn.modules.linear\nLinear", "torch.distributed.checkpoint.metadata\nevil"])
def test_a_class_that_nothing_is_made_of(name, root):
    data = (root / ".metadata").read_bytes()
    (root / ".metadata").write_bytes(data[:-1] + f"c{name}\n0.".encode())
    refused(root, "refers to")


def place_of(root, name):
    """The place of the slice that is a value."""
    return next(place for index, place in read_metadata(root).storage_data.items() if index.fqn == name)


def info(name="model.up.weight", **changed):
    """Change the place of one slice."""

    def apply(metadata):
        place = next(place for index, place in metadata.storage_data.items() if index.fqn == name)
        for key, value in changed.items():
            setattr(place, key, value(place) if callable(value) else value)

    return apply


def value(change):
    """Change what is said of one tensor."""

    def apply(metadata):
        change(metadata.state_dict_metadata["model.up.weight"])

    return apply


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("first", [True, False])
def test_two_chunks_at_one_place(rows, first, root, tmp_path):
    other = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([rows, 80]))
    change_metadata(root, value(lambda each: each.chunks.insert(0 if first else 1, other)))
    if rows:
        refused(root, r"'model\.up\.weight': two chunks of different sizes at \(0, 0\)")
    else:  # an empty one says nothing
        ckpt8.compress(root, tmp_path / "x.ckpt8")


PATHS = ["../x", "/etc/passwd", "a/../b", "", ".", "..", "a//b", ".metadata", "a/.metadata", "x\0", 3, None, "~\ud800"]


@pytest.mark.parametrize("path", PATHS, ids=repr)
def test_paths(path, root):
    change_metadata(root, info(relative_path=path))
    refused(root, "no file of the checkpoint|not there")


CHANGES = {
    "a file that is not there": (info(relative_path="missing.distcp"), "not there; the checkpoint is not complete"),
    "a folder that is not there": (
        info(relative_path="folder/__0_0.distcp"),
        "not there; the checkpoint is not complete",
    ),
    "a length beyond the file": (info(length=1 << 40), "overlaps|ends at byte"),
    "an offset beyond the file": (info(offset=1 << 40), "ends at byte"),
    "an offset beyond all": (info(offset=1 << 70), "no count of bytes"),
    "a negative offset": (info(offset=-1), "no count of bytes"),
    "a length of true": (info(length=True), "no count of bytes"),
    "overlapping slices": (info(length=lambda each: each.length + 1), "overlaps the one before"),
    "a slice cut short": (info(length=lambda each: each.length - 1), "slice 'model.up.weight'"),
    "a slice of nothing": (info(length=0), "slice 'model.up.weight'"),
    "a transformation": (info(transform_descriptors=[3]), "have no names"),
    "huge sizes": (value(lambda each: setattr(each, "size", (1 << 40, 1 << 40))), "more elements than"),
    "many sizes": (value(lambda each: setattr(each, "size", (1,) * 1000)), "no counts"),
    "negative sizes": (value(lambda each: setattr(each, "size", (-80, 80))), "no counts"),
    "a size that is no size": (value(lambda each: setattr(each, "size", "80")), "no counts"),
    "another shape": (
        value(lambda each: (setattr(each, "size", (8, 800)), setattr(each.chunks[0], "sizes", (8, 800)))),
        "another shape or element type",
    ),
    "another type": (value(lambda each: setattr(each.properties, "dtype", torch.int32)), "another shape or element"),
    "a chunk outside": (value(lambda each: setattr(each.chunks[0], "offsets", (1, 0))), "reaches out of the tensor"),
    "a chunk of other dimensions": (value(lambda each: setattr(each.chunks[0], "sizes", (80,))), "reaches out of"),
    "no chunks": (value(lambda each: setattr(each, "chunks", [])), "where it has no chunk"),
    "chunks of another kind": (value(lambda each: setattr(each, "chunks", [1])), "something else in place of a Chunk"),
    "no tables": (lambda metadata: setattr(metadata, "storage_data", None), "no table of values"),
    "another object": (lambda _: {"a": 1}, "something else in place of a Metadata"),
    "a name that is none": (lambda metadata: metadata.state_dict_metadata.update({7: None}), "a name that is no text"),
    "values of another kind": (lambda metadata: metadata.state_dict_metadata.update(x=1), "in place of a Tensor"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_metadata_that_does_not_hold(kind, root):
    change, match = CHANGES[kind]
    change_metadata(root, change)
    refused(root, match)


def test_a_slice_that_is_listed_twice(root):
    """Two keys that are equal: a dict of torch would drop one of them."""
    metadata = read_metadata(root)
    index = next(index for index in metadata.storage_data if index.fqn == "model.up.weight")
    metadata.storage_data[MetadataIndex("model.up.weighs", index.offset)] = metadata.storage_data[index]
    (root / ".metadata").write_bytes(pickle.dumps(metadata).replace(b"model.up.weighs", b"model.up.weight"))
    refused(root, "'model.up.weight': a slice that is listed twice")


@pytest.mark.by_default("marks")
@pytest.mark.parametrize(
    "nested",
    [b"(" * 9_000 + b"t" * 9_000, b"N" + b"\x85" * 200_000, b"]" * 200_000 + b"a" * 199_999],
    ids=["marks", "tuples", "lists"],
)
def test_deep_nesting(nested, root):
    (root / ".metadata").write_bytes(b"\x80\x04" + nested + b".")
    refused(root, "nested deeper|Metadata|damaged pickle")


@pytest.mark.parametrize(("cut", "garbage"), [(1, 0), (50, 0), (0.3, 0), (0.5, 0), (0.99, 0), (2, 200)])
def test_damaged_metadata(cut, garbage, root):
    data = (root / ".metadata").read_bytes()
    length = cut if isinstance(cut, int) else int(len(data) * cut)
    (root / ".metadata").write_bytes(data[:length] + b"\xff" * garbage)
    refused(root, "damaged pickle")


def test_every_flipped_byte_of_metadata_is_an_error_or_harmless(root):
    """No change of a byte leads to anything but an InputError, or a container that is verified and restored."""
    data = bytearray((root / ".metadata").read_bytes())
    outcomes = set()
    for at in range(0, len(data), 37):
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        (root / ".metadata").write_bytes(changed)
        try:
            ckpt8.compress(root, preset="lossless", force=True)
            outcomes.add("taken")
        except InputError as exc:
            outcomes.add("refused" if str(exc).count("\n") == 0 else "in several lines")
    assert outcomes == {"refused", "taken"}


def test_damaged_slices(root):
    path = root / "__0_0.distcp"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    refused(root, "ends at byte")
    place, damaged = place_of(root, "optimizer.state.up.weight.exp_avg"), bytearray(data)
    damaged[place.offset + place.length // 2] ^= 1
    path.write_bytes(damaged)
    refused(root, r"__0_0\.distcp:optimizer\.state\.up\.weight\.exp_avg: checksum")
    damaged = bytearray(data)
    damaged[place.offset : place.offset + 4] = b"XXXX"
    path.write_bytes(damaged)
    refused(root, r"slice 'optimizer\.state\.up\.weight\.exp_avg': damaged zip file")


def test_names_with_a_thousand_parts_and_odd_characters(tmp_path):
    """What the roles are told by takes no longer for names that nobody has."""
    names = [f"optimizer.state.{'a.' * k}exp_avg" for k in (100, 5000, 40_000)]
    names += [f"optimizer.state.{'b.' * 40_000}other", "model.\n\udc80\x1b[31m", "x" * 9000]
    root = save_small({name: torch.randn(70, 70) for name in names}, tmp_path / "run")
    start = time.process_time()
    manifest = ckpt8.compress(root)
    assert time.process_time() - start < 2
    assert all(record.name.isprintable() and len(record.name) < 600 for record in manifest.parameters)
    assert not ckpt8.verify(tmp_path / "run.ckpt8", root).failures


def test_metadata_of_something_else_is_a_plain_file(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    torch.save({"w": torch.randn(80, 80)}, root / "model.pt")
    for content in (b"[section]\n", b"", b"\x80\x04nonsense"):
        (root / ".metadata").write_bytes(content)
        assert {m.path: m.format for m in ckpt8.compress(root, force=True).members}[".metadata"] == FILE
    save_small({"w": torch.randn(80, 80)}, tmp_path / "other")
    (root / "__0_0.distcp").write_bytes((tmp_path / "other" / "__0_0.distcp").read_bytes())
    (root / ".metadata").write_bytes(b"[section]\n")
    assert {m.path: m.format for m in ckpt8.compress(root, force=True).members}["__0_0.distcp"] == FILE


def test_a_file_that_two_checkpoints_claim(tmp_path):
    root = save_small({"w": torch.randn(80, 80)}, tmp_path / "run" / "a").parent
    change_metadata(root / "a", lambda metadata: None)
    (root / ".metadata").write_bytes((root / "a" / ".metadata").read_bytes())
    change_metadata(root, info("w", relative_path="a/__0_0.distcp"))
    refused(root, "belongs to another")


def test_a_bucketed_optimizer_of_megatron(tmp_path):
    """Imitation: keys as Megatron's distributed optimizer has them."""
    bucket = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32).bucket_idx_0"
    root = save_small({f"{bucket}.exp_avg": torch.randn(8000), "decoder.weight": torch.randn(80, 80)}, tmp_path / "run")
    (root / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    refused(root, "Megatron with a bucketed optimizer", UnsupportedError)


@pytest.mark.parametrize("coalesced", [True, False])
def test_a_distributed_optimizer_file_of_megatron(coalesced, tmp_path):
    """Imitation: ``distrib_optim.pt``, state by buffer and types."""
    buckets = {"param": torch.randn(9000), "exp_avg": torch.randn(9000), "exp_avg_sq": torch.rand(9000)}
    tree = {0: {(torch.bfloat16, torch.float32): buckets}} | ({"buckets_coalesced": True} if coalesced else {})
    torch.save(tree, tmp_path / "distrib_optim.pt")
    with pytest.raises(UnsupportedError, match=r"a distrib_optim\.pt of Megatron"):
        ckpt8.compress(tmp_path / "distrib_optim.pt")


# Compressed slices


def frames(root, name, content):
    """Put ``content`` at the end of the file, as the slice ``name``."""
    before = (root / "__0_0.distcp").read_bytes()
    (root / "__0_0.distcp").write_bytes(before + content)
    change_metadata(root, info(name, offset=len(before), length=len(content)))


def test_a_bomb(compressed):
    machine = zstandard.ZstdCompressor().compressobj()
    block = bytes(1 << 20)
    bomb = b"".join(machine.compress(block) for _ in range(40)) + machine.flush()
    assert len(bomb) < 1 << 13
    frames(compressed, "model.up.weight", bomb)
    refused(compressed, "becomes more than the .* bytes that it may have")


def test_frames_that_do_not_end_with_their_slice(compressed):
    place = place_of(compressed, "model.up.weight")
    content = (compressed / "__0_0.distcp").read_bytes()[place.offset : place.offset + place.length]
    before = (compressed / "__0_0.distcp").read_bytes(), (compressed / ".metadata").read_bytes()
    for changed in (content[:-1], content + b"x", content + content, b"x" + content, b""):
        (compressed / "__0_0.distcp").write_bytes(before[0])
        (compressed / ".metadata").write_bytes(before[1])
        frames(compressed, "model.up.weight", changed)
        refused(compressed, "compressed slice at byte")


def test_metadata_that_grows_without_end_where_it_is_written_anew(compressed):
    shared = ()
    for _ in range(60):
        shared = (shared, shared)
    change_metadata(compressed, lambda metadata: setattr(metadata, "planner_data", {"x": shared}))
    refused(compressed, "repeats the same values")


def test_an_unknown_transformation_is_kept(compressed, tmp_path):
    change_metadata(compressed, info(transform_descriptors=["stream.aes/1"]))
    manifest = ckpt8.compress(compressed)
    reason = next(record.reason for record in manifest.storages if record.name.startswith("__0_0.distcp"))
    assert reason == "kept as it is: its slices are transformed by 'stream.aes/1', which is not known"
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    for name in (".metadata", "__0_0.distcp"):
        assert (back / name).read_bytes() == (compressed / name).read_bytes()


@pytest.mark.parametrize("source", ["root", "compressed"])
def test_a_slice_that_cannot_be_read_leaves_its_file_as_it_is(source, request, tmp_path):
    """A zip file whose records are compressed, as another program may write it; the other file is encoded."""
    root = request.getfixturevalue(source)
    stream, deflated = io.BytesIO(), io.BytesIO()
    torch.save(torch.randn(80, 80), stream)
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    content = deflated.getvalue()
    (root / "__1_0.distcp").write_bytes((root / "__0_0.distcp").read_bytes())
    change_metadata(root, info("model.down.weight", relative_path="__1_0.distcp"))
    frames(root, "model.up.weight", content if source == "root" else zstandard.ZstdCompressor().compress(content))
    manifest = ckpt8.compress(root)
    formats = {member.path: member.format for member in manifest.members}
    assert (formats["__0_0.distcp"], formats["__1_0.distcp"]) == (FILE, "dcp")
    reason = next(record.reason for record in manifest.storages if record.name.startswith("__0_0.distcp"))
    assert reason.startswith("kept as it is: slice 'model.up.weight'")
    back = ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "back")
    assert (back / "__0_0.distcp").read_bytes() == (root / "__0_0.distcp").read_bytes()
    assert not ckpt8.verify(tmp_path / "run.ckpt8", root).failures
    assert place_of(back, "model.up.weight") == place_of(root, "model.up.weight")
    assert place_of(back, "model.down.weight").transform_descriptors is None


@pytest.mark.slow
def test_many_chunks_and_slices_are_read_in_no_time(root):
    """Ten thousand chunks that no slice fills: the work is what the file's size allows."""

    def change(metadata):
        entry = metadata.state_dict_metadata["model.up.weight"]
        entry.size = (10_000, 80)
        entry.chunks = [ChunkStorageMetadata((k, 0), (1, 80)) for k in range(1, 10_000)] + entry.chunks
        entry.chunks[-1].sizes = (80, 80)

    change_metadata(root, change)
    ckpt8.compress(root)
