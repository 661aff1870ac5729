"""``Moment``, one tensor of optimizer state, and ``PackedTensor``, all that a step reads and writes of a parameter.

Master weights: the fp32 weights that an optimizer updates, stored as a parameter and what it lacks.

    fp32 parameter    the parameter itself
    bf16              ``residual`` int8 (split24/1, R = 127) or int16 (split32/1); the parameter is ``hi``
    fp16              ``master`` fp32; the parameter is its fp16 rounding

The arithmetic is that of split24/1 and split32/1, on the bits of the parameter instead of byte planes. A training step
refuses no value: NaN stays NaN, and a weight that overflows bf16 becomes Inf there. If somebody overwrites a bf16
parameter, its old residual stays, an error under one bf16 step; an fp16 parameter is restored from its master.

Stochastic rounding of second moments and 24-bit weights, which every step encodes again.

Rounding to nearest loses every change below half a code: v no longer decays, and weights stand still. So the choice
between two neighbouring codes is random, from a hash of (seed, parameter, step, element): integer arithmetic, the same
on every device, for every tile size, and after resuming.

Second moment, x = sqrt(v), code t = Q*(x/s)^p between c and c+1, A = probability that keeps the mean of x:

    s  = max x of the group, rounded UP to 8 exponent and 8 mantissa bits: so that no code is clamped
    A  = t - c                  (p = 1)       (t-c)(t+c) / (2c+1)            (p = 1/2)
    up = A * ((c+1)/t)^(1/p)    below 1/16 of s: keeps the mean of 1/x, so of the update
    up = A * (v(t) + ..)        above: keeps the mean of v: (t+c)/(2c+1), or (t^2+c^2)/((c+1)^2+c^2)
    v > 0 keeps a code of at least 1.

Measured, mean of v over 2048 elements (normal times log-normal) against b2^t, with zero gradients, after T = 1/(1-b2)
and 3T steps, p = 1/2, Q = 255; "nearest" is the encoder of companded8/1 with its scale rounded to nearest:

    b2       nearest        this            x, nearest scale   x, scale up     1/x everywhere
    .95      1.00  1.00     0.997  0.993    0.986  0.972       0.995  0.989    0.995  0.991
    .99      1.05  1.18     1.001  1.001    0.953  0.870       0.996  0.976    0.999  0.984
    .999     2.72  20.1     1.007  0.987    0.995  0.990       1.013  1.057    1.030  1.094
    .9999    2.72  20.1     1.007  1.011    1.002  0.974       1.011  1.024    1.025  1.058

Measured, 2000 steps of independent gradients whose scale spreads log-normally (sigma) inside the groups, b2 = .999:
error of the update against fp32 (NMSE, largest difference), and the 0.1 % quantile of v / v(fp32):

                            sigma 1                  sigma 2
    nearest, p = 1          1.4e-2  0.61  0.29       1.6e-1  1.39  0.22
    this, p = 1             2.7e-2  1.68  0.24       2.1e-1  1.74  0.22
    nearest, p = 1/2        5.3e-3  0.24  0.71       2.6e-2  0.96  0.29     (v too large by 17 %, and frozen)
    this, p = 1/2           1.2e-2  0.38  0.44       5.9e-2  1.33  0.17
    mean of v kept, p = 1/2 1.4e-2  0.57  0.38       2.5e-1  6.58  0.02

A low-discrepancy sequence over the steps in place of independent bits was worse: it locks in, v 2.0 times too large
after 3T at .999, and the same NMSE 7.0e-2 and 1.5e-1 where this has 1.1e-2 and 5.5e-2.

So p = 1/2 is the default for training: it is better here than the linear codes of the ``flash`` preset, even with
those rounded to nearest. A state that came with linear codes keeps them. First moments are rounded to nearest: for
beta1 <= .99 they decay as they should (0.978 after 3T at .99), and stochastic codes had twice the error energy.

24-bit weights (split24): rho = floor((R*d + noise) / 2^15), noise from 127 to 32640. A weight that does not change
keeps its code; a change under half a step of fp32 is lost, as in fp32. Rounding to nearest would lose all of a weight
decay of 1e-6 a step.

How a rule sees a tensor: as blocks of fp32 values, with sums that do not depend on where the blocks end.

A rule is a pure function ``rule(blocks, whole, *, step, lr, ...)``. It reads fp32 values from the blocks of one
parameter, as often as it likes, and yields the new values of every block in order; then it yields the new state of the
whole tensor, if it has any (``whole``). The caller stores each result before it asks for the next. A rule that needs a
sum over the tensor (StableAdamW, CAME) computes it in a pass of its own over the blocks. So nobody makes a full-size
fp32 copy of anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import cast

from ckpt8.codecs import Codec
from ckpt8.codecs.base import TILE
from ckpt8.codecs.companded8 import GROUP, QUIET_NAN, Companded8
from ckpt8.codecs.companded8 import reference as companding
from ckpt8.codecs.companded8.reference import SMALLEST_ROOT2, as_groups, scale_value, square_root
from ckpt8.core.errors import UsageError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts, dtype_of

_MASK64 = (1 << 64) - 1
GOLDEN64 = 0x9E3779B97F4A7C15
GOLDEN32 = 0x9E3779B1
MIX64 = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
MIX32 = (0x7FEB352D, 0x846CA68B)
"""Multipliers of published bit mixers: Weyl's golden ratio, splitmix64's finaliser, Wellons's lowbias32."""

NARROW = 16
"""Below 1/16 of the scale, where v is under 1/256 of the group's largest, rounding keeps the mean of 1/x."""

WEIGHT_MARGIN = 127
"""The least noise: the largest R times the distance of a decoded weight from its exact level, in fp32 steps.

That distance is at most 1/2, but 1 at rho = +-R."""


def stream_key(*counters: int) -> int:
    """A 64-bit key for a run of random bits, from (seed, parameter index, step)."""
    key = 0
    for counter in counters:
        key = ((key + GOLDEN64) ^ counter) & _MASK64
        key = ((key ^ (key >> 30)) * MIX64[0]) & _MASK64
        key = ((key ^ (key >> 27)) * MIX64[1]) & _MASK64
        key ^= key >> 31
    return key


def signed(value: int, bits: int = 32) -> int:
    """The signed integer with the low ``bits`` bits of ``value``."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int32."""
    return (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)


def random_bits(key: int, start: int, count: int, device: torch.device) -> torch.Tensor:
    """32 random bits (int32) for each of the elements ``start`` to ``start + count`` of a tensor."""
    x = torch.arange(count, dtype=torch.int32, device=device).add_(signed(start))
    for word in (key, (key >> 32) ^ (start >> 32)):
        x.bitwise_xor_(signed(word))
        x.bitwise_xor_(_shift(x, 16)).mul_(signed(MIX32[0]))
        x.bitwise_xor_(_shift(x, 15)).mul_(signed(MIX32[1]))
        x.bitwise_xor_(_shift(x, 16))
    return x


def weight_noise(bits: torch.Tensor) -> torch.Tensor:
    """int32 noise from 127 to 32640, from random bits; added to R*d before the shift by 15."""
    noise = _shift(bits * signed(GOLDEN32), 17)
    # 2^15 values onto 254/256 as many, their mean unchanged.
    return noise.sub_((noise >> 8).mul_(2)).add_(WEIGHT_MARGIN)


def encode_second_moment(v: torch.Tensor, out: Parts, levels: int, fourth_root: bool, bits: torch.Tensor) -> None:
    """Encode a flat fp32 tile of v >= 0 into ``codes`` uint8 and ``scales`` uint16 of companded8/1.

    ``bits`` are random int32, one per element. A NaN or Inf makes its group of 32 meaningless; none is refused.
    """
    root = as_groups(square_root(v))
    largest = root.amax(1)
    largest = torch.maximum(largest, largest.sign().mul_(SMALLEST_ROOT2))
    # torch.maximum makes NaN of all ones, the sign too, which would round to a scale of zero.
    magnitude = largest.view(torch.int32).bitwise_and_(0x7FFFFFFF).clamp_max_(QUIET_NAN)
    scale16 = magnitude.add_(0x7FFF).bitwise_right_shift_(15)
    divisor = scale_value(scale16)
    divisor[scale16 == 0] = 1.0
    n = root / divisor.unsqueeze(1)
    t = (square_root(n) if fourth_root else n).mul_(levels)
    low = t.floor().clamp_(1, levels)
    up = _chance_up(t, low, levels, fourth_root)
    codes = low.add_(as_groups(_shift(bits, 8).float()).mul_(2.0**-24) < up).clamp_(max=levels).mul_(root.sign_())
    # Through int32, since torch converts float to uint8 element by element.
    out["codes"].copy_(codes.to(torch.int32).view(-1)[: out["codes"].numel()])
    out["scales"].copy_(scale16)


def _chance_up(t: torch.Tensor, low: torch.Tensor, levels: int, fourth_root: bool) -> torch.Tensor:
    """The probability of the code above ``low``: A times the factor that keeps the mean of 1/x or of v."""
    high = low + 1
    narrow = low < levels / (NARROW**0.5 if fourth_root else NARROW)
    a, b, c = (high * high, t * t, low * low) if fourth_root else (high, t, low)
    chance = torch.where(narrow, a / b, (b + c) / (a + c)).mul_(t - low)
    return chance.mul_(t + low).div_(high + low) if fourth_root else chance


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` by squaring: multiplications alone, so that every device gives the same float."""
    result = 1.0
    while exponent > 0:
        result = result * base if exponent & 1 else result
        base *= base
        exponent >>= 1
    return result


def groups_of(numel: int) -> int:
    """Number of scales of a tensor."""
    return -(-numel // GROUP)


_MAGNITUDE = 0x7FFFFFFF
CHECKS = "weight_checks"
"""Key of a saved group: the ``weight_check`` of each parameter; None for one without residual or master."""

_MASK63 = (1 << 63) - 1
_CHECKED = 1 << 20


def master_part(dtype: torch.dtype, codec: Codec) -> tuple[str, torch.dtype] | None:
    """Key and element type of the state that completes a parameter; None for fp32. Raises UsageError."""
    if dtype == torch.float32:
        return None
    if dtype == torch.float16:
        return "master", torch.float32
    if dtype == torch.bfloat16:
        assert codec.residual is not None  # noqa: S101 - as check_group has found
        return "residual", codec.residual[1].torch
    raise UsageError(f"parameters of {dtype_of(dtype).label} cannot be trained; use float32, bfloat16 or float16")


def weight_check(param: torch.Tensor, first: int = 0) -> int:
    """A checksum over the bits of a 16-bit parameter and their places; it tells to which parameter a residual belongs.

    The checksum of a parameter in pieces is the sum over the pieces, modulo 2^63; ``first`` is the place of a piece.
    """
    bits = param.detach().reshape(-1).view(torch.int16)
    total = 0
    for start in range(0, len(bits), _CHECKED):
        piece = bits[start : start + _CHECKED].to(torch.int64)
        places = torch.arange(first + start, first + start + len(piece), device=bits.device)
        total += int(piece.mul_(places.mul_(GOLDEN32).bitwise_or_(1)).sum())
    return total & _MASK63


def read_master(param: torch.Tensor, part: torch.Tensor | None, codec: Codec) -> torch.Tensor:
    """A new tensor of the fp32 weights of a flat tile."""
    if part is None or part.dtype == torch.float32:
        return (param if part is None else part).clone()
    bits = param.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
    if codec.codes is not None:
        part = part.float().mul_(32768).div_(codec.codes.highest).round_().clamp_(-32767, 32767)
    # A parameter that somebody set to zero may keep a negative residual.
    mag = (bits & _MAGNITUDE).add_(part.to(torch.int32)).clamp_min_(0)
    return mag.bitwise_or_(bits.bitwise_and_(~_MAGNITUDE)).view(torch.float32)


def write_master(
    weight: torch.Tensor, param: torch.Tensor, part: torch.Tensor | None, codec: Codec, bits: torch.Tensor | None
) -> None:
    """Store a flat fp32 tile; ``bits`` are random int32 for split24, or None to round to nearest."""
    if part is None or part.dtype == torch.float32:
        for kept in (param,) if part is None else (part, param):
            kept.copy_(weight)
        return
    raw = weight.view(torch.int32)
    mag = (raw & _MAGNITUDE).clamp_max_(QUIET_NAN)
    if codec.codes is None:
        hi = (mag + 0x8000).bitwise_right_shift_(16)
        d = mag.sub_(hi << 16)
    else:
        hi = (mag >> 16).bitwise_and_(1).add_(mag).add_(0x7FFF).bitwise_right_shift_(16)
        d, levels = mag.sub_(hi << 16), codec.codes.highest
        noise = (d >> 31).add_(16384) if bits is None else weight_noise(bits)
        d = d.mul_(levels).add_(noise).bitwise_right_shift_(15).clamp_(-levels, levels)
    part.copy_(d)
    param.view(torch.int16).copy_(hi.bitwise_or_((raw >> 16).bitwise_and_(0x8000)))


Values = Mapping[str, "torch.Tensor"]
"""fp32 tensors by name: ``param``, ``grad`` and the tensors of the state."""

SUM_BLOCK = 4096
"""Elements summed at once, in float64. Tiles are multiples of it, and these sums are then added exactly."""


@dataclass(frozen=True, slots=True)
class Block:
    """A part of one parameter.

    ``load(*names)`` returns new fp32 tensors, which the rule may overwrite. For rules that work row by row they have
    the shape (batches, rows, width), and ``batches`` and ``rows`` locate them in the whole tensor.
    """

    load: Callable[..., list[torch.Tensor]]
    batches: slice = field(default_factory=lambda: slice(None))
    rows: slice = field(default_factory=lambda: slice(None))


Blocks = Sequence[Block]
Updates = Iterator[Values]
"""What a rule yields: the new values of every block, in order, then those of the whole tensor."""

Load = Callable[[int, int, tuple[int, ...], tuple[str, ...]], "list[torch.Tensor]"]
"""Reads values: (first element, last element + 1, shape, names) -> new fp32 tensors."""


def flat_blocks(numel: int, load: Load, size: int = TILE) -> list[tuple[int, int, Block]]:
    """The blocks of a flat tensor: first element, last element + 1, block."""
    runs = [(start, min(start + size, numel)) for start in range(0, numel, size)]
    return [(a, b, Block(lambda *names, a=a, b=b: load(a, b, (b - a,), names))) for a, b in runs]


_ROW_BLOCK = 1 << 18
"""About how many elements a block of rows has."""


def inverse_root(x: torch.Tensor) -> torch.Tensor:
    """1 / sqrt(x)."""
    return square_root(x).reciprocal_()


class Factored:
    """Row and column averages of a tensor of the shape (batches, rows, width), which it collects block by block."""

    def __init__(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        batches, width = columns.numel() // columns.shape[-1], columns.shape[-1]
        self._shapes = rows.shape, columns.shape
        self.rows, self.columns = rows.reshape(batches, -1), columns.reshape(batches, width)
        self._row_means = torch.empty_like(self.rows)
        self._column_sums = torch.zeros_like(self.columns, dtype=torch.float64)

    def add(self, block: Block, x: torch.Tensor) -> None:
        """Add the values of one block."""
        wide = x.double()
        self._row_means[block.batches, block.rows] = wide.mean(-1).float()
        self._column_sums[block.batches] += wide.sum(-2)

    def averaged(self, beta: float) -> dict[str, torch.Tensor]:
        """Move the averages towards the means of the added values. Returns ``row`` and ``col`` in their own shapes."""
        column_means = self._column_sums.div_(self.rows.shape[-1]).float()
        self.rows = self.rows * beta + self._row_means * (1 - beta)
        self.columns = self.columns * beta + column_means * (1 - beta)
        self._row_factor = inverse_root(self.rows / self.rows.double().mean(-1, keepdim=True).float())
        self._column_factor = inverse_root(self.columns)
        return {"row": self.rows.reshape(self._shapes[0]), "col": self.columns.reshape(self._shapes[1])}

    def factor(self, block: Block) -> torch.Tensor:
        """approx(R, C) of one block."""
        rows = self._row_factor[block.batches, block.rows].unsqueeze(-1)
        return rows * self._column_factor[block.batches].unsqueeze(-2)


def root_mean(blocks: Sequence[Block], squares: Callable[[Block], torch.Tensor]) -> float:
    """The square root of the mean of ``squares(block)`` over all elements of a tensor."""
    sums, count = list[float](), 0
    for x in map(squares, blocks):
        count += x.numel()
        flat = x.reshape(-1).double()
        if short := -flat.numel() % SUM_BLOCK:
            flat = torch.nn.functional.pad(flat, (0, short))
        sums += flat.view(-1, SUM_BLOCK).sum(1).tolist()
    # fsum rounds once, whatever the order; it raises where Inf meets NaN.
    total = math.fsum(sums) if all(map(math.isfinite, sums)) else sum(sums)
    return math.sqrt(total / count)


def clipping(blocks: Sequence[Block], direction: Callable[[Block], torch.Tensor], threshold: float) -> float:
    """The divisor max(1, RMS(u)/d) of a direction u."""
    return max(1.0, root_mean(blocks, lambda block: direction(block).square_()) / threshold)


def row_blocks(shape: tuple[int, ...], load: Load) -> list[tuple[int, int, Block]]:
    """The blocks of a tensor of two dimensions or more: first element, last element + 1, block of rows.

    A block is a run of rows of one matrix, or of whole matrices where a matrix is small or of uneven size. It starts at
    a multiple of 32 elements.
    """
    height, width = shape[-2:]
    batches, size = math.prod(shape[:-2]), height * width
    blocks = []

    def add(start: int, view: tuple[int, int, int], batch: slice, rows: slice) -> None:
        stop = start + math.prod(view)
        blocks.append((start, stop, Block(lambda *names: load(start, stop, view, names), batch, rows)))

    by_rows = batches == 1 or (size > _ROW_BLOCK and size % GROUP == 0)
    # So many rows, or matrices, make a block of whole groups, of about ``_ROW_BLOCK`` elements.
    piece = width if by_rows else size
    unit = GROUP // math.gcd(GROUP, piece)
    step = max(unit, _ROW_BLOCK // piece // unit * unit)
    if by_rows:
        for batch, row in product(range(batches), range(0, height, step)):
            count = min(step, height - row)
            add(batch * size + row * width, (1, count, width), slice(batch, batch + 1), slice(row, row + count))
    else:
        for batch in range(0, batches, step):
            count = min(step, batches - batch)
            add(batch * size, (count, height, width), slice(batch, batch + count), slice(None))
    return blocks


StateLayout = dict[str, tuple["torch.dtype", tuple[int, ...]]]
"""Element type and shape of the tensors of a state, by key."""


@dataclass(frozen=True, slots=True)
class Moment:
    """Flat views of a stored moment: ``parts`` are ``codes`` and ``scales``, or fp32 ``values`` without a codec."""

    codec: Companded8 | None
    parts: Parts

    @classmethod
    def of(cls, name: str, codec: Codec, state: Mapping[str, torch.Tensor]) -> Moment:
        """The moment ``name`` of a parameter's state: codes of ``codec``, or fp32 where the state has that."""
        if name in state:
            return cls(None, {"values": state[name].view(-1)})
        keys = {"codes": f"{name}_codes", "scales": f"{name}_scales"}
        return cls(cast("Companded8", codec), {part: state[key].view(-1) for part, key in keys.items()})

    @property
    def levels(self) -> int:
        """The largest code; 0 for fp32."""
        return 0 if self.codec is None else self.codec.Q

    def _tile(self, start: int, stop: int) -> Parts:
        groups = slice(start // GROUP, groups_of(stop))
        return {name: part[groups if name == "scales" else slice(start, stop)] for name, part in self.parts.items()}

    def read(self, start: int, stop: int) -> torch.Tensor:
        """A new fp32 tensor of the elements ``start`` (a multiple of 32) to ``stop``."""
        parts = self._tile(start, stop)
        if self.codec is None:
            return parts["values"].clone()
        out = torch.empty(stop - start, dtype=torch.float32, device=parts["codes"].device)
        self.codec.kernel("decode", "torch")(parts, out)
        return out

    def write(self, start: int, stop: int, values: torch.Tensor, bits: torch.Tensor | None) -> None:
        """Store flat fp32 ``values``; random int32 ``bits`` round a second moment, None to nearest."""
        parts = self._tile(start, stop)
        if self.codec is None:
            parts["values"].copy_(values)
        elif self.codec.signed:
            companding.compand_signed(values, parts, self.codec.Q)
        elif bits is None:
            companding.encode_unsigned(values, parts, self.codec.Q, self.codec.p != 1)
        else:
            encode_second_moment(values, parts, self.codec.Q, self.codec.p != 1, bits)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """Flat views of a parameter, its gradient and its state, in the order of the parameter's logical shape.

    ``part``: the residual or fp32 master, or None. ``key``: the key of the random bits of this step. ``grad_factor``
    multiplies gradients.
    """

    param: torch.Tensor
    grad: torch.Tensor
    codec: Codec
    part: torch.Tensor | None
    moments: Mapping[str, Moment]
    key: int
    grad_factor: float = 1.0

    def load(self, start: int, stop: int, shape: tuple[int, ...], names: tuple[str, ...]) -> list[torch.Tensor]:
        """New fp32 tensors of ``shape``: elements ``start`` to ``stop`` of each name."""
        return [self._read(name, start, stop).view(shape) for name in names]

    def _read(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name == "param":
            return read_master(*self._weight(start, stop), self.codec)
        if name == "grad":
            grad = self.grad[start:stop].to(torch.float32, copy=True)
            return grad if self.grad_factor == 1.0 else grad.mul_(self.grad_factor)
        return self.moments[name].read(start, stop)

    def _weight(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        return self.param[start:stop], None if self.part is None else self.part[start:stop]

    def store(self, start: int, stop: int, values: Values) -> None:
        """Store new values of the elements ``start`` (a multiple of 32) to ``stop``, by name."""
        draws = self.part is not None and self.part.dtype == torch.int8
        draws |= any(moment.codec is not None and moment.codec.stores_roots for moment in self.moments.values())
        bits = random_bits(self.key, start, stop - start, self.param.device) if draws else None
        for name, value in values.items():
            if name == "param":
                write_master(value.reshape(-1), *self._weight(start, stop), self.codec, bits)
            else:
                self.moments[name].write(start, stop, value.reshape(-1), bits)
