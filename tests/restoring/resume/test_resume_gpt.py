"""The committed GPT checkpoints go on training."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from gpt_kit import SIZES, Run, RunConfig
from resume_kit import OPTIMIZERS

import ckpt8

FILES = {
    "gpt_adamw.pt": ("torch-adamw", "tiny"),
    "gpt_stable_adamw.pt": ("optimi-stable-adamw", "mini"),
    "gpt_came.pt": ("came-pytorch", "mini"),
}
STEPS = 4


def losses(path, config: RunConfig, name: str, size: str, *, resumed: bool) -> list[float]:
    """Loss at each of the next steps, resumed by us or by torch."""
    run = Run(SIZES[size], config, OPTIMIZERS[name])
    if resumed:
        rest = ckpt8.resume(path, run.model, run.optimizer)
        assert list(rest) == ["model_args", "iter_num", "best_val_loss", "config"]
        run.step = rest["iter_num"]
    else:
        run.load(torch.load(path, weights_only=True))
    return [run.advance() for _ in range(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_the_loss_goes_on(inputs, tmp_path, file):
    config = RunConfig(**torch.load(inputs / file, weights_only=True)["config"])
    run = partial(losses, config=config, name=FILES[file][0], size=FILES[file][1])
    whole = run(inputs / file, resumed=False)
    assert run(inputs / file, resumed=True) == whole
    for preset, bound in (("lossless", 0.0), ("flash", 1e-5), ("compact", 1e-4), ("archive", 3e-3)):
        path = tmp_path / f"{preset}.ckpt8"
        ckpt8.compress(inputs / file, path, preset=preset, threads=1)
        differences = [abs(a - b) for a, b in zip(run(path, resumed=True), whole, strict=True)]
        assert max(differences) <= bound
        assert preset == "lossless" or max(differences) > 0
