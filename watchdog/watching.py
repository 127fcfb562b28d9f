"""The watch thread: one loop with three outcomes (alive, expected end, abnormal end), for every kind of handle."""

from __future__ import annotations

import atexit
import logging
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess
from typing import Callable, NamedTuple

from watchdog import linux
from watchdog.abort import abort, arm_dead_man, before_leaving, leave, report
from watchdog.bounded import stand_by
from watchdog.death import Death, Exited, Signalled, Status, exitcode
from watchdog.delivery import notify
from watchdog.diagnosis import Evidence, diagnose
from watchdog.handles import Handle, ProcessHandle
from watchdog.record import Record, StopEvent

__all__ = ["STOP_TIMEOUT", "Settings", "Watch", "install_hooks", "ours", "starting", "stop_servers"]

OnDeath = Callable[[Death], object]

# Ends that a shutdown of the whole job may have caused: by these signals, or by the codes that shells make of them.
_SHUTDOWN_SIGNALS = frozenset({1, 2, 15})  # HUP, INT, TERM
_SHUTDOWN_CODES = frozenset({129, 130, 143})
STOP_TIMEOUT = 5.0  # seconds between SIGTERM and SIGKILL, by default and at the end of the interpreter
_STOP_IN_ABORT = 0.3  # seconds
_HASTE = 0.0001  # seconds; the interpreter's switch interval from the death of a server to the exit
_AFTER_SIGKILL = 2.0  # seconds
_TOGETHER = 0.02  # seconds in which the deaths of several servers count as one event


class Settings(NamedTuple):
    """What a watchdog was told at its construction."""

    poll_interval: float
    expected_exit_codes: frozenset[int]
    on_death: OnDeath
    signal_grace: float


class _Registry:
    """What this process watches. A forked copy starts with an empty one."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []
        self.processes: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
        self.starting: dict[str, object] = {}  # names under which a launch is on its way
        # Held from the moment a death is going to abort: the process ends once, with one report.
        self.aborting = threading.Lock()
        self.hooked = False


_registry = _Registry()
_fork_hook_installed = False


def _forget() -> None:
    """In a forked child: nothing the parent watches is ours. Takes no lock and logs nothing."""
    global _registry
    # At its end the copy would send SIGTERM to the daemonic children that it believes to have.
    for process in list(_registry.processes):
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    _registry = _Registry()


def ours(process: BaseProcess) -> None:
    """Make known, before it starts, a process that no forked copy may end."""
    _registry.processes.add(process)


@contextmanager
def starting(name: str) -> Iterator[None]:
    """One living server a name: raises RuntimeError if another watchdog has launched one under it, or is about to."""
    registry, ours = _registry, object()
    # setdefault is one step for all threads; a lock could be held at a fork.
    if registry.starting.setdefault(name, ours) is not ours:
        raise RuntimeError(f"another watchdog is launching a server named {name!r}")
    try:
        if any(watch.launched and watch.name == name and watch.lives for watch in list(registry.watches)):
            raise RuntimeError(f"another watchdog has launched a server named {name!r}, and it lives")
        yield
    finally:
        registry.starting.pop(name, None)


def install_hooks() -> None:
    """See to it, once a process, that a normal end disarms first, and that forked copies are inert.

    Both hooks are needed: atexit comes first in a main process; in a child of multiprocessing it comes too late or, up
    to Python 3.12 under fork, never, while the finalizer runs before multiprocessing terminates daemonic children.
    """
    global _fork_hook_installed
    if not _registry.hooked:
        _registry.hooked = True
        atexit.register(_end_of_interpreter)
        multiprocessing.util.Finalize(None, _end_of_interpreter, exitpriority=100)
        before_leaving(_leave_nothing_behind)
    if not _fork_hook_installed:
        _fork_hook_installed = True
        os.register_at_fork(after_in_child=_forget)


def _end_of_interpreter() -> None:
    """Idempotent: first every watch is disarmed, then every server that we launched is stopped."""
    watches = list(_registry.watches)
    for watch in watches:
        watch.stop.set()
    stop_servers([watch for watch in watches if watch.launched], STOP_TIMEOUT)


def _leave_nothing_behind() -> None:
    """An abort ends the rank's other servers, and what is left in a session that it leads.

    torchrun gives each rank a session of its own and never signals that of a rank which is gone. What waits in it for
    the dead server (DataLoader workers, for one) would wait for ever. Who is dead by then is not waited for: a large
    process takes its time to go.
    """
    handles = _handles(watch for watch in list(_registry.watches) if watch.launched)
    _signal_all(handles, signal.SIGTERM, _STOP_IN_ABORT)
    _signal_all(handles, signal.SIGKILL, 0.0)
    if os.getsid(0) == os.getpid():
        linux.kill_session(os.getpid())


def stop_servers(watches: list[Watch], timeout: float) -> None:
    """SIGTERM to all that live, `timeout` seconds for all together, SIGKILL to the rest.

    One that outlives even SIGKILL by two seconds (uninterruptible in the kernel), or may not be signalled by us, is
    named in a WARNING and left.
    """
    handles = _handles(watches)
    _signal_all(handles, signal.SIGTERM, timeout)
    _signal_all(handles, signal.SIGKILL, _AFTER_SIGKILL)
    for watch in watches:
        if watch.handle.poll() is None:
            notify(logging.WARNING, f"{watch.name} (pid {watch.handle.pid}) could not be ended and is left alone")
        else:
            watch.reap()
        watch.close()


def _handles(watches: Iterable[Watch]) -> list[ProcessHandle]:
    return [watch.handle for watch in watches if isinstance(watch.handle, ProcessHandle)]


def _signal_all(handles: list[ProcessHandle], number: int, patience: float) -> None:
    """Signal all that live, and wait for them, `patience` seconds for all together."""
    deadline = time.monotonic() + patience
    for handle in [handle for handle in handles if _signal(handle, number)]:
        handle.wait(max(0.0, deadline - time.monotonic()))


def _signal(handle: ProcessHandle, number: int) -> bool:
    """Whether `handle` was alive and got the signal."""
    try:
        return handle.send_signal(number)
    except OSError:
        return False  # not ours to signal: it changed its user


class Watch:
    """One server under watch, from its launch (or adoption) to its end."""

    def __init__(
        self,
        name: str,
        handle: Handle,
        stop: StopEvent,
        settings: Settings,
        *,
        launched: bool,
        record: Record | None = None,
    ) -> None:
        self.name = name
        self.handle = handle
        self.stop = stop
        self.settings = settings
        self.launched = launched
        self._record = record  # what the server says of itself; None where nothing of ours runs in it
        self.death: Death | None = None
        self.over = False  # the server is gone, and what had to be done about it was done
        self._since = time.monotonic()
        self._interval: float | None = None  # the interpreter's switch interval, while ours is set

    def start(self) -> None:
        """Raises RuntimeError if the system has no thread left."""
        thread = threading.Thread(target=self._run, name=f"watchdog-{self.name}", daemon=True)
        _registry.watches.append(self)
        try:
            stand_by()
            thread.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Nothing more will come of it. Idempotent."""
        self.over = True
        self.stop.record.retire()
        with suppress(ValueError):
            _registry.watches.remove(self)

    @property
    def armed(self) -> bool:
        return not self.over and not self.stop.is_set()

    @property
    def lives(self) -> bool:
        """Whether the server is there, or its death has yet to be dealt with."""
        return not self.over and (self.armed or self.handle.poll() is None)

    def _reap_quietly(self) -> None:
        with suppress(Exception):  # a zombie more or less is no reason not to report
            self.reap()

    def reap(self) -> None:
        if self.launched and isinstance(self.handle, ProcessHandle):
            self.handle.reap()

    def _run(self) -> None:
        troubled = False
        while not self.stop.is_set():
            try:
                if self._look():
                    return
                if self._sleep():
                    self._hasten()
                    if self._look():
                        return
            except Exception as error:
                # One failed look, or a hundred, is no death and no reason to stop looking.
                if not troubled:
                    notify(logging.WARNING, f"{self.name}: watching failed and goes on: {error!r}")
                troubled = True
                self.stop.wait(self.settings.poll_interval)
            finally:
                self._calm()
        self._see_off()

    def _look(self) -> bool:
        """Whether the server was dead, and that has been dealt with."""
        status = self.handle.poll()
        if status is None:
            return False
        self._end(status)
        return True

    def _hasten(self) -> None:
        """Something happened. Where another thread spins in Python, each of our system calls waits for the GIL anew."""
        interval = sys.getswitchinterval()
        if interval > _HASTE:
            self._interval = interval
            sys.setswitchinterval(_HASTE)

    def _calm(self) -> None:
        """Nothing that matters, or nothing that hurries: the rank goes on."""
        if self._interval is not None:
            sys.setswitchinterval(self._interval)
            self._interval = None

    def _see_off(self) -> None:
        """Disarmed: a server that we launched is still reaped at its end, so that none stays as a zombie."""
        if self.launched and isinstance(self.handle, ProcessHandle):
            with suppress(Exception):
                while not self.handle.wait(self.settings.poll_interval):
                    pass
                self.reap()
        self.close()

    def _sleep(self) -> bool:
        """Until something happens (True), or for `poll_interval`."""
        pidfd = self.handle.pidfd
        before = time.monotonic()
        fds = (self.stop.reader,) if pidfd is None else (self.stop.reader, pidfd)
        woken = linux.wait_readable(fds, self.settings.poll_interval)
        if woken and time.monotonic() - before < 0.001 and self.handle.poll() is None and not self.stop.is_set():
            # Woken for nothing: a descriptor was closed by others and its number belongs to a file with data.
            time.sleep(min(0.05, self.settings.poll_interval))
        return woken

    def _end(self, status: Status) -> None:
        uptime, died_at = time.monotonic() - self._since, time.time()
        if self.stop.is_set():  # disarmed before it died
            self._see_off()
        elif exitcode(status) in self.settings.expected_exit_codes:
            self._calm()
            self._expected(status, uptime)
        else:
            if _is_shutdown(status):
                self._calm()
                if self.stop.wait(self.settings.signal_grace):
                    self._see_off()
                    return
            self._abnormal(status, uptime, died_at)

    def _expected(self, status: Status, uptime: float) -> None:
        death = self._diagnose(status, uptime)
        self.reap()
        # Over before the death is shown: who sees it may launch anew.
        self.over = True
        self.death = death
        who = f"{self.name} (pid {self.handle.pid})"
        notify(logging.INFO, f"{who} {status} after {uptime:.1f} s, as expected")
        # A server that ends just before its rank makes no noise; one that left too early is seen.
        if not self.stop.wait(self.settings.signal_grace):
            notify(logging.WARNING, f"{who} {status} while still watched, after {uptime:.1f} s")
        self.close()

    def _abnormal(self, status: Status, uptime: float, died_at: float) -> None:
        on_death = self.settings.on_death
        if on_death is abort:
            if _registry.aborting.acquire(blocking=False):  # else the process is on its way out already
                arm_dead_man()
                self._reap_quietly()
                leave(self._diagnose(status, uptime).with_others(tuple(self._others())), died_at)
            return
        self._calm()
        self._reap_quietly()
        death = self._diagnose(status, uptime)
        report(death)
        self.close()
        self.death = death
        try:
            on_death(death)
        except BaseException as error:
            # A SystemExit would only end this thread, and nobody would have dealt with the death.
            notify(logging.ERROR, f"{self.name}: on_death raised {error!r}; the abort follows")
            leave(death, died_at)

    def _diagnose(self, status: Status, uptime: float) -> Death:
        evidence = Evidence(loss=self.handle.loss)
        if self._record is not None:
            evidence = evidence._replace(traceback=self._record.traceback, entered=self._record.entered)
        return diagnose(self.name, self.handle.pid, status, uptime, evidence)

    def _others(self) -> list[Death]:
        """The abnormal deaths of other watched servers at the same moment."""
        # Only what the kernel tells: a handle of somebody's own might block.
        others = [w for w in list(_registry.watches) if w is not self and w.armed and w.handle.pidfd is not None]
        deadline = time.monotonic() + _TOGETHER
        deaths: list[Death] = []
        while others:
            for watch in list(others):
                status = watch.handle.poll()
                if status is None:
                    continue
                others.remove(watch)
                if exitcode(status) not in watch.settings.expected_exit_codes:
                    deaths.append(watch._diagnose(status, time.monotonic() - watch._since))
                    watch.reap()
            if time.monotonic() > deadline:
                break
            time.sleep(0.002)
        return deaths


def _is_shutdown(status: Status) -> bool:
    if isinstance(status, Signalled):
        return status.signal in _SHUTDOWN_SIGNALS
    return isinstance(status, Exited) and status.code in _SHUTDOWN_CODES
