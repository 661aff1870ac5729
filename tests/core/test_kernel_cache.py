"""The cache of compiled kernels: what others could have put there is not run, and damage costs a compilation."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from program_kit import Forks, without_caches

import ckpt8

pytest.importorskip("numba", reason="numba is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="owners and modes of Linux")]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
STRANGER = 12345
STRANGE = f"it belongs to another user, {STRANGER}"
COUNTING = """
from ckpt8.core import numba as jit

made, compiled = [], jit.compiled
jit.compiled = lambda *given: made.append(given) or compiled(*given)
"""
"""Has ``made`` list the kernels that are compiled."""

START = COUNTING + "print(jit._reads(), len(made))"
MADE, KEPT, FORGED = "0 1", "0 0", "7 0"
"""What it prints where the kernel was compiled, where it was in the cache, and where another one was."""

FORGE = """
from ckpt8.core import numba as jit

def _reads():
    return 7

compiled, forged = jit.compiled, jit.Kernel(_reads)
jit.compiled = lambda _, args: compiled(forged, args)
jit._reads()
"""
"""Keeps another kernel in its place, with every checksum as it should be."""


def start(program, *arguments, **environment):
    """Begin a whole process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        env=without_caches() | {name: str(value) for name, value in environment.items()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """What it prints, and what it says beside that. It succeeds."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return out.strip(), err.strip()


def kept(folder):
    """All files below a folder."""
    return sorted(path for path in Path(folder).rglob("*") if not path.is_dir())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with Forks(tmp_path_factory.mktemp("said"), "torch", "numba") as forks:
        yield forks.run


@pytest.fixture(scope="module")
def forged_home(run, tmp_path_factory):
    """A home directory with a kernel that somebody else could have put there."""
    folder = tmp_path_factory.mktemp("forged") / "home"
    run(FORGE, HOME=folder)
    return folder


@pytest.fixture
def home(forged_home, tmp_path):
    """A copy of it that is not used yet."""
    return shutil.copytree(forged_home, tmp_path / "home")


@pytest.fixture(scope="module")
def filled_home(run, tmp_path_factory):
    """A home directory with a good kernel."""
    folder = tmp_path_factory.mktemp("filled") / "home"
    assert run(START, HOME=folder) == (MADE, "")
    assert run(START, HOME=folder) == (KEPT, "")
    return folder


@pytest.fixture
def good(filled_home, tmp_path):
    return shutil.copytree(filled_home, tmp_path / "home")


def cache(home):
    return home / ".cache" / "ckpt8" / "kernels"


def test_kernels_are_in_the_cache_of_the_user(run, tmp_path):
    home = tmp_path / "home"
    assert run(START, HOME=home) == (MADE, "")
    assert len(kept(cache(home))) == 1
    assert run(START, HOME=home, XDG_CACHE_HOME=tmp_path / "xdg") == (MADE, "")
    assert kept(tmp_path / "xdg" / "ckpt8")
    # A relative cache is none.
    assert run(START, HOME=home, XDG_CACHE_HOME="somewhere") == (KEPT, "")
    assert run(START, HOME=tmp_path / "other", NUMBA_CACHE_DIR=tmp_path / "own") == (MADE, "")
    assert kept(tmp_path / "own")
    assert not (tmp_path / "other").exists()


def test_who_only_asks_leaves_nothing(run, tmp_path):
    """A command that fails leaves no folders behind."""
    ask = "from ckpt8.core import numba as jit; print(jit.is_kept(writes=False))"
    assert run(ask, HOME=tmp_path) == ("False", "")
    assert not list(tmp_path.iterdir())


def test_a_kept_kernel_does_without_numba(run_program, good):
    """Its import takes half a second."""
    assert run_program(START + "\nimport sys; print('numba' in sys.modules)", HOME=good) == (f"{KEPT}\nFalse", "")


def test_a_forged_kernel_would_run(run, home):
    """In a cache that only this user could have written it does: the tests below can fail."""
    assert run(START, HOME=home) == (FORGED, "")


def linked(home):
    """The cache behind a link in a folder where everybody may put another link."""
    shared = home.parent / "shared"
    shared.mkdir()
    (home / ".cache" / "ckpt8").rename(home.parent / "private")
    (shared / "link").symlink_to(home.parent / "private")
    (home / ".cache" / "ckpt8").symlink_to(shared / "link")
    shared.chmod(0o777)


OPENED = {
    "by the group": lambda home: cache(home).chmod(0o770),
    "by everybody": lambda home: cache(home).chmod(0o757),
    "sticky": lambda home: cache(home).chmod(0o1777),
    "above": lambda home: (home / ".cache").chmod(0o777),
    "home": lambda home: home.chmod(0o775),
    "behind a link": linked,
}
GIVEN = {
    "folder": lambda home: os.chown(cache(home), STRANGER, -1),
    "above": lambda home: os.chown(home / ".cache", STRANGER, -1),
}


def assert_nothing_runs(run, home, why, **environment):
    before = {path: path.read_bytes() for path in kept(home)}
    result, err = run(START, **{"HOME": home, **environment})
    assert result == MADE
    assert err.count("KernelCacheWarning") == 1
    assert why in err
    assert {path: path.read_bytes() for path in kept(home)} == before


@pytest.mark.parametrize(
    ("open_up", "why"),
    [
        *(pytest.param(change, "other users can write to it", id=way) for way, change in OPENED.items()),
        *(pytest.param(change, STRANGE, id=f"{way} given", marks=as_root) for way, change in GIVEN.items()),
    ],
)
def test_a_folder_of_others_is_not_used(run, open_up, why, home):
    open_up(home)
    assert_nothing_runs(run, home, why)


@as_root
@pytest.mark.parametrize("name", ["NUMBA_CACHE_DIR", "XDG_CACHE_HOME"])
def test_a_folder_that_is_named_is_under_the_same_rule(name, run, home, tmp_path):
    named = tmp_path / "named"
    run(FORGE, **{"HOME": home, name: named})
    assert kept(named)
    assert run(START, **{"HOME": home, name: named}) == (FORGED, "")
    named.chmod(0o777)
    assert_nothing_runs(run, home, f"{named}: other users can write to it", **{name: named})


def test_a_file_that_others_can_write_is_replaced(run, home):
    (file,) = kept(home)
    file.chmod(0o666)
    result, err = run(START, HOME=home)
    assert result == MADE
    assert err.count("KernelCacheWarning") == 1
    assert f"{file}: other users can write to it" in err
    assert run(START, HOME=home) == (KEPT, "")


@as_root
def test_a_file_of_another_user_is_replaced(run, home):
    (file,) = kept(home)
    os.chown(file, STRANGER, -1)
    result, err = run(START, HOME=home)
    assert result == MADE
    assert f"{file}: it belongs to another user" in err
    assert run(START, HOME=home) == (KEPT, "")


def test_what_is_made_is_for_the_user_alone(run, tmp_path):
    run("import os; os.umask(0)\n" + START, HOME=tmp_path / "home")
    made = [tmp_path / "home", *(tmp_path / "home").rglob("*")]
    assert [stat.S_IMODE(path.stat().st_mode) for path in made] == [0o700] * 4 + [0o600]


def turned(content):
    """One bit in the machine code."""
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


def another_file(change):
    def put(file):
        other = file.parents[3] / "other"
        other.write_bytes(b"something")
        file.unlink()
        change(file, other)

    return put


DAMAGE = {
    "empty": lambda file: file.write_bytes(b""),
    "cut in the checksum": lambda file: os.truncate(file, 20),
    "cut": lambda file: os.truncate(file, file.stat().st_size // 2),
    "longer": lambda file: file.write_bytes(file.read_bytes() + b"\0"),
    "garbage": lambda file: file.write_bytes(os.urandom(5000)),
    "a bit": lambda file: file.write_bytes(turned(file.read_bytes())),
    "unreadable": lambda file: (file.write_bytes(b""), file.chmod(0)),
    "symbolic link": another_file(lambda file, other: file.symlink_to(other)),
    "link into nothing": another_file(lambda file, other: file.symlink_to("nothing")),
    "hard link": another_file(lambda file, other: file.hardlink_to(other)),
    "pipe": another_file(lambda file, other: os.mkfifo(file)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_mended(run, damage, good):
    (file,) = kept(good)
    DAMAGE[damage](file)
    assert run(START, HOME=good) == (MADE, "")
    assert run(START, HOME=good) == (KEPT, "")
    others = [path for path in kept(good) if path != file]
    assert [path.read_bytes() for path in others] in ([], [b"something"])


def test_a_folder_in_the_place_of_a_file_is_left_alone(run, good):
    (file,) = kept(good)
    file.unlink()
    (file / "full").mkdir(parents=True)
    result, err = run(START, HOME=good)
    assert (result, err.count("KernelCacheWarning")) == (MADE, 1)
    assert f"{file}: Is a directory" in err
    assert kept(good) == []


LIMIT = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
UNUSABLE = {
    "a full disk": (lambda home: None, LIMIT, "File too large"),
    "no home": (lambda home: home.write_bytes(b""), "", "Not a directory"),
    "links in a circle": (lambda home: home.symlink_to("home"), "", "Too many levels of symbolic links"),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_what_cannot_be_kept_costs_a_warning(run, case, tmp_path):
    prepare, limit, said = UNUSABLE[case]
    prepare(tmp_path / "home")
    result, err = run(limit + START, HOME=tmp_path / "home")
    assert (result, err.count("KernelCacheWarning")) == (MADE, 1)
    assert said in err


def moved(home, target):
    (home / ".cache" / "ckpt8").rename(home.parent / "elsewhere")
    (home / ".cache" / "ckpt8").symlink_to(target)


SAFE = {
    "a sticky folder above": lambda home: home.parent.chmod(0o1777),
    "an absolute link": lambda home: moved(home, home.parent / "elsewhere"),
    "a relative link": lambda home: moved(home, "../../elsewhere"),
}


@pytest.mark.parametrize("way", SAFE)
def test_what_nobody_else_can_change_is_fine(run, way, good):
    SAFE[way](good)
    assert run(START, HOME=good) == (KEPT, "")


def test_a_warning_that_is_an_error_stops_nothing(run, home):
    cache(home).chmod(0o777)
    assert run("import warnings; warnings.simplefilter('error')\n" + START, HOME=home) == (MADE, "")


def test_processes_at_once(run, tmp_path):
    home = tmp_path / "home"
    processes = [start(START, HOME=home) for _ in range(2)]
    assert {finish(process)[1] for process in processes} == {""}
    assert len(kept(home)) == 1
    assert run(START, HOME=home) == (KEPT, "")


ALLOCATING = (
    COUNTING
    + """
import numpy as np

@jit.kernel
def allocating(n):
    return np.ones(n).sum()

print(allocating(3), allocating(4), len(made))
"""
)


def test_what_only_numba_can_run_is_not_kept(run, tmp_path):
    """A numba that is made otherwise, and a kernel that allocates memory."""
    changed = "import llvmlite.binding; del llvmlite.binding.create_new_module_pass_manager\n"
    assert run(changed + START, HOME=tmp_path / "home") == (MADE, "")
    assert run(ALLOCATING, HOME=tmp_path / "home") == ("3.0 4.0 1", "")
    assert kept(tmp_path) == []


def test_a_kept_file_without_its_function_is_not_called(run, tmp_path):
    """numba runs the kernel in its place; a call of address 0 would end the process."""
    renamed = "made = jit.compiled\njit.compiled = lambda *given: made(*given)._replace(symbol='absent')\n"
    for program in ("from ckpt8.core import numba as jit\n" + renamed, "from ckpt8.core import numba as jit\n"):
        assert run(program + "print(jit._reads())", HOME=tmp_path / "home") == ("0", "")


def test_a_kernel_is_made_anew_when_what_it_is_made_of_changes(run, tmp_path):
    """numba's own cache compares the file of the kernel, not those of what it calls."""
    package = shutil.copytree(Path(ckpt8.__file__).parent, tmp_path / "source" / "ckpt8")
    called, caller = package / "called.py", package / "caller.py"
    called.write_text("from ckpt8.core.numba import kernel\n\nMORE = 1\n\n@kernel\ndef own(x):\n    return x + x\n")
    caller.write_text(
        "from ckpt8 import called\nfrom ckpt8.called import own\nfrom ckpt8.core.numba import kernel\n\n"
        "@kernel\ndef more(x):\n    return own(x) + called.MORE\n"
    )
    ask = "import sys; sys.path.insert(0, sys.argv[1])\n" + COUNTING
    ask += "from ckpt8.caller import more\nprint(more(5), len(made))"

    def answers():
        return [run(ask, package.parent, HOME=tmp_path / "home") for _ in range(2)]

    def change(file, *words):
        file.write_text(file.read_text().replace(*words))

    assert answers() == [("11 1", ""), ("11 0", "")]
    files = kept(tmp_path / "home")
    change(called, "x + x", "x * x")
    assert answers() == [("26 1", ""), ("26 0", "")]
    change(called, "MORE = 1", "MORE = 2")
    assert answers() == [("27 1", ""), ("27 0", "")]
    change(caller, "own(x) + ", "own(x) - ")
    assert answers() == [("23 1", ""), ("23 0", "")]
    change(called, "MORE = 2", "MORE = 1 + 1  # other words for it")
    assert answers() == [("23 0", ""), ("23 0", "")]
    # The newer code took the place of the older.
    assert kept(tmp_path / "home") == files


COMMAND = """
import sys
from ckpt8 import __main__
from ckpt8.core import backend
backend.LEAST_FOR_NUMBA = backend.SMALLEST_FOR_NUMBA = 0
__main__.main()
"""
"""The command, which leaves small checkpoints to kernels as well."""


def test_a_command_does_its_work_whatever_the_cache_is(run, tmp_path):
    source = tmp_path / "run.pt"
    torch.save({"model": {"w": torch.randn(80, 80, generator=torch.Generator().manual_seed(0))}}, source)
    ckpt8.compress(source, tmp_path / "expected.ckpt8", stats=False)

    def compress():
        target = tmp_path / "run.ckpt8"
        err = run(COMMAND, "compress", source, "-o", target, "--no-stats", "--force", HOME=tmp_path / "home")[1]
        assert target.read_bytes() == (tmp_path / "expected.ckpt8").read_bytes()
        return err

    assert compress() == ""
    files = kept(tmp_path / "home")
    assert any(file.name.startswith("split-") for file in files)
    for file in files:
        os.truncate(file, 40)
    assert compress() == ""
    cache(tmp_path / "home").chmod(0o777)
    err = compress()
    assert err.startswith("ckpt8: compiled kernels are not kept")
    assert len(err.splitlines()) == 1
