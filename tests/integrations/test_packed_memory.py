"""What reads a packed directory holds at most 300 MB above what importing takes, whatever the checkpoint's size."""

from __future__ import annotations

import pytest
import torch
from dcp_kit import save_in_pieces
from memory_kit import run_measured

from ckpt8.integrations.dcp.sharing import compress_share

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

WIDTH = 3584
BOUND = 300e6

SETUP = """import ckpt8.converting.convert, ckpt8.converting.writers.torch_zip
import ckpt8.restoring.sharded, ckpt8.inspecting.verify"""
CODE = {
    "convert": 'ckpt8.convert(sys.argv[1], sys.argv[3], to="torch", threads=2)',
    "restore": "ckpt8.restore(sys.argv[1], sys.argv[3], threads=2)",
    "verify": "assert not ckpt8.verify(sys.argv[1], sys.argv[2], threads=2).failures",
    "diff": "assert ckpt8.diff(sys.argv[1], sys.argv[2], threads=2).identical",
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """616 MB of weights in boxes of columns: the plain directory, and the packed one."""
    folder = tmp_path_factory.mktemp("large")
    wide = torch.randn(WIDTH, 3 * WIDTH)
    boxes = [((0, k * WIDTH // 2), (WIDTH, WIDTH // 2)) for k in range(6)]
    plain = save_in_pieces({f"model.{k}.weight": (wide, boxes) for k in range(4)}, folder / "plain")
    compress_share(plain, folder / "packed", {"preset": "lossless", "stats": False}, 0, 1, overwrite=False)
    return folder / "packed", plain


@pytest.mark.parametrize("action", ["convert", "restore", "verify", "diff"])
def test_memory_is_bounded(directories, tmp_path, action):
    found = run_measured(SETUP, f"{CODE[action]}\nfound = {{}}", *directories, tmp_path / "out")
    assert found["extra"] < BOUND


def test_the_state_dict_is_all_that_load_holds(directories):
    nbytes = 4 * 3 * WIDTH * WIDTH * 4
    code = "state = ckpt8.load(sys.argv[1], threads=2)\nfound = {'tensors': len(state)}"
    found = run_measured(SETUP, code, directories[0])
    assert found["tensors"] == 4
    assert nbytes < found["extra"] < nbytes + BOUND


def test_resume_holds_nothing_but_the_model(directories):
    setup = f"""{SETUP}
model = torch.nn.Module()
model.model = torch.nn.ModuleList(torch.nn.Linear({3 * WIDTH}, {WIDTH}, bias=False) for _ in range(4))"""
    code = """assert ckpt8.resume(sys.argv[1], model=model, threads=2) == {}
found = {"sum": sum(map(torch.numel, model.parameters()))}"""
    found = run_measured(setup, code, directories[0])
    assert found["sum"] == 4 * 3 * WIDTH * WIDTH
    assert found["extra"] < BOUND
