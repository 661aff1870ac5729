"""What the storage writer and the storage reader share: a directory, and an id for each save or load."""

from __future__ import annotations

import os
import uuid

from ckpt8.integrations import local_path

_ADVICE = "give a directory that every rank can reach"


class InDirectory:
    """A storage in the directory ``path``. Raises UsageError for a path that is not local."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = local_path(path, _ADVICE)
        self._run_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, in another directory if one is given."""
        self.path = self.path if checkpoint_id is None else local_path(checkpoint_id, _ADVICE)
        self._run_id = uuid.uuid4().hex
