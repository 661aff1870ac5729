"""A ``.ckpt8``: what ``compress`` makes of the source, with the default preset."""

from __future__ import annotations

from ckpt8.compressing.compress import compress
from ckpt8.converting.request import Report, Request
from ckpt8.core.errors import UsageError


def write(request: Request, report: Report) -> None:
    """Compress the source. Raises Ckpt8Error."""
    for option in ("dtype", "key", "member"):
        if getattr(request, option) is not None:
            raise UsageError(f"--{option}: a .ckpt8 holds its source as it is; convert to another format first")
    manifest = compress(
        request.source, request.target, threads=request.threads, force=request.force, progress=request.progress
    )
    report.layout = "file" if manifest.directory is None else "directory"
    report.tensors = len(manifest.tensors)
    report.bytes = request.target.stat().st_size
