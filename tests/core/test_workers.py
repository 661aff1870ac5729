"""The thread pool: order, bounded look-ahead, errors, and torch's thread setting on both sides."""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
import torch

from ckpt8.core.workers import LOOK_AHEAD, NO_THREADS, Workers, default_threads, scratch, threads_of_rank


@pytest.fixture
def caller_threads():
    """The caller's own setting, one that nobody else chooses."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield 3
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_results_come_in_the_order_of_the_items(threads):
    def late(k):
        time.sleep(0.003 if k % 3 == 0 else 0)
        return k * k

    with Workers(threads) as workers:
        assert list(workers.map(late, range(60))) == [k * k for k in range(60)]
        assert list(workers.map(late, [])) == []


def test_torch_that_comes_later_has_one_thread_in_each(caller_threads, monkeypatch):
    """Commands start threads without torch; a rare rule then imports it."""
    with Workers(2) as workers:
        with monkeypatch.context() as patch:
            patch.delitem(sys.modules, "torch")
            late = Workers(2)
        with late:
            both = zip(workers.map(_own_threads, range(8)), late.map(_own_threads, range(8)), strict=True)
            assert set(both) == {(1, 1)}
    assert torch.get_num_threads() == caller_threads


def _own_threads(_):
    return torch.get_num_threads()


def test_work_is_done_by_all_threads_at_once():
    barrier = threading.Barrier(3, timeout=10)

    def meet(_):
        barrier.wait()
        return threading.current_thread().name

    with Workers(3) as workers:
        names = set(workers.map(meet, range(3)))
    assert len(names) == 3
    assert threading.current_thread().name not in names


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_items_are_taken_only_so_far_ahead(threads):
    taken = 0

    def items():
        nonlocal taken
        for k in range(200):
            taken += 1
            yield k

    with Workers(threads) as workers:
        largest = 0
        for done, _ in enumerate(workers.map(lambda k: k, items())):
            largest = max(largest, taken - done)
        assert taken == 200
    assert threads < largest <= threads * (1 + LOOK_AHEAD)


def test_an_exception_of_a_worker_comes_out_in_its_place_and_ends_the_threads():
    def fail(k):
        if k == 7:
            raise KeyError("seven")
        return k

    with Workers(2) as workers:
        results = workers.map(fail, range(100))
        assert [next(results) for _ in range(7)] == list(range(7))
        with pytest.raises(KeyError, match="seven"):
            next(results)
        # The pool is still of use.
        assert list(workers.map(fail, range(5))) == list(range(5))
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError), Workers(3) as workers:
        for _ in workers.map(lambda k: 1 // k, [1, 0, 1]):
            pass
    assert threading.active_count() == before


def test_work_before_an_exception_of_the_items_is_dropped():
    go, started = threading.Event(), []

    def work(k):
        started.append(k)
        go.wait(10)

    def items():
        yield from range(3)
        raise OSError("no more")

    with Workers(1) as workers:
        with pytest.raises(OSError, match="no more"):
            workers.map(work, items(), ahead=9)
        go.set()
        assert list(workers.map(lambda k: k, range(5))) == list(range(5))
    assert started in ([], [0])


def test_work_that_nobody_waits_for_is_dropped():
    started = []

    def slow(k):
        started.append(k)
        time.sleep(0.05)
        return k

    with Workers(1) as workers:
        results = workers.map(slow, range(100))
        assert next(results) == 0
        results.close()
    assert len(started) <= 3


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_every_worker_has_one_intra_op_thread_and_the_caller_keeps_its_own(threads, caller_threads):
    barrier = threading.Barrier(threads, timeout=10)

    def look(_):
        barrier.wait()
        torch.ones(1 << 16).sum()
        return threading.get_ident(), torch.get_num_threads()

    with Workers(threads) as workers:
        assert torch.get_num_threads() == caller_threads
        found = list(workers.map(look, range(3 * threads)))
        assert torch.get_num_threads() == caller_threads
    assert len({name for name, _ in found}) == threads
    assert {count for _, count in found} == {1}
    assert torch.get_num_threads() == caller_threads
    # A thread that somebody else starts afterwards gets what the caller has chosen, too.
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [caller_threads]


def test_the_default_is_one_thread_for_each_processor_and_at_most_eight(monkeypatch):
    for count, expected in [(1, 1), (5, 5), (64, 8)]:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, count=count: set(range(count)), raising=False)
        assert default_threads() == expected
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert default_threads() == 1
    with Workers(None) as workers:
        assert workers.threads == 1


@pytest.mark.parametrize(
    ("ranks", "expected"), [("", 8), ("1", 8), ("4", 8), ("16", 4), ("63", 1), ("128", NO_THREADS), ("x", 8)]
)
def test_ranks_of_one_machine_share_its_processors(ranks, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert threads_of_rank() == expected


def test_without_threads_the_caller_does_the_work():
    taken = []

    def items():
        for number in range(3):
            taken.append(number)
            yield number

    with Workers(NO_THREADS) as workers:
        found = workers.map(lambda number: (number, threading.get_ident()), items())
        assert next(found) == (0, threading.get_ident())
        assert taken == [0]
        assert [number for number, *_ in workers.map(lambda each: each, found)] == [1, 2]
        buffer = scratch("a", 4)
        assert scratch("a", 4).obj is buffer.obj
    # What the threads of a pool take with them is gone here as well.
    assert scratch("a", 4).obj is not buffer.obj
