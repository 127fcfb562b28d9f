"""The exit does not depend on the report: whatever blocks or raises on the way delays it by two seconds at most."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import textwrap
import time

import pytest

BOUND = 2.0 + 1.0  # seconds; the second addend is for a busy machine

# Each breaks something of the report, then lets the server die. `broken` says how.
BREAKERS = {
    "handler raises": """
        class Broken(logging.Handler):
            def emit(self, record): raise OSError("disk full")
        logging.basicConfig(handlers=[Broken()])
    """,
    "handler blocks": """
        class Stuck(logging.Handler):
            def emit(self, record): threading.Event().wait()
        logging.basicConfig(handlers=[Stuck()])
    """,
    "handler's lock is held": """
        logging.basicConfig()
        logging.root.handlers[0].acquire()
    """,
    "logging module's lock is held": """
        logging.basicConfig()
        threading.Thread(target=lambda: (logging._acquireLock() if hasattr(logging, "_acquireLock") else
                                         logging._lock.acquire()), daemon=True).start()
    """,
    "stderr object's lock is held": """
        held = threading.Event()
        class Held:
            def write(self, text): threading.Event().wait()
            def flush(self): threading.Event().wait()
        sys.stderr = sys.stdout_ = Held()
        logging.basicConfig()
    """,
    "sys.stderr is None": "sys.stderr = None",
    "sys.stderr is closed": "sys.stderr.close() if False else setattr(sys, 'stderr', open(os.devnull, 'w')); sys.stderr.close()",
    "logger is disabled": "logging.getLogger('watchdog.process').disabled = True",
    "logging is disabled": "logging.disable(logging.CRITICAL)",
    "a filter drops the record": "logging.getLogger('watchdog.process').addFilter(lambda record: False)",
    "only a null handler": "logging.getLogger('watchdog').addHandler(logging.NullHandler())",
    "level too high": "logging.basicConfig(level=logging.CRITICAL); logging.root.handlers[0].setLevel(logging.CRITICAL)",
    "record factory raises": "logging.setLogRecordFactory(lambda *a, **k: 1 / 0)",
    "record factory blocks": "logging.setLogRecordFactory(lambda *a, **k: threading.Event().wait())",
    "no more threads": """
        import resource
        def start(self): raise RuntimeError("can't start new thread")
        patched = start
    """,
    "a queue that nobody empties": """
        import logging.handlers, queue
        logging.basicConfig(handlers=[logging.handlers.QueueHandler(queue.Queue())])
    """,
    "a queue of another process": """
        import logging.handlers
        logging.basicConfig(handlers=[logging.handlers.QueueHandler(multiprocessing.get_context("fork").Queue())])
    """,
    "stdout without flush": "sys.stdout = type('Bare', (), {'write': lambda self, text: None})()",
    "ascii stderr": "logging.basicConfig(stream=open(2, 'w', encoding='ascii', errors='strict', closefd=False))",
}


@pytest.mark.parametrize("how", BREAKERS)
def test_the_rank_leaves_and_says_so_whatever_breaks_the_report(rank, how):
    """A9, T14, T15: code 1 within the bound, and the report at least raw on fd 2."""
    after_launch = "threading.Thread.start = patched" if how == "no more threads" else "pass"
    script = f"""
if __name__ == "__main__":
    process = ProcessWatchdog("sampler-\\N{{LATIN SMALL LETTER E WITH ACUTE}}").launch(targets.sleep, context="fork")
    until(lambda: os.path.exists(f"/proc/{{process.pid}}"))
{textwrap.indent(textwrap.dedent(BREAKERS[how]), "    ")}
    {after_launch}
    os.write(1, b"broken\\n")
    block_in_c()
"""
    run = rank(script)
    pid = run.server()
    run.expect("broken")
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 1
    assert time.monotonic() - killed < BOUND
    assert f"(pid {pid}) died after" in run.stderr
    assert "killed by SIGKILL" in run.stderr
    assert f"(pid {run.pid}) exits with code 1" in run.stderr
    run.assert_nothing_left()


def test_a_queue_listener_gets_its_time(rank, tmp_path):
    """T14: a record handed to a QueueHandler is in the log before the exit, though its listener is slow."""
    run = rank(
        """
        if __name__ == "__main__":
            import logging.handlers, queue
            class Slow(logging.FileHandler):
                def emit(self, record):
                    time.sleep(0.1)
                    super().emit(record)
            lines = queue.Queue()
            logging.basicConfig(handlers=[logging.handlers.QueueHandler(lines)])
            logging.handlers.QueueListener(lines, Slow(sys.argv[1])).start()
            ProcessWatchdog("sampler").launch(targets.hard_exit, (3,), context="fork")
            while True: pass
        """,
        str(tmp_path / "log"),
    )
    assert run.wait() == 1
    assert "exited with code 3" in (tmp_path / "log").read_text()
    assert not run.reports()  # not twice


@pytest.mark.parametrize("way", ["own handle", "patched callHandlers"])
def test_the_report_goes_the_loggers_own_way_once(rank, way):
    """Handlers that return nothing, and tools that patch the Logger class, get the record; it is not said twice."""
    run = rank(
        """
        if __name__ == "__main__":
            class Own(logging.Handler):
                def handle(self, record): say("record", record.levelname, record.event["name"])
            if sys.argv[1] == "own handle":
                logging.basicConfig(handlers=[Own()])
            else:
                original = logging.Logger.callHandlers
                def patched(logger, record):
                    say("record", record.levelname, record.event["name"])
                    return original(logger, record)
                logging.Logger.callHandlers = patched
            ProcessWatchdog("sampler").launch(targets.hard_exit, (3,), context="fork")
            block_in_c()
        """,
        way,
    )
    assert run.wait() == 1
    assert run.stdout.splitlines().count("record ERROR sampler") == 1
    assert len(run.reports()) == (0 if way == "own handle" else 1)


def test_naive_reporting_hangs(rank):
    """Negative control: with the report written straight from the watch thread, a held lock keeps the rank for ever."""
    run = rank(
        """
        if __name__ == "__main__":
            import watchdog.watching
            def naive(death, died_at):
                logging.getLogger("watchdog.process").error("%s", death)
                os._exit(1)
            watchdog.watching.leave, watchdog.watching.arm_dead_man = naive, lambda: None
            process = ProcessWatchdog("sampler").launch(targets.sleep, context="fork")
            logging.basicConfig()
            logging.root.handlers[0].acquire()
            pidfd = os.pidfd_open(process.pid)
            process.kill()
            import select
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll()
            say("dead")
            block_in_c()
        """
    )
    run.expect("dead")
    with pytest.raises(subprocess.TimeoutExpired):
        run.process.wait(3 * BOUND / 3)


def test_a_full_stderr_pipe_that_nobody_reads(rank):
    """T32: fd 2 is full before the death; the rank leaves in time all the same."""
    reader, writer = os.pipe()
    try:
        run = rank(
            """
            if __name__ == "__main__":
                process = ProcessWatchdog("sampler").launch(targets.sleep, context="fork")
                os.set_blocking(2, False)
                try:
                    while True: os.write(2, b"x" * 4096)
                except BlockingIOError:
                    os.set_blocking(2, True)
                say("full")
                block_in_c()
            """,
            stderr=writer,
        )
        pid = run.server()
        run.expect("full")
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        assert run.wait() == 1
        assert time.monotonic() - killed < BOUND
    finally:
        os.close(reader)
        os.close(writer)


def test_a_closed_fd_2(rank):
    """N: a daemonised rank without a stderr leaves too."""
    run = rank(
        """
        if __name__ == "__main__":
            process = ProcessWatchdog("sampler").launch(targets.sleep, context="fork")
            os.close(2)
            process.kill()
            block_in_c()
        """
    )
    assert run.wait() == 1


def test_user_output_is_flushed(rank, tmp_path):
    """L6: what the rank printed just before is in the file, and so is a MemoryHandler's record."""
    with (tmp_path / "out").open("wb") as out:
        run = rank(
            """
            if __name__ == "__main__":
                import logging.handlers
                kept = logging.handlers.MemoryHandler(100, target=logging.FileHandler(sys.argv[1]))
                logging.getLogger("users.own").addHandler(kept)
                logging.getLogger("users.own").warning("record 41")
                process = ProcessWatchdog("sampler").launch(targets.hard_exit, (3,), context="fork")
                print("step 41")
                block_in_c()
            """,
            str(tmp_path / "log"),
            stdout=out,
        )
        assert run.wait() == 1
    assert "step 41" in (tmp_path / "out").read_text()
    assert "record 41" in (tmp_path / "log").read_text()


def test_a_stopped_reader_of_stdout_does_not_hold_the_exit(rank):
    """L6: unflushed output into a full pipe."""
    reader, writer = os.pipe()
    try:
        run = rank(
            """
            if __name__ == "__main__":
                process = ProcessWatchdog("sampler").launch(time.sleep, (60,), context="fork")
                os.set_blocking(1, False)
                try:
                    while True: os.write(1, b"x" * 4096)
                except BlockingIOError:
                    os.set_blocking(1, True)
                sys.stdout.write("lost")
                process.kill()
                block_in_c()
            """,
            stdout=writer,
        )
        started = time.monotonic()
        assert run.wait() == 1
        assert time.monotonic() - started < BOUND + 2
        assert "exits with code 1" in run.stderr
    finally:
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("error", ["ValueError('bug')", "SystemExit(0)", "KeyboardInterrupt()"])
def test_a_callback_that_raises_is_followed_by_the_abort(rank, error):
    """The callback replaces the abort only if it returns."""
    run = rank(
        f"""
        def callback(death):
            say("called", death.exitcode)
            raise {error}
        if __name__ == "__main__":
            ProcessWatchdog("sampler", on_death=callback).launch(targets.hard_exit, (3,), context="fork")
            block_in_c()
        """
    )
    assert run.wait() == 1
    assert run.stdout.count("called 3") == 1
    assert len(run.reports()) == 1
    assert error.split("(")[0] in run.stderr
    assert "exits with code 1" in run.stderr


def test_a_callback_replaces_the_abort_once(rank):
    """The rank goes on, the server is reaped, `death` is there, and a new launch is allowed."""
    run = rank(
        """
        if __name__ == "__main__":
            calls = []
            watchdog = ProcessWatchdog("sampler", on_death=lambda death: calls.append((death, threading.current_thread())))
            first = watchdog.launch(targets.hard_exit, (3,), context="fork")
            until(lambda: calls and not watchdog.armed)
            assert watchdog.death is calls[0][0] and watchdog.death.exitcode == 3
            assert calls[0][1] is not threading.main_thread()
            assert not os.path.exists(f"/proc/{first.pid}"), "not reaped"
            assert first.exitcode == 3
            second = watchdog.launch(targets.sleep, context="fork")
            assert second is not first and second.is_alive() and watchdog.armed and watchdog.death is None
            assert watchdog.stop() == -15
            assert len(calls) == 1
            say("good")
        """
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()


def test_the_event_goes_with_the_record(rank):
    """One ERROR record on `watchdog.process`, the event as a dict, JSON-ready."""
    run = rank(
        """
        if __name__ == "__main__":
            import json
            class Show(logging.Handler):
                def emit(self, record):
                    say("event", record.name, record.levelname, json.dumps(record.event))
            logging.getLogger("watchdog.process").addHandler(Show())
            ProcessWatchdog("sampler").launch(targets.hard_exit, (3,), context="fork")
            block_in_c()
        """
    )
    name, level, event = run.expect("event ").split(" ", 2)
    assert run.wait() == 1
    assert (name, level) == ("watchdog.process", "ERROR")
    assert json.loads(event)["status"] == {"kind": "exited", "code": 3}
    assert run.stdout.count("event ") == 1


def test_interrupt_raises_in_the_main_thread(rank):
    """Interactive use and tests: ServerDied with the death, no exit."""
    run = rank(
        """
        from watchdog.abort import interrupt
        from watchdog.errors import ServerDied
        if __name__ == "__main__":
            import pickle
            try:
                ProcessWatchdog("sampler", on_death=interrupt).launch(targets.hard_exit, (3,), context="fork")
                until(lambda: False, "the interrupt")
            except ServerDied as error:
                say("raised", error.death.exitcode, isinstance(error, RuntimeError), str(error).splitlines()[0])
                copy = pickle.loads(pickle.dumps(error))
                assert copy.death == error.death and type(copy) is ServerDied
        """
    )
    assert run.expect("raised ").startswith("3 True sampler (pid")
    assert run.wait() == 0, run.describe()


def test_an_interactive_session_is_not_ended(rank):
    """H4: `sys.ps1` at launch makes `interrupt` the default."""
    run = rank(
        """
        from watchdog.errors import ServerDied
        if __name__ == "__main__":
            sys.ps1 = ">>> "
            try:
                ProcessWatchdog("sampler").launch(targets.hard_exit, (3,), context="fork")
                until(lambda: False, "the interrupt")
            except ServerDied:
                say("raised")
        """
    )
    run.expect("raised")
    assert run.wait() == 0, run.describe()
