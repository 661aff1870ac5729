"""Calls of the system that fail, one at a time."""

from __future__ import annotations

import errno
import io
import os

from ckpt8.core.files import atomic

CODES = [errno.ENOSPC, errno.EIO]
NEW = os.O_CREAT | os.O_EXCL


class Calls:
    """Counts calls, and fails the one whose turn it is."""

    def __init__(self, turn=0, code=errno.ENOSPC):
        self.turn, self.code, self.seen = turn, code, []

    def __call__(self, name):
        self.seen.append(name)
        if len(self.seen) == self.turn:
            raise OSError(self.code, os.strerror(self.code))

    def wrap(self, name, function):
        def called(*args, **kwargs):
            self(name)
            return function(*args, **kwargs)

        return called

    def writes(self, patch):
        """Take over everything that a writer asks of the system."""
        calls, opened = self, os.open
        for name in ("fsync", "pwrite", "pwritev", "write", "ftruncate", "mkdir", "symlink", "rename", "replace"):
            patch.setattr(os, name, self.wrap(name, getattr(os, name)))
        patch.setattr(atomic, "_renameat2", self.wrap("renameat2", atomic._renameat2))

        class Raw(io.FileIO):
            def write(self, data):
                calls("file write")
                return super().write(data)

            def truncate(self, size=None):
                calls("file truncate")
                return super().truncate(size)

        def fdopen(descriptor, mode, closefd):
            return io.BufferedRandom(Raw(descriptor, mode, closefd=closefd))

        def make(path, flags, *args, **kwargs):
            if flags & NEW == NEW:
                calls("open")
            return opened(path, flags, *args, **kwargs)

        patch.setattr(os, "fdopen", fdopen)
        patch.setattr(os, "open", make)
