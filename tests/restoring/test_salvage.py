"""``restore --salvage``: every tensor whose chunks are whole comes back, all else is listed, nothing is invented."""

import json
import re
import shutil
import struct
import warnings
import zipfile
from contextlib import contextmanager

import pytest
import torch
import torch.distributed.checkpoint as dcp
import zstandard
from faults_kit import make_run
from flips_kit import places
from hostile_kit import container_of, pack, unpack
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt8
from ckpt8.compressing import groups
from ckpt8.core.errors import InputError, OutputError, UnsupportedError

FRAME = 1 << 20
ADVICE = "; restore with salvage=True writes whatever is intact"


@contextmanager
def own_entries():
    """Nothing shares entries, as in a large checkpoint; ``test_sharing`` damages what shares them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "_ROOM", 1 << 40)
        yield


@pytest.fixture(scope="module")
def sample(tmp_path_factory, inputs):
    """A container of a real checkpoint, and what it restores to."""
    folder = tmp_path_factory.mktemp("sample")
    with own_entries():
        ckpt8.compress(inputs / "gpt_adamw.pt", folder / "run.ckpt8")
    ckpt8.restore(folder / "run.ckpt8", folder / "whole.pt")
    return folder / "run.ckpt8"


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A weight of three chunks and a half, beside a small one and integers."""
    folder = tmp_path_factory.mktemp("large")
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(7 * FRAME // 2, generator=generator).view(7, -1)
    tree = {"model": {"w": w, "part": w[0, :100], "late": w[6, 1:100], "b": torch.ones(8), "n": torch.arange(9)}}
    torch.save(tree, folder / "run.pt")
    ckpt8.compress(folder / "run.pt", rules=["model.w=split24"])
    ckpt8.restore(folder / "run.ckpt8", folder / "whole.pt")
    return folder / "run.ckpt8"


def damage(source, target, *where, bits=1):
    """A copy with bits flipped in the middle of what has one of these names; the name and a number tell the byte."""
    data = bytearray(source.read_bytes())
    found = {name: (start, stop) for name, start, stop in places(bytes(data))}
    for each in where:
        name, at = each if isinstance(each, tuple) else (each, None)
        start, stop = found[name]
        place = (start + stop) // 2 if at is None else start + at
        for k in range(bits):
            data[place + k] ^= 4
    target.write_bytes(data)
    return target


def entries_of(path):
    return [name for name, _, _ in places(path.read_bytes())]


def tensors(tree, path=""):
    if isinstance(tree, torch.Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from tensors(value, f"{path}.{key}" if path else str(key))


def same(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous(), b.contiguous())


def loaded(path):
    return dict(tensors(torch.load(path, weights_only=False)))


def assert_all_but(lost, path, whole):
    """Every tensor but those that are ``lost`` is as in the file that a whole container gives."""
    found, expected = loaded(path), loaded(whole)
    assert found.keys() == expected.keys()
    assert {name for name in expected if not same(found[name], expected[name])} == set(lost)


def assert_all_comes_back(path, sample):
    """All of a damaged container, which says so."""
    found = ckpt8.restore(path, path.with_name("x.pt"), force=True, salvage=True)
    assert (found.lost, found.complete) == ([], False)
    assert path.with_name("x.pt").read_bytes() == sample.with_name("whole.pt").read_bytes()
    return found


@pytest.mark.slow
def test_a_damaged_plane_costs_its_tensor_alone(sample, tmp_path):
    names = [name for name in entries_of(sample) if "/" in name and not name.startswith("ckpt8.")]
    parts = {name.rpartition("/")[2] for name in names}
    assert parts >= {"exponent", "mantissa", "rho", "codes", "scales", "plane0", "plane3"}
    for part in sorted(parts):
        name = next(name for name in reversed(names) if name.endswith(f"/{part}"))
        path, tensor = damage(sample, tmp_path / "x.ckpt8", name), name.rpartition("/")[0]
        with pytest.raises(InputError, match="checksum"):
            ckpt8.restore(path, tmp_path / "y.pt")
        found = ckpt8.restore(path, tmp_path / "x.pt", force=True, salvage=True)
        assert [(each.name, each.member) for each in found.lost] == [(tensor, "gpt_adamw.pt")]
        assert (found.complete, found.damage) == (False, None)
        assert [member.state for member in found.members] == ["damaged"]
        assert_all_but([tensor], tmp_path / "x.pt", sample.with_name("whole.pt"))
        assert loaded(tmp_path / "x.pt")[tensor].isnan().all()


@pytest.mark.slow
def test_only_the_chunk_is_lost_and_views_of_the_rest_are_whole(large, tmp_path):
    with ckpt8.open(large) as file:
        record = next(each for each in file.manifest.storages if each.name == "model.w")
    offset = sum(record.parts["mantissa"].lengths[:2])
    path = damage(large, tmp_path / "x.ckpt8", ("model.w/mantissa", offset + 5))
    found = ckpt8.restore(path, tmp_path / "x.pt", salvage=True)
    assert [(each.name, each.elements, each.count) for each in found.lost] == [
        ("model.w", [[2 * FRAME, 3 * FRAME]], 7 * FRAME // 2)
    ]
    last = f"  model.w: lost elements {2 * FRAME} to {3 * FRAME - 1} of {7 * FRAME // 2} in its storage"
    assert found.lines()[0] == f"{tmp_path / 'x.pt'}: {found.tensors} tensors intact, 1 not recovered in full"
    assert found.lines()[-1] == last
    assert_all_but(["model.w"], tmp_path / "x.pt", large.with_name("whole.pt"))
    w, whole = (loaded(each)["model.w"].view(-1) for each in (tmp_path / "x.pt", large.with_name("whole.pt")))
    assert w[2 * FRAME : 3 * FRAME].isnan().all()
    assert torch.equal(w[: 2 * FRAME], whole[: 2 * FRAME])
    assert torch.equal(w[3 * FRAME :], whole[3 * FRAME :])


@pytest.mark.slow
def test_what_is_salvaged_has_right_checksums(sample, tmp_path):
    """Those of lossy and of lossless tensors: every zip tool reads the file, and so does ckpt8."""
    for part in ("/mantissa", "/plane2"):
        name = next(name for name in entries_of(sample) if name.endswith(part))
        path = damage(sample, tmp_path / "x.ckpt8", name)
        ckpt8.restore(path, tmp_path / "x.pt", force=True, salvage=True)
        assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None
        manifest = ckpt8.compress(tmp_path / "x.pt", tmp_path / "y.ckpt8", force=True)
        assert [each.reason is None for each in manifest.storages if each.name == name.rpartition("/")[0]] == [False]


def test_a_salvaged_directory_of_ranks_has_right_checksums(tmp_path):
    """The slices of a plain distributed checkpoint, which a container keeps bit-exact, are zip files of their own."""
    with own_entries(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(3000), "b": torch.ones(40)}, checkpoint_id=tmp_path / "run")
        ckpt8.compress(tmp_path / "run", preset="lossless")
    name = next(name for name in entries_of(tmp_path / "run.ckpt8") if name.endswith("a/plane0"))
    damage(tmp_path / "run.ckpt8", tmp_path / "x.ckpt8", name)
    found = ckpt8.restore(tmp_path / "x.ckpt8", tmp_path / "back", salvage=True)
    assert [(each.name.rpartition(":")[2], each.count) for each in found.lost] == [("a", 3000)]
    ckpt8.compress(tmp_path / "back")
    with ckpt8.open(tmp_path / "back.ckpt8") as file:
        assert [file.get_tensor(name).isnan().all().item() for name in file.keys()] == [True, False]  # noqa: SIM118


@pytest.mark.slow
def test_without_the_structure_whole_tensors_are_kept_by_name(sample, tmp_path):
    codes = next(name for name in entries_of(sample) if name.endswith("/codes"))
    path = damage(sample, tmp_path / "x.ckpt8", "ckpt8.skeleton/bytes", codes)
    found = ckpt8.restore(path, tmp_path / "x.pt", salvage=True)
    assert found.path == tmp_path / "x.pt.safetensors"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x.ckpt8", "x.pt.safetensors"]
    assert [member.state for member in found.members] == ["tensors"]
    assert {each.name for each in found.lost} == {codes.rpartition("/")[0], "ckpt8.skeleton"}
    expected = loaded(sample.with_name("whole.pt"))
    del expected[codes.rpartition("/")[0]]
    with safe_open(found.path, "pt") as file:
        assert set(file.keys()) == set(expected)
        assert all(same(file.get_tensor(name), value) for name, value in expected.items())
    assert found.tensors == len(expected)


@pytest.mark.parametrize(
    ("kind", "reason"), [("file", "its file is damaged and no checkpoint"), ("torch_zip", "no tensor is intact")]
)
def test_a_damaged_file_without_tensors(kind, reason, tmp_path):
    content = zstandard.compress(b"contents")
    data = container_of(content, kind)
    (tmp_path / "x.ckpt8").write_bytes(data.replace(content, bytes(len(content))))
    with pytest.raises(InputError, match=rf"x\.ckpt8: {reason}; nothing can be recovered$"):
        ckpt8.restore(tmp_path / "x.ckpt8", tmp_path / "y", salvage=True)
    assert [path.name for path in tmp_path.iterdir()] == ["x.ckpt8"]


def test_the_container_is_not_written_over(sample, tmp_path):
    path = damage(sample, tmp_path / "x.pt.safetensors", "ckpt8.skeleton/bytes")
    before = path.read_bytes()
    for target in (path, tmp_path / "x.pt"):
        with pytest.raises(OutputError, match="is the file that is read"):
            ckpt8.restore(path, target, salvage=True, force=True)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_views_by_name(inputs, tmp_path):
    """Transposed, sliced and tied ones; what no safetensors file holds is listed."""
    with own_entries():
        ckpt8.compress(inputs / "views.pt", tmp_path / "v.ckpt8", preset="lossless")
    path = damage(tmp_path / "v.ckpt8", tmp_path / "x.ckpt8", "ckpt8.skeleton/bytes")
    found = ckpt8.restore(path, tmp_path / "x.pt", salvage=True)
    expected = loaded(inputs / "views.pt")
    with safe_open(found.path, "pt") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert all(same(kept[name], expected[name].resolve_conj().resolve_neg()) for name in kept)
    unwritten = {each.name for each in found.lost if not each.elements}
    assert unwritten == expected.keys() - kept.keys()
    for value in (expected[name] for name in unwritten):
        assert value.is_conj() or value.is_neg() or value.nbytes > value.untyped_storage().nbytes()
    assert len(kept) > 20


@pytest.mark.by_default("ckpt8.seal-40")
@pytest.mark.parametrize("bits", [1, 40])
@pytest.mark.parametrize("part", ["header", "padding", "length of the header", "ckpt8.seal"])
def test_a_damaged_header_or_seal_costs_nothing(part, bits, sample, tmp_path):
    """Wherever it is hit: the manifest and the checksums of the frames place everything."""
    size = {name: stop - start for name, start, stop in places(sample.read_bytes())}[part]
    for at in {0, size // 3, size // 2, size - 1}:
        if at + bits > size:
            continue
        path = damage(sample, tmp_path / "x.ckpt8", (part, at), bits=bits)
        with pytest.raises(InputError, match=rf"{ADVICE}$"):
            ckpt8.verify(path)
        assert ADVICE not in assert_all_comes_back(path, sample).damage
        assert "x.ckpt8" in assert_all_comes_back(path, sample).damage


@pytest.mark.parametrize("name", ["x.ckpt8", "x.bin"])
def test_a_flipped_bit_of_the_first_bytes_is_named(name, sample, tmp_path):
    """No command takes such a file, which also looks like safetensors, for a checkpoint of planes."""
    path, data = tmp_path / name, sample.read_bytes()
    for at in range(data.index(b"1.")):
        path.write_bytes(data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :])
        for call in (ckpt8.inspect, ckpt8.verify, ckpt8.restore):
            with pytest.raises(InputError) as caught:
                call(path)
            said = str(caught.value)
            assert "its first bytes are damaged" in said or "does not match the seal" in said, said
            assert said.endswith(ADVICE), said


@pytest.mark.slow
def test_any_other_length_of_the_header(sample, tmp_path):
    """Also one that ends within the padding, where what is left of the header still parses."""
    data = sample.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    padding = next(stop - start for name, start, stop in places(data) if name == "padding")
    assert padding > 1024
    for other in (length - 1, length - 512, length - padding, length + 1, length + 4096, 1, 0, 2**40, 2**64 - 1):
        (tmp_path / "x.ckpt8").write_bytes(struct.pack("<Q", other) + data[8:])
        assert_all_comes_back(tmp_path / "x.ckpt8", sample)


@pytest.mark.parametrize("gone", [["length of the header"], ["header"], ["length of the header", "header"]], ids=str)
def test_a_header_that_is_gone_and_first_frames_that_are_damaged(gone, sample, tmp_path):
    """What is damaged at its beginning is placed by what follows it."""
    found = {name: (start, stop) for name, start, stop in places(sample.read_bytes())}
    ends = ("mlp.c_fc.weight/exponent", "mlp.c_proj.weight/rho", "exp_avg/codes", "exp_avg_sq/scales")
    # Of other parameters: entries of one follow each other.
    picks = (max, min, max, min)
    names = [pick(name for name in found if name.endswith(end)) for pick, end in zip(picks, ends, strict=True)]
    path = damage(sample, tmp_path / "x.ckpt8", *((name, 0) for name in names))
    data = bytearray(path.read_bytes())
    for start, stop in map(found.get, gone):
        data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    lost = {name.rpartition("/")[0] for name in names}
    assert {each.name for each in ckpt8.restore(path, tmp_path / "x.pt", salvage=True).lost} == lost
    assert_all_but(lost, tmp_path / "x.pt", sample.with_name("whole.pt"))


@pytest.mark.parametrize("how", ["no statistics", "a moment is NaN"])
def test_a_header_that_is_gone_where_the_manifest_does_not_pair_weights_and_moments(how, tmp_path):
    """Entries are found by their checksums, in whatever order they are."""
    model = torch.nn.ModuleList([torch.nn.Linear(80, 70) for _ in range(12)])
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    if how == "a moment is NaN":
        optimizer.state[model[3].weight]["exp_avg"][0, 0] = float("nan")
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with own_entries():
        ckpt8.save(tree, tmp_path / "run.ckpt8", stats=how != "no statistics")
    ckpt8.restore(tmp_path / "run.ckpt8", tmp_path / "whole.pt")
    path = damage(tmp_path / "run.ckpt8", tmp_path / "x.ckpt8")
    data = bytearray(path.read_bytes())
    start, stop = next((start, stop) for name, start, stop in places(bytes(data)) if name == "header")
    data[start:stop] = bytes(stop - start)
    path.write_bytes(data)
    assert_all_comes_back(path, tmp_path / "run.ckpt8")


@pytest.mark.slow
def test_a_file_that_is_cut_off(sample, tmp_path):
    """Into the seal everything is there, into the manifest nothing, since it alone tells what the rest is."""
    data, path = sample.read_bytes(), tmp_path / "x.ckpt8"
    for missing in (1, 31, 32):
        path.write_bytes(data[:-missing])
        assert_all_comes_back(path, sample)
    (tmp_path / "x.pt").unlink()
    for size in (len(data) - 33, len(data) // 2, 4096, 8, 7, 1, 0):
        path.write_bytes(data[:size])
        with pytest.raises(InputError, match="nothing can be recovered"):
            ckpt8.restore(path, tmp_path / "x.pt", salvage=True)
        with pytest.raises(InputError, match=r"^(?!.*salvage)"):
            ckpt8.restore(path, tmp_path / "x.pt")
        assert list(tmp_path.iterdir()) == [path]


def test_bytes_behind_the_end(sample, tmp_path):
    (tmp_path / "x.ckpt8").write_bytes(sample.read_bytes() + bytes(4096))
    assert_all_comes_back(tmp_path / "x.ckpt8", sample)


def test_what_never_was_a_container_or_has_no_manifest(sample, tmp_path):
    path = damage(sample, tmp_path / "x.ckpt8", "ckpt8.manifest")
    for content in (path.read_bytes(), b"", b"x" * 1000, b"PK\3\4" + bytes(100), b"\x28\xb5\x2f\xfd" * 100):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"^[^\n]*x\.ckpt8: .*; nothing can be recovered$"):
            ckpt8.restore(path, tmp_path / "x.pt", salvage=True)
        with pytest.raises(InputError, match=r"^(?!.*salvage)"):
            ckpt8.restore(path, tmp_path / "x.pt")
        assert list(tmp_path.iterdir()) == [path]


def test_a_later_version_is_not_taken_for_damage(sample, tmp_path):
    metadata, entries, manifest = unpack(sample.read_bytes())
    path = tmp_path / "x.ckpt8"
    path.write_bytes(pack(manifest | {"version": "2.0"}, entries, metadata | {"ckpt8": "2.0"}))
    with pytest.raises(UnsupportedError, match="format"):
        ckpt8.restore(path, tmp_path / "x.pt", salvage=True)


# Directories


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("directory")
    make_run(folder / "run")
    with own_entries():
        ckpt8.compress(folder / "run")
    ckpt8.restore(folder / "run.ckpt8", folder / "whole")
    return folder / "run.ckpt8"


def contents(root):
    return {
        str(path.relative_to(root)): str(path.readlink()) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in root.rglob("*")
    }


def _skeleton(path, member):
    """The name of the entry of a member's skeleton."""
    with ckpt8.open(path) as file:
        record = next(each for each in file.manifest.members if each.path == member)
        return f"{file.manifest.storages[record.skeleton].name}/bytes"


@pytest.mark.slow
def test_whole_members_of_a_directory_are_as_they_were(directory, tmp_path):
    plane = max(name for name in entries_of(directory) if re.fullmatch("model.pt:.*mlp.*/rho", name))
    where = [plane, *(_skeleton(directory, member) for member in ("config.json", "sub/views.pt", "latest.pt"))]
    path = damage(directory, tmp_path / "run.ckpt8", *where)
    found = ckpt8.restore(path, tmp_path / "out", salvage=True)
    assert [(member.path, member.state, member.written) for member in sorted(found.members, key=lambda m: m.path)] == [
        *((name, "lost", None) for name in ("config.json", "latest.pt")),
        ("model.pt", "damaged", "model.pt"),
        *((name, "whole", name) for name in ("sub/empty", "sub/legacy.pt")),
        ("sub/views.pt", "tensors", "sub/views.pt.safetensors"),
    ]
    written, whole = contents(tmp_path / "out"), contents(directory.with_name("whole"))
    assert written.keys() == whole.keys() - {"config.json", "latest.pt", "sub/views.pt"} | {"sub/views.pt.safetensors"}
    assert all(written[name] == whole[name] for name in ("sub", "sub/empty", "sub/legacy.pt"))
    lost = plane.rpartition("/")[0].removeprefix("model.pt:")
    assert_all_but([lost], tmp_path / "out/model.pt", directory.with_name("whole") / "model.pt")
    with safe_open(tmp_path / "out/sub/views.pt.safetensors", "pt") as file:
        assert not [name for name in file.keys() if name.startswith("sub/")]  # noqa: SIM118 - no mapping
    assert {each.member for each in found.lost} == {"config.json", "latest.pt", "model.pt", "sub/views.pt"}


@pytest.mark.parametrize("neighbour", ["x.pt.safetensors", "x.pt.safetensors/y.safetensors"])
def test_members_whose_tensors_would_have_one_name(neighbour, tmp_path):
    """The tensors of x.pt cannot go to x.pt.safetensors, a member or a directory. The neighbour has its own file."""
    (tmp_path / "run" / neighbour).parent.mkdir(parents=True)
    one, other = {"model": {"one": torch.rand(64, 64)}}, {"other": torch.rand(64, 64)}
    torch.save(one, tmp_path / "run/x.pt")
    save_file(other, tmp_path / "run" / neighbour)
    ckpt8.compress(tmp_path / "run", preset="lossless")
    where = [_skeleton(tmp_path / "run.ckpt8", member) for member in ("x.pt", neighbour)]
    path = damage(tmp_path / "run.ckpt8", tmp_path / "bad.ckpt8", *where)
    found = ckpt8.restore(path, tmp_path / "out", salvage=True)
    written = {member.path: member.written for member in found.members}
    assert {name for name, content in contents(tmp_path / "out").items() if content} == {*written.values()}
    assert written.keys() == {"x.pt", neighbour}
    for path, name, tensor in (("x.pt", "model.one", one["model"]["one"]), (neighbour, "other", other["other"])):
        assert torch.equal(load_file(tmp_path / "out" / written[path])[name], tensor)


@pytest.mark.slow
def test_targets_are_as_safe_as_ever(directory, tmp_path):
    path = damage(directory, tmp_path / "run.ckpt8", "ckpt8.seal")
    (tmp_path / "out").mkdir()
    with pytest.raises(OutputError, match="exists"):
        ckpt8.restore(path, tmp_path / "out", salvage=True)
    ckpt8.restore(path, tmp_path / "out", salvage=True, force=True)
    assert contents(tmp_path / "out") == contents(directory.with_name("whole"))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "run.ckpt8"]


@pytest.mark.slow
def test_the_command(sample, run_command, tmp_path):
    plane = max(name for name in entries_of(sample) if "mlp" in name and name.endswith("/rho"))
    path = damage(sample, tmp_path / "run.ckpt8", plane)
    assert run_command.refused(3, "restore", path).endswith("; restore with --salvage writes whatever is intact\n")
    code, out, err = run_command("restore", path, "--salvage", "--json")
    assert (code, err.count("\n")) == (1, 1)
    report = json.loads(out)
    assert report["path"] == str(tmp_path / "run.pt")
    assert (report["original"], report["other_name"], report["replaced"]) == ("gpt_adamw.pt", "gpt_adamw.pt", None)
    assert [each["name"] for each in report["lost"]] == [plane.rpartition("/")[0]]
    names = {"original", "other_name", "replaced", "left", "error", "exit_code"}
    assert set(report) == {"schema", "path", "damage", "base", "tensors", "members", "lost", "complete"} | names
    assert (report["exit_code"], f"ckpt8: {report['error']}\n") == (1, err)
    shutil.copy(sample, path)
    code, out, err = run_command("restore", path, "--salvage", "--force")
    assert (code, err) == (0, "")
    assert "intact, 0 not recovered in full" in out
