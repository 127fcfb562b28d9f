"""The only way out: report, then `os._exit` in a `finally`.

The exit never depends on the report. Whatever blocks or raises on the way (a held logging lock, a full stderr pipe, a
handler that never returns) delays it by 2 seconds at most: every step runs in a helper thread with a bound, and a
dead-man switch of faulthandler, which needs neither the GIL nor a lock, leaves with code 1 behind all of them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Callable, NoReturn

from watchdog.death import Death
from watchdog.errors import ServerDied
from watchdog.torchelastic import write_error_file

__all__ = ["abort", "arm_dead_man", "before_leaving", "interrupt", "leave", "notify", "report", "run_bounded"]

logger = logging.getLogger("watchdog.process")

_DEAD_MAN = 1.9  # seconds from the decision to the exit at the very latest
_ERROR_FILE_BOUND = 0.3  # seconds; its folder may be on a network
_LOGGING_BOUND = 1.0  # seconds for the log record
_FLUSHING_BOUND = 1.5  # seconds for log record and flushing together
_LAST_ACTS_BOUND = 0.4  # seconds
_LOG_PATIENCE = 0.5  # seconds to wait for a slow reader of a handler's stream
_RAW_PATIENCE = 0.1  # seconds to wait for a slow reader of fd 2
# faulthandler writes a dump before it leaves. On fd 2 that could block in a full pipe; on a number that no descriptor
# can have, the write fails at once and is ignored.
_NOWHERE = 2**31 - 1

# The death whose report has gone out, so that `abort` after `report` does not say it twice.
_reported: Death | None = None
_last_acts: list[Callable[[], object]] = []
_leaving = threading.Lock()


def abort(death: Death) -> NoReturn:
    """Report `death` and end this process with code 1, within 2 seconds whatever happens.

    First the error file that torchrun named, if any; then one ERROR record on the logger `watchdog.process` with the
    event in `extra`, and a raw line on fd 2 if logging failed; then stdout, stderr and the log handlers are flushed. No
    clean-up of the interpreter runs: no `finally`, no `atexit`.
    """
    leave(death, time.time())


def leave(death: Death, died_at: float) -> NoReturn:
    """`abort` for a death that happened at `died_at` (seconds since the epoch)."""
    try:
        if _leaving.acquire(blocking=False):
            arm_dead_man()
            deadline = time.monotonic() + _FLUSHING_BOUND
            closing = f"{_rank()} (pid {os.getpid()}) exits with code 1"
            report = f"{death}\n  {closing}"
            run_bounded([lambda: write_error_file(death, report, died_at)], _ERROR_FILE_BOUND)
            _say(closing if death is _reported else report, death)
            _flush(deadline)
            run_bounded(_last_acts, _LAST_ACTS_BOUND)
        else:
            time.sleep(_DEAD_MAN)  # another thread is on its way out, and leaves first
    finally:
        os._exit(1)


def before_leaving(act: Callable[[], object]) -> None:
    """Have `act` run between the report and the exit, for 0.4 s at most. Idempotent."""
    if act not in _last_acts:
        _last_acts.append(act)


def arm_dead_man() -> None:
    """From now on this process ends with code 1 within 1.9 s, even if no Python code runs any more.

    It takes faulthandler's only timer, which a user may have armed: this process has no further use for it.
    """
    with suppress(Exception):
        faulthandler.dump_traceback_later(_DEAD_MAN, exit=True, file=_NOWHERE)


def interrupt(death: Death) -> None:
    """Raise `ServerDied`, with `death`, in the main thread at its next bytecode.

    A main thread that is blocked in C sees it when that call returns. For interactive sessions and tests.
    """
    # The interpreter takes a class and calls it without arguments.
    error = type("ServerDied", (ServerDied,), {"__init__": lambda self: ServerDied.__init__(self, death)})
    error.__module__ = ServerDied.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(threading.main_thread().ident or 0), ctypes.py_object(error)
    )


def report(death: Death) -> None:
    """Log `death` as `abort` does, without leaving: one ERROR record, or raw text on fd 2 if logging failed."""
    global _reported
    _say(str(death), death)
    _reported = death


def notify(level: int, text: str) -> None:
    """Log a line of less weight, or drop it where it would block.

    A thread stuck in a full stderr holds its handler's lock, and `logging.shutdown` wants that lock at exit: a line is
    not worth a rank that cannot end.
    """
    with suppress(Exception):
        if logger.isEnabledFor(level) and not any(_would_block(handler, 0) for handler in _handlers()):
            run_bounded([lambda: logger.log(level, text)], _LOGGING_BOUND)


def run_bounded(steps: Iterable[Callable[[], object]], seconds: float) -> bool:
    """Run each step on a helper thread; True if all were done within `seconds`.

    A step that blocks holds up neither the caller nor the steps behind it; one that raises counts as done. If no thread
    can be started (none left, or the interpreter is ending) the steps run here and now.
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
            work()
            break
        # The last step may use all the time there is; one that blocks before others shares it with them.
        thread.join(max(0.0, deadline - time.monotonic()) / (len(waiting) + 1))
        if not waiting or time.monotonic() > deadline:
            thread.join(max(0.0, deadline - time.monotonic()))
            break
    return len(done) == total


def _say(text: str, death: Death) -> None:
    taken: list[bool] = []
    # The record is made there too, so that a user's record factory that blocks is bounded with the rest.
    in_time = run_bounded([lambda: taken.append(_log(text, death))], _LOGGING_BOUND)
    if not (in_time and taken and taken[0]):
        run_bounded([lambda: _write_raw(text)], 2 * _RAW_PATIENCE)


def _log(text: str, death: Death) -> bool:
    """Hand one record to the handlers as Logger.handle does; True if at least one took it and none failed."""
    if not logger.isEnabledFor(logging.ERROR):
        return False
    extra = {"event": death.as_dict()}
    record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, text, (), None, "abort", extra)
    if not logger.filter(record):
        return False
    taken, failed = False, False
    for handler in _handlers():
        if record.levelno < handler.level or isinstance(handler, logging.NullHandler):
            continue
        if _would_block(handler, _LOG_PATIENCE):
            failed = True
            continue
        try:
            taken = bool(_handle(handler, record)) or taken
        except Exception:
            failed = True
    return taken and not failed


def _handle(handler: logging.Handler, record: logging.LogRecord) -> object:
    """`handler.handle`, but raising what logging hides behind `Handler.handleError`."""
    attributes = vars(handler)
    own = attributes.get("handleError")

    def fail(record: logging.LogRecord) -> None:
        raise

    attributes["handleError"] = fail
    try:
        return handler.handle(record)
    finally:
        if own is None:
            del attributes["handleError"]
        else:
            attributes["handleError"] = own


def _handlers() -> list[logging.Handler]:
    """The handlers a record of ours reaches; logging's last resort where there are none."""
    handlers: list[logging.Handler] = []
    current: logging.Logger | None = logger
    while current is not None:
        handlers += current.handlers
        current = current.parent if current.propagate else None
    return handlers or ([logging.lastResort] if logging.lastResort else [])


def _would_block(handler: logging.Handler, patience: float) -> bool:
    try:
        fd = handler.stream.fileno()  # type: ignore[attr-defined]
    except Exception:
        return False
    return not _writable(fd, patience)


def _writable(fd: int, patience: float) -> bool:
    """Whether `fd` takes 4096 bytes (a pipe that polls writable does), now or within `patience` seconds."""
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return any(event & select.POLLOUT for _, event in poller.poll(int(patience * 1000)))


def _write_raw(text: str) -> None:
    """Write to fd 2 as much as goes without blocking. Its O_NONBLOCK is not ours to set: others share the file."""
    data = text.encode("utf-8", "backslashreplace") + b"\n"
    while data and _writable(2, _RAW_PATIENCE):
        data = data[os.write(2, data[:4096]) :]


def _flush(deadline: float) -> None:
    # Every handler of the process: a user's MemoryHandler may hang on any logger.
    handlers = [reference() for reference in list(getattr(logging, "_handlerList", ()))]
    flushes = [thing.flush for thing in (sys.stdout, sys.stderr, *handlers) if thing is not None]
    run_bounded(flushes, deadline - time.monotonic())


def _rank() -> str:
    return f"rank {(os.environ.get('RANK') or os.environ.get('LOCAL_RANK') or '0').strip()}"
