"""The main job under real torchrun: four gloo ranks, DataLoaders that wait for the sampler, and its death."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import harness
import pytest

pytestmark = pytest.mark.torch
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Job(harness.Rank):
    """torchrun with the example under it. Each of its ranks leads a session of its own."""

    def __init__(self, *options: str, **keywords: object) -> None:
        argv = [
            "torch.distributed.run",
            "--nproc-per-node",
            "4",
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
        ]
        super().__init__(Path("-m"), [*argv, *options], {"OMP_NUM_THREADS": "1"}, **keywords)

    def pids(self, what: str) -> list[int]:
        return [int(pid) for line in self.out.lines for pid in re.findall(rf"{what}: pid (\d+)", line)]

    def family(self) -> list[int]:
        sessions = [self.pid, *self.pids("rank .")]
        found = {pid for session in sessions for pid in harness.in_session(session)}
        found |= {pid for pid in self.pids("sampler") if harness.alive(pid)}
        return sorted(found - {self.pid} if self.process.poll() is not None else found)


@pytest.fixture
def torchrun():
    """Starts jobs that end with their test."""
    jobs = harness.Ranks(Path())
    harness.current.append(jobs)

    def start(*options: str) -> Job:
        job = Job(*options)
        jobs.started.append(job)
        return job

    yield start
    jobs.end()
    harness.current.remove(jobs)


SCRIPT = str(EXAMPLES / "torchrun_skipgram.py")


def test_a_killed_sampler_ends_the_job(torchrun):
    """A1: the job ends, its root cause is rank 0, the report is in its output, nothing is left."""
    job = torchrun(SCRIPT, "--steps", "1000000", "--report-every", "10")
    job.expect("step ")
    (sampler,) = job.pids("sampler")
    killed = time.monotonic()
    os.kill(sampler, signal.SIGKILL)
    assert job.wait() != 0
    assert time.monotonic() - killed < 15
    assert len(re.findall(rf"^sampler \(pid {sampler}\) died after", job.stderr, re.MULTILINE)) == 1
    assert "killed by SIGKILL (exit code -9)" in job.stderr
    root_cause = job.stderr[job.stderr.index("Root Cause") :]
    assert re.search(r"rank\s*: 0 \(local_rank: 0\)", root_cause), job.stderr
    assert re.search(r"exitcode\s*: 1 ", root_cause), job.stderr
    job.assert_nothing_left(10)


def test_the_summary_shows_the_report(torchrun, tmp_path):
    """The launcher's own reader takes our file, and its summary has our text under the root cause."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    job = torchrun("--log-dir", str(tmp_path), SCRIPT, "--steps", "1000000", "--report-every", "10")
    job.expect("step ")
    (sampler,) = job.pids("sampler")
    os.kill(sampler, signal.SIGKILL)
    assert job.wait() != 0
    (path,) = tmp_path.rglob("0/error.json")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
    assert f"sampler (pid {sampler}) died after" in failure.message["extraInfo"]["py_callstack"]
    assert abs(failure.timestamp - time.time()) < 120
    root_cause = job.stderr[job.stderr.index("Root Cause") :]
    assert str(path) in root_cause
    assert re.search(rf"traceback : sampler \(pid {sampler}\) died after .*killed by SIGKILL", root_cause)
    assert re.search(r"rank 0 \(pid \d+\) exits with code 1", root_cause)
    assert not list(tmp_path.rglob("error.json.*"))


RECORDED = """
import time
from torch.distributed.elastic.multiprocessing.errors import record
from watchdog.process import ProcessWatchdog

@record
def server():
    raise ValueError("the server's own failure")

@record
def main():
    ProcessWatchdog("sampler").launch(server, context="fork")
    time.sleep(60)

main()
"""


def test_a_server_with_record_does_not_write_over_its_rank(torchrun, tmp_path):
    """Its failure is told by the rank, as the server's."""
    script = tmp_path / "recorded.py"
    script.write_text(RECORDED)
    job = torchrun("--log-dir", str(tmp_path / "logs"), str(script))
    assert job.wait() != 0
    root_cause = job.stderr[job.stderr.index("Root Cause") :]
    assert re.search(r"rank\s*: 0 \(local_rank: 0\)", root_cause), job.stderr
    assert re.search(r"traceback : sampler \(pid \d+\) died after", root_cause), job.stderr
    assert "cause: ValueError: the server's own failure" in root_cause


def test_the_demo(tmp_path):
    """Killed once: the job ends with its reason; with a restart left it completes."""
    demo = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo_torchrun.py")], capture_output=True, text=True, timeout=240
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stdout.count("as expected: ") == 5
    assert "traceback : sampler (pid" in demo.stdout


def test_a_healthy_job_is_left_alone(torchrun):
    """H12: one sampler for four ranks, and a clean end."""
    job = torchrun(SCRIPT, "--steps", "100")
    assert job.wait() == 0, job.describe()
    assert len(job.pids("sampler")) == 1
    assert len(job.pids("rank .")) == 4
    assert " died" not in job.stderr
    job.assert_nothing_left(10)


def test_without_the_watchdog_the_job_hangs(torchrun, tmp_path):
    """Negative control: the same job, whose rank 0 starts its sampler as a plain process."""
    naive = tmp_path / "naive.py"
    naive.write_text(
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r}); import multiprocessing, torchrun_skipgram\n"
        "class Plain:\n"
        "    def __init__(self, name): pass\n"
        "    def launch(self, target, args, context):\n"
        "        import os\n"
        "        if os.environ['LOCAL_RANK'] != '0': return None\n"
        "        process = multiprocessing.get_context(context).Process(target=target, args=args, daemon=True)\n"
        "        process.start()\n"
        "        return process\n"
        "torchrun_skipgram.ProcessWatchdog = Plain\n"
        "torchrun_skipgram.main()\n"
    )
    job = torchrun(str(naive), "--steps", "1000000", "--report-every", "10")
    job.expect("step ")
    (sampler,) = job.pids("sampler")
    pidfd = os.pidfd_open(sampler)
    os.kill(sampler, signal.SIGKILL)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    assert poll.poll(30_000)
    os.close(pidfd)
    with pytest.raises(subprocess.TimeoutExpired):
        job.process.wait(5)  # it is still there when a watched job has long ended
    assert all(harness.alive(pid) for pid in job.pids("rank ."))
