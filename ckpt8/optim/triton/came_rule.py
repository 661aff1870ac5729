"""What the matrix and the vector kernels of CAME share: the places of the scalars, and the moved momentum."""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt8.optim.triton.blocks import scalar

FACTOR, EPS, KEEP, RATE, RESIDUAL_EPS, DECAY, STEP_SIZE, CLIP = map(tl.constexpr, range(8))

SECOND_KEEP, SECOND_RATE = tl.constexpr(8), tl.constexpr(9)


@triton.jit
def moved(u, m, scalars, row):
    """The clipped direction and the new momentum."""
    u = tl.div_rn(u, tl.broadcast_to(scalar(scalars, row, CLIP), u.shape))
    return u, m * scalar(scalars, row, KEEP) + u * scalar(scalars, row, RATE)
