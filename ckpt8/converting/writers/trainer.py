"""A checkpoint directory as Trainer of transformers writes it: weights, optimizer, and other files as they are."""

from __future__ import annotations

from collections.abc import Callable

from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.manifest import DIRECTORY, SYMLINK
from ckpt8.converting.choice import Content
from ckpt8.converting.request import Report, Request, new_file
from ckpt8.converting.weights import WeightTypes, choose_run, model_weights
from ckpt8.converting.writers.safetensors import total_bytes, write_safetensors
from ckpt8.converting.writers.torch_zip import build_hollow, write_zip
from ckpt8.core.files.atomic import AtomicDirectory

WEIGHTS = "model.safetensors"
_OPTIMIZER = "optimizer.pt"
_STATE = "trainer_state.json"
_BLOCK_BYTES = 8 << 20


def write(request: Request, report: Report) -> None:
    """Write the directory. Raises Ckpt8Error.

    Weights keep their element type unless ``--dtype`` says otherwise; a packed optimizer of ckpt8 is unpacked.
    """
    with request.open(report) as content:
        data = content.data
        model, optimizer = choose_run(data, request.key, "; convert to safetensors for the weights alone")
        weights = model_weights(data, model, WeightTypes(data, request.dtype, report), report)
        state = build_hollow(data, optimizer.node, report)
        with request.new_directory(data, report, [other.path for other in content.others]) as output:
            progress = request.progress_to(total_bytes(weights) + state.nbytes)
            with new_file(output, WEIGHTS, progress) as out:
                write_safetensors(data, weights, out)
            with new_file(output, _OPTIMIZER, progress) as out:
                write_zip(state, out, _OPTIMIZER)
            left = copy_others(content, output, _is_wanted)
            if not (output.path / _STATE).is_file():
                report.notes.append(f"the source has no {_STATE}, without which Trainer does not resume")
    report.dropped += [f"{path}: not copied" for path in left]
    report.tensors += len(weights)


def _is_wanted(member: DirectoryMember) -> bool:
    return member.checkpoint.format not in (SYMLINK, DIRECTORY) and member.path not in (WEIGHTS, _OPTIMIZER)


def copy_others(content: Content, output: AtomicDirectory, is_wanted: Callable[[DirectoryMember], bool]) -> list[str]:
    """Copy those of the other files of the source that are wanted. Returns the paths that are left.

    Raises InputError, OutputError.
    """
    left = []
    for member in content.others:
        if is_wanted(member):
            _copy_member(member, output)
        else:
            left.append(member.path)
    return left


def _copy_member(member: DirectoryMember, output: AtomicDirectory) -> None:
    """Copy a file of the source, byte for byte. Raises InputError, OutputError."""
    size = member.checkpoint.size
    with new_file(output, member.path) as out:
        for start in range(0, size, _BLOCK_BYTES):
            content = bytes_of(host_bytes(min(_BLOCK_BYTES, size - start)))
            member.checkpoint.read_into(start, content)
            out.write(content, start)
    member.checkpoint.check_unchanged()
