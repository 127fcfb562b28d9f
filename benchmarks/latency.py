"""From SIGKILL of the server to the end of its rank, in seconds: this package beside its peers.

Each round measures every peer once, in random order, so that a busy moment of the machine hits all of them alike. The
rank is gone when its pidfd says so: its memory is released by then. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import HERE, SETTLED, Rank, end_by_exception, milliseconds, no_leftovers, number, progress, summary, table

OURS, BARE = "watchdog", "thread"


@dataclass(frozen=True)
class Peer:
    """One way to notice the death."""

    name: str
    label: str
    spins: bool  # whether it leaves the main thread free, so that this may spin
    module: str | None = None  # what has to be installed for it
    period: float = 0.0  # seconds between two looks


PEERS = (
    Peer(OURS, "`ProcessWatchdog`, report included", spins=True),
    Peer(BARE, "bare Python thread on a pidfd, no report", spins=True),
    Peer("C", "C program on a pidfd, no report", spins=False),
    Peer("futures", "`concurrent.futures`", spins=False),
    Peer("loky", "loky", spins=False, module="loky"),
    Peer("dataloader", "PyTorch `DataLoader`", spins=False, module="torch"),
    Peer("poll 1 s", "`is_alive()` every second", spins=True, period=1.0),
    Peer("poll 10 s", "`is_alive()` every 10 s", spins=True, period=10.0),
)


@dataclass
class Series:
    """The latencies of one peer under one condition, in seconds, by round."""

    peer: Peer
    condition: str
    command: tuple[str, ...]
    rounds: int
    latencies: dict[int, float] = field(default_factory=dict)

    def measure(self, number: int) -> None:
        """Run round `number`. Raises RuntimeError if the rank does not end as it should."""
        with no_leftovers(), Rank(*self.command) as rank:
            server = int(rank.line("server "))
            time.sleep(SETTLED)
            latency = rank.end_after_kill(server)
            rank.expect_code(1)
            if self.peer.name == OURS and f"sampler (pid {server}) died after" not in rank.stderr:
                rank.fail("left without its report")
        self.latencies[number] = latency

    @property
    def label(self) -> str:
        """For a picture."""
        return f"{self.peer.label}, {self.condition}"


@dataclass(frozen=True)
class Result:
    """All series, and why some peers have none."""

    series: list[Series]
    left_out: dict[str, str]

    def bare(self, condition: str) -> Series:
        """The series that others under this condition are compared with."""
        return next(s for s in self.series if s.peer.name == BARE and s.condition == condition)


def measure(rounds: int, polls: Sequence[int], only: Sequence[str] = ()) -> Result:
    """`polls` are the rounds in which the slow peers take part, the one that looks every second first."""
    with tempfile.TemporaryDirectory() as folder:
        result = _plan(rounds, polls, only, Path(folder))
        for number in range(max(series.rounds for series in result.series)):
            turn = [series for series in result.series if number < series.rounds]
            random.shuffle(turn)
            progress(f"latency: round {number + 1} of {rounds}, {len(turn)} ranks")
            for series in turn:
                series.measure(number)
    return result


def _plan(rounds: int, polls: Sequence[int], only: Sequence[str], folder: Path) -> Result:
    result = Result([], {})
    slow = iter(polls)
    for peer in PEERS:
        count = min(rounds, next(slow)) if peer.period else rounds
        if (only and peer.name not in (OURS, BARE, *only)) or not count:
            continue
        command: tuple[str, ...] | None = (sys.executable, str(HERE / "peers.py"), peer.name)
        if peer.name == "C":
            command = _compiled(folder)
            if command is None:
                result.left_out[peer.label] = "no C compiler that builds it"
                continue
        elif peer.module and importlib.util.find_spec(peer.module) is None:
            result.left_out[peer.label] = f"{peer.module} is not installed"
            continue
        for condition in ("idle", "spinning") if peer.spins else ("idle",):
            assert command is not None
            result.series.append(Series(peer, condition, (*command, condition), count))
    return result


def _compiled(folder: Path) -> tuple[str] | None:
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    program = folder / "pidfd_exit"
    done = subprocess.run(
        [compiler, "-O2", "-o", program, HERE / "pidfd_exit.c"], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        progress(done.stderr)
        return None
    return (str(program),)


def report(result: Result) -> str:
    """The table, and what is not in it."""
    rows = []
    for series in result.series:
        bare = result.bare(series.condition).latencies
        found = summary(list(series.latencies.values()))
        paired = statistics.median(latency / bare[number] for number, latency in series.latencies.items())
        rows.append(
            [
                series.peer.label,
                series.condition,
                milliseconds(found.median),
                f"{milliseconds(found.lower)} to {milliseconds(found.upper)}",
                f"{milliseconds(found.least)} to {milliseconds(found.most)}",
                str(found.n),
                number(found.median / statistics.median(bare.values())),
                number(paired),
            ]
        )
    head = ["how the death is noticed", "main thread", "median, ms", "quartiles", "range", "n", "to bare", "paired"]
    lines = [table(head, rows), ""]
    lines += [f"Not measured: {label}: {reason}." for label, reason in result.left_out.items()]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Time from SIGKILL of the server to the end of the rank.")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--polls", type=int, nargs=2, default=(10, 3), metavar=("EACH_1S", "EACH_10S"))
    parser.add_argument("--only", nargs="*", default=(), help="these peers beside ours and the bare thread")
    options = parser.parse_args()
    end_by_exception()
    with no_leftovers():
        print(report(measure(options.rounds, options.polls, options.only)), end="")


if __name__ == "__main__":
    main()
