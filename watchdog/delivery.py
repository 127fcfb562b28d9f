"""How a report reaches the log, or file descriptor 2 where logging has failed."""

from __future__ import annotations

import logging
import os
import select
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from operator import methodcaller
from typing import Any, Callable

from watchdog.bounded import run_bounded
from watchdog.death import Death

__all__ = ["LOGGING_BOUND", "RAW_BOUND", "Delivery", "flushes", "notify", "write_raw"]

logger = logging.getLogger("watchdog.process")

LOGGING_BOUND = 1.0  # seconds; logging that is not back by then has failed
_LOG_PATIENCE = 0.5  # seconds to wait for a slow reader of a handler's stream
_RAW_PATIENCE = 0.1  # seconds to wait for a slow reader of fd 2
RAW_BOUND = 2 * _RAW_PATIENCE


def notify(level: int, text: str) -> None:
    """Log a line of less weight, or drop it where it would block.

    A thread stuck in a full stderr holds its handler's lock, and `logging.shutdown` wants that lock at exit: a line is
    not worth a rank that cannot end.
    """
    with suppress(Exception):
        if logger.isEnabledFor(level) and not any(_would_block(handler, 0) for handler in _handlers()):
            run_bounded([lambda: logger.log(level, text)], LOGGING_BOUND, inline=False)


class Delivery:
    """One ERROR record on its way through the logger, and what became of it.

    The record goes the logger's own way, as tools that patch `Logger` expect. To learn what logging keeps to itself,
    the handlers on that way get a `handle` and a `handleError` of ours for the time being; other records that come by
    meanwhile are passed on.
    """

    def __init__(self, text: str, death: Death) -> None:
        self.failed = False
        self._back = False
        self._takers: list[logging.Handler] = []
        self._text = text
        self._event = death.as_dict()

    def make_sure(self) -> None:
        """After `log`: if no handler has taken the record, or one failed, or it is not back yet, write to fd 2."""
        if not (self._back and self._takers) or self.failed:
            write_raw(self._text)

    def log(self) -> None:
        """Hand the record to the logger; returns once the handlers are done with it."""
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
        self._back = True

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


def write_raw(text: str) -> None:
    """Write to fd 2 as much as goes without blocking. Its O_NONBLOCK is not ours to set: others share the file."""
    data = text.encode("utf-8", "backslashreplace") + b"\n"
    while data and _writable(2, _RAW_PATIENCE):
        data = data[os.write(2, data[:4096]) :]


def flushes() -> list[Callable[[], object]]:
    """Flush stdout, stderr and every log handler, each in a step of its own."""
    # Those of the whole process: a user's MemoryHandler may hang on any logger.
    handlers = [reference() for reference in list(getattr(logging, "_handlerList", ()))]
    things = [thing for thing in (sys.stdout, sys.stderr, *handlers) if thing is not None]
    # `methodcaller` looks `flush` up as late as the step is run: what is no stream raises where it is contained.
    flush = methodcaller("flush")
    return [partial(flush, thing) for thing in things]
