"""Fixtures: ranks that die with their test, and a gate that no test leaks a thread, a child or a descriptor."""

from __future__ import annotations

import ctypes
import gc
import os
import threading

import harness
import psutil
import pytest

_PR_SET_CHILD_SUBREAPER = 36


def pytest_configure() -> None:
    # Orphans of the ranks become ours, so that they can be seen, killed and reaped by pid.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@pytest.fixture
def rank(tmp_path):
    """Starts a rank: `rank(script)`, with the prelude of `harness` before the script."""
    ranks = harness.Ranks(tmp_path)
    harness.current.append(ranks)
    yield ranks
    ranks.end()
    harness.current.remove(ranks)


def _state() -> tuple[set[str], set[int], set[str]]:
    fds = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            fds.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except OSError:
            pass  # the listing's own
    children = {child.pid for child in psutil.Process().children(recursive=True)} - _shared_helpers()
    return {thread.name for thread in threading.enumerate()}, children, fds


def _shared_helpers() -> set[int]:
    """multiprocessing's fork server and resource tracker live as long as their process."""
    from multiprocessing import forkserver, resource_tracker

    return {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid} - {None}


@pytest.fixture(autouse=True)
def leak_gate():
    """Threads, children and descriptors are what they were before the test, at once or a moment later."""
    before = _state()
    yield

    def leaked() -> list[object]:
        gc.collect()
        harness.reap_adopted()
        threads, children, fds = _state()
        helpers = {fd for fd in fds if "pipe:" in fd} if _shared_helpers() else set()
        return [*(threads - before[0]), *(children - before[1]), *(fds - before[2] - helpers)]

    harness.wait_for(lambda: not leaked(), 5.0, lambda: f"leaked: {leaked()}")
