"""``save(background=True)``: a snapshot of the moment of the call, the same file as in the foreground."""

from __future__ import annotations

import array
import errno
import gc
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from typing import ClassVar

import pytest
import torch

import ckpt8
from ckpt8.checkpoint.sources import snapshot as snapshots
from ckpt8.compressing import background, compress
from ckpt8.compressing.chunk_encoder import store
from ckpt8.compressing.compressor import Unwritten
from ckpt8.container import writer as writers
from ckpt8.container.manifest_json import manifest_json
from ckpt8.core.errors import OutputError, UsageError
from ckpt8.core.files import atomic

PRESETS = ("flash", "compact", "archive", "lossless")


def checkpoint(seed=0, rows=700):
    """Two trained matrices, one that is refused, a tied tensor, small things."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(512, rows), torch.nn.Linear(rows, 512, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(16, 512)).square().mean().backward()
        optimizer.step()
    weights = model.state_dict()
    huge = torch.randn(96, 96)
    huge[0, 0] = float("inf")
    tree = {"model": {**weights, "huge": huge, "half": torch.randn(80, 80).bfloat16()}}
    return tree | {"tied": weights["0.weight"], "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}


def tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors(value)


def spoil(tree):
    with torch.no_grad():
        for tensor in tensors(tree):
            tensor.zero_()


class Gate:
    """Holds back what the thread of a save does until it is opened; fails what comes after ``fail`` is set."""

    def __init__(self):
        self.opened = threading.Event()
        self.fail = None

    def before(self, write):
        def held(taken):
            assert self.opened.wait(30)
            if self.fail is not None:
                raise self.fail
            return write(taken)

        return held


@pytest.fixture
def gate(monkeypatch):
    gate = Gate()
    for kind in (compress._Copied, Unwritten):
        monkeypatch.setattr(kind, "write", gate.before(kind.write))
    yield gate
    gate.opened.set()


@pytest.fixture(params=["copy", "packed"])
def snapshot(request):
    return request.param


@pytest.fixture(autouse=True)
def nothing_is_left():
    """No thread, no entry, no failure that nobody heard of."""
    before = others()
    yield
    assert not background._pending
    for _ in range(100):
        if others() == before:
            break
        time.sleep(0.05)
    assert others() == before


def others():
    """The threads that do not wait for saves."""
    return {thread for thread in threading.enumerate() if not thread.name.startswith("ckpt8-save")}


@pytest.mark.by_default(
    "copy-flash-options4", "packed-lossless-options3", "packed-flash-options4", "copy-archive-options0"
)
@pytest.mark.parametrize(
    "options", [{}, {"stats": False}, {"threads": 1}, {"max_update_error": 1e-9}, {"rules": ["*=lossless"]}]
)
@pytest.mark.parametrize("preset", PRESETS)
def test_the_file_is_the_one_of_the_foreground_whatever_becomes_of_the_tensors(
    preset, options, snapshot, tmp_path, gate
):
    tree = checkpoint()
    target = tmp_path / "a.ckpt8"
    stated = ckpt8.save(tree, target, preset=preset, **options)
    expected = target.read_bytes()
    target.unlink()
    pending = ckpt8.save(tree, target, preset=preset, background=True, snapshot=snapshot, **options)
    assert not pending.done()
    assert not target.exists()
    spoil(tree)
    gate.opened.set()
    manifest = pending.result(30)
    assert pending.done()
    assert target.read_bytes() == expected
    assert manifest_json(manifest) == manifest_json(stated)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.slow
def test_units_of_several_chunks(snapshot, tmp_path):
    torch.manual_seed(0)
    weights = torch.randn(2_500_000)
    late = torch.randn(2_500_000)
    late[-1] = float("nan")
    state = {"exp_avg": weights * 1e-3, "exp_avg_sq": weights.square() * 1e-6, "step": torch.tensor(9.0)}
    group = {"params": [0], "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False}
    tree = {"model": {"w": weights, "late": late}, "optimizer": {"state": {0: state}, "param_groups": [group]}}
    target = tmp_path / "a.ckpt8"
    for options in ({}, {"max_update_error": 1e-12}):
        manifest = ckpt8.save(tree, target, **options)
        expected = target.read_bytes()
        pending = ckpt8.save(tree, target, background=True, snapshot=snapshot, **options)
        assert manifest_json(pending.result()) == manifest_json(manifest)
        assert target.read_bytes() == expected
        reasons = [str(storage.reason) for storage in manifest.storages if storage.role.value.startswith("moment")]
        assert len(reasons) == 2
        assert all("exceeds" in reason if options else reason == "None" for reason in reasons)
        assert "NaN" in next(s.reason for s in manifest.storages if s.name == "model.late")


def test_quantized_tensors_go_through_a_whole_file(snapshot, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.randn(9, 9), 0.1, 3, torch.qint8)
    tree = {"q": quantized, "w": torch.randn(128, 128)}
    ckpt8.save(tree, tmp_path / "a.ckpt8")
    expected = (tmp_path / "a.ckpt8").read_bytes()
    ckpt8.save(tree, tmp_path / "a.ckpt8", background=True, snapshot=snapshot).result()
    assert (tmp_path / "a.ckpt8").read_bytes() == expected


@pytest.mark.slow
def test_chunks_are_let_go_as_they_are_written(tmp_path, monkeypatch):
    tree = {"w": torch.randn(24 << 20).bfloat16()}
    left = []
    begin = compress.start_saving

    def start(target, base, pack):
        return begin(target, base, lambda job: watched.append(pack(job)) or watched[-1])

    watched = []
    monkeypatch.setattr(compress, "start_saving", start)
    monkeypatch.setattr(
        "ckpt8.compressing.compressor.store", lambda packed: left.append(len(watched[0].chunks)) or store(packed)
    )
    ckpt8.save(tree, tmp_path / "a.ckpt8", threads=1, background=True, snapshot="packed").result()
    assert left[0] >= 20
    assert left[-1] == 0
    assert sorted(left, reverse=True) == left


def test_the_callers_memory_is_not_kept(snapshot, tmp_path, gate):
    buffer = array.array("f", bytes(1 << 20))
    memory = weakref.ref(buffer)
    tensor = torch.frombuffer(buffer, dtype=torch.float32)
    pending = ckpt8.save({"w": tensor}, tmp_path / "a.ckpt8", background=True, snapshot=snapshot)
    del buffer, tensor
    gc.collect()
    assert memory() is None
    gate.opened.set()
    pending.result()


def test_results_and_timeouts(tmp_path, gate):
    target = tmp_path / "a.ckpt8"
    pending = ckpt8.save({"w": torch.ones(300, 300)}, target, background=True)
    with pytest.raises(TimeoutError, match="still being written"):
        pending.result(timeout=0.01)
    assert not pending.done()
    gate.opened.set()
    assert pending.result() is pending.result()
    assert torch.equal(ckpt8.load(target)["w"], torch.ones(300, 300))


def test_as_a_context_manager_it_waits(tmp_path, gate):
    target = tmp_path / "a.ckpt8"
    with ckpt8.save({"w": torch.ones(3)}, target, background=True) as pending:
        threading.Timer(0.1, gate.opened.set).start()
        assert not pending.done()
    assert pending.done()
    assert target.exists()
    with pytest.raises(ZeroDivisionError), ckpt8.save({"w": torch.zeros(3)}, target, background=True):
        raise ZeroDivisionError
    assert torch.equal(ckpt8.load(target)["w"], torch.zeros(3))


def test_two_saves_in_a_row_to_one_target(tmp_path, gate):
    target = tmp_path / "a.ckpt8"
    (tmp_path / "link").symlink_to(tmp_path)
    first = ckpt8.save({"w": torch.ones(300, 300)}, target, background=True)
    threading.Timer(0.2, gate.opened.set).start()
    start = time.monotonic()
    second = ckpt8.save({"w": torch.zeros(300, 300)}, tmp_path / "link" / "a.ckpt8", background=True)
    assert time.monotonic() - start > 0.1
    assert first.done()
    second.result()
    assert torch.equal(ckpt8.load(target)["w"], torch.zeros(300, 300))
    third = ckpt8.save({"w": torch.ones(300, 300)}, target, background=True)
    ckpt8.save({"w": torch.full((3,), 7.0)}, target)
    assert third.done()
    assert torch.equal(ckpt8.load(target)["w"], torch.full((3,), 7.0))
    assert len(list(tmp_path.iterdir())) == 2


def test_saves_to_several_targets_do_not_wait_for_each_other(tmp_path, gate):
    pending = [ckpt8.save({"w": torch.full((300, 300), k)}, tmp_path / f"{k}.ckpt8", background=True) for k in range(3)]
    assert not any(each.done() for each in pending)
    gate.opened.set()
    for k, each in enumerate(pending):
        each.result()
        assert int(ckpt8.load(tmp_path / f"{k}.ckpt8")["w"].amax()) == k


def test_a_thread_stays_for_the_next_save(tmp_path, monkeypatch):
    monkeypatch.setattr(background, "_threads", background._new_threads())
    ckpt8.save({"w": torch.ones(9)}, tmp_path / "a.ckpt8", background=True).result()
    deadline = time.monotonic() + 30
    while not background._threads._idle_semaphore._value and time.monotonic() < deadline:
        time.sleep(0.01)
    before = set(threading.enumerate())
    ckpt8.save({"w": torch.ones(9)}, tmp_path / "a.ckpt8", background=True).result()
    assert set(threading.enumerate()) - others() <= before


def test_what_cannot_be_freed_does_not_stop_the_next_save(snapshot, tmp_path, monkeypatch):
    kind = compress._Copied if snapshot == "copy" else Unwritten
    close = kind.close

    def fails(taken):
        close(taken)
        raise RuntimeError("not freed")

    with monkeypatch.context() as patch:
        patch.setattr(kind, "close", fails)
        with pytest.raises(RuntimeError, match="not freed"):
            ckpt8.save(checkpoint(), tmp_path / "a.ckpt8", background=True, snapshot=snapshot).result(30)
    ckpt8.save(checkpoint(), tmp_path / "a.ckpt8", background=True).result(30)


def test_a_failed_save_does_not_stop_the_next(tmp_path, gate):
    target = tmp_path / "a.ckpt8"
    gate.fail = MemoryError("no room")
    gate.opened.set()
    failed = ckpt8.save({"w": torch.ones(300, 300)}, target, background=True)
    while not failed.done():
        time.sleep(0.01)
    gate.fail = None
    ckpt8.save({"w": torch.ones(300, 300)}, target, background=True).result()
    for _ in range(2):
        with pytest.raises(MemoryError, match="no room"):
            failed.result()
    assert list(tmp_path.iterdir()) == [target]


class Growing:
    """An object whose pickling changes the dict that holds it, as another thread could."""

    home: ClassVar[dict] = {"w": torch.ones(3)}

    def __reduce__(self):
        self.home[len(self.home)] = 0
        return int, ()


Growing.home["x"] = Growing()


def emptied():
    """A tensor whose memory is gone, as FSDP1 leaves it."""
    tensor = torch.ones(9)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested(depth):
    tree = []
    for _ in range(depth):
        tree = [tree]
    return tree


@pytest.mark.parametrize(
    ("tree", "name", "options", "error"),
    [
        ({"w": torch.ones(3), "f": lambda: 0}, "a.ckpt8", {}, UsageError),
        (Growing.home, "a.ckpt8", {}, UsageError),
        ({"w": emptied()}, "a.ckpt8", {}, UsageError),
        ({"w": nested(2000)}, "a.ckpt8", {}, UsageError),
        ({"w": torch.ones(3)}, "a.ckpt8", {"preset": "tiny"}, UsageError),
        ({"w": torch.ones(3)}, "a.ckpt8", {"stats": False, "max_update_error": 1.0}, UsageError),
        ({"w": torch.ones(3)}, "there.ckpt8", {"force": False}, OutputError),
        ({"w": torch.ones(3)}, "there.ckpt8/a.ckpt8", {}, OutputError),
        ({"w": torch.ones(3)}, "nowhere/a.ckpt8", {}, OutputError),
        ({"w": torch.ones(3)}, "folder", {}, OutputError),
    ],
)
def test_errors_of_the_call(tree, name, options, error, snapshot, tmp_path):
    (tmp_path / "there.ckpt8").write_bytes(b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(error):
        ckpt8.save(tree, tmp_path / name, background=True, snapshot=snapshot, **options)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "there.ckpt8"]
    assert (tmp_path / "there.ckpt8").read_bytes() == b"old"


def test_a_snapshot_of_another_kind(tmp_path):
    with pytest.raises(UsageError, match="snapshot 'fork': expected copy or packed"):
        ckpt8.save({}, tmp_path / "a.ckpt8", background=True, snapshot="fork")


def test_an_interrupt_while_the_caller_waits(snapshot, tmp_path, monkeypatch):
    target = tmp_path / "a.ckpt8"

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("ckpt8.compressing.chunk_encoder.ChunkEncoder.pack", interrupted)
        patch.setattr("ckpt8.checkpoint.sources.snapshot._keep_lock", interrupted)
        patch.setattr("ckpt8.checkpoint.sources.snapshot._let_lock", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt8.save({"w": torch.ones(300, 300)}, target, background=True, snapshot=snapshot)
    assert not list(tmp_path.iterdir())
    ckpt8.save({"w": torch.ones(300, 300)}, target, background=True, snapshot=snapshot).result()
    assert list(tmp_path.iterdir()) == [target]


def test_an_interrupt_while_the_thread_starts(tmp_path, monkeypatch):
    """The thread ends all the same: the interpreter would wait for it for ever."""
    start = threading.Thread.start

    def interrupted(thread):
        start(thread)
        if thread.name.startswith("ckpt8-save"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(background, "_threads", background._new_threads())
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt8.save({"w": torch.ones(300, 300)}, tmp_path / "a.ckpt8", background=True)
    assert not list(tmp_path.iterdir())


def test_a_base_stays_until_its_difference_is_written(tmp_path, gate):
    base, target = tmp_path / "base.ckpt8", tmp_path / "a.ckpt8"
    first, second = checkpoint(0), checkpoint(1)
    ckpt8.save(first, base, preset="lossless")
    pending = ckpt8.save(first, target, preset="lossless", base=base, background=True)
    threading.Timer(0.2, gate.opened.set).start()
    with pytest.raises(OutputError, match=r"is the base of a\.ckpt8"):
        ckpt8.save(second, base, preset="lossless")
    assert pending.done()
    assert pending.result().base.path == "base.ckpt8"
    assert not ckpt8.verify(target).failures


# What fails later is raised by result


def test_a_rule_that_matches_nothing(tmp_path):
    pending = ckpt8.save({"w": torch.ones(3)}, tmp_path / "a.ckpt8", rules=["*x=lossless"], background=True)
    with pytest.raises(UsageError, match="matches"):
        pending.result()
    assert not list(tmp_path.iterdir())


def test_the_directory_is_removed(tmp_path, gate):
    folder = tmp_path / "run"
    folder.mkdir()
    pending = ckpt8.save({"w": torch.ones(300, 300)}, folder / "a.ckpt8", background=True)
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    gate.opened.set()
    with pytest.raises(OutputError, match=r"a\.ckpt8: cannot be written"):
        pending.result()
    assert not folder.exists()


def test_the_disk_is_full(tmp_path, gate, monkeypatch):
    target = tmp_path / "a.ckpt8"
    target.write_bytes(b"old")
    pending = ckpt8.save({"w": torch.randn(3 << 20)}, target, background=True)

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writers, "write_all_at", full)
    gate.opened.set()
    with pytest.raises(OutputError, match="No space left"):
        pending.result()
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_bytes() == b"old"


def test_an_interrupt_while_waiting_leaves_the_save_alone(tmp_path, gate):
    target = tmp_path / "a.ckpt8"
    pending = ckpt8.save({"w": torch.ones(300, 300)}, target, background=True)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Timer(0.2, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            pending.result()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not pending.done()
    gate.opened.set()
    pending.result()
    assert list(tmp_path.iterdir()) == [target]


def test_the_file_is_where_its_path_led_at_the_call(snapshot, tmp_path, gate, monkeypatch):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "one")
    tree = {"w": torch.ones(300, 300)}
    pending = ckpt8.save(tree, "a.ckpt8", background=True, snapshot=snapshot)
    monkeypatch.chdir(tmp_path / "two")
    gate.opened.set()
    pending.result()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.ckpt8")] == ["one/a.ckpt8"]
    ckpt8.save(tree, tmp_path / "one" / "a.ckpt8")


def test_tensors_of_inference_mode(tmp_path):
    with torch.inference_mode():
        tree = {"w": torch.randn(300, 300)}
        pending = ckpt8.save(tree, tmp_path / "a.ckpt8", preset="lossless", background=True)
        pending.result()
    assert torch.equal(ckpt8.load(tmp_path / "a.ckpt8")["w"], tree["w"])


def test_a_signal_handler_does_not_wait_for_the_call_that_it_interrupted(tmp_path, monkeypatch):
    target, tree, found = tmp_path / "a.ckpt8", {"w": torch.ones(300, 300)}, []
    copies = snapshots.Copies

    def interrupted(storages):
        with pytest.raises(UsageError, match="a signal interrupted") as caught:
            ckpt8.save(tree, target, background=True)
        found.append(caught)
        return copies(storages)

    monkeypatch.setattr(snapshots, "Copies", interrupted)
    ckpt8.save(tree, target, background=True).result()
    assert len(found) == 1
    assert torch.equal(ckpt8.load(target)["w"], tree["w"])


@pytest.mark.parametrize("drop_first", [True, False])
def test_a_failure_that_nobody_can_hear_of_is_a_warning(drop_first, tmp_path, gate):
    gate.fail = MemoryError("no room")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pending = ckpt8.save({"w": torch.ones(300, 300)}, tmp_path / "a.ckpt8", background=True)
        if not drop_first:
            gate.opened.set()
            while not pending.done():
                time.sleep(0.01)
        del pending
        gate.opened.set()
        background.wait_for(tmp_path / "a.ckpt8")
        deadline = time.monotonic() + 10
        while not caught and time.monotonic() < deadline:
            time.sleep(0.01)
    assert [str(each.message) for each in caught] == [f"{tmp_path / 'a.ckpt8'}: was not saved: no room"]


# Leaving the interpreter

SLOW = """
import signal, sys, time
# Whatever this process was started to ignore.
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch, ckpt8
from ckpt8.compressing.chunk_encoder import ChunkEncoder

store = ChunkEncoder._store

def slowly(*packed):
    time.sleep(float(sys.argv[2]))
    return store(*packed)

ChunkEncoder._store = slowly
torch.manual_seed(0)
tree = {"w": torch.randn(5 << 20)}
pending = ckpt8.save(tree, sys.argv[1], background=True)
tree["w"].zero_()
print(pending.done(), flush=True)
"""


def _start(code, *arguments):
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


LATE = """
import sys, torch, ckpt8

class Late:
    def __del__(self, save=ckpt8.save, tree={"w": torch.ones(9)}, target=sys.argv[1], in_background=sys.argv[2] == "1"):
        save(tree, target, background=in_background)

late = Late()
"""


@pytest.mark.slow
@pytest.mark.parametrize("in_background", [0, 1])
def test_a_save_of_an_interpreter_that_ends_is_refused(in_background, tmp_path):
    _, err = _start(LATE, tmp_path / "a.ckpt8", in_background).communicate(timeout=60)
    assert "UsageError: save: the interpreter ends" in err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["raise ValueError('later')", "del pending"])
def test_leaving_right_after_the_call_completes_the_file(ending, tmp_path):
    target = tmp_path / "a.ckpt8"
    process = _start(SLOW + ending, target, 0.1)
    out, err = process.communicate(timeout=60)
    assert out == "False\n"
    assert (process.returncode, "later" in err) == ((0, False) if ending == "del pending" else (1, True))
    assert ckpt8.verify(target).failures == ()
    torch.manual_seed(0)
    ckpt8.save({"w": torch.randn(5 << 20)}, tmp_path / "again" / ".." / "a.ckpt8", background=True).result()
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.slow
def test_an_interrupt_while_leaving_leaves_no_file(tmp_path):
    process = _start(SLOW, tmp_path / "a.ckpt8", 60)
    assert process.stdout.readline() == "False\n"
    time.sleep(0.5)
    assert len(list(tmp_path.iterdir())) == 1
    # The first may come before the wait for the threads, and only ends the script.
    for _ in range(60):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        if process.poll() is not None:
            break
    process.communicate(timeout=1)
    assert not list(tmp_path.iterdir())


def test_a_fork_leaves_the_save_to_the_parent(tmp_path, gate):
    target = tmp_path / "a.ckpt8"
    pending = ckpt8.save({"w": torch.ones(300, 300)}, target, background=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        atomic._remove_unfinished()
        background.wait_for(target)
        try:
            pending.result()
        except ckpt8.UsageError as exc:
            os._exit("is saved by the process that this one was forked from" not in str(exc))
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    gate.opened.set()
    pending.result()
    assert json.dumps(ckpt8.load(target)["w"].tolist()[0][:2]) == "[1.0, 1.0]"


@pytest.mark.parametrize("in_background", [False, True])
def test_a_container_under_the_name_of_another_format_is_warned_of(in_background, tmp_path):
    """torch.load would find a file that it cannot read, weeks later."""
    with pytest.warns(UserWarning, match="torch.load cannot read") as said:
        saved = ckpt8.save({"w": torch.ones(9)}, tmp_path / "b.pt", background=in_background)
    assert [each.filename for each in said] == [__file__]
    if in_background:
        saved.result()
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(ckpt8.load(tmp_path / "b.pt")["w"], torch.ones(9))
    ckpt8.save({"w": torch.ones(9)}, tmp_path / "b.ckpt8")
