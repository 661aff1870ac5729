"""A small character-level GPT that really trains: it makes the checkpoint that ``bench`` measures.

Module names, parameter groups and checkpoint layout are nanoGPT's. Initial weights and batches are functions of the
seed and the step alone: a resumed run equals an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt8.cli.bench.corpus import VOCABULARY, batch

ParamGroups = list[dict[str, Any]]
OptimizerFactory = Callable[[ParamGroups, float], torch.optim.Optimizer]
"""Builds the optimizer from the two parameter groups and the first learning rate."""


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Shape of the network (nanoGPT's ``model_args``)."""

    n_layer: int
    n_head: int
    n_embd: int
    block_size: int = 128
    vocab_size: int = len(VOCABULARY)

    @property
    def n_params(self) -> int:
        """Number of parameters, the tied embedding counted once."""
        width = self.n_embd
        return width * (self.vocab_size + self.block_size + 2 + self.n_layer * (12 * width + 13))


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How a network is trained. ``horizon`` is the step at which the cosine schedule reaches ``lr / 10``."""

    horizon: int
    seed: int = 0
    batch_size: int = 8
    lr: float = 1e-3
    warmup: int = 0
    schedule: str = "cosine"
    weight_decay: float = 0.1
    grad_clip: float = 1.0
    dtype: str = "float32"
    device: str = "cpu"
    eval_batches: int = 4

    def lr_at(self, step: int) -> float:
        """Learning rate of the update that turns ``step`` into ``step + 1``."""
        if step < self.warmup:
            return self.lr * (step + 1) / (self.warmup + 1)
        if self.schedule == "constant":
            return self.lr
        done = min(1.0, (step - self.warmup) / max(1, self.horizon - self.warmup))
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))


def config_for_bytes(nbytes: int) -> GPTConfig:
    """Choose layers and width so that a fp32 AdamW checkpoint has about ``nbytes`` bytes.

    That is 12 bytes per parameter. Of the shapes within 3 % (else the nearest) take the one whose width is nearest 64
    per layer. Raises ValueError if none is within 5 %.
    """
    shapes = [
        GPTConfig(n_layer=layers, n_head=max(1, width // 64), n_embd=width)
        for width in (*range(32, 128, 32), *range(128, 4097, 64))
        for layers in range(1, 97)
        if 12 * 12 * layers * width * width < 2 * nbytes and width % max(1, width // 64) == 0
    ]
    if not shapes:
        raise ValueError(f"no network is as small as {nbytes} bytes")

    def badness(config: GPTConfig) -> tuple[float, float]:
        error = abs(12 * config.n_params / nbytes - 1)
        return max(error, 0.03), abs(math.log(config.n_embd / config.n_layer / 64))

    best = min(shapes, key=badness)
    if badness(best)[0] > 0.05:
        raise ValueError(f"no network makes a checkpoint of {nbytes} bytes")
    return best


class Block(nn.Module):
    """One pre-norm transformer block: causal self-attention, then a feed-forward network."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.n_embd
        self.n_head = config.n_head
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})

    def forward(self, x: Tensor) -> Tensor:
        """Attention, then feed-forward, each added to its input."""
        heads = self.attn["c_attn"](self.ln_1(x)).unflatten(2, (3 * self.n_head, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attn["c_proj"](mixed.transpose(1, 2).flatten(2))
        return x + cast(Tensor, self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x)))))


class GPT(nn.Module):
    """Embeddings, blocks and an output layer that shares the token embedding's storage."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.blocks = [Block(config) for _ in range(config.n_layer)]
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "h": nn.ModuleList(self.blocks),
                "ln_f": nn.LayerNorm(config.n_embd),
            }
        )
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean cross-entropy of predicting ``y``, in nats per character."""
        parts = self.transformer
        hidden = parts["wte"](x) + parts["wpe"](torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.lm_head(parts["ln_f"](hidden))
        return functional.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def build_model(config: GPTConfig, *, seed: int, dtype: str = "float32", device: str = "cpu") -> GPT:
    """Initialise a network: a function of the arguments, which leaves the global generator alone."""
    with torch.device("meta"):
        model = GPT(config).to(getattr(torch, dtype))
    model = model.to_empty(device=device)
    model.transformer["wte"].weight = model.lm_head.weight
    generator = torch.Generator(device).manual_seed(seed)
    for name, param in model.named_parameters():
        if param.dim() >= 2:
            std = 0.02 / math.sqrt(2 * config.n_layer) if name.endswith("c_proj.weight") else 0.02
            param.data.normal_(0.0, std, generator=generator)
        else:
            param.data.fill_(1.0 if name.endswith("weight") else 0.0)
    return model


class Run:
    """A model and its optimizer in training. Whoever loads state into both sets ``step``."""

    def __init__(self, config: GPTConfig, run: RunConfig, optimizer_factory: OptimizerFactory) -> None:
        self.config, self.run, self.step = config, run, 0
        self.best_val_loss = torch.tensor(math.inf)
        self.model = build_model(config, seed=run.seed, dtype=run.dtype, device=run.device)
        params = list(self.model.parameters())
        groups: ParamGroups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": run.weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = optimizer_factory(groups, run.lr_at(0))

    def loss(self, step: int, *, held_out: bool = False) -> Tensor:
        """The loss on the batch of ``step``."""
        run, block = self.run, self.config.block_size
        x, y = batch(step, seed=run.seed, batch_size=run.batch_size, block_size=block, held_out=held_out)
        return cast(Tensor, self.model(x.to(run.device), y.to(run.device)))

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss on fixed held-out batches; keeps the best."""
        mean = torch.stack([self.loss(i, held_out=True) for i in range(self.run.eval_batches)]).mean().cpu()
        self.best_val_loss = torch.minimum(self.best_val_loss, mean)
        return mean.item()

    def checkpoint(self) -> dict[str, Any]:
        """NanoGPT's checkpoint; the next update changes its tensors, so save or copy it first."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "model_args": asdict(self.config) | {"bias": True, "dropout": 0.0},
            "iter_num": self.step,
            "best_val_loss": self.best_val_loss,
            "config": asdict(self.run),
        }
