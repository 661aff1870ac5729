"""What a whole file gives back for a weight, computed apart from ckpt8."""

from __future__ import annotations

import numpy as np
import torch

import ckpt8
from ckpt8.container.plain_reader import offset

_MANTISSAS = (0x800000, 0x9837F0, 0xB504F3, 0xD744FD)


def on_lattice(weight, codec):
    """``weight`` after a whole file of this step and salt."""
    x = weight.detach().float().flatten().numpy()
    step = np.float32(_MANTISSAS[codec["k"] % 4] * 2.0 ** (codec["k"] // 4 - 23))
    moved = offset(0, len(x), codec["salt"])
    q = np.floor(x / step + (np.float32(0.5) - moved))
    return torch.from_numpy(np.where(x == 0, np.float32(0), (q + moved) * step)).view(weight.shape)


def record(container):
    """What a container says of its base, None in a key."""
    with ckpt8.open(container) as file:
        return file.manifest.base


def check_weights(container, weights):
    """The tensors ``weights``, by the end of their names, come back as from a whole file on the same lattice."""
    with ckpt8.open(container) as file:
        storages = file.manifest.storages
        found = {tensor.name: (tensor, storages[tensor.storage].codec) for tensor in file.manifest.tensors}
        seen = 0
        for end, weight in weights.items():
            names = [name for name in found if name.endswith(end) and tuple(found[name][0].shape) == weight.shape]
            for name in names[:1]:
                codec = found[name][1]
                if codec["id"] == "lattice/1":
                    seen += 1
                    assert torch.equal(file.get_tensor(name), on_lattice(weight, codec)), name
        assert seen
