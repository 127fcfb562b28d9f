"""The launcher's error file: how torchrun's summary comes to name our reason. Standard library only.

The schema is that of `torch.distributed.elastic.multiprocessing.errors` (`ErrorHandler.record_exception`). Its summary
prints `py_callstack` where there is one, so the report stands there. The launcher takes the failure with the oldest
timestamp, in whole seconds, for the root cause; it dies itself of a file that is no JSON or lacks a field.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress

from watchdog.death import Death

__all__ = ["ERROR_FILE", "write_error_file"]

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_LARGEST = 2**22  # characters of a file that is looked into; what is longer counts as unreadable


def write_error_file(death: Death, report: str, died_at: float) -> None:
    """Leave `report` where the launcher looks for the reason of our exit.

    `died_at` is in seconds since the epoch: the time of the death, not of its discovery. Nothing is written where the
    launcher named no file (also an empty name, which means no log folder), and a file that tells an older failure
    stands. Raises OSError if the file cannot be written; a file that is there is then as it was.

    From then on this process has no error file: a main thread that fails in these last milliseconds, inside
    torchelastic's `@record`, would write its own failure over ours.
    """
    path = os.environ.pop(ERROR_FILE, "")
    if not path or _tells_an_older_failure(path, died_at):
        return
    content = {
        "message": {
            "message": f"ServerDied: {str(death).splitlines()[0]}",
            "extraInfo": {"py_callstack": report, "timestamp": str(int(died_at))},
        },
        "event": death.as_dict(),
    }
    # In one step: the launcher may read at any moment, and we may be killed at any moment.
    temporary = f"{path}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(content, file)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _tells_an_older_failure(path: str, died_at: float) -> bool:
    """A file that the launcher could not read does not count, and neither does one with a later time."""
    try:
        with open(path, encoding="utf-8") as file:
            content = json.loads(file.read(_LARGEST))
        message = content["message"]
        timestamp = message["extraInfo"]["timestamp"] if isinstance(message, dict) else content.get("timestamp", 0)
        return int(timestamp) <= int(died_at)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False
