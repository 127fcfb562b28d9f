"""What the servers of the tests do. At module level, so that spawned servers find them."""

from __future__ import annotations

import os
import signal
import sys
import time


def hello() -> None:
    sys.stdout.write(f"server {os.getpid()}\n")
    sys.stdout.flush()


def sleep(seconds: float = 60.0) -> None:
    hello()
    time.sleep(seconds)


def ignore_term(seconds: float = 60.0) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hello()
    time.sleep(seconds)


def slow_term(seconds: float) -> None:
    """Takes its time to end by SIGTERM, and ends with 0."""

    def end(*_: object) -> None:
        time.sleep(seconds)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    hello()
    time.sleep(60)


def leave(code: object, after: float = 0.0) -> None:
    hello()
    time.sleep(after)
    sys.exit(code)


def hard_exit(code: int) -> None:
    hello()
    os._exit(code)


def by_signal(number: int) -> None:
    hello()
    signal.signal(number, signal.SIG_DFL) if number not in (signal.SIGKILL, signal.SIGSTOP) else None
    os.kill(os.getpid(), number)
    time.sleep(60)


def fail(text: str) -> None:
    hello()
    raise ValueError(text)


def chained() -> None:
    hello()
    try:
        raise OSError("disk")
    except OSError as error:
        raise RuntimeError("cannot load the graph") from error


def show_handlers(path: str) -> None:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    sys.stdout.write(f"handlers {[signal.getsignal(number) for number in numbers]}\n")
    hello()
    open(path, "w").close()
    time.sleep(60)


def read_environment(*names: str) -> None:
    sys.stdout.write(f"environment {[os.environ.get(name) for name in names]}\n")
    hello()
    time.sleep(60)


class Unpicklable:
    def __reduce__(self) -> object:
        raise TypeError("this argument cannot be pickled")
