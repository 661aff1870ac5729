"""What a process that works on tensors sets up once."""

from __future__ import annotations

import atexit
import gc

import torch

from ckpt8.core.backend import SMALLEST_FOR_NUMBA, resolve


def settle(*, kernels: bool = False) -> None:
    """Import torch, and take all that is there out of the sight of the garbage collector: none of it will be freed.

    For processes of our own. Looking through it takes a tenth of a second each time. ``kernels`` also starts numba,
    which a large checkpoint otherwise does with its first chunk.
    """
    if kernels and resolve(None, torch.device("cpu"), SMALLEST_FOR_NUMBA) == "numba":
        from ckpt8.core.numba_kernels import start

        start()
    gc.freeze()
    # At the end there are libraries that count what is left of their objects.
    atexit.register(gc.unfreeze)
