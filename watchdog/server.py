"""What runs in a launched server before its target: the server's side of a launch."""

from __future__ import annotations

import io
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from typing import Any, Callable

from watchdog.abort import follow, terminate_self
from watchdog.handles import ProcessHandle
from watchdog.record import Record
from watchdog.torchelastic import ERROR_FILE

__all__ = ["Call", "serve"]

_CHECK_INTERVAL = 5.0  # seconds; see `follow`


class Call:
    """A target with its arguments that a spawned server unpickles only once our code runs there.

    So an import error in the target's module, or an attribute that is not there, is caught with its traceback, and
    does not end the interpreter before anybody could keep it.
    """

    def __init__(self, target: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._parts = (target, args, kwargs)

    def __getstate__(self) -> bytes:
        from multiprocessing.reduction import ForkingPickler

        # Called while the start method pickles us, so queues and locks among the arguments are allowed.
        return bytes(ForkingPickler.dumps(self._parts))

    def __setstate__(self, state: bytes) -> None:
        self._pickled = state

    def load(self) -> tuple[Callable[..., object], tuple[Any, ...], dict[str, Any]]:
        if not hasattr(self, "_parts"):
            self._parts = pickle.loads(self._pickled)
            del self._pickled
        return self._parts


def serve(record: Record, call: Call) -> None:
    """Run the target; whatever it raises is kept in `record`, and then goes its normal way."""
    record.identify()
    try:
        _forget_the_rank()
        if record.broken_off:
            terminate_self()  # the launch failed, or stop() was called, between our birth and this line
        # Not for ever behind a dead rank, whatever way that ended: its own clean-up may not have run.
        pid, start_time = record.owner
        if pid != 0:
            follow(ProcessHandle(None, pid, start_time=start_time), _CHECK_INTERVAL, terminate_self)
        target, args, kwargs = call.load()
        record.enter()
        target(*args, **kwargs)
    except KeyboardInterrupt:
        # Ctrl-C reaches rank and server in any order. 130 lets the rank tell it from a crash; multiprocessing's 1 would
        # not.
        raise SystemExit(130) from None
    except SystemExit as error:
        # sys.exit("text") is a failure with code 1 and a message; a number is the target's own choice.
        if isinstance(error.code, int):
            # As the system takes it. os._exit, which ends a forked child, refuses what does not fit into a C int.
            raise SystemExit(error.code & 0xFF) from None
        if error.code is not None:
            _keep(record, error)
        raise
    except BaseException as error:
        _keep(record, error)
        raise


def _keep(record: Record, error: BaseException) -> None:
    trace = error.__traceback__ and error.__traceback__.tb_next  # without our own frame
    record.write_traceback("".join(traceback.format_exception(type(error), error, trace)))


def _forget_the_rank() -> None:
    """Undo what a server inherits from its rank and must not keep."""
    # A server that uses torchelastic's @record would write its own failure over that of its rank.
    os.environ.pop(ERROR_FILE, None)
    # The rank's Python handlers: one that swallows SIGTERM would make the server survive its stop. What the rank
    # ignores stays ignored, as it would across exec.
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    _fresh_streams()


def _fresh_streams() -> None:
    """Give a forked server stdout and stderr whose locks nobody holds.

    Another thread of the rank may have been writing at the moment of the fork. The buffer's lock is then taken for ever
    in the copy, and the server would hang at its first line or at its end. The text layer is set up anew in place,
    so that logging handlers which hold it go on working; what the rank had buffered is the rank's to write.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, detached, on something without a descriptor: then it stays as it is
            if type(stream) is not io.TextIOWrapper or type(stream.buffer) is not io.BufferedWriter:
                continue  # replaced by the user, or unbuffered
            settings = (stream.encoding, stream.errors, "\n", stream.line_buffering, stream.write_through)
            buffer = io.BufferedWriter(io.FileIO(stream.fileno(), "w", closefd=False))
            _abandoned.append(stream.buffer)
            stream.__init__(buffer, *settings)  # type: ignore[misc]


_abandoned: list[object] = []  # closing a buffer takes its lock, so these are never let go
