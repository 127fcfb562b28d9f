"""The benchmarks run, say what they should in the form that they should, and leave nothing behind.

With the smallest counts: whether the figures are good is not for a test to say.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import harness
import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
OURS, BARE = "`ProcessWatchdog`, report included", "bare Python thread on a pidfd, no report"

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the benchmarks need pidfds")


def bench(script: str, *arguments: str) -> str:
    """What it prints on stdout."""
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=harness.DEADLOCK)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rows(text: str, table: int = 0) -> list[list[str]]:
    """The cells of one of the Markdown tables in a text, below its head; all rows are as long as the head."""
    found = re.findall(r"(?:^\|.*\|$\n?)+", text, re.MULTILINE)[table]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in found.splitlines()]
    assert {len(row) for row in cells} == {len(cells[0])}, found
    return cells[2:]


def installed(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None  # tests/torch has no origin


def needs(module: str):
    return pytest.mark.skipif(not installed(module), reason=f"{module} is not installed")


@pytest.mark.parametrize(
    ("peer", "label", "conditions"),
    [
        pytest.param(
            "C",
            "C program on a pidfd, no report",
            1,
            marks=pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler"),
        ),
        ("futures", "`concurrent.futures`", 1),
        pytest.param("loky", "loky", 1, marks=needs("loky")),
        pytest.param("dataloader", "PyTorch `DataLoader`", 1, marks=needs("torch")),
        ("poll 1 s", "`is_alive()` every second", 2),
    ],
)
def test_latency(peer, label, conditions):
    found = rows(bench("latency.py", "--rounds", "1", "--polls", "1", "0", "--only", peer))
    assert [row[:2] for row in found[:4]] == [[who, how] for who in (OURS, BARE) for how in ("idle", "spinning")]
    assert [row[:2] for row in found[4:]] == [[label, how] for how in ("idle", "spinning")[:conditions]]
    for row in found:
        median, ratio, paired = float(row[2]), float(row[6]), float(row[7])
        assert 0 < median < 2500
        assert row[3:6] == [f"{row[2]} to {row[2]}", f"{row[2]} to {row[2]}", "1"]
        assert ratio == paired
    assert [row[6] for row in found if row[0] == BARE] == ["1.00", "1.00"]


def test_what_cannot_be_measured_is_named(tmp_path):
    """Without a compiler on PATH the C program is left out, with the reason."""
    script = f"import sys; sys.path.insert(0, {str(BENCHMARKS)!r}); import latency; print(latency.measure(1, (0, 0), ['C']).left_out)"
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=60)
    assert "{'C program on a pidfd, no report': 'no C compiler that builds it'}" in done.stdout, done.stderr


def test_cost():
    text = bench("cost.py", "--rounds", "1", "--window", "1.2", "--counts", "0", "2")
    nothing, two = rows(text)
    assert nothing[0] == "0" and nothing[4:6] == ["0", "0"]
    assert two[0] == "2" and int(two[4]) == 3, "a thread each, and the helper of an abort"
    assert int(two[5]) > 0
    assert float(two[2]) > 1, "each watch thread looks once a second"
    assert "extrapolated from 1.2 s" in text
    assert [row[0] for row in rows(text, 1)] == [
        "(a bare interpreter, start to end)",
        "`import multiprocessing`",
        "`import watchdog.process`",
    ]
    assert [row[0] for row in rows(text, 2)] == ["fork", "spawn"]
    assert all(float(row[3]) > 0 for row in rows(text, 2))


@needs("torch")
def test_torchrun():
    ours, bare = rows(bench("torchrun.py", "--rounds", "1"))
    assert ours[0].startswith("`ProcessWatchdog`") and bare[5] == "1.00"
    assert float(ours[1]) > 0


@pytest.mark.skipif(installed("torch"), reason="torch is installed")
def test_torchrun_without_torch():
    assert bench("torchrun.py") == "Not measured: torch is not installed.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_benchmark_leaves_nothing(number):
    """A rank that spins and its server are gone with the benchmark, whatever the moment."""
    command = [sys.executable, str(BENCHMARKS / "latency.py"), "--rounds", "1000", "--polls", "0", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as benchmark:
        harness.kept.add(benchmark.pid)
        assert "round 1 of 1000" in benchmark.stderr.readline()
        started = []

        def found() -> bool:
            started[:] = psutil.Process(benchmark.pid).children(recursive=True)
            return len(started) >= 2  # a rank and its server

        harness.wait_for(found, harness.DEADLOCK, lambda: "no rank was started")
        benchmark.send_signal(number)
        assert benchmark.wait(harness.DEADLOCK) != 0
        harness.kept.discard(benchmark.pid)
    assert not [process for process in started if process.is_running()]


def test_the_figures_go_between_the_marks():
    spec = importlib.util.spec_from_file_location("readme", BENCHMARKS / "readme.py")
    readme = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme)
    text = f"before\n{readme.BEGIN}\nold\n{readme.END}\nafter\n"
    once = readme.replaced(text, "new\n")
    assert once == f"before\n{readme.BEGIN}\n\nnew\n\n{readme.END}\nafter\n"
    assert readme.replaced(once, "new") == once
    for broken in ("", readme.BEGIN, f"{readme.END} {readme.BEGIN}", once + once):
        with pytest.raises(ValueError, match="bench:begin"):
            readme.replaced(broken, "new")
    readme.replaced((BENCHMARKS.parent / "README.md").read_text(), "figures")


@needs("matplotlib")
def test_everything_into_files(tmp_path):
    text = tmp_path / "README.md"
    text.write_text("<!-- bench:begin -->\n<!-- bench:end -->\n")
    few = ["--rounds", "1", "--polls", "0", "0", "--torchrun-rounds", "0", "--cost-rounds", "1", "--window", "0.1"]
    bench("run.py", *few, "--counts", "1", "--folder", str(tmp_path), "--readme", str(text))
    results = (tmp_path / "results.md").read_text()
    assert re.search(
        r"^Measured by `make bench` on \d+ cores?.*, Linux [\d.]+, CPython 3\.\d+\.\d+, \d{4}-", results, re.MULTILINE
    )
    assert [row[0] for row in rows(results)][:4:2] == [OURS, BARE]
    assert OURS in text.read_text() and "CPU s per hour" in text.read_text()
    picture = (tmp_path / "latency.svg").read_text()
    assert picture.startswith("<?xml") and "bare Python thread" in picture
    for written in (results, picture, text.read_text()):
        assert os.uname().nodename not in written and str(Path.home()) not in written
