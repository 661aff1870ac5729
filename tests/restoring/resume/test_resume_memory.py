"""resume holds the optimizer state that it allocates and at most 200 MB more."""

import pytest
from memory_kit import run_measured, save_trained

import ckpt8

pytestmark = pytest.mark.slow

WIDTH, LAYERS = 3584, 4
BOUND = 200e6

SETUP = """import ckpt8.optim, ckpt8.restoring.resume.resume
path, width, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
optimizer = (ckpt8.optim if sys.argv[4] == "packed" else torch.optim).AdamW(model.parameters())
"""
CODE = """
ckpt8.resume(path, model, optimizer)
found = {"state": sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())}
"""


@pytest.mark.parametrize("into", ["torch", "packed"])
@pytest.mark.parametrize("form", ["raw", "flash"])
def test_memory_is_bounded(tmp_path, form, into):
    """600 MB of weights and state."""
    path = tmp_path / "run.pt"
    save_trained(path, WIDTH, LAYERS)
    assert path.stat().st_size > 5e8
    if form == "flash":
        ckpt8.compress(path, stats=False)
        path = path.with_suffix(".ckpt8")
    found = run_measured(SETUP, CODE, path, WIDTH, LAYERS, into)
    assert found["state"] > (3e8 if into == "torch" else 1e8)
    assert found["extra"] - found["state"] < BOUND
