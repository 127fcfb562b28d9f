"""The README's first screen is what really runs and what it really prints."""

from __future__ import annotations

import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text()
CODE = re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1)
REPORT = re.search(r"```text\n(.*?)```", README, re.DOTALL).group(1)

# What the example leaves out: a server that fails after a while, and a training loop that waits for it.
FILLED_IN = """\
import socket
import time


def run_server(graph):
    time.sleep(0.4)

    raise MemoryError("cannot grow the edge table")


def train():
    left, right = socket.socketpair()
    left.recv(1)


graph = []
"""


def normalised(report: str) -> str:
    """Without what differs from run to run: pids, seconds, the script's place, and marks that only some Pythons add."""
    report = re.sub(r"\(pid \d+\)", "(pid N)", report)
    report = re.sub(r"after \d+\.\d s", "after T s", report)
    report = re.sub(r'File ".*?", line \d+', 'File "F", line L', report)
    return "\n".join(line for line in report.strip().splitlines() if "^^^" not in line)


def test_the_report_is_the_one_that_the_example_prints(rank):
    run = rank(CODE, prelude=FILLED_IN)
    assert run.wait() == 1
    report = run.stderr[run.stderr.index("sampler (pid") :]
    assert normalised(report) == normalised(REPORT)
    run.assert_nothing_left()


def test_the_example_is_five_lines_of_code():
    assert len([line for line in CODE.splitlines() if line.strip()]) == 5
