"""A process that ends with its parent.

PyTorch DataLoader's workers do the same by polling `getppid` (`ManagerWatchdog`, torch/utils/data/_utils/worker.py). A
pidfd on the parent is told at once, and is right also where `getppid` is not: under a fork server, whose children have
another parent than the process that asked for them, under subreapers, and where the parent is PID 1.
"""

from __future__ import annotations

import multiprocessing
import os

from watchdog import linux
from watchdog.abort import exit_now, follow
from watchdog.arguments import natural, seconds
from watchdog.handles import ProcessHandle

__all__ = ["ParentWatchdog", "exit_with_parent"]

_followed: set[tuple[int, int]] = set()  # (own pid, parent's pid): one thread each


def exit_with_parent(parent_pid: int | None = None, *, check_interval: float = 5.0, exit_code: int = 1) -> None:
    """End this process, with `exit_code`, once its parent is dead.

    `parent_pid` None means the process that started this one: for a child of `multiprocessing` the one that called
    `start()`, also under a fork server, else `os.getppid()`. Pass the pid where the parent may be gone before this line
    is reached; if it is gone by then, the process ends at once. A second call for the same parent does nothing.

    It is a daemon thread, woken by the kernel; every `check_interval` seconds it looks anew, in case that its
    descriptor was closed. It needs the GIL: C code that holds it delays the end. stdout, stderr and log handlers are
    flushed, no other clean-up runs.

    Raises ValueError or TypeError for bad arguments, and ValueError for a parent that cannot be seen from here
    (`getppid()` is 0: it lives outside of this PID namespace).
    """
    pid = _parent(parent_pid)
    seconds("check_interval", check_interval, zero=False)
    if natural("exit_code", exit_code) > 255:
        raise ValueError(f"exit_code must be 255 or less, not {exit_code!r}")
    if (os.getpid(), pid) not in _followed:
        follow(_handle(pid), check_interval, lambda: exit_now(exit_code))
        _followed.add((os.getpid(), pid))


class ParentWatchdog:
    """Tells whether the parent lives. For loops that look by themselves; `exit_with_parent` needs none.

    `parent_pid` as for `exit_with_parent`.
    """

    def __init__(self, parent_pid: int | None = None) -> None:
        self._handle = _handle(_parent(parent_pid))
        self._dead = False

    def is_alive(self) -> bool:
        """False once the parent is dead, and from then on: a later process with its pid is another one."""
        self._dead = self._dead or self._handle.is_dead()
        return not self._dead


def _parent(pid: int | None) -> int:
    if pid is None:
        parent = multiprocessing.parent_process()
        pid = os.getppid() if parent is None or parent.pid is None else parent.pid
        if pid == 0:
            raise ValueError("the parent cannot be seen from here: os.getppid() is 0")
    if natural("parent_pid", pid) == 0:
        raise ValueError(f"parent_pid must be the pid of a process, not {pid!r}")
    return pid


def _handle(pid: int) -> ProcessHandle:
    handle = ProcessHandle(None, pid)
    own, parents = linux.start_time(os.getpid()), linux.start_time(pid)
    if own is not None and parents is not None and parents > own:
        # Nobody is younger than its child: the parent was gone, and the pid was given away again.
        handle.forget()
    return handle
