"""Charts as a PNG picture, through matplotlib where it is installed."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.charts import COLOURS, Chart, drawable

MAX_LOG_TICKS = 20


def check_png() -> None:
    """Raises ValueError if no PNG can be written here."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--png needs matplotlib: install legato[load]")


def write_png(path: Path, charts: Sequence[Chart]) -> None:
    """Write all charts below one another.

    Raises:
        OSError: If the file cannot be written.
    """
    # By name: the package is optional, and type checkers must not depend on its being there.
    figure_module: Any = importlib.import_module("matplotlib.figure")
    figure = figure_module.Figure(figsize=(9, 3.6 * len(charts)), dpi=110, layout="constrained")
    axes = figure.subplots(len(charts), 1, squeeze=False)[:, 0]
    for chart, axis in zip(charts, axes, strict=True):
        _draw(chart, axis)
    figure.savefig(path, format="png")


def _draw(chart: Chart, axis: Any) -> None:
    axis.set_title(chart.title, loc="left")
    axis.set_xlabel(chart.x_label)
    axis.set_ylabel(chart.y_label)
    axis.grid(alpha=0.3)
    for number, series in enumerate(drawable(chart)):
        xs, ys = [x for x, _ in series.points], [y for _, y in series.points]
        mark = {"marker": ".", "linestyle": ""} if series.kind == "dots" else {}
        axis.plot(xs, ys, color=COLOURS[number % len(COLOURS)], label=series.name, **mark)
    if chart.is_x_log:
        axis.set_xscale("log")
        _write_out(axis.xaxis)
    if chart.is_y_log:
        axis.set_yscale("log")
        _write_out(axis.yaxis)
    else:
        axis.set_ylim(bottom=0)  # As in the page: a gap that is cut off at its foot looks larger than it is.
    if chart.limit is not None:
        axis.axhline(chart.limit, color="#b91c1c", linestyle="--", linewidth=1)
    for begin, end in chart.bands:
        axis.axvspan(begin, end, color="#000000", alpha=0.07)
    axis.legend(loc="best", frameon=False)


def _write_out(axis: Any) -> None:
    """Ticks of a logarithmic axis as plain numbers, at one, two and five of each decade, whatever its width."""
    ticker: Any = importlib.import_module("matplotlib.ticker")
    axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5), numticks=MAX_LOG_TICKS))
    axis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())
