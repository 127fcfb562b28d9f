"""The rank waits for its server: launch it once, watch it, leave when it dies.

The idea (keep the exact handle, poll it on a daemon thread, leave by `os._exit` so that the launcher tears the job
down, disarm through atexit) was first written down in TorchEasyRec's sampler watchdog,
https://github.com/alibaba/TorchEasyRec/pull/554.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Callable, Optional, Union

from watchdog import rank
from watchdog.abort import abort, interrupt
from watchdog.arguments import callback, exit_codes, natural, printable, seconds, start_context
from watchdog.bounded import uninterrupted
from watchdog.death import Death, exitcode
from watchdog.delivery import notify
from watchdog.handles import ProcessHandle, is_forked, open_handle
from watchdog.record import Record, StopEvent
from watchdog.server import Call, serve
from watchdog.torchelastic import ERROR_FILE
from watchdog.watching import STOP_TIMEOUT, Settings, Watch, install_hooks, ours, starting, stop_servers

__all__ = ["ProcessWatchdog"]

Process = multiprocessing.process.BaseProcess
Start = Callable[[Record, Callable[[Any], None]], None]
Argument = Union[str, bytes, "os.PathLike[str]", "os.PathLike[bytes]"]


class ProcessWatchdog:
    """Watches one server process, and ends this process with code 1 if the server dies.

    The watching is done on a daemon thread, woken by the kernel at the death of the server. At a normal end of this
    process (return, `sys.exit`, exception) the watchdog disarms itself first and then stops a server that it launched.

    `name` stands in reports and log lines. `poll_interval` (seconds) is how often handles are polled that offer nothing
    better. An end with one of `expected_exit_codes` never aborts: one INFO line, and a WARNING if this process still
    runs, armed, `signal_grace` seconds later; `()` makes every end abnormal. `on_death` is what happens once the report
    of an abnormal death is logged: None means `watchdog.abort.abort`, or `watchdog.abort.interrupt` in an interactive
    session; a callable gets the `Death` once, on the watch thread, in place of the abort, and if it raises the abort
    follows. An end by SIGTERM, SIGINT or SIGHUP (or with the codes 129, 130, 143) is acted on `signal_grace` seconds
    later, unless the watchdog was disarmed by then: a signal meant for the job may reach the server first.

    Forked, pickled and deep-copied copies of the object are inert. Raises ValueError or TypeError for bad arguments.
    Alive is not well: a server that hangs, or is stopped, is none of its business.
    """

    def __init__(
        self,
        name: str = "server",
        *,
        poll_interval: float = 1.0,
        expected_exit_codes: Iterable[int] = (0,),
        on_death: Optional[Callable[[Death], object]] = None,
        signal_grace: float = 5.0,
    ) -> None:
        self.name = printable("name", name)
        self._on_death = callback("on_death", on_death)
        self._settings = Settings(
            poll_interval=seconds("poll_interval", poll_interval, zero=False),
            expected_exit_codes=exit_codes("expected_exit_codes", expected_exit_codes),
            on_death=abort if on_death is None else on_death,
            signal_grace=seconds("signal_grace", signal_grace),
        )
        self._reset(os.getpid())

    def _reset(self, owner: int | None) -> None:
        self._owner = owner  # the pid in which the object does something; None: nowhere
        # Re-entrant, so that a signal handler that launches while its thread does gets an error, not a deadlock.
        self._lock = threading.RLock()
        self._starting: StopEvent | None = None
        self._watch: Watch | None = None
        self._process: Any = None
        self._what: object = None
        self._warned = False  # that another target was asked for

    def launch(
        self,
        target: Callable[..., object],
        args: Iterable[Any] = (),
        kwargs: Optional[Mapping[str, Any]] = None,
        *,
        context: Any = None,
        local_rank: Optional[int] = 0,
        daemon: bool = True,
    ) -> Optional[Process]:
        """Start `target(*args, **kwargs)` in a process of its own and watch it; returns its Process handle.

        Only where the local rank (`LOCAL_RANK`, else `SLURM_LOCALID`, else `OMPI_COMM_WORLD_LOCAL_RANK`, else 0) equals
        `local_rank`; None starts it everywhere. Elsewhere, in a copy of the watchdog, and in a child of the process
        that owns a server of this name, nothing starts and None is returned.

        While the server lives, another call returns the same handle and starts nothing. It returns once the process
        exists and does not wait for the target. `context` is a start method's name or a multiprocessing context.
        `terminate()` on the handle is an orderly end and disarms; `kill()` is not and does not.

        Raises ValueError for a bad local rank or start method; TypeError for a target that cannot be called and for
        arguments of a wrong type; RuntimeError in a daemonic process, under a name that another watchdog's living
        server has, while something else is watched, under green threads (gevent, eventlet), from within `launch`, and
        in the server itself, if the main script lacks its guard; and whatever the start method raises. Nothing is left
        running then. After `disarm()` a living server comes back as it is, disarmed.
        """
        if not callable(target):
            raise TypeError(f"target must be callable, not {target!r}")
        if isinstance(args, (str, bytes)) or not isinstance(args, Iterable):
            raise TypeError(f"args must be a sequence of arguments, not {args!r}")
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise TypeError(f"kwargs must be a mapping or None, not {kwargs!r}")
        call = Call(target, tuple(args), dict(kwargs or {}))
        context = start_context(context)

        def start(record: Record, hold: Callable[[Process], None]) -> None:
            if getattr(multiprocessing.process.current_process(), "daemon", False):
                raise RuntimeError(f"{self.name}: this process is daemonic, and such a process cannot have children")
            process: Process = context.Process(target=serve, args=(record, call), name=self.name, daemon=daemon)
            ours(process)
            hold(process)
            process.start()

        handle: Optional[Process] = self._launch(start, target, local_rank)
        return handle

    def launch_command(
        self,
        argv: Sequence[Argument],
        *,
        local_rank: Optional[int] = 0,
        env: Optional[Mapping[str, str]] = None,
        cwd: Optional[Union[str, os.PathLike[str]]] = None,
    ) -> Optional[subprocess.Popen[bytes]]:
        """Start the program `argv` and watch it; returns its Popen handle, or None as `launch` does.

        Its stdin is /dev/null; `env` replaces the environment (None: ours), `cwd` the working directory (None: ours).
        Raises what `launch` and `subprocess.Popen` raise: FileNotFoundError for a missing program, for one.
        """
        if isinstance(argv, (str, bytes)) or not isinstance(argv, Sequence):
            raise TypeError(f"argv must be a sequence of strings, not {argv!r}")
        if not argv:
            raise ValueError(f"argv must not be empty: {argv!r}")
        for argument in argv:
            if not isinstance(argument, (str, bytes, os.PathLike)):
                raise TypeError(f"argv must hold strings or paths, not {argument!r}")
        if env is not None and not isinstance(env, Mapping):
            raise TypeError(f"env must be a mapping or None, not {env!r}")

        def start(record: Record, hold: Callable[[Any], None]) -> None:
            # Only now: the mark that keeps a command from launching itself is set by then.
            environment = rank.marked(dict(os.environ if env is None else env))
            # A server that uses torchelastic's @record would write its own failure over that of its rank.
            environment.pop(ERROR_FILE, None)
            command = partial(subprocess.Popen, list(argv), stdin=subprocess.DEVNULL, env=environment, cwd=cwd)
            uninterrupted(lambda: hold(command()))

        handle: Optional[subprocess.Popen[bytes]] = self._launch(start, tuple(argv), local_rank)
        return handle

    def watch(self, process: Any) -> None:
        """Watch a process that somebody else started. It is never signalled by us, only disarmed from.

        `process` is a `multiprocessing.Process`, `subprocess.Popen`, `psutil.Process` or `psutil.Popen`, or any object
        with `is_alive()` and `exitcode` (or `poll()` and `returncode`), which is polled every `poll_interval` seconds.
        One that is dead already is reported at once. Raises RuntimeError while armed, TypeError for a handle with
        neither interface, ValueError for a process that was never started or belongs to another process.
        """
        if self._owner != os.getpid():
            notify(logging.DEBUG, f"{self.name}: a copy of a watchdog watches nothing")
            return
        rank.refuse_green_threads()
        with self._lock:
            if self._is_busy():
                raise RuntimeError(f"{self.name}: watches {self._process!r} already")
            handle = open_handle(process)
            stop = StopEvent(Record(""))  # without the name: who adopts is no owner
            self._adopt(Watch(self.name, handle, stop, self._settings_now(), launched=False), process, None)

    def disarm(self) -> None:
        """From now on no death aborts. Idempotent; safe from any thread and from a signal handler."""
        if self._owner != os.getpid():
            return
        starting, current = self._starting, self._watch
        if starting is not None:
            starting.set()
        if current is not None:
            current.stop.set()

    def stop(self, timeout: float = STOP_TIMEOUT) -> Optional[int]:
        """Disarm, then end a server that we launched: SIGTERM, `timeout` seconds, SIGKILL.

        Returns its exit code as multiprocessing has it (negative for a signal); None if there is none: nothing was
        launched, the status was taken by somebody else, or the process lives (an adopted one is only disarmed from; one
        that is uninterruptible in the kernel is named in a WARNING). Safe from any thread and from a signal handler.
        """
        timeout = seconds("timeout", timeout)
        if self._owner != os.getpid():
            return None
        self.disarm()
        starting, current = self._starting, self._watch
        if starting is not None:
            starting.record.break_off()
        if current is None:
            return None
        if current.launched and not current.over:
            current.stop.record.break_off()
            stop_servers([current], timeout)
            rank.unmark_owner(self.name)
        try:
            status = current.handle.poll()
        except Exception:
            return None  # a handle of somebody's own that cannot tell
        return None if status is None else exitcode(status)

    def __enter__(self) -> ProcessWatchdog:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def process(self) -> Any:
        """The handle that is watched, or was last; None if there is none."""
        return self._process

    @property
    def armed(self) -> bool:
        """True while a death would be acted on."""
        current = self._watch
        return current is not None and self._owner == os.getpid() and current.armed

    @property
    def death(self) -> Optional[Death]:
        """How the server ended, as far as that was seen while armed; None if it lives."""
        return None if self._watch is None else self._watch.death

    def __getstate__(self) -> dict[str, Any]:
        # Locks, threads and descriptors stay behind, and so does a callback, which may not be picklable.
        state = {name: value for name, value in vars(self).items() if name not in _OWN}
        state["_settings"] = self._settings._replace(on_death=abort)
        state["_on_death"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset(None)  # inert; `__init__`, which a subclass may have made to launch, is not called

    def _launch(self, start: Start, what: object, local_rank: Optional[int]) -> Any:
        own_rank = rank.local_rank()
        if local_rank is not None and natural("local_rank", local_rank) != own_rank:
            return None
        if self._owner != os.getpid():
            notify(logging.DEBUG, f"{self.name}: not launched: this is a copy of the watchdog that may")
            return None
        above = rank.owner_above(self.name)
        if above is not None:
            rank.refuse_missing_main_guard(self.name)
            notify(logging.DEBUG, f"{self.name}: not launched: {above}")
            return None
        rank.refuse_green_threads()
        with self._lock:
            if self._starting is not None:
                raise RuntimeError(f"{self.name}: launch was called from within launch")
            if self._is_busy():
                return self._living(what)
            self._starting = StopEvent(Record(self.name))
            try:
                return self._start(start, self._starting, what)
            finally:
                self._starting = None

    def _is_busy(self) -> bool:
        """Whether a server that we launched lives, or an adopted one is watched."""
        current = self._watch
        return current is not None and current.lives and (current.launched or current.armed)

    def _living(self, what: object) -> Any:
        if self._watch is None or not self._watch.launched:
            raise RuntimeError(f"{self.name}: watches {self._process!r} already")
        if not _same(what, self._what) and not self._warned:
            self._warned = True
            living = f"{_shown(self._what)} (pid {self._process.pid})"
            notify(logging.WARNING, f"{self.name}: {_shown(what)} is not launched, since {living} lives")
        return self._process

    def _start(self, start: Start, stop: StopEvent, what: object) -> Any:
        if self._watch is not None:
            self._watch.stop.set()  # a former server's: no word about its end any more
        held: list[Any] = []
        with starting(self.name):
            try:
                install_hooks()
                rank.mark_owner(self.name)
                start(stop.record, held.append)
                (process,) = held
                # Nothing of ours runs in a command, and only a forked server sees a page that has no file.
                speaks = isinstance(process, Process) and (stop.record.shared or is_forked(process))
                record = stop.record if speaks else None
                new = Watch(self.name, open_handle(process), stop, self._settings_now(), launched=True, record=record)
                _disarm_on_terminate(process, stop)
                self._adopt(new, process, what)
            except BaseException:
                # Not in a forked server itself: what its end raises (os._exit with a code that no C int holds) would
                # come by here, in its copy of this frame.
                if os.getpid() == self._owner:
                    stop.set()  # the watch thread may run already
                    _break_off(stop.record, held)
                    rank.unmark_owner(self.name)
                raise
        if stop.record.broken_off:
            stop_servers([new], STOP_TIMEOUT)  # stop() was called, in a signal handler, while we started
        return process

    def _adopt(self, new: Watch, process: Any, what: object) -> None:
        new.start()
        self._watch, self._process, self._what, self._warned = new, process, what, False

    def _settings_now(self) -> Settings:
        if self._on_death is None and (hasattr(sys, "ps1") or sys.flags.interactive):
            return self._settings._replace(on_death=interrupt)  # a session is not ended under its user's hands
        return self._settings


# What a copy of a watchdog does not get.
_OWN = ("_owner", "_lock", "_starting", "_watch", "_process", "_what", "_warned")


def _same(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except Exception:
        return one is other  # arrays and their like have their own ideas


def _shown(what: object) -> str:
    try:
        return repr(what)
    except Exception:
        return object.__repr__(what)


def _disarm_on_terminate(process: Any, stop: StopEvent) -> None:
    """Make `terminate()` on the handle an orderly end, and a forked copy of the handle harmless.

    On the object, since multiprocessing pickles the class by its name. Weakly, since what a cycle holds (descriptors
    among it) lives until the garbage collector comes by, which training loops like to switch off.
    """
    reference, owner = weakref.ref(process), os.getpid()

    def terminate() -> None:
        process = reference()
        if process is not None and os.getpid() == owner:
            stop.set()
            stop.record.break_off()
            type(process).terminate(process)

    process.terminate = terminate


def _break_off(record: Record, held: list[Any]) -> None:
    """Leave nothing running of a launch that failed half-way."""
    # A child that we have no pid of (a signal handler raised between its start and our next line) reads this before it
    # enters its target, and has written its pid before it reads.
    record.break_off()
    process = held[0] if held else None
    pid = getattr(process, "pid", None)
    if pid is None:
        process, pid = None, record.pid
    if pid is not None:
        handle = ProcessHandle(process, pid)
        handle.send_signal(signal.SIGKILL)
        handle.wait(2.0)
        handle.reap()
