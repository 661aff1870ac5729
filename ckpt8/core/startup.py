"""Set-up of a process that works on tensors."""

from __future__ import annotations

import atexit
import gc

import torch

from ckpt8.core.backend import SMALLEST_FOR_NUMBA, resolve


def settle(*, kernels: bool = False) -> None:
    """Hide all objects made so far from the garbage collector, which takes a tenth of a second to look through them.

    For our own processes only: none of these objects is freed before the exit. ``kernels`` also starts numba, which
    otherwise starts with the first chunk of a large checkpoint.
    """
    if kernels and resolve(None, torch.device("cpu"), SMALLEST_FOR_NUMBA) == "numba":
        from ckpt8.core.numba_kernels import start

        start()
    gc.freeze()
    # Some libraries count their remaining objects at exit.
    atexit.register(gc.unfreeze)
