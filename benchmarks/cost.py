"""What the package costs while nothing happens, and at the start: CPU, threads, import, launch. Prints Markdown.

The CPU time of an hour is extrapolated from a window of some seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from common import HERE, Rank, end_by_exception, milliseconds, no_leftovers, number, progress, summary, table

COUNTS = (0, 1, 4, 16, 64, 256)
IMPORTS = {"nothing": "pass", "multiprocessing": "import multiprocessing", "watchdog": "import watchdog.process"}


def _measured(*arguments: str) -> Any:
    with no_leftovers(), Rank(sys.executable, str(HERE / "cost_rank.py"), *arguments) as rank:
        found = json.loads(rank.line(""))
        rank.wait()
        rank.expect_code(0)
    return found


def idle(counts: Sequence[int], window: float) -> str:
    """The table of what so many watchdogs cost one rank."""
    rows = []
    for count in counts:
        progress(f"cost: {count} watchdogs for {window:g} s")
        found = _measured("watch", str(count), str(window))
        each = max(1, count)
        rows.append(
            [
                str(count),
                number(found["cpu"] * 3600),
                number(found["switches"]),
                number(found["switches"] / each),
                str(found["threads"]),
                str(found["descriptors"]),
                number(found["memory"]),
                milliseconds(found["last launch"]) if count else "-",
                milliseconds(found["stop"] / each) if count else "-",
            ]
        )
    head = ["watchdogs in the rank", "CPU s per hour", "switches per s", "for each", "threads", "descriptors"]
    head += ["memory, MiB", "the last launch, ms", "stop for each, ms"]
    said = (
        f"CPU seconds per hour are extrapolated from {window:g} s, in which the main thread sleeps; switches are those "
        f"of the watch threads. Servers are commands (`sleep`)."
    )
    return f"{table(head, rows)}\n\n{said}\n"


def import_time(rounds: int) -> str:
    """The table of import times: an interpreter that imports, less one of the same round that does not."""
    samples: dict[str, list[float]] = {name: [] for name in IMPORTS}
    for round_number in range(rounds + 1):
        progress(f"cost: import, round {round_number} of {rounds}")
        turn = list(IMPORTS.items())
        random.shuffle(turn)
        for name, statement in turn:
            before = time.monotonic()
            with no_leftovers(), Rank(sys.executable, "-c", statement) as rank:
                lasted = rank.wait() - before
                rank.expect_code(0)
            if round_number:  # round 0 compiles and fills caches
                samples[name].append(lasted)
    rows = []
    for name, statement in IMPORTS.items():
        beyond = [mine - bare for mine, bare in zip(samples[name], samples["nothing"])]
        found = summary(samples[name] if name == "nothing" else beyond)
        label = "(a bare interpreter, start to end)" if name == "nothing" else f"`{statement}`"
        rows.append(
            [
                label,
                milliseconds(found.median),
                f"{milliseconds(found.lower)} to {milliseconds(found.upper)}",
                str(found.n),
            ]
        )
    return table(["import", "median, ms", "quartiles", "n"], rows) + "\n"


def launch_time(rounds: int) -> str:
    """The table of `launch` against `Process.start`."""
    progress(f"cost: launch, {rounds} rounds")
    rows = []
    for method, found in _measured("launch", str(rounds)).items():
        ours, plain = ([pair[name] for pair in found] for name in ("launch", "start"))
        ratio = statistics.median(pair["launch"] / pair["start"] for pair in found)
        medians = [milliseconds(statistics.median(sample)) for sample in (ours, plain)]
        rows.append([method, *medians, number(ratio), str(len(found))])
    return table(["start method", "`launch`, ms", "`Process.start`, ms", "paired ratio", "n"], rows) + "\n"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What watching costs while nothing happens, and at the start.")
    parser.add_argument("--rounds", type=int, default=30, help="of imports and launches")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of watching")
    parser.add_argument("--counts", type=int, nargs="*", default=COUNTS, help="watchdogs in one rank")
    options = parser.parse_args()
    end_by_exception()
    with no_leftovers():
        print(idle(options.counts, options.window))
        print(import_time(options.rounds))
        print(launch_time(options.rounds), end="")


if __name__ == "__main__":
    main()
