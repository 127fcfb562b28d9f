"""Real ranks for the tests: a script of its own in a session of its own, with what a user would see of it.

Deadlines here only catch deadlocks; when one passes, the failure shows the rank's output.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Callable

HERE = Path(__file__).resolve().parent
DEADLOCK = 60.0  # seconds after which anything counts as hung

PRELUDE = """\
import logging, multiprocessing, os, signal, subprocess, sys, threading, time
import targets
from watchdog.death import Death
from watchdog.process import ProcessWatchdog

def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

def until(condition, what="condition"):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "still waiting for " + what
        time.sleep(0.002)

def block_in_c():
    "A read that no Python code interrupts, as a client of a dead server has it."
    import socket
    left, right = socket.socketpair()
    left.recv(1)
"""


class Output:
    """Lines of one stream, readable while they come."""

    def __init__(self, stream) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        self._ended = False
        self._thread = threading.Thread(target=self._read, args=(stream,))
        self._thread.start()

    def _read(self, stream) -> None:
        with stream:
            for line in stream:
                with self._changed:
                    self.lines.append(line.decode("utf-8", "backslashreplace").rstrip("\n"))
                    self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def find(self, start: str, timeout: float = DEADLOCK) -> str | None:
        """The rest of the first line that begins with `start`, once it is there; None at the end of the stream."""

        def found() -> bool:
            return self._ended or any(line.startswith(start) for line in self.lines)

        with self._changed:
            assert self._changed.wait_for(found, timeout), f"no line {start!r} in {self.text!r}"
        return next((line[len(start) :].strip() for line in self.lines if line.startswith(start)), None)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


class Rank:
    """A script under test. `server` lines of its output name pids that must be gone in the end."""

    def __init__(
        self, script: Path, argv: list[str], env: dict[str, str], python: str = sys.executable, **popen
    ) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)]), **env}
        for variable in ("PYTHONUNBUFFERED", "LOCAL_RANK", "RANK"):
            if variable not in env:
                environment.pop(variable, None)
        popen.setdefault("stdout", subprocess.PIPE)
        popen.setdefault("stderr", subprocess.PIPE)
        self.process = subprocess.Popen(
            [python, str(script), *argv], stdin=subprocess.DEVNULL, env=environment, start_new_session=True, **popen
        )
        self.pid = self.process.pid
        self.out = Output(self.process.stdout) if self.process.stdout else None
        self.err = Output(self.process.stderr) if self.process.stderr else None

    def expect(self, start: str) -> str:
        assert self.out is not None
        rest = self.out.find(start)
        assert rest is not None, f"the rank ended without {start!r}: {self.describe()}"
        return rest

    def server(self) -> int:
        """The pid that the (first) server printed."""
        return int(self.expect("server "))

    def wait(self, timeout: float = DEADLOCK) -> int:
        """The rank's exit code; its output is complete as far as nobody else holds its streams."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            state = self.describe()
            self.end()
            raise AssertionError(f"the rank hung: {state}") from None
        for output in (self.out, self.err):
            if output is not None:
                output.join(5.0)
        return code

    def describe(self) -> str:
        out = self.out.text if self.out else "-"
        err = self.err.text if self.err else "-"
        return f"exit code {self.process.poll()}\n--- stdout\n{out}\n--- stderr\n{err}"

    @property
    def stderr(self) -> str:
        assert self.err is not None
        return self.err.text

    @property
    def stdout(self) -> str:
        assert self.out is not None
        return self.out.text

    def reports(self) -> list[str]:
        """First lines of reports on stderr."""
        return [line for line in self.stderr.splitlines() if " died" in line and "(pid" in line and "|" not in line]

    def family(self) -> list[int]:
        """Everything that lives in the rank's session, and the servers it named."""
        pids = set(in_session(self.pid))
        for line in self.out.lines if self.out else []:
            words = line.split()
            if len(words) > 1 and words[0] == "server" and words[1].isdigit() and alive(int(words[1])):
                pids.add(int(words[1]))
        return sorted(pids - {self.pid} if self.process.poll() is not None else pids)

    def assert_nothing_left(self, within: float = 5.0) -> None:
        wait_for(lambda: not self.family(), within, lambda: f"left over: {[describe(pid) for pid in self.family()]}")

    def end(self) -> None:
        """Kill what is left, by pid."""
        for pid in [*self.family(), self.pid]:
            if pid != self.pid or self.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(DEADLOCK)
        reap_adopted()
        for output in (self.out, self.err):
            if output is not None:
                output.join(5.0)


class Ranks:
    """Starts ranks for one test and ends them with it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[Rank] = []

    def __call__(
        self, script: str, *argv: str, env: dict[str, str] | None = None, prelude: str = PRELUDE, **popen
    ) -> Rank:
        path = self._folder / f"rank{len(self.started)}.py"
        path.write_text(prelude + textwrap.dedent(script))
        rank = Rank(path, list(argv), env or {}, **popen)
        self.started.append(rank)
        return rank

    def end(self) -> None:
        for rank in self.started:
            rank.end()


def wait_for(condition: Callable[[], bool], timeout: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        reap_adopted()
        assert time.monotonic() < deadline, what()
        time.sleep(0.005)


def stat(pid: int) -> list[str] | None:
    """The fields of /proc/<pid>/stat from the state letter on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def alive(pid: int) -> bool:
    """A zombie counts, unless this process is the parent that has yet to reap it."""
    fields = stat(pid)
    return fields is not None and not (fields[0] in "ZX" and int(fields[1]) == os.getpid())


def in_session(sid: int) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = stat(int(entry))
            if fields is not None and int(fields[3]) == sid and alive(int(entry)):
                yield int(entry)


def describe(pid: int) -> str:
    with suppress(OSError):
        return f"{pid} {stat(pid)} {Path(f'/proc/{pid}/cmdline').read_bytes()!r}"
    return f"{pid} gone"


def reap_adopted() -> None:
    """Orphans of a rank come to us, since the tests' process is a subreaper; take those that are dead."""
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        fields = stat(int(entry))
        if (
            fields is not None
            and fields[0] == "Z"
            and int(fields[1]) == os.getpid()
            and int(entry) not in _own_children()
        ):
            with suppress(ChildProcessError):
                os.waitpid(int(entry), os.WNOHANG)


def _own_children() -> set[int]:
    """Children that a handle of ours will wait for."""
    import multiprocessing.process

    pids = {process.pid for process in multiprocessing.process._children}
    return pids | {rank.pid for rank in _all_ranks()} | set(kept)


kept: set[int] = set()  # pids of other children of a test, which it reaps itself


def _all_ranks() -> list[Rank]:
    return [rank for ranks in current for rank in ranks.started]


current: list[Ranks] = []
