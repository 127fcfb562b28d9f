"""What an abort ends beside the rank, and what it leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import harness

SCRIPT = """
def stuck():
    targets.hello()
    while True:
        try:
            time.sleep(60)
        except BaseException:
            pass
if __name__ == "__main__":
    for number in range(2):
        multiprocessing.get_context("fork").Process(target=stuck).start()
    elsewhere = subprocess.Popen([sys.executable, "-c", "import targets; targets.sleep()"], start_new_session=True)
    say("elsewhere", elsewhere.pid)
    process = ProcessWatchdog("sampler").launch(time.sleep, (60,), context="fork")
    until(lambda: os.path.exists(sys.argv[1]))
    process.kill() if sys.argv[2] == "kill" else sys.exit(os._exit(0) if sys.argv[2] == "exit" else 0)
    block_in_c()
"""


def start(rank, tmp_path, how):
    go = tmp_path / "go"
    run = rank(SCRIPT, str(go), how)
    elsewhere = int(run.expect("elsewhere "))
    harness.wait_for(lambda: len([line for line in run.out.lines if line.startswith("server")]) == 3, 30, run.describe)
    go.touch()
    return run, elsewhere


def test_an_abort_ends_what_is_left_in_the_session_that_the_rank_leads(rank, tmp_path):
    """Workers that wait for the dead server go with the rank; a process in a session of its own does not."""
    run, elsewhere = start(rank, tmp_path, "kill")
    assert run.process.wait(60) == 1
    harness.wait_for(lambda: run.family() == [elsewhere], 5, lambda: f"left: {run.family()}")
    os.kill(elsewhere, signal.SIGKILL)
    run.assert_nothing_left()


def test_another_end_leaves_the_session_alone(rank, tmp_path):
    """G11: only after an abort."""
    run, _ = start(rank, tmp_path, "exit")
    assert run.process.wait(60) == 0
    # The server goes with its rank; two children and the process elsewhere stay.
    harness.wait_for(lambda: len(run.family()) == 3, 5, lambda: f"left: {run.family()}")


def test_a_rank_that_leads_no_session_kills_nobody(tmp_path):
    """Run from a shell, the session is the shell's."""
    script = tmp_path / "rank.py"
    script.write_text(
        "import os, time\nfrom watchdog.process import ProcessWatchdog\n"
        "ProcessWatchdog('sampler').launch_command(['false'])\ntime.sleep(60)\n"
    )
    shell = f"sleep 60 & echo $!; {sys.executable} {script}; echo code $?; kill $! && echo alive"
    run = subprocess.run(["setsid", "--wait", "sh", "-c", shell], capture_output=True, text=True, timeout=60)
    assert run.stdout.splitlines()[1:] == ["code 1", "alive"], run
