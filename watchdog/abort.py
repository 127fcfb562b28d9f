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
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from functools import partial
from operator import methodcaller
from types import FrameType
from typing import Any, Callable, NoReturn

from watchdog.death import Death
from watchdog.errors import ServerDied
from watchdog.handles import ProcessHandle
from watchdog.torchelastic import write_error_file

__all__ = [
    "abort",
    "arm_dead_man",
    "before_leaving",
    "exit_now",
    "follow",
    "interrupt",
    "leave",
    "notify",
    "report",
    "run_bounded",
    "terminate_self",
]

logger = logging.getLogger("watchdog.process")

_DEAD_MAN = 1.9  # seconds from the decision to the exit at the very latest
_ERROR_FILE_BOUND = 0.3  # seconds; its folder may be on a network
_LOGGING_BOUND = 1.0  # seconds for the log record
_FLUSHING_BOUND = 1.5  # seconds for log record and flushing together
_LAST_ACTS_BOUND = 0.4  # seconds
_TERM_GRACE = 3.0  # seconds
_LOG_PATIENCE = 0.5  # seconds to wait for a slow reader of a handler's stream
_RAW_PATIENCE = 0.1  # seconds to wait for a slow reader of fd 2
# faulthandler writes a dump before it leaves. On fd 2 that could block in a full pipe; on a number that no descriptor
# can have, the write fails at once and is ignored.
_NOWHERE = 2**31 - 1

# The death whose report has gone out, so that `abort` after `report` does not say it twice.
_reported: Death | None = None
_last_acts: list[Callable[[], object]] = []
_leaving = threading.Lock()
_dead_man_armed = False


def abort(death: Death) -> NoReturn:
    """Report `death` and end this process with code 1, within 2 seconds whatever happens.

    First the error file that torchrun named, if any; then one ERROR record on the logger `watchdog.process` with the
    event in `extra`, and a raw line on fd 2 if logging failed; then stdout, stderr and the log handlers are flushed.

    No clean-up of the interpreter runs: no `finally`, no `atexit`. But what waits for the dead server would wait for
    ever: servers that this process launched get SIGTERM and, 0.3 s later, SIGKILL; and if it leads its session, as
    torchrun's ranks do, every other process of that session gets SIGKILL.
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

    It takes faulthandler's only timer, which a user may have armed: this process has no further use for it. A second
    call does not prolong it.
    """
    global _dead_man_armed
    if _dead_man_armed:
        return
    _dead_man_armed = True
    with suppress(Exception):
        faulthandler.dump_traceback_later(_DEAD_MAN, exit=True, file=_NOWHERE)


def follow(handle: ProcessHandle, check_interval: float, end: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread that calls `end` once the process behind `handle` is dead.

    It needs the GIL now and then: a process whose C code holds it follows later. Every `check_interval` seconds the
    process is looked at anew, in case that descriptors were closed under us.
    """

    def run() -> None:
        while not handle.is_dead():
            with suppress(Exception):  # a look that fails is no death; the next one comes
                handle.wait(check_interval)
        end()

    thread = threading.Thread(target=run, name=f"watchdog-follows-{handle.pid}", daemon=True)
    thread.start()
    return thread


def exit_now(exit_code: int) -> NoReturn:
    """End this process with `exit_code`; stdout, stderr and the log handlers are flushed first, for 1 s at most."""
    try:
        _flush(time.monotonic() + _LOGGING_BOUND)
    finally:
        os._exit(exit_code)


def terminate_self() -> NoReturn:
    """SIGTERM to this process, whose handler gets 3 seconds; then SIGKILL."""
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_TERM_GRACE)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)


def interrupt(death: Death) -> None:
    """Raise `ServerDied`, with `death`, in the main thread at its next bytecode.

    A main thread that is blocked in C sees it when that call returns. For interactive sessions and tests. Nothing is
    raised while IPython waits for its next line: it would be IPython that fails.
    """
    main = threading.main_thread().ident or 0
    if "IPython" in sys.modules and not _runs_a_cell(sys._current_frames().get(main)):
        return
    # The interpreter takes a class and calls it without arguments.
    error = type("ServerDied", (ServerDied,), {"__init__": lambda self: ServerDied.__init__(self, death)})
    error.__module__ = ServerDied.__module__
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(error))


def _runs_a_cell(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "run_code" and frame.f_globals.get("__name__") == "IPython.core.interactiveshell":
            return True
        frame = frame.f_back
    # A script that merely imports IPython runs all the time.
    get_ipython = getattr(sys.modules["IPython"], "get_ipython", None)
    return get_ipython is None or get_ipython() is None


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
            run_bounded([lambda: logger.log(level, text)], _LOGGING_BOUND, inline=False)


def run_bounded(steps: Iterable[Callable[[], object]], seconds: float, *, inline: bool = True) -> bool:
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


def _say(text: str, death: Death) -> None:
    delivery = _Delivery(text, death)
    # The record is made there too, so that a user's record factory that blocks is bounded with the rest.
    in_time = run_bounded([delivery.log], _LOGGING_BOUND)
    if not (in_time and delivery.arrived):
        run_bounded([lambda: _write_raw(text)], 2 * _RAW_PATIENCE)


class _Delivery:
    """One ERROR record on its way through the logger, and what became of it.

    The record goes the logger's own way, as tools that patch `Logger` expect. To learn what logging keeps to itself,
    the handlers on that way get a `handle` and a `handleError` of ours for the time being; other records that come by
    meanwhile are passed on.
    """

    def __init__(self, text: str, death: Death) -> None:
        self.failed = False
        self._takers: list[logging.Handler] = []
        self._text = text
        self._event = death.as_dict()

    @property
    def arrived(self) -> bool:
        return bool(self._takers) and not self.failed

    def log(self) -> None:
        if not logger.isEnabledFor(logging.ERROR):
            return
        extra = {"event": self._event}
        record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, self._text, (), None, "abort", extra)
        with ExitStack() as restored:
            for handler in _handlers():
                restored.callback(self._listen_to(handler))
            try:
                logger.handle(record)
            except Exception:
                self.failed = True
        if not all(_drained(handler) for handler in self._takers):
            self.failed = True

    def _listen_to(self, handler: logging.Handler) -> Callable[[], None]:
        """Returns what puts the handler back to what it was."""
        attributes, names = vars(handler), ("handle", "handleError")
        before = {name: attributes[name] for name in names if name in attributes}
        handle, handle_error = handler.handle, handler.handleError

        def listening_handle(record: logging.LogRecord) -> Any:
            if not self._is_ours(record):
                return handle(record)
            if _would_block(handler, _LOG_PATIENCE):
                self.failed = True
                return False
            result = handle(record)
            # False if a filter dropped it; a `handle` of somebody's own may well return nothing.
            if (result is None or bool(result)) and not isinstance(handler, logging.NullHandler):
                self._takers.append(handler)
            return result

        def listening_handle_error(record: logging.LogRecord) -> None:
            if self._is_ours(record):
                self.failed = True
            else:
                handle_error(record)

        def restore() -> None:
            for name in names:
                attributes.pop(name, None)
            attributes.update(before)

        attributes.update(handle=listening_handle, handleError=listening_handle_error)
        return restore

    def _is_ours(self, record: logging.LogRecord) -> bool:
        return getattr(record, "event", None) is self._event  # a filter may have replaced the record by its copy


def _drained(handler: logging.Handler) -> bool:
    """For a handler that puts its records into a queue: whether they came out at the other end within its bound.

    Only `queue.Queue` tells when its listener is done with a record. Of others one cannot know.
    """
    module = sys.modules.get("logging.handlers")
    if module is None or not isinstance(handler, module.QueueHandler):
        return True
    deadline = time.monotonic() + _LOG_PATIENCE
    while getattr(handler.queue, "unfinished_tasks", 1) > 0:
        if time.monotonic() > deadline or not hasattr(handler.queue, "unfinished_tasks"):
            return False
        time.sleep(0.001)
    return True


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

    things = [thing for thing in (sys.stdout, sys.stderr, *handlers) if thing is not None]
    # `methodcaller` looks `flush` up as late as this: what is no stream raises where it is contained.
    flush = methodcaller("flush")
    run_bounded([partial(flush, thing) for thing in things], deadline - time.monotonic())


def _rank() -> str:
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        value = os.environ.get(variable, "").strip()
        if value.isdigit():
            return f"rank {value}"
    # A launcher that tells only the local rank; without any launcher there is one rank.
    value = os.environ.get("LOCAL_RANK", "").strip()
    return f"local rank {value}" if value.isdigit() else "rank 0"
