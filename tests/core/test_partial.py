"""Temporaries are removed by their owner, whatever it may still open."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, resource, sys
from pathlib import Path
from ckpt8.core.files.atomic import Partial

partial = Partial(Path(sys.argv[1]) / "run", directory=True)
(partial.path / "inner" / "most").mkdir(parents=True)
for name in ("a", "inner/b", "inner/most/c"):
    (partial.path / name).write_bytes(b"content")
(partial.path / "link").symlink_to(sys.argv[1])
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
partial.close()
"""


def test_a_directory_goes_where_no_more_files_can_be_opened(tmp_path):
    """``shutil.rmtree`` alone needs three descriptors for each level, and leaves the directory."""
    (tmp_path / "kept").write_bytes(b"kept")
    subprocess.run([sys.executable, "-c", SCRIPT, str(tmp_path)], check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


TEMPORARY = """
import os, resource, sys
from pathlib import Path
from ckpt8.core.files.atomic import temporary_directory

with temporary_directory("t-", Path(sys.argv[1])) as path:
    (path / "inner").mkdir()
    (path / "inner" / "file").write_bytes(b"content")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
"""


def test_so_does_a_temporary_one(tmp_path):
    subprocess.run([sys.executable, "-c", TEMPORARY, str(tmp_path)], check=True)
    assert not list(tmp_path.iterdir())
