"""Shared fixtures: the committed checkpoints, and torch imported once without its numpy warning.

Where CKPT8_REQUIRE_PACKAGES is 1, a test that is skipped because a package is missing fails instead, unless the package
is one of those that CKPT8_ABSENT_PACKAGES names and the test bears its name as a mark.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import shutil
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

MISSING = "is not installed", "could not import"

FIXTURES = Path(__file__).parents[1] / "fixtures"


def pytest_configure(config):
    """Forty examples of each test of hypothesis; 300 with ``-m hypothesis``."""
    gc.disable()  # until tests are collected, which makes little garbage
    full = re.search(r"(?<!not )hypothesis", config.option.markexpr)
    health = [hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow]
    hypothesis.settings.register_profile(
        "ckpt8",
        max_examples=300 if full else 40,
        deadline=None,
        derandomize=not full,
        database=None,
        suppress_health_check=health,
    )
    hypothesis.settings.load_profile("ckpt8")


def pytest_collectstart(collector):
    """Import torch where tests are collected, which is not where they are handed out to workers."""
    if not isinstance(collector, pytest.Session):
        return
    with warnings.catch_warnings():
        # torch warns once when numpy is missing, which it may be.
        warnings.simplefilter("ignore")
        import torch

        torch.zeros(1).sum().item()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Where parameters are multiplied, the default run takes as few cases as have every value; the others are slow.

    All of them run with ``-m "slow or not slow"``; the mark ``by_default`` chooses among the cases of a list.
    """
    tests = {}
    for item in items:
        if hasattr(item, "callspec") and not item.get_closest_marker("slow"):
            tests.setdefault((item.parent, item.originalname), []).append(item)
    for cases in tests.values():
        kept = _by_default(cases)
        for item in cases:
            if item not in kept:
                item.add_marker(pytest.mark.slow)


def _by_default(cases):
    mark = cases[0].get_closest_marker("by_default")
    if mark and mark.args:
        return [item for item in cases if item.callspec.id in mark.args]
    if mark:
        most = mark.kwargs["most"]
        return [cases[at * len(cases) // most] for at in range(most)] if len(cases) > most else cases
    values = [set(enumerate(item.callspec._idlist)) for item in cases]
    used, kept = Counter(), []
    while any(each - used.keys() for each in values):
        _, _, best = max(
            (len(each - used.keys()), -sum(map(used.__getitem__, each)), -at) for at, each in enumerate(values)
        )
        kept.append(cases[-best])
        used.update(values[-best])
    return kept


def pytest_collection_finish():
    """Ten thousand tests and the modules around them stay: no collection of garbage need look at them again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _one_thread():
    """Whatever a framework has set: more threads add up in another order, and wait for each other on small tensors."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _memory_goes_back():
    """What a module has freed: glibc keeps gigabytes of it, and every worker would end with those of its largest."""
    yield
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def inputs() -> Path:
    """The folder of real checkpoints."""
    return FIXTURES / "inputs"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory) -> Iterator[Path]:
    """A folder for what is large, which goes with the module that made it."""
    folder = tmp_path_factory.mktemp("scratch")
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def s3_server():
    """The bucket of this session, on a server in a process of its own."""
    pytest.importorskip("moto", reason="moto is not installed")
    from s3_kit import Bucket, running

    with running() as endpoint:
        bucket = Bucket(endpoint)
        yield bucket
        bucket.client.close()


@pytest.fixture
def bucket(s3_server, monkeypatch):
    """The bucket, with the environment in which ckpt8 finds it. Nothing waits between attempts."""
    from s3_kit import ENVIRONMENT

    from ckpt8.core.files.stores import attempts, s3

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_server.endpoint)
    monkeypatch.setattr(attempts.Attempts, "wait", lambda *_: None)
    yield s3_server
    s3_server.order()
    if s3._client.cache_info().currsize:
        s3._client().close()
        s3._client.cache_clear()


@pytest.fixture(scope="session")
def run_directory(tmp_path_factory):
    """A checkpoint directory that no test may change."""
    from members_kit import make_directory

    return make_directory(tmp_path_factory.mktemp("members") / "checkpoint-1.5")


@pytest.fixture(scope="session")
def containers(run_directory, tmp_path_factory):
    """The directory compressed with two presets."""
    import ckpt8

    folder = tmp_path_factory.mktemp("containers")
    found = {preset: folder / f"{preset}.ckpt8" for preset in ("flash", "lossless")}
    for preset, target in found.items():
        ckpt8.compress(run_directory, target, preset=preset)
    return found


@pytest.fixture(scope="session")
def run_program(tmp_path_factory):
    """Run a program in a process that has imported torch and nothing of ours: what it prints, and what it says."""
    from program_kit import Forks

    with Forks(tmp_path_factory.mktemp("programs"), "torch") as forks:
        yield forks.run


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Run a command in this process, on a terminal of so many columns: (exit code, stdout, stderr).

    ``shown`` is what one prints that succeeds in silence, ``said`` what one says that ends with this code, ``refused``
    that of one that prints nothing.
    """
    from ckpt8.cli import app as cli

    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments, columns=None):
        if columns is not None:
            monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setattr(sys, "argv", ["ckpt8", *map(str, arguments)])
        capsys.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as exit_:
            code = exit_.code or 0
        return code, *capsys.readouterr()

    def shown(*arguments):
        code, out, err = call(*arguments)
        assert (code, err) == (0, ""), arguments
        return out

    def said(code, *arguments):
        found, _, err = call(*arguments)
        assert found == code, (arguments, err)
        return err

    def refused(code, *arguments):
        found, out, err = call(*arguments)
        assert (found, out) == (code, ""), (arguments, err)
        return err

    call.shown, call.said, call.refused = shown, said, refused
    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """A module that skips itself."""
    return _required((yield), collector)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that skips itself, or a fixture of it."""
    return _required((yield), item)


def _required(report, node):
    if os.environ.get("CKPT8_REQUIRE_PACKAGES") == "1" and report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if any(text in reason for text in MISSING) and not _may_be_absent(reason, node):
            report.outcome = "failed"
            report.longrepr = f"{node.nodeid}: {reason}; CKPT8_REQUIRE_PACKAGES asks for it"
    return report


def _may_be_absent(reason, node):
    """Whoever runs the tests of this mark elsewhere, with the package, runs this test too."""
    packages = os.environ.get("CKPT8_ABSENT_PACKAGES", "").split()
    return any(reason == f"{each} is not installed" and node.get_closest_marker(each) for each in packages)
