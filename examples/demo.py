"""The hang, and the exit: one training job, run twice, whose sampler is killed after some steps.

Without the watchdog the job is given a bounded time (--patience) in which to notice; then the demo ends it. With the
watchdog it leaves by itself. The exit code is 0 if both did what they were expected to do, else 1, with the reason.
"""

from __future__ import annotations

import argparse
import itertools
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

_HERE = Path(__file__).resolve().parent
_KILL_AFTER = 400  # steps
_STEPS = 1_000_000  # more than the job gets round to
_START_PATIENCE = 30.0  # seconds until the job has trained so far; a second or two is usual
_PROMPT = 1.0  # seconds from the sampler's death to the job's end; milliseconds are usual
_COLUMN = 52  # characters


class UnexpectedError(Exception):
    """The job did something else than the demo is about."""


@dataclass
class Outcome:
    """What was seen of one job. Times are in seconds since its start."""

    timeline: list[tuple[float, str]] = field(default_factory=list)
    pid: int = 0
    sampler: int = 0
    code: int | None = None  # None: it still ran when our patience was over
    lasted: float = 0.0  # from the death of the sampler to the end of the job, or of our patience
    trained: float = 0.0  # from the death of the sampler to the last step that was reported after it
    stderr: str = ""


class Job:
    """The training as a subprocess, in a session of its own, with what it prints and when."""

    def __init__(self, stderr: BinaryIO, *options: str) -> None:
        self.outcome = Outcome()
        self._lines: queue.SimpleQueue[tuple[float, str]] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[float] = queue.SimpleQueue()
        self._stderr = stderr
        # So that it finds the package also where nothing is installed.
        path = os.pathsep.join([str(_HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._start = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "skipgram.py"), "--steps", str(_STEPS), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": path},
            start_new_session=True,
        )
        self.outcome.pid = self._process.pid
        self.note(f"the job starts (pid {self._process.pid})")
        for target in (self._read, self._wait):
            threading.Thread(target=target, daemon=True).start()

    def close(self) -> None:
        """End the job, if it still runs, and whatever else is left in its session."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # also after its end: a sampler may have outlived it
        self._process.wait()

    def note(self, text: str) -> float:
        """Put what happens now on the timeline; returns the time."""
        now = time.monotonic() - self._start
        self.outcome.timeline.append((now, text))
        return now

    def expect(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the job's output; it and those before it go on the timeline."""
        deadline = self._start + _START_PATIENCE
        while True:
            try:
                when, line = self._lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise UnexpectedError(f"{_START_PATIENCE:.0f} s without the line {pattern!r}") from None
            if not line:
                raise UnexpectedError(f"the job ended before the line {pattern!r}; its stderr:\n{self.stderr()}")
            self.outcome.timeline.append((when, line.rstrip()))
            match = re.match(pattern, line)
            if match:
                return match

    def wait(self, patience: float) -> float | None:
        """When the job ended, as exactly as the kernel tells; None if it still runs after `patience` seconds."""
        try:
            return self._ended.get(timeout=patience)
        except queue.Empty:
            return None

    @property
    def code(self) -> int | None:
        return self._process.returncode

    def unread(self) -> list[tuple[float, str]]:
        """The lines that have come since the last one that was expected."""
        lines = []
        while not self._lines.empty():
            when, line = self._lines.get()
            lines += [(when, line.rstrip())] if line else []
        return lines

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read().decode(errors="replace")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put((time.monotonic() - self._start, line.decode()))
        self._lines.put((time.monotonic() - self._start, ""))

    def _wait(self) -> None:
        self._process.wait()
        self._ended.put(time.monotonic() - self._start)


def run(*options: str, patience: float) -> Outcome:
    """Train, kill the sampler, and see how long the job goes on. Raises UnexpectedError if it does not come so far."""
    with tempfile.TemporaryFile() as stderr, closing(Job(stderr, *options)) as job:
        outcome = job.outcome
        print(" ".join(["running: skipgram.py", *options, f"(pid {outcome.pid}) ..."]), flush=True)
        outcome.sampler = int(job.expect(r"sampler: pid (\d+)")[1])
        job.expect(rf"step +{_KILL_AFTER} ")
        killed = job.note(f"SIGKILL to the sampler (pid {outcome.sampler})")
        os.kill(outcome.sampler, signal.SIGKILL)
        ended = job.wait(patience)
        # On a busy machine a step that was trained before the kill is read after it.
        late = job.unread()
        outcome.trained = max((when - killed for when, _ in late), default=0.0)
        outcome.timeline += late
        if ended is None:
            outcome.lasted = patience
            job.note("the job still waits for the sampler")
            job.note("SIGKILL to the job, by this demo")
        else:
            outcome.lasted, outcome.code = ended - killed, job.code
            outcome.timeline.append((ended, f"the job has left, exit code {job.code}"))
        outcome.stderr = job.stderr()
    outcome.timeline.sort(key=lambda entry: entry[0])
    return outcome


def broken_promises(without: Outcome, watched: Outcome) -> list[str]:
    """What was otherwise than expected, a sentence each."""
    broken = []
    if without.code is not None:
        broken.append(f"without the watchdog the job ended after {without.lasted:.3f} s with code {without.code}")
    elif without.trained > _PROMPT:
        broken.append(f"without the watchdog the job still trained {without.trained:.3f} s after the kill")
    if watched.code is None:
        broken.append(f"with the watchdog the job still ran after {watched.lasted:g} s")
    elif watched.code != 1:
        broken.append(f"with the watchdog the job's exit code was {watched.code}, not 1")
    elif watched.lasted > _PROMPT:
        broken.append(f"with the watchdog the job took {watched.lasted:.3f} s to end, more than {_PROMPT:g} s")
    first = rf"sampler \(pid {watched.sampler}\) died after [0-9.]+ s: killed by SIGKILL \(exit code -9\)"
    if not re.search(f"^{first}$", watched.stderr, re.MULTILINE):
        broken.append(f"the report does not begin with what was expected; stderr was {watched.stderr!r}")
    return broken


def side_by_side(without: Outcome, watched: Outcome) -> str:
    """The two timelines in two columns, each with its own clock."""
    rows = [f"{'without the watchdog':{_COLUMN}}with the watchdog"]
    for cells in itertools.zip_longest(without.timeline, watched.timeline):
        row = "".join(f"{f'{cell[0]:7.3f} s  {cell[1]}' if cell else '':{_COLUMN}}" for cell in cells)
        rows.append(row.rstrip())
    return "\n".join(rows)


def main() -> int:
    """Run the job twice and print what was seen."""
    parser = argparse.ArgumentParser(description="Kill a training job's sampler, without and with the watchdog.")
    parser.add_argument("--patience", type=float, default=10.0, metavar="SECONDS", help="default: %(default)g")
    patience = parser.parse_args().patience
    # By default SIGTERM would end us on the spot, and leave a hanging job behind.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        print(f"A training job, twice; its sampler is killed, and {patience:g} s later the job, if it still runs.")
        without = run("--no-watchdog", patience=patience)
        watched = run(patience=patience)
    except UnexpectedError as error:
        print(f"FAILED: {error}")
        return 1
    print(f"\n{side_by_side(without, watched)}")
    broken = broken_promises(without, watched)
    if broken:
        print("\nFAILED:", *broken, sep="\n  ")
        return 1
    print(f"\nWithout the watchdog: hung for the {without.lasted:g} s that it was given, and printed", end=" ")
    print(f"this on stderr:\n{without.stderr}" if without.stderr else "nothing on stderr.")
    print(f"With the watchdog: left {watched.lasted * 1000:.1f} ms after the kill, with exit code 1, and printed:\n")
    print("".join(f"    {line}\n" for line in watched.stderr.splitlines()), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
