"""A rank of the torchrun benchmark: `torchrun_rank.py watchdog|bare`, under torchrun.

Rank 0 has a sidecar, and waits for it as in a fetch; the others wait in an all-reduce for rank 0.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time

import torch
import torch.distributed as dist

LIFETIME = 600  # seconds, for the sidecar and for the rank


def sidecar(how: str) -> int | None:
    """Start it, and have this rank leave with code 1 once it is dead; returns its pid."""
    if how == "watchdog":
        from watchdog.process import ProcessWatchdog

        launched = ProcessWatchdog("sampler").launch(time.sleep, (LIFETIME,), context="fork")
        return None if launched is None else launched.pid

    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(LIFETIME,), daemon=True)
    process.start()
    assert process.pid is not None
    poll = select.poll()
    poll.register(os.pidfd_open(process.pid), select.POLLIN)

    def leave() -> None:
        poll.poll()
        os._exit(1)

    threading.Thread(target=leave, daemon=True).start()
    return process.pid


def main() -> None:
    """Connect the ranks, then wait for ever."""
    signal.alarm(LIFETIME)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    if dist.get_rank() == 0:
        pid = sidecar(sys.argv[1])
        sys.stdout.write(f"server {pid}\n")
        sys.stdout.flush()
        left, _right = socket.socketpair()
        left.recv(1)
    dist.all_reduce(torch.ones(1))


if __name__ == "__main__":
    main()
