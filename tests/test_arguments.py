"""Bad input gets a clear error at the call that quotes it, and nothing is left running."""

from __future__ import annotations

import math
import multiprocessing
import os

import psutil
import pytest
import targets

from watchdog.process import ProcessWatchdog


async def coroutine(death):
    """Nobody would await it."""


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"name": ""}),
        (ValueError, {"name": "  "}),
        (ValueError, {"name": "a\nb"}),
        (TypeError, {"name": None}),
        (TypeError, {"name": b"x"}),
        (ValueError, {"poll_interval": 0}),
        (ValueError, {"poll_interval": -1}),
        (ValueError, {"poll_interval": math.nan}),
        (ValueError, {"poll_interval": math.inf}),
        (TypeError, {"poll_interval": "1"}),
        (TypeError, {"poll_interval": True}),
        (TypeError, {"poll_interval": None}),
        (ValueError, {"signal_grace": -0.1}),
        (ValueError, {"signal_grace": math.nan}),
        (TypeError, {"signal_grace": None}),
        (TypeError, {"expected_exit_codes": 0}),
        (TypeError, {"expected_exit_codes": None}),
        (TypeError, {"expected_exit_codes": ("0",)}),
        (TypeError, {"expected_exit_codes": (True,)}),
        (ValueError, {"expected_exit_codes": (256,)}),
        (ValueError, {"expected_exit_codes": (-100,)}),
        (ValueError, {"poll_interval": 10**400}),
        (TypeError, {"on_death": "abort"}),
        (TypeError, {"on_death": coroutine}),
    ],
)
def test_construction(error, arguments):
    """The value stands in the message, and so does the argument's name."""
    with pytest.raises(error) as raised:
        ProcessWatchdog(**arguments)
    ((name, value),) = arguments.items()
    assert name in str(raised.value)
    quoted = value[0] if isinstance(value, tuple) else value
    assert repr(quoted) in str(raised.value)


@pytest.mark.parametrize(
    ("error", "words", "arguments", "keywords"),
    [
        (TypeError, "None", (None,), {}),
        (TypeError, "'run'", ("run",), {}),
        (TypeError, "'abc'", (print, "abc"), {}),
        (TypeError, "3", (print, 3), {}),
        (TypeError, "7", (print, (), 7), {}),
        (ValueError, "'thread'", (print,), {"context": "thread"}),
        (TypeError, "42", (print,), {"context": 42}),
        (TypeError, "'0'", (print,), {"local_rank": "0"}),
        (TypeError, "True", (print,), {"local_rank": True}),
        (ValueError, "-1", (print,), {"local_rank": -1}),
        (TypeError, "cannot be pickled", (print, (targets.Unpicklable(),)), {"context": "spawn"}),
        (TypeError, "cannot be pickled", (print, (targets.Unpicklable(),)), {"context": "forkserver"}),
        (Exception, "lambda", (lambda: None,), {"context": "spawn"}),
    ],
)
def test_launch(error, words, arguments, keywords):
    """Nothing half started: no child, and the same watchdog launches well afterwards."""
    watchdog = ProcessWatchdog("sampler")
    with pytest.raises(error, match=words.replace("(", r"\(")):
        watchdog.launch(*arguments, **keywords)
    assert watchdog.process is None
    assert not watchdog.armed
    assert not multiprocessing.active_children()
    assert watchdog.launch(targets.sleep, context="fork").is_alive()
    assert watchdog.stop() == -15


@pytest.mark.parametrize(
    ("error", "words", "argv", "keywords"),
    [
        (TypeError, "'sleep 1'", "sleep 1", {}),
        (TypeError, "b'sleep'", b"sleep", {}),
        (TypeError, "None", None, {}),
        (ValueError, "empty", [], {}),
        (TypeError, "3", [3], {}),
        (FileNotFoundError, "no-such-program", ["no-such-program"], {}),
        (PermissionError, "/", ["/"], {}),
        (FileNotFoundError, "no-such-folder", ["true"], {"cwd": "/no-such-folder"}),
        (TypeError, "5", ["true"], {"env": 5}),
    ],
)
def test_launch_command(error, words, argv, keywords):
    """The same for commands."""
    watchdog = ProcessWatchdog("command")
    with pytest.raises(error, match=words):
        watchdog.launch_command(argv, **keywords)
    assert watchdog.process is None
    assert watchdog.launch_command(["sleep", "60"]).poll() is None
    assert watchdog.stop() == -15


class Neither:
    """No interface at all."""


class Half:
    """One half of an interface."""

    exitcode = None


@pytest.mark.parametrize(
    ("error", "words", "process"),
    [
        (TypeError, "Neither", Neither()),
        (TypeError, "Half", Half()),
        (TypeError, "None", None),
        (TypeError, "4127", 4127),
        (ValueError, "never started", multiprocessing.Process(target=print)),
    ],
)
def test_watch(error, words, process):
    """A handle that cannot be watched."""
    watchdog = ProcessWatchdog("adopted")
    with pytest.raises(error, match=words):
        watchdog.watch(process)
    assert not watchdog.armed


@pytest.mark.parametrize("timeout", [-1, math.nan, math.inf])
def test_stop(timeout):
    """A time-out that is none."""
    with pytest.raises(ValueError, match=str(timeout)):
        ProcessWatchdog("sampler").stop(timeout)


def test_no_thread_left(monkeypatch):
    """The system refuses a thread: the error reaches the caller and the server does not stay."""
    import threading

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    before = psutil.Process().children()
    watchdog = ProcessWatchdog("sampler")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            watchdog.launch(targets.sleep, context="fork")
        with pytest.raises(RuntimeError, match="can't start new thread"):
            watchdog.launch_command(["sleep", "60"])
    assert psutil.Process().children() == before
    assert "SIDECAR_WATCHDOG_OWNERS" not in os.environ
    assert watchdog.launch(targets.sleep, context="fork").is_alive()
    watchdog.stop()


def test_no_descriptor_left(monkeypatch):
    """EMFILE before anything was started."""

    def refuse() -> None:
        raise OSError(24, "Too many open files")

    watchdog = ProcessWatchdog("sampler")
    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            watchdog.launch(targets.sleep, context="fork")
    assert not multiprocessing.active_children()
    assert watchdog.launch(targets.sleep, context="fork").is_alive()
    watchdog.stop()
