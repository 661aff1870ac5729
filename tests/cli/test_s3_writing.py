"""Containers that are written to s3:// are those that are written to a file, byte for byte, in one pass."""

from __future__ import annotations

import errno
import io
import json
import os
import secrets
import subprocess
import sys

import pytest
import torch
from s3_kit import BUCKET

import ckpt8
from ckpt8.core.errors import OutputError
from ckpt8.core.files.stores import writing
from ckpt8.core.files.stores.s3 import S3Store

PART = 40_000


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(writing, "PART", PART)


@pytest.fixture(scope="module")
def folder(scratch):
    """``run.pt`` has AdamW. In ``refused.pt`` no lossy codec takes the weights and moments of every other layer."""
    for name, refused in {"run.pt": (), "refused.pt": range(0, 12, 2)}.items():
        torch.save(tree_of(refused), scratch / name)
    return scratch


def tree_of(refused=()):
    generator = torch.Generator().manual_seed(0)
    model, state = {}, {}
    for k in range(12):
        weight, moment = (torch.randn(96, 64, generator=generator) for _ in range(2))
        if k in refused:
            weight[0, 0], moment[0, 0] = float("nan"), float("inf")
        model[f"h.{k}.weight"] = weight
        state[k] = {"step": torch.tensor(9.0), "exp_avg": moment * 1e-3, "exp_avg_sq": moment.square() + 1e-9}
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [*state]}
    return {"model": model, "optimizer": {"state": state, "param_groups": [group]}}


@pytest.fixture
def place(bucket):
    """A folder of the bucket that is empty."""
    return f"s3://{BUCKET}/{secrets.token_hex(4)}"


def make_file(tree, folder):
    torch.save(tree, folder / "tree.pt")
    return folder / "tree.pt"


def stored(bucket, url):
    key = url.partition(f"{BUCKET}/")[2]
    return bucket.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()


def parts_of(log):
    return [int(entry["part"]) for entry in log if entry["what"] == "part"]


OPTIONS = {
    "flash": {},
    "compact": {"preset": "compact"},
    "archive": {"preset": "archive"},
    "lossless": {"preset": "lossless"},
    "budget": {"budget": 0.3},
}


@pytest.mark.by_default("flash-run.pt", "lossless-run.pt", "archive-refused.pt")
@pytest.mark.parametrize("name", ["run.pt", "refused.pt"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_object_is_the_local_container(options, name, place, bucket, folder, tmp_path, monkeypatch):
    """Small groups are off: all storages have entries of their own, and are taken back one by one."""
    monkeypatch.setattr("ckpt8.compressing.groups._ROOM", 1 << 20)
    url = f"{place}/a.ckpt8"
    with bucket.counted() as log:
        manifest = ckpt8.compress(folder / name, url, **OPTIONS[options])
    local = ckpt8.compress(folder / name, tmp_path / "a.ckpt8", **OPTIONS[options])
    assert stored(bucket, url) == (tmp_path / "a.ckpt8").read_bytes()
    assert manifest.stored_nbytes == local.stored_nbytes
    numbers = parts_of(log)
    assert len(numbers) >= 5
    assert numbers.index(1) >= len(numbers) - writing.IN_FLIGHT
    if name == "run.pt":
        assert len(log) <= len(numbers) + 6


def test_parts_that_were_sent_are_sent_again(place, bucket, folder, tmp_path, monkeypatch):
    """The bound on the error is broken after a whole weight was written, which is three parts."""
    monkeypatch.setattr("ckpt8.compressing.groups._ROOM", 1 << 20)
    monkeypatch.setattr(writing, "PART", 5000)
    url = f"{place}/a.ckpt8"
    with bucket.counted() as log:
        ckpt8.compress(folder / "run.pt", url, max_update_error=1e-9)
    ckpt8.compress(folder / "run.pt", tmp_path / "a.ckpt8", max_update_error=1e-9)
    assert stored(bucket, url) == (tmp_path / "a.ckpt8").read_bytes()
    numbers = parts_of(log)
    assert len(numbers) > len(set(numbers)) + 5
    assert numbers.index(1) >= len(numbers) - writing.IN_FLIGHT


@pytest.mark.parametrize("background", [{}, {"background": True}, {"background": True, "snapshot": "packed"}], ids=str)
def test_save(background, place, bucket, tmp_path):
    url, tree = f"{place}/model.ckpt8", tree_of()
    for force in (False, True):
        saved = ckpt8.save(tree, url, force=force, **background)
        if background:
            saved.result()
        assert torch.equal(ckpt8.load(url)["model"]["h.3.weight"], ckpt8.load(url)["model"]["h.3.weight"])
    ckpt8.save(tree, tmp_path / "model.ckpt8")
    assert stored(bucket, url) == (tmp_path / "model.ckpt8").read_bytes()

    def save_again():
        saved = ckpt8.save(tree, url, force=False, **background)
        saved.result()

    with pytest.raises(OutputError, match=f"{url}: exists; use force=True"):
        save_again()


@pytest.mark.slow
def test_a_save_in_the_background_ends_before_the_interpreter_does(place, bucket):
    program = (
        "import torch, ckpt8\n"
        f"ckpt8.save({{'w': torch.ones(200_000)}}, '{place}/w.ckpt8', preset='lossless', background=True)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
    assert ckpt8.load(io.BytesIO(stored(bucket, f"{place}/w.ckpt8")))["w"].sum() == 200_000


def test_the_command(place, bucket, folder, run_command, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source = bucket.put(place.partition(f"{BUCKET}/")[2] + "/run.pt", folder / "run.pt")
    code, out, err = run_command("compress", source, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["target"] == f"{place}/run.ckpt8"
    for target, name in ((f"{place}/other.ckpt8", folder / "run.pt"), (f"{place}/third.ckpt8", source)):
        assert run_command("compress", name, "-o", target)[0] == 0
        assert stored(bucket, target) == stored(bucket, f"{place}/run.ckpt8")
    assert run_command.refused(4, "compress", source) == (
        f"ckpt8: {place}/run.ckpt8: exists; use --force to replace it, or give another name\n"
    )
    replaced = run_command.shown("compress", source, "--force", "--preset", "lossless")
    assert f"replaced {place}/run.ckpt8: a file of " in " ".join(replaced.split())
    assert ckpt8.inspect(f"{place}/run.ckpt8")["preset"] == "lossless"
    assert list(tmp_path.iterdir()) == []
    run_command.refused(4, "compress", folder / "run.pt", "-o", source)
    assert stored(bucket, source) == (folder / "run.pt").read_bytes()


def test_what_is_written_at_positions_goes_through_a_temporary_file(
    place, bucket, folder, run_command, monkeypatch, tmp_path
):
    """The files are those of the same commands with local targets."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    key, container = place.rpartition("/")[2], tmp_path / "run.ckpt8"
    ckpt8.compress(folder / "run.pt", container, preset="lossless")
    far, before = bucket.put(f"{key}/run.ckpt8", container), set(tmp_path.iterdir())
    assert run_command("restore", far)[0] == 0
    assert stored(bucket, f"{place}/run.pt") == (folder / "run.pt").read_bytes()
    assert "exists; use --force" in run_command.refused(4, "restore", far)
    assert "replaced" in run_command.shown("restore", far, "--force")
    for name, arguments in {
        "saved.pt": ("restore", container, "--salvage", "-o"),
        "new.pt": ("convert", container),
    }.items():
        with bucket.counted() as log:
            assert run_command(*arguments, f"{place}/{name}")[0] == 0
        assert run_command(*arguments, folder / name)[0] == 0
        assert stored(bucket, f"{place}/{name}") == (folder / name).read_bytes()
        assert parts_of(log)
    assert run_command("convert", far, f"{place}/model.safetensors")[0] == 0
    ckpt8.convert(container, folder / "model.safetensors")
    assert stored(bucket, f"{place}/model.safetensors") == (folder / "model.safetensors").read_bytes()
    monkeypatch.setattr(os, "pwritev", raise_full)
    assert run_command.refused(4, "restore", far, "-o", f"{place}/b.pt").endswith(
        f"No space left on device; it needs 896.06 kB, in {tmp_path} (TMPDIR) first\n"
    )
    assert set(tmp_path.iterdir()) == before


def raise_full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_base_that_is_needed_is_not_replaced(place, bucket, tmp_path):
    tree = {"w": torch.randn(96, 96)}
    ckpt8.save(tree, tmp_path / "a.ckpt8")
    tree["w"][0] = 2
    ckpt8.save(tree, tmp_path / "b.ckpt8", base=tmp_path / "a.ckpt8")
    for name in ("a.ckpt8", "b.ckpt8"):
        bucket.put(f"{place.rpartition('/')[2]}/{name}", tmp_path / name)
    with pytest.raises(OutputError, match=r"/a\.ckpt8: is the base of b\.ckpt8; rebase or remove what needs it first"):
        ckpt8.save({"w": torch.ones(3)}, f"{place}/a.ckpt8")
    assert stored(bucket, f"{place}/a.ckpt8") == (tmp_path / "a.ckpt8").read_bytes()
    ckpt8.save({"w": torch.ones(3)}, f"{place}/b.ckpt8")
    ckpt8.save({"w": torch.ones(3)}, f"{place}/a.ckpt8")


def test_a_base_that_is_needed_since_its_successor_is_written(place, bucket, tmp_path, monkeypatch):
    """The difference comes while parts are sent."""
    tree, url, key = {"w": torch.randn(96, 96)}, f"{place}/a.ckpt8", place.rpartition("/")[2]
    ckpt8.save(tree, tmp_path / "a.ckpt8")
    tree["w"][0] = 2
    ckpt8.save(tree, tmp_path / "b.ckpt8", base=tmp_path / "a.ckpt8")
    bucket.put(f"{key}/a.ckpt8", tmp_path / "a.ckpt8")
    send = S3Store.send

    def send_beside(*arguments):
        content = (tmp_path / "b.ckpt8").read_bytes()
        bucket.client.put_object(Bucket=BUCKET, Key=f"{key}/b.ckpt8", Body=content)
        return send(*arguments)

    monkeypatch.setattr(S3Store, "send", send_beside)
    bucket.order()
    with pytest.raises(OutputError, match=r"/a\.ckpt8: is the base of b\.ckpt8"):
        ckpt8.compress(make_file(tree_of(), tmp_path), url, force=True)
    assert stored(bucket, url) == (tmp_path / "a.ckpt8").read_bytes()
    monkeypatch.setattr(S3Store, "send", send)
    bucket.client.delete_object(Bucket=BUCKET, Key=f"{key}/b.ckpt8")
    with bucket.counted() as log:
        ckpt8.compress(tmp_path / "tree.pt", url, force=True)
    before = next(number for number, entry in enumerate(log) if entry["what"] == "part")
    assert len([entry for entry in log[:before] if entry["method"] == "GET" and entry["what"] == ""]) == 3


def test_a_container_that_the_reader_refuses_never_gets_its_name(place, bucket, monkeypatch):
    monkeypatch.setattr("ckpt8.container.writer.manifest_json", lambda _: {"preset": 7})
    with pytest.raises(OutputError, match=r"a\.ckpt8: would not be readable: "):
        ckpt8.save(tree_of(), f"{place}/a.ckpt8")
    assert bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=place.rpartition("/")[2])["KeyCount"] == 0


def test_what_fails_in_the_background_is_said_later(place, bucket, monkeypatch):
    def refuse(*_):
        raise OutputError("no parts today")

    monkeypatch.setattr(S3Store, "send", refuse)
    saved = ckpt8.save(tree_of(), f"{place}/a.ckpt8", background=True)
    with pytest.raises(OutputError, match="no parts today"):
        saved.result()
