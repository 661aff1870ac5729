"""Opens any source in one form: a bundle to read from, and a manifest that describes it.

A ``.ckpt8`` opens as the members that it was made from, with the values that it gives back. The manifest of a raw
checkpoint is the one that its container would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt8 import __version__
from ckpt8.checkpoint.readers.dcp.dcp import DcpMember
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.compressing.manifest_records import Results, UnitResult, fill_manifest
from ckpt8.compressing.plan import Plan
from ckpt8.compressing.unit_errors import UnitErrors
from ckpt8.container import frames, layout
from ckpt8.container.manifest import Manifest
from ckpt8.core.errors import InputError


@contextmanager
def open_any(path: Path, *, containers: bool = True) -> Iterator[Bundle]:
    """Open a checkpoint file, a directory or, if ``containers``, a ``.ckpt8`` of either.

    Raises InputError for damage, and for a directory that holds no tensors.
    """
    with open_source(path, containers=containers) as bundle:
        # A distributed checkpoint is one even where no tensor in it has elements.
        known = bundle.holds_tensors or any(isinstance(member, DcpMember) for member in bundle.found)
        if bundle.directory is not None and not known:
            raise InputError(f"{bundle.path}: a directory without tensors; give a checkpoint")
        yield bundle


def describe(source: Bundle, plan: Plan) -> Manifest:
    """The manifest that a container of ``source`` would have, without sizes of parts and without errors."""
    manifest = Manifest(f"ckpt8 {__version__}", "", [], layout.SLAB, frames.FRAME)
    results = Results()
    for unit in plan.units:
        results.add(UnitResult(unit, [{} for _ in unit.streams], UnitErrors(), []))
    fill_manifest(manifest, source, plan, results)
    return manifest
