"""A directory of containers of ranks, which hold slices of tensors: its index, and what a manifest says of them.

``index`` is ``ckpt8-dcp.json``, ``layouts`` say which file holds which part of a tensor, ``slices`` are those that one
container states, ``collecting`` makes an index of what all ranks have written. No torch.distributed is needed.
"""

INDEX = "ckpt8-dcp.json"
"""The file that makes a directory a checkpoint."""
