"""The exit status may be lost, stolen, late or wrong: the death is seen all the same, and no status is invented."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from watchdog import linux

METHODS = ("fork", "spawn")
TRUE = "killed by SIGKILL (exit code -9)"
LOST = "exit status unavailable"


def kernel_remembers() -> bool:
    """Whether this kernel tells the status of a process that somebody else reaped (Linux 6.15)."""
    process = subprocess.Popen(["true"])
    pidfd = linux.pidfd_open(process.pid)
    process.wait()
    return pidfd is not None and linux.recall_status(pidfd) is not None


# Before Linux 6.15 nobody can tell a status that was taken.
FORGETFUL = "import watchdog.linux; watchdog.linux.recall_status = lambda pidfd: None\n"

# How the status is taken, before (or as) the server dies. Each defines steal(process), which returns once it is gone.
THIEVES = {
    "waitpid(-1)": """
        def steal(process):
            threading.Thread(target=lambda: os.waitpid(-1, 0), daemon=True).start()
    """,
    "psutil wait_procs": """
        import psutil
        def steal(process):
            threading.Thread(target=lambda: psutil.wait_procs(psutil.Process().children()), daemon=True).start()
    """,
    "SIGCHLD ignored": """
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        def steal(process): pass
    """,
    "SIGCHLD handler": """
        def reap(*_):
            try:
                while os.waitpid(-1, os.WNOHANG)[0]: pass
            except ChildProcessError: pass
        signal.signal(signal.SIGCHLD, reap)
        def steal(process): pass
    """,
    "another thread joins": """
        def steal(process):
            wait = process.join if hasattr(process, "join") else process.wait
            threading.Thread(target=wait, daemon=True).start()
    """,
}
SCRIPT = """
if __name__ == "__main__":
    watchdog = ProcessWatchdog("sampler")
    if sys.argv[1] == "command":
        process = watchdog.launch_command([sys.executable, "-c", "import targets; targets.sleep()"])
    elif sys.argv[1] == "popen":
        process = subprocess.Popen([sys.executable, "-c", "import targets; targets.sleep()"])
        watchdog.watch(process)
    else:
        process = watchdog.launch(targets.sleep, context=sys.argv[1])
    steal(process)
    say("stealing")
    while True:
        time.sleep(0.01)  # so that a SIGCHLD handler gets its turn
"""


def steal(rank, thief: str, kind: str, extra: str = ""):
    run = rank(textwrap.dedent(THIEVES[thief]) + extra + SCRIPT, kind)
    pid = run.server()
    run.expect("stealing")
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 1, run.describe()
    assert len(run.reports()) == 1
    run.assert_nothing_left()
    return run.reports()[0]


@pytest.mark.parametrize("kind", [*METHODS, "command", "popen"])
@pytest.mark.parametrize("thief", THIEVES)
def test_a_stolen_status_is_recovered_or_said_to_be_lost(rank, thief, kind):
    """E1, E3, E5, E11: the true status where the kernel tells it (Linux 6.15), never "alive" and never a success."""
    report = steal(rank, thief, kind)
    if kernel_remembers():
        assert TRUE in report
    else:
        assert TRUE in report or f"{LOST} (reaped elsewhere)" in report


@pytest.mark.parametrize("kind", [*METHODS, "command"])
@pytest.mark.parametrize("thief", ["waitpid(-1)", "SIGCHLD ignored", "psutil wait_procs"])
def test_where_the_kernel_forgets_the_status_is_lost(rank, thief, kind):
    """The same on an older kernel."""
    report = steal(rank, thief, kind, FORGETFUL)
    # A thief that waits may come later than our look; SIGCHLD ignored leaves nothing to look at.
    assert f"{LOST} (reaped elsewhere)" in report or (TRUE in report and thief != "SIGCHLD ignored")


@pytest.mark.parametrize("forgetful", [False, True])
def test_popen_calls_a_stolen_status_zero(rank, forgetful):
    """A Popen whose status was taken says 0 to everybody who asks; we say what the kernel knows.

    Where it knows nothing (before Linux 6.15) the 0 is believed, and seen: nearly always it is what the owner's own
    wait() got, and to abort then would kill healthy jobs.
    """
    run = rank(
        (FORGETFUL if forgetful else "")
        + """
if __name__ == "__main__":
    logging.basicConfig(format="%(levelname)s %(message)s")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    process = subprocess.Popen([sys.executable, "-c", "import targets; targets.sleep()"])
    watchdog = ProcessWatchdog("sampler", on_death=lambda death: None, signal_grace=0)
    watchdog.watch(process)
    process.kill()
    say("popen", process.wait())
    until(lambda: watchdog.death is not None)
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("watchdog")])
"""
    )
    assert run.expect("popen ") == "0"
    assert run.wait() == 0, run.describe()
    if forgetful or not kernel_remembers():
        assert run.stderr.startswith("WARNING")
        assert "exited with code 0 while still watched" in run.stderr
    else:
        assert TRUE in run.stderr


@pytest.mark.parametrize("forgetful", [False, True])
def test_a_killed_fork_server_is_no_death(rank, forgetful):
    """T10: exitcode says 255 and is_alive() False of a server that lives; its own death is seen later."""
    run = rank(
        (FORGETFUL if forgetful else "")
        + """
if __name__ == "__main__":
    from multiprocessing import forkserver
    watchdog = ProcessWatchdog("sampler", poll_interval=0.02)
    process = watchdog.launch(targets.sleep, context="forkserver")
    say("launched")
    sys.stdin.close()
    until(lambda: os.path.exists(sys.argv[1]))
    os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
    until(lambda: not process.is_alive())
    assert process.exitcode == 255
    beats = time.monotonic() + 0.3
    until(lambda: time.monotonic() > beats)
    assert watchdog.armed and watchdog.death is None
    say("still armed")
    block_in_c()
""",
        str(rank._folder),
    )
    pid = run.server()
    run.expect("still armed")
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 1
    # Its new parent is the tests' process, which has yet to reap it: /proc still tells.
    assert TRUE in run.reports()[0] or LOST in run.reports()[0]


def test_a_naive_poll_misses_a_stolen_status(rank):
    """Negative control: `is_alive()` stays True for ever."""
    run = rank(
        """
        if __name__ == "__main__":
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            process = multiprocessing.get_context("fork").Process(target=targets.sleep)
            process.start()
            process.kill()
            until(lambda: not os.path.exists(f"/proc/{process.pid}"))
            say("naive", process.is_alive(), process.exitcode)
            os._exit(0)
        """
    )
    assert run.expect("naive ") == "True None"
    run.wait()


def test_a_users_join_is_not_disturbed(rank):
    """T3: main thread joins the very server that we reap; it sees the code each time."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler", on_death=lambda death: None)
            wrong = []
            for round in range(100):
                process = watchdog.launch(os._exit, (3,), context="fork")
                process.join()
                if process.exitcode != 3 or process.is_alive():
                    wrong.append((process.exitcode, process.is_alive()))
                until(lambda: not watchdog.armed)
            say("wrong", wrong)
        """
    )
    assert run.expect("wrong ") == "[]"
    assert run.wait() == 0, run.describe()


@pytest.mark.parametrize("reuse", ["", "files with data", "silent pipes"])
def test_closed_descriptors_in_the_rank(rank, reuse):
    """A rank that closes everything, and opens other files under the numbers: no false alarm, no spinning, no missed death."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler", poll_interval=0.05)
            process = watchdog.launch(targets.sleep, context="fork")
            os.closerange(3, 64)
            if sys.argv[1] == "files with data":
                files = [open("/dev/zero", "rb", buffering=0) for _ in range(20)]
            elif sys.argv[1]:
                pipes = [os.pipe() for _ in range(10)]
            cpu, beats = time.process_time(), time.monotonic() + 0.5
            until(lambda: time.monotonic() > beats)
            assert watchdog.armed and watchdog.death is None
            say("still armed", time.process_time() - cpu)
            time.sleep(60)
        """,
        reuse,
    )
    pid = run.server()
    assert float(run.expect("still armed ")) < 0.25
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 1
    assert TRUE in run.reports()[0]


def test_files_that_got_our_numbers_are_left_alone(rank, tmp_path):
    """What the rank opens after it closed everything is neither written to nor closed by us."""
    run = rank(
        """
        if __name__ == "__main__":
            import gc
            watchdog = ProcessWatchdog("sampler", poll_interval=0.05)
            watchdog.launch_command(["sleep", "60"])  # multiprocessing closes a descriptor of its own in the end
            os.closerange(3, 64)
            files = [open(os.path.join(sys.argv[1], f"0-{n}"), "wb", buffering=0) for n in range(30)]
            [file.write(b"mine") for file in files]
            assert watchdog.stop() == -15
            assert watchdog.launch_command(["sleep", "60"]) is not None
            gc.collect()
            assert watchdog.stop() == -15
            watchdog = None
            gc.collect()
            for file in files:
                file.write(b" and mine")
                file.close()
            say("good")
        """,
        str(tmp_path),
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()
    contents = {path.read_bytes() for path in tmp_path.iterdir() if path.name[1] == "-"}
    assert contents == {b"mine and mine"}


@pytest.mark.parametrize("closed", [(1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("method", ["fork"])  # under spawn multiprocessing itself refuses without fd 2
def test_standard_descriptors_that_are_closed(rank, method, closed):
    """Ours do not take their numbers: a stray write to "stderr" disarms nobody."""
    run = rank(
        """
        def server():
            for number in (0, 1, 2):
                try: os.write(number, b"\\1" * 4096)
                except OSError: pass
            os._exit(3)
        if __name__ == "__main__":
            for number in map(int, sys.argv[2].split(",")):
                os.close(number)
            watchdog = ProcessWatchdog("sampler")
            watchdog.launch(server, context=sys.argv[1])
            for number in (0, 1, 2):
                try: os.write(number, b"\\1" * 4096)
                except OSError: pass
            time.sleep(60)
        """,
        method,
        ",".join(map(str, closed)),
    )
    assert run.wait(30) == 1


@pytest.mark.parametrize("code", [2**31, -(2**31) - 1, 0xC0000005, 2**80])
def test_codes_that_no_c_int_holds(rank, code):
    """The server ends with what the system makes of them, and its copy of the rank does nothing."""
    run = rank(
        f"""
        if __name__ == "__main__":
            ProcessWatchdog("sampler", expected_exit_codes=()).launch(targets.leave, ({code},), context="fork")
            block_in_c()
        """
    )
    assert run.wait(30) == 1
    assert f"exited with code {code & 0xFF}" in run.reports()[0]


def test_an_interval_of_a_thousand_years(rank):
    """It only matters to handles that need polling."""
    run = rank(
        """
        if __name__ == "__main__":
            process = ProcessWatchdog("sampler", poll_interval=1e300).launch(targets.sleep, context="fork")
            process.kill()
            block_in_c()
        """
    )
    assert run.wait(30) == 1
    assert "WARNING" not in run.stderr


NO_PIDFD = {
    "old kernel": "ENOSYS",
    "seccomp": "EPERM",
    "no descriptor left": "EMFILE",
}


@pytest.mark.parametrize("why", NO_PIDFD)
@pytest.mark.parametrize("kind", [*METHODS, "forkserver", "command", "popen"])
def test_without_pidfd_it_polls(rank, kind, why):
    """T23: slower by the interval at most, and as sure."""
    run = rank(
        f"""
import errno, select
def refuse(*_): raise OSError(errno.{NO_PIDFD[why]}, "refused")
os.pidfd_open = refuse
def steal(process): pass
"""
        + SCRIPT.replace('ProcessWatchdog("sampler")', 'ProcessWatchdog("sampler", poll_interval=0.05)'),
        kind,
    )
    pid = run.server()
    run.expect("stealing")
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 1
    assert TRUE in run.reports()[0]
    run.assert_nothing_left()


def test_an_interpreter_built_without_pidfd(rank):
    """Builds against old headers lack `os.pidfd_open` and `signal.pidfd_send_signal`; the kernel has both."""
    if not sys.platform.startswith("linux"):
        pytest.skip("Linux only")
    run = rank(
        """
        del os.pidfd_open
        del signal.pidfd_send_signal
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler", poll_interval=30)
            watchdog.launch(targets.sleep, context="fork")
            assert watchdog.stop() == -15
            watchdog.launch(targets.hard_exit, (3,), context="fork")
            block_in_c()
        """
    )
    assert run.wait(20) == 1
    assert "exited with code 3" in run.reports()[0]


def test_a_process_of_somebody_else(rank):
    """B10: a psutil handle of a process that is no child of the rank fires too."""
    run = rank(
        FORGETFUL
        + """
if __name__ == "__main__":
    import psutil
    source = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE);" \\
             "print(p.pid, flush=True); input(); p.kill(); p.wait(); input()"
    parent = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    watchdog = ProcessWatchdog("stranger", on_death=lambda death: say("death", str(death).splitlines()[0]))
    watchdog.watch(psutil.Process(pid))
    parent.stdin.write("\\n")
    parent.stdin.flush()
    until(lambda: watchdog.death)
    parent.stdin.close()
    parent.wait()
"""
    )
    report = run.expect("death ")
    assert TRUE in report or "exit status unavailable (not a child)" in report
    assert run.wait() == 0, run.describe()


def test_transient_errors_do_not_end_the_watching(rank):
    """A9: looks that fail now and then, or a hundred times, are no death and no reason to stop."""
    run = rank(
        """
        if __name__ == "__main__":
            logging.basicConfig(format="%(levelname)s %(message)s")
            class Handle:
                pid, looks, exitcode = 4711, 0, None
                def is_alive(self):
                    Handle.looks += 1
                    if Handle.looks <= 20: raise OSError("try again")
                    if Handle.looks < 25: return True
                    Handle.exitcode = -9
                    return False
            ProcessWatchdog("flaky", poll_interval=0.01).watch(Handle())
            block_in_c()
        """
    )
    assert run.wait() == 1
    assert run.stderr.count("WARNING") == 1
    assert TRUE in run.reports()[0]
