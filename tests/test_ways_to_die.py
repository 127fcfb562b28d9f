"""The table of ways to die: how x handle kind x expected status and words. Every one of them ends the rank with code 1."""

from __future__ import annotations

import json
import os
import signal

import pytest

METHODS = ("fork", "spawn", "forkserver")
SIGNALS = (1, 2, 3, 4, 6, 7, 8, 9, 11, 13, 14, 15, 37)

# A rank that lets many servers die and prints each Death; the exit itself is tested below, one rank each.
COLLECT = """
import json

deaths = {}

def watched(key, launch, **settings):
    watchdog = ProcessWatchdog(key, on_death=lambda death: deaths.update({key: death}), signal_grace=0, **settings)
    launch(watchdog)
    return key

def target(key, function, *args, **settings):
    return watched(key, lambda w: w.launch(function, args, context=sys.argv[1]), **settings)

def show(keys):
    until(lambda: set(keys) <= set(deaths), f"deaths, but {set(keys) - set(deaths)}")
    say("deaths", json.dumps({key: {**deaths[key].as_dict(), "code": deaths[key].exitcode, "text": str(deaths[key])}
                              for key in keys}))
"""


def collected(rank, script: str, *argv: str) -> dict:
    run = rank(
        COLLECT + "if __name__ == '__main__':\n" + "\n".join("    " + line for line in script.splitlines()), *argv
    )
    deaths = json.loads(run.expect("deaths "))
    assert run.wait() == 0, run.describe()
    run.assert_nothing_left()
    return deaths


@pytest.mark.parametrize("method", METHODS)
def test_every_signal_is_named(rank, method):
    """B6: a signal is reported by its name, whatever the start method."""
    deaths = collected(rank, f"show([target(str(n), targets.by_signal, n) for n in {SIGNALS}])", method)
    for number in SIGNALS:
        death = deaths[str(number)]
        name = f"signal {number}" if number == 37 else signal.Signals(number).name
        assert death["status"]["kind"] == "signalled"
        assert death["status"]["signal"] == number
        assert death["code"] == -number
        assert f"killed by {name} (exit code -{number})" in death["text"].splitlines()[0]
        assert death["cause"] == "SIGNAL"


@pytest.mark.parametrize("method", METHODS)
def test_every_other_end_is_worded(rank, method):
    """Codes, exceptions, and an end with 0 that was not expected."""
    deaths = collected(
        rank,
        """
show([
    target("one", targets.leave, 1), target("hard", targets.hard_exit, 3), target("wrapped", targets.leave, 137),
    target("all", targets.hard_exit, 255), target("text", targets.leave, "no port left"),
    target("error", targets.fail, "boom"), target("chain", targets.chained),
    target("zero", targets.leave, 0, expected_exit_codes=()), target("wrap", targets.hard_exit, 256, expected_exit_codes=()),
])
""",
        method,
    )
    assert {key: death["code"] for key, death in deaths.items()} == {
        "one": 1, "hard": 3, "wrapped": 137, "all": 255, "text": 1, "error": 1, "chain": 1, "zero": 0, "wrap": 0,
    }  # fmt: skip
    assert "exited with code 3" in deaths["hard"]["text"].splitlines()[0]
    assert "exit code 137 (possibly 128+9 from a wrapper" in deaths["wrapped"]["text"]
    assert "memory" not in deaths["wrapped"]["text"]
    assert deaths["text"]["cause"] == "EXCEPTION"
    assert "no port left" in deaths["text"]["evidence"][0]
    assert deaths["error"]["evidence"][0] == "ValueError: boom"
    assert "in fail" in deaths["error"]["traceback"]
    assert deaths["chain"]["evidence"][0] == "RuntimeError: cannot load the graph"
    assert "OSError: disk" in deaths["chain"]["traceback"]
    assert "exited with code 0 while still watched" in deaths["zero"]["text"].splitlines()[0]


def test_commands_and_adopted_handles(rank):
    """launch_command, Popen, psutil.Popen, psutil.Process: the same signal, the same name (B10)."""
    deaths = collected(
        rank,
        """
import psutil
argv = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), 6)"]
exits = [sys.executable, "-c", "import os; os._exit(7)"]
waits = [sys.executable, "-c", "input()"]
pipes = []
def adopted(make, argv):
    def launch(watchdog):
        process = make(waits, stdin=subprocess.PIPE)
        watchdog.watch(process)
        pipes.append(process.stdin)
        process.send_signal(6) if argv is argv6 else process.stdin.close()
    return launch
argv6 = argv
def by_pid(watchdog):
    process = subprocess.Popen(argv)
    pipes.append(process)
    watchdog.watch(psutil.Process(process.pid))
show([
    watched("command", lambda w: w.launch_command(argv)), watched("code", lambda w: w.launch_command(exits)),
    watched("popen", adopted(subprocess.Popen, argv)), watched("psutil", adopted(psutil.Popen, argv)),
    watched("pid", by_pid), watched("eof", adopted(subprocess.Popen, None)),
])
""",
    )
    for key in ("command", "popen", "psutil", "pid"):
        assert "killed by SIGABRT (exit code -6)" in deaths[key]["text"], key
    assert deaths["code"]["code"] == 7
    assert deaths["eof"]["code"] == 1


def test_a_start_that_fails_is_told_from_a_later_death(rank, tmp_path):
    """B8, H4: an import error in the target's module comes with its traceback, and without a guess at memory."""
    (tmp_path / "broken_target.py").write_text(
        "import os\nif os.environ.get('BREAK'):\n    import module_that_is_missing\ndef run(): pass\n"
    )
    run = rank(
        """
        sys.path.insert(0, os.path.dirname(__file__))
        if __name__ == "__main__":
            import broken_target
            os.environ["BREAK"] = "1"
            ProcessWatchdog("sampler").launch(broken_target.run, context=sys.argv[1])
            block_in_c()
        """,
        "spawn",
    )
    assert run.wait() == 1
    assert "cause: ModuleNotFoundError: No module named 'module_that_is_missing'" in run.stderr
    assert "died while starting" in run.stderr
    for guess in ("memory", "segfault", "SIGSEGV"):
        assert guess not in run.stderr
    run.assert_nothing_left()


def test_a_function_of_stdin_cannot_be_found_by_a_spawned_server(rank, tmp_path):
    """H4: `python - < script`: the report says what is missing, within seconds."""
    script = tmp_path / "stdin.py"
    script.write_text(
        "import time\nfrom watchdog.process import ProcessWatchdog\ndef run(): pass\n"
        "ProcessWatchdog('sampler').launch(run, context='spawn')\ntime.sleep(60)\n"
    )
    run = rank(
        "import runpy\nexec(compile(open(sys.argv[1]).read(), '<stdin>', 'exec'), {'__name__': 'x'})", str(script)
    )
    assert run.wait() == 1
    assert "Can't get attribute 'run'" in run.stderr or "Can't pickle" in run.stderr


@pytest.mark.parametrize("method", [*METHODS, "command"])
def test_a_killed_server_ends_a_blocked_rank(rank, method):
    """A1: the rank blocks in C without a time-out; one report, code 1, no zombie, nothing left."""
    run = rank(
        """
        if __name__ == "__main__":
            logging.basicConfig(format="%(levelname)s %(name)s %(message)s")
            watchdog = ProcessWatchdog("sampler")
            if sys.argv[1] == "command":
                code = "import targets; targets.sleep()"
                process = watchdog.launch_command([sys.executable, "-c", code])
            else:
                process = watchdog.launch(targets.sleep, context=sys.argv[1])
            say("handle", process.pid)
            block_in_c()
        """,
        method,
    )
    pid = run.server()
    assert pid == int(run.expect("handle "))
    os.kill(pid, signal.SIGKILL)
    assert run.wait() == 1
    assert run.reports() == [
        line for line in run.stderr.splitlines() if line.startswith("ERROR watchdog.process sampler")
    ]
    assert len(run.reports()) == 1
    assert f"sampler (pid {pid}) died after" in run.reports()[0]
    assert "killed by SIGKILL (exit code -9)" in run.reports()[0]
    assert run.stderr.splitlines()[-1] == f"  rank 0 (pid {run.pid}) exits with code 1"
    run.assert_nothing_left()


def test_without_a_watchdog_the_rank_hangs(rank):
    """Negative control of the whole: the same rank with a plain Process is still there when the server is long dead."""
    run = rank(
        """
        if __name__ == "__main__":
            process = multiprocessing.get_context("fork").Process(target=targets.sleep, daemon=True)
            process.start()
            def watch():
                process.join()
                say("dead")
            threading.Thread(target=watch, daemon=True).start()
            block_in_c()
        """
    )
    os.kill(run.server(), signal.SIGKILL)
    run.expect("dead")
    assert run.process.poll() is None


def test_kill_on_the_handle_is_a_crash(rank):
    """`kill()` on the handle simulates one."""
    run = rank(
        """
        if __name__ == "__main__":
            process = ProcessWatchdog("sampler").launch(targets.sleep, context="fork")
            process.kill()
            block_in_c()
        """
    )
    assert run.wait() == 1
    assert "killed by SIGKILL" in run.stderr


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "SIGHUP", "129", "130", "143"])
def test_an_end_that_a_shutdown_may_have_caused_waits_for_the_grace(rank, how):
    """D: TERM, INT, HUP and their shell codes fire when `signal_grace` has passed, and not before."""
    run = rank(
        """
        if __name__ == "__main__":
            how = sys.argv[1]
            function, arg = (targets.hard_exit, int(how)) if how.isdigit() else (targets.by_signal, getattr(signal, how))
            started = time.monotonic()
            def died(death):
                say("after", time.monotonic() - started)
                os._exit(1)
            ProcessWatchdog("sampler", signal_grace=1.0, on_death=died).launch(function, (arg,), context="fork")
            block_in_c()
        """,
        how,
    )
    after = float(run.expect("after "))
    assert run.wait() == 1
    assert 1.0 <= after <= 2.0


def test_several_deaths_make_one_report(rank):
    """A7: four servers killed at once; one exit, one report that names all."""
    run = rank(
        """
        if __name__ == "__main__":
            logging.basicConfig(format="%(levelname)s %(message)s")
            processes = [ProcessWatchdog(f"part-{n}").launch(targets.sleep, context="fork") for n in range(4)]
            say("pids", *[process.pid for process in processes])
            for process in processes:
                process.kill()
            block_in_c()
        """
    )
    pids = run.expect("pids ").split()
    assert run.wait() == 1
    assert len([line for line in run.stderr.splitlines() if line.startswith("ERROR")]) == 1
    for number, pid in enumerate(pids):
        assert f"part-{number} (pid {pid}) died after" in run.stderr
    assert run.stderr.count("killed by SIGKILL") == 4
    assert run.stderr.count("exits with code 1") == 1


def test_the_right_one_is_blamed_and_the_healthy_ones_are_stopped(rank):
    """A5: the second of three leaves with 7."""
    run = rank(
        """
        if __name__ == "__main__":
            for name, code in (("first", "input()"), ("second", "raise SystemExit(7)"), ("third", "input()")):
                code = "import targets; targets.sleep()" if "input" in code else code
                ProcessWatchdog(name).launch_command([sys.executable, "-c", code])
            block_in_c()
        """
    )
    assert run.wait() == 1
    assert len(run.reports()) == 1
    assert run.reports()[0].startswith("second (pid")
    assert "exited with code 7" in run.reports()[0]
    run.assert_nothing_left()
