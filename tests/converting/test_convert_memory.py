"""A conversion holds at most 300 MB above what importing takes, whatever the checkpoint's size."""

import pytest
import torch
from dcp_kit import save_in_pieces
from memory_kit import run_measured

import ckpt8

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 3584, 4
BOUND = 300e6

SETUP = """import ckpt8.converting.convert, ckpt8.converting.writers.torch_zip
import ckpt8.converting.writers.dcp, ckpt8.converting.writers.flashoptim
"""
CODE = """
report = ckpt8.convert(sys.argv[1], sys.argv[2], to=sys.argv[3], dtype=sys.argv[4] or None, threads=2)
found = {"bytes": report.bytes}
"""


@pytest.fixture(scope="module")
def runs(scratch):
    """600 MB of weights and state; the weights stand transposed in memory in one of the layers."""
    for name, make, dtype in (("plain", torch.optim.AdamW, None), ("packed", ckpt8.optim.AdamW, torch.bfloat16)):
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))).to(dtype)
        optimizer = make(model.parameters())
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        state = model.state_dict()
        if name == "plain":
            state["1.weight"] = state["1.weight"].t().contiguous().t()
        torch.save({"model": state, "optimizer": optimizer.state_dict()}, scratch / f"{name}.pt")
    ckpt8.compress(scratch / "plain.pt", stats=False)
    ckpt8.convert(scratch / "plain.pt", scratch / "trainer", to="trainer")
    ckpt8.convert(scratch / "plain.pt", scratch / "whole", to="dcp")
    wide = torch.randn(WIDTH, 3 * WIDTH)
    boxes = [((0, k * WIDTH // 2), (WIDTH, WIDTH // 2)) for k in range(6)]
    save_in_pieces({f"{k}.weight": (wide, boxes) for k in range(4)}, scratch / "columns")
    ckpt8.compress(scratch / "columns", stats=False)
    return scratch


@pytest.mark.parametrize(
    ("source", "to", "dtype", "least"),
    [
        ("plain.pt", "torch", "float16", 5e8),
        ("plain.pt", "safetensors", "", 1e8),
        ("plain.ckpt8", "torch", "", 6e8),
        ("plain.ckpt8", "safetensors", "", 1e8),
        ("plain.ckpt8", "flashoptim", "", 2e8),
        ("packed.pt", "trainer", "", 6e8),
        ("trainer", "torch", "", 6e8),
        ("plain.pt", "dcp", "", 6e8),
        ("packed.pt", "dcp", "", 6e8),
        ("whole", "torch", "", 6e8),
        ("columns", "torch", "", 6e8),
        ("columns.ckpt8", "dcp", "bfloat16", 3e8),
        ("plain.pt", "compressed-tensors", "float8_e4m3fn", 5e7),
        ("plain.ckpt8", "compressed-tensors", "int8", 5e7),
        ("packed.pt", "compressed-tensors", "int8", 5e7),
        ("columns.ckpt8", "compressed-tensors", "float8_e4m3fn", 1e8),
    ],
)
def test_memory_is_bounded(source, to, dtype, least, runs, tmp_path):
    found = run_measured(SETUP, CODE, runs / source, tmp_path / "out", to, dtype)
    assert found["bytes"] > least
    assert found["extra"] < BOUND
