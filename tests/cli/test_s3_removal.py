"""An object goes once its container was verified against it, byte for byte, and only the version that was verified."""

from __future__ import annotations

import secrets

import pytest
import torch
from s3_kit import BUCKET

import ckpt8
from ckpt8.chaining import jobs
from ckpt8.core.errors import InputError, OutputError
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.stores.s3 import S3Store


@pytest.fixture
def key(bucket, tmp_path):
    """A folder of the bucket that has ``step-1.pt`` and ``step-2.pt``."""
    key = secrets.token_hex(4)
    for number in (1, 2):
        torch.save({"model": {"w": torch.randn(300, 300)}, "step": number}, tmp_path / f"step-{number}.pt")
        bucket.put(f"{key}/step-{number}.pt", tmp_path / f"step-{number}.pt")
    return key


def names(bucket, key):
    listed = bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{key}/")
    return [each["Key"].rpartition("/")[2] for each in listed.get("Contents", ())]


def test_a_source_goes_after_its_container_was_verified(key, bucket, tmp_path, run_command):
    code, out, _ = run_command("compress", f"s3://{BUCKET}/{key}/step-1.pt", "--remove")
    assert (code, "removed, after the container was verified against it" in out) == (0, True)
    assert names(bucket, key) == ["step-1.ckpt8", "step-2.pt"]
    assert run_command("restore", f"s3://{BUCKET}/{key}/step-1.ckpt8", "-o", tmp_path / "back.pt")[0] == 0
    one, other = (torch.load(tmp_path / name)["model"]["w"] for name in ("back.pt", "step-1.pt"))
    assert torch.equal(one, ckpt8.load(f"s3://{BUCKET}/{key}/step-1.ckpt8")["model"]["w"])
    assert (one - other).abs().max() < 1e-4


def test_one_of_them_may_be_a_file(key, bucket, tmp_path, run_command):
    url = f"s3://{BUCKET}/{key}"
    assert run_command("compress", tmp_path / "step-1.pt", "-o", f"{url}/here.ckpt8", "--remove")[0] == 0
    assert run_command("compress", f"{url}/step-2.pt", "-o", tmp_path / "there.ckpt8", "--remove")[0] == 0
    assert names(bucket, key) == ["here.ckpt8", "step-1.pt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2.pt", "there.ckpt8"]


def test_a_run_goes(key, bucket, run_command):
    url = f"s3://{BUCKET}/{key}"
    assert run_command("chain", url, "--remove", "--rest", "0", "--keep-raw", "1")[0] == 0
    assert names(bucket, key) == ["step-1.ckpt8", "step-2.pt"]
    ckpt8.compress(f"{url}/step-2.pt")
    [outcome] = ckpt8.chain(url, remove=True, rest=0)
    assert (outcome.present, outcome.removed) == (True, True)
    assert names(bucket, key) == ["step-1.ckpt8", "step-2.ckpt8"]


@pytest.mark.parametrize("moment", ["before the last look", "after it"])
def test_what_is_replaced_meanwhile_stays(key, bucket, monkeypatch, moment):
    url = f"s3://{BUCKET}/{key}/step-1.pt"

    def replacing(function):
        def call(*arguments, **options):
            result = function(*arguments, **options)
            bucket.client.put_object(Bucket=BUCKET, Key=f"{key}/step-1.pt", Body=b"another")
            return result

        return call

    if moment == "before the last look":
        monkeypatch.setattr(jobs, "verify", replacing(jobs.verify))
        error, why = InputError, r"is kept: it changed after .*step-1\.ckpt8 was verified against it"
    else:
        monkeypatch.setattr(jobs, "_check", replacing(jobs._check))
        error, why = OutputError, "changed meanwhile; it stays as it is"
    ckpt8.compress(url)
    with pytest.raises(error, match=why):
        jobs.remove_verified(as_path(url), as_path(url).with_name("step-1.ckpt8"))
    assert bucket.client.get_object(Bucket=BUCKET, Key=f"{key}/step-1.pt")["Body"].read() == b"another"


def test_a_container_that_does_not_hold_keeps_its_source(key, bucket, run_command):
    url = f"s3://{BUCKET}/{key}/step-1"
    ckpt8.compress(f"{url}.pt")
    bucket.put(f"{key}/step-1.pt", b"PK")
    assert run_command("compress", f"{url}.pt", "--remove")[0] == 3
    assert names(bucket, key) == ["step-1.ckpt8", "step-1.pt", "step-2.pt"]


def test_who_may_not_remove_is_told(key, bucket, run_command):
    bucket.order({"method": "DELETE", "status": 403, "code": "AccessDenied", "times": 9})
    code, _, err = run_command("compress", f"s3://{BUCKET}/{key}/step-1.pt", "--remove")
    assert (code, err.count("\n")) == (4, 1)
    assert "access denied (AccessDenied); removing needs s3:DeleteObject" in err
    assert "step-1.pt" in names(bucket, key)


def test_only_the_version_that_was_seen_is_deleted(key, bucket):
    store = S3Store(BUCKET)
    with pytest.raises(OutputError, match="changed meanwhile; it stays as it is"):
        store.delete(f"{key}/step-1.pt", '"0123"')
    version = store.stat(f"{key}/step-1.pt")
    bucket.order({"method": "DELETE", "status": 503, "times": 2})
    store.delete(f"{key}/step-1.pt", version.tag)
    assert [entry["if_match"] for entry in bucket.order() if entry["method"] == "DELETE"] == [version.tag] * 3
    store.delete(f"{key}/step-1.pt", version.tag)  # the answer to an attempt may be lost
    assert names(bucket, key) == ["step-2.pt"]
