"""The sampler job under torchrun, its sampler killed once: the job ends with the reason, or restarts and completes.

Runs it twice, on four ranks: without restarts, and with `--max-restarts 1`. Needs torch. The exit code is 0 if both
went as expected, else 1, with the reason.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_PATIENCE = 120.0  # seconds for one job: four times the import of torch, and some steps


@dataclass
class Outcome:
    """What was seen of one job."""

    code: int
    lasted: float  # seconds from the kill to the end of torchrun
    lines: list[str] = field(default_factory=list)  # of its stdout
    stderr: str = ""

    def count(self, pattern: str) -> int:
        return sum(bool(re.match(pattern, line)) for line in self.lines)


def run(restarts: int, steps: int) -> Outcome:
    """Start the job, kill its first sampler after the first reported step, and wait for the end."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--max-restarts", str(restarts)]
    command += ["--standalone", str(_HERE / "torchrun_skipgram.py")]
    command += ["--steps", str(steps)]
    path = os.pathsep.join([str(_HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    # torch 2.13's agent keeps one store for all attempts, and gloo finds the dead ranks' addresses in it: no restart of
    # a gloo job succeeds, with or without a sampler. Switched off, rank 0 makes a store for each attempt.
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    print(f"\n$ torchrun {' '.join(command[3:-3])} torchrun_skipgram.py --steps {steps}", flush=True)
    outcome = Outcome(code=0, lasted=0.0)
    killed = 0.0
    with tempfile.TemporaryFile("w+") as stderr:
        job = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
        # Ends a job that hangs, and so the loop over its lines. torchrun passes SIGTERM on to its ranks.
        timer = threading.Timer(_PATIENCE, job.terminate)
        timer.start()
        try:
            assert job.stdout is not None
            for line in job.stdout:
                print(f"  {line}", end="", flush=True)
                outcome.lines.append(line.rstrip())
                if not killed and line.startswith("step"):
                    sampler = int(re.findall(r"sampler: pid (\d+)", "\n".join(outcome.lines))[0])
                    print(f"  SIGKILL to the sampler (pid {sampler})", flush=True)
                    killed = time.monotonic()
                    os.kill(sampler, signal.SIGKILL)
            outcome.code = job.wait()
        finally:
            timer.cancel()
            if job.poll() is None:
                job.terminate()
                job.wait()
        outcome.lasted = time.monotonic() - killed
        stderr.seek(0)
        outcome.stderr = stderr.read()
    return outcome


def summary(stderr: str) -> str:
    """Torchrun's own words on the root cause."""
    _, found, text = stderr.rpartition("Root Cause")
    return "\n".join(f"  {line}" for line in (found + text).splitlines() if found and not line.startswith("===="))


def main() -> int:
    """Both jobs, and what was to be seen."""
    ended = run(restarts=0, steps=1_000_000)
    print(f"the job has ended {ended.lasted:.2f} s after the kill, exit code {ended.code}; torchrun's summary says:")
    print(summary(ended.stderr))
    restarted = run(restarts=1, steps=200)
    print(f"the job has ended {restarted.lasted:.2f} s after the kill, exit code {restarted.code}")
    cause = summary(ended.stderr)
    expected = {
        "the first job fails": ended.code != 0,
        "its root cause is rank 0 and tells of the sampler": bool(
            re.search(r"rank +: 0 ", cause) and re.search(r"sampler \(pid \d+\) died after .* killed by SIGKILL", cause)
        ),
        "the second job is restarted once": restarted.count(r"rank 0: pid \d+, attempt 1") == 1,
        "it launches a second sampler": restarted.count("sampler: pid") == 2,
        "it completes": restarted.code == 0 and restarted.count("step +200 ") == 1,
    }
    for what, seen in expected.items():
        print(f"{'as expected' if seen else 'FAILED'}: {what}")
    if not all(expected.values()):
        print(ended.stderr, restarted.stderr, sep="\n")
    return 0 if all(expected.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
