"""The optimizers that train on the packed state: AdamW and Adam, StableAdamW, CAME, Lion, SGD, Adafactor.

Each is a rule over blocks of fp32 values, whose docstring has its maths and its source, and a class with the arguments
of the published one. Here theta is the parameter, g its gradient, lr the learning rate, wd the weight decay, t the
step, counted from 1, and b1, b2, b3 the betas.
"""

import math
from typing import Any, ClassVar

import torch

from ckpt8.codecs.companded8.reference import divide, square_root
from ckpt8.core.errors import UsageError, require
from ckpt8.optim.packed import PackedOptimizer, Params, check_torch_arguments
from ckpt8.optim.packed_tensor import Block, Blocks, Factored, Updates, Values, clipping, inverse_root, power, root_mean


def adam(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    amsgrad: bool = False,
) -> Updates:
    """AdamW and Adam (Loshchilov and Hutter, arXiv 1711.05101; Kingma and Ba, arXiv 1412.6980), as torch computes them.

    AdamW: theta = theta (1 - lr wd)                    Adam: g = g + wd theta
    m = m + (1-b1) (g - m)                              first moment
    v = b2 v + (1-b2) g^2                               second moment
    theta -= lr/(1-b1^t) * m / (sqrt(v) / sqrt(1-b2^t) + eps)     amsgrad: with the largest v so far

    One step, ``step`` counting from 1; yields ``param``, ``exp_avg``, ``exp_avg_sq``, or ``max_exp_avg_sq`` too.
    """
    beta1, beta2 = betas
    step_size = lr / (1 - power(beta1, step))
    root_correction = math.sqrt(1 - power(beta2, step))
    for block in blocks:
        param, grad, m, v = block.load("param", "grad", "exp_avg", "exp_avg_sq")
        if weight_decay and decoupled:
            param.mul_(1 - lr * weight_decay)
        elif weight_decay:
            grad.add_(param * weight_decay)
        m.add_((grad - m).mul_(1 - beta1))
        v.mul_(beta2).add_(grad.square_().mul_(1 - beta2))
        new = {"param": param, "exp_avg": m, "exp_avg_sq": v}
        if amsgrad:
            new["max_exp_avg_sq"] = v = torch.maximum(block.load("max_exp_avg_sq")[0], v)
        param.sub_((m / divide(square_root(v), root_correction).add_(eps)).mul_(step_size))
        yield new


class AdamW(PackedOptimizer):
    """AdamW on packed state. Arguments are those of ``torch.optim.AdamW``; PackedOptimizer lists the others.

    Code written for ``torch.optim.AdamW`` runs unchanged, but for ``amsgrad=True`` and ``differentiable=True``, which
    are refused by name, and ``fused=True`` on a CPU, where there are no kernels.

    >>> optimizer = ckpt8.optim.AdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "adamw"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        **packing: Any,
    ) -> None:
        check_torch_arguments({"amsgrad": amsgrad})
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **packing)


# Constructors repeat their arguments: signatures and defaults are those of the published classes.
class Adam(AdamW):
    """Adam, whose weight decay is part of the gradient. Arguments are those of ``torch.optim.Adam``.

    >>> optimizer = ckpt8.optim.Adam(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "adam"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        decoupled_weight_decay: bool = False,
        **packing: Any,
    ) -> None:
        if decoupled_weight_decay:
            raise UsageError("decoupled_weight_decay=True is not supported; ckpt8.optim.AdamW decays so")
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, **packing)


def debiased(beta: float, step: int) -> float:
    """The beta that keeps an average free of the bias of its zero start; 0 at the first step."""
    return beta * (1 - power(beta, step - 1)) / (1 - power(beta, step)) if beta else 0.0


def stable_adamw(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    clip_threshold: float = 1.0,
) -> Updates:
    """StableAdamW (Wortsman et al., arXiv 2304.13013): AdamW with Adafactor's update clipping and decay rates.

        b^  = b (1 - b^(t-1)) / (1 - b^t)                   for b in b1, b2: the moments stay free of bias (Shazeer and
                                                            Stern, arXiv 1804.04235)
        m   = m + (1-b1^) (g - m);     u = b2^ u + (1-b2^) g^2
        RMS = sqrt(mean(g^2 / max(u, eps^2)))               over the whole tensor
        eta = lr / max(1, RMS / d)                          d = 1
        theta = theta (1 - eta wd) - eta m / (sqrt(u) + eps)

    A first pass over the blocks computes the mean: it forms u and keeps only sums.

    One step, ``step`` counting from 1; yields ``param``, ``exp_avg`` and ``exp_avg_sq`` (free of bias).

    ``clip_threshold`` is the RMS above which the step is scaled down; infinity turns that off.
    """
    beta1, beta2 = debiased(betas[0], step), debiased(betas[1], step)

    def ratio(block: Block) -> torch.Tensor:
        grad, u = block.load("grad", "exp_avg_sq")
        square = grad.square_()
        return square / u.mul_(beta2).add_(square.mul(1 - beta2)).clamp_min_(eps * eps)

    eta = lr / max(1.0, root_mean(blocks, ratio) / clip_threshold)
    for block in blocks:
        param, grad, m, u = block.load("param", "grad", "exp_avg", "exp_avg_sq")
        m.add_((grad - m).mul_(1 - beta1))
        u.mul_(beta2).add_(grad.square_().mul_(1 - beta2))
        param.mul_(1 - eta * weight_decay).sub_((m / square_root(u).add_(eps)).mul_(eta))
        yield {"param": param, "exp_avg": m, "exp_avg_sq": u}


class StableAdamW(PackedOptimizer):
    """StableAdamW on packed state. Arguments and defaults are optimi's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.StableAdamW(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "stable_adamw"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-6,
        weight_decay: float = 1e-2,
        **packing: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, **packing)


def came(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float, float],
    eps: tuple[float, float],
    clip_threshold: float,
    weight_decay: float,
) -> Updates:
    """CAME (Luo et al., arXiv 2307.02047), as in came-pytorch: no bias correction.

        s  = g^2 + eps1;     R = b2 R + (1-b2) mean_-1(s);     C = b2 C + (1-b2) mean_-2(s)
        u  = g * approx(R, C);     approx(R, C) = rsqrt(R / mean_-1(R)) (x) rsqrt(C)
        u /= max(1, RMS(u)/d);     m = b1 m + (1-b1) u
        r  = (u - m)^2 + eps2;     Rr, Cr = b3-averages of its means, as R and C
        theta = theta (1 - lr wd) - lr m * approx(Rr, Cr)

    Below two dimensions u = g * rsqrt(V), V = b2 V + (1-b2) s, and the step is m. Over blocks of rows this takes four
    passes: R and C; RMS(u); Rr and Cr; the update. Each computes u and m again from the stored state. Row and column
    averages are fp32 tensors of the whole parameter, summed in float64 over blocks that depend on the shape alone.

    From two dimensions on ``whole`` holds ``exp_avg_sq_row``, ``exp_avg_sq_col``, ``exp_avg_res_row`` and
    ``exp_avg_res_col``. Yields ``param`` and ``exp_avg`` of every block, then the new statistics; below two dimensions
    ``param``, ``exp_avg`` and ``exp_avg_sq``.
    """
    if not whole:
        yield from _came_vector(blocks, lr, betas, eps[0], clip_threshold, weight_decay)
        return
    square = Factored(whole["exp_avg_sq_row"], whole["exp_avg_sq_col"])
    instability = Factored(whole["exp_avg_res_row"], whole["exp_avg_res_col"])
    for block in blocks:
        square.add(block, block.load("grad")[0].square_().add_(eps[0]))
    squares = square.averaged(betas[1])

    def direction(block: Block) -> torch.Tensor:
        return block.load("grad")[0].mul_(square.factor(block))

    clip = clipping(blocks, direction, clip_threshold)

    def moved(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        u, (m,) = divide(direction(block), clip), block.load("exp_avg")
        return u, m.mul_(betas[0]).add_(u * (1 - betas[0]))

    for block in blocks:
        u, m = moved(block)
        instability.add(block, u.sub_(m).square_().add_(eps[1]))
    instabilities = instability.averaged(betas[2])
    for block in blocks:
        (param,), (_, m) = block.load("param"), moved(block)
        param.mul_(1 - lr * weight_decay).sub_((m * instability.factor(block)).mul_(lr))
        yield {"param": param, "exp_avg": m}
    averages = {"exp_avg_sq": squares, "exp_avg_res": instabilities}
    yield {f"{key}_{axis}": values for key, both in averages.items() for axis, values in both.items()}


def _came_vector(
    blocks: Blocks, lr: float, betas: tuple[float, float, float], eps: float, clip_threshold: float, weight_decay: float
) -> Updates:
    def second(block: Block) -> tuple[torch.Tensor, torch.Tensor]:
        grad, v = block.load("grad", "exp_avg_sq")
        v.mul_(betas[1]).add_((grad * grad).add_(eps).mul_(1 - betas[1]))
        return grad.mul_(inverse_root(v)), v

    clip = clipping(blocks, lambda block: second(block)[0], clip_threshold)
    for block in blocks:
        (u, v), (param, m) = second(block), block.load("param", "exp_avg")
        m.mul_(betas[0]).add_(divide(u, clip).mul_(1 - betas[0]))
        param.mul_(1 - lr * weight_decay).sub_(m * lr)
        yield {"param": param, "exp_avg": m, "exp_avg_sq": v}


class CAME(PackedOptimizer):
    """CAME on packed state. Arguments and defaults are came-pytorch's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.CAME(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "came"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 2e-4,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        **packing: Any,
    ) -> None:
        super().__init__(
            params,
            {"lr": lr, "betas": betas, "eps": eps, "clip_threshold": clip_threshold, "weight_decay": weight_decay},
            **packing,
        )


def lion(
    blocks: Blocks, whole: Values, *, step: int, lr: float, betas: tuple[float, float], weight_decay: float
) -> Updates:
    """Lion (Chen et al., arXiv 2302.06675, algorithm 2).

    c = b1 m + (1-b1) g;     theta = theta (1 - lr wd) - lr sign(c);     m = b2 m + (1-b2) g

    One step; yields ``param`` and ``exp_avg``.
    """
    beta1, beta2 = betas
    for block in blocks:
        param, grad, m = block.load("param", "grad", "exp_avg")
        param.mul_(1 - lr * weight_decay).sub_((m * beta1).add_(grad * (1 - beta1)).sign_().mul_(lr))
        m.mul_(beta2).add_(grad.mul_(1 - beta2))
        yield {"param": param, "exp_avg": m}


class Lion(PackedOptimizer):
    """Lion on packed state. Arguments and defaults are lion-pytorch's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.Lion(model.parameters(), lr=1e-4)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "lion"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        **packing: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, **packing)


def sgd(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
) -> Updates:
    """SGD with momentum (Sutskever et al., ICML 2013), as torch computes it.

    g = g + wd theta;     b = g at the first step, then mu b + (1 - dampening) g
    theta -= lr (g + mu b  if nesterov  else b);     without momentum: theta -= lr g

    One step, ``step`` counting from 1; yields ``param`` and, with momentum, ``momentum_buffer``.
    """
    for block in blocks:
        param, grad = block.load("param", "grad")
        if weight_decay:
            grad.add_(param * weight_decay)
        if not momentum:
            yield {"param": param.sub_(grad.mul_(lr))}
            continue
        if step == 1:
            buffer = grad.clone()
        else:
            (buffer,) = block.load("momentum_buffer")
            buffer.mul_(momentum).add_(grad * (1 - dampening))
        update = grad.add_(buffer * momentum) if nesterov else buffer
        yield {"param": param.sub_(update * lr), "momentum_buffer": buffer}


class SGD(PackedOptimizer):
    """SGD on packed state. Arguments and defaults are torch's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "sgd"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        **packing: Any,
    ) -> None:
        require(
            not nesterov or (momentum > 0 and dampening == 0),
            "SGD: nesterov needs momentum and no dampening",
            UsageError,
        )
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
            },
            **packing,
        )


def adafactor(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    beta2_decay: float,
    eps: tuple[float | None, float],
    d: float,
    weight_decay: float,
) -> Updates:
    """Adafactor (Shazeer and Stern, arXiv 1804.04235), as torch computes it: no momentum, a factored second moment.

        w  = t^gamma;     rho = min(lr, 1/sqrt(t));     alpha = max(eps2, RMS(theta)) rho
        R += w (mean_-1(g^2) - R);     C += w (mean_-2(g^2) - C);     V = R (x) C / max(mean_-2(R), eps1)
        u  = g / sqrt(max(V, eps1^2));     theta = theta (1 - lr wd) - alpha u / max(1, RMS(u)/d)

    Below two dimensions V += w (g^2 - V). By default eps1 is the machine epsilon of fp32.

    One step, ``step`` counting from 1.

    ``whole`` holds ``row_var`` (..., rows, 1) and ``col_var`` (..., 1, columns) from two dimensions on. Yields
    ``param`` of every block, and ``variance`` below two dimensions; then the new statistics.
    """
    eps1 = torch.finfo(torch.float32).eps if eps[0] is None else eps[0]
    change = float(step) ** beta2_decay
    rms = root_mean(blocks, lambda block: block.load("param")[0].square_())
    alpha = max(eps[1], rms) * min(lr, 1 / math.sqrt(step))
    if whole:
        averages = Factored(whole["row_var"], whole["col_var"])
        for block in blocks:
            averages.add(block, block.load("grad")[0].square_())
        new = averages.averaged(1 - change)
        shares = averages.rows / averages.rows.double().mean(-1, keepdim=True).float().clamp_min_(eps1)

    def second_moment(block: Block) -> torch.Tensor:
        if whole:
            return shares[block.batches, block.rows].unsqueeze(-1) * averages.columns[block.batches].unsqueeze(-2)
        variance, grad = block.load("variance", "grad")
        return variance.add_((grad.square_() - variance).mul_(change))

    def direction(block: Block) -> torch.Tensor:
        return block.load("grad")[0].mul_(inverse_root(second_moment(block).clamp_min_(eps1 * eps1)))

    clip = clipping(blocks, direction, d)
    for block in blocks:
        (param,) = block.load("param")
        param.mul_(1 - lr * weight_decay).sub_(direction(block).mul_(alpha / clip))
        yield {"param": param} | ({} if whole else {"variance": second_moment(block)})
    if whole:
        yield {"row_var": new["row"], "col_var": new["col"]}


class Adafactor(PackedOptimizer):
    """Adafactor on packed state. Arguments and defaults are torch's; PackedOptimizer lists the others.

    >>> optimizer = ckpt8.optim.Adafactor(model.parameters(), lr=1e-3)
    >>> model(torch.ones(1, 128)).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[model.weight]["step"]
    tensor(1)
    """

    rule_id: ClassVar[str] = "adafactor"

    def __init__(
        self,
        params: Params,
        lr: float | torch.Tensor = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        **packing: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay}, **packing
        )
