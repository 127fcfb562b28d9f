"""The only way out: report, then `os._exit` in a `finally`.

The exit never depends on the report. Whatever blocks or raises on the way (a held logging lock, a full stderr pipe, a
handler that never returns) delays it by 2 seconds at most: every step runs in a helper thread with a bound, and a
dead-man switch of faulthandler, which needs neither the GIL nor a lock, leaves with code 1 behind all of them.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Callable, NoReturn

from watchdog.bounded import run_bounded, run_in_turn
from watchdog.death import Death
from watchdog.delivery import LOGGING_BOUND, RAW_BOUND, Delivery, flushes
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
    "report",
    "terminate_self",
]

_DEAD_MAN = 1.9  # seconds from the decision to the exit at the very latest
_ERROR_FILE_BOUND = 0.25  # seconds; its folder may be on a network
_LAST_ACT_BOUND = 0.4  # seconds
_FLUSH_BOUND = 0.1  # seconds for one stream or handler
_TERM_GRACE = 3.0  # seconds
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
            gc.disable()  # in a large heap a collection takes longer than all that is to be done here
            run_in_turn(_steps_out(death, died_at))
        # Only now and then: another thread is on its way out, or has taken over what blocked here.
        time.sleep(_DEAD_MAN)
    finally:
        os._exit(1)


def _steps_out(death: Death, died_at: float) -> Iterator[tuple[Callable[[], object], float]]:
    """What is done before the exit, each with its bound in seconds, and the exit."""
    closing = f"{_rank()} (pid {os.getpid()}) exits with code 1"
    report = f"{death}\n  {closing}"
    delivery = Delivery(closing if death is _reported else report, death)
    yield partial(write_error_file, death, report, died_at), _ERROR_FILE_BOUND
    yield delivery.log, LOGGING_BOUND
    yield delivery.make_sure, RAW_BOUND
    for act in _last_acts:
        yield act, _LAST_ACT_BOUND
    for flush in flushes():
        yield flush, _FLUSH_BOUND
    yield partial(os._exit, 1), _FLUSH_BOUND


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
        while True:
            try:
                if handle.wait(check_interval):
                    break
            except Exception:
                time.sleep(check_interval)  # a look that fails is no death; the next one comes
        end()

    thread = threading.Thread(target=run, name=f"watchdog-follows-{handle.pid}", daemon=True)
    thread.start()
    return thread


def exit_now(exit_code: int) -> NoReturn:
    """End this process with `exit_code`; stdout, stderr and the log handlers are flushed first, for 1 s at most."""
    try:
        run_bounded(flushes(), LOGGING_BOUND)
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
    delivery = Delivery(str(death), death)
    run_bounded([delivery.log], LOGGING_BOUND)
    run_bounded([delivery.make_sure], RAW_BOUND)
    _reported = death


def _rank() -> str:
    for variable in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        value = os.environ.get(variable, "").strip()
        if value.isdigit():
            return f"rank {value}"
    # A launcher that tells only the local rank; without any launcher there is one rank.
    value = os.environ.get("LOCAL_RANK", "").strip()
    return f"local rank {value}" if value.isdigit() else "rank 0"
