"""A child ends when its parent ends, and only then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import harness
import psutil
import pytest

from watchdog import linux
from watchdog.parent import ParentWatchdog, exit_with_parent

METHODS = ("fork", "spawn", "forkserver")

SERVERS = """
def busy():
    targets.hello()
    while True: pass
def asleep_in_c():
    targets.hello()
    import ctypes
    ctypes.CDLL(None).sleep(60)
def closes_everything():
    os.closerange(3, 256)
    keep = [open("/dev/zero", "rb") for _ in range(10)]
    targets.hello()
    time.sleep(60)
def handles_term():
    def end(*_):
        with open(sys.argv[3], "w") as file: file.write("saved")
        os._exit(0)
    signal.signal(signal.SIGTERM, end)
    targets.hello()
    while True: time.sleep(0.1)
FUNCTIONS = {"idle": targets.sleep, "ignores TERM": targets.ignore_term, "busy": busy, "in C": asleep_in_c,
             "closes everything": closes_everything, "handles TERM": handles_term}
if __name__ == "__main__":
    ProcessWatchdog("sampler").launch(FUNCTIONS[sys.argv[2]], context=sys.argv[1])
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(7))
    time.sleep(60)
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("server", ["idle", "ignores TERM", "busy", "in C", "closes everything", "handles TERM"])
def test_a_server_does_not_outlive_a_killed_rank(rank, tmp_path, method, server):
    """G1, G3, G9: nothing in the rank can clean up after SIGKILL."""
    run = rank(SERVERS, method, server, str(tmp_path / "saved"))
    pid = run.server()
    os.kill(run.pid, signal.SIGKILL)
    run.process.wait(harness.DEADLOCK)
    harness.wait_for(lambda: not harness.alive(pid), 5, lambda: harness.describe(pid))
    if server == "handles TERM":
        assert (tmp_path / "saved").read_text() == "saved"


@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "SIGUSR1"])
def test_nor_one_that_ends_without_a_clean_up(rank, how):
    """G: a default SIGTERM or SIGHUP, and os._exit."""
    run = rank(SERVERS, "fork", "idle")
    pid = run.server()
    os.kill(run.pid, getattr(signal, how))
    run.process.wait(harness.DEADLOCK)
    harness.wait_for(lambda: not harness.alive(pid), 5, lambda: harness.describe(pid))


def test_a_plain_daemonic_child_does(rank):
    """Negative control, T13."""
    run = rank(
        """
        if __name__ == "__main__":
            multiprocessing.get_context("fork").Process(target=targets.sleep, daemon=True).start()
            time.sleep(60)
        """
    )
    pid = run.server()
    os.kill(run.pid, signal.SIGKILL)
    run.process.wait(harness.DEADLOCK)
    with pytest.raises(AssertionError):
        harness.wait_for(lambda: not harness.alive(pid), 1, lambda: harness.describe(pid))


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_killed_while_the_server_starts(rank, method):
    """G5: at any moment of the launch, there is no survivor."""
    for delay in range(0, 60, 6):
        run = rank(
            """
            if __name__ == "__main__":
                import ctypes
                def kill():
                    time.sleep(int(sys.argv[2]) / 1000)
                    os.kill(os.getpid(), signal.SIGKILL)
                threading.Thread(target=kill).start()
                ProcessWatchdog("sampler").launch(targets.sleep, context=sys.argv[1])
                time.sleep(60)
            """,
            method,
            str(delay),
        )
        assert run.process.wait(harness.DEADLOCK) == -signal.SIGKILL
        run.assert_nothing_left()


CHILD = """
from watchdog.parent import ParentWatchdog, exit_with_parent
def child(exit_code):
    parent = ParentWatchdog()
    exit_with_parent(check_interval=0.1, exit_code=exit_code)
    exit_with_parent(check_interval=0.1, exit_code=exit_code)
    assert parent.is_alive() and threading.active_count() == 2
    sys.stdout.write("unflushed ")
    targets.hello()
    time.sleep(60)
if __name__ == "__main__":
    how = sys.argv[1]
    if how in ("fork", "spawn", "forkserver"):
        def start(): multiprocessing.get_context(how).Process(target=child, args=(3,)).start()
    else:
        def start(): subprocess.Popen([sys.executable, "-c", f"import runpy; runpy.run_path({__file__!r})['child'](3)"])
    thread = threading.Thread(target=start)  # T8: one that ends
    thread.start()
    thread.join()
    say("started")
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [*METHODS, "command"])
def test_exit_with_parent(rank, how):
    """The thread that started it may end, the fork server is no parent, and an orphan is adopted by a subreaper."""
    run = rank(CHILD, how)
    pid = int(run.expect("unflushed server "))
    run.expect("started")
    assert psutil.Process(pid).is_running()
    os.kill(run.pid, signal.SIGKILL)
    run.process.wait(harness.DEADLOCK)
    harness.wait_for(lambda: not harness.alive(pid), 5, lambda: harness.describe(pid))


def test_it_lives_as_long_as_its_parent(rank):
    """G9: closed and reused descriptors are no death of the parent; the next look finds it alive, and later dead."""
    run = rank(
        """
        from watchdog.parent import exit_with_parent
        def child():
            exit_with_parent(check_interval=0.05)
            os.closerange(3, 256)
            files = [open("/dev/zero", "rb") for _ in range(10)]
            reader, writer = os.pipe()
            os.close(writer)
            end = time.monotonic() + 0.5
            until(lambda: time.monotonic() > end)
            targets.hello()
            time.sleep(60)
        if __name__ == "__main__":
            multiprocessing.get_context("fork").Process(target=child).start()
            time.sleep(60)
        """
    )
    pid = run.server()
    os.kill(run.pid, signal.SIGKILL)
    run.process.wait(harness.DEADLOCK)
    harness.wait_for(lambda: not harness.alive(pid), 5, lambda: harness.describe(pid))


def test_a_parent_that_is_gone_already():
    """The pid was passed, and nobody has it; or somebody younger than the child has."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    source = "import sys, time; from watchdog.parent import *; {}; time.sleep(60)"
    for argument in (f"{dead.pid}, exit_code=9", None):
        with subprocess.Popen(["sleep", "60"]) as younger:
            code = (
                source.format(f"exit_with_parent({argument})")
                if argument
                else (
                    "import subprocess, time; from watchdog.parent import *; p = subprocess.Popen(['sleep', '1']);"
                    "time.sleep(0.05); exit_with_parent(p.pid, exit_code=9); time.sleep(60)"
                )
            )
            run = subprocess.run([sys.executable, "-c", code], timeout=30)
            assert run.returncode == 9
            younger.kill()


def test_the_answer_never_turns(rank):
    """`is_alive()` stays False, whoever gets the pid."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert ParentWatchdog().is_alive()
    assert ParentWatchdog(os.getpid()).is_alive()
    process.communicate()
    watchdog = ParentWatchdog(process.pid)
    assert not watchdog.is_alive()
    assert not watchdog.is_alive()


def test_a_number_that_is_reused_between_two_looks(monkeypatch):
    """G9: what is readable then is somebody's file, and no death."""
    is_readable = linux.is_readable
    watchdog = ParentWatchdog()

    def reuse(pidfd):
        with open("/dev/zero", "rb") as file:
            os.dup2(file.fileno(), pidfd.number)
        return is_readable(pidfd)

    monkeypatch.setattr(linux, "is_readable", reuse)
    number = watchdog._handle.pidfd.number
    assert watchdog.is_alive()
    os.close(number)
    monkeypatch.undo()
    assert watchdog.is_alive()


def test_without_a_parent_that_can_be_seen():
    """The first process of a PID namespace; and a child of PID 1, which is a parent like any other."""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c"]
    first = "from watchdog.parent import exit_with_parent\ntry: exit_with_parent()\nexcept ValueError as e: print(e)"
    run = subprocess.run([*command, first], capture_output=True, text=True, timeout=30)
    if "unshare" in run.stderr:
        pytest.skip(f"no PID namespaces here: {run.stderr.strip()}")
    assert "getppid() is 0" in run.stdout
    child = (
        "import os; from watchdog.parent import *; exit_with_parent(); print(os.getppid(), ParentWatchdog().is_alive())"
    )
    source = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', {child!r}]).returncode)"
    run = subprocess.run([*command, source], capture_output=True, text=True, timeout=30)
    assert run.stdout == "1 True\n", run


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (TypeError, {"parent_pid": "1"}),
        (ValueError, {"parent_pid": -1}),
        (ValueError, {"parent_pid": 0}),
        (ValueError, {"check_interval": 0}),
        (ValueError, {"check_interval": float("nan")}),
        (ValueError, {"exit_code": 256}),
        (ValueError, {"exit_code": -9}),
        (TypeError, {"exit_code": None}),
    ],
)
def test_bad_input(error, arguments):
    """The value stands in the message."""
    (value,) = arguments.values()
    with pytest.raises(error, match=str(value)):
        exit_with_parent(**arguments)
