"""Frozen weights of a run in a bucket, and those of a local run whose file is in a bucket."""

from __future__ import annotations

import secrets

import pytest
import torch
from s3_kit import BUCKET
from safetensors.torch import save_file

import ckpt8
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import OutputError, UsageError
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.stores.s3 import S3Store

LAYERS, WIDTH = 3, 640
FROZEN_BYTES = LAYERS * WIDTH * WIDTH * 4


def checkpoint(frozen, number):
    """Adapters that are trained, and frozen layers without a state."""
    generator = torch.Generator().manual_seed(number)
    adapters = {f"lora.{k}": torch.randn(2, WIDTH, generator=generator) for k in range(LAYERS)}
    state = {
        k: {"step": torch.tensor(3.0 + number), "exp_avg": value * 1e-3, "exp_avg_sq": value.square() * 1e-6 + 1e-12}
        for k, value in enumerate(adapters.values())
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [*state]}
    model = {f"layers.{k}": weight for k, weight in enumerate(frozen)} | adapters
    return {"model": model, "optimizer": {"state": state, "param_groups": [group]}}


@pytest.fixture(scope="module")
def files(scratch):
    """``base.safetensors``, ``base.ckpt8`` of it, and two checkpoints of the run, ``1.pt`` and ``2.pt``."""
    generator = torch.Generator().manual_seed(0)
    frozen = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(LAYERS)]
    save_file({f"h.{k}": weight for k, weight in enumerate(frozen)}, scratch / "base.safetensors")
    ckpt8.compress(scratch / "base.safetensors", preset="lossless")
    for number in (1, 2):
        torch.save(checkpoint(frozen, number), scratch / f"{number}.pt")
    return scratch


@pytest.fixture
def place(bucket):
    """A folder of the bucket that is empty."""
    return f"s3://{BUCKET}/{secrets.token_hex(4)}"


def key_of(url):
    return url.partition(f"{BUCKET}/")[2]


def objects(bucket, place):
    prefix = f"{key_of(place)}/"
    listed = bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
    return {each["Key"][len(prefix) :]: each["Size"] for each in listed}


def check(container, files, number, base):
    """It is a small difference to ``base``, and gives the frozen weights back bit for bit."""
    with ContainerReader(as_path(container)) as reader:
        assert reader.manifest.base.path == base
        assert reader.size < FROZEN_BYTES / 20
    own, original = ckpt8.load(container)["model"], torch.load(files / f"{number}.pt")["model"]
    assert all(torch.equal(own[f"layers.{k}"], original[f"layers.{k}"]) for k in range(LAYERS))


def test_a_container_of_the_bucket_is_the_base_where_it_is(place, bucket, files):
    file = bucket.put(f"{key_of(place)}/run/base.ckpt8", files / "base.ckpt8")
    ckpt8.compress(files / "1.pt", f"{place}/run/1.ckpt8", frozen_from=file)
    ckpt8.save(torch.load(files / "2.pt"), f"{place}/other/2.ckpt8", base="auto", frozen_from=file)
    check(f"{place}/run/1.ckpt8", files, 1, "base.ckpt8")
    check(f"{place}/other/2.ckpt8", files, 2, "../run/base.ckpt8")
    assert objects(bucket, place).keys() == {"run/base.ckpt8", "run/1.ckpt8", "other/2.ckpt8"}
    with pytest.raises(OutputError, match=r"is the base of 1\.ckpt8; rebase or remove what needs it first"):
        ckpt8.compress(files / "1.pt", file, force=True)
    assert objects(bucket, place)["run/base.ckpt8"] == (files / "base.ckpt8").stat().st_size


@pytest.mark.parametrize("kind", ["local .ckpt8", "local", "s3", "s3 of another bucket"])
def test_any_other_file_becomes_an_object_in_bases_once(kind, place, bucket, files):
    if kind == "local .ckpt8":
        file = files / "base.ckpt8"
    elif kind == "local":
        file = files / "base.safetensors"
    elif kind == "s3":
        file = bucket.put(f"{key_of(place)}.safetensors", files / "base.safetensors")
    else:
        bucket.client.create_bucket(Bucket="elsewhere")
        bucket.client.put_object(Bucket="elsewhere", Key="a/base.ckpt8", Body=(files / "base.ckpt8").read_bytes())
        file = "s3://elsewhere/a/base.ckpt8"
    ckpt8.compress(files / "1.pt", f"{place}/1.ckpt8", frozen_from=file)
    (base,) = (name for name in objects(bucket, place) if name.startswith("bases/"))
    check(f"{place}/1.ckpt8", files, 1, base)
    with bucket.counted() as log:
        ckpt8.compress(files / "2.pt", f"{place}/2.ckpt8", frozen_from=file)
    check(f"{place}/2.ckpt8", files, 2, base)
    assert objects(bucket, place).keys() == {base, "1.ckpt8", "2.ckpt8"}
    makes = [entry["path"] for entry in log if entry["what"] in ("put", "complete")]
    assert makes == [f"/{BUCKET}/{key_of(place)}/2.ckpt8"]
    # What a later file is compared with is read once, what that is made of is not read again; and heads.
    assert sum(entry["bytes"] for entry in log) < 1.2 * FROZEN_BYTES + (4 << 19)
    with pytest.raises(OutputError, match=r"is the base of .*1\.ckpt8"):
        ckpt8.compress(files / "1.pt", f"{place}/{base}", force=True)


@pytest.mark.parametrize("name", ["base.safetensors", "base.ckpt8"])
@pytest.mark.parametrize("base", [None, "auto"])
def test_a_local_run_keeps_a_base_of_its_own(base, name, place, bucket, files, tmp_path):
    file = bucket.put(f"{key_of(place)}/{name}", files / name)
    for number in (1, 2):
        options = {"base": base} if base else {}
        with bucket.counted() as log:
            ckpt8.compress(files / f"{number}.pt", tmp_path / f"{number}.ckpt8", frozen_from=file, **options)
        if number == 2:
            assert sum(entry["bytes"] for entry in log) <= 600_000
    bucket.client.delete_object(Bucket=BUCKET, Key=key_of(file))
    with ContainerReader(tmp_path / "1.ckpt8") as reader:
        (kept,) = (link.path for link in reader.links())
    assert kept.parent == tmp_path / "bases"
    check(tmp_path / "1.ckpt8", files, 1, f"bases/{kept.name}")
    assert ckpt8.verify(tmp_path / "2.ckpt8", files / "2.pt").failures == ()


def test_chain_in_the_bucket(place, bucket, files, run_command):
    for number in (1, 2):
        bucket.put(f"{key_of(place)}/step-{number}.pt", files / f"{number}.pt")
    file = bucket.put(f"{key_of(place)}.safetensors", files / "base.safetensors")
    assert run_command("chain", place, "--frozen-from", file, "--rest", "0", "--remove")[0] == 0
    (base,) = (name for name in objects(bucket, place) if name.startswith("bases/"))
    check(f"{place}/step-1.ckpt8", files, 1, base)
    assert objects(bucket, place).keys() == {base, "step-1.ckpt8", "step-2.ckpt8"}
    assert run_command("verify", f"{place}/step-2.ckpt8", "--against", files / "2.pt")[0] == 0


def test_a_file_that_is_named_in_vain(place, bucket, files, tmp_path):
    save_file({"x": torch.ones(WIDTH, WIDTH)}, tmp_path / "x.safetensors")
    with pytest.raises(UsageError, match="holds none of the frozen weights bit for bit"):
        ckpt8.compress(files / "1.pt", f"{place}/1.ckpt8", frozen_from=tmp_path / "x.safetensors")
    assert "1.ckpt8" not in objects(bucket, place)


def test_a_damaged_object_in_bases_is_made_again(place, bucket, files):
    ckpt8.compress(files / "1.pt", f"{place}/1.ckpt8", frozen_from=files / "base.safetensors")
    (base,) = (name for name in objects(bucket, place) if name.startswith("bases/"))
    whole = objects(bucket, place)[base]
    bucket.put(f"{key_of(place)}/{base}", b"nothing")
    ckpt8.compress(files / "2.pt", f"{place}/2.ckpt8", frozen_from=files / "base.safetensors")
    assert objects(bucket, place)[base] == whole
    check(f"{place}/1.ckpt8", files, 1, base)


def test_two_runs_that_make_the_object_at_once(place, bucket, files, monkeypatch):
    """The second is told that it is there, and takes it."""
    ckpt8.compress(files / "1.pt", f"{place}/1.ckpt8", frozen_from=files / "base.safetensors")
    (base,) = (name for name in objects(bucket, place) if name.startswith("bases/"))
    key = f"{key_of(place)}/{base}"
    content = bucket.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    bucket.client.delete_object(Bucket=BUCKET, Key=key)
    begin, put = S3Store.begin, S3Store.put

    def rival(call):
        def called(store, write, *rest):
            if write.key == key:
                bucket.client.put_object(Bucket=BUCKET, Key=key, Body=content)
            return call(store, write, *rest)

        return called

    monkeypatch.setattr(S3Store, "begin", rival(begin))
    monkeypatch.setattr(S3Store, "put", rival(put))
    with bucket.counted() as log:
        ckpt8.compress(files / "2.pt", f"{place}/2.ckpt8", frozen_from=files / "base.safetensors")
    refused = [entry for entry in log if entry["what"] in ("put", "complete") and entry.get("status") == 412]
    assert [entry["path"] for entry in refused] == [f"/{BUCKET}/{key}"]
    check(f"{place}/2.ckpt8", files, 2, base)
