"""All benchmarks: writes results.md and latency.svg beside this file, and the main tables into the README.

`make bench ROUNDS=n` runs it with n rounds of the latencies; with 50 it takes a quarter of an hour.
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import cost
import latency
import plot
import readme
import torchrun
from common import HERE, ROOT, end_by_exception, machine, no_leftovers, progress

_LATENCY = """\
From SIGKILL of the server to the end of the rank, by the parent's monotonic clock; gone is a rank whose memory is
released. The peers of a round run one after the other in random order. *idle*: the main thread is blocked in a C call;
*spinning*: it is busy with Python code, and every other thread has to ask it for the GIL. *to bare* is the median over
that of the bare thread under the same condition; *paired* is the median of the ratios within a round.
"""
_TORCHRUN = """\
From SIGKILL of the sidecar of rank 0 to the end of torchrun: four ranks over gloo, three of them in an all-reduce.
"""


def main() -> None:
    """Measure everything and write it down."""
    parser = argparse.ArgumentParser(description="All benchmarks, into files.")
    parser.add_argument("--rounds", type=int, default=50, help="of the latencies")
    parser.add_argument("--polls", type=int, nargs=2, default=(20, 5), metavar=("EACH_1S", "EACH_10S"))
    parser.add_argument("--torchrun-rounds", type=int, default=10)
    parser.add_argument("--cost-rounds", type=int, default=30, help="of imports and launches")
    parser.add_argument("--window", type=float, default=20.0, help="seconds of watching, for what it costs")
    parser.add_argument("--counts", type=int, nargs="*", default=cost.COUNTS, help="watchdogs in one rank")
    parser.add_argument("--folder", type=Path, default=HERE, help="where results.md and latency.svg go")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args()
    end_by_exception()
    with no_leftovers():
        result = latency.measure(options.rounds, options.polls)
        latencies = latency.report(result)
        torch = "Not measured: torch is not installed.\n"
        if torchrun.available() and options.torchrun_rounds:
            torch = torchrun.report(torchrun.measure(options.torchrun_rounds))
        idle = cost.idle(options.counts, options.window)
        imports, launches = cost.import_time(options.cost_rounds), cost.launch_time(options.cost_rounds)
    if importlib.util.find_spec("matplotlib") is None:
        progress("no picture: matplotlib is not installed")
        picture = ""
    else:
        plot.draw(result, options.folder / "latency.svg")
        picture = "\n![the latencies, one dot a round](latency.svg)\n"
    where = f"Measured by `make bench` on {machine()}.\n"
    parts = [
        f"# Results\n\n{where}",
        f"## Latency\n\n{_LATENCY}{picture}\n{latencies}",
        f"## The end of a torchrun job\n\n{_TORCHRUN}\n{torch}",
        f"## While nothing happens\n\n{idle}",
        f"## Import\n\nMedians of the differences within a round, start to end of the interpreter.\n\n{imports}",
        f"## Launch\n\nUntil the call returns; the server is a function that sleeps.\n\n{launches}",
    ]
    (options.folder / "results.md").write_text("\n".join(parts), encoding="utf-8")
    readme.update(options.readme, f"{where}\n{_LATENCY}\n{latencies}\nWhile nothing happens:\n\n{idle}")
    progress(f"written: results.md, the picture if any, and the tables in {options.readme.name}")


if __name__ == "__main__":
    main()
