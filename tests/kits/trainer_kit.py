"""A tiny Llama that Trainer trains, with the callback or without it."""

from __future__ import annotations

import torch
import transformers
from gpt_kit import training_arguments

LAST = 12


def rows():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (16,), generator=generator).cumsum(0) % 256 for _ in range(64)]


def trainer(
    folder,
    callbacks=(),
    *,
    kind=transformers.Trainer,
    model=transformers.LlamaForCausalLM,
    dropout=0.0,
    seed=0,
    **arguments,
):
    """``model`` makes one of a configuration; ``arguments`` are those of TrainingArguments."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 32}
    sizes |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True, attention_dropout=dropout)
    settings = {"max_steps": LAST, "per_device_train_batch_size": 8, "learning_rate": 1e-2}
    settings |= {"save_steps": 4, "logging_steps": 1, **arguments}
    data = [{"input_ids": row, "labels": row} for row in rows()]
    return kind(
        model=model(config),
        args=training_arguments(folder, **settings),
        train_dataset=data,
        eval_dataset=data[:8],
        callbacks=list(callbacks),
    )


def losses(trained):
    """The loss of every step that this trainer knows of, by step."""
    return {entry["step"]: entry["loss"] for entry in trained.state.log_history if "loss" in entry}


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())
