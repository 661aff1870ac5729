"""Memory of a session of processes, against what the processes were made to take."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ckpt8.cli.bench.probe import SessionPeak

pytestmark = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system has no PSS")

BEFORE, AFTER = 96 << 20, 48 << 20
PROGRAM = f"""
import os, sys
shared = bytearray(b"a") * {BEFORE}
ends = os.pipe()
if os.fork() == 0:
    own = bytearray(b"b") * {AFTER}
    os.write(ends[1], b"x")
    sys.stdin.read()
    os._exit(0)
os.read(ends[0], 1)
print("ready", flush=True)
sys.stdin.read()
os.wait()
"""


def test_shared_pages_count_once_and_the_peak_stays():
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        peak = SessionPeak(process.pid)
        assert process.stdout.readline() == b"ready\n"
        peak.sample()
        process.stdin.close()
        process.wait(30)
        peak.sample()
    assert peak.processes == 2
    assert BEFORE + AFTER < peak.nbytes < BEFORE + AFTER + BEFORE // 2
