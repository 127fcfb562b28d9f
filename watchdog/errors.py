"""Ground floor: the exceptions this package raises beside the built-in ones."""

from __future__ import annotations

from watchdog.death import Death

__all__ = ["ServerDied"]


class ServerDied(RuntimeError):
    """A watched server died. `death` says how; the text is its report.

    Raised in the main thread by `watchdog.abort.interrupt`, which is the default in an interactive session.
    """

    def __init__(self, death: Death) -> None:
        super().__init__(death)
        self.death = death

    def __str__(self) -> str:
        return str(self.death)

    def __reduce__(self) -> tuple[type[ServerDied], tuple[Death]]:
        # `interrupt` raises a subclass made on the spot, which no other process could import.
        return ServerDied, (self.death,)
