"""A rank of the cost benchmark: measures itself, and says what it found as one line of JSON.

`cost_rank.py watch COUNT WINDOW` while COUNT watchdogs have nothing to do for WINDOW seconds; `cost_rank.py launch
ROUNDS` how long starting takes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import resource
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Callable

from watchdog.process import ProcessWatchdog

LIFETIME = 600  # seconds, for the servers and for this rank


def _tasks() -> dict[int, int]:
    """The context switches of each thread so far, by thread id."""
    tasks = {}
    for task in Path("/proc/self/task").iterdir():
        status = (task / "status").read_text(encoding="utf-8").splitlines()
        tasks[int(task.name)] = sum(int(line.split()[1]) for line in status if "_ctxt_switches:" in line)
    return tasks


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * resource.getpagesize() / 2**20


def watch(count: int, window: float) -> dict[str, float]:
    """What `count` watchdogs take, beyond what the rank had and did before."""
    # Each has a pidfd, a pipe and a page of shared memory; many systems allow 1024 descriptors.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    threads, descriptors, memory = len(_tasks()), len(os.listdir("/proc/self/fd")), _resident()
    started = []
    with ExitStack() as stack:
        for number in range(count):
            watchdog = stack.enter_context(ProcessWatchdog(f"server{number}"))
            before = time.monotonic()
            assert watchdog.launch_command(["sleep", str(LIFETIME)]) is not None
            started.append(time.monotonic() - before)
        time.sleep(min(1.0, window))  # the threads have had their first look
        tasks, before, busy = _tasks(), time.monotonic(), time.process_time()
        # One sleep, so that the main thread adds nothing to what is measured.
        time.sleep(window)
        busy, lasted, later = time.process_time() - busy, time.monotonic() - before, _tasks()
        switches = sum(later[task] - tasks[task] for task in later if task != os.getpid())
        found = {
            "cpu": busy / lasted,
            "switches": switches / lasted,
            "threads": len(later) - threads,
            "descriptors": len(os.listdir("/proc/self/fd")) - descriptors,
            "memory": _resident() - memory,
            "last launch": sum(started[-4:]) / max(1, len(started[-4:])),
        }
        # The end of the block stops one after the other, as the nested `with` of a program would.
        before = time.monotonic()
    found["stop"] = time.monotonic() - before
    return found


def _settle() -> None:
    """Wait, for a second at most, until the watch thread of the start before has ended, too."""
    deadline = time.monotonic() + 1.0
    while threading.active_count() > 1 and time.monotonic() < deadline:
        time.sleep(0.001)


def launch(rounds: int) -> dict[str, list[dict[str, float]]]:
    """Seconds that `launch` and `Process.start` took, by start method and round."""
    found: dict[str, list[dict[str, float]]] = {}
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)

        def ours(method: str = method) -> float:
            _settle()
            with ProcessWatchdog("server") as watchdog:
                before = time.monotonic()
                watchdog.launch(time.sleep, (LIFETIME,), context=method)
                return time.monotonic() - before

        def plain(context: multiprocessing.context.BaseContext = context) -> float:
            _settle()
            process = context.Process(target=time.sleep, args=(LIFETIME,), daemon=True)  # type: ignore[attr-defined]
            before = time.monotonic()
            process.start()
            lasted = time.monotonic() - before
            process.terminate()
            process.join()
            return lasted

        # The first start of a process pays for imports and for multiprocessing's helper.
        ours()
        plain()
        found[method] = []
        for _ in range(rounds):
            turn: list[tuple[str, Callable[[], float]]] = [("launch", ours), ("start", plain)]
            random.shuffle(turn)
            found[method].append({name: start() for name, start in turn})
    return found


if __name__ == "__main__":
    signal.alarm(LIFETIME)
    what, *numbers = sys.argv[1:]
    result = watch(int(numbers[0]), float(numbers[1])) if what == "watch" else launch(int(numbers[0]))
    print(json.dumps(result), flush=True)
