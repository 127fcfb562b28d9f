"""The examples do what their README says: real processes, each in a session of its own that ends with its test."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import harness
import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

from demo import Outcome, broken_promises  # noqa: E402 - found through the line above
from negative_sampler import EDGES, Graph, NegativeSampler, SamplerClient  # noqa: E402

DEADLINE = 40.0  # seconds; only a deadlock gets there
LEFTOVERS = 5.0  # seconds after a job's end in which all that it started has to be gone
MARK = "SIDECAR_WATCHDOG_EXAMPLES_TEST"  # in the environment of everything that a test starts

Start = Callable[..., "Started"]
GRAPH = Graph(EDGES)


class Started:
    """A script of the examples that runs, and whatever it started."""

    def __init__(self, script: Path, *options: str, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        env = {name: value for name, value in os.environ.items() if "RANK" not in name and name != "SLURM_LOCALID"}
        env.update({"PYTHONPATH": str(ROOT), MARK: self._mark, **environment})
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", str(script), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )
        self._deadline = threading.Timer(DEADLINE, self.kill)
        self._deadline.start()

    def line(self, pattern: str) -> re.Match[str]:
        """The next line of its stdout that matches; fails with its stderr if it ends before."""
        assert self.process.stdout is not None and self.process.stderr is not None
        for line in self.process.stdout:
            match = re.match(pattern, line)
            if match:
                return match
        pytest.fail(f"no line {pattern!r}; stderr: {self.process.stderr.read()}")

    def end(self) -> tuple[int, str, str]:
        """Its exit code, stdout and stderr; fails if something that it started outlives it by five seconds."""
        out, err = self.process.communicate()
        assert [pid for pid in self._pids() if not _ends(pid, LEFTOVERS)] == [], "left running"
        return self.process.returncode, out, err

    def kill(self) -> None:
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self.process.communicate()
        self._deadline.cancel()
        self._deadline.join()

    def _pids(self) -> list[int]:
        """By the mark, since a server or a helper of ours may have a session of its own."""
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
        return [pid for pid in pids if self._mark in _environment(pid)]


def _environment(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/environ").read_text(errors="replace")
    except OSError:
        return ""  # gone, a zombie, or somebody else's


def _ends(pid: int, seconds: float) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        return bool(poller.poll(int(seconds * 1000)))
    finally:
        os.close(fd)


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[Started] = []

    def start(script: Path, *options: str, **environment: str) -> Started:
        started.append(Started(script, *options, **environment))
        return started[-1]

    yield start
    for one in started:
        one.close()


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+  loss ([0-9.]+)$", output, re.MULTILINE)]


def assert_distribution(drawn: list[int], node: int) -> None:
    """Every allowed node comes in proportion to degree ** 0.75, within six standard deviations; no other comes."""
    excluded = {node, *GRAPH.neighbours[node]}
    weights = {
        other: sum(neighbours.values()) ** 0.75
        for other, neighbours in enumerate(GRAPH.neighbours)
        if other not in excluded
    }
    counts, total = Counter(drawn), sum(weights.values())
    assert not excluded & counts.keys()
    for other, weight in weights.items():
        share = weight / total
        deviation = (len(drawn) * share * (1 - share)) ** 0.5
        assert abs(counts[other] - len(drawn) * share) < 6 * deviation, GRAPH.names[other]


def test_the_graph_is_the_one_of_the_book() -> None:
    """The figures that the data's README names, and the hero's."""
    weights = [weight for neighbours in GRAPH.neighbours for weight in neighbours.values()]
    assert (len(GRAPH.names), len(weights) / 2, sum(weights) / 2) == (77, 254, 820)
    assert len(GRAPH.neighbours[GRAPH.names.index("Valjean")]) == 36


@pytest.mark.parametrize("name", ["Napoleon", "Valjean", "Marius"])
def test_negatives_come_by_degree(name: str) -> None:
    """Also for the node that has most neighbours to exclude."""
    node = GRAPH.names.index(name)
    assert_distribution(NegativeSampler(GRAPH, seed=7).draw(node, 50_000), node)


def test_a_check_of_the_distribution_would_see_another_one() -> None:
    """The negative control: draws for one node do not pass for those of another, nor uniform ones for weighted ones."""
    drawn = NegativeSampler(GRAPH, seed=7).draw(0, 50_000)
    with pytest.raises(AssertionError):
        assert_distribution(drawn, GRAPH.names.index("Valjean"))
    allowed = [node for node in range(77) if node != 0 and node not in GRAPH.neighbours[0]]
    with pytest.raises(AssertionError):
        assert_distribution(allowed * 500, 0)


def test_no_node_gets_itself_or_a_neighbour() -> None:
    """For every node of the graph."""
    sampler = NegativeSampler(GRAPH)
    for node, neighbours in enumerate(GRAPH.neighbours):
        assert not {node, *neighbours} & set(sampler.draw(node, 200)), GRAPH.names[node]


def test_a_graph_without_negatives_is_refused(tmp_path: Path) -> None:
    """A triangle: drawing would never come to an end."""
    edges = tmp_path / "triangle.csv"
    edges.write_text("source,target,weight\na,b,1\nb,c,1\nc,a,1\n")
    with pytest.raises(ValueError, match="a is a neighbour of every other node"):
        NegativeSampler(Graph(edges))


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_healthy_job_ends_with_0(start: Start, method: str) -> None:
    """It learns, as the README shows, says nothing on stderr, and leaves no sampler behind."""
    code, out, err = start(EXAMPLES / "skipgram.py", "--steps", "1000", "--start-method", method).end()
    assert (code, err) == (0, "")
    assert len(losses(out)) == 5
    assert losses(out)[-1] < losses(out)[0] / 2
    assert "nearest to Valjean: " in out
    assert out.splitlines()[1] in (EXAMPLES / "README.md").read_text()


def test_a_job_without_the_watchdog_is_as_healthy(start: Start) -> None:
    """What the watchdog is compared with does work, as long as nobody dies."""
    code, out, err = start(EXAMPLES / "skipgram.py", "--steps", "400", "--no-watchdog").end()
    assert (code, err, len(losses(out))) == (0, "", 2)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_sampler_serves_until_it_is_killed(start: Start, method: str) -> None:
    """Over its socket, beside the job that trains with it; its death is the end of the job."""
    job = start(EXAMPLES / "skipgram.py", "--steps", "1000000", "--start-method", method)
    found = job.line(r"sampler: pid (\d+), port (\d+)$")
    client = SamplerClient(("127.0.0.1", int(found[2])))
    valjean, napoleon = GRAPH.names.index("Valjean"), 0
    of_valjean, of_napoleon = client.negatives([valjean, napoleon], 20_000)
    assert_distribution(of_valjean, valjean)
    assert_distribution(of_napoleon, napoleon)
    with pytest.raises(ValueError, match=r"node 77 is not in 0\.\.76"):
        client.negatives([0, 77], 1)
    client.close()

    os.kill(int(found[1]), signal.SIGKILL)
    code, _, err = job.end()
    assert code == 1
    report = err.splitlines()
    assert re.fullmatch(rf"sampler \(pid {found[1]}\) died after .* s: killed by SIGKILL \(exit code -9\)", report[0])
    assert report[-1] == f"  rank 0 (pid {job.process.pid}) exits with code 1"


def test_a_sampler_that_dies_at_its_start_is_explained(start: Start, tmp_path: Path) -> None:
    """Its graph is not there: the job, which waits for the address, leaves with the sampler's own error."""
    for name in ("skipgram.py", "negative_sampler.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    code, out, err = start(tmp_path / "skipgram.py").end()
    assert (code, out) == (1, "")
    assert "exited with code 1\n  cause: FileNotFoundError: " in err
    assert "EOFError" not in err


def test_the_demo_shows_the_hang_and_the_exit(start: Start) -> None:
    """Two columns, the time that the hang was given, and the report as the job printed it."""
    code, out, err = start(EXAMPLES / "demo.py", "--patience", "3").end()
    assert (code, err) == (0, ""), out
    assert re.search(r"^without the watchdog +with the watchdog$", out, re.MULTILINE)
    assert re.search(r"SIGKILL to the sampler \(pid \d+\) .* SIGKILL to the sampler \(pid \d+\)$", out, re.MULTILINE)
    assert "Without the watchdog: hung for the 3 s that it was given, and printed nothing on stderr.\n" in out
    left = re.search(r"\nWith the watchdog: left ([0-9.]+) ms after the kill, with exit code 1, and printed:\n", out)
    assert left is not None
    assert float(left[1]) < 1000
    report = [line for line in out.splitlines() if line.startswith("    ")]
    assert re.fullmatch(r"    sampler \(pid \d+\) died after [0-9.]+ s: killed by SIGKILL \(exit code -9\)", report[0])
    assert re.fullmatch(r"      rank 0 \(pid \d+\) exits with code 1", report[-1])


def test_the_demo_says_why_it_failed(start: Start) -> None:
    """Where nothing is launched, the job cannot come as far as the demo needs it."""
    code, out, err = start(EXAMPLES / "demo.py", "--patience", "0.1", LOCAL_RANK="1").end()
    assert (code, err) == (1, "")
    assert "FAILED: the job ended before the line" in out
    assert "the local rank of this process is not 0" in out


def test_the_demo_takes_its_job_along(start: Start) -> None:
    """Ended by SIGTERM in the middle of the hang, it leaves no hanging job behind."""
    demo = start(EXAMPLES / "demo.py", "--patience", "30")
    demo.line("running: skipgram.py --no-watchdog ")
    demo.process.terminate()
    assert demo.end()[0] == 128 + signal.SIGTERM


HUNG = Outcome(lasted=10.0)
LEFT = Outcome(
    sampler=5, code=1, lasted=0.003, stderr="sampler (pid 5) died after 0.4 s: killed by SIGKILL (exit code -9)\n"
)


@pytest.mark.parametrize(
    ("without", "watched", "words"),
    [
        (HUNG, LEFT, None),
        (replace(HUNG, code=1, lasted=0.5), LEFT, "without the watchdog the job ended after 0.500 s with code 1"),
        (replace(HUNG, trained=9.0), LEFT, "without the watchdog the job still trained 9.000 s after the kill"),
        (HUNG, replace(LEFT, code=None, lasted=10.0), "with the watchdog the job still ran after 10 s"),
        (HUNG, replace(LEFT, code=0), "with the watchdog the job's exit code was 0, not 1"),
        (HUNG, replace(LEFT, lasted=4.0), "with the watchdog the job took 4.000 s to end, more than 1 s"),
        (HUNG, replace(LEFT, sampler=6), "the report does not begin with what was expected"),
        (HUNG, replace(LEFT, stderr=""), "stderr was ''"),
    ],
)
def test_the_demo_knows_a_broken_promise(without: Outcome, watched: Outcome, words: str | None) -> None:
    """Each thing that the demo promises, broken alone."""
    broken = broken_promises(without, watched)
    if words is None:
        assert broken == []
    else:
        assert len(broken) == 1
        assert words in broken[0]


@pytest.mark.skipif(shutil.which("redis-server") is None, reason="redis-server is not installed")
@pytest.mark.parametrize("killed", [False, True])
def test_a_real_redis(rank, killed):
    """`launch_command` around a program of somebody else's: a clean end, and one that names it."""
    harness_rank = harness.Rank(
        EXAMPLES / "redis_sidecar.py", ["--steps", "500", *(["--kill-after", "300"] * killed)], {}
    )
    rank.started.append(harness_rank)
    pid = int(harness_rank.expect("redis: pid"))
    assert harness_rank.wait() == int(killed), harness_rank.describe()
    assert ("500 reads and writes in" in harness_rank.stdout) == (not killed)
    reported = f"redis (pid {pid}) died after" in harness_rank.stderr and "killed by SIGKILL" in harness_rank.stderr
    assert reported == killed
    assert not harness.alive(pid)
    harness_rank.assert_nothing_left()
