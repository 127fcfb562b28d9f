"""Every system call and every read of /proc. Standard library and the ground floor only.

Where the kernel, a seccomp filter or a missing /proc refuses an answer, the functions here return None ("cannot
say"): missing information weakens the evidence, never the detection of a death.
"""

from __future__ import annotations

import sys

if sys.platform == "win32":
    raise ImportError("sidecar-watchdog needs a POSIX system (Linux first); Windows is not supported")

import ctypes
import errno
import fcntl
import os
import select
import signal
import struct
import time
from contextlib import suppress
from typing import NamedTuple

from watchdog.death import Exited, Signalled

# The same numbers on every architecture that Linux added them to after 2019 (include/uapi/asm-generic/unistd.h).
_NR_PIDFD_SEND_SIGNAL = 424
_NR_PIDFD_OPEN = 434
_P_PIDFD = 3  # linux/wait.h; `os.P_PIDFD` is missing from builds against old headers (conda's, for one)

_MAP_SHARED, _MAP_ANONYMOUS = 0x01, 0x20 if sys.platform == "linux" else 0x1000
_PROT_READ_WRITE = 0x3
_F_ADD_SEALS, _F_SEAL_SHRINK, _F_SEAL_GROW = 1033, 0x2, 0x4  # linux/fcntl.h; Python's names come and go with the build
# linux/pidfd.h: _IOWR(0xFF, 11, struct pidfd_info), whose first version has 64 bytes.
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_LONGEST_POLL = 86_400.0  # seconds
_PIDFD_INFO = struct.Struct("QQ11Ii")  # mask, cgroup id, eleven ids, the wait status


class NotOurChild(Exception):
    """The kernel has no status for us: the process is no child of ours, or somebody reaped it already."""


class Fd:
    """An owned file descriptor, closed when its last holder lets go.

    The watch thread, `stop()` and a signal handler use one descriptor at once; whoever holds the object may be sure
    that we do not close the number between its look and its use. Others may: `os.closerange` is a daemon's habit, and
    the number then belongs to a file of theirs. So it is looked at before it is written to or closed.
    """

    __slots__ = ("__weakref__", "_file", "_open", "_owner", "number")

    def __init__(self, number: int) -> None:
        # Out of the way of stdin, stdout and stderr: where those are closed, who writes to "stderr" would write here.
        if number <= 2:
            moved = fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
            os.close(number)
            number = moved
        self.number = number
        self._open = [number]
        self._owner = os.getpid()
        self._file = _identity(number)

    def fileno(self) -> int:
        return self.number

    @property
    def intact(self) -> bool:
        """Whether the number still stands for our file, as far as the kernel can tell files apart."""
        try:
            return self.number >= 0 and _identity(self.number) == self._file
        except OSError:
            return False

    def close(self) -> None:
        """Idempotent, also when two threads do it at once."""
        try:
            number = self._open.pop()  # one of them gets it
        except IndexError:
            return
        # A forked copy leaves the number alone: it is open there until the copy's end, and does no harm.
        if self._owner == os.getpid() and self.intact:
            os.close(number)
        self.number = -1

    def __del__(self) -> None:
        try:
            self.close()
        except Exception:
            pass  # the interpreter is going away, and its modules with it


def _identity(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_dev, status.st_ino


def _syscall(number: int, *arguments: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    result: int = libc.syscall(*(ctypes.c_long(argument) for argument in (number, *arguments)))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def pidfd_open(pid: int) -> Fd | None:
    """A pidfd on `pid`, or None where the system has none to give (old kernel, seccomp, no descriptor left).

    Raises ProcessLookupError if no such process exists.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        if hasattr(os, "pidfd_open"):
            return Fd(os.pidfd_open(pid, 0))
        number = _syscall(_NR_PIDFD_OPEN, pid, 0)
        os.set_inheritable(number, False)
        return Fd(number)
    except ProcessLookupError:
        raise
    except OSError:
        return None


def pidfd_send_signal(pidfd: Fd, number: int) -> bool:
    """Signal exactly the process behind `pidfd`; False if it is gone. Raises OSError for any other refusal."""
    try:
        if hasattr(signal, "pidfd_send_signal"):
            signal.pidfd_send_signal(pidfd.number, number)
        else:
            _syscall(_NR_PIDFD_SEND_SIGNAL, pidfd.number, number, 0, 0)
    except ProcessLookupError:
        return False
    return True


def wait_readable(fds: tuple[Fd, ...], timeout: float) -> bool:
    """Sleep until one of `fds` has an event (True), or `timeout` seconds have passed (False).

    It does not say what happened: the caller looks at the process itself. A descriptor that somebody closed is passed
    over. `select.poll`, since `select.select` fails for descriptors above 1023.
    """
    poller = select.poll()
    for fd in fds:
        if fd.number >= 0:
            poller.register(fd.number, select.POLLIN)
    deadline = time.monotonic() + timeout
    while True:
        # One millisecond up, so that a caller that loops towards a deadline does not spin through its last one.
        left = max(0.0, deadline - time.monotonic())
        # poll takes a C int of milliseconds; a caller that waits longer than a day comes back.
        events = poller.poll(int(min(left, _LONGEST_POLL) * 1000) + 1)
        closed = [number for number, event in events if event & select.POLLNVAL]
        if len(closed) < len(events):
            return True
        if not events:
            return False
        for number in closed:
            poller.unregister(number)


def is_readable(fd: Fd) -> bool:
    """True if `fd` has data or, for a pidfd, the process behind it is dead; False also for one closed by others."""
    poller = select.poll()
    poller.register(fd.number, select.POLLIN)
    return any(event & select.POLLIN for _, event in poller.poll(0))


def peek_status(pidfd: Fd | None, pid: int) -> Exited | Signalled | None:
    """How our child ended, without reaping it; None while it runs.

    WNOWAIT leaves the status to its owner (trio's `_subprocess_platform/waitid.py` does the same). Raises NotOurChild
    if the kernel has nothing for us, and OSError if `pidfd` is no pidfd any more.
    """
    options = os.WEXITED | os.WNOWAIT | os.WNOHANG
    try:
        if pidfd is None:
            result = os.waitid(os.P_PID, pid, options)
        else:
            result = os.waitid(_P_PIDFD, pidfd.number, options)
    except ChildProcessError:
        raise NotOurChild from None
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return Exited(result.si_status)
    return Signalled(result.si_status, core_dumped=result.si_code == os.CLD_DUMPED)


def reap(pidfd: Fd | None, pid: int) -> None:
    """Let go of our dead child; nothing happens if it runs, or is no child of ours."""
    try:
        if pidfd is None:
            os.waitpid(pid, os.WNOHANG)
        else:
            os.waitid(_P_PIDFD, pidfd.number, os.WEXITED | os.WNOHANG)
    except ChildProcessError:
        pass


def decode_wait_status(status: int) -> Exited | Signalled:
    """The integer of wait(2) as a value."""
    if os.WIFSIGNALED(status):
        return Signalled(os.WTERMSIG(status), core_dumped=os.WCOREDUMP(status))
    return Exited(os.WEXITSTATUS(status))


def recall_status(pidfd: Fd) -> Exited | Signalled | None:
    """What the kernel remembers of a process that somebody else reaped; None before the reaping, or before Linux 6.15.

    ioctl PIDFD_GET_INFO, see pidfd.h. It answers only once the process was reaped, up to some milliseconds after its
    death.
    """
    buffer = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
    try:
        fcntl.ioctl(pidfd.number, _PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    mask, *_, status = _PIDFD_INFO.unpack(buffer)
    return decode_wait_status(status) if mask & _PIDFD_INFO_EXIT else None


class Stat(NamedTuple):
    """What we use of /proc/<pid>/stat (see proc(5)).

    State letter, parent's pid, start time in clock ticks since boot, wait status.
    """

    state: str
    parent: int
    start_time: int
    wait_status: int


def read_stat(pid: int) -> Stat | None:
    """None if there is no such process, no /proc, or a line in it that makes no sense (fields zeroed, cut short)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
        # The command's name stands in parentheses and may hold anything, spaces and parentheses too.
        fields = line[line.rindex(b")") + 2 :].split()
        return Stat(fields[0].decode("ascii"), int(fields[1]), int(fields[19]), int(fields[49]))
    except (OSError, ValueError, IndexError):
        return None


def is_zombie(pid: int, stat: Stat) -> bool:
    """True if `stat` is a dead process's. A leader that ended before its other threads looks like one and is not."""
    if stat.state not in "ZX":
        return False
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    except OSError:
        return True


def zombie_status(pid: int, start_time: int | None) -> Exited | Signalled | None:
    """How a process ended that is dead and not reaped yet, for any process of the same user.

    The kernel shows a zero where we may not look (a process that changed its user), so a zero counts only where the
    entry is ours.
    """
    stat = read_stat(pid)
    if stat is None or (start_time is not None and stat.start_time != start_time) or not is_zombie(pid, stat):
        return None
    try:
        if stat.wait_status == 0 and os.stat(f"/proc/{pid}").st_uid != os.geteuid():
            return None
    except OSError:
        return None
    return decode_wait_status(stat.wait_status)


def exists(pid: int, start_time: int | None) -> bool:
    """True if the process that had `pid` and `start_time` is there and no zombie.

    Where /proc tells nothing, the pid alone must do: "unknown identity" is not "dead".
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError as error:
        if error.errno != errno.EPERM:
            raise
    stat = read_stat(pid)
    if stat is None:
        return True
    if start_time is not None and stat.start_time != start_time and stat.start_time != 0:
        return False
    return not is_zombie(pid, stat)


def kill_session(leader: int) -> None:
    """SIGKILL to every process of the session that `leader` leads, but for the leader itself and the caller."""
    try:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
    except OSError:
        return
    for pid in pids:
        if pid in (leader, os.getpid()) or not _in_session(pid, leader):
            continue
        try:
            pidfd = pidfd_open(pid)
            # Looked at again behind the pidfd: the pid may have become another's in between.
            if pidfd is not None and _in_session(pid, leader):
                pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            pass  # gone, or not ours to signal


def _in_session(pid: int, session: int) -> bool:
    try:
        # Not from /proc: to read about all processes of a machine takes longer than an abort may.
        return os.getsid(pid) == session
    except OSError:
        return False


def start_time(pid: int) -> int | None:
    """In clock ticks since boot, None where it cannot be told. With the pid it names one process and no later one."""
    stat = read_stat(pid)
    return stat.start_time if stat is not None and stat.start_time != 0 else None


class SharedMemory:
    """Memory that this process shares with a child, `size` bytes, zeroed.

    Python's mmap keeps a descriptor of its own, which cannot be told apart or moved away (up to Python 3.12), so the
    mapping is made by hand. It lives as long as the object. `memfd` goes to children that are not forked; where the
    system has none to give it is None, and only forked ones share the memory.
    """

    def __init__(self, name: str, size: int, number: int | None = None) -> None:
        self.memfd = _memfd(name, size) if number is None else Fd(number)
        flags = _MAP_SHARED | (_MAP_ANONYMOUS if self.memfd is None else 0)
        fd = -1 if self.memfd is None else self.memfd.number
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
        libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self._unmap = libc.munmap
        self._size = size
        self._address = libc.mmap(None, size, _PROT_READ_WRITE, flags, fd, 0)
        if self._address in (None, ctypes.c_void_p(-1).value):
            self._address = None
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self.bytes = memoryview((ctypes.c_char * size).from_address(self._address)).cast("B")
        if number is not None:
            self.memfd = None  # the child has no further use for it

    def __del__(self) -> None:
        address, self._address = getattr(self, "_address", None), None
        if address is not None:
            del self.bytes
            self._unmap(address, self._size)


def _memfd(name: str, size: int) -> Fd | None:
    try:
        if not hasattr(os, "memfd_create"):
            import tempfile  # here, since it brings a good deal with it

            # A file without a name serves as well, only that nobody can tell by it who owns the server.
            with tempfile.TemporaryFile() as file:
                fd = Fd(fcntl.fcntl(file.fileno(), fcntl.F_DUPFD_CLOEXEC, 3))
            os.ftruncate(fd.number, size)
            return fd
        fd = Fd(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.ftruncate(fd.number, size)
        # Whoever writes to its number by mistake writes behind the page, which may not grow, and not into it.
        os.lseek(fd.number, size, os.SEEK_SET)
        fcntl.fcntl(fd.number, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW)
    except OSError:
        return None
    return fd


def server_memfd(name: str) -> str:
    """What the memory is called that an owner shares with the server `name`: by it other processes see the owner."""
    return "sidecar-watchdog:" + name.encode("utf-8", "replace")[:150].decode("utf-8", "ignore")


def holds_memfd(pid: int, name: str) -> bool:
    """Whether process `pid` has a descriptor of a memfd called `name`; False where that cannot be seen."""
    wanted = f"/memfd:{name} (deleted)"
    folder = f"/proc/{pid}/fd"
    with suppress(OSError):
        for number in os.listdir(folder):
            with suppress(OSError):  # closed meanwhile
                if os.readlink(f"{folder}/{number}") == wanted:
                    return True
    return False
