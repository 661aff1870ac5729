"""The benchmark of kernels and steps, on the CPU and small: every row is there and adds up."""

from __future__ import annotations

import pytest
import torch

from ckpt8.cli.bench.device import CODECS, bench_device

ELEMENTS, PARAMETERS = 1 << 14, 1 << 16


@pytest.fixture(scope="module")
def result():
    return bench_device(torch.device("cpu"), elements=ELEMENTS, parameters=PARAMETERS, repeat=2)


def test_kernels_state_what_they_move(result):
    rows = {row["kernel"]: row for row in result["kernels"]}
    assert set(rows) == {f"{name} {direction}" for name in CODECS for direction in ("encode", "decode")}
    groups = ELEMENTS // 32
    assert rows["split24 encode"]["bytes"] == ELEMENTS * (4 + 3)
    assert rows["companded8 signed decode"]["bytes"] == ELEMENTS * (4 + 1) + groups * 2
    assert rows["lattice encode"]["bytes"] == ELEMENTS * (4 + 4)
    factors = ELEMENTS // 4096 + 1 + 4096
    assert rows["rclog with columns decode"]["bytes"] == ELEMENTS * (4 + 4) + factors * 2
    # Decoded second moments, and for encoding these as they were.
    assert rows["vscaled decode"]["bytes"] == ELEMENTS * (4 + 4 + 4)
    assert rows["vscaled encode"]["bytes"] == ELEMENTS * (4 + 4 + 8)
    for row in rows.values():
        assert row["bytes_per_second"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["of_copy"] == pytest.approx(row["bytes_per_second"] / result["copy_bytes_per_second"])


def test_steps_are_held_against_torch(result):
    rows = {row["step"]: row for row in result["steps"]}
    torch_row = rows["torch AdamW, fp32"]
    assert torch_row["to_torch"] == 1
    assert torch_row["bytes_per_parameter"] == pytest.approx(12, abs=0.01)
    assert rows["ckpt8.optim AdamW, bf16"]["bytes_per_parameter"] == pytest.approx(2 + 1 + 2 * (1 + 2 / 32), abs=0.01)
    for row in rows.values():
        assert row["seconds"] == pytest.approx(row["seconds_per_parameter"] * PARAMETERS)


def test_files_are_written_and_read(result):
    rows = {row["operation"]: row for row in result["files"]}
    assert rows["torch.save"]["bytes"] > 12 * PARAMETERS
    assert rows["ckpt8.save"]["bytes"] < 6 * PARAMETERS
    assert all(row["seconds"] > 0 for row in rows.values())
