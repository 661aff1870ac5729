"""A small character-level GPT that really trains: whole runs, runs in two parts, runs on other optimizers.

Module names, parameter groups and checkpoint layout are nanoGPT's. Initial weights and batches are functions of the
seed and the step alone: a resumed run equals an uninterrupted one. The text is the source of Python's standard library:
it is real text and needs no download. It differs between Python versions.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = b"\n" + bytes(range(32, 127))
CORPUS_BYTES = 4 << 20
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "encodings", "__pycache__"}


@cache
def corpus() -> Tensor:
    """The modules of the library as indices into ``VOCABULARY`` (uint8).

    They come in the order of a hash of their path, so that the held-out end is like the rest.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = sorted(paths, key=lambda name: (crc32(name.encode()), name))
    other_bytes = bytes(set(range(256)) - set(VOCABULARY))
    to_index = bytes.maketrans(VOCABULARY, bytes(range(len(VOCABULARY))))
    text = bytearray()
    for name in names:
        if _SKIPPED_FOLDERS.isdisjoint(name.split("/")):
            text += (root / name).read_bytes().translate(to_index, other_bytes)
        if len(text) >= CORPUS_BYTES:
            break
    return torch.frombuffer(text[:CORPUS_BYTES], dtype=torch.uint8)


def batch(step: int, *, seed: int, batch_size: int, block_size: int, held_out: bool = False) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets: a pure function of the arguments.

    They come from the first nine tenths of the text, or from the held-out tenth.
    """
    text = corpus()
    border = len(text) * 9 // 10
    part = text[border:] if held_out else text[:border]
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 2 + held_out)
    starts = torch.randint(len(part) - block_size, (batch_size, 1), generator=generator)
    window = part[starts + torch.arange(block_size + 1)].long()
    return window[:, :-1], window[:, 1:]


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


SIZES = {
    "mini": GPTConfig(n_layer=2, n_head=4, n_embd=88, block_size=64),
    "tiny": GPTConfig(n_layer=2, n_head=4, n_embd=112),
    "10m": GPTConfig(n_layer=6, n_head=6, n_embd=384, block_size=256),
}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How a network is trained. ``horizon`` is the step at which the cosine schedule reaches ``lr / 10``,
    or zero with the schedule "to zero"."""

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
        if self.schedule == "to zero":
            return self.lr * (1 + math.cos(math.pi * done)) / 2
        return self.lr * (0.55 + 0.45 * math.cos(math.pi * done))


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
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


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
    """A model and its optimizer in training, which can continue from a checkpoint."""

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
        return self.model(x.to(run.device), y.to(run.device))

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss on fixed held-out batches; keeps the best."""
        mean = torch.stack([self.loss(i, held_out=True) for i in range(self.run.eval_batches)]).mean().cpu()
        self.best_val_loss = torch.minimum(self.best_val_loss, mean)
        return mean.item()

    def advance(self) -> float:
        """Take one step; return the loss before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.run.lr_at(self.step)
        loss = self.loss(self.step)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.run.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def load(self, checkpoint: dict[str, Any]) -> None:
        """Continue from a checkpoint, through the model's and the optimizer's own ``load_state_dict``."""
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.step, self.best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]

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


def train(
    config: GPTConfig,
    optimizer_factory: OptimizerFactory,
    steps: int,
    seed: int = 0,
    *,
    start: dict[str, Any] | None = None,
    on_step: Callable[[int, float], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train until ``steps`` updates are done, from nothing or from ``start``; return the checkpoint.

    ``settings`` are fields of RunConfig. For a run in two parts, give both calls the same ``horizon``.
    """
    run = Run(config, RunConfig(**{"horizon": steps, "seed": seed, **settings}), optimizer_factory)
    if start is not None:
        run.load(start)
    while run.step < steps:
        loss = run.advance()
        if on_step is not None:
            on_step(run.step, loss)
    run.validate()
    return run.checkpoint()


def training_arguments(folder, **arguments):
    """Those of transformers' Trainer for a run on the CPU that shows and reports nothing."""
    import transformers

    return transformers.TrainingArguments(
        output_dir=str(folder), report_to=[], use_cpu=True, disable_tqdm=True, **arguments
    )
