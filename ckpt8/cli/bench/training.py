"""Trains the checkpoint to measure, if the user gives none: a GPT of the given size, on real text.

It has its full width and depth and takes real steps of AdamW; no tensor is tiled or drawn at random. To save memory,
each parameter takes its step as soon as its gradient is known, and frees the gradient: training takes 12 bytes per
parameter, as the checkpoint does, not 16. There is no clipping, which needs all gradients at once. Larger networks take
fewer steps: their weights are then still close to their initial values, while moments are those of real gradients from
the first step on.

A small character-level GPT that really trains: it makes the checkpoint that ``bench`` measures.

Module names, parameter groups and checkpoint layout are nanoGPT's. Initial weights and batches are functions of the
seed and the step alone: a resumed run equals an uninterrupted one.

The text that the GPT of ``bench`` learns: the source of Python's standard library.

It is real text, and needs no download. It differs between Python versions.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt8.cli.bench.run import available_memory, in_gigabytes
from ckpt8.core.errors import UsageError

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


MIN_STEPS, MAX_STEPS = 4, 100
_STEP_BYTES = 4e9
"""Bytes of checkpoint that all steps together update, within the numbers of steps above."""

_BATCH, _RATE, _WARMUP = 2, 5e-5, 2
_WORKING_MEMORY = 1 << 30
"""For activations, the largest gradients and torch itself."""


def steps_for(nbytes: int) -> int:
    """The number of training steps of a checkpoint of this size."""
    return int(min(MAX_STEPS, max(MIN_STEPS, _STEP_BYTES / nbytes)))


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Train a checkpoint of ``size`` bytes, write it to ``target`` and describe it. Raises UsageError."""
    return train_checkpoint(Path(job["target"]), int(job["size"]))


def train_checkpoint(target: Path, nbytes: int) -> dict[str, Any]:
    """Write a checkpoint of about ``nbytes`` bytes and describe it. Raises UsageError."""
    try:
        config = config_for_bytes(nbytes)
    except ValueError as exc:
        raise UsageError(f"--size {nbytes}: {exc}") from exc
    needed, available = 12 * config.n_params + _WORKING_MEMORY, available_memory()
    if available is not None and available < needed:
        raise UsageError(
            f"--size {nbytes}: to train it takes {in_gigabytes(needed)} of memory and {in_gigabytes(available)} are "
            "available; take a smaller size, or give a checkpoint"
        )
    steps = steps_for(nbytes)
    settings = RunConfig(horizon=steps, batch_size=_BATCH, lr=_RATE, warmup=_WARMUP, eval_batches=1)
    run = Run(config, settings, lambda groups, lr: torch.optim.AdamW(groups, lr=lr))
    update_in_backward(run)
    while run.step < steps:
        for group in run.optimizer.param_groups:
            group["lr"] = settings.lr_at(run.step)
        run.loss(run.step).backward()  # type: ignore[no-untyped-call]
        run.step += 1
    run.validate()
    torch.save(run.checkpoint(), target)
    return {"parameters": config.n_params, "steps": steps, "loss": run.best_val_loss.item(), **asdict(config)}


def update_in_backward(run: Any) -> None:
    """Update every parameter of a ``Run`` with an optimizer of its own, during the backward pass.

    ``run.optimizer`` shares the states of these optimizers; its groups have the settings of the next steps.
    """
    for group in run.optimizer.param_groups:
        for param in group["params"]:
            alone = torch.optim.AdamW([{**group, "params": [param]}])
            # The groups are two objects: the hook reads the run's learning rate before each step.
            run.optimizer.state[param] = alone.state[param]

            def update(_: torch.Tensor, alone: Any = alone, group: dict[str, Any] = group) -> None:
                alone.param_groups[0]["lr"] = group["lr"]
                alone.step()
                alone.zero_grad()

            param.register_post_accumulate_grad_hook(update)
