"""Rebuild tensors from nothing but a reader's storages and references, to compare them with ``torch.load``."""

from __future__ import annotations

import pytest
import torch
from members_kit import named_tensors

from ckpt8.checkpoint.tree import TensorRef, format_path, iter_leaves


def _rebuild(checkpoint, ref):
    info = {storage.key: storage for storage in checkpoint.storages}[ref.key]
    data = bytearray(info.nbytes)
    checkpoint.read_into(info.offset, memoryview(data))
    if not data:
        return torch.empty(ref.shape, dtype=ref.dtype.torch)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(ref.dtype.torch)
    return flat.as_strided(ref.shape, ref.stride, ref.offset)


def _bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


@pytest.fixture
def compare():
    """Check that names, types, layouts and bytes agree with the objects that torch loads; return the names."""

    def check(checkpoint, expected):
        refs = {format_path(path): leaf for path, leaf in iter_leaves(checkpoint.tree)}
        wanted = dict(named_tensors(expected))
        assert list(refs) == list(wanted)
        for name, ref in refs.items():
            assert type(ref) is TensorRef
            tensor = _rebuild(checkpoint, ref)
            assert tensor.dtype == wanted[name].dtype
            assert (tensor.shape, ref.stride) == (wanted[name].shape, wanted[name].stride())
            assert ref.offset == wanted[name].storage_offset()
            assert torch.equal(_bits(tensor), _bits(wanted[name]))
        return list(refs)

    return check
