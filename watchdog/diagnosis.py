"""From evidence to cause: a pure function. Standard library and the ground floor only."""

from __future__ import annotations

from typing import NamedTuple

from watchdog.death import Cause, Death, Exited, Lost, Signalled, Status, signal_name

__all__ = ["Evidence", "diagnose"]


class Evidence(NamedTuple):
    """What was collected about one ended process. Each field's default means "unknown"."""

    traceback: str | None = None  # of the server's last exception, as it wrote it itself
    entered: bool | None = None  # whether the server's target was reached
    loss: str = "the handle tells no code"  # why the status is lost, if it is


def diagnose(name: str, pid: int | None, status: Status, uptime: float | None, evidence: Evidence) -> Death:
    """A Death that claims what the evidence shows, and no more."""
    cause, sentences = _cause(status, evidence)
    if evidence.entered is False:
        sentences.append("it died while starting: its target had not been entered")
    return Death(
        name=name,
        pid=pid,
        status=status,
        uptime=uptime,
        cause=cause,
        evidence=tuple(sentences),
        traceback=evidence.traceback,
    )


def _cause(status: Status, evidence: Evidence) -> tuple[Cause, list[str]]:
    if isinstance(status, Lost):
        return Cause.LOST, [evidence.loss]
    if isinstance(status, Signalled):
        # A traceback that stands beside a signal is older than the signal and explains nothing by itself.
        return Cause.SIGNAL, []
    if evidence.traceback and status.code != 0:
        return Cause.EXCEPTION, [_last_line(evidence.traceback)]
    return Cause.EXIT, _wrapped_signal(status)


def _last_line(traceback: str) -> str:
    """The line that names the exception: the last one that is not indented, or the last at all."""
    lines = traceback.rstrip().splitlines()
    flush = [line for line in lines if line and not line[0].isspace()]
    return (flush or lines)[-1]


def _wrapped_signal(status: Exited) -> list[str]:
    """Shells and wrappers turn a signal of their inner program into 128+n; so may any program by itself."""
    number = status.code - 128
    if not 1 <= number <= 64:
        return []
    return [f"exit code {status.code} (possibly 128+{number} from a wrapper, whose program got {signal_name(number)})"]
