"""sidecar-watchdog: when an auxiliary server dies, the job that waits for it ends at once, and says why.

The floors, each importing only from those below it: process, parent (the tools) - watching (the loop), server (what
runs in the server before its target) - abort (the only way out) - handles, record, rank, diagnosis, torchelastic -
linux (system calls), delivery (of a report to the log) - death, errors, arguments, bounded. Nothing below needs this
file.
"""

from watchdog.abort import abort, interrupt
from watchdog.death import Cause, Death, Exited, Lost, Signalled
from watchdog.errors import ServerDied
from watchdog.parent import ParentWatchdog, exit_with_parent
from watchdog.process import ProcessWatchdog

__all__ = [
    "Cause",
    "Death",
    "Exited",
    "Lost",
    "ParentWatchdog",
    "ProcessWatchdog",
    "ServerDied",
    "Signalled",
    "abort",
    "exit_with_parent",
    "interrupt",
]
