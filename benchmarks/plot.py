"""The plot of all ratios."""

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.measure import BEST

SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "sweepgrad", "font.size": 9}
"""Text stays text, and equal figures give equal files."""
LEAST = 0.01
"""Ratios below are drawn here, so that one does not squeeze all others."""
TICK = {"marker": "|", "markersize": 11, "markeredgewidth": 2, "linestyle": "none"}
DOT = {"marker": "o", "markersize": 5, "linestyle": "none", "alpha": 0.8}


def plot(path, sections):
    """Draw every ratio as a dot and every target as a tick, on a logarithmic axis, and save it at `path`."""
    with mpl.rc_context(SETTINGS):
        figure = Figure(layout="constrained")
        axes = figure.add_subplot()
        labels, headings = _draw(axes, sections)
        axes.axvline(1, color="grey", linewidth=0.8)
        axes.set(xscale="log", xlabel="sweepgrad's figure / the peer's: left of 1, sweepgrad is faster or smaller")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.grid(axis="x", alpha=0.3)
        axes.set_yticks(range(len(labels)), labels)
        for k in headings:
            axes.get_yticklabels()[k].set_fontweight("bold")
        axes.set_ylim(len(labels) - 0.5, -0.5)
        figure.legend(loc="outside upper center", ncols=9, frameon=False)
        figure.set_size_inches(11, 1.2 + 0.2 * len(labels))
        figure.savefig(path, metadata={"Date": None})


def _draw(axes, sections):
    """The dots and ticks; returns the labels of all lines, and which of them are headings."""
    colours, labels, headings = {}, [], []
    for section in sections:
        lines = {label: [row for row in found.values() if row.ratio] for label, found in section.lines().items()}
        lines = {label: rows for label, rows in lines.items() if rows}
        if lines:
            headings.append(len(labels))
            labels.append(section.heading)
        for label, rows in lines.items():
            for row in rows:
                if row.contender == BEST:
                    colour = "black"
                else:
                    colour = colours.setdefault(row.contender, f"C{len(colours)}")
                    axes.plot(max(row.ratio, LEAST), len(labels), color=colour, **DOT)
                if row.target is not None:
                    axes.plot(row.target, len(labels), color=colour, **TICK)
            labels.append(label)
    for name, colour in colours.items():
        axes.plot([], [], color=colour, label=name, **DOT)
    axes.plot([], [], color="black", label="target (black: to the best)", **TICK)
    return labels, headings
