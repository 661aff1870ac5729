"""Small runs whose weights are found by evidence."""

from __future__ import annotations

import torch


def trained(*modules, kind=torch.optim.AdamW, **options):
    """The state of the optimizer of some modules, which take rows of 80 numbers, after a step."""
    optimizer = kind([p for each in modules for p in each.parameters()], **{"lr": 1e-3, **options})
    loss = sum((each(torch.randn(8, 80)).square().mean() for each in modules), torch.zeros(()))
    loss.backward()
    optimizer.step()
    return optimizer.state_dict()


def tree_of(module):
    """The weights as a tree of dicts."""
    tree = {}
    for name, tensor in module.state_dict().items():
        *owners, last = name.split(".")
        node = tree
        for owner in owners:
            node = node.setdefault(f"layer{owner}", {})
        node[last] = tensor
    return tree
