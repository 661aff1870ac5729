"""Compares the containers of ranks with the plain directory that the same checkpoint was saved to."""

from __future__ import annotations

from collections.abc import Iterator

from ckpt8.checkpoint.readers.dcp.dcp import DcpMember
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.sharded import sharded_bundle
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.joined import JoinedReader
from ckpt8.converting.layouts import dcp
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.diff.values import Equality
from ckpt8.inspecting.measuring import Measured, measure_source
from ckpt8.inspecting.replay.figures import ReplayFigures, StepFigures
from ckpt8.inspecting.replay.replay import replay
from ckpt8.inspecting.replay.sources import ReplaySource
from ckpt8.inspecting.slice_originals import Originals


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
    """A line for every value, no tensor, that is another one in the original."""
    same = Equality()
    members = sharded_bundle(joined, workers).found
    packed = next((member.home for member in members if isinstance(member, DcpMember)), originals.home)
    for name in joined.index.objects:
        if packed.content(name) == originals.home.content(name):
            continue
        if not same(packed.open_value(name).tree, originals.home.open_value(name).tree):
            yield f"{name}: differs from the original"


def _assembled(source: Bundle) -> Bundle:
    members = [member for member in source.found if isinstance(member, DcpMember)]
    return Bundle.of(dcp.assemble(Bundle(source.path, members, source.directory)).data, source.label)
