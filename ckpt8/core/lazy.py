"""torch, imported where it is first used: commands between files do most of their work without it.

>>> from ckpt8.core.lazy import torch
>>> torch.float32.itemsize
4

Annotations that name it are strings, since a module that imports this one has ``from __future__ import annotations``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch  # noqa: PLC0414 - other modules import it from here
else:

    class _Torch:
        """Stands for the module ``torch``."""

        def __getattr__(self, name: str) -> Any:
            import torch

            return getattr(torch, name)

    torch = _Torch()
