"""Compares the containers of ranks with the plain directory that the same checkpoint was saved to."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt8.checkpoint.readers.dcp.dcp import DcpMember
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.sharded import ShardedFiles, sharded_bundle
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.joined import JoinedReader
from ckpt8.converting.layouts import dcp
from ckpt8.core.text import box_text
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.measuring import Measured, measure_source
from ckpt8.inspecting.replay.figures import ReplayFigures, StepFigures
from ckpt8.inspecting.replay.replay import replay
from ckpt8.inspecting.replay.sources import ReplaySource
from ckpt8.inspecting.same_object import same_object
from ckpt8.inspecting.slice_originals import Originals

_DIFFERS = "differs from the original"


def measure_ranks(
    joined: JoinedReader, originals: Originals, workers: Workers, progress: Progress = lambda _: None
) -> Iterator[tuple[ContainerReader, Measured]]:
    """Each container with what is measured of it. Raises as ``measure``."""
    for reader, bundle in zip(joined.readers, originals.bundles, strict=True):
        yield reader, measure_source(reader, bundle, workers, progress)


def replay_ranks(joined: JoinedReader, originals: Originals, steps: int, workers: Workers) -> ReplayFigures:
    """Replay the parameters of all ranks, each put together from its slices."""
    figures = ReplayFigures([StepFigures() for _ in range(steps)])
    both = (originals.source, sharded_bundle(joined, workers))
    first, second = (ReplaySource(_assembled(bundle)).of_member("") for bundle in both)
    replay(first, second, figures, workers)
    return figures


def differing_values(joined: JoinedReader, originals: Originals, workers: Workers) -> Iterator[str]:
    """A line for every value that torch.save has written, and that is another one in the original."""
    files, home = ShardedFiles(joined, workers), originals.home
    for name, place in joined.index.objects.items():
        changed = files.value(name, place) != home.content(name)
        if changed and not same_object(files.open_value(name, place), home.open_value(name)):
            yield f"{name}: {_DIFFERS}"
    for name, tensor in joined.index.tensors.items():
        for box in tensor.boxes() if not tensor.is_whole else ():
            if (kept := tensor.pickled(box)) is not None:
                part = name + box_text(box.offsets, box.sizes, tensor.shape)
                original = home.part(name, (box.offsets, box.sizes))
                if original is None:
                    yield f"{part}: {_DIFFERS} in how it is cut or kept, so that it cannot be compared"
                elif not same_object(files.open_value(name, kept), original):
                    yield f"{part}: {_DIFFERS}"


def _assembled(source: Bundle) -> Bundle:
    members = [member for member in source.found if isinstance(member, DcpMember)]
    return Bundle.of(dcp.assemble(Bundle(source.path, members, source.directory)).data, source.label)
