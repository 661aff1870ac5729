"""Checkpoints of torch.distributed.checkpoint: a ``.metadata`` and the files that it describes.

Imports the other readers, container and core.
"""
