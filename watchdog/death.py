"""Ground floor: how a watched process ended, as a value. Standard library only.

A status that nobody can tell any more is a value of its own (`Lost`), never a stand-in number: a crash must not
pass for a success because somebody else took its exit status.
"""

from __future__ import annotations

import enum
import signal as _signal
from typing import Any, Literal, Optional, Union

__all__ = ["Cause", "Death", "Exited", "Lost", "Signalled", "Status", "exitcode", "signal_name"]


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals, which have no name of their own, as `signal 37`."""
    try:
        return _signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Value:
    """Immutable, and equal to what is of the same class with the same fields.

    As a frozen dataclass would be. That module brings `inspect` with it, at a price: what a rank has in its memory is
    torn down between the death of a server and the end of the rank.
    """

    __slots__: tuple[str, ...] = ()

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: {name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._values() == other._values()  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in zip(self.__slots__, self._values()))
        return f"{type(self).__name__}({fields})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._values()

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, name) for name in self.__slots__)

    def _set(self, *values: object) -> None:
        for name, value in zip(self.__slots__, values):
            object.__setattr__(self, name, value)


class Exited(Value):
    """The process left by itself with `code` (0 to 255)."""

    __slots__ = ("code",)
    code: int

    def __init__(self, code: int) -> None:
        self._set(code)

    def __str__(self) -> str:
        return f"exited with code {self.code}"


class Signalled(Value):
    """The process was ended by `signal` (a positive number); `core_dumped` is what the kernel said of a core."""

    __slots__ = ("signal", "core_dumped")  # noqa: RUF023 - in the order of the constructor
    signal: int
    core_dumped: bool

    def __init__(self, signal: int, core_dumped: bool = False) -> None:
        self._set(signal, core_dumped)

    def __str__(self) -> str:
        core = ", core dumped" if self.core_dumped else ""
        return f"killed by {signal_name(self.signal)} (exit code -{self.signal}){core}"


class Lost(Value):
    """The process is gone, and how it ended cannot be learnt: somebody else took its status."""

    __slots__ = ()

    def __str__(self) -> str:
        return "exit status unavailable"


Status = Union[Exited, Signalled, Lost]
Certainty = Literal["certain", "likely", "possible"]


def exitcode(status: Status) -> Optional[int]:
    """See `Death.exitcode`."""
    if isinstance(status, Exited):
        return status.code
    return -status.signal if isinstance(status, Signalled) else None


class Cause(enum.Enum):
    """What a death follows from, as far as the evidence goes. The values are the words of the report."""

    OUT_OF_MEMORY = "out of memory"
    SHARED_MEMORY = "shared memory"
    EXCEPTION = "exception"
    SIGNAL = "signal"
    EXIT = "exit"
    LOST = "lost"


# These causes add something to the status; the others only repeat it, so the report gives them no line.
_CONCLUSIONS = (Cause.OUT_OF_MEMORY, Cause.SHARED_MEMORY, Cause.EXCEPTION)


class Death(Value):
    """The end of a watched process: what was observed, and what follows from it.

    `pid` is None where the handle has none; `uptime` is in seconds since the launch (or, for an adopted handle,
    since the watching began), None where unknown. `evidence` holds one sentence an item; of a `Lost` status the
    first says why it is lost. `traceback` is the server's own last exception, None if it left none.
    `others` are servers found dead at the same moment, each with a status of its own.
    """

    __slots__ = (  # noqa: RUF023 - in the order of the constructor
        "name",
        "pid",
        "status",
        "uptime",
        "cause",
        "certainty",
        "evidence",
        "traceback",
        "stderr_tail",
        "others",
    )
    name: str
    pid: Optional[int]
    status: Status
    uptime: Optional[float]
    cause: Cause
    certainty: Certainty
    evidence: tuple[str, ...]
    traceback: Optional[str]
    stderr_tail: tuple[str, ...]
    others: tuple[Death, ...]

    def __init__(
        self,
        name: str,
        pid: Optional[int],
        status: Status,
        uptime: Optional[float] = None,
        cause: Cause = Cause.LOST,
        certainty: Certainty = "certain",
        evidence: tuple[str, ...] = (),
        traceback: Optional[str] = None,
        stderr_tail: tuple[str, ...] = (),
        others: tuple[Death, ...] = (),
    ) -> None:
        self._set(name, pid, status, uptime, cause, certainty, evidence, traceback, stderr_tail, others)

    def with_others(self, others: tuple[Death, ...]) -> Death:
        """The same death, and what else was found dead."""
        fields = dict(zip(self.__slots__, self._values()), others=others)
        return Death(**fields)

    @property
    def exitcode(self) -> int | None:
        """As `multiprocessing` has it: the code, or the negative signal number; None if the status is lost."""
        return exitcode(self.status)

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready: the field names as keys, the status with its `kind`, enums by name."""
        status: dict[str, Any] = {"kind": type(self.status).__name__.lower()}
        status.update({name: getattr(self.status, name) for name in self.status.__slots__})
        return {
            "name": self.name,
            "pid": self.pid,
            "status": status,
            "uptime": self.uptime,
            "cause": self.cause.name,
            "certainty": self.certainty,
            "evidence": list(self.evidence),
            "traceback": self.traceback,
            "stderr_tail": list(self.stderr_tail),
            "others": [other.as_dict() for other in self.others],
        }

    def __str__(self) -> str:
        """The report: its first line is what was observed, later lines what follows and how surely."""
        return "\n".join([*self._lines(), *_indented("also found dead: ", self.others)])

    def _lines(self) -> list[str]:
        evidence = list(self.evidence)
        what = str(self.status)
        if isinstance(self.status, Lost) and evidence:
            what += f" ({evidence.pop(0)})"
        elif self.status == Exited(0):
            what += " while still watched"
        who = self.name if self.pid is None else f"{self.name} (pid {self.pid})"
        when = "" if self.uptime is None else f" after {self.uptime:.1f} s"
        lines = [f"{who} died{when}: {what}"]
        if self.cause in _CONCLUSIONS and evidence:
            surely = "" if self.certainty == "certain" else f"{self.certainty} "
            label = "" if self.cause is Cause.EXCEPTION else f"{self.cause.value}: "
            lines.append(f"  {surely}cause: {label}{evidence.pop(0)}")
        lines += [f"  {line}" for line in evidence]
        lines += _quoted("its traceback", self.traceback.splitlines() if self.traceback else ())
        lines += _quoted("last lines of its stderr", self.stderr_tail)
        return lines


def _quoted(title: str, text: tuple[str, ...] | list[str]) -> list[str]:
    return [f"  {title}:", *(f"    | {line}" for line in text)] if text else []


def _indented(title: str, deaths: tuple[Death, ...]) -> list[str]:
    lines = []
    for death in deaths:
        first, *rest = death._lines()
        lines += [f"  {title}{first}", *(f"  {line}" for line in rest)]
    return lines
