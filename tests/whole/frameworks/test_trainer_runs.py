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

pytestmark = pytest.mark.filterwarnings("ignore")

SAVED, LAST = 6, 12
OPTIMIZERS = ("adamw_torch", "stable_adamw")


class Sharded(transformers.LlamaForCausalLM):
    """A model too large for one file."""

    def save_pretrained(self, *args, **kwargs):
        super().save_pretrained(*args, **kwargs, max_shard_size="500KB")


def losses(folder, optimizer="adamw_torch", *, seed=0, resume_from=None, model=transformers.LlamaForCausalLM):
    """Train a tiny Llama with tied embeddings; the losses of the steps after ``SAVED``."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=512,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_dropout=0.1,
    )
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 64, (32,), generator=generator).cumsum(0) % 512 for _ in range(64)]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=LAST,
        per_device_train_batch_size=8,
        optim=optimizer,
        learning_rate=3e-3,
        weight_decay=0.1,
        save_steps=SAVED,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(
        model=model(config), args=arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows]
    )
    trainer.train(resume_from_checkpoint=resume_from and str(resume_from))
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][SAVED - LAST :]


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


@pytest.mark.by_default("adamw_torch")
def test_without_the_optimizer_the_run_does_not_go_on(trained, tmp_path):
    """What the bound on the drift is worth: a fresh optimizer on the same weights is far outside of it."""
    optimizer, expected, other, checkpoint = trained
    _, restored = through(checkpoint, tmp_path / "there", "lossless")
    (restored / "optimizer.pt").unlink()
    found = losses(tmp_path / "again", optimizer, resume_from=restored)
    assert drift(found, expected) > drift(other, expected) / 5


def test_a_model_in_shards(tmp_path):
    expected = losses(tmp_path / "run", model=Sharded)
    checkpoint = tmp_path / "run" / f"checkpoint-{SAVED}"
    shards = sorted(path.name for path in checkpoint.glob("model-*.safetensors"))
    assert len(shards) > 2
    manifest, restored = through(checkpoint, tmp_path / "there", "lossless")
    assert shards == [member.path for member in manifest.members if member.format == "safetensors"]
    assert losses(tmp_path / "again", resume_from=restored, model=Sharded) == expected


@pytest.mark.by_default("adamw_torch")
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
