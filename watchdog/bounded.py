"""Steps that may block, run so that none of them holds up the others. Standard library only."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Callable

__all__ = ["run_bounded", "run_in_turn", "stand_by", "uninterrupted"]

Step = Callable[[], object]
_PATIENCE = 2.0  # seconds for the end of a step that nobody waits for any more


def run_bounded(steps: Iterable[Step], seconds: float, *, inline: bool = True) -> bool:
    """Run each step on a helper thread; True if all were done within `seconds`.

    A step that blocks holds up neither the caller nor the steps behind it; one that raises counts as done. If no thread
    can be started (none left, or the interpreter is ending) the steps run here and now, or not at all unless `inline`.
    """
    waiting = deque(steps)
    done: list[None] = []
    total = len(waiting)

    def work() -> None:
        with suppress(IndexError):
            while True:
                step = waiting.popleft()
                with suppress(BaseException):
                    step()
                done.append(None)

    deadline = time.monotonic() + seconds
    while True:
        thread = threading.Thread(target=work, name="watchdog-report", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if inline:
                work()
            break
        # The last step may use all the time there is; one that blocks before others shares it with them.
        thread.join(max(0.0, deadline - time.monotonic()) / (len(waiting) + 1))
        if not waiting or time.monotonic() > deadline:
            thread.join(max(0.0, deadline - time.monotonic()))
            break
    return len(done) == total


def uninterrupted(step: Step) -> None:
    """Run `step` on a helper thread, and raise what it raises.

    An exception from a signal handler is raised in the main thread, between any two steps of it: a process that was
    just started would be lost with its pid. Here it comes while we wait, and goes on once the step is done.
    """
    failed: list[BaseException] = []
    ended: list[None] = []
    done = _thread.allocate_lock()
    done.acquire()

    def work() -> None:
        try:
            step()
        except BaseException as error:
            failed.append(error)
        finally:
            ended.append(None)
            done.release()

    try:
        try:
            _thread.start_new_thread(work, ())
        except RuntimeError:
            ended.append(None)  # no thread left: nothing was started
            raise
        done.acquire()
    except BaseException:  # a handler's RuntimeError among them
        deadline = time.monotonic() + _PATIENCE
        while not ended and time.monotonic() < deadline:
            time.sleep(0.001)
        raise
    if failed:
        raise failed[0]


def run_in_turn(steps: Iterable[tuple[Step, float]]) -> bool:
    """Run each step on the calling thread; where one is not back within its seconds, a helper takes over the rest.

    One helper is started for that, beforehand and once: to start one for each step costs more than the steps. True
    once all were run here; False, perhaps much later, if they were taken over. A step that raises counts as done.
    """
    return _Turns(steps).run()


def stand_by() -> None:
    """Have the helper of `run_in_turn` ready: when it is needed the system may have no thread left. Once a process."""
    if not any(owner == os.getpid() for owner, _, _ in _standby):
        call = _thread.allocate_lock()
        call.acquire()
        calls: list[Step] = []

        def wait() -> None:
            call.acquire()
            calls[0]()

        _thread.start_new_thread(wait, ())
        _standby.append((os.getpid(), call, calls))


# (pid, what the helper waits for, what it is to do then); a forked copy has no such thread.
_standby: list[tuple[int, Any, list[Step]]] = []


def _call_standby(step: Step) -> None:
    for owner, call, calls in _standby:
        if owner == os.getpid() and not calls:
            calls.append(step)
            call.release()
            return
    # Not `threading.Thread`, whose start() waits for the thread to run. If there is no thread, nobody takes over.
    with suppress(RuntimeError):
        _thread.start_new_thread(step, ())


class _Turns:
    def __init__(self, steps: Iterable[tuple[Step, float]]) -> None:
        self._steps = deque(steps)
        self._turn: object = None  # of the thread that may go on
        self._due = 0.0
        self._finished = threading.Event()

    def run(self) -> bool:
        turn = self._turn = object()
        self._due = time.monotonic() + 1.0
        _call_standby(partial(self._take_over_from, turn))
        while self._turn is turn and self._steps:
            step, seconds = self._steps.popleft()
            self._due = time.monotonic() + seconds
            with suppress(BaseException):
                step()
        if self._turn is not turn:
            return False
        self._finished.set()
        return True

    def _take_over_from(self, turn: object) -> None:
        while not self._finished.wait(max(0.001, self._due - time.monotonic())):
            if self._turn is not turn:
                return
            if time.monotonic() > self._due:
                self.run()
                return
