"""A rank of the latency benchmark: `peers.py PEER idle|spinning`. Says `server PID`, then waits for its death.

Each peer is what one would write with that tool: the server is started, its death is noticed, and the rank leaves with
code 1 by `os._exit`.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, Callable

LIFETIME = 600  # seconds, for the server and for the rank


def wait(server: int | None, condition: str) -> None:
    """The main thread, while others watch: blocked in a C call as in a fetch, or busy with Python code."""
    print(f"server {server}", flush=True)
    if condition == "spinning":
        while True:
            pass
    left, _right = socket.socketpair()
    left.recv(1)


def watchdog(condition: str) -> None:
    """Ours, with its defaults and with logging as it is: nobody has configured it."""
    from watchdog.process import ProcessWatchdog

    process = ProcessWatchdog("sampler").launch(time.sleep, (LIFETIME,))
    assert process is not None
    wait(process.pid, condition)


def _plain_server() -> multiprocessing.Process:
    process = multiprocessing.Process(target=time.sleep, args=(LIFETIME,), daemon=True)
    process.start()
    return process


def thread(condition: str) -> None:
    """The least that Python can do: a thread that waits for a pidfd and leaves without a word."""
    process = _plain_server()
    assert process.pid is not None
    poll = select.poll()
    poll.register(os.pidfd_open(process.pid), select.POLLIN)

    def leave() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
    wait(process.pid, condition)


def _polling(period: float) -> Callable[[str], None]:
    def polling(condition: str) -> None:
        process = _plain_server()

        def leave() -> None:
            # The death comes at any moment of a period.
            time.sleep(random.uniform(0, period))
            while process.is_alive():
                time.sleep(period)
            os._exit(1)

        threading.Thread(target=leave, daemon=True).start()
        wait(process.pid, condition)

    return polling


def _pool(executor: Any) -> None:
    from concurrent.futures.process import BrokenProcessPool

    server = executor.submit(os.getpid).result()
    future = executor.submit(time.sleep, LIFETIME)
    print(f"server {server}", flush=True)
    try:
        future.result()
    except BrokenProcessPool:
        os._exit(1)


def futures(_condition: str) -> None:
    """The standard library's pool: the main thread waits for a result, and gets an exception."""
    from concurrent.futures import ProcessPoolExecutor

    _pool(ProcessPoolExecutor(1))


def loky(_condition: str) -> None:
    """The same with joblib's pool."""
    from loky import ProcessPoolExecutor

    _pool(ProcessPoolExecutor(1))


def dataloader(_condition: str) -> None:
    """The loader of torch: the main thread waits for a batch, and gets an exception from a SIGCHLD handler."""
    from torch.utils.data import DataLoader, IterableDataset

    class Endless(IterableDataset[int]):  # type: ignore[misc, unused-ignore]
        def __iter__(self) -> Iterator[int]:
            yield 0
            time.sleep(LIFETIME)

    batches: Any = iter(DataLoader(Endless(), batch_size=None, num_workers=1))
    next(batches)
    print(f"server {batches._workers[0].pid}", flush=True)
    try:
        next(batches)
    except RuntimeError:
        os._exit(1)


PEERS: dict[str, Callable[[str], None]] = {
    "watchdog": watchdog,
    "thread": thread,
    "futures": futures,
    "loky": loky,
    "dataloader": dataloader,
    "poll 1 s": _polling(1.0),
    "poll 10 s": _polling(10.0),
}

if __name__ == "__main__":
    signal.alarm(LIFETIME)  # the default action ends this process, whatever its threads do
    PEERS[sys.argv[1]](sys.argv[2])
