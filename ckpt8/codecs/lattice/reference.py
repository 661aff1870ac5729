"""A dithered lattice in plain torch; every operation is rounded to fp32 once.

Symbols and the dither are those of all codecs that write symbols.

t        = dither(index, salt)                          see ``dither``
q        = floor(w / step + t)                          refused unless |q| < 2^18
decode   : w' = (q + (1/2 - t)) * step                  rounded to bf16 last, if w is bf16; the reserved symbol: +0
"""

from __future__ import annotations

from ckpt8.codecs.lattice import CODES, MULTIPLIERS, REFUSAL, RESERVED, modulo, step_of
from ckpt8.core.errors import RefusedError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts


def zigzag(q: torch.Tensor) -> torch.Tensor:
    """Symbols of int32 integers, 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    return (q << 1).bitwise_xor_(q >> 31)


def from_zigzag(symbols: torch.Tensor) -> torch.Tensor:
    """The integers of int32 symbols; the reserved one gives some integer."""
    return (symbols & 1).neg_().bitwise_xor_(symbols >> 1)


def signed(word: int) -> int:
    """The int32 with the lowest 32 bits of ``word``."""
    return (modulo(word) ^ 0x80000000) - 0x80000000


def dither(first: int, count: int, salt: int, device: torch.device) -> torch.Tensor:
    """The dither t of ``count`` elements from index ``first`` on: multiples of 2^-24 from 0 to 1.

    It is a hash of the index and the salt, modulo 2^32:

        h = i * 0x9E3779B1 + salt;  h ^= h >> 15;  h *= 0x2C1B3C6D;  h ^= h >> 12;  h *= 0x297A2D39;  h ^= h >> 15
        t = (h >> 8) * 2^-24
    """
    spread, second, third = map(signed, MULTIPLIERS)
    # int32 wraps around; its shift copies the sign, which the masks take away.
    h = torch.arange(count, dtype=torch.int32, device=device).add_(signed(first))
    h.mul_(spread).add_(signed(salt))
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF)).mul_(second)
    h.bitwise_xor_((h >> 12).bitwise_and_(0xFFFFF)).mul_(third)
    h.bitwise_xor_((h >> 15).bitwise_and_(0x1FFFF))
    return h.bitwise_right_shift_(8).bitwise_and_(0xFFFFFF).float().mul_(2.0**-24)


def encode(x: torch.Tensor, out: Parts, *, k: int, salt: int, first: int) -> None:
    """Encode a flat tile (fp32 or bf16) into ``codes``; ``first`` is the index of its first element.

    Raises RefusedError on NaN, Inf and |q| from 2^18 on.
    """
    w = x.float()
    # By a Python number CUDA would multiply with a reciprocal, rounded itself.
    q = (w / w.new_full((), step_of(k))).add_(dither(first, w.numel(), salt, w.device)).floor_()
    if not bool((q.abs() < CODES).all()):
        raise RefusedError(REFUSAL)
    out["codes"].copy_(zigzag(q.to(torch.int32)).masked_fill_(w == 0, RESERVED))


def decode(parts: Parts, out: torch.Tensor, *, k: int, salt: int, first: int) -> None:
    """Decode a tile into ``out`` (fp32 or bf16)."""
    codes = parts["codes"]
    offset = dither(first, codes.numel(), salt, codes.device).neg_().add_(0.5)
    w = from_zigzag(codes).float().add_(offset).mul_(step_of(k))
    out.copy_(w.masked_fill_(codes == RESERVED, 0.0))
