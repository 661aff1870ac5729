"""Optional parts for frameworks. Each module needs its framework, and nothing else of ckpt8 needs any of them.

transformers    ``Ckpt8Callback`` and ``restored_checkpoint`` for Trainer
lightning       ``Ckpt8CheckpointIO`` for Lightning's Trainer and Fabric
dcp             ``Ckpt8StorageWriter`` and ``Ckpt8StorageReader`` for torch.distributed.checkpoint
"""

from __future__ import annotations


def missing(module: str, package: str) -> ImportError:
    """What importing ``module`` raises where ``package`` is not installed."""
    return ImportError(f"{module} needs {package}: pip install {package}")
