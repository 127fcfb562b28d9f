"""One view of every handle that can be watched: multiprocessing.Process, Popen, psutil's, and unknown ones.

Death is decided from the process's existence, never from `exitcode is None`: a handle whose status somebody else took
says "alive" for ever (multiprocessing) or "code 0" (subprocess). The status is peeked at without being taken.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing import process as _process
from multiprocessing.process import BaseProcess
from typing import Any

from watchdog import linux
from watchdog.death import Exited, Lost, Signalled, Status, exitcode

__all__ = ["Handle", "ProcessHandle", "UnknownHandle", "is_forked", "open_handle"]

# Seconds in which the true status may still turn up after somebody else reaped: PIDFD_GET_INFO was measured to
# answer up to 3.3 ms late, a thread that won the race for waitpid stores its result within microseconds.
_STATUS_PATIENCE = 0.1
_LONGEST_WAIT = 1.0  # seconds without a look, in case that the pidfd was closed by others


class Handle:
    """What the watch loop sees: a pid to print, a pidfd to wait for (or None), and how the process ended."""

    pid: int | None = None
    pidfd: linux.Fd | None = None

    def poll(self) -> Status | None:
        """How the process ended, None while it lives. Steals nothing; never raises for a process that is just gone."""
        raise NotImplementedError(f"{type(self).__name__} has no poll")

    @property
    def loss(self) -> str:
        """Why a status was `Lost`, in a few words for the report."""
        return "the handle tells no code"


class UnknownHandle(Handle):
    """An object with `is_alive()` and `exitcode`, or `poll()` and `returncode`. Its pid is printed, never looked up."""

    def __init__(self, process: Any) -> None:
        self._process = process
        pid = getattr(process, "pid", None)
        self.pid = pid if isinstance(pid, int) else None

    def poll(self) -> Status | None:
        if hasattr(self._process, "is_alive"):
            return None if self._process.is_alive() else _from_code(self._process.exitcode)
        if self._process.poll() is None:
            return None
        return _from_code(self._process.returncode)


class ProcessHandle(Handle):
    """A process of this machine, behind a `multiprocessing`, `subprocess` or `psutil` object, or (None) a pid alone.

    `start_time` says which process of that pid is meant; None means the one that has it now.
    """

    def __init__(self, process: Any, pid: int, ended: Status | None = None, *, start_time: int | None = None) -> None:
        self.process = process
        self.pid: int = pid
        self._start_time = start_time
        self._ended = ended
        self._reaped = False
        if ended is None:
            self._open()

    def _open(self) -> None:
        try:
            self.pidfd = linux.pidfd_open(self.pid)
        except ProcessLookupError:
            self._ended = self._recover()
            return
        start_time = linux.start_time(self.pid)
        if self._start_time is not None and start_time is not None and start_time != self._start_time:
            self.forget()
        self._start_time = start_time

    def poll(self) -> Status | None:
        if self._ended is None and self.is_dead():
            self._ended = self._recover()
        return self._ended

    def is_dead(self) -> bool:
        """Whether the process is gone, or a zombie; its status is not looked for."""
        if self._ended is not None:
            return True
        if self.pidfd is None:
            return self._is_dead_without_pidfd()
        pidfd = self.pidfd
        try:
            return linux.peek_status(pidfd, self.pid) is not None
        except linux.NotOurChild:
            # Somebody reaped it, or it never was ours (fork server, psutil). Only a pidfd gets this answer, so readable
            # is dead.
            if not linux.is_readable(pidfd):
                return False
        except OSError:
            pass  # no pidfd any more: closed by others, its number perhaps reused
        try:
            # Once more: another thread may have closed it between the two looks, and what was readable was a file of
            # its own that got the number.
            return linux.peek_status(pidfd, self.pid) is not None
        except linux.NotOurChild:
            return True
        except OSError:
            pass
        # A new descriptor for the same process, if it is there. The old one knows that its number is not ours any more.
        if not self._still_there():
            return True
        try:
            self.pidfd = linux.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        return False

    def _is_dead_without_pidfd(self) -> bool:
        try:
            return linux.peek_status(None, self.pid) is not None
        except (linux.NotOurChild, AttributeError):  # macOS has no os.waitid before Python 3.13
            return not self._still_there()

    def forget(self) -> None:
        """The pid turned out to be another process's: the one that was meant is gone."""
        self._ended = Lost()

    @property
    def is_our_living_child(self) -> bool:
        """Whether the kernel knows it for our child; a handle's pid alone may be another process's by now."""
        try:
            linux.peek_status(self.pidfd, self.pid)
        except linux.NotOurChild:
            return False
        except (OSError, AttributeError):
            pass  # cannot say
        return True

    def _still_there(self) -> bool:
        return linux.exists(self.pid, self._start_time)

    def _recover(self) -> Status:
        """The status of a dead process, from whoever still has it."""
        deadline = time.monotonic() + _STATUS_PATIENCE
        while True:
            status = self._kernel_status() or _stored_status(self.process)
            if status is not None:
                return status
            if time.monotonic() > deadline:
                return self._ask_fork_server()
            time.sleep(0.001)

    def _kernel_status(self) -> Exited | Signalled | None:
        with suppress(linux.NotOurChild, OSError, AttributeError):
            return linux.peek_status(self.pidfd, self.pid)
        if self.pidfd is not None:
            status = linux.recall_status(self.pidfd)
            if status is not None:
                return status
        return linux.zombie_status(self.pid, self._start_time)

    def _ask_fork_server(self) -> Status:
        """The code that a fork server sent and nobody read yet, stored in the handle as if its owner had asked.

        Other handles are not asked: it would take the status or race for it. Here the race is with a user's join()
        alone, which had its time to win.
        """
        if isinstance(self.process, BaseProcess) and _is_forkserver(self.process):
            with suppress(Exception):
                self.process._popen.poll()  # type: ignore[attr-defined]
        return _stored_status(self.process) or Lost()

    @property
    def loss(self) -> str:
        if isinstance(self.process, BaseProcess):
            if _is_forkserver(self.process):
                return "possibly lost with the fork server" if _stored_code(self.process) == 255 else "not a child"
            return "reaped elsewhere"
        psutil = sys.modules.get("psutil")
        popens = (subprocess.Popen,) if psutil is None else (subprocess.Popen, psutil.Popen)
        return "reaped elsewhere" if isinstance(self.process, popens) else "not a child"

    def send_signal(self, number: int) -> bool:
        """Signal exactly this process; False if it is dead."""
        if self.poll() is not None:
            return False
        if self.pidfd is not None:
            return linux.pidfd_send_signal(self.pidfd, number)
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def wait(self, timeout: float) -> bool:
        """Sleep for `timeout` seconds or until the process is dead; whether it is."""
        deadline = time.monotonic() + timeout
        while True:
            dead = self.is_dead()
            left = deadline - time.monotonic()
            if dead or left <= 0:
                return dead
            if self.pidfd is None:
                time.sleep(min(left, 0.02))
            else:
                linux.wait_readable((self.pidfd,), min(left, _LONGEST_WAIT))

    def reap(self) -> None:
        """Take the status of a dead server that we launched, so that no zombie stays and its handle tells the truth."""
        status = self.poll()
        if status is None or self._reaped:
            return
        if self.process is None:
            linux.reap(self.pidfd, self.pid)
        elif isinstance(self.process, BaseProcess):
            self._reap_process(self.process, exitcode(status))
        else:
            self._reap_popen(self.process, exitcode(status))
        self._reaped = True  # no second time: without a pidfd the pid may later be that of another child

    def _reap_process(self, process: Any, code: int | None) -> None:
        # Process is not thread-safe: a user's join() that loses the race for waitpid returns before the winner has
        # stored the code. So the code is stored first and taken second. A closed Process has nothing to store it in.
        popen = getattr(process, "_popen", None)
        if popen is not None and popen.returncode is None and code is not None:
            popen.returncode = code
        # Out of the list whose members multiprocessing signals by pid at exit: by then it may be another's pid.
        _process._children.discard(process)  # type: ignore[attr-defined]
        linux.reap(self.pidfd, self.pid)

    def _reap_popen(self, process: Any, code: int | None) -> None:
        # Popen has a lock of its own for this, which another thread may hold for a moment (its poll() says None then)
        # or as long as it sits in wait(), until it stores the code. If the status was taken Popen says 0.
        deadline = time.monotonic() + _STATUS_PATIENCE
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
        if code is not None and process.returncode is not None:
            process.returncode = code


def open_handle(process: Any) -> Handle:
    """The view of `process` that the watch loop needs.

    Raises TypeError for an object that offers neither interface, ValueError for a process that was never started or is
    somebody else's child.
    """
    psutil = sys.modules.get("psutil")  # whoever passes a psutil handle has imported it
    if isinstance(process, BaseProcess):
        popen = getattr(process, "_popen", None)
        if popen is None or process.pid is None or getattr(process, "_parent_pid", None) != os.getpid():
            raise ValueError(f"cannot watch {process!r}: it was never started, or not by this process")
        return _open_process(process, child=popen.method in ("fork", "spawn"))
    if isinstance(process, subprocess.Popen):
        return _open_process(process, child=True)
    if psutil is not None and isinstance(process, psutil.Process):
        handle = _open_process(process, child=False)
        if handle.poll() is None and not process.is_running():
            return ProcessHandle(process, process.pid, Lost())  # the pid is free, or belongs to somebody else by now
        return handle
    for method, code in (("is_alive", "exitcode"), ("poll", "returncode")):
        if callable(getattr(process, method, None)) and hasattr(process, code):
            return UnknownHandle(process)
    raise TypeError(
        f"cannot watch {process!r}: it has neither is_alive() and exitcode nor poll() and returncode",
    )


def _open_process(process: Any, *, child: bool) -> ProcessHandle:
    handle = ProcessHandle(process, process.pid, _stored_status(process))
    if child and handle.poll() is None and not handle.is_our_living_child:
        stat = linux.read_stat(process.pid)
        if stat is not None and stat.parent == os.getppid():
            raise ValueError(f"cannot watch {process!r}: it belongs to the process that this one was forked from")
        return ProcessHandle(process, process.pid, Lost())  # its status was taken, and the pid is another's by now
    return handle


def is_forked(process: BaseProcess) -> bool:
    """Whether a started process shares what its parent had mapped."""
    return getattr(getattr(process, "_popen", None), "method", None) == "fork"


def _is_forkserver(process: BaseProcess) -> bool:
    # Not `_start_method`: the class `multiprocessing.Process` has none and takes the default.
    return getattr(getattr(process, "_popen", None), "method", None) == "forkserver"


def _stored_code(process: Any) -> Any:
    holder = getattr(process, "_popen", None) if isinstance(process, BaseProcess) else process
    return getattr(holder, "returncode", None)


def _stored_status(process: Any) -> Status | None:
    """The code a handle has stored already, as far as it can be believed.

    multiprocessing's fork server says 255 when it lost the code: that is no answer. subprocess says 0 when somebody
    else took the status and the owner then asked. A 0 is believed all the same where the kernel cannot say (before
    Linux 6.15): nearly always it is what the owner's own wait() got, and to abort then would kill a healthy job.
    """
    code = _stored_code(process)
    if code is None or (code == 255 and isinstance(process, BaseProcess) and _is_forkserver(process)):
        return None
    return _from_code(code)


def _from_code(code: Any) -> Status:
    if not isinstance(code, int):
        return Lost()
    return Signalled(-code) if code < 0 else Exited(code)
