"""One launch per rank 0, idempotent and thread-safe; copies, children and other ranks start nothing."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import harness
import pytest

METHODS = ("fork", "spawn", "forkserver")


@pytest.mark.parametrize("method", METHODS)
def test_eight_threads_launch_once(rank, method):
    """Same handle, one server, one thread."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler")
            barrier, handles = threading.Barrier(8), []
            def launch():
                barrier.wait()
                handles.append(watchdog.launch(targets.sleep, context=sys.argv[1]))
            threads = [threading.Thread(target=launch) for _ in range(8)]
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
            assert len(handles) == 8 and len(set(map(id, handles))) == 1 and handles[0].is_alive()
            assert watchdog.process is handles[0] and watchdog.armed
            assert sum(thread.name.startswith("watchdog") for thread in threading.enumerate()) == 1
            assert len(multiprocessing.active_children()) == 1
            assert watchdog.launch(targets.sleep, context=sys.argv[1]) is handles[0]
            say("good")
        """,
        method,
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()
    run.assert_nothing_left()


def test_another_target_is_refused_with_one_warning(rank):
    """The living handle comes back."""
    run = rank(
        """
        if __name__ == "__main__":
            logging.basicConfig(format="%(levelname)s %(message)s")
            watchdog = ProcessWatchdog("sampler")
            first = watchdog.launch(targets.sleep, context="fork")
            assert watchdog.launch(targets.hard_exit, (3,), context="fork") is first
            assert watchdog.launch_command(["true"]) is first
        """
    )
    assert run.wait() == 0, run.describe()
    assert run.stderr.count("WARNING") == 1
    assert "hard_exit" in run.stderr


def test_it_may_be_launched_anew_once_the_server_is_gone(rank):
    """After stop(), after a failed start, after terminate() on the handle, after an expected end."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler", signal_grace=0)
            pids = set()
            def launched():
                process = watchdog.launch(targets.sleep, context="fork")
                assert watchdog.armed and process.is_alive()
                pids.add(process.pid)
                return process
            launched()
            watchdog.stop()
            try:
                watchdog.launch(targets.sleep, (targets.Unpicklable(),), context="spawn")
            except TypeError as error:
                assert "cannot be pickled" in str(error)
            assert not watchdog.armed
            process = launched()
            process.terminate()
            process.join()
            launched()
            watchdog.stop()
            watchdog.launch(targets.leave, (0,), context="fork")
            until(lambda: watchdog.death is not None)
            launched()
            with watchdog:
                pass
            assert len(pids) == 4 and not multiprocessing.active_children()
            say("good", threading.active_count())
        """
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()
    run.assert_nothing_left()


def test_one_living_server_a_name(rank):
    """A second object under the name of a living server is an error; after its end it is not."""
    run = rank(
        """
        if __name__ == "__main__":
            one, two = ProcessWatchdog("sampler"), ProcessWatchdog("sampler")
            one.launch(targets.sleep, context="fork")
            for launch in (lambda: two.launch(targets.sleep, context="fork"), lambda: two.launch_command(["sleep", "60"])):
                try:
                    launch()
                except RuntimeError as error:
                    assert "'sampler'" in str(error), error
                else:
                    raise AssertionError("launched twice")
            assert two.process is None and not two.armed
            one.stop()
            assert two.launch(targets.sleep, context="fork").is_alive()
            say("good")
        """
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()


@pytest.mark.parametrize(
    ("variables", "launched"),
    [
        ({}, True),
        ({"LOCAL_RANK": ""}, True),
        ({"LOCAL_RANK": "0"}, True),
        ({"LOCAL_RANK": " 0"}, True),
        ({"LOCAL_RANK": "0\n"}, True),
        ({"LOCAL_RANK": "-1"}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "00"}, True),
        ({"SLURM_LOCALID": "1"}, False),
        ({"LOCAL_RANK": "-1", "SLURM_LOCALID": "2"}, False),
        ({"LOCAL_RANK": "0", "SLURM_LOCALID": "2"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "3"}, False),
        ({"SLURM_LOCALID": "", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, True),
    ],
)
def test_the_local_rank_decides(rank, variables, launched):
    """H8, H12."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler")
            process = watchdog.launch(targets.sleep, context="fork")
            command = ProcessWatchdog("command").launch_command(["sleep", "60"])
            everywhere = ProcessWatchdog("all").launch(targets.sleep, context="fork", local_rank=None)
            say("launched", process is not None, command is not None, everywhere is not None, watchdog.armed)
            assert watchdog.stop() == (-15 if process else None)
        """,
        env=variables,
    )
    assert run.expect("launched ") == f"{launched} {launched} True {launched}"
    assert run.wait() == 0, run.describe()
    assert "ERROR" not in run.stderr
    assert "WARNING" not in run.stderr


@pytest.mark.parametrize("value", ["a", "0.0", "-2", "1e0", "+1", "0x1", "\u0661", "1 2"])
@pytest.mark.parametrize("variable", ["LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"])
def test_a_bad_local_rank_is_quoted(monkeypatch, variable, value):
    """H8: variable and value stand in the error."""
    from watchdog.process import ProcessWatchdog

    for name in ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable) as error:
        ProcessWatchdog("sampler").launch(print)
    assert repr(value) in str(error.value)


def test_copies_are_inert(rank):
    """H: forked, pickled and deep-copied objects start, stop and disarm nothing."""
    run = rank(
        """
        if __name__ == "__main__":
            import copy, pickle
            watchdog = ProcessWatchdog("sampler", signal_grace=0, on_death=lambda death: None)
            process = watchdog.launch(targets.sleep, context="fork")
            for other in (pickle.loads(pickle.dumps(watchdog)), copy.deepcopy(watchdog), copy.copy(watchdog)):
                assert other.name == "sampler" and other.launch(targets.sleep, context="fork") is None
                assert other.launch_command(["sleep", "60"]) is None
                other.watch(process)
                other.disarm()
                assert other.stop() is None and other.process is None and not other.armed
            for end in (lambda: sys.exit(0), lambda: os._exit(0), lambda: watchdog.stop(), lambda: watchdog.disarm(),
                        lambda: watchdog.launch(targets.sleep, context="fork") and say("server launched in a copy")):
                pid = os.fork()
                if pid == 0:
                    assert not watchdog.armed
                    end()
                    sys.exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            assert watchdog.armed and process.is_alive() and watchdog.process is process
            say("good", watchdog.stop())
        """
    )
    assert run.expect("good ") == "-15"
    assert run.wait() == 0, run.describe()
    assert "launched in a copy" not in run.stdout
    assert not run.reports()
    run.assert_nothing_left()


def test_a_copy_of_a_rank_kills_a_plain_daemonic_child(rank):
    """Negative control for T30: at its end the copy terminates the daemonic children that it believes to have."""
    run = rank(
        """
        if __name__ == "__main__":
            process = multiprocessing.get_context("fork").Process(target=targets.sleep, daemon=True)
            process.start()
            pid = os.fork()
            if pid == 0:
                sys.exit(0)
            os.waitpid(pid, 0)
            until(lambda: not process.is_alive())
            say("exit code", process.exitcode)
        """
    )
    assert run.expect("exit code ") == "-15"
    run.wait()


WORKER = """
def worker(queue):
    logging.basicConfig(level=logging.DEBUG)
    try:
        queue.put((ProcessWatchdog("sampler").launch(targets.sleep, context="fork"),
                   ProcessWatchdog("sampler").launch_command(["sleep", "60"])))
    except BaseException as error:
        queue.put(repr(error))
"""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("daemon", [True, False])
def test_a_child_of_the_owner_starts_nothing(rank, method, daemon):
    """H2: a DataLoader worker, say; one DEBUG line, None."""
    run = rank(
        WORKER
        + """
if __name__ == "__main__":
    ProcessWatchdog("sampler").launch(targets.sleep, context="fork")
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.SimpleQueue()
    child = context.Process(target=worker, args=(queue,), daemon=sys.argv[2] == "True")
    child.start()
    say("answer", queue.get())
    child.join()
""",
        method,
        str(daemon),
    )
    assert run.expect("answer ") == "(None, None)"
    assert run.wait() == 0, run.describe()
    assert run.stderr.count("not launched") == 2
    run.assert_nothing_left()


def test_a_daemonic_process_gets_a_clear_error(rank):
    """Decisions: any other daemonic parent gets the RuntimeError from `launch`."""
    run = rank(
        WORKER
        + """
if __name__ == "__main__":
    queue = multiprocessing.get_context("fork").SimpleQueue()
    child = multiprocessing.get_context("fork").Process(target=worker, args=(queue,), daemon=True)
    child.start()
    say("answer", queue.get())
    child.join()
"""
    )
    assert "RuntimeError" in run.expect("answer ")
    assert "daemonic" in run.stdout
    assert run.wait() == 0, run.describe()


def test_a_mark_counts_only_while_its_owner_lives(rank):
    """A leftover of the environment, another run, and garbage hinder nobody."""
    run = rank(
        """
        if __name__ == "__main__":
            import json
            dead = subprocess.Popen(["true"])
            dead.wait()
            marks = [json.dumps({"sampler": [dead.pid, 1, None]}), json.dumps({"sampler": [os.getppid(), 1, None]}),
                     json.dumps({"sampler": [1, None, "another run"]}), "garbage", "[]", '{"sampler": 3}', "{}",
                     *(json.dumps({"sampler": [pid, None, None]}) for pid in (10**20, 0, -1, True, "1", None))]
            for mark in marks:
                os.environ["SIDECAR_WATCHDOG_OWNERS"] = mark
                watchdog = ProcessWatchdog("sampler")
                assert watchdog.launch(targets.sleep, context="fork") is not None, mark
                watchdog.stop()
            assert "sampler" not in os.environ.get("SIDECAR_WATCHDOG_OWNERS", "")
            say("good")
        """
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_missing_main_guard_is_reported(rank, method):
    """H: the server imports the script, reaches launch again, and dies with the reason; no recursion."""
    run = rank(
        """
        watchdog = ProcessWatchdog("sampler")
        watchdog.launch(targets.sleep, context=sys.argv[1])
        say("training")
        block_in_c()
        """,
        method,
    )
    assert run.wait() == 1
    assert run.stdout.count("training") == 1
    assert "if __name__ == '__main__'" in run.stderr
    assert "died while starting" in run.stderr
    run.assert_nothing_left()


def test_a_launch_at_module_level_does_not_disturb_other_children(rank):
    """Workers that import the script again start nothing and work."""
    run = rank(
        """
        watchdog = ProcessWatchdog("sampler")
        if __name__ == "__main__":
            watchdog.launch(targets.sleep, context="fork")
        else:
            assert ProcessWatchdog("sampler").launch(targets.sleep, context="fork") is None
        def double(n): return 2 * n
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                say("doubled", pool.map(double, [1, 2]))
        """
    )
    assert run.expect("doubled ") == "[2, 4]"
    assert run.wait() == 0, run.describe()


@pytest.mark.parametrize("method", METHODS)
def test_the_server_does_not_keep_the_ranks_handlers(rank, method, tmp_path):
    """Kind I: an inherited handler that swallows SIGTERM would make the rank hang at its exit."""
    run = rank(
        """
        def swallow(*_): pass
        if __name__ == "__main__":
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                signal.signal(number, swallow)
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            watchdog = ProcessWatchdog("sampler")
            watchdog.launch(targets.show_handlers, (sys.argv[2],), context=sys.argv[1])
            until(lambda: os.path.exists(sys.argv[2]))
        """,
        method,
        str(tmp_path / "shown"),
    )
    handlers = run.expect("handlers ")
    assert "swallow" not in handlers
    assert handlers.count("SIG_DFL") == 2
    assert run.wait() == 0, run.describe()
    run.assert_nothing_left()


@pytest.mark.parametrize("kind", [*METHODS, "command"])
def test_the_server_does_not_get_the_ranks_error_file(rank, kind, tmp_path):
    """A server that uses torchelastic's @record would write over its rank's failure."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler")
            if sys.argv[1] == "command":
                source = "import targets; targets.read_environment('TORCHELASTIC_ERROR_FILE', 'KEPT')"
                watchdog.launch_command([sys.executable, "-c", source])
            else:
                watchdog.launch(targets.read_environment, ("TORCHELASTIC_ERROR_FILE", "KEPT"), context=sys.argv[1])
            assert os.environ["TORCHELASTIC_ERROR_FILE"]
            block_in_c()
        """,
        kind,
        env={"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json"), "KEPT": "1"},
    )
    assert run.expect("environment ") == "[None, '1']"
    os.kill(run.server(), signal.SIGKILL)
    assert run.wait() == 1


def test_a_command_has_the_environment_folder_and_stdin_asked_for(rank, tmp_path):
    """`env` replaces, `cwd` is used, stdin is /dev/null."""
    run = rank(
        """
        if __name__ == "__main__":
            source = "import os, sys; print('command', sorted(os.environ), os.getcwd(), repr(sys.stdin.read()), flush=True)"
            process = ProcessWatchdog("c", expected_exit_codes=(0,)).launch_command(
                [sys.executable, "-S", "-c", source], env={"ONLY": "this"}, cwd=sys.argv[1])
            process.wait()
        """,
        str(tmp_path),
    )
    words = run.expect("command ")
    assert run.wait() == 0
    assert "'ONLY'" in words
    assert "'PATH'" not in words
    assert str(tmp_path) in words
    assert words.endswith("''")


@pytest.mark.parametrize("handler", ["logging", "root lock"])
def test_forking_while_a_lock_is_held(rank, handler):
    """I3: our at-fork hook neither logs nor locks, so a fork returns in the child at once."""
    run = rank(
        """
        if __name__ == "__main__":
            class Own(logging.Handler):
                def createLock(self): self.lock = threading.Lock()
                def emit(self, record): pass
            own = Own()
            logging.basicConfig(handlers=[own], level=logging.DEBUG)
            watchdog = ProcessWatchdog("sampler")
            watchdog.launch(time.sleep, (60,), context="fork")
            threading.Thread(target=own.acquire if sys.argv[1] == "logging" else watchdog._lock.acquire, daemon=True).start()
            pid = os.fork()
            if pid == 0:
                watchdog.armed, watchdog.stop(), watchdog.disarm()
                os._exit(7)
            say("child", os.waitpid(pid, 0)[1] >> 8)
            watchdog.stop()
            os._exit(0)
        """,
        handler,
    )
    assert run.expect("child ") == "7"
    assert run.wait() == 0


@pytest.mark.parametrize("protected", [True, False])
def test_a_server_forked_while_a_stream_is_locked(rank, protected):
    """I1, T15: a thread of the rank sits in a write to stdout at the moment of the fork; the server's own output goes on.

    Negative control: with the streams that it inherits, the server waits for a lock that nobody will ever let go.
    """
    reader, writer = os.pipe()
    try:
        launched = rank._folder / "launched"
        run = rank(LOCKED_STREAM, "" if protected else "off", str(launched), stdout=writer, stderr=subprocess.PIPE)
        os.close(writer)
        writer = -1
        harness.wait_for(launched.exists, 30, run.describe)  # nobody reads until then, so the thread sits in its write
        text = b""
        while b"server wrote" not in text:
            if not select.select([reader], [], [], 30 if protected else 2)[0]:
                break
            data = os.read(reader, 65536)
            assert data, run.describe()
            text += data
        assert (b"server wrote" in text) == protected
        run.end()
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


LOCKED_STREAM = """
def write():
    os.set_blocking(1, True)
    print("server wrote", os.getpid(), flush=True)
    time.sleep(60)
if __name__ == "__main__":
    if sys.argv[1]:
        import watchdog.server
        watchdog.server._fresh_streams = lambda: None
    threading.Thread(target=lambda: [print("x" * 4096, flush=True) for _ in range(100)], daemon=True).start()
    blocked = "pipe_write"
    until(lambda: any(blocked in open(f"/proc/self/task/{task}/wchan").read() for task in os.listdir("/proc/self/task"))
          if os.access("/proc/self/wchan", os.R_OK) and open("/proc/self/wchan").read() != "0" else time.sleep(0.2) or True)
    multiprocessing.util._flush_std_streams = lambda: None
    import multiprocessing.popen_fork
    process = ProcessWatchdog("sampler", signal_grace=0).launch(write, context="fork")
    open(sys.argv[2], "w").close()
    block_in_c()
"""


def test_it_refuses_green_threads(rank):
    """E7: with threads replaced a death would never be noticed; launch says so."""
    pytest.importorskip("gevent", reason="gevent is not installed")
    run = rank(
        """
        if __name__ == "__main__":
            import gevent.monkey
            import warnings
            warnings.simplefilter("ignore")
            gevent.monkey.patch_all()
            for act in (lambda w: w.launch(targets.sleep), lambda w: w.launch_command(["true"]),
                        lambda w: w.watch(subprocess.Popen(["true"]))):
                try:
                    act(ProcessWatchdog("sampler"))
                except RuntimeError as error:
                    assert "gevent" in str(error)
                else:
                    raise AssertionError("launched")
            say("refused", multiprocessing.active_children())
        """
    )
    assert run.expect("refused ") == "[]"
    assert run.wait() == 0, run.describe()


def test_wrapped_threads_that_are_threads_are_fine(rank):
    """Debuggers wrap `start_new_thread`."""
    run = rank(
        """
        import _thread
        original = _thread.start_new_thread
        _thread.start_new_thread = lambda *a, **k: original(*a, **k)
        if __name__ == "__main__":
            ProcessWatchdog("sampler").launch(targets.hard_exit, (3,), context="fork")
            block_in_c()
        """
    )
    assert run.wait() == 1


@pytest.mark.parametrize("environment", ["own", "copied", "bare"])
def test_a_command_that_runs_the_same_script_starts_nothing(rank, environment):
    """H: no recursion, whatever environment it is given."""
    run = rank(
        """
        if __name__ == "__main__":
            env = {"own": None, "copied": dict(os.environ), "bare": {"PYTHONPATH": os.environ["PYTHONPATH"]}}[sys.argv[1]]
            process = ProcessWatchdog("sampler").launch_command([sys.executable, __file__, sys.argv[1]], env=env)
            say("launched", process is not None)
            if process is not None:
                process.wait()
        """,
        environment,
    )
    assert run.wait() == 0, run.describe()
    assert sorted(line for line in run.stdout.splitlines() if "launched" in line) == ["launched False", "launched True"]


@pytest.mark.parametrize("daemon", [True, False])
def test_a_worker_of_a_fork_server_that_is_older_than_the_launch(rank, daemon):
    """H2: its environment has no mark yet."""
    run = rank(
        WORKER
        + """
if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    first = context.Process(target=int)
    first.start()
    first.join()
    ProcessWatchdog("sampler").launch(targets.sleep, context="fork")
    queue = context.SimpleQueue()
    child = context.Process(target=worker, args=(queue,), daemon=sys.argv[1] == "True")
    child.start()
    say("answer", queue.get())
    child.join()
""",
        str(daemon),
    )
    assert run.expect("answer ") == "(None, None)"
    assert run.wait() == 0, run.describe()
    run.assert_nothing_left()


def test_marks_of_many_threads(rank):
    """Eight launches at once leave eight marks, and as many stops none."""
    run = rank(
        """
        if __name__ == "__main__":
            import json
            sys.setswitchinterval(1e-6)
            for round in range(10):
                watchdogs = [ProcessWatchdog(f"part-{n}") for n in range(8)]
                def all_at_once(act):
                    barrier = threading.Barrier(8)
                    def run(watchdog):
                        barrier.wait()
                        act(watchdog)
                    threads = [threading.Thread(target=run, args=(watchdog,)) for watchdog in watchdogs]
                    [thread.start() for thread in threads]
                    [thread.join() for thread in threads]
                all_at_once(lambda watchdog: watchdog.launch_command(["sleep", "60"]))
                assert len(json.loads(os.environ["SIDECAR_WATCHDOG_OWNERS"])) == 8
                all_at_once(lambda watchdog: watchdog.stop())
                assert "SIDECAR_WATCHDOG_OWNERS" not in os.environ
            say("good")
        """
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()


@pytest.mark.parametrize("outer", ["main", *METHODS])
def test_copies_of_a_rank_end_no_server(rank, outer):
    """I5, T30: fork, then sys.exit, or terminate() on the handle, also where the rank is a child of multiprocessing."""
    run = rank(
        """
        def job():
            watchdog = ProcessWatchdog("sampler", signal_grace=0)
            process = watchdog.launch(targets.sleep, context="fork")
            for end in (sys.exit, lambda: (process.terminate(), sys.exit()), lambda: (watchdog.stop(), sys.exit())):
                pid = os.fork()
                if pid == 0:
                    multiprocessing.util._exit_function()
                    end()
                os.waitpid(pid, 0)
            assert watchdog.armed and process.is_alive()
            watchdog.stop()
            say("good")
        if __name__ == "__main__":
            import multiprocessing.util
            if sys.argv[1] == "main":
                job()
            else:
                child = multiprocessing.get_context(sys.argv[1]).Process(target=job)
                child.start()
                child.join()
                sys.exit(child.exitcode)
        """,
        outer,
    )
    run.expect("good")
    assert run.wait() == 0, run.describe()
    assert not run.reports()


def test_a_fork_in_the_middle_of_a_launch(rank):
    """Another thread forks copies that end by multiprocessing's exit function; no fresh server dies of it."""
    run = rank(
        """
        import multiprocessing.util
        if __name__ == "__main__":
            done = threading.Event()
            def copies():
                while not done.is_set():
                    pid = os.fork()
                    if pid == 0:
                        try: multiprocessing.util._exit_function()
                        finally: os._exit(0)
                    os.waitpid(pid, 0)
            thread = threading.Thread(target=copies)
            thread.start()
            watchdog = ProcessWatchdog("sampler")
            codes = []
            for round in range(40):
                process = watchdog.launch(time.sleep, (60,), context="fork")
                until(lambda: time.monotonic() % 0.01 < 0.005)
                codes.append(process.exitcode)
                watchdog.stop()
            done.set()
            thread.join()
            say("codes", set(codes))
        """
    )
    assert run.expect("codes ") == "{None}"
    assert run.wait() == 0, run.describe()


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize("how", ["closed", "none", "raw without fileno", "detached"])
def test_odd_streams_of_the_rank(rank, how, stream):
    """L2: a forked server does not die of what the rank has for a stream."""
    run = rank(
        """
        import io
        class Raw(io.RawIOBase):
            def writable(self): return True
            def write(self, data): return len(data)
        def server():
            with open(sys.argv[3], "w"): pass
            time.sleep(60)
        if __name__ == "__main__":
            how, stream = sys.argv[1], sys.argv[2]
            out = os.fdopen(os.dup(1), "w")
            if how == "closed": getattr(sys, stream).close()
            elif how == "none": setattr(sys, stream, None)
            elif how == "detached": getattr(sys, stream).detach()
            else: setattr(sys, stream, io.TextIOWrapper(io.BufferedWriter(Raw())))
            watchdog = ProcessWatchdog("sampler")
            watchdog.launch(server, context="fork")
            until(lambda: os.path.exists(sys.argv[3]) or not watchdog.armed)
            out.write(f"armed {watchdog.armed}\\n")
            out.flush()
            watchdog.stop()
            os._exit(0)
        """,
        how,
        stream,
        str(rank._folder / "reached"),
    )
    assert run.expect("armed ") == "True"
    assert run.wait() == 0


def test_subclasses_are_copied_inertly_with_their_own_fields(rank):
    """Their `__init__`, which may launch, is not called."""
    run = rank(
        """
        class Own(ProcessWatchdog):
            def __init__(self, one, other):
                super().__init__("own", on_death=lambda death: None)
                self.one, self.other = one, other
                self.launch(targets.sleep, context="fork")
        if __name__ == "__main__":
            import copy, pickle
            original = Own(1, [2])
            for other in (copy.deepcopy(original), copy.copy(original), pickle.loads(pickle.dumps(original))):
                assert type(other) is Own and (other.one, other.other, other.name) == (1, [2], "own")
                assert other.launch(targets.sleep) is None and other.process is None and not other.armed
            assert original.armed
            say("good", original.stop())
        """
    )
    assert run.expect("good ") == "-15"
    assert run.wait() == 0, run.describe()


def test_launching_again_and_again_leaks_nothing(rank):
    """Descriptors go without the garbage collector, which training loops like to switch off."""
    run = rank(
        """
        if __name__ == "__main__":
            import gc
            gc.disable()
            watchdog = ProcessWatchdog("sampler")
            def count(): return len(os.listdir("/proc/self/fd"))
            for round in range(60):
                watchdog.launch(time.sleep, (60,), context="fork")
                watchdog.stop()
                watchdog.launch_command(["sleep", "60"])
                watchdog.stop()
                if round == 5: before = count()
            say("more", count() - before, threading.active_count() <= 3)
        """
    )
    more, threads = run.expect("more ").split()
    assert int(more) <= 8
    assert threads == "True"
    assert run.wait() == 0, run.describe()


def test_odd_targets_in_a_second_launch(rank):
    """A target that cannot be compared or shown is no reason to fail; one warning a server."""
    run = rank(
        """
        class Odd:
            def __call__(self): time.sleep(60)
            def __eq__(self, other): raise ValueError("ambiguous")
            def __repr__(self): raise ValueError("no repr")
            __hash__ = None
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler")
            odd = Odd()
            process = watchdog.launch(odd, context="fork")
            assert watchdog.launch(odd, context="fork") is process
            for _ in range(3):
                assert watchdog.launch(Odd(), context="fork") is process
        """
    )
    assert run.wait() == 0, run.describe()
    assert run.stderr.count("is not launched") == 1


@pytest.mark.parametrize("method", METHODS)
def test_disarming_leaves_a_starting_server_alone(rank, method):
    """Disarmed is not stopped: at any moment after the launch the server goes on to its target, and lives."""
    run = rank(
        """
        if __name__ == "__main__":
            watchdog = ProcessWatchdog("sampler")
            process = watchdog.launch(targets.sleep, context=sys.argv[1])
            watchdog.disarm()
            assert not watchdog.armed
            assert watchdog.launch(targets.sleep, context=sys.argv[1]) is process
            until(lambda: os.path.exists(sys.argv[2]))
            say("alive", process.is_alive(), watchdog.stop())
        """,
        method,
        str(rank._folder / "go"),
    )
    run.server()
    (rank._folder / "go").touch()
    assert run.expect("alive ") == "True -15"
    assert run.wait() == 0, run.describe()


@pytest.mark.parametrize("method", METHODS)
def test_without_memfd(rank, method):
    """Builds against old headers, and macOS, lack `os.memfd_create`; a file without a name serves, or nothing."""
    for extra in ("", "import watchdog.linux\nwatchdog.linux._memfd = lambda *_: None\n"):
        run = rank(
            "import os\ndel os.memfd_create\n"
            + extra
            + """
if __name__ == "__main__":
    watchdog = ProcessWatchdog("sampler")
    watchdog.launch(targets.fail, ("boom",), context=sys.argv[1])
    block_in_c()
""",
            method,
        )
        assert run.wait() == 1
        assert "exited with code 1" in run.reports()[0]
        assert "while starting" not in run.stderr
        assert "cannot set attribute" not in run.stderr
        assert ("cause: ValueError: boom" in run.stderr) == (not extra or method == "fork")


def test_who_adopts_is_no_owner(rank):
    """A child of a rank that watches somebody else's process under a name may launch its own server."""
    run = rank(
        WORKER
        + """
if __name__ == "__main__":
    ProcessWatchdog("sampler").watch(subprocess.Popen(["sleep", "60"]))
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    def launch():
        watchdog = ProcessWatchdog("sampler")
        queue.put(watchdog.launch(targets.sleep, context="fork") is not None)
        watchdog.stop()
    child = context.Process(target=launch)
    child.start()
    say("launched", queue.get())
    child.join()
    os._exit(0)
"""
    )
    assert run.expect("launched ") == "True"
    run.process.wait(60)


def test_a_second_stop_takes_nothing_back(rank):
    """The mark belongs to the watchdog whose server lives."""
    run = rank(
        """
        if __name__ == "__main__":
            one, two = ProcessWatchdog("sampler"), ProcessWatchdog("sampler")
            one.launch_command(["sleep", "60"])
            assert one.stop() == -15
            two.launch_command(["sleep", "60"])
            assert one.stop() == -15
            say("marked", "SIDECAR_WATCHDOG_OWNERS" in os.environ, two.stop())
        """
    )
    assert run.expect("marked ") == "True -15"
    assert run.wait() == 0, run.describe()
