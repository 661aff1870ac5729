"""The rules of optimizers that ckpt8 recognises and replays, but does not train with.

They are functions like those of ``optimizers`` (see ``packed_tensor``), and serve to measure errors in update space and
to replay steps.

Three divide the gradient by the root of the squares so far:

rmsprop    v = a v + (1-a) g^2; centered: c = a c + (1-a) g, and v - c^2 in place of v
           theta -= lr g / (sqrt(v) + eps)                 momentum: b = mu b + g / (sqrt(v) + eps); theta -= lr b
adagrad    s = s + g^2                                     theta -= lr / (1 + (t-1) decay) g / (sqrt(s) + eps)
adadelta   v = r v + (1-r) g^2; u = sqrt(d + eps) / sqrt(v + eps) g; d = r d + (1-r) u^2; theta -= lr u

Sources: Hinton, lecture 6e, and Graves, arXiv 1308.0850 (RMSprop); Duchi et al., JMLR 12, 2011 (Adagrad); Zeiler,
arXiv 1212.5701 (Adadelta). All as torch computes them.

Six divide an average of gradients by the root of an average of squares, or by a norm like it:

m = b1 m + (1-b1) g; v = b2 v + (1-b2) g^2; m^ = m / (1 - b1^t); v^ = v / (1 - b2^t)

adamax      n = max(b2 n, |g| + eps)                        theta -= lr m^ / n
nadam       mu_t = b1 (1 - 0.96^(t psi) / 2), M_t = mu_1 ... mu_t
            theta -= lr (g (1 - mu_t) / (1 - M_t) + m mu_(t+1) / (1 - M_(t+1))) / (sqrt(v^) + eps)
radam       rho = 2 / (1 - b2) - 1; r = rho - 2 t b2^t / (1 - b2^t)
            theta -= lr m^                                  while r <= 5, then
            theta -= lr m^ sqrt(1 - b2^t) / (sqrt(v) + eps) sqrt((r-4)(r-2) rho / ((rho-4)(rho-2) r))
adabelief   s = b2 s + (1-b2) (g - m)^2 + eps               theta -= lr m^ / (sqrt(s) / sqrt(1 - b2^t) + eps)
ademamix    l = b3 l + (1-b3) g                             theta -= lr (m^ + alpha l) / (sqrt(v^) + eps)
adan        d = g - g_(t-1); e = b2 e + (1-b2) d; n = b3 n + (1-b3) (g + b2 d)^2
            theta -= lr (m / (1 - b1^t) + b2 e / (1 - b2^t)) / (sqrt(n) / sqrt(1 - b3^t) + eps)
            theta = theta / (1 + lr wd)                     or theta (1 - lr wd) before the step

Sources: Kingma and Ba, arXiv 1412.6980 (Adamax); Dozat, ICLR 2016 workshop (NAdam); Liu et al., arXiv 1908.03265
(RAdam); Zhuang et al., arXiv 2010.07468 (AdaBelief); Pagliardini et al., arXiv 2409.03137 (AdEMAMix); Xie et al.,
arXiv 2208.06677 (Adan). Decay is theta (1 - lr wd) unless said otherwise.

Muon (Jordan et al., kellerjordan.github.io/posts/muon, 2024) on matrices, as three packages compute it.

m = mu m + (1-mu) g;     O = NS(mu m + (1-mu) g), or NS(m) without Nesterov's momentum
theta = theta (1 - lr wd) - lr s O;     s = sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns))

NS takes a matrix, transposed if it is tall, in bfloat16: X = G / |G|; then X = a X + (b A + c A A) X, A = X X^T, some
times. torch and pytorch_optimizer round once for each matrix product and sum (``fused``), Keller Jordan's code after
each operation; the results differ by a rounding of bfloat16.

ScheduleFree AdamW (Defazio et al., arXiv 2405.15682) between calls of ``train`` and ``eval``: the weight is y.

v = b2 v + (1-b2) g^2; u = g / (sqrt(v / (1 - b2^t)) + eps) + wd y
c = w_t / (w_1 + ... + w_t), where w_t = t^r (largest lr so far)^p
y = (1-c) y + c z - lr (1 - b1 (1-c)) u;     z = z - lr u
"""

import math

import torch

from ckpt8.codecs.companded8.reference import divide, square_root
from ckpt8.optim.packed_tensor import Blocks, Updates, Values, power


def rmsprop(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    alpha: float,
    eps: float,
    weight_decay: float,
    momentum: float,
    centered: bool,
) -> Updates:
    """One step; yields ``param``, ``square_avg``, and ``grad_avg`` and ``momentum_buffer`` where there are any."""
    for block in blocks:
        param, grad, v = block.load("param", "grad", "square_avg")
        v.mul_(alpha).add_(grad.square().mul_(1 - alpha))
        new = {"square_avg": v}
        variance = v
        if centered:
            [mean] = block.load("grad_avg")
            new["grad_avg"] = mean.lerp_(grad, 1 - alpha)
            variance = v - mean.square()
        update = grad / square_root(variance).add_(eps)
        if momentum:
            [buffer] = block.load("momentum_buffer")
            new["momentum_buffer"] = update = buffer.mul_(momentum).add_(update)
        yield {"param": param.mul_(1 - lr * weight_decay).sub_(update * lr), **new}


def adagrad(
    blocks: Blocks, whole: Values, *, step: int, lr: float, lr_decay: float, eps: float, weight_decay: float
) -> Updates:
    """One step; yields ``param`` and ``sum``."""
    step_size = lr / (1 + (step - 1) * lr_decay)
    for block in blocks:
        param, grad, total = block.load("param", "grad", "sum")
        total.add_(grad.square())
        param.mul_(1 - lr * weight_decay).sub_((grad / square_root(total).add_(eps)).mul_(step_size))
        yield {"param": param, "sum": total}


def adadelta(
    blocks: Blocks, whole: Values, *, step: int, lr: float, rho: float, eps: float, weight_decay: float
) -> Updates:
    """One step; yields ``param``, ``square_avg`` and ``acc_delta``."""
    for block in blocks:
        param, grad, v, deltas = block.load("param", "grad", "square_avg", "acc_delta")
        v.mul_(rho).add_(grad.square().mul_(1 - rho))
        update = square_root(deltas + eps).div_(square_root(v + eps)).mul_(grad)
        deltas.mul_(rho).add_(update.square().mul_(1 - rho))
        param.mul_(1 - lr * weight_decay).sub_(update.mul_(lr))
        yield {"param": param, "square_avg": v, "acc_delta": deltas}


def adamax(
    blocks: Blocks, whole: Values, *, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Updates:
    """One step; yields ``param``, ``exp_avg`` and ``exp_inf``."""
    beta1, beta2 = betas
    step_size = lr / (1 - power(beta1, step))
    for block in blocks:
        param, grad, m, norm = block.load("param", "grad", "exp_avg", "exp_inf")
        m.lerp_(grad, 1 - beta1)
        norm = torch.maximum(norm.mul_(beta2), grad.abs_().add_(eps))
        param.mul_(1 - lr * weight_decay).sub_((m / norm).mul_(step_size))
        yield {"param": param, "exp_avg": m, "exp_inf": norm}


def nadam(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    momentum_decay: float,
) -> Updates:
    """One step; yields ``param``, ``exp_avg`` and ``exp_avg_sq``."""
    beta1, beta2 = betas
    mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay)) for t in (step, step + 1))
    product = _mu_product(beta1, momentum_decay, step)
    for_grad, for_m = lr * (1 - mu) / (1 - product), lr * mu_next / (1 - product * mu_next)
    for block in blocks:
        param, grad, m, v = block.load("param", "grad", "exp_avg", "exp_avg_sq")
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).add_(grad.square().mul_(1 - beta2))
        denominator = square_root(divide(v.clone(), 1 - power(beta2, step))).add_(eps)
        param.mul_(1 - lr * weight_decay).sub_((grad / denominator).mul_(for_grad)).sub_((m / denominator).mul_(for_m))
        yield {"param": param, "exp_avg": m, "exp_avg_sq": v}


_WARM = 1 << 17
"""Steps after which mu is beta1, to nine digits at the default decay."""


def _mu_product(beta1: float, momentum_decay: float, step: int) -> float:
    """M_t for settings that never changed; 0 once it no longer matters to 1 - M_t, the limit of mu after many steps."""
    product = 1.0
    for t in range(1, min(step, _WARM) + 1):
        product *= beta1 * (1 - 0.5 * 0.96 ** (t * momentum_decay))
        if product < 1e-20:
            return 0.0
    return product * beta1 ** max(step - _WARM, 0)


def radam(
    blocks: Blocks, whole: Values, *, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Updates:
    """One step; yields ``param``, ``exp_avg`` and ``exp_avg_sq``."""
    beta1, beta2 = betas
    bias2 = 1 - power(beta2, step)
    last = 2 / (1 - beta2) - 1
    length = last - 2 * step * power(beta2, step) / bias2
    step_size = lr / (1 - power(beta1, step))
    if length > 5:
        step_size *= math.sqrt((length - 4) * (length - 2) * last / ((last - 4) * (last - 2) * length) * bias2)
    for block in blocks:
        param, grad, m, v = block.load("param", "grad", "exp_avg", "exp_avg_sq")
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).add_(grad.square_().mul_(1 - beta2))
        direction = m / square_root(v).add_(eps) if length > 5 else m.clone()
        param.mul_(1 - lr * weight_decay).sub_(direction.mul_(step_size))
        yield {"param": param, "exp_avg": m, "exp_avg_sq": v}


def adabelief(
    blocks: Blocks, whole: Values, *, step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Updates:
    """One step; yields ``param``, ``exp_avg`` and ``exp_avg_var``."""
    beta1, beta2 = betas
    step_size, root_correction = lr / (1 - power(beta1, step)), math.sqrt(1 - power(beta2, step))
    for block in blocks:
        param, grad, m, variance = block.load("param", "grad", "exp_avg", "exp_avg_var")
        m.lerp_(grad, 1 - beta1)
        variance.mul_(beta2).add_((grad - m).square_().mul_(1 - beta2)).add_(eps)
        denominator = divide(square_root(variance), root_correction).add_(eps)
        param.mul_(1 - lr * weight_decay).sub_((m / denominator).mul_(step_size))
        yield {"param": param, "exp_avg": m, "exp_avg_var": variance}


def ademamix(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float, float],
    eps: float,
    weight_decay: float,
    alpha: float,
) -> Updates:
    """One step; yields ``param``, ``exp_avg``, ``exp_avg_sq`` and ``exp_avg_slow``."""
    beta1, beta2, beta3 = betas
    bias1, root_correction = 1 - power(beta1, step), math.sqrt(1 - power(beta2, step))
    for block in blocks:
        param, grad, m, v, slow = block.load("param", "grad", "exp_avg", "exp_avg_sq", "exp_avg_slow")
        m.lerp_(grad, 1 - beta1)
        slow.lerp_(grad, 1 - beta3)
        v.mul_(beta2).add_(grad.square_().mul_(1 - beta2))
        update = divide(m.clone(), bias1).add_(slow * alpha).div_(divide(square_root(v), root_correction).add_(eps))
        param.mul_(1 - lr * weight_decay).sub_(update.mul_(lr))
        yield {"param": param, "exp_avg": m, "exp_avg_sq": v, "exp_avg_slow": slow}


def adan(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float, float],
    eps: float,
    weight_decay: float,
    debiased: bool,
    last: str,
    weight_decouple: float = 0,
    no_prox: float = 0,
) -> Updates:
    """One step; yields ``param``, ``exp_avg``, ``exp_avg_diff``, ``exp_avg_sq`` and the last gradient.

    ``last`` is the key of the last gradient, which is stored with its sign turned. ``debiased`` averages are stored
    after their division by 1 - b^t. With ``weight_decouple`` or ``no_prox`` weight decay comes first, as in AdamW.
    """
    decoupled = weight_decouple or no_prox
    beta1, beta2, beta3 = betas
    bias1, bias2, bias3 = (1 - power(beta, step) for beta in betas)
    to1, to2, to3 = 1 - beta1, 1 - beta2, 1 - beta3
    if debiased:
        to1, to2, to3 = to1 / bias1, to2 / bias2, to3 / bias3
        bias1 = bias2 = bias3 = 1.0
    for block in blocks:
        param, grad, m, e, n, difference = block.load("param", "grad", "exp_avg", "exp_avg_diff", "exp_avg_sq", last)
        difference.add_(grad)
        m.lerp_(grad, to1)
        e.lerp_(difference, to2)
        n.mul_(1 - to3).add_(difference.mul_(beta2).add_(grad).square_().mul_(to3))
        denominator = divide(square_root(n), math.sqrt(bias3)).add_(eps)
        if decoupled:
            param.mul_(1 - lr * weight_decay)
        param.sub_((m / denominator).mul_(lr / bias1)).sub_((e / denominator).mul_(lr * beta2 / bias2))
        if not decoupled:
            param = divide(param, 1 + lr * weight_decay)
        yield {"param": param, "exp_avg": m, "exp_avg_diff": e, "exp_avg_sq": n, last: grad.neg_()}


def muon(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    fused: bool,
    nesterov: bool = True,
    ns_coefficients: tuple[float, ...] = (3.4445, -4.7750, 2.0315),
    eps: float = 1e-7,
    ns_steps: float = 5,
    adjust_lr_fn: str | None = None,
    use_adjusted_lr: bool = False,
) -> Updates:
    """One step of one block that is the matrix; yields ``param`` and ``momentum_buffer``."""
    for block in blocks:
        param, grad, m = block.load("param", "grad", "momentum_buffer")
        rows, columns = param.shape
        m.lerp_(grad, 1 - momentum)
        update = grad.lerp_(m, momentum) if nesterov else m
        direction = _orthogonal(update, ns_coefficients, eps, int(ns_steps), fused=fused)
        scale = math.sqrt(max(1, rows / columns))
        if use_adjusted_lr or adjust_lr_fn == "match_rms_adamw":
            scale = 0.2 * math.sqrt(max(rows, columns))
        if not fused:
            direction *= scale
            scale = 1.0
        param.mul_(1 - lr * weight_decay).add_(direction, alpha=-lr * scale)
        yield {"param": param, "momentum_buffer": m}


def _orthogonal(
    matrix: torch.Tensor, coefficients: tuple[float, ...], eps: float, steps: int, *, fused: bool
) -> torch.Tensor:
    """NS of a matrix, in bfloat16."""
    a, b, c = coefficients
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.bfloat16()
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps) if fused else x / (x.norm() + eps)
    for _ in range(steps):
        gram = x @ x.T
        if fused:
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        else:
            x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def schedule_free_adamw(
    blocks: Blocks,
    whole: Values,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    r: float,
    weight_lr_power: float,
    warmup_steps: float,
    weight_sum: float,
    lr_max: float,
    taken: int,
) -> Updates:
    """One step; yields ``param``, ``z``, ``exp_avg_sq``. ``weight_sum`` and ``lr_max`` are those of step ``taken``."""
    beta1, beta2 = betas
    rate, weight = lr, 0.0
    for t in range(taken + 1, step + 1):
        rate = lr * min(1.0, t / warmup_steps) if warmup_steps else lr
        lr_max = max(rate, lr_max)
        weight = t**r * lr_max**weight_lr_power
        weight_sum += weight
    share = weight / weight_sum if weight_sum else 0.0
    for block in blocks:
        param, grad, z, v = block.load("param", "grad", "z", "exp_avg_sq")
        v.mul_(beta2).add_(grad.square().mul_(1 - beta2))
        update = grad.div_(square_root(divide(v.clone(), 1 - power(beta2, step))).add_(eps)).add_(param * weight_decay)
        param.lerp_(z, share).sub_(update * (rate * (1 - beta1 * (1 - share))))
        yield {"param": param, "z": z.sub_(update.mul_(rate)), "exp_avg_sq": v}
