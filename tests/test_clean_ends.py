"""A healthy job is never killed or blamed while it ends, and an ended one leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import textwrap
import time

import harness
import pytest

METHODS = ("fork", "spawn", "forkserver")

ENDS = {
    "return": ("pass", 0),
    "sys.exit": ("sys.exit(5)", 5),
    "exception": ("raise ValueError('real cause')", 1),
    "terminate, then slow clean-up": ("process.terminate(); process.join(); time.sleep(0.3)", 0),
    "finally": ("""
        try:
            raise ValueError('real cause')
        finally:
            process.terminate()
            time.sleep(0.3)
     """, 1),
    "stop": ("assert watchdog.stop() == -15; time.sleep(0.3)", 0),
    "stop twice": ("watchdog.stop(); watchdog.stop()", 0),
    "disarm, then kill": ("watchdog.disarm(); process.kill(); time.sleep(0.3)", 0),
    "terminate by active_children": ("[child.terminate() for child in multiprocessing.active_children()]; time.sleep(0.3)", 0),
    "user's atexit after ours": ("import atexit; atexit.register(lambda: (process.terminate(), time.sleep(0.3)))", 0),
    "a non-daemon thread outlives main": ("threading.Thread(target=lambda: (time.sleep(0.3), process.terminate())).start()", 0),
    "closed by the user": ("process.terminate(); process.join(); process.close()", 0),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_normal_end_is_silent(rank, method, how):
    """C: no report, the rank's own exit code, nothing left."""
    code, expected = ENDS[how]
    run = rank(
        f"""
import atexit
if __name__ == "__main__":
    logging.basicConfig(level=logging.DEBUG)
    watchdog = ProcessWatchdog("sampler", signal_grace=0, poll_interval=0.05)
    process = watchdog.launch(targets.sleep, context=sys.argv[1])
    say("launched", process.pid)
{textwrap.indent(textwrap.dedent(code), "    ")}
""",
        method,
    )
    pid = int(run.expect("launched "))
    assert run.wait() == expected, run.describe()
    assert "ERROR" not in run.stderr
    assert not run.reports()
    assert ("ValueError: real cause" in run.stderr) == ("real cause" in code)
    run.assert_nothing_left()
    assert not os.path.exists(f"/proc/{pid}")


@pytest.mark.parametrize("how", ["return", "stop", "with", "exception in with"])
def test_a_command_ends_with_its_rank(rank, how):
    """The same for `launch_command` and the context manager."""
    run = rank(
        """
        if __name__ == "__main__":
            argv = [sys.executable, "-c", "import targets; targets.sleep()"]
            watchdog = ProcessWatchdog("command", signal_grace=0)
            how = sys.argv[1]
            if "with" in how:
                with watchdog as entered:
                    assert entered is watchdog
                    process = watchdog.launch_command(argv)
                    say("launched", process.pid)
                    if "exception" in how:
                        raise KeyError("mine")
                assert process.returncode == -15
            else:
                process = watchdog.launch_command(argv)
                say("launched", process.pid)
                if how == "stop":
                    assert watchdog.stop() == -15 and process.poll() == -15
        """,
        how,
    )
    pid = int(run.expect("launched "))
    assert run.wait() == (1 if "exception" in how else 0), run.describe()
    assert not run.reports()
    assert not os.path.exists(f"/proc/{pid}")
    run.assert_nothing_left()


@pytest.mark.parametrize("outer", METHODS)
@pytest.mark.parametrize("daemon", [True, False])
def test_a_rank_that_is_a_child_of_multiprocessing(rank, outer, daemon):
    """C1, C3, T1: a perfect finish with a non-daemon helper that needs a little longer."""
    run = rank(NESTED + CHILD_RANK, outer, str(daemon))
    assert run.wait() == 0, run.describe()
    run.expect("exit code 0")
    assert not run.reports()
    run.assert_nothing_left()


NESTED = """
import atexit
def helper():
    time.sleep(0.7)
    say("helper done")
"""
CHILD_RANK = """
def job(daemon):
    watchdog = ProcessWatchdog("sampler", signal_grace=0, poll_interval=0.05)
    watchdog.launch(targets.sleep, context="fork", daemon=daemon)
    multiprocessing.get_context("fork").Process(target=helper, daemon=False).start()
    atexit.register(time.sleep, 0.2)
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=job, args=(sys.argv[2] == "True",))
    child.start()
    child.join()
    say("exit code", child.exitcode)
"""


@pytest.mark.parametrize("outer", ["fork", "spawn"])
def test_disarming_by_atexit_alone_kills_such_a_rank(rank, outer):
    """Negative control for T1: up to Python 3.12 the finalizer is what saves it."""
    if sys.version_info >= (3, 13):
        pytest.skip("since Python 3.13 a child of multiprocessing runs atexit before it ends its daemons")
    naive = "import multiprocessing.util, watchdog.watching\nmultiprocessing.util.Finalize = lambda *a, **k: None\n"
    run = rank(naive + NESTED + CHILD_RANK, outer, "True")
    assert run.wait() == 0
    run.expect("exit code 1")
    assert run.reports()


def test_a_non_daemon_server_does_not_hold_the_exit(rank):
    """C9: plain multiprocessing would join it for ever."""
    run = rank(
        """
        if __name__ == "__main__":
            ProcessWatchdog("sampler").launch(targets.sleep, (1000,), context="fork", daemon=False)
        """
    )
    started = time.monotonic()
    assert run.wait() == 0
    assert time.monotonic() - started < 10
    assert not run.reports()
    run.assert_nothing_left()


def test_a_server_that_ignores_sigterm_is_killed(rank):
    """C5, E15: stop() waits, escalates, and tells the true code."""
    run = rank(
        """
        def ignores_term(pid):
            ignored = [line for line in open(f"/proc/{pid}/status") if line.startswith("SigIgn")][0].split()[1]
            return int(ignored, 16) & 1 << 14
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler")
            process = watchdog.launch(targets.ignore_term, context="fork")
            until(lambda: ignores_term(process.pid))
            started = time.monotonic()
            code = watchdog.stop(timeout=0.5)
            say("stopped", code, 0.5 <= time.monotonic() - started < 2.5, process.exitcode)
        """
    )
    assert run.expect("stopped ") == "-9 True -9"
    assert run.wait() == 0, run.describe()
    run.assert_nothing_left()


def test_a_stopped_server_is_alive_and_can_be_stopped(rank):
    """M1: SIGSTOP is no death; leaving needs SIGKILL then."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler", poll_interval=0.02)
            process = watchdog.launch(targets.sleep, context="fork")
            os.kill(process.pid, signal.SIGSTOP)
            until(lambda: open(f"/proc/{process.pid}/stat").read().split()[2] == "T")
            beats = time.monotonic() + 0.5
            until(lambda: time.monotonic() > beats)
            assert watchdog.armed and watchdog.death is None
            say("stopped", watchdog.stop(timeout=0.2))
        """
    )
    assert run.expect("stopped ") == "-9"
    assert run.wait() == 0, run.describe()


def test_stop_at_any_moment_never_reports(rank):
    """C5: disarmed before terminated, wherever the watch thread is."""
    run = rank(
        """
        if __name__ == "__main__":
            import random
            watchdog = ProcessWatchdog("sampler", poll_interval=0.005, signal_grace=0)
            for round in range(150):
                process = watchdog.launch(time.sleep, (60,), context="fork")
                time.sleep(random.random() * 0.01)
                assert watchdog.stop() == -15
            say("rounds", round + 1)
        """
    )
    assert run.expect("rounds ") == "150"
    assert run.wait() == 0, run.describe()
    assert not run.reports()


def test_a_naive_watch_reports_its_own_stop(rank):
    """Negative control: without the stop Event the rank's own SIGTERM to the server is a crash."""
    run = rank(
        """
        if __name__ == "__main__":
            from watchdog.record import StopEvent
            StopEvent.set = lambda self: None
            watchdog = ProcessWatchdog("sampler", signal_grace=0)
            watchdog.launch(targets.sleep, context="fork")
            watchdog.stop()
            block_in_c()
        """
    )
    assert run.wait() == 1
    assert run.reports()


@pytest.mark.parametrize("call", ["stop", "disarm"])
def test_calls_from_a_signal_handler_never_deadlock(rank, call):
    """D10, T31: a thousand signals, wherever they interrupt launch, stop and disarm."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler", poll_interval=0.01, signal_grace=0)
            handled = []
            def handler(*_):
                getattr(watchdog, sys.argv[1])()
                handled.append(1)
            signal.signal(signal.SIGUSR1, handler)
            watchdog.launch(time.sleep, (60,), context="fork")
            def storm():
                for _ in range(1000):
                    os.kill(os.getpid(), signal.SIGUSR1)
                    time.sleep(0.0005)
            thread = threading.Thread(target=storm)
            thread.start()
            while thread.is_alive():
                getattr(watchdog, sys.argv[1])()
            say("handled", len(handled) > 0)
            watchdog.stop()
        """,
        call,
    )
    assert run.expect("handled ") == "True"
    assert run.wait() == 0, run.describe()
    run.assert_nothing_left()


@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
def test_a_handler_that_stops_during_launch(rank, moment):
    """A SIGTERM handler that calls stop() and returns: no server runs after that."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler", signal_grace=0)
            calls = []
            signal.signal(signal.SIGUSR1, lambda *_: calls.append(watchdog.stop()))
            os.register_at_fork(**{sys.argv[1]: lambda: signal.raise_signal(signal.SIGUSR1)})
            process = watchdog.launch(targets.sleep, context="fork")
            assert calls == [None] and process.exitcode == -15 and not watchdog.armed
            say("good")
        """,
        moment,
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()
    assert not run.reports()
    run.assert_nothing_left()


@pytest.mark.parametrize("kind", ["fork", "command"])
def test_a_handler_that_raises_during_launch_leaves_no_server(rank, kind):
    """Nothing half started: an exception from a signal handler at any point of a launch."""
    run = rank(
        """
        if __name__ == "__main__":
            class Now(Exception): pass
            fired = []
            def handler(*_):
                fired.append(1)
                raise Now
            signal.signal(signal.SIGALRM, handler)
            raised = 0
            sleep = ["sleep", "60"]
            for round in range(1, 101):
                watchdog = ProcessWatchdog("sampler", signal_grace=0)
                fired.clear()
                try:
                    signal.setitimer(signal.ITIMER_REAL, round * 0.00005)
                    watchdog.launch(targets.sleep, context="fork") if sys.argv[1] == "fork" else watchdog.launch_command(sleep)
                    until(lambda: fired)  # an at-fork hook of somebody's may have swallowed it
                except (Now, RuntimeError) as error:
                    # threading turns one in its own lines into "release unlocked lock"; no name stays taken
                    assert fired and "sampler" not in str(error), error
                    raised += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                watchdog.stop()
            say("raised", raised > 50)
        """,
        kind,
    )
    assert run.expect("raised ") == "True"
    assert run.wait() == 0, run.describe()
    run.assert_nothing_left()


def test_expected_ends(rank):
    """F: an end with 0 makes no noise if the rank leaves within the grace, and a WARNING if it still runs, armed."""
    run = rank(
        """
        if __name__ == "__main__":
            logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
            early = ProcessWatchdog("early", signal_grace=0.2)
            early.launch(targets.leave, (0,), context="fork")
            coded = ProcessWatchdog("coded", expected_exit_codes=(0, 7, -15), signal_grace=0.2)
            coded.launch(targets.leave, (7,), context="fork")
            class Warned(logging.Handler):
                seen = []
                def emit(self, record): self.seen.append(record.getMessage())
            logging.getLogger().addHandler(Warned())
            until(lambda: sum("still watched" in text for text in Warned.seen) == 2)
            assert early.death.exitcode == 0 and not early.armed
            again = early.launch(targets.sleep, context="fork")
            assert again.is_alive() and early.armed
            late = ProcessWatchdog("late", signal_grace=30)
            late.launch(targets.leave, (0,), context="fork")
            until(lambda: late.death is not None)
        """
    )
    assert run.wait() == 0, run.describe()
    warnings = [line for line in run.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 2
    assert any("early (pid" in line and "exited with code 0 while still watched" in line for line in warnings)
    assert any("coded (pid" in line and "exited with code 7 while still watched" in line for line in warnings)
    assert "INFO late (pid" in run.stderr
    assert not run.reports()


def test_strict_watching_makes_an_early_zero_fatal(rank):
    """F: `expected_exit_codes=()`."""
    run = rank(
        """
        if __name__ == "__main__":
            ProcessWatchdog("sampler", expected_exit_codes=()).launch(targets.leave, (0,), context="spawn")
            block_in_c()
        """
    )
    assert run.wait() == 1
    assert "exited with code 0 while still watched" in run.reports()[0]


def test_a_warning_into_a_full_stderr_does_not_hold_the_exit(rank):
    """T32: nobody reads the rank's stderr; its normal end takes no longer for it."""
    reader, writer = os.pipe()
    try:
        run = rank(
            """
            if __name__ == "__main__":
                logging.basicConfig()
                watchdog = ProcessWatchdog("sampler", signal_grace=0.05)
                os.set_blocking(2, False)
                try:
                    while True: os.write(2, b"x" * 4096)
                except BlockingIOError:
                    os.set_blocking(2, True)
                watchdog.launch(targets.leave, (0,), context="fork")
                until(lambda: watchdog.death is not None)
                until(lambda: not [t for t in threading.enumerate() if t.name.startswith("watchdog")])
            """,
            stderr=writer,
        )
        assert run.wait(20) == 0
    finally:
        os.close(reader)
        os.close(writer)


def test_a_signal_to_the_rank_keeps_its_meaning(rank):
    """No handler is installed: SIGTERM ends the rank by SIGTERM, and a user's handler stays in place."""
    run = rank(
        """
        if __name__ == "__main__":
            mine = lambda *_: None
            signal.signal(signal.SIGUSR1, mine)
            before = [signal.getsignal(n) for n in sorted(signal.valid_signals())]
            ProcessWatchdog("sampler").launch(targets.sleep, context="fork")
            assert [signal.getsignal(n) for n in sorted(signal.valid_signals())] == before
            say("armed")
            block_in_c()
        """
    )
    run.expect("armed")
    run.server()
    os.kill(run.pid, signal.SIGTERM)
    assert run.process.wait(harness.DEADLOCK) == -signal.SIGTERM
    run.end()
    assert not run.reports()
