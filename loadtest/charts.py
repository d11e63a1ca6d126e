"""Charts as data, and as SVG without any library, so that a report is one file that any browser opens."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

Point = tuple[float, float]

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 34, 46
COLOURS = ("#2563a8", "#c2541b", "#3d8a4d", "#7a4fa3", "#6b7280")
MAX_TICKS = 7
MAX_POINTS = 2000
"""Points drawn of one series; more would make the page heavy and show no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    points: Sequence[Point]
    kind: Literal["line", "dots"] = "line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One plot of values that are never negative. On a logarithmic axis only those above zero are drawn."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    is_x_log: bool = False
    is_y_log: bool = False
    limit: float | None = None  # a horizontal line: the target
    bands: Sequence[tuple[float, float]] = field(default=())  # shaded stretches of the x axis


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values of low to high onto pixels of start to end."""

    low: float
    high: float
    is_log: bool
    start: float
    end: float

    def at(self, value: float) -> float:
        if self.is_log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        return _log_ticks(self.low, self.high) if self.is_log else _linear_ticks(self.low, self.high)


def drawable(chart: Chart) -> list[Series]:
    """The chart's series, thinned, less what its axes cannot show."""
    kept = []
    for series in chart.series:
        points = [
            (x, y)
            for x, y in series.points
            if math.isfinite(x) and math.isfinite(y) and (x > 0 or not chart.is_x_log) and (y > 0 or not chart.is_y_log)
        ]
        stride = max(1, math.ceil(len(points) / MAX_POINTS))
        kept.append(Series(name=series.name, points=points[::stride], kind=series.kind))
    return kept


def svg(chart: Chart) -> str:
    """Return the chart as an SVG element."""
    all_series = drawable(chart)
    points = [point for series in all_series for point in series.points]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(chart.title)}"><text class="title" x="{LEFT}" y="18">{escape(chart.title)}</text>'
    )
    if not points:
        return f'{head}<text x="{LEFT}" y="{HEIGHT // 2}">nothing to show</text></svg>'
    limits = [] if chart.limit is None else [chart.limit]
    x_axis = _axis([x for x, _ in points], chart.is_x_log, LEFT, WIDTH - RIGHT)
    y_axis = _axis([y for _, y in points] + limits, chart.is_y_log, HEIGHT - BOTTOM, TOP)
    parts = [head, *_bands(chart, x_axis), *_grid(chart, x_axis, y_axis)]
    if chart.limit is not None:
        y = y_axis.at(chart.limit)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for number, series in enumerate(all_series):
        colour = COLOURS[number % len(COLOURS)]
        parts.append(_marks(series, x_axis, y_axis, colour))
        # Right-aligned in one row, the last series outermost.
        x = WIDTH - RIGHT - 150 * (len(all_series) - 1 - number)
        parts.append(f'<text x="{x}" y="18" text-anchor="end" fill="{colour}">{escape(series.name)}</text>')
    return "".join(parts) + "</svg>"


def _axis(values: list[float], is_log: bool, start: float, end: float) -> _Axis:
    low, high = min(values), max(values)
    if is_log:
        return _Axis(low / 1.1, high * 1.1, True, start, end)
    return _Axis(0.0, high * 1.04 or 1.0, False, start, end)


def _bands(chart: Chart, x_axis: _Axis) -> list[str]:
    parts = []
    for begin, end in chart.bands:
        left = max(LEFT, x_axis.at(max(begin, x_axis.low)))
        right = min(WIDTH - RIGHT, x_axis.at(min(max(end, x_axis.low), x_axis.high)))
        if right > left:
            parts.append(
                f'<rect class="band" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" '
                f'height="{HEIGHT - BOTTOM - TOP}"/>'
            )
    return parts


def _grid(chart: Chart, x_axis: _Axis, y_axis: _Axis) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in x_axis.ticks():
        x = x_axis.at(tick)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in y_axis.ticks():
        y = y_axis.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(chart.x_label)}</text>'
    )
    parts.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{escape(chart.y_label)}</text>'
    )
    return parts


def _marks(series: Series, x_axis: _Axis, y_axis: _Axis, colour: str) -> str:
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in series.points]
    if series.kind == "dots":
        return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" fill="{colour}"/>' for x, y in places)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<polyline fill="none" stroke="{colour}" stroke-width="1.6" points="{path}"/>'


def _linear_ticks(low: float, high: float) -> list[float]:
    rough = (high - low) / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first = math.ceil(low / step)
    return [round(index * step, 12) for index in range(first, math.floor(high / step) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1,)):
        ticks = [round(10.0**power * factor, 12) for power in powers for factor in factors]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= MAX_TICKS + 3:
            break
    return ticks or [low, high]
