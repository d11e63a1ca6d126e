"""Plots that a browser and a picture viewer can show."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.charts import MAX_POINTS, Chart, Series, drawable, svg
from loadtest.plots import NUM_SLICES, cdf, timeline
from loadtest.png import write_png

NUMBERS = st.just(0.0) | st.floats(1e-6, 1e12) | st.sampled_from([float("nan"), float("inf")])
SVG = "{http://www.w3.org/2000/svg}"


@given(
    points=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20),
    is_x_log=st.booleans(),
    is_y_log=st.booleans(),
    limit=st.none() | st.floats(0.1, 1000),
)
def test_any_points_make_well_formed_svg_within_its_frame(
    points: list[tuple[float, float]], is_x_log: bool, is_y_log: bool, limit: float | None
) -> None:
    series = [Series(name="<a & b>", points=points, kind="dots")]
    chart = Chart(
        title="<&>", x_label="x", y_label="y", series=series, is_x_log=is_x_log, is_y_log=is_y_log, limit=limit
    )
    circles = list(ElementTree.fromstring(svg(chart)).iter(f"{SVG}circle"))

    assert len(circles) == len(drawable(chart)[0].points)
    for circle in circles:
        assert 0 <= float(circle.attrib["cx"]) <= 720
        assert 0 <= float(circle.attrib["cy"]) <= 320


def test_a_series_is_thinned_to_what_a_page_can_carry() -> None:
    series = Series(name="a", points=[(float(i), 1.0) for i in range(50_000)])

    (thinned,) = drawable(Chart(title="", x_label="", y_label="", series=[series]))
    assert MAX_POINTS / 2 <= len(thinned.points) <= MAX_POINTS


def test_a_timeline_loses_no_stall() -> None:
    gaps = [(index / 1000, 10.0) for index in range(100_000)]
    gaps[77_777] = (77.777, 900.0)

    largest, median = timeline(gaps)
    assert max(y for _, y in largest.points) == 900.0
    assert {y for _, y in median.points} == {10.0}
    assert len(largest.points) <= NUM_SLICES


def test_a_cdf_rises_from_the_least_to_the_largest() -> None:
    points = cdf([5.0, 1.0, 3.0])

    assert points == sorted(points)
    assert (points[0], points[-1]) == ((1.0, 0.0), (5.0, 1.0))


def test_charts_can_be_written_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    charts = [
        Chart(title="a", x_label="x", y_label="y", series=[Series(name="s", points=[(1, 2), (3, 4)])], limit=3.0),
        Chart(
            title="b",
            x_label="x",
            y_label="y",
            series=[Series(name="s", points=[(1, 2)], kind="dots")],
            is_x_log=True,
            is_y_log=True,
            bands=[(0.5, 2.0)],
        ),
    ]
    path = tmp_path / "plots.png"
    write_png(path, charts)

    assert path.read_bytes().startswith(b"\x89PNG\r\n")
