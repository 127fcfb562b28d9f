"""sidecar-watchdog: when an auxiliary server dies, the job that waits for it ends at once, and says why.

The floors, each importing only from those below it: process (the tool) - watching (the loop) - abort (the only way
out), server (what runs in the server before its target) - handles, record, rank, diagnosis - linux (system calls) -
death, errors, arguments (values). Nothing below needs this file.
"""

from watchdog.abort import abort, interrupt
from watchdog.death import Cause, Death, Exited, Lost, Signalled
from watchdog.errors import ServerDied
from watchdog.process import ProcessWatchdog

__all__ = [
    "Cause",
    "Death",
    "Exited",
    "Lost",
    "ProcessWatchdog",
    "ServerDied",
    "Signalled",
    "abort",
    "interrupt",
]
