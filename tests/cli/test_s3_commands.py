"""Commands and calls that read s3:// give what they give for a local file, in the number of requests that it takes.

The server counts requests and bytes. Objects are small: moto copies the whole object for each range of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import ceil
from pathlib import Path

import pytest
import torch
from s3_kit import ENVIRONMENT

import ckpt8
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.stores import reading, s3
from ckpt8.core.files.stores.s3 import S3Store

MB = 1 << 20


@pytest.fixture(scope="module")
def folder(scratch):
    """A run of three matrices of 1 MB with AdamW and many small tensors: 10 MB raw, some 4 MB packed."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(512, 512)] * 3 + [(512,)] * 9

    def draw(scale, k):
        return torch.randn(*shapes[k], generator=generator) * scale

    state = {
        k: {"step": torch.tensor(7.0), "exp_avg": draw(1e-3, k), "exp_avg_sq": draw(1e-3, k).square()}
        for k in range(len(shapes))
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "params": [*state]}
    model = {f"layers.{k}.weight": draw(0.02, k) for k in state}
    torch.save({"model": model, "optimizer": {"state": state, "param_groups": [group]}}, scratch / "run.pt")
    ckpt8.compress(scratch / "run.pt")
    ckpt8.compress(scratch / "run.pt", scratch / "lossless.ckpt8", preset="lossless")
    ckpt8.convert(scratch / "run.pt", scratch / "run.safetensors")
    (scratch / "directory").mkdir()
    torch.save({"w": torch.ones(3)}, scratch / "directory" / "w.pt")
    ckpt8.compress(scratch / "directory")
    return scratch


@pytest.fixture
def remote(folder, bucket, monkeypatch, tmp_path):
    """A function that puts a file into the bucket; its URL. The working directory is an empty one."""
    monkeypatch.chdir(tmp_path)
    return lambda name: bucket.put(name, folder / name)


def sums(log):
    return len(log), sum(entry["bytes"] for entry in log)


@pytest.mark.parametrize("what", ["restore", "verify", "compress"])
def test_a_window_that_is_much_smaller_than_the_object_is_enough(
    what, remote, bucket, folder, run_command, monkeypatch
):
    """Restored and verified is in the order of the container, whatever that of the original; compressed as planned."""
    for name, value in {"HEAD": 64 << 10, "PIECE": 64 << 10, "_WINDOW": 2 * MB, "GAP": 4 << 10}.items():
        monkeypatch.setattr(reading, name, value)
    name = "run.pt" if what == "compress" else "lossless.ckpt8"
    url, size = remote(name), (folder / name).stat().st_size
    with bucket.counted() as log:
        assert run_command(what, url, *(["-o", "out"] if what != "verify" else []))[0] == 0
    assert sums(log)[1] <= 1.05 * size
    if what == "restore":
        assert Path("out").read_bytes() == (folder / "run.pt").read_bytes()


def test_inspect_of_a_container_takes_its_head_and_its_end(remote, bucket, folder, run_command):
    url = remote("run.ckpt8")
    with bucket.counted() as log:
        code, out, _ = run_command("inspect", url, "--json")
    requests, nbytes = sums(log)
    assert (code, requests) == (0, 2)
    assert nbytes == reading.HEAD + reading.TAIL
    local = json.loads(run_command("inspect", folder / "run.ckpt8", "--json")[1])
    assert {**json.loads(out), "path": ""} == {**local, "path": ""}
    assert json.loads(out)["path"] == url


@pytest.mark.parametrize("name", ["run.ckpt8", "run.pt"])
def test_one_tensor(name, remote, bucket, folder):
    with bucket.counted() as log, ckpt8.open(remote(name)) as file:
        weight = file["model.layers.1.weight"]
    with ckpt8.open(folder / name) as file:
        assert torch.equal(weight, file["model.layers.1.weight"])
    requests, nbytes = sums(log)
    assert nbytes <= (folder / name).stat().st_size
    if name == "run.ckpt8":
        assert requests <= 4
        assert nbytes < 3 * MB


@pytest.mark.parametrize("name", ["run.ckpt8", "lossless.ckpt8"])
@pytest.mark.parametrize("what", ["restore", "load", "verify"])
def test_what_reads_all_of_a_container_reads_each_byte_once(what, name, remote, bucket, folder, run_command):
    url, size = remote(name), (folder / name).stat().st_size
    with bucket.counted() as log:
        if what == "load":
            loaded = ckpt8.load(url)
        else:
            assert run_command(what, url, *(["-o", "back.pt"] if what == "restore" else []))[0] == 0
    requests, nbytes = sums(log)
    assert nbytes == size
    assert requests <= 2 + ceil(size / reading.PIECE)
    assert all(entry["if_match"] for entry in log[1:])
    if what == "restore":
        assert Path("back.pt").read_bytes() == ckpt8.restore(folder / name, "local.pt").read_bytes()
    elif what == "load":
        local = ckpt8.load(folder / name)
        assert all(torch.equal(value, loaded["model"][key]) for key, value in local["model"].items())


@pytest.mark.parametrize("arguments", [("--preset", "flash"), ("--preset", "lossless"), ("--budget", "1")])
def test_compress_of_a_checkpoint_reads_it_once_and_makes_the_same_container(
    arguments, remote, bucket, folder, run_command
):
    url, size = remote("run.pt"), (folder / "run.pt").stat().st_size
    with bucket.counted() as log:
        assert run_command("compress", url, "-o", "far.ckpt8", *arguments)[0] == 0
    requests, nbytes = sums(log)
    storages = len(ckpt8.inspect("far.ckpt8", tensors=True)["tensors"])
    assert nbytes <= 1.05 * size
    assert requests <= size / (4 * MB) + 1.5 * storages
    run_command("compress", folder / "run.pt", "-o", "near.ckpt8", *arguments)
    assert Path("far.ckpt8").read_bytes() == Path("near.ckpt8").read_bytes()


@pytest.mark.parametrize("name", ["run.pt", "run.safetensors"])
@pytest.mark.parametrize("arguments", [("inspect",), ("inspect", "--full"), ("inspect", "--readiness"), ("verify",)])
def test_reports_of_a_checkpoint_read_no_byte_twice(arguments, name, remote, bucket, folder, run_command):
    url, size = remote(name), (folder / name).stat().st_size
    with bucket.counted() as log:
        code, out, _ = run_command(arguments[0], url, *arguments[1:], "--json")
    assert code == 0
    assert sums(log)[1] <= size
    local = json.loads(run_command(arguments[0], folder / name, *arguments[1:], "--json")[1])
    assert {**json.loads(out), "path": ""} == {**local, "path": ""}


def test_diff_and_the_original_of_verify_and_inspect(remote, bucket, folder, run_command):
    container, original = remote("lossless.ckpt8"), remote("run.pt")
    with bucket.counted() as log:
        code, out, _ = run_command("diff", container, original)
    assert code == 0
    assert "identical" in out
    assert sums(log)[1] <= sum((folder / name).stat().st_size for name in ("run.pt", "lossless.ckpt8"))
    for command in ("verify", "inspect"):
        assert run_command(command, folder / "run.ckpt8", "--against", original)[0] == 0
    assert run_command("verify", container, "--against", folder / "run.pt")[0] == 0
    assert run_command("restore", container, "--salvage", "-o", "saved.pt")[0] == 0
    assert Path("saved.pt").read_bytes() == (folder / "run.pt").read_bytes()


def test_a_delta_finds_its_base_beside_it(remote, bucket, folder, run_command):
    ckpt8.compress(folder / "run.pt", folder / "delta.ckpt8", base=folder / "run.ckpt8", force=True)
    url = remote("delta.ckpt8")
    bucket.client.delete_object(Bucket="bucket", Key="run.ckpt8")
    err = run_command.refused(3, "restore", url, "-o", "back.pt")
    assert "its base run.ckpt8" in err
    assert "is missing; looked for s3://bucket/run.ckpt8" in err
    remote("run.ckpt8")
    with ContainerReader(folder / "delta.ckpt8") as reader:
        assert reader.manifest.base is not None
    assert run_command("restore", url, "-o", "back.pt")[0] == 0
    assert Path("back.pt").read_bytes() == ckpt8.restore(folder / "delta.ckpt8", "local.pt").read_bytes()


@pytest.mark.parametrize("command", ["restore", "verify", "compress", "inspect"])
def test_an_object_that_is_replaced_while_it_is_read(command, remote, bucket, folder, run_command, monkeypatch):
    url = remote("run.pt" if command == "compress" else "lossless.ckpt8")
    fill = S3Store.fill

    def replace_first(*arguments):
        bucket.client.put_object(Bucket="bucket", Key=url.rpartition("/")[2], Body=b"another")
        return fill(*arguments)

    monkeypatch.setattr(S3Store, "fill", replace_first)
    target = ["-o", "out"] if command in ("restore", "compress") else []
    err = run_command.refused(3, command, url, *target)
    assert err == f"ckpt8: {url}: changed while it was read; nothing was written\n"
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"status": 403, "code": "AccessDenied"}, "access denied (AccessDenied); reading needs s3:GetObject"),
        ({"status": 503, "code": "SlowDown"}, "cannot be read: "),
        ({"cut": 10}, "cannot be read: the connection was cut"),
    ],
)
def test_what_a_store_refuses_is_one_line(fault, said, remote, bucket, run_command):
    url = remote("run.ckpt8")
    for command in (["inspect"], ["restore", "-o", "out"], ["verify"], ["diff", url], ["compress", "-o", "out"]):
        bucket.order({**fault, "cut": 0, "times": 1000} if "cut" in fault else {**fault, "times": 1000})
        err = run_command.refused(3, command[0], url, *command[1:])
        assert err.startswith(f"ckpt8: {url}: {said}")
        assert err.count("\n") == 1
        assert len(bucket.order()) <= 5
    assert list(Path.cwd().iterdir()) == []


def test_no_object_and_no_bucket(remote, bucket, run_command):
    for command in (["inspect"], ["restore", "-o", "out"], ["verify"], ["compress", "-o", "out"]):
        bucket.order()
        err = run_command.refused(3, command[0], "s3://bucket/none.ckpt8", *command[1:])
        assert err == "ckpt8: s3://bucket/none.ckpt8: cannot be read: no such object\n"
        assert len(bucket.order()) <= 4
        err = run_command.refused(3, command[0], "s3://nowhere/none.ckpt8", *command[1:])
        assert err == "ckpt8: s3://nowhere/none.ckpt8: there is no bucket nowhere\n"
    with pytest.raises(InputError, match="no such object"):
        ckpt8.load("s3://bucket/none.pt")


def test_without_botocore_the_line_names_the_extra(remote, run_command, monkeypatch):
    url = remote("run.ckpt8")
    s3._client.cache_clear()
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    err = run_command.refused(2, "inspect", url)
    assert err == "ckpt8: s3:// needs botocore, which is not installed; pip install 'ckpt8[s3]'\n"
    with pytest.raises(UsageError, match=r"pip install 'ckpt8\[s3\]'"):
        ckpt8.open(url)


def test_without_credentials(remote, bucket, tmp_path):
    """In a process of its own, as the client keeps those that it has found."""
    url = remote("run.ckpt8")
    environment = os.environ | ENVIRONMENT | {"AWS_ENDPOINT_URL": bucket.endpoint, "HOME": str(tmp_path)}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        del environment[name]
    command = [sys.executable, "-m", "ckpt8", "inspect", url]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 3
    assert result.stderr.startswith(f"ckpt8: {url}: no credentials were found; set AWS_ACCESS_KEY_ID")
    assert result.stderr.count("\n") == 1
    assert bucket.order() == []


@pytest.mark.parametrize("name", ["run.pt", "run.ckpt8"])
def test_resume_reads_each_byte_once(name, remote, bucket, folder):
    """It checks every byte before it changes anything, and reads the tensors then."""
    saved = ckpt8.load(folder / "run.pt")["model"]

    def resumed(path):
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList(torch.nn.Module() for _ in saved)
        for layer, weight in zip(model.layers, saved.values(), strict=True):
            layer.weight = torch.nn.Parameter(torch.zeros_like(weight))
        optimizer = torch.optim.AdamW(model.parameters())
        ckpt8.resume(path, model=model, optimizer=optimizer)
        return [*model.parameters()], optimizer.state_dict()["state"]

    url, size = remote(name), (folder / name).stat().st_size
    with bucket.counted() as log:
        far = resumed(url)
    assert sums(log)[1] <= size
    near = resumed(folder / name)
    assert all(weight.any() for weight in near[0])
    assert all(torch.equal(a, b) for a, b in zip(far[0], near[0], strict=True))
    assert all(torch.equal(value, far[1][k][key]) for k, state in near[1].items() for key, value in state.items())
