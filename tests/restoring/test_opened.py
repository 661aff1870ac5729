"""``ckpt8.open`` and ``load`` of containers and originals, beside ``safe_open``, ``load_file`` and ``torch.load``."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import tempfile
import warnings

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ckpt8

torch.manual_seed(0)
TENSORS = {
    "wte.weight": torch.randn(300, 64),
    "wte.bias": torch.randn(64),
    "half": torch.randn(3, 4, 5).bfloat16(),
    "counts": torch.arange(7),
    "scalar": torch.tensor(2.5),
}
KINDS = ("safetensors", "torch", "container", "container of torch", "directory of ranks")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    import torch.distributed.checkpoint as dcp

    from ckpt8.integrations.dcp import Ckpt8StorageWriter

    folder = tmp_path_factory.mktemp("opened")
    save_file(TENSORS, folder / "a.safetensors", metadata={"format": "pt"})
    torch.save(TENSORS, folder / "b.pt")
    for name in ("a.safetensors", "b.pt"):
        ckpt8.compress(folder / name, preset="lossless")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.save(dict(TENSORS), storage_writer=Ckpt8StorageWriter(folder / "ranks", preset="lossless"), no_dist=True)
    return dict(zip(KINDS, map(folder.joinpath, ("a.safetensors", "b.pt", "a.ckpt8", "b.ckpt8", "ranks")), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_read_as_safe_open_reads_one(kind, paths):
    cuts = (slice(10, 20), (slice(None, -7), slice(3, 9)), (slice(5), 3), 4, slice(0, 0), slice(1, 50, 2), ...)
    with ckpt8.open(paths[kind]) as ours, safe_open(paths["safetensors"], "pt") as theirs:
        assert set(ours) == set(ours.keys()) == set(theirs.keys())
        assert len(ours) == len(TENSORS)
        for name, tensor in TENSORS.items():
            assert name in ours
            assert torch.equal(ours[name], theirs.get_tensor(name))
            assert torch.equal(ours.get_tensor(name), tensor)
            assert ours.get_slice(name).get_shape() == theirs.get_slice(name).get_shape()
            assert ours.get_slice(name).get_dtype() is tensor.dtype
        for cut in cuts:
            assert torch.equal(ours.get_slice("wte.weight")[cut], TENSORS["wte.weight"][cut]), cut
        assert torch.equal(ours.get_slice("half")[1:, :2], TENSORS["half"][1:, :2])
        assert "wte.weigth" not in ours
        for call in (ours.get_tensor, ours.get_slice, ours.__getitem__):
            with pytest.raises(KeyError) as error:
                call("wte.weigth")
            assert isinstance(error.value, ckpt8.UsageError)
            assert str(error.value) == f"{paths[kind]}: has no tensor 'wte.weigth'; near it are wte.weight, wte.bias"
        assert all(isinstance(text, str) for pair in (ours.metadata() or {}).items() for text in pair)
    with ckpt8.open(paths[kind], device="meta") as file:
        assert file["half"].device.type == file.get_slice("wte.weight")[:2].device.type == "meta"


def test_a_slice_reads_its_own_chunks_alone(tmp_path):
    flat = torch.arange(1 << 22, dtype=torch.int32).view(1 << 11, -1)
    save_file({"w": flat}, tmp_path / "a.safetensors")
    ckpt8.compress(tmp_path / "a.safetensors", preset="lossless")
    content = bytearray((tmp_path / "a.ckpt8").read_bytes())
    content[len(content) // 2] ^= 1  # somewhere in a frame in the middle
    (tmp_path / "a.ckpt8").write_bytes(content)
    with ckpt8.open(tmp_path / "a.ckpt8") as file:
        assert torch.equal(file.get_slice("w")[:100], flat[:100])
        with pytest.raises(ckpt8.InputError):
            file.get_tensor("w")


@pytest.mark.parametrize("kind", KINDS)
def test_load_takes_originals_and_containers(kind, paths):
    expected = load_file(paths["safetensors"]) if kind == "safetensors" else torch.load(paths["torch"])
    loaded = ckpt8.load(paths[kind], "cpu", weights_only=True)
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_what_load_and_open_refuse(paths, tmp_path):
    with pytest.raises(ckpt8.UsageError, match="weights_only is False"):
        ckpt8.load(paths["torch"], weights_only=False)
    with pytest.raises(ckpt8.UsageError, match="leave out member"):
        ckpt8.load(paths["torch"], member="a.pt")
    # A container is a safetensors file; one without its magic is damaged, and no checkpoint of planes.
    content = bytearray(paths["container"].read_bytes())
    content[8:64] = content[8:64].replace(b"ckpt8", b"ckpt9")
    (tmp_path / "a.ckpt8").write_bytes(content)
    (tmp_path / "text.pt").write_text("no checkpoint")
    for path in (tmp_path / "a.ckpt8", tmp_path / "text.pt", tmp_path / "none.pt", tmp_path):
        for call in (ckpt8.load, ckpt8.open):
            with pytest.raises(ckpt8.InputError):
                call(path)


@pytest.mark.parametrize("kind", KINDS[:4])
def test_file_objects_are_taken_as_torch_takes_them(kind, paths, tmp_path):
    expected = ckpt8.load(paths[kind])
    buffer = io.BytesIO(b"before" + paths[kind].read_bytes())
    buffer.seek(6)
    with paths[kind].open("rb") as file:
        for loaded in (ckpt8.load(buffer), ckpt8.load(file)):
            assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())


def test_a_file_that_unpacks_is_read_through_it(paths, tmp_path):
    with gzip.open(tmp_path / "a.pt.gz", "wb") as out:
        out.write(paths["torch"].read_bytes())
    with gzip.open(tmp_path / "a.pt.gz") as file, io.BufferedReader(gzip.open(tmp_path / "a.pt.gz")) as other:
        for loaded in (ckpt8.load(file), ckpt8.load(other)):
            assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def test_a_slice_takes_no_more_memory_than_the_file_has(tmp_path):
    torch.save({"w": torch.ones(1).expand(1 << 40)}, tmp_path / "a.pt")
    with ckpt8.open(tmp_path / "a.pt") as file:
        assert file.get_slice("w")[:].shape == (1 << 40,)


class Broken:
    """A file whose disk fails, or that cannot be written to."""

    def read(self, size=-1):
        raise OSError(errno.EIO, "Input/output error")


class Full:
    """A file that cannot be read."""

    def write(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_object_that_fails_ends_in_one_line(paths, tmp_path):
    closed = io.BytesIO()
    closed.close()
    with contextlib.ExitStack() as opened:
        for file, error, message in (
            (closed, ckpt8.InputError, "the BytesIO: cannot be read: "),
            (Broken(), ckpt8.InputError, "the Broken: cannot be read: Input/output error"),
            (Full(), TypeError, "a Full cannot be read"),
            (opened.enter_context((tmp_path / "new").open("wb")), ckpt8.InputError, r"new: cannot be read: "),
            (
                opened.enter_context(paths["torch"].open(encoding="utf-8")),
                ckpt8.UsageError,
                r"b\.pt: is open for texts",
            ),
        ):
            with pytest.raises(error, match=message) as refusal:
                ckpt8.load(file)
            assert isinstance(refusal.value, ckpt8.UsageError if error is TypeError else error)
        for file, error, message in (
            (closed, ckpt8.OutputError, "the BytesIO: cannot be written: "),
            (Broken(), TypeError, "a Broken takes no bytes"),
            (Full(), ckpt8.OutputError, "the Full: cannot be written: No space left on device"),
            (opened.enter_context(paths["torch"].open("rb")), ckpt8.OutputError, r"b\.pt: cannot be written: "),
        ):
            with pytest.raises(error, match=message):
                ckpt8.save(TENSORS, file)


def test_a_container_goes_into_a_file_object(tmp_path):
    buffer = io.BytesIO()
    manifest = ckpt8.save(TENSORS, buffer, preset="lossless")
    with (tmp_path / "a.ckpt8").open("wb") as file:
        ckpt8.save(TENSORS, file, preset="lossless")
    assert (tmp_path / "a.ckpt8").read_bytes() == buffer.getvalue()
    assert manifest.preset == "lossless"
    buffer.seek(0)
    assert all(torch.equal(tensor, TENSORS[name]) for name, tensor in ckpt8.load(buffer).items())


def test_what_file_objects_refuse(tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with pytest.raises(ckpt8.InputError, match=r"^the BytesIO: "):
        ckpt8.load(io.BytesIO(b"no checkpoint"))
    with pytest.raises(ckpt8.UsageError, match="is open for texts"):
        ckpt8.load(io.StringIO("text"))
    with (tmp_path / "a.txt").open("w") as file, pytest.raises(ckpt8.UsageError, match=r"a\.txt: is open for texts"):
        ckpt8.save(TENSORS, file)
    with pytest.raises(ckpt8.UsageError, match="need a path"):
        ckpt8.save(TENSORS, io.BytesIO(), background=True)
    assert not list((tmp_path / "temporary").iterdir())
