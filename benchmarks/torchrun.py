"""From SIGKILL of rank 0's sidecar to the end of torchrun: with the watchdog, and with a bare `os._exit(1)`.

Four ranks over gloo; in both jobs a thread of rank 0 waits for the sidecar's pidfd, and only one of them reports. Each
round runs both, in random order. Needs torch. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import sys
import time

from common import HERE, Rank, end_by_exception, no_leftovers, number, progress, summary, table

RANKS = 4
HOW = {"watchdog": "`ProcessWatchdog`, report and error file", "bare": "bare Python thread on a pidfd, `os._exit(1)`"}
_SETTLED = 0.5  # seconds; the other ranks are in their all-reduce by then
_MODULE = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS))


def _job(how: str) -> float:
    command = [sys.executable, *_MODULE, str(HERE / "torchrun_rank.py"), how]
    with no_leftovers(), Rank(*command, environment={"OMP_NUM_THREADS": "1"}) as job:
        server = int(job.line("server "))
        time.sleep(_SETTLED)
        lasted = job.end_after_kill(server)
        job.expect_code(1)
        if how == "watchdog" and f"sampler (pid {server}) died after" not in job.stderr:
            job.fail("ended without the report")
    return lasted


def measure(rounds: int) -> list[dict[str, float]]:
    """Seconds by round and way."""
    found = []
    for round_number in range(rounds):
        progress(f"torchrun: round {round_number + 1} of {rounds}")
        turn = list(HOW)
        random.shuffle(turn)
        found.append({how: _job(how) for how in turn})
    return found


def report(found: list[dict[str, float]]) -> str:
    """The table."""
    bare = statistics.median(pair["bare"] for pair in found)
    rows = []
    for how, label in HOW.items():
        sample = summary([pair[how] for pair in found])
        paired = statistics.median(pair[how] / pair["bare"] for pair in found)
        quartiles = f"{number(sample.lower)} to {number(sample.upper)}"
        rows.append(
            [
                label,
                number(sample.median),
                quartiles,
                f"{number(sample.least)} to {number(sample.most)}",
                str(sample.n),
                number(sample.median / bare),
                number(paired),
            ]
        )
    return (
        table([f"rank 0 of {RANKS} leaves by", "median, s", "quartiles", "range", "n", "to bare", "paired"], rows)
        + "\n"
    )


def available() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def main() -> int:
    """Measure and print; 0 also where torch is missing, with that said."""
    parser = argparse.ArgumentParser(description="Time from SIGKILL of the sidecar to the end of torchrun.")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    if not available():
        print("Not measured: torch is not installed.")
        return 0
    end_by_exception()
    with no_leftovers():
        print(report(measure(options.rounds)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
