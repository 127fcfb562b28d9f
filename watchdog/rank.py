"""Which process may launch: the local rank, and the mark that an owner leaves for its children."""

from __future__ import annotations

import json
import os
import re
import sys
from multiprocessing import process as _process
from typing import Any

from watchdog import linux

__all__ = [
    "local_rank",
    "mark_owner",
    "marked",
    "owner_above",
    "refuse_green_threads",
    "refuse_missing_main_guard",
    "unmark_owner",
]

_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_MARK = "SIDECAR_WATCHDOG_OWNERS"  # JSON: {name: [pid, start time, torchelastic run id]}
_RUN_ID = "TORCHELASTIC_RUN_ID"


def local_rank() -> int:
    """The local rank of this process: the first variable that is set, else 0.

    `''` and `-1` ("not distributed") count as unset; blanks around a number are of no matter. Raises ValueError for
    anything else that is no decimal integer.
    """
    for variable in _VARIABLES:
        value = os.environ.get(variable, "").strip()
        if value in ("", "-1"):
            continue
        if not re.fullmatch("[0-9]+", value):
            raise ValueError(f"{variable}={os.environ[variable]!r} is no local rank: a decimal integer is expected")
        return int(value)
    return 0


def mark_owner(name: str) -> None:
    """Tell the children of this process, through the environment, that it owns the server `name`."""
    _owned[name] = [os.getpid(), linux.start_time(os.getpid()), os.environ.get(_RUN_ID)]
    _publish()


def unmark_owner(name: str) -> None:
    """Take the mark back."""
    if _owned.pop(name, None) is not None:
        _publish()


def marked(environment: dict[str, str]) -> dict[str, str]:
    """`environment` with our marks, for a child that does not get ours."""
    if _MARK in os.environ:
        environment[_MARK] = os.environ[_MARK]
    return environment


def owner_above(name: str) -> str | None:
    """Why this process is to leave the server `name` to the process that it comes from; None if it may launch.

    A DataLoader worker that runs the training script again must start nothing. The mark counts while its owner lives,
    and in the same torchelastic run.
    """
    owner = _marks().get(name)
    if owner is not None:
        pid, start_time, run_id = owner
        if pid != os.getpid() and run_id == os.environ.get(_RUN_ID) and linux.exists(pid, start_time):
            return f"process {pid} owns it"
    # The children of a fork server have the environment of the time when that was started, perhaps before the mark.
    parent = _process.parent_process()
    if parent is not None and parent.pid is not None and linux.holds_memfd(parent.pid, linux.server_memfd(name)):
        return f"process {parent.pid} owns it"
    if getattr(_process.current_process(), "_inheriting", False):
        # A child of multiprocessing that is importing the main script: whoever started it ran this line before.
        return "this is a child process that imports the main script"
    return None


def refuse_missing_main_guard(name: str) -> None:
    """In the server itself, which imports the main script anew: going on would run the training there."""
    current = _process.current_process()
    if current.name == name and getattr(current, "_inheriting", False):
        raise RuntimeError(
            f"{name}: launch was reached while the server's process imported the main script; "
            "put the script's body under: if __name__ == '__main__':"
        )


def refuse_green_threads() -> None:
    """A green thread would not notice a death while another one blocks."""
    gevent, eventlet = sys.modules.get("gevent.monkey"), sys.modules.get("eventlet.patcher")
    if (gevent is not None and gevent.is_module_patched("threading")) or (
        eventlet is not None and eventlet.is_monkey_patched("thread")
    ):
        raise RuntimeError(
            "threads are replaced in this process (gevent or eventlet monkey patching), and a green thread would not "
            "notice a death while another one blocks: leave threads unpatched, with patch_all(thread=False)"
        )


# Of this process: {name: [pid, start time, torchelastic run id]}. In a forked copy the pids are another's, as they
# should be: the copy hands the marks on.
_owned: dict[str, list[Any]] = {}


def _publish() -> None:
    # No lock, which could be held at a fork. Who was overtaken by another thread sees it, and writes again.
    while True:
        text = _text()
        if text == "{}":
            os.environ.pop(_MARK, None)
        else:
            os.environ[_MARK] = text
        if text == _text():
            return


def _text() -> str:
    inherited = {name: owner for name, owner in _marks().items() if owner[0] != os.getpid()}
    return json.dumps({**inherited, **dict(_owned)})


def _marks() -> dict[str, list[Any]]:
    try:
        owners = json.loads(os.environ.get(_MARK, "{}"))
        return {
            name: entry
            for name, entry in owners.items()
            if isinstance(entry, list) and len(entry) == 3 and type(entry[0]) is int and 0 < entry[0] < 2**31
        }
    except (ValueError, AttributeError):
        return {}  # not written by us
