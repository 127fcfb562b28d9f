"""The latencies as a picture: one strip a peer and condition, on a logarithmic axis. Needs matplotlib."""

from __future__ import annotations

import statistics
from pathlib import Path

from latency import OURS, Result

# Of one size and colour for the eye, and told apart without colour by the fill.
_COLOURS = {True: "#c0392b", False: "#34495e"}  # ours, and the others


def draw(result: Result, path: Path) -> None:
    """Write an SVG to `path`. Raises ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("svg")
    # Text stays text, and the same figures make the same file.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "latency", "font.size": 10})
    from matplotlib import pyplot as plt

    series = list(reversed(result.series))
    figure, axes = plt.subplots(figsize=(9, 0.42 * len(series) + 1.2), layout="constrained")
    for place, one in enumerate(series):
        values = [latency * 1e3 for latency in one.latencies.values()]
        colour = _COLOURS[one.peer.name == OURS]
        # Spread by the round's number, so that dots do not hide one another.
        places = [place + (number % 7 - 3) * 0.07 for number in one.latencies]
        fill = colour if one.condition == "idle" else "none"
        axes.scatter(values, places, s=14, facecolors=fill, edgecolors=colour, linewidths=0.8, alpha=0.7)
        median = statistics.median(values)
        axes.plot([median, median], [place - 0.36, place + 0.36], color=colour, linewidth=2)
    axes.set_yticks(range(len(series)), [one.label.replace("`", "") for one in series])
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(
        "ms from SIGKILL of the server to the end of the rank\n(bar: median; hollow: the main thread spins)"
    )
    axes.grid(visible=True, axis="x", which="major", linewidth=0.5, alpha=0.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
