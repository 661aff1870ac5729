"""``SwitchBackLinear``: a linear layer whose forward pass and input gradient are 8-bit integer products.

SwitchBack, from "Stable and low-precision training for large-scale vision-language models" (arXiv 2304.13013). With
X (rows, inputs), W (outputs, inputs) and the gradient G (rows, outputs) of Y:

    state(x)  = max|x|                 of a row of X or of G; of all of W
    codes(x)  = round(127 · (x / state(x)))                int8 in -127 .. 127, halves to even; 0 where the state is 0
    Y         = state(X) · state(W) / 127² · (codes(X) @ codes(W)ᵀ) + b
    ∂X        = state(G) · state(W) / 127² · (codes(G) @ codes(W))
    ∂W, ∂b    = Gᵀ @ X, sum of G                           not quantised: in 16 bits where X has 16

A weight gradient is a sum over rows, and there are far more rows than inputs or outputs: it needs the 16 bits. States
are always fp32, the integer product is exact, and states, product and bias are multiplied and added in fp32; the result
is rounded once, to the element type of X.

NaN and Inf stay visible: a row of X or G that holds one has the state NaN, which makes its row of Y or ∂X NaN, and W
with one makes all of Y and ∂X NaN. So a loss scaler sees overflow as with ``nn.Linear``. That layer, however, spreads a
bad weight over its column of Y only, and keeps Inf as Inf.

``torch.autocast`` casts X; W is quantised as it is, and ∂W has the element type of W.

``switchback`` and ``to_linear`` turn the linear layers of a model into 8-bit layers and back, in place. Each module
changes its class and stays the same object: parameters, hooks, names and references stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ckpt8.core.backend import resolve
from ckpt8.core.errors import UsageError, require
from ckpt8.core.public import checked
from ckpt8.nn import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Element types of inputs and weights."""


def check_backend(backend: str | None) -> None:
    """Raise UsageError for an unknown name. Whether the backend can run is checked when it is used."""
    require(
        backend in (None, "torch", "triton"),
        f"SwitchBackLinear has no backend {backend!r}; use 'torch' or 'triton'",
        UsageError,
    )


def operations(backend: str | None, device: torch.device) -> ModuleType:
    """The module of operations for ``device``: ``triton`` on CUDA, else ``reference``. Raises UsageError."""
    if resolve(backend, device) == "torch":
        return reference
    from ckpt8.nn import triton

    return triton


class SwitchBack(torch.autograd.Function):
    """Y from X, W, b and the backend; not differentiable twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> Tensor:
        """Quantise and multiply; keep the state of W, and X and W where a gradient needs them."""
        ops = operations(backend, x.device)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        with _without_autocast(x.device):
            state = ops.tensor_state(weight)
            codes, states = ops.quantise_rows(_rows(x))
            y: Tensor = ops.matmul(codes, states, ops.quantise_tensor(weight, state), state, bias, x.dtype)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, state)
        ctx.backend, ctx.shape = backend, x.shape
        ctx.dtypes = weight.dtype, None if bias is None else bias.dtype
        return y.view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """The gradients of X, W and b that autograd needs."""
        x, weight, state = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight_dtype, bias_dtype = ctx.dtypes
        rows = _rows(grad)
        grad_x = grad_weight = grad_bias = None
        with _without_autocast(grad.device):
            if needs_x:
                ops = operations(ctx.backend, grad.device)
                codes, states = ops.quantise_rows(rows)
                transposed = ops.quantise_tensor(weight, state, transposed=True)
                grad_x = ops.matmul(codes, states, transposed, state, None, grad.dtype).view(ctx.shape)
            if needs_weight:
                grad_weight = (rows.t() @ _rows(x)).to(weight_dtype)
            if needs_bias:
                grad_bias = rows.sum(0, dtype=bias_dtype)
        return grad_x, grad_weight, grad_bias, None


class SwitchBackLinear(nn.Linear):
    """``nn.Linear`` with an 8-bit forward pass and input gradient; parameters, names and initial values are the same.

    ``backend`` is ``torch`` or ``triton``; the default is Triton kernels on CUDA devices, plain torch elsewhere, with
    the same arithmetic. Inputs have the shape (..., in_features) and the element type of the weight: fp32, bf16 or
    fp16, or any of these under ``torch.autocast``. Training and evaluation are alike. A forward pass raises UsageError
    for other inputs, the constructor for another backend.

    >>> ckpt8.nn.SwitchBackLinear(64, 32)(torch.ones(2, 64)).shape
    torch.Size([2, 32])
    """

    backend: str | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        backend: str | None = None,
    ) -> None:
        check_backend(backend)
        super().__init__(in_features, out_features, bias, device, dtype)
        if backend is not None:
            self.backend = backend

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Y of ``input``, in its element type or autocast's."""
        x, weight = input, self.weight
        casts = _autocasts(x.device)
        if casts and x.dtype in DTYPES:
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise UsageError(f"SwitchBackLinear({self.extra_repr()}) was given an input of shape {tuple(x.shape)}")
        if x.dtype not in DTYPES or weight.dtype not in DTYPES or not (casts or x.dtype == weight.dtype):
            raise UsageError(
                f"SwitchBackLinear was given {_label(x)} for weights of {_label(weight)}; both have to be the same of "
                "float32, bfloat16 and float16, or any of them under torch.autocast"
            )
        apply: Callable[..., Tensor] = SwitchBack.apply  # torch 2.13 gives it no types, 2.15 does
        return apply(x, weight, self.bias, self.backend)


def _rows(x: Tensor) -> Tensor:
    """``x`` as a matrix: all dimensions but the last become one, which may be empty."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _autocasts(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(device.type, enabled=False) if _autocasts(device) else nullcontext()


def _label(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


HEADS = tuple(
    prefix + name
    for name in ("lm_head", "head", "classifier", "score", "embed_out", "output_projection")
    for prefix in ("", "*.")
)
"""Globs of the usual names of output layers. SwitchBack is meant for the layers inside the blocks."""


@checked
def switchback(model: nn.Module, skip: Sequence[str] | None = None, *, backend: str | None = None) -> list[str]:
    """Make every ``nn.Linear`` of ``model`` a ``SwitchBackLinear``, in place. Returns their paths.

    ``skip`` lists globs of module paths to leave alone, by default ``HEADS``; ``()`` skips none. Two kinds of layers
    never change: subclasses of ``nn.Linear``, which compute something else, and layers that share their weight with an
    ``nn.Embedding``. ``backend`` goes to ``SwitchBackLinear``. Raises UsageError, and changes nothing, where a glob
    matches no linear layer, the model has no linear layer, a weight is not fp32, bf16 or fp16, or the backend is
    unknown.

    >>> ckpt8.nn.switchback(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()))
    ['0']
    """
    check_backend(backend)
    layers = dict(_layers(model, nn.Linear))
    require(
        layers or any(_layers(model, SwitchBackLinear)),
        "the model holds no nn.Linear; there is nothing that SwitchBackLinear could replace",
        UsageError,
    )
    for glob in skip or ():
        require(
            any(fnmatchcase(path, glob) for path in layers),
            f"skip={glob!r} matches none of the model's linear layers: {', '.join(layers)}",
            UsageError,
        )
    globs = HEADS if skip is None else skip
    tied = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    chosen = {
        path: layer
        for path, layer in layers.items()
        if id(layer.weight) not in tied and not any(fnmatchcase(path, glob) for glob in globs)
    }
    for path, layer in chosen.items():
        require(
            layer.weight.dtype in DTYPES,
            f"{path}: SwitchBackLinear takes no {layer.weight.dtype} weights; add it to skip",
            UsageError,
        )
    for layer in chosen.values():
        layer.__class__ = SwitchBackLinear
        if backend is not None:
            cast(SwitchBackLinear, layer).backend = backend
    return list(chosen)


@checked
def to_linear(model: nn.Module) -> list[str]:
    """Make every ``SwitchBackLinear`` of ``model`` an ``nn.Linear`` again, in place. Returns their paths.

    >>> layers = torch.nn.Sequential(ckpt8.nn.SwitchBackLinear(64, 64))
    >>> ckpt8.nn.to_linear(layers)
    ['0']
    """
    layers = dict(_layers(model, SwitchBackLinear))
    for layer in layers.values():
        layer.__class__ = nn.Linear
        layer.__dict__.pop("backend", None)
    return list(layers)


def _layers(model: nn.Module, kind: type[nn.Linear]) -> Iterator[tuple[str, nn.Linear]]:
    """The modules of exactly this class, each once, by path."""
    return ((path, module) for path, module in model.named_modules() if type(module) is kind)
