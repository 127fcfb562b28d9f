"""The main job under real torchrun: four gloo ranks, DataLoaders that wait for the sampler, and its death."""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
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
    assert job.stderr.count(f"sampler (pid {sampler}) died after") == 1
    assert "killed by SIGKILL (exit code -9)" in job.stderr
    root_cause = job.stderr[job.stderr.index("Root Cause") :]
    assert re.search(r"rank\s*: 0 \(local_rank: 0\)", root_cause), job.stderr
    assert re.search(r"exitcode\s*: 1 ", root_cause), job.stderr
    job.assert_nothing_left(10)


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
