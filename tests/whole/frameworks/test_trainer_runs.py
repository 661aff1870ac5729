"""Directories that the Trainer of transformers wrote: it resumes from what was restored, and the loss goes on."""

from __future__ import annotations

import sys

import pytest
import torch
from frameworks_kit import PRESETS, check_goes_on, drift, quiet, through
from safetensors import safe_open

import ckpt8

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")

import trainer_kit  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED = 6
OPTIMIZERS = ("adamw_torch", "stable_adamw")


class Sharded(transformers.LlamaForCausalLM):
    """A model too large for one file."""

    def save_pretrained(self, *args, **kwargs):
        super().save_pretrained(*args, **kwargs, max_shard_size="100KB")


def losses(folder, optimizer="adamw_torch", *, resume_from=None, **options):
    """Train a tiny Llama with tied embeddings; the losses of the steps after ``SAVED``."""
    settings = {"learning_rate": 3e-3, "weight_decay": 0.1, "save_steps": SAVED, "dropout": 0.1, **options}
    run = trainer_kit.trainer(folder, optim=optimizer, **settings)
    run.train(resume_from_checkpoint=resume_from and str(resume_from))
    return [loss for step, loss in trainer_kit.losses(run).items() if step > SAVED]


@pytest.fixture(scope="module", params=OPTIMIZERS)
def trained(request, tmp_path_factory):
    """Optimizer, losses after the checkpoint, those of another initialisation, and the checkpoint."""
    folder = tmp_path_factory.mktemp("trainer")
    with quiet(), pytest.MonkeyPatch.context() as patch:
        if request.param == "stable_adamw":
            pytest.importorskip("optimi", reason="torch-optimi is not installed")
            # It asks before it has a parameter, and so takes its Triton kernels on a CPU as well.
            patch.setattr(sys.modules["optimi.stableadamw"], "_default_to_triton", lambda _: False)
        expected = losses(folder, request.param)
        other = losses(folder / "other", request.param, seed=1)
        yield request.param, expected, other, folder / f"checkpoint-{SAVED}"


@pytest.mark.slow
@pytest.mark.parametrize("preset", PRESETS)
def test_the_run_goes_on(preset, trained, tmp_path):
    optimizer, expected, other, checkpoint = trained
    manifest, restored = through(checkpoint, tmp_path / "there", preset)
    formats = {member.path: member.format for member in manifest.members}
    assert formats["model.safetensors"] == "safetensors"
    assert {formats[name] for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth")} == {"torch-zip"}
    assert formats["trainer_state.json"] == formats["config.json"] == "file"
    for name in {path.name for path in checkpoint.iterdir()} - {"model.safetensors", "optimizer.pt"}:
        assert (restored / name).read_bytes() == (checkpoint / name).read_bytes(), name
    found = losses(tmp_path / "again", optimizer, resume_from=restored)
    check_goes_on(preset, found, expected, other)


@pytest.mark.slow
def test_without_the_optimizer_the_run_does_not_go_on(trained, tmp_path):
    """What the bound on the drift is worth: a fresh optimizer on the same weights is far outside of it."""
    optimizer, expected, other, checkpoint = trained
    _, restored = through(checkpoint, tmp_path / "there", "lossless")
    (restored / "optimizer.pt").unlink()
    found = losses(tmp_path / "again", optimizer, resume_from=restored)
    assert drift(found, expected) > drift(other, expected) / 5


@pytest.mark.slow
def test_a_model_in_shards(tmp_path):
    expected = losses(tmp_path / "run", model=Sharded)
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED}"
    shards = sorted(path.name for path in checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 2
    manifest, restored = through(checkpoint, tmp_path / "there", "lossless")
    assert shards == [member.path for member in manifest.members if member.format == "safetensors"]
    assert losses(tmp_path / "again", resume_from=restored, model=Sharded) == expected


@pytest.mark.slow
def test_the_model_loads_from_the_restored_directory(trained, tmp_path):
    checkpoint = trained[3]
    _, restored = through(checkpoint, tmp_path, "flash")
    before = transformers.LlamaForCausalLM.from_pretrained(checkpoint).state_dict()
    model = transformers.LlamaForCausalLM.from_pretrained(restored)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=2e-5, atol=0)
    with safe_open(restored / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 (not a dict)
    live = transformers.LlamaForCausalLM(model.config)
    ckpt8.resume(tmp_path / f"checkpoint-{SAVED}.ckpt8", model=live, member="model.safetensors")
    assert all(torch.equal(live.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
