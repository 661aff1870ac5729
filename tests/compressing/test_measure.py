"""The meter of a compression, where its threads meet."""

from __future__ import annotations

import torch

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, TensorRef
from ckpt8.compressing.measure import ErrorMeter
from ckpt8.compressing.parameters import Parameter
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType


def test_a_thread_gets_the_statistics_of_its_own_parameter(tmp_path):
    """The meter keeps CAME's statistics of one parameter, and another thread may replace them at once."""
    shapes = ((2,), (3,), (4,), (5,))
    values = [torch.rand(shape) for shape in shapes]
    path = tmp_path / "statistics"
    path.write_bytes(b"".join(x.numpy().tobytes() for x in values))
    places = [sum(x.nbytes for x in values[:k]) for k in range(4)]
    storages = [StorageInfo(str(k), DType.FLOAT32, places[k], values[k].nbytes) for k in range(4)]
    refs = [TensorRef.whole(str(k), DType.FLOAT32, shape) for k, shape in enumerate(shapes)]
    factors = list(zip(storages, refs, strict=True))
    mine, other = (
        Parameter(name, {}, UpdateRule("came"), None, shape, part)
        for name, shape, part in (("mine", (2, 3), factors[:2]), ("other", (4, 5), factors[2:]))
    )

    class Raced(ErrorMeter):
        """As if another thread ran after every assignment."""

        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "_last" and value is not None and value[0] is mine:
                super().__setattr__(name, (other, self._factors(other)))

    file = SourceFile(ByteRange.of(path))
    meter = Raced(OpenCheckpoint("file", file, storages))
    for _ in range(2):
        found = meter._factors(mine).confidence
        assert torch.equal(found.rows, values[0])
        assert torch.equal(found.columns, values[1])
    file.close()
