"""Weights on a dithered lattice in plain torch; every operation is rounded to fp32 once.

t        = dither(index, salt)                          see ``codecs.symbols``
q        = floor(w / step + t)                          refused unless |q| < 2^18
decode   : w' = (q + (1/2 - t)) * step                  rounded to bf16 last, if w is bf16; the reserved symbol: +0
"""

from __future__ import annotations

import torch

from ckpt8.codecs.lattice import step_of
from ckpt8.codecs.symbols import RESERVED, dither, from_zigzag, zigzag
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts

CODES = 1 << 18
"""The smallest |q| that is refused."""

REFUSAL = "holds NaN, Inf or a weight of 2^18 steps or more"


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


def phases(x: torch.Tensor, *, k: int, salt: int, first: int) -> torch.Tensor:
    """Where the weights of a tile that are not zero lie between the points of the lattice, from 0 to 1.

    Those of a run that knows nothing of the lattice are uniform; those that it has decoded to lie at 1/2.
    """
    w = x.float()
    place = (w / step_of(k)).add_(dither(first, w.numel(), salt, w.device))
    return place.sub_(place.floor())[w != 0]
