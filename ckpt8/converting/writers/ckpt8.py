"""A ``.ckpt8``: what ``compress`` makes of the source as it is."""

from __future__ import annotations

from typing import ClassVar

from ckpt8.compressing.compress import compress
from ckpt8.converting.request import Report, Request
from ckpt8.core.errors import UsageError


class ContainerWriter:
    """Compresses with the default preset; ``compress`` has the settings."""

    id: ClassVar[str] = "ckpt8"
    directory: ClassVar[bool] = False

    def write(self, request: Request) -> Report:
        """Compress the source. Raises Ckpt8Error."""
        given = {"--dtype": request.dtype, "--key": request.key, "--member": request.member}
        unused = [option for option, value in given.items() if value is not None]
        if unused:
            raise UsageError(f"{unused[0]}: a .ckpt8 holds its source as it is; convert to another format first")
        manifest = compress(
            request.source, request.target, threads=request.threads, force=request.force, progress=request.progress
        )
        layout = "file" if manifest.directory is None else "directory"
        size = request.target.stat().st_size
        return Report(str(request.target), self.id, layout, len(manifest.tensors), size)
