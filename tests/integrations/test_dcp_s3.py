"""torch.distributed.checkpoint through a bucket: what a directory holds, in few requests, and whole at any moment."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dcp_kit import save_in_pieces
from packed_kit import INDEX
from ranks import run_ranks
from s3_kit import BUCKET, ENVIRONMENT
from torch.distributed.checkpoint.api import CheckpointException

import ckpt8
from ckpt8.core.files.stores import writing
from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter

pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(seed):
    generator = torch.Generator().manual_seed(seed)
    model = {f"layers.{k}.weight": torch.randn(512, 256, generator=generator) for k in range(4)}
    return {"model": model, "step": seed}


@pytest.fixture
def place(bucket):
    """A folder of its own for each test."""
    return f"s3://{BUCKET}/{os.urandom(4).hex()}/step-1"


def save(seed, place, **options):
    writer = Ckpt8StorageWriter(place, preset="lossless", **options)
    dcp.save(state_of(seed), storage_writer=writer, no_dist=not dist.is_initialized())


def load(place):
    state = {"model": {name: torch.zeros_like(value) for name, value in state_of(0)["model"].items()}, "step": 0}
    dcp.load(state, storage_reader=Ckpt8StorageReader(place), no_dist=not dist.is_initialized())
    return state


def holds(place, seed):
    loaded, saved = load(place), state_of(seed)
    return loaded["step"] == seed and all(torch.equal(loaded["model"][k], value) for k, value in saved["model"].items())


def names(bucket, place):
    prefix = place.partition(f"{BUCKET}/")[2] + "/"
    listed = bucket.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())
    return sorted(each["Key"].removeprefix(prefix) for each in listed)


def lists(log):
    return [entry for entry in log if entry["method"] == "GET" and not entry["range"] and not entry["what"]]


def test_a_save_and_its_successor(bucket, place, monkeypatch):
    monkeypatch.setattr(writing, "PART", 256 << 10)
    for seed, expected in ((1, ["__0_0.ckpt8", INDEX]), (2, ["__0_1.ckpt8", INDEX]), (3, ["__0_0.ckpt8", INDEX])):
        with bucket.counted() as log:
            save(seed, place)
        parts = sum(entry["what"] == "part" for entry in log)
        assert parts > 3
        assert len(log) <= parts + 12
        assert len(lists(log)) == 1
        made = [entry for entry in log if entry["what"] in ("put", "complete")]
        assert [entry["path"].rpartition("/")[2] for entry in made] == expected
        assert made[0]["if_none_match"] == "*"
        assert (made[1]["if_none_match"] == "*") is (seed == 1)
        assert bool(made[1]["if_match"]) is (seed > 1)
        assert all(entry["if_match"] for entry in log if entry["method"] == "DELETE")
        assert log[-1]["method"] == ("HEAD" if seed == 1 else "DELETE")
        assert names(bucket, place) == expected
        with bucket.counted() as log:
            assert holds(place, seed)
        assert len(log) <= parts + 12
        assert lists(log) == []


def test_async_save_and_commands(bucket, place, tmp_path):
    writer = Ckpt8StorageWriter(place, preset="lossless")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dcp.async_save(state_of(4), storage_writer=writer).result()
    finally:
        dist.destroy_process_group()
        writer.close()
    assert holds(place, 4)
    assert ckpt8.verify(place).failures == ()
    ckpt8.restore(place, tmp_path / "plain")
    assert ckpt8.diff(tmp_path / "plain", place).identical
    assert torch.equal(ckpt8.load(place)["model"]["layers.1.weight"], state_of(4)["model"]["layers.1.weight"])


def test_what_is_there_stays(bucket, place):
    save(1, place)
    with pytest.raises(CheckpointException, match="holds a checkpoint, and overwrite is False"):
        save(2, place, overwrite=False)
    bucket.put(f"{place.partition(f'{BUCKET}/')[2]}/.metadata", b"x")
    with pytest.raises(CheckpointException, match="holds a checkpoint of another format"):
        save(2, place)
    assert holds(place, 1)
    with pytest.raises(CheckpointException, match="holds no checkpoint of Ckpt8StorageWriter"):
        load(f"s3://{BUCKET}/nothing")


def test_another_job_that_writes_the_index_first_keeps_it(bucket, place, monkeypatch):
    save(1, place)
    key = f"{place.partition(f'{BUCKET}/')[2]}/{INDEX}"
    index = bucket.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
    warn = Ckpt8StorageWriter._warn_of_losses

    def rival(*arguments):
        bucket.client.put_object(Bucket=BUCKET, Key=key, Body=json.dumps(json.loads(index), indent=1).encode())
        return warn(*arguments)

    monkeypatch.setattr(Ckpt8StorageWriter, "_warn_of_losses", rival)
    with pytest.raises(CheckpointException, match="changed while its successor was written; it stays as it is"):
        save(2, place)
    monkeypatch.undo()
    assert holds(place, 1)


def _ranks(rank, endpoint, place, seed, killed):
    """Save in two ranks and load again; one that is ``killed`` ends while its parts are on their way."""
    # The process that these are forked from may be older than the server.
    os.environ |= {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}
    tensors = state_of(seed)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    model = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in tensors["model"].items()}
    if rank == killed:
        send = writing.ObjectOutput._send

        def die(*arguments):
            send(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        writing.ObjectOutput._send = die
    writing.PART = 128 << 10
    dcp.save({"model": model, "step": seed}, storage_writer=Ckpt8StorageWriter(place, preset="lossless"))
    into = {name: distribute_tensor(torch.zeros(512, 256), mesh, [Shard(1)]) for name in model}
    loaded = {"model": into, "step": 0}
    dcp.load(loaded, storage_reader=Ckpt8StorageReader(place))
    for name, value in loaded["model"].items():
        if not torch.equal(value.full_tensor(), tensors["model"][name]):
            raise AssertionError(name)


def test_two_ranks_list_once_and_each_writes_its_own(bucket, place):
    with bucket.counted() as log:
        run_ranks(_ranks, 2, bucket.endpoint, place, 5, None)
    assert names(bucket, place) == ["__0_0.ckpt8", "__1_0.ckpt8", INDEX]
    assert len(lists(log)) == 1
    last = max(k for k, entry in enumerate(log) if entry["what"] in ("put", "complete"))
    assert log[last]["path"].endswith(INDEX)
    assert holds(place, 5)


@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_the_checkpoint_before_it(bucket, place):
    run_ranks(_ranks, 2, bucket.endpoint, place, 6, None)
    before = names(bucket, place)
    job = multiprocessing.get_context("spawn").Process(target=_until_killed, args=(bucket.endpoint, place))
    job.start()
    job.join(60)
    assert job.exitcode == 1
    assert holds(place, 6)
    assert set(names(bucket, place)) - {*before} <= {"__0_1.ckpt8"}
    assert ckpt8.verify(place).failures == ()
    run_ranks(_ranks, 2, bucket.endpoint, place, 8, None)
    assert len(names(bucket, place)) == 3
    assert holds(place, 8)


def _until_killed(endpoint, place):
    """A job whose second rank is killed: the first would wait for it, and ends with it."""
    run_ranks(_ranks, 2, endpoint, place, 7, 1)


@pytest.mark.slow
def test_ranks_compress_a_directory_to_one_in_a_bucket(bucket, place, tmp_path):
    boxes = [((0, 0), (10, 40)), ((10, 0), (10, 40))]
    plain = save_in_pieces({f"w{k}": (torch.randn(20, 40), boxes) for k in range(6)}, tmp_path / "plain", {"epoch": 3})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "ckpt8", "compress", str(plain), "-o", place, "--preset", "lossless"]
    begun = time.monotonic()
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300
    )
    assert done.returncode == 0, (time.monotonic() - begun, done.stderr[-2000:])
    assert names(bucket, place) == ["__0_0.ckpt8", "__1_0.ckpt8", INDEX]
    assert ckpt8.diff(place, plain).identical
