"""The page of memory that a rank and its server share, and the stop Event that lives in it.

It carries what the server says of itself before and after its target runs (its pid, how far it came, its last
traceback), so that the rank can still read it once the server is dead. It survives a server that closes all its
descriptors, and nothing in it is a lock.
"""

from __future__ import annotations

import os
import struct
import time
from contextlib import suppress
from typing import Any

from watchdog import linux

__all__ = ["Record", "StopEvent"]

_SIZE = 64 * 1024  # bytes; untouched pages cost nothing
_DISARMED, _ENTERED, _BROKEN_OFF = 0, 1, 2  # one byte each
_IDENTITY = struct.Struct("=II")  # the server's pid and session id, written by itself
_IDENTITY_AT = 8
_OWNER = struct.Struct("=qI")  # the rank's start time in clock ticks (-1: unknown) and pid, written by the rank
_OWNER_AT = 24
_LENGTH = struct.Struct("=I")
_LENGTH_AT = 16
_TEXT_AT = 64
_TEXT_SIZE = _SIZE - _TEXT_AT


class Record:
    """One server's page. Made by the rank; a spawned server gets it by pickling, a forked one by inheritance."""

    def __init__(self, name: str) -> None:
        self._memory = linux.SharedMemory(linux.server_memfd(name), _SIZE)
        start_time = linux.start_time(os.getpid())
        _OWNER.pack_into(self._map, _OWNER_AT, -1 if start_time is None else start_time, os.getpid())

    def __getstate__(self) -> Any:
        if self._memory.memfd is None:
            return ()  # not None, for which pickle would call no __setstate__
        from multiprocessing.reduction import DupFd

        return DupFd(self._memory.memfd.number)

    def __setstate__(self, state: Any) -> None:
        self._memory = linux.SharedMemory("", _SIZE, None if state == () else state.detach())

    def retire(self) -> None:
        """The server is gone: from now on this process does not look like its owner."""
        memfd = self._memory.memfd
        if memfd is not None:
            memfd.close()

    @property
    def _map(self) -> memoryview:
        return self._memory.bytes

    @property
    def shared(self) -> bool:
        """Whether a server that is not forked can see it."""
        return self._memory.memfd is not None

    def disarm(self) -> None:
        self._map[_DISARMED] = 1

    @property
    def disarmed(self) -> bool:
        return self._map[_DISARMED] != 0

    def break_off(self) -> None:
        """A server that has not entered its target yet is to end; disarming alone leaves it running."""
        self._map[_BROKEN_OFF] = 1

    @property
    def broken_off(self) -> bool:
        return self._map[_BROKEN_OFF] != 0

    def enter(self) -> None:
        """Written by the server when its target is about to run."""
        self._map[_ENTERED] = 1

    @property
    def entered(self) -> bool:
        return self._map[_ENTERED] != 0

    def identify(self) -> None:
        """Written by the server as its first act."""
        _IDENTITY.pack_into(self._map, _IDENTITY_AT, os.getpid(), os.getsid(0))

    @property
    def pid(self) -> int | None:
        """The server's own pid; None as long as it has not run a line of ours."""
        pid: int = _IDENTITY.unpack_from(self._map, _IDENTITY_AT)[0]
        return pid or None

    @property
    def owner(self) -> tuple[int, int | None]:
        """The rank's pid (0: nobody told), and its start time as `linux.start_time` has it."""
        start_time, pid = _OWNER.unpack_from(self._map, _OWNER_AT)
        return pid, None if start_time < 0 else start_time

    def write_traceback(self, text: str) -> None:
        """Keep `text`; of a very long one the beginning and the end."""
        data = text.encode("utf-8", "backslashreplace")
        if len(data) > _TEXT_SIZE:
            half = _TEXT_SIZE // 2 - 16
            data = data[:half] + b"\n  [...]\n" + data[-half:]
        self._map[_TEXT_AT : _TEXT_AT + len(data)] = data
        # The length comes last: a reader sees all of the text or none of it.
        _LENGTH.pack_into(self._map, _LENGTH_AT, len(data))

    @property
    def traceback(self) -> str | None:
        length: int = _LENGTH.unpack_from(self._map, _LENGTH_AT)[0]
        data = bytes(self._map[_TEXT_AT : _TEXT_AT + min(length, _TEXT_SIZE)])
        return data.decode("utf-8", "replace") if data else None


class StopEvent:
    """Says that no death aborts any more, and wakes the watch thread.

    No `threading.Event`: its `set()` takes a lock and can hang in a signal handler that interrupted another `set()`.
    Here it is a plain store and one write that never blocks. A forked copy cannot set it.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self._owner = os.getpid()
        reader, writer = os.pipe()
        self.reader, self._writer = linux.Fd(reader), linux.Fd(writer)
        os.set_blocking(self._writer.number, False)

    def set(self) -> None:
        """Idempotent; safe from any thread and from a signal handler."""
        if os.getpid() != self._owner:
            return
        self.record.disarm()
        # Closed by others: the thread looks at the flag on its next beat. Full: it has its wake-up already.
        if self._writer.intact:
            with suppress(OSError):
                os.write(self._writer.number, b"\0")

    def is_set(self) -> bool:
        return self.record.disarmed

    def wait(self, timeout: float) -> bool:
        """Sleep for `timeout` seconds or until it is set, in slices of a second: others may have closed the pipe."""
        deadline = time.monotonic() + timeout
        while not self.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                break
            linux.wait_readable((self.reader,), min(left, 1.0))
        return self.is_set()
