"""Makes the file of ``inspect --html``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt8.container.reader import ContainerReader
from ckpt8.core.files.atomic import AtomicFile, refuse_source
from ckpt8.inspecting.distributions.checkpoint import checkpoint_distributions
from ckpt8.inspecting.distributions.container import container_distributions


class Report:
    """The report about the checkpoint or container ``path``, to write to ``target``.

    ``original`` is the checkpoint that a container was made from; ``drift`` is a file with the output of ``verify
    --resume-steps N --json``; ``full`` reads every element instead of a sample. Raises OutputError, before it reads
    anything, if ``target`` cannot be written, or exists without ``force``.
    """

    def __init__(
        self,
        target: Path,
        path: Path,
        *,
        original: Path | None = None,
        drift: Path | None = None,
        full: bool = False,
        force: bool = False,
    ) -> None:
        for source in (path, original, drift):
            if source is not None:
                refuse_source(target, source)
        AtomicFile(target, force=force).close()
        self._target, self._path, self._original, self._drift = target, path, original, drift
        self._full, self._force = full, force
        self._distributions: dict[str, Any] | None = None

    def visit(self, reader: ContainerReader) -> None:
        """Look into an open container. Raises InputError for damage."""
        self._distributions = container_distributions(reader, self._original, full=self._full)

    def write(self, facts: dict[str, Any]) -> None:
        """Write the report of what ``inspect`` found. Raises InputError, OutputError."""
        from ckpt8.cli.show.html.document import page
        from ckpt8.cli.show.html.drift import read_drift

        distributions = self._distributions
        if distributions is None:
            distributions = checkpoint_distributions(self._path, full=self._full)
        drift = None if self._drift is None else read_drift(self._drift, facts.get("stored_bytes"))
        content = page(facts, distributions, drift).encode()
        with AtomicFile(self._target, force=self._force) as output:
            with output.guard():
                output.file.write(content)
            output.publish()
