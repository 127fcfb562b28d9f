"""sidecar-watchdog: when an auxiliary server dies, the job that waits for it ends at once, and says why.

The floors, each importing only from those below it:
process (the tool) - watch (the loop) - abort (the only way out) - server, rank, record, handles - diagnosis, linux -
death, errors (values). Names are looked up when they are used, so that importing a module below costs no more than
that.
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
