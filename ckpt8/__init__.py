"""ckpt8 makes PyTorch training checkpoints small: split master weights, companded 8-bit moments, measured error.

    tree = ckpt8.load("run.ckpt8")            as torch.load(..., weights_only=True) of the original
    ckpt8.save(obj, "run.ckpt8")              as torch.save
    with ckpt8.open("run.ckpt8") as f: ...    lazy, tensor by tensor
    rest = ckpt8.resume("run.ckpt8", model=model, optimizer=optimizer)      streams into live objects
    ckpt8.optim.AdamW(params, lr=1e-3)        trains on the packed state itself
    ckpt8.nn.switchback(model)                trains in int8

Names are resolved when first used, so that importing the package does not import torch. Type checkers and editors read
the imports below instead; ``tests/core/test_public.py`` holds the two lists equal.
"""

import sys
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("ckpt8 does not run on Windows: it locks files and renames folders as only POSIX can; use WSL")
if TYPE_CHECKING:
    from ckpt8 import nn, optim
    from ckpt8.chaining.chain import chain
    from ckpt8.chaining.thin import thin
    from ckpt8.checkpoint.tree import Global, Inert
    from ckpt8.compressing.compress import compress, save
    from ckpt8.container.writer import rebase
    from ckpt8.converting.convert import convert
    from ckpt8.core.errors import (
        CheckFailedError,
        Ckpt8Error,
        InputError,
        KernelCacheWarning,
        OutputError,
        ResumeError,
        ResumeWarning,
        UnsupportedError,
        UsageError,
    )
    from ckpt8.inspecting.diff import diff
    from ckpt8.inspecting.inspection import inspect
    from ckpt8.inspecting.runs import runs
    from ckpt8.inspecting.verify import verify
    from ckpt8.restoring.load import load
    from ckpt8.restoring.opened import open  # noqa: A004 - as torch has load and save
    from ckpt8.restoring.restore import restore
    from ckpt8.restoring.resume.resume import resume
else:
    from ckpt8.core.public import lazy_names

_LOCATIONS = {
    "nn": "ckpt8.nn",
    "optim": "ckpt8.optim",
    "chain": "ckpt8.chaining.chain:chain",
    "compress": "ckpt8.compressing.compress:compress",
    "convert": "ckpt8.converting.convert:convert",
    "Global": "ckpt8.checkpoint.tree:Global",
    "Inert": "ckpt8.checkpoint.tree:Inert",
    "diff": "ckpt8.inspecting.diff:diff",
    "inspect": "ckpt8.inspecting.inspection:inspect",
    "save": "ckpt8.compressing.compress:save",
    "load": "ckpt8.restoring.load:load",
    "open": "ckpt8.restoring.opened:open",
    "restore": "ckpt8.restoring.restore:restore",
    "rebase": "ckpt8.container.writer:rebase",
    "resume": "ckpt8.restoring.resume.resume:resume",
    "runs": "ckpt8.inspecting.runs:runs",
    "thin": "ckpt8.chaining.thin:thin",
    "verify": "ckpt8.inspecting.verify:verify",
    "CheckFailedError": "ckpt8.core.errors:CheckFailedError",
    "Ckpt8Error": "ckpt8.core.errors:Ckpt8Error",
    "InputError": "ckpt8.core.errors:InputError",
    "KernelCacheWarning": "ckpt8.core.errors:KernelCacheWarning",
    "OutputError": "ckpt8.core.errors:OutputError",
    "ResumeError": "ckpt8.core.errors:ResumeError",
    "ResumeWarning": "ckpt8.core.errors:ResumeWarning",
    "UnsupportedError": "ckpt8.core.errors:UnsupportedError",
    "UsageError": "ckpt8.core.errors:UsageError",
}

__all__ = [
    "CheckFailedError",
    "Ckpt8Error",
    "Global",
    "Inert",
    "InputError",
    "KernelCacheWarning",
    "OutputError",
    "ResumeError",
    "ResumeWarning",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "chain",
    "compress",
    "convert",
    "diff",
    "inspect",
    "load",
    "nn",
    "open",
    "optim",
    "rebase",
    "restore",
    "resume",
    "runs",
    "save",
    "thin",
    "verify",
]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, lambda: _LOCATIONS)


def __dir__() -> list[str]:
    return sorted(__all__)


__version__ = "0.1.0"
