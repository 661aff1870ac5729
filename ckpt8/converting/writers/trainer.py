"""A checkpoint directory as Trainer of transformers writes it: weights, optimizer, and other files as they are."""

from __future__ import annotations

import os
from typing import ClassVar

from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.replacing import checkpoint_directory
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.manifest import DIRECTORY, SYMLINK
from ckpt8.converting.choice import choose_model, choose_optimizer
from ckpt8.converting.request import Report, Request
from ckpt8.converting.sources import Content
from ckpt8.converting.unpacked import unpack_tree
from ckpt8.converting.weights import WeightTypes, model_weights
from ckpt8.converting.writers.safetensors import total_bytes, write_safetensors
from ckpt8.converting.writers.torch_zip import TorchFile
from ckpt8.core.errors import UsageError
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.files.write_at import write_at

_WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer.pt"
_STATE = "trainer_state.json"
_BLOCK_BYTES = 8 << 20


class TrainerWriter:
    """Weights keep their element type unless ``--dtype`` says otherwise; packed optimizers of ckpt8 are unpacked."""

    id: ClassVar[str] = "trainer"
    directory: ClassVar[bool] = True

    def write(self, request: Request) -> Report:
        """Write the directory. Raises Ckpt8Error."""
        report = Report(str(request.target), self.id)
        with request.open(report) as content:
            data = content.data
            optimizer = choose_optimizer(data)
            if optimizer is None:
                raise UsageError(f"{data.label}: holds no optimizer; convert to safetensors for the weights alone")
            unpack_tree(data)
            model = choose_model(data, request.key)
            weights = model_weights(data, model, WeightTypes(data, request.dtype, report), report)
            state = TorchFile(data, optimizer.node, report)
            check = checkpoint_directory([each.path for each in content.others])
            with AtomicDirectory(request.target, force=request.force, keep=request.source, check=check) as output:
                progress = request.progress_to(total_bytes(weights) + state.nbytes)
                with output.new_file(_WEIGHTS) as descriptor:
                    write_safetensors(data, weights, descriptor, output.guard, progress)
                with output.new_file(_OPTIMIZER) as descriptor:
                    state.write(output.path / _OPTIMIZER, _OPTIMIZER, descriptor, output.guard, progress)
                _copy_others(content, output, report)
                data.check_unchanged()
                report.bytes = sum(path.stat().st_size for path in output.path.rglob("*") if path.is_file())
                output.publish()
                report.replaced = output.replaced
            report.tensors += len(weights)
        return report


def _copy_others(content: Content, output: AtomicDirectory, report: Report) -> None:
    """The other files of the source, byte for byte."""
    copied = set()
    for member in content.others:
        if member.checkpoint.format in (SYMLINK, DIRECTORY) or member.path in (_WEIGHTS, _OPTIMIZER):
            report.dropped.append(f"{member.path}: not copied")
            continue
        with output.new_file(member.path) as descriptor:
            copy_member(member, descriptor, output)
        copied.add(member.path)
    if _STATE not in copied:
        report.notes.append(f"the source has no {_STATE}, without which Trainer does not resume")


def copy_member(member: DirectoryMember, descriptor: int, output: AtomicDirectory) -> None:
    """Copy a file of the source, byte for byte. Raises InputError, OutputError."""
    size = member.checkpoint.size
    for start in range(0, size, _BLOCK_BYTES):
        content = host_bytes(min(_BLOCK_BYTES, size - start))
        member.checkpoint.read_into(start, bytes_of(content))
        with output.guard():
            write_at(descriptor, bytes_of(content), start)
    with output.guard():
        os.ftruncate(descriptor, size)
    member.checkpoint.check_unchanged()
