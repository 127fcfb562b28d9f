"""What the benchmarks share: ranks that are started and always ended, statistics, tables.

Linux only: ends are observed by a pidfd.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import NoReturn

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
DEADLOCK = 90.0  # seconds after which anything counts as hung
LIFETIME = 600  # seconds; servers sleep no longer, so that even those of a killed benchmark end
SETTLED = 0.1  # seconds between a rank's last line and the kill: its main thread blocks, or spins, by then

_PR_SET_CHILD_SUBREAPER = 36
_ENDED_BY = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
# What an outer job says of its rank is not for ours.
_OUTER = ("RANK", "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "TORCHELASTIC_ERROR_FILE")


class Rank:
    """A command in a session of its own. Its stderr goes to a file, where no reader can slow it down."""

    def __init__(self, *argv: str, environment: Mapping[str, str] | None = None) -> None:
        # PYTHONDONTWRITEBYTECODE and its like are about who runs this, and change what is measured.
        inherited = {n: v for n, v in os.environ.items() if n not in _OUTER and not n.startswith("PYTHON")}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `__exit__`
        self.process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            start_new_session=True,
            env={**inherited, "PYTHONPATH": path, **(environment or {})},
        )
        self._pidfd = os.pidfd_open(self.process.pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)
        self._said = b""

    def __enter__(self) -> Rank:
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.kill()
        self.process.wait(DEADLOCK)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()
        os.close(self._pidfd)

    def line(self, start: str) -> str:
        """The rest of its next line of stdout that begins with `start`."""
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        deadline = time.monotonic() + DEADLOCK
        while True:
            line, ended, rest = self._said.partition(b"\n")
            if ended:
                self._said = rest
                if line.decode().startswith(start):
                    return line.decode()[len(start) :].strip()
            elif not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
                self.fail(f"said no {start!r}")
            elif not (more := os.read(fd, 65536)):
                self.fail(f"ended without {start!r}")
            else:
                self._said += more

    def end_after_kill(self, server: int) -> float:
        """Send SIGKILL to `server`; returns the seconds until this rank is gone, all its threads and memory too."""
        before = time.monotonic()
        os.kill(server, signal.SIGKILL)
        return self.wait() - before

    def wait(self) -> float:
        """Returns the moment (of `time.monotonic`) at which it is gone."""
        # Not `Popen.wait` with a time-out, which sleeps between its looks, up to 50 ms.
        ended = self._poll.poll(int(DEADLOCK * 1000))
        moment = time.monotonic()
        if not ended:
            self.fail(f"is still there after {DEADLOCK:.0f} s")
        self.process.wait(DEADLOCK)
        return moment

    @property
    def stderr(self) -> str:
        """What it has written so far."""
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def expect_code(self, code: int) -> None:
        """Fails with the rank's output if it has ended otherwise. For a rank that is gone."""
        if self.process.returncode != code:
            self.fail("ended otherwise than expected")

    def fail(self, what: str) -> NoReturn:
        """Raises RuntimeError with the state of the rank and its stderr."""
        raise RuntimeError(f"the rank {what} (exit code {self.process.poll()}); its stderr:\n{self.stderr}")


@contextmanager
def no_leftovers() -> Iterator[None]:
    """After the block nothing that was started in it is left, also where an exception or a signal ended it."""
    # Orphans become children of this process, so its descendants are all that was started.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _ENDED_BY)
        try:
            _end_descendants()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _end_descendants() -> None:
    deadline = time.monotonic() + 10.0
    while left := psutil.Process().children(recursive=True):
        if time.monotonic() > deadline:
            raise RuntimeError(f"cannot be ended: {left}")
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass  # it ended meanwhile
        _, waiting = psutil.wait_procs(left, timeout=1.0)
        for process in waiting:
            # A zombie whose parent was one of those killed just now, and which has come to us.
            try:
                os.waitpid(process.pid, os.WNOHANG)
            except ChildProcessError:
                pass  # not yet ours; in the next turn


def end_by_exception() -> None:
    """From now on SIGTERM and SIGHUP unwind the stack as Ctrl-C does, so that everything started is ended."""

    def leave(number: int, _frame: object) -> NoReturn:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGHUP, leave)
    # What an interactive shell sets for a job in the background would make Ctrl-C, passed on by make, go unheard.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def progress(text: str) -> None:
    """One line on stderr; the tables go to stdout."""
    print(text, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Summary:
    """Quantiles of a sample."""

    n: int
    least: float
    lower: float
    median: float
    upper: float
    most: float


def summary(values: Sequence[float]) -> Summary:
    """Raises ValueError for an empty sample. The quartiles of a single value are that value."""
    if not values:
        raise ValueError("a sample without values")
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return Summary(len(values), min(values), lower, median, upper, max(values))


def milliseconds(seconds: float) -> str:
    """`seconds` in ms, with three digits or all before the point."""
    return number(seconds * 1e3)


def number(value: float) -> str:
    """`value` with three digits or all before the point, and never in the notation with an e."""
    digits = next((digits for digits, least in ((0, 99.95), (1, 9.995), (2, 0.9995)) if abs(value) >= least), 3)
    return f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown. All columns but the first are set to the right."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, marks, *rows))


def machine() -> str:
    """The machine in a line, and the day: what figures mean nothing without."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = f" ({line.partition(':')[2].strip()})"
            break
    found = re.match(r"[\d.]+", platform.release())
    kernel = found.group().rstrip(".") if found else "?"
    cores = len(os.sched_getaffinity(0))
    memory = psutil.virtual_memory().total / 2**30
    day = datetime.now(timezone.utc).date()
    return (
        f"{cores} core{'s' * (cores != 1)}{model}, {memory:.0f} GiB, Linux {kernel}, "
        f"{platform.python_implementation()} {platform.python_version()}, {day}"
    )
