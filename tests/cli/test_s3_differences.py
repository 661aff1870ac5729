"""Differences in a bucket are those that a folder would have, and find their bases there."""

from __future__ import annotations

import secrets

import pytest
import torch
from s3_kit import BUCKET

import ckpt8
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import UsageError
from ckpt8.core.files.paths import as_path


@pytest.fixture
def place(bucket):
    """A folder of the bucket that is empty."""
    return f"s3://{BUCKET}/{secrets.token_hex(4)}"


def trees(count):
    """States of a run of AdamW, whose weights move a little from one to the next."""
    generator = torch.Generator().manual_seed(0)
    weights = {f"h.{k}.weight": torch.randn(128, 128, generator=generator) * 0.02 for k in range(3)}
    for number in range(count):
        state = {}
        for k, name in enumerate(weights):
            step = torch.randn(128, 128, generator=generator) * 1e-5
            weights[name] = weights[name] + step
            state[k] = {"step": torch.tensor(9.0 + number), "exp_avg": step * 10, "exp_avg_sq": step.square() + 1e-9}
        group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [*state]}
        yield {"model": dict(weights), "optimizer": {"state": state, "param_groups": [group]}}


def stored(bucket, url):
    return bucket.client.get_object(Bucket=BUCKET, Key=url.partition(f"{BUCKET}/")[2])["Body"].read()


def base_in(url):
    with ContainerReader(as_path(url)) as reader:
        return reader.manifest.base.path


def same(one, other):
    return all(torch.equal(one["model"][name], x) for name, x in other["model"].items())


@pytest.mark.parametrize("background", [False, True])
def test_a_chain_is_that_of_a_folder(place, bucket, tmp_path, background):
    names = [f"step-{k}.ckpt8" for k in range(4)]
    for name, tree in zip(names, trees(4), strict=True):
        ckpt8.save(tree, tmp_path / name, budget=5, base="auto")
        job = ckpt8.save(tree, f"{place}/{name}", budget=5, base="auto", background=background)
        if background:
            job.result()
    for name in names:
        assert stored(bucket, f"{place}/{name}") == (tmp_path / name).read_bytes()
    assert base_in(f"{place}/step-3.ckpt8") == "step-2.ckpt8"
    assert same(ckpt8.load(f"{place}/step-3.ckpt8"), ckpt8.load(tmp_path / "step-3.ckpt8"))
    assert len(bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=place.rpartition("/")[2])["Contents"]) == 4


def test_chain(place, bucket, tmp_path, run_command):
    """Every checkpoint of a folder of the bucket becomes what it becomes on a disk; a second run has nothing to do."""
    (tmp_path / "run").mkdir()
    key = place.rpartition("/")[2]
    for number, tree in enumerate(trees(3)):
        torch.save(tree, tmp_path / "run" / f"step-{number}.pt")
        bucket.put(f"{key}/step-{number}.pt", tmp_path / "run" / f"step-{number}.pt")
    bucket.put(f"{key}/notes.txt", b"nothing")
    bucket.put(f"{key}/below/step-9.pt", tmp_path / "run" / "step-0.pt")
    options = ("--budget", "5", "--rest", "0")
    assert run_command("chain", tmp_path / "run", *options)[0] == 0
    assert run_command("chain", place, *options)[0] == 0
    for number in range(3):
        name = f"step-{number}.ckpt8"
        assert stored(bucket, f"{place}/{name}") == (tmp_path / "run" / name).read_bytes()
    with bucket.counted() as log:
        outcomes = ckpt8.chain(place, budget=5, rest=0)
    assert [outcome.present for outcome in outcomes] == [True] * 3
    assert {entry["method"] for entry in log} <= {"GET", "HEAD"}
    assert len(log) < 30  # lists, heads of what is no checkpoint, and five for each checkpoint
    listed = bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=f"{key}/")["Contents"]
    assert len(listed) == 8


def test_several_and_a_dry_run(place, bucket, tmp_path, run_command):
    key = place.rpartition("/")[2]
    for number, tree in enumerate(trees(2)):
        torch.save(tree, tmp_path / f"{number}.pt")
        bucket.put(f"{key}/{number}.pt", tmp_path / f"{number}.pt")
    several = f"{place}/0.pt", f"{place}/1.pt"
    for options in ((f"{place}/0.pt", "--remove"), several, (tmp_path / "0.pt", "-o", place)):
        with bucket.counted() as log:
            assert run_command("compress", *options, "--dry-run")[0] == 0
        assert {entry["method"] for entry in log} <= {"GET", "HEAD"}
    code, _, err = run_command("compress", tmp_path / "0.pt", f"{place}/0.ckpt8")
    assert (code, "is not there; to write a container of that name: -o s3://" in err) == (2, True)
    assert run_command("compress", *several)[0] == 0
    assert run_command("compress", tmp_path / "0.pt", tmp_path / "1.pt", "-o", f"{place}/all")[0] == 0
    for name in ("0.ckpt8", "1.ckpt8"):
        assert stored(bucket, f"{place}/{name}") == stored(bucket, f"{place}/all/{name}")


def test_a_base_in_another_folder_of_the_bucket(place, bucket, tmp_path, run_command):
    for name, tree in zip(("a", "b"), trees(2), strict=True):
        torch.save(tree, tmp_path / f"{name}.pt")
    assert run_command("compress", tmp_path / "a.pt", "-o", f"{place}/x/a.ckpt8", "--budget", "5")[0] == 0
    options = ("--budget", "5", "--base", f"{place}/x/a.ckpt8")
    assert run_command("compress", tmp_path / "b.pt", "-o", f"{place}/y/b.ckpt8", *options)[0] == 0
    assert base_in(f"{place}/y/b.ckpt8") == "../x/a.ckpt8"
    ckpt8.compress(tmp_path / "b.pt", tmp_path / "whole.ckpt8", budget=5)
    assert len(stored(bucket, f"{place}/y/b.ckpt8")) < (tmp_path / "whole.ckpt8").stat().st_size
    assert run_command("verify", f"{place}/y/b.ckpt8", "--against", tmp_path / "b.pt")[0] == 0
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "b.ckpt8").write_bytes(stored(bucket, f"{place}/y/b.ckpt8"))
    code, _, err = run_command("verify", tmp_path / "copy" / "b.ckpt8")
    assert (code, "its base ../x/a.ckpt8" in err) == (3, True)
    assert run_command("verify", tmp_path / "copy" / "b.ckpt8", "--base-dir", f"{place}/x")[0] == 0


def test_rebase(place, bucket, tmp_path, run_command):
    for name, tree in zip(("a", "b"), trees(2), strict=True):
        ckpt8.save(tree, tmp_path / f"{name}.ckpt8", budget=5, base="auto")
        ckpt8.save(tree, f"{place}/{name}.ckpt8", budget=5, base="auto")
    ckpt8.rebase(tmp_path / "b.ckpt8", tmp_path / "whole.ckpt8")
    whole = (tmp_path / "whole.ckpt8").read_bytes()
    assert run_command("rebase", f"{place}/b.ckpt8", "-o", f"{place}/whole.ckpt8")[0] == 0
    assert stored(bucket, f"{place}/whole.ckpt8") == whole
    assert run_command("rebase", f"{place}/a.ckpt8")[0] == 0
    assert run_command("rebase", f"{place}/b.ckpt8")[0] == 0
    assert stored(bucket, f"{place}/b.ckpt8") == whole
    assert stored(bucket, f"{place}/a.ckpt8") == (tmp_path / "a.ckpt8").read_bytes()


def test_a_base_elsewhere_is_refused(place, bucket, tmp_path):
    (first, second) = trees(2)
    ckpt8.save(first, tmp_path / "a.ckpt8", budget=5)
    ckpt8.save(first, f"{place}/a.ckpt8", budget=5)
    for base, target in ((tmp_path / "a.ckpt8", f"{place}/b.ckpt8"), (f"{place}/a.ckpt8", tmp_path / "b.ckpt8")):
        with pytest.raises(UsageError, match="which is elsewhere; both must be in one bucket"):
            ckpt8.save(second, target, budget=5, base=base)
    assert not (tmp_path / "b.ckpt8").exists()
    assert len(bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=place.rpartition("/")[2])["Contents"]) == 1
