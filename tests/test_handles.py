"""The three branches of the watch loop (alive, expected end, abnormal end) with stub handles, and adopted ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import psutil
import pytest

from watchdog.death import Death, Exited, Lost, Signalled
from watchdog.process import ProcessWatchdog


class Stub:
    """What `watch` asks of a handle, and no more. Its pid is nobody's business."""

    pid = 1  # never to be opened or looked up: it is init

    def __init__(self) -> None:
        self.exitcode: object = None
        self.asked = threading.Event()

    def is_alive(self) -> bool:
        self.asked.set()
        return self.exitcode is None


class PollStub:
    """The other interface."""

    def __init__(self) -> None:
        self.returncode: object = None
        self.asked = threading.Event()

    def poll(self) -> object:
        self.asked.set()
        return self.returncode


@pytest.fixture
def deaths():
    """Collects deaths as `on_death` and lets the test wait for one."""

    class Deaths(list):
        arrived = threading.Event()

        def __call__(self, death: Death) -> None:
            self.append(death)
            self.arrived.set()

    deaths = Deaths()
    deaths.arrived = threading.Event()
    return deaths


def end(stub: object, code: object) -> None:
    setattr(stub, "exitcode" if isinstance(stub, Stub) else "returncode", code)


@pytest.mark.parametrize("make", [Stub, PollStub])
def test_alive(make, deaths):
    """Nothing happens while the handle says alive, for as many looks as there are."""
    stub, watchdog = make(), ProcessWatchdog("stub", poll_interval=0.001, on_death=deaths)
    watchdog.watch(stub)
    for _ in range(50):
        stub.asked.clear()
        assert stub.asked.wait(10)
    assert watchdog.armed
    assert watchdog.death is None
    assert watchdog.process is stub
    assert watchdog.stop() is None
    assert not watchdog.armed
    assert not deaths


@pytest.mark.parametrize("make", [Stub, PollStub])
@pytest.mark.parametrize("code", [0, 7])
def test_expected_end(make, code, deaths, caplog):
    """No death handler; INFO, then a WARNING if the rank still runs after the grace."""
    caplog.set_level("INFO", "watchdog.process")
    stub = make()
    watchdog = ProcessWatchdog(
        "stub", poll_interval=0.001, on_death=deaths, expected_exit_codes=(0, 7), signal_grace=0.01
    )
    watchdog.watch(stub)
    end(stub, code)
    deadline = time.monotonic() + 30
    while not any(record.levelname == "WARNING" for record in caplog.records):
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.005)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert f"exited with code {code} while still watched" in caplog.text
    assert watchdog.death == Death(
        "stub", getattr(stub, "pid", None), Exited(code), watchdog.death.uptime, watchdog.death.cause
    )
    assert not watchdog.armed
    assert not deaths


@pytest.mark.parametrize("make", [Stub, PollStub])
@pytest.mark.parametrize(
    ("code", "status"),
    [(1, Exited(1)), (255, Exited(255)), (-9, Signalled(9)), (-37, Signalled(37)), ("strange", Lost())],
)
def test_abnormal_end(make, code, status, deaths, caplog):
    """The callback gets the Death once, and one ERROR record was logged before."""
    stub, watchdog = make(), ProcessWatchdog("stub", poll_interval=0.001, on_death=deaths)
    watchdog.watch(stub)
    end(stub, code)
    assert deaths.arrived.wait(10)
    assert [death.status for death in deaths] == [status]
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert caplog.records[0].event == deaths[0].as_dict()


def test_a_stub_that_is_dead_without_a_code_is_lost(deaths):
    """`exitcode` None is no answer."""
    stub, watchdog = Stub(), ProcessWatchdog("stub", poll_interval=0.001, on_death=deaths)
    stub.is_alive = lambda: False
    watchdog.watch(stub)
    assert deaths.arrived.wait(10)
    assert deaths[0].status == Lost()
    assert "exit status unavailable" in str(deaths[0])


def test_disarmed_in_time(deaths):
    """An end after `disarm` is nobody's death, and one within the grace of a signal is silent once disarmed."""
    stub, watchdog = Stub(), ProcessWatchdog("stub", poll_interval=0.001, on_death=deaths, signal_grace=30)
    watchdog.watch(stub)
    watchdog.disarm()
    watchdog.disarm()
    end(stub, -9)
    again = Stub()
    watchdog.watch(again)
    end(again, -15)
    watchdog.disarm()
    for thread in threading.enumerate():
        if thread.name == "watchdog-stub":
            thread.join(10)
            assert not thread.is_alive()
    assert not deaths


def test_watching_twice_is_an_error():
    """One watchdog, one server."""
    watchdog = ProcessWatchdog("stub", poll_interval=0.001)
    watchdog.watch(Stub())
    with pytest.raises(RuntimeError, match="watches"):
        watchdog.watch(Stub())
    with pytest.raises(RuntimeError, match="watches"):
        watchdog.launch(print)
    watchdog.disarm()
    watchdog.watch(Stub())
    watchdog.stop()


def test_a_handle_that_is_dead_already(deaths):
    """It is reported at once, though its pid is free by now."""
    process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(3)"])
    process.wait()
    ProcessWatchdog("late", poll_interval=30, on_death=deaths).watch(process)
    assert deaths.arrived.wait(10)
    assert deaths[0].status == Exited(3)


def test_an_adopted_process_is_never_signalled(deaths):
    """stop() and leaving `with` only disarm."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with ProcessWatchdog("adopted", on_death=deaths) as watchdog:
            watchdog.watch(process)
            assert watchdog.armed
        assert watchdog.stop() is None
        assert process.poll() is None
    assert process.returncode == 1
    assert not deaths


def test_an_adopted_process_is_not_reaped(deaths):
    """Its status is its owner's."""
    process = subprocess.Popen([sys.executable, "-c", "import os; os._exit(3)"])
    ProcessWatchdog("adopted", on_death=deaths).watch(process)
    assert deaths.arrived.wait(10)
    assert process.returncode is None
    assert process.wait() == 3


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_the_default_process_class_under_any_default_method(rank, method):
    """T10: `multiprocessing.Process` does not name its start method; a living child of a fork server is alive."""
    run = rank(
        """
        class Own(multiprocessing.Process):
            def run(self): targets.sleep()
        if __name__ == "__main__":
            multiprocessing.set_start_method(sys.argv[1])
            for number, make in enumerate((lambda: multiprocessing.Process(target=targets.sleep, daemon=True), Own)):
                process = make()
                process.start()
                watchdog = ProcessWatchdog(f"s{number}", poll_interval=0.01, on_death=lambda death: say("died", death))
                watchdog.watch(process)
                launched = ProcessWatchdog(f"l{number}", poll_interval=0.01)
                launched.launch(targets.sleep, context=multiprocessing)
                beats = time.monotonic() + 0.3
                until(lambda: time.monotonic() > beats)
                assert watchdog.armed and launched.armed and process.is_alive()
                watchdog.disarm()
                process.kill()
                process.join()
            say("good")
        """,
        method,
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()
    assert "died" not in run.stdout


def test_a_popen_of_the_process_that_this_one_was_forked_from(rank):
    """It is nobody's child here; a clear error, and no death."""
    run = rank(
        """
        if __name__ == "__main__":
            process = subprocess.Popen(["sleep", "60"])
            pid = os.fork()
            if pid == 0:
                try:
                    ProcessWatchdog("s").watch(process)
                except ValueError as error:
                    say("refused", "forked from" in str(error))
                os._exit(0)
            os.waitpid(pid, 0)
            process.kill()
            process.wait()
        """
    )
    assert run.expect("refused ") == "True"
    assert run.wait() == 0, run.describe()


@pytest.mark.parametrize("make", [subprocess.Popen, psutil.Popen])
def test_a_finished_handle_with_code_zero(make, deaths, caplog):
    """An expected end, though only the handle still knows it."""
    process = make([sys.executable, "-c", "pass"])
    process.wait()
    caplog.set_level("INFO", "watchdog.process")
    watchdog = ProcessWatchdog("done", on_death=deaths)
    watchdog.watch(process)
    deadline = time.monotonic() + 10
    while watchdog.death is None:
        assert time.monotonic() < deadline
        time.sleep(0.002)
    watchdog.stop()
    assert watchdog.death.status == Exited(0)
    assert not deaths


def test_an_owner_that_waits_gets_its_zero_in_peace(rank):
    """E11 on a kernel that forgets: the main thread sits in `wait()` of a command that ends with 0."""
    run = rank(
        """
        import watchdog.linux
        watchdog.linux.recall_status = lambda pidfd: None
        if __name__ == "__main__":
            for round in range(40):
                with ProcessWatchdog("command") as watchdog:
                    assert watchdog.launch_command([sys.executable, "-S", "-c", "pass"]).wait() == 0
                    watchdog._watch.handle.wait(10)
            say("good")
        """
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()


def test_launching_after_an_adopted_handle_was_let_go():
    """At once, not a moment later."""
    for end in (ProcessWatchdog.stop, ProcessWatchdog.disarm):
        watchdog = ProcessWatchdog("stub")
        watchdog.watch(Stub())
        end(watchdog)
        assert watchdog.launch_command(["sleep", "60"]).poll() is None
        assert watchdog.stop() == -15


def test_stop_leaves_the_code_in_the_handle():
    """Though the watch thread reaps at the same moment."""
    watchdog = ProcessWatchdog("command")
    for _ in range(50):
        process = watchdog.launch_command(["sleep", "60"])
        assert watchdog.stop() == -15
        assert process.returncode == -15


RECYCLE = """
import subprocess, sys
pid = int(sys.argv[1])
for _ in range(50):
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write(str(pid - 1))
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    if process.pid == pid:
        print("recycled", flush=True)
        sys.stdin.read()
        print("ended" if process.poll() else "untouched", flush=True)
        break
    process.communicate()
"""


@pytest.fixture
def recycle():
    """Gives a pid to a living process of somebody else's, as a busy machine does."""
    helpers = []

    def recycle(pid: int) -> subprocess.Popen:
        command = [sys.executable, "-c", RECYCLE, str(pid)]
        helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        helpers.append(helper)
        if helper.stdout.readline() != b"recycled\n":
            pytest.skip(f"pids cannot be chosen here: {helper.communicate()[1].decode()[-200:]}")
        return helper

    yield recycle
    for helper in helpers:
        helper.communicate()


@pytest.mark.parametrize("make", [psutil.Process, None])
def test_a_recycled_pid_is_another_process(make, deaths, recycle):
    """E13: a handle whose pid belongs to somebody else by now is a dead one, and that process gets no signal."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    handle = make(process.pid) if make else process
    process.stdin.close()
    os.waitpid(process.pid, 0)  # a thief
    other = recycle(process.pid)
    watchdog = ProcessWatchdog("recycled", on_death=deaths)
    watchdog.watch(handle)
    assert deaths.arrived.wait(10)
    assert deaths[0].status == Lost()
    watchdog.stop()
    assert other.communicate()[0] == b"untouched\n"
    process.returncode = 1  # so that the handle, which never learnt it, does not complain
