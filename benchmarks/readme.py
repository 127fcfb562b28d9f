"""Put figures between the marks of a README."""

from __future__ import annotations

from pathlib import Path

BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"


def replaced(text: str, figures: str) -> str:
    """`text` with `figures` between its marks. Raises ValueError if it has not each of them once and in order."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in before + after:
        raise ValueError(f"the text needs one {BEGIN} and, behind it, one {END}")
    return f"{before}{BEGIN}\n\n{figures.strip()}\n\n{END}{after}"


def update(path: Path, figures: str) -> None:
    """Do it in the file at `path`."""
    path.write_text(replaced(path.read_text(encoding="utf-8"), figures), encoding="utf-8")
