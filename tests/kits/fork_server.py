"""A process with everything imported that forks a child for every job on its standard input, and kills it in time.

    {"argv": [...]}                       the command line
    {"save": SOURCE, "target", "preset"}  a save in the background of what SOURCE holds, waited for

With "delay" the child gets "signal", by default SIGKILL, after so many seconds; with "size" files may not grow beyond
so many bytes; with "die" it kills itself, see ``chain_faults_kit``. It leaves as every interpreter does, but does not
tear down what it has imported. The answer is the exit code, negative for a signal, and the seconds it took. "stderr"
names a file for what the child says, "tmp" the folder of its temporary files.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import resource
import signal
import sys
import tempfile
import threading
import time
import traceback

import torch
from rich.console import Console  # noqa: F401

import ckpt8
import ckpt8.__main__ as entry
import ckpt8.chaining.chain
import ckpt8.checkpoint.sources.live_object
import ckpt8.cli.app
import ckpt8.cli.jobs
import ckpt8.cli.show.inspect
import ckpt8.compressing.chunk_encoder
import ckpt8.core.files.atomic
import ckpt8.inspecting.container
import ckpt8.inspecting.verify
import ckpt8.restoring.restore

INTERRUPTS = {signal.SIGINT, signal.SIGTERM}
loaded: dict[str, object] = {}


def watch(child: int, delay: float | None, number: int) -> tuple[int, float]:
    started = time.perf_counter()
    if delay is not None:
        time.sleep(delay)
        os.kill(child, number)  # not waited for yet: the number is still its own
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), time.perf_counter() - started


def serve() -> dict | None:
    """In the parent None at the end of the input; in a child its job."""
    gc.freeze()
    while line := sys.stdin.readline():
        job = json.loads(line)
        if "save" in job and job["save"] not in loaded:
            loaded[job["save"]] = torch.load(job["save"], weights_only=False)
        # Held back until the child is where an interrupt finds it as it would in a process of its own.
        signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPTS)
        child = os.fork()
        if not child:
            return job
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
        print(json.dumps(watch(child, job.get("delay"), job.get("signal", signal.SIGKILL))), flush=True)
    return None


def run(job: dict) -> None:
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(os.open(job["stderr"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.environ["TMPDIR"] = tempfile.tempdir = job["tmp"]  # not tried out: a kill then would leave tempfile's own file
    if "die" in job:
        from chain_faults_kit import die

        die(job["die"])
    if "size" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["size"], job["size"]))
    for number in INTERRUPTS:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    sys.argv = ["ckpt8", *job.get("argv", [])]
    (save if "save" in job else command)(job)


def save(job: dict) -> None:
    pending = ckpt8.save(loaded[job["save"]], job["target"], preset=job["preset"], background=True)
    while not pending.done():
        time.sleep(0.001)
    pending.result()


def command(_: dict) -> None:
    # Here in place of the first line of ``main``: an import that takes no time.
    with contextlib.suppress(KeyboardInterrupt):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPTS)
        entry.main()
        return
    sys.exit(128 + signal.SIGINT)


def leave(job: dict) -> int:
    """Run a job; its exit code, once threads and exit handlers are done."""
    code = 0
    try:
        run(job)
    except SystemExit as exc:
        code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    return code


mine = serve()
if mine is not None:
    os._exit(leave(mine))
